"""The release of contexts, and of ended passes in them, on all their workers.

The worker that leaves a context forgets it at once and notifies its peers in the context, which notify
theirs. Notifications are sent with a delay, so that they do not slow down the next step: one message per peer
for all contexts that ended meanwhile. Those of passes are sent at once: workers may still be busy with one
that has failed.

When a worker is lost, the contexts that it created are released where that is known. It may live on for
others, so each worker of these contexts queries it. In other contexts the notification may have depended on
it, so its peers there query the creators, which then notify them directly.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from zmqgrad.autograd.context import Context, Contexts
from zmqgrad.errors import RpcError, TransportError, UnknownWorkerError
from zmqgrad.rpc.current import current_worker
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.future import Promise
from zmqgrad.runtime.service_thread import CoalescedJob
from zmqgrad.transport.base import Inbound
from zmqgrad.wire.ids import split_id
from zmqgrad.wire.messages import (
    CleanupAutogradContextReq,
    CleanupAutogradContextResp,
    MessageType,
)

logger = logging.getLogger(__name__)

NOTIFY_DELAY_SECONDS = 0.01
"""How long after the end of a context its peers are notified, together with that of later contexts."""


class Releases:
    """Notifies other workers of ended contexts, and handles their notifications."""

    def __init__(self, worker: Worker, contexts: Contexts) -> None:
        self._worker = worker
        self._contexts = contexts
        self._closed = False
        self._unsent: deque[tuple[set[int], int, Sequence[int] | None]] = deque()  # peers, context, passes
        self._notification = CoalescedJob(self._send_all, worker.timer.call_later)

    def install(self) -> None:
        """Register the handlers of release messages with the worker."""
        self._worker.hooks.requests[MessageType.CLEANUP_AUTOGRAD_CONTEXT_REQ] = self.on_cleanup
        self._worker.hooks.closing.append(self.close)
        self._worker.hooks.peer_lost.append(self.peer_lost)

    def release(self, context_id: int, notified_by: int | None = None) -> None:
        """Forget a context and notify its peers, except the worker that notified this one.

        Also if it is not known yet: the notification may have overtaken the first call of the context.
        """
        context = self._contexts.get(context_id)
        if context is not None:
            context.released = True  # before its peers are read: see Autograd.outgoing
            self._schedule(context, None, notified_by)
        self._contexts.release(context_id)  # last: a release that was interrupted can be repeated

    def release_left(self) -> None:
        """Release the contexts that count as released: what was left, also where an interrupt came."""
        for context in self._contexts.live():
            if context.released:
                self.release(context.id)

    def end_passes(self, context: Context, passes: Sequence[int], notified_by: int | None = None) -> None:
        """Forget passes of a context and notify its peers, except the worker that notified this one."""
        fresh = context.forget_passes(passes)
        if fresh:
            self._schedule(context, fresh, notified_by)

    def _schedule(self, context: Context, passes: Sequence[int] | None, notified_by: int | None) -> None:
        peers = context.peers() - {self._worker.id, notified_by}
        if peers:
            self._unsent.append((peers, context.id, passes))
            if passes is not None:
                self._worker.timer.call_later(0, self._send_all)
            else:
                self._notification.schedule(NOTIFY_DELAY_SECONDS)

    def _send_all(self) -> None:
        """Send one message per peer for all that ended meanwhile. Runs in the timer thread."""
        contexts: dict[int, list[int]] = {}
        passes: dict[int, list[tuple[int, int]]] = {}
        while self._unsent:
            peers, context_id, ended = self._unsent.popleft()
            for peer in peers:
                if ended is None:
                    contexts.setdefault(peer, []).append(context_id)
                else:
                    passes.setdefault(peer, []).extend((context_id, number) for number in ended)
        for peer in {*contexts, *passes}:
            message = CleanupAutogradContextReq(tuple(contexts.get(peer, ())), tuple(passes.get(peer, ())))
            try:
                self._worker.request(peer, message, description=type(message).__name__)
            except (RpcError, TransportError) as e:  # it was lost, or this worker closes
                logger.debug("cannot notify worker %d of ended contexts: %s", peer, e)

    def on_cleanup(self, inbound: Inbound) -> None:
        """Release contexts and passes that have ended on another worker."""
        message = inbound.message
        assert isinstance(message, CleanupAutogradContextReq)
        if self._closed:
            return  # everything is forgotten
        source = inbound.envelope.source
        for context_id in message.contexts:
            self.release(context_id, source)
        ended: dict[int, list[int]] = {}
        for context_id, number in message.passes:
            ended.setdefault(context_id, []).append(number)
        for context_id, numbers in ended.items():
            context = self._contexts.get(context_id)
            if context is not None:
                self.end_passes(context, numbers, source)
        self._worker.reply(inbound, CleanupAutogradContextResp())  # last: the sender may be lost meanwhile

    def peer_lost(self, peer: int, error: BaseException) -> None:
        """Forget the contexts that ``peer`` created; query the creators of those in which it took part."""
        self._contexts.lose(peer)
        lost: list[int] = []
        queries: dict[int, list[int]] = {}
        for context in self._contexts.live():
            creator, _ = split_id(context.id)
            if creator == peer:
                lost.append(context.id)
            elif creator != self._worker.id and peer in context.peers():
                queries.setdefault(creator, []).append(context.id)
        self._abandon(peer, lost)
        for creator, contexts in queries.items():
            self.query(creator, contexts)

    def miss(self, peer: int, context: Context) -> None:
        """Query the creator of a context of which a message of ``peer``, which is lost, has still arrived."""
        creator, _ = split_id(context.id)
        if creator not in (self._worker.id, peer):
            self.query(creator, [context.id])

    def _abandon(self, creator: int, contexts: Iterable[int]) -> None:
        """Forget contexts whose creator is lost here; their other workers are to query it themselves."""
        queries: dict[int, list[int]] = {}
        for context in filter(None, map(self._contexts.release, contexts)):
            for peer in context.peers() - {self._worker.id, creator}:
                queries.setdefault(peer, []).append(context.id)
        for peer, shared in queries.items():
            self._call_soon(peer, query_creator, (creator, shared))

    def query(self, creator: int, contexts: list[int]) -> None:
        """Release those of ``contexts`` that have ended, when ``creator`` has said so."""

        def on_reply(reply: Promise[Inbound]) -> None:
            if reply.exception() is None:
                for context_id in self._worker.decode(reply.result()):
                    self.release(context_id, creator)

        args = contexts, self._worker.id
        self._call_soon(creator, which_have_ended, args, on_reply, partial(self._abandon, creator, contexts))

    def _call_soon(
        self,
        peer: int,
        function: Callable[..., object],
        args: Sequence[Any],
        on_reply: Callable[[Promise[Inbound]], None] = lambda _: None,
        on_unknown: Callable[[], None] = lambda: None,
    ) -> None:
        def call() -> None:
            try:
                self._worker.call(peer, function, args, timeout=0).promise.add_done_callback(on_reply)
            except UnknownWorkerError:  # it had left before this worker joined
                on_unknown()
            except (RpcError, TransportError) as e:
                logger.debug("cannot query worker %d about contexts: %s", peer, e)
                if type(e) is TransportError:  # such as no free descriptor: the contexts would stay for ever
                    self._worker.retry(call)

        self._worker.submit_if_open(call)  # it may have to ask the store

    def which_have_ended(self, contexts: list[int], requester: int) -> list[int]:
        """Return those of ``contexts`` that are not known here; later notify ``requester`` of the others."""
        live = {context.id: context for context in self._contexts.live()}
        for context_id in contexts:
            if context_id in live:
                live[context_id].add_peer(requester)
        # Looked up last: a release from now on finds the requester among the peers.
        return [each for each in contexts if each not in live or live[each].released]

    def close(self) -> None:
        """Forget all contexts."""
        self._closed = True
        for context in self._contexts.live():
            self._contexts.release(context.id)


def which_have_ended(contexts: list[int], requester: int) -> list[int]:
    """Return the ended ones of ``contexts``. Runs on the worker that created them."""
    releases: Releases = current_worker().hooks.extensions["autograd"].releases
    return releases.which_have_ended(contexts, requester)


def query_creator(creator: int, contexts: list[int]) -> None:
    """Query who created ``contexts`` which of them have ended. Runs on another worker of these contexts."""
    releases: Releases = current_worker().hooks.extensions["autograd"].releases
    releases.query(creator, contexts)
