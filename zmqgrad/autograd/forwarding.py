"""How autograd takes part in RPC: it fills the doors of one worker.

Outgoing calls and answers of a recording thread are wrapped with the context; those that arrive are opened,
served inside the context, and answered in it. Gradients and clean-up have messages of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from zmqgrad.autograd.context import Context, Contexts, Recording, recording
from zmqgrad.autograd.engine import Activity, Gradient, Pass
from zmqgrad.autograd.functions import RecvNote, record_send
from zmqgrad.errors import AutogradError, NotInitializedError, RpcError, RpcTimeoutError, TransportError
from zmqgrad.rpc.dispatch import Opened
from zmqgrad.rpc.payload import Packed, unpack_tensors
from zmqgrad.rpc.remote_errors import rebuild_exception
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.future import Outcome
from zmqgrad.transport.base import Inbound
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
    doors.openers[MessageType.FORWARD_AUTOGRAD_RESP] = autograd.open_forward
    doors.closing.append(autograd.close)


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
            Anything else: what failed, anywhere.
        """
        pass_id = self._worker.ids.next()
        done: Outcome[Activity] = Outcome()
        activity = Activity(done.set)  # type: ignore[arg-type]
        with context.pass_lock:
            work = context.passes[pass_id] = Pass(context, self._worker.id, retain_graph, roots)
        try:
            work.start(
                [torch.ones_like(r) for r in roots],
                lambda note, gradients, a: self._send_on(pass_id, work, note, gradients, a),
                activity,
            )
            activity.end(waiting=[work.waiting()])
        except Exception as e:
            activity.end(e)
        done.wait_done()  # each request below has a deadline, and its answer, or that, ends this
        if activity.error is not None:
            raise activity.error
        reports = {**activity.waiting, self._worker.id: work.waiting()}
        self._complain([w for w in reports.values() if w.sends])

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

    def _send_on(
        self, pass_id: int, work: Pass, note: RecvNote, gradients: Sequence[Gradient], activity: Activity
    ) -> None:
        """Gradients that are complete at a recv go to its send."""
        if note.context_id != work.context.id:
            raise AutogradError(
                f"a tensor that was received in context {show_id(note.context_id)} is part of the graph of "
                f"context {show_id(work.context.id)}: use one context for both, or detach it"
            )
        present = [g for g in gradients if g is not None]
        numbers = iter(range(len(present)))
        message_frames: list[bytes | bytearray | memoryview] = []
        message = BackwardAutogradReq(
            work.context.id,
            pass_id,
            note.autograd_id,
            tuple(-1 if g is None else next(numbers) for g in gradients),
            describe(present, message_frames),
            work.retain_graph,
        )

        def answered(outcome: Outcome[Inbound]) -> None:
            activity.end(*_what_came(outcome))

        seconds = self._worker.default_timeout
        packed = Packed(NOTHING, message_frames, ())
        try:
            self._worker.request(note.peer, message, packed, seconds, "backward", work, answered)
        except (RpcError, TransportError) as e:
            activity.end(e)

    def on_backward(self, inbound: Inbound) -> None:
        """Gradients for a send of this worker."""
        message = inbound.message
        assert isinstance(message, BackwardAutogradReq)
        context = self.contexts.find(message.context_id)
        context.know(inbound.envelope.source)
        tensors = rebuild(message.tensors, inbound.frames)
        gradients = [None if i < 0 else tensors[i] for i in message.gradients]
        work = self._pass(context, message.pass_id, message.retain_graph)

        def finished(activity: Activity) -> None:
            if activity.error is not None:
                self._worker.reply_error(inbound, activity.error)
                return
            reports = {**activity.waiting, self._worker.id: work.waiting()}
            self._worker.reply(inbound, BackwardAutogradResp(tuple(reports.values())))

        activity = Activity(finished)
        try:
            work.arrive(
                message.autograd_id,
                gradients,
                lambda note, grads, a: self._send_on(message.pass_id, work, note, grads, a),
                activity,
            )
        except Exception as e:
            activity.end(e)
        else:
            activity.end()

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

    def release(self, context_id: int) -> None:
        """Forget a context, here and wherever it went."""
        context = self.contexts.release(context_id)
        if context is not None:
            for peer in context.peers() - {self._worker.id}:
                self._tell(peer, CleanupAutogradContextReq(context_id))

    def on_cleanup(self, inbound: Inbound) -> None:
        """Another worker has released a context."""
        message = inbound.message
        assert isinstance(message, CleanupAutogradContextReq)
        self._worker.reply(inbound, CleanupAutogradContextResp())
        self.release(message.context_id)

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

    def close(self) -> None:
        """Forget everything."""
        self._closed = True
        for context in self.contexts.live():
            self.contexts.release(context.id)


def _what_came(outcome: Outcome[Inbound]) -> tuple[BaseException | None, Sequence[Waiting]]:
    """Error and reports of the answer to a backward request."""
    error = outcome.error()
    if error is not None:
        return error, ()
    message = outcome.result().message
    if isinstance(message, ExceptionReply):
        return rebuild_exception(message), ()
    if not isinstance(message, BackwardAutogradResp):
        return AutogradError(f"{type(message).__name__} is no answer to gradients"), ()
    return None, message.waiting
