"""Decodes replies: into values, into the exceptions that the callee raised, and into futures."""

from __future__ import annotations

from typing import Any

import torch

from zmqgrad.rpc.calls import PendingCall
from zmqgrad.rpc.core import WorkerCore
from zmqgrad.rpc.futures import CompletionQueue, RpcFuture
from zmqgrad.rpc.remote_errors import rebuild_exception
from zmqgrad.rpc.rref.table import ReferenceTable
from zmqgrad.rpc.serialization.deserializer import deserialize, deserialize_tensors
from zmqgrad.runtime.future import Promise
from zmqgrad.transport.base import Inbound, Unreceived
from zmqgrad.wire.messages import ExceptionReply, PayloadFormat, Result, RRefValue

_VALUES = (Result, RRefValue)


class ReplyDecoder:
    """Decodes replies in the thread that waits, or completes futures in engine threads."""

    def __init__(self, worker: WorkerCore, references: ReferenceTable) -> None:
        self._unwrappers = worker.hooks.response_unwrappers
        self._references = references
        self.queue = CompletionQueue(
            worker.submit,
            worker.timer.call_later,
            self._decode_reply,
            bool(worker.membership.own.device_maps),  # replies arrive on devices only by these maps
            lambda: worker.hooks.tracer,
            worker.check_process,
        )

    def decode(self, inbound: Inbound) -> Any:
        """The value of a reply.

        Its tensors do not depend on the mode of the thread that waits: as torch's, those that arrive in
        inference mode or under ``no_grad`` can be used, written to and differentiated outside of it.

        Raises:
            Exception: what the remote function raised.
        """
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # which also enables grad
                return self.decode(inbound)
        if inbound.frames.__class__ is Unreceived:  # to read them raises
            self._references.release_unread(inbound)
        message = inbound.message
        unwrap = self._unwrappers.get(inbound.envelope.type)  # type: ignore[call-overload]
        tensors = None
        if unwrap is not None:
            message, tensors, _ = unwrap(inbound)
        if not isinstance(message, _VALUES):
            if isinstance(message, ExceptionReply):
                raise rebuild_exception(message)
            return None
        payload = message.payload
        if payload.format is PayloadFormat.NONE:
            return None
        if tensors is None:
            tensors = deserialize_tensors(payload, inbound.frames)
        pickled = payload.format is PayloadFormat.PICKLE
        references = self._references.of(inbound.envelope.source) if pickled else None
        return deserialize(payload, inbound.frames, tensors, references)

    def _decode_reply(self, promise: Promise[Inbound]) -> Any:
        return self.decode(promise.result())

    def future(self, call: PendingCall) -> RpcFuture[Any]:
        """A future of the value of ``call``."""
        future: RpcFuture[Any] = RpcFuture(
            call.promise, self.queue, call.description, call.peer, call.message_id
        )
        call.promise.add_done_callback(future.on_reply)
        call.future = future  # last: a reader that finds it will call on_reply, and then drain the queue
        return future

    def future_of(self, reply: Promise[Inbound]) -> RpcFuture[Any]:
        """A future of the value of a reply."""
        future: RpcFuture[Any] = RpcFuture(reply, self.queue)
        reply.add_done_callback(future.on_reply)
        return future

    def failed_future(self, error: Exception) -> RpcFuture[Any]:
        """A future of a call that could not be sent."""
        reply: Promise[Inbound] = Promise()
        reply.set_exception(error)
        return self.future_of(reply)
