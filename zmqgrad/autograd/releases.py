"""The end of contexts, and of passes in them: forgotten here at once, and soon wherever else they went.

Whoever leaves a context tells the workers that it exchanged messages of it with, and those pass it on. It
is told off the path of the next step, for all contexts that ended meanwhile in one message a peer, and again
until it is answered (:mod:`zmqgrad.rpc.telling`). A worker that dies takes its contexts along; those in which
it took part may have lost the way by which the end would be told, so whoever shared them with it asks their
makers, who then know of it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from zmqgrad.autograd.context import Context, Contexts
from zmqgrad.errors import RpcError, RpcTimeoutError, TransportError
from zmqgrad.rpc import telling
from zmqgrad.rpc.current import current_worker
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.future import Promise
from zmqgrad.transport.base import Inbound
from zmqgrad.wire.ids import split_id
from zmqgrad.wire.messages import (
    CleanupAutogradContextReq,
    CleanupAutogradContextResp,
    MessageType,
)

logger = logging.getLogger(__name__)

TELL_SECONDS = 0.01
"""The end of a context is told so long after, together with that of others: off the path of the next one."""


class Releases:
    """Tells other workers which contexts have ended, and hears it of them."""

    def __init__(self, worker: Worker, contexts: Contexts) -> None:
        self._worker = worker
        self._contexts = contexts
        self._closed = False
        self._untold: deque[tuple[set[int], int, Sequence[int] | None]] = deque()  # peers, context, passes
        self._about_to_tell = False
        self._telling = telling.Telling(worker)

    def install(self) -> None:
        """Fill the doors of the worker."""
        self._worker.doors.requests[MessageType.CLEANUP_AUTOGRAD_CONTEXT_REQ] = self.on_cleanup
        self._worker.doors.closing.append(self.close)
        self._worker.doors.peer_lost.append(self.peer_lost)

    def release(self, context_id: int, told_by: int | None = None) -> None:
        """Forget a context, and tell of it soon; but not the worker that told us."""
        context = self._contexts.release(context_id)
        if context is None:
            return
        self._tell_soon(context, None, told_by)

    def end_passes(self, context: Context, passes: Sequence[int], told_by: int | None = None) -> None:
        """Forget passes of a context that goes on, and tell of it soon; but not the worker that told us."""
        fresh = context.forget_passes(passes)
        if fresh:
            self._tell_soon(context, fresh, told_by)

    def _tell_soon(self, context: Context, passes: Sequence[int] | None, told_by: int | None) -> None:
        peers = context.peers() - {self._worker.id, told_by}
        if peers:
            self._untold.append((peers, context.id, passes))
            if not self._about_to_tell:
                self._about_to_tell = True
                self._worker.timekeeper.call_later(TELL_SECONDS, self._tell_all)

    def _tell_all(self) -> None:
        """In the timekeeper's thread: one message a peer for all that ended meanwhile."""
        self._about_to_tell = False
        contexts: dict[int, list[int]] = {}
        passes: dict[int, list[tuple[int, int]]] = {}
        while self._untold:
            peers, context_id, ended = self._untold.popleft()
            for peer in peers:
                if ended is None:
                    contexts.setdefault(peer, []).append(context_id)
                else:
                    passes.setdefault(peer, []).extend((context_id, number) for number in ended)
        for peer in {*contexts, *passes}:
            message = CleanupAutogradContextReq(tuple(contexts.get(peer, ())), tuple(passes.get(peer, ())))
            self._telling.tell(peer, message)  # hearing it twice is harmless

    def on_cleanup(self, inbound: Inbound) -> None:
        """Another worker has released contexts, or ended passes."""
        message = inbound.message
        assert isinstance(message, CleanupAutogradContextReq)
        if self._closed:
            return  # all is forgotten here, and whoever asks again will hear that this worker is gone
        self._worker.reply(inbound, CleanupAutogradContextResp())
        source = inbound.envelope.source
        for context_id in message.contexts:
            self.release(context_id, source)
        ended: dict[int, list[int]] = {}
        for context_id, number in message.passes:
            ended.setdefault(context_id, []).append(number)
        for context_id, numbers in ended.items():
            context = self._contexts.known(context_id)
            if context is not None:
                self.end_passes(context, numbers, source)

    def peer_lost(self, peer: int, error: BaseException) -> None:
        """Release what ``peer`` made; ask after what it took part in."""
        questions: dict[int, list[int]] = {}
        for context in self._contexts.live():
            maker, _ = split_id(context.id)
            if maker == peer:
                self.release(context.id, peer)
            elif maker != self._worker.id and peer in context.peers():
                questions.setdefault(maker, []).append(context.id)
        for maker, contexts in questions.items():
            self._ask(maker, contexts)

    def _ask(self, maker: int, contexts: list[int], patience: int = 1) -> None:
        def answered(outcome: Promise[Inbound]) -> None:
            if isinstance(outcome.exception(), RpcTimeoutError) and not self._closed:
                self._ask(maker, contexts, telling.more(patience))
            elif outcome.exception() is None:
                for context_id in self._worker.open(outcome.result()):
                    self.release(context_id, maker)

        try:
            asked, seconds = (contexts, self._worker.id), patience * telling.RETRY_SECONDS
            call = self._worker.call(maker, which_have_ended, asked, timeout=seconds)
        except (RpcError, TransportError) as e:
            logger.debug("cannot ask worker %d after %s: %s", maker, contexts, e)
        else:
            call.outcome.add_done_callback(answered)

    def which_have_ended(self, contexts: list[int], asks: int) -> list[int]:
        """Those of ``contexts`` that are not known here; of the end of the others ``asks`` will be told."""
        live = {context.id: context for context in self._contexts.live()}
        for context_id in contexts:
            if context_id in live:
                live[context_id].know(asks)
        return [context_id for context_id in contexts if context_id not in live]

    def close(self) -> None:
        """Forget everything."""
        self._closed = True
        self._telling.close()
        for context in self._contexts.live():
            self._contexts.release(context.id)


def which_have_ended(contexts: list[int], asks: int) -> list[int]:
    """Runs on the maker of ``contexts``."""
    releases: Releases = current_worker().doors.extensions["autograd"].releases
    return releases.which_have_ended(contexts, asks)
