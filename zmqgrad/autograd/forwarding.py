"""How autograd takes part in RPC: it fills the doors of one worker.

Outgoing calls and answers of a recording thread are wrapped with the context; those that arrive are opened,
served inside the context, and answered in it. Gradients and clean-up have messages of their own.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

import torch

from zmqgrad.autograd.context import Context, Contexts, Recording, recording
from zmqgrad.autograd.engine import Gradient, Pass
from zmqgrad.autograd.functions import RecvNote, record_send
from zmqgrad.autograd.tally import ROOTS, Tally
from zmqgrad.errors import AutogradError, NotInitializedError, RpcError, RpcTimeoutError, TransportError
from zmqgrad.rpc.dispatch import Opened
from zmqgrad.rpc.payload import unpack_tensors
from zmqgrad.rpc.remote_errors import describe_exception, rebuild_exception
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.future import Outcome
from zmqgrad.transport.base import Buffer, Inbound
from zmqgrad.wire.ids import show_id
from zmqgrad.wire.messages import (
    NOTHING,
    BackwardAutogradReq,
    BackwardAutogradResp,
    Call,
    CleanupAutogradContextReq,
    CleanupAutogradContextResp,
    ExceptionReply,
    ForwardAutogradReq,
    ForwardAutogradResp,
    Handled,
    Message,
    MessageType,
    RemoteCall,
    RemoteResult,
    Result,
    RRefFetch,
    RRefValue,
    Waiting,
)
from zmqgrad.wire.tensors import describe, rebuild

logger = logging.getLogger(__name__)

TELL_SECONDS = 0.01
"""The end of a context is told so long after, together with that of others: off the path of the next one."""

RETRY_SECONDS = 5.0
"""A clean-up message that nobody answers is sent again after so long."""


def install(worker: Worker) -> None:
    """Let ``worker`` record, and answer what other workers ask of a context."""
    autograd = Autograd(worker)
    doors = worker.doors
    doors.extensions["autograd"] = autograd
    doors.outgoing = autograd.outgoing
    doors.unsent = autograd.unsent
    doors.with_history = _keeps_history
    doors.requests[MessageType.FORWARD_AUTOGRAD_REQ] = autograd.on_forward
    doors.requests[MessageType.BACKWARD_AUTOGRAD_REQ] = autograd.on_backward
    doors.requests[MessageType.CLEANUP_AUTOGRAD_CONTEXT_REQ] = autograd.on_cleanup
    doors.control[MessageType.BACKWARD_AUTOGRAD_RESP] = autograd.on_report
    doors.openers[MessageType.FORWARD_AUTOGRAD_RESP] = autograd.open_forward
    doors.closing.append(autograd.close)
    doors.peer_lost.append(autograd.peer_lost)


def _keeps_history() -> bool:
    return recording() is not None and torch.is_grad_enabled()


def autograd_of(worker: Worker) -> Autograd:
    """The autograd floor of ``worker``."""
    found: Autograd = worker.doors.extensions["autograd"]
    return found


class Autograd:
    """The contexts of one worker, and the messages about them."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.contexts = Contexts()
        self._closed = False
        self._tallies: dict[int, Tally] = {}  # of passes that were started here, by pass id
        self._releases: deque[tuple[int, set[int]]] = deque()
        self._telling = False

    # ---- recording --------------------------------------------------------------------------------------

    def outgoing(self, peer: int, message: Message, tensors: Sequence[torch.Tensor], what: str) -> Message:
        """``message``, wrapped if the calling thread records."""
        context = recording()
        if context is None or not torch.is_grad_enabled():
            return message
        request = isinstance(message, (Call, RemoteCall, RRefFetch))
        if not request and not isinstance(message, (Result, RemoteResult, RRefValue)):
            return message
        context.know(peer)
        autograd_id = 0
        differentiable = [t for t in tensors if t.requires_grad]
        if differentiable:
            autograd_id = self._worker.ids.next()
            context.add_send(record_send(autograd_id, peer, differentiable, what))
        if request:
            return ForwardAutogradReq(context.id, autograd_id, message)  # type: ignore[arg-type]
        return ForwardAutogradResp(context.id, autograd_id, message)  # type: ignore[arg-type]

    def unsent(self, message: Message) -> None:
        """What was recorded for ``message`` did not go."""
        context = recording()
        if context is not None and isinstance(message, ForwardAutogradReq):
            context.remove_send(message.autograd_id)

    def on_forward(self, inbound: Inbound) -> None:
        """A call as part of a context: run it there."""
        message = inbound.message
        assert isinstance(message, ForwardAutogradReq)
        context = self.contexts.heard_of(message.context_id)
        tensors = self._received(context, message.autograd_id, message.wrapped, inbound)
        with Recording(context):
            self._worker.run_call(inbound, message.wrapped, tensors)

    def open_forward(self, inbound: Inbound) -> Opened:
        """An answer as part of a context, in the thread that waits for it."""
        message = inbound.message
        assert isinstance(message, ForwardAutogradResp)
        context = self.contexts.heard_of(message.context_id)
        return Opened(message.wrapped, self._received(context, message.autograd_id, message.wrapped, inbound))

    def _received(
        self, context: Context | None, autograd_id: int, wrapped: Message, inbound: Inbound
    ) -> list[torch.Tensor]:
        tensors = unpack_tensors(getattr(wrapped, "payload", NOTHING), inbound.frames)
        if context is None:
            return tensors
        source = inbound.envelope.source
        context.know(source)
        return context.receive(autograd_id, source, tensors)

    # ---- backward ---------------------------------------------------------------------------------------

    def backward(self, context: Context, roots: Sequence[torch.Tensor], retain_graph: bool) -> None:
        """One pass from ``roots``; returns when it has finished on all workers.

        Raises:
            AutogradError: if groups somewhere wait for a gradient that will never come.
            RpcTimeoutError: if nothing is heard of the pass for the default timeout, naming the workers.
            Anything else: what failed, anywhere.
        """
        pass_id = self._worker.ids.next()
        tally = self._tallies[pass_id] = Tally(self._worker.id)
        try:
            with context.pass_lock:
                work = context.passes[pass_id] = Pass(context, self._worker.id, retain_graph, roots)
            request = _Request(self, work, pass_id, ROOTS, self._worker.id)
            request.carry_out(lambda: work.start([torch.ones_like(r) for r in roots], request.send_on))
            self._wait_for(tally)
        finally:
            del self._tallies[pass_id]
        error = tally.error()
        if error is not None:
            raise error
        self._complain(tally.waiting())

    def _wait_for(self, tally: Tally) -> None:
        patience = self._worker.default_timeout or None
        while True:
            steps = tally.steps
            if tally.finished.wait_done(patience):
                return
            if tally.steps == steps:
                name = self._worker.membership.name_of
                names = ", ".join(sorted({name(worker) for worker in tally.under_way().values()}))
                raise RpcTimeoutError(
                    f"nothing was heard of the backward pass for {patience} s; "
                    f"it waits for {names or 'reports'}"
                )

    def _complain(self, waiting: list[Waiting]) -> None:
        if not waiting:
            return
        name = self._worker.membership.name_of
        lines = [
            f"  {what or 'a call'}: tensors sent by {name(report.worker)} to {name(peer)} ({show_id(number)})"
            for report in waiting
            for number, peer, what in report.sends
        ]
        raise AutogradError(
            "the backward pass cannot finish in FAST mode, which expects a gradient for everything that was "
            "sent. Nothing came back for\n" + "\n".join(lines) + "\n"
            "as no root depends on it. Do not ask for results that the loss does not use, or call .detach() "
            "on what need not be differentiated."
        )

    def on_backward(self, inbound: Inbound) -> None:
        """Gradients for a send of this worker."""
        message = inbound.message
        assert isinstance(message, BackwardAutogradReq)
        try:
            context = self.contexts.find(message.context_id)
            context.know(inbound.envelope.source)
            tensors = rebuild(message.tensors, inbound.frames)
            gradients = [None if i < 0 else tensors[i] for i in message.gradients]
            work = self._pass(context, message.pass_id, message.retain_graph)
        except Exception as e:
            nowhere = Waiting(self._worker.id, 0)
            handled = Handled(message.autograd_id, (), nowhere, self.describe_error(e))
            self.report(message.root, message.pass_id, handled)
            return
        finally:
            if message.handled is not None:
                self._count(message.pass_id, message.handled)
        request = _Request(self, work, message.pass_id, message.autograd_id, message.root)
        request.carry_out(lambda: work.arrive(message.autograd_id, gradients, request.send_on))

    def report(self, root: int, pass_id: int, handled: Handled) -> None:
        """Tell the root of a pass what has been handled here."""
        if root == self._worker.id:
            self._count(pass_id, handled)
            return
        try:
            self._worker.mailbox.send(root, BackwardAutogradResp(handled), pass_id)
        except (RpcError, TransportError) as e:
            logger.warning("cannot report to worker %d, which started the backward pass: %s", root, e)

    def describe_error(self, error: Exception) -> ExceptionReply:
        """An error of this worker, for the root."""
        return describe_exception(error, repr(self._worker.membership.own.info))

    def _count(self, pass_id: int, handled: Handled) -> None:
        tally = self._tallies.get(pass_id)
        if tally is not None:
            error = None if handled.error is None else rebuild_exception(handled.error)
            tally.handled(handled.autograd_id, handled.sent, handled.waiting, error)

    def is_here(self, worker: int) -> bool:
        """Is that this worker?"""
        return worker == self._worker.id

    def send(self, peer: int, message: BackwardAutogradReq, frames: list[Buffer]) -> None:
        """Send a request of a pass; whoever handles it tells the root."""
        self._worker.post(peer, message, frames)

    def on_report(self, inbound: Inbound) -> None:
        """Another worker has handled a request of a pass that was started here. In the reading thread."""
        message = inbound.message
        assert isinstance(message, BackwardAutogradResp)
        self._count(inbound.envelope.message_id, message.handled)

    def _pass(self, context: Context, pass_id: int, retain_graph: bool) -> Pass:
        with context.pass_lock:
            work = context.passes.get(pass_id)
            if work is None:
                work = context.passes[pass_id] = Pass(context, self._worker.id, retain_graph)
            return work

    # ---- the end of a context ---------------------------------------------------------------------------

    def begin(self) -> Context:
        """A new context that begins here."""
        return self.contexts.new(self._worker.ids.next())

    def release(self, context_id: int, told_by: int | None = None) -> None:
        """Forget a context, here at once, and soon wherever else it went."""
        context = self.contexts.release(context_id)
        if context is None:
            return
        peers = context.peers() - {self._worker.id, told_by}
        if peers:
            self._releases.append((context_id, peers))
            if not self._telling:
                self._telling = True
                self._worker.timekeeper.call_later(TELL_SECONDS, self._tell_releases)

    def _tell_releases(self) -> None:
        """In the timekeeper's thread: one message a peer for all contexts that ended meanwhile."""
        self._telling = False
        by_peer: dict[int, list[int]] = {}
        while self._releases:
            context_id, peers = self._releases.popleft()
            for peer in peers:
                by_peer.setdefault(peer, []).append(context_id)
        for peer, contexts in by_peer.items():
            self._tell(peer, CleanupAutogradContextReq(tuple(contexts)))

    def on_cleanup(self, inbound: Inbound) -> None:
        """Another worker has released contexts."""
        message = inbound.message
        assert isinstance(message, CleanupAutogradContextReq)
        self._worker.reply(inbound, CleanupAutogradContextResp())
        for context_id in message.contexts:
            self.release(context_id, inbound.envelope.source)

    def _tell(self, peer: int, message: Message) -> None:
        """Send until it is answered. Hearing it twice is harmless."""

        def settled(outcome: Outcome[Inbound]) -> None:
            if isinstance(outcome.error(), RpcTimeoutError) and not self._closed:
                logger.info("worker %d did not answer %s, again", peer, type(message).__name__)
                self._tell(peer, message)

        try:
            self._worker.request(peer, message, seconds=RETRY_SECONDS, what="clean-up", settled=settled)
        except (NotInitializedError, TransportError) as e:
            logger.debug("cannot tell worker %d %s: %s", peer, message, e)

    def peer_lost(self, peer: int, error: BaseException) -> None:
        """Passes that were started here and that ``peer`` may have a part in cannot finish."""
        for tally in list(self._tallies.values()):
            tally.fail(error)

    def close(self) -> None:
        """Forget everything."""
        self._closed = True
        for context in self.contexts.live():
            self.contexts.release(context.id)


