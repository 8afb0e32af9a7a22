"""What others answer: opened into values, or into what they raised, and as futures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zmqgrad.rpc.calls import PendingCall
from zmqgrad.rpc.futures import Completer, RpcFuture
from zmqgrad.rpc.packing.unpacking import unpack, unpack_tensors
from zmqgrad.rpc.remote_errors import rebuild_exception
from zmqgrad.runtime.future import Promise
from zmqgrad.transport.base import Inbound
from zmqgrad.wire.messages import ExceptionReply, Result, RRefValue

if TYPE_CHECKING:
    from zmqgrad.rpc.worker.worker import Worker


class Answers:
    """Opens the answers to ``worker``: in the thread that waits, or as futures in engine threads."""

    def __init__(self, worker: Worker) -> None:
        self._openers = worker.doors.openers
        self._references = worker.references
        self.completer = Completer(
            worker.submit,
            worker.timekeeper.call_later,
            self._open_outcome,
            bool(worker.membership.own.device_maps),  # answers come to devices by them alone
        )

    def open(self, inbound: Inbound) -> Any:
        """The value of an answer.

        Raises:
            what the remote function raised.
        """
        message = inbound.message
        opener = self._openers.get(inbound.envelope.type)  # type: ignore[call-overload]
        tensors = None
        if opener is not None:
            message, tensors = opener(inbound)
        if isinstance(message, ExceptionReply):
            raise rebuild_exception(message)
        if not isinstance(message, (Result, RRefValue)):
            return None
        if tensors is None:
            tensors = unpack_tensors(message.payload, inbound.frames)
        references = self._references.of(inbound.envelope.source)
        return unpack(message.payload, inbound.frames, tensors, references)

    def _open_outcome(self, outcome: Promise[Inbound]) -> Any:
        return self.open(outcome.result())

    def future(self, call: PendingCall) -> RpcFuture[Any]:
        """The answer of ``call`` as a future."""
        future = call.future = RpcFuture(call.outcome, self.completer, call.what, call.peer)
        call.outcome.add_done_callback(future.answered)
        return future

    def future_of(self, answer: Promise[Inbound]) -> RpcFuture[Any]:
        """An answer as a future."""
        future: RpcFuture[Any] = RpcFuture(answer, self.completer)
        answer.add_done_callback(future.answered)
        return future

    def failed(self, error: Exception) -> RpcFuture[Any]:
        """A future of a call that could not be sent."""
        answer: Promise[Inbound] = Promise()
        answer.set_exception(error)
        return self.future_of(answer)