class _Request:
    """One request of a pass, while this worker handles it: what it sets off, and the report at its end."""

    def __init__(self, autograd: Autograd, work: Pass, pass_id: int, autograd_id: int, root: int) -> None:
        self._autograd = autograd
        self._work = work
        self._pass_id = pass_id
        self._autograd_id = autograd_id
        self._root = root
        self._sent: list[tuple[int, int]] = []
        self._last: tuple[RecvNote, Sequence[Gradient]] | None = None  # for the root: carries the report

    def carry_out(self, step: Callable[[], bool | None]) -> None:
        """Do ``step`` and report; unless it says by False that another thread does the same."""
        error: Exception | None = None
        try:
            if step() is False:
                return
        except Exception as e:
            error = e
        last, self._last = self._last, None
        if last is not None:
            self._sent.append((last[0].autograd_id, self._root))
            try:
                self._send(*last, self._report(error))
                return
            except Exception as e:
                self._sent.pop()
                error = error or e
        self._autograd.report(self._root, self._pass_id, self._report(error))

    def _report(self, error: Exception | None) -> Handled:
        said = None if error is None else self._autograd.describe_error(error)
        return Handled(self._autograd_id, tuple(self._sent), self._work.waiting(), said)

    def send_on(self, note: RecvNote, gradients: Sequence[Gradient]) -> None:
        """Gradients that are complete at a recv go to its send."""
        context = self._work.context
        if note.context_id != context.id:
            raise AutogradError(
                f"a tensor that was received in context {show_id(note.context_id)} is part of the graph of "
                f"context {show_id(context.id)}: use one context for both, or detach it"
            )
        if note.peer == self._root and not self._autograd.is_here(note.peer):
            if self._last is not None:
                self._send_counted(*self._last)
            self._last = note, gradients
        else:
            self._send_counted(note, gradients)

    def _send_counted(self, note: RecvNote, gradients: Sequence[Gradient]) -> None:
        self._send(note, gradients, None)
        self._sent.append((note.autograd_id, note.peer))

    def _send(self, note: RecvNote, gradients: Sequence[Gradient], handled: Handled | None) -> None:
        present = [g for g in gradients if g is not None]
        numbers = iter(range(len(present)))
        frames: list[Buffer] = []
        message = BackwardAutogradReq(
            self._work.context.id,
            self._pass_id,
            note.autograd_id,
            self._root,
            tuple(-1 if g is None else next(numbers) for g in gradients),
            describe(present, frames),
            self._work.retain_graph,
            handled,
        )
        self._autograd.send(note.peer, message, frames)
