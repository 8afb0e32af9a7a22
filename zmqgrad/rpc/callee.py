"""What a worker runs for others: calls, values for RRefs, and fetches of them."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from zmqgrad.errors import RpcError
from zmqgrad.rpc.dispatch import Doors
from zmqgrad.rpc.functions import Later
from zmqgrad.rpc.functions import run as call_it
from zmqgrad.rpc.options import UNSET_RPC_TIMEOUT
from zmqgrad.rpc.packing.naming import find_function, method_of
from zmqgrad.rpc.packing.packing import pack
from zmqgrad.rpc.packing.unpacking import unpack, unpack_call, unpack_tensors
from zmqgrad.rpc.profiling import callee_range, serving_is_profiled
from zmqgrad.rpc.remote_errors import describe_exception
from zmqgrad.runtime.future import Promise
from zmqgrad.transport.base import Inbound
from zmqgrad.wire.messages import (
    Call,
    Message,
    MessageType,
    RemoteCall,
    RemoteResult,
    Result,
    RRefFetch,
    RRefValue,
)

if TYPE_CHECKING:
    from zmqgrad.rpc.worker import Worker


class Callee:
    """Runs on ``worker`` what others ask of it. In engine threads."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._references = worker.references

    def install(self, doors: Doors) -> None:
        """Take calls."""
        for kind in (MessageType.CALL, MessageType.REMOTE_CALL, MessageType.RREF_FETCH):
            doors.requests[kind] = self._run_plain

    def _run_plain(self, inbound: Inbound) -> None:
        self.run(inbound, inbound.message, None)

    def run(self, inbound: Inbound, message: Message, tensors: list[torch.Tensor] | None) -> None:
        """Serve a call, remote call or fetch; ``tensors`` if somebody has unpacked them already."""
        source = inbound.envelope.source
        if isinstance(message, Call):
            value = self._invoke(inbound, message, tensors)
            if value.__class__ is Later:
                self._await(inbound, value, lambda: self._answer(inbound, message, value.value()))
            else:
                self._answer(inbound, message, value)
        elif isinstance(message, RemoteCall):
            self._make(inbound, message, tensors)
        elif isinstance(message, RRefFetch):
            value = self._references.value(message.rref_id, message.timeout or None)
            packed = pack(value, self._worker.answer_terms(self._worker.membership.record(source)))
            self._worker.reply(inbound, RRefValue(packed.payload), packed, "to_here")
        else:
            raise RpcError(f"{type(message).__name__} is no call")

    def _answer(self, inbound: Inbound, call: Call, value: Any) -> None:
        caller = self._worker.membership.record(inbound.envelope.source)
        packed = pack(value, self._worker.answer_terms(caller))
        self._worker.reply(inbound, Result(packed.payload), packed, call.function)

    def _make(self, inbound: Inbound, call: RemoteCall, tensors: list[torch.Tensor] | None) -> None:
        """Make the value of an RRef; that it failed is told to whoever fetches it."""
        made = self._references.expect(inbound.envelope.source, call.rref_id, call.fork_id)
        try:
            value = self._invoke(inbound, call, tensors)
        except BaseException as e:
            made.set_exception(e)
        else:
            if value.__class__ is Later:
                self._await(inbound, value, lambda: self._made(inbound, call, value.into(made)))
                return
            made.set_result(value)
        self._made(inbound, call, made)

    def _made(self, inbound: Inbound, call: RemoteCall, made: Promise[Any]) -> None:
        error = made.exception()
        if error is not None:
            trace = describe_exception(error, self._worker.name).traceback
            self._worker.show_failure(inbound.envelope.source, trace)
        self._references.made(call.rref_id)
        self._worker.reply(inbound, RemoteResult(call.rref_id, call.fork_id))

    def _await(self, inbound: Inbound, value: Later, finish: Callable[[], None]) -> None:
        """Call ``finish`` once ``value`` is there, on behalf of whom the calling thread acts for now."""
        context = contextvars.copy_context()

        def answer() -> None:
            try:
                finish()
            except BaseException as e:
                self._worker.reply_error(inbound, e)

        value.when_done(lambda: context.run(answer))

    def _invoke(self, inbound: Inbound, call: Call | RemoteCall, tensors: list[torch.Tensor] | None) -> Any:
        if tensors is None:
            tensors = unpack_tensors(call.payload, inbound.frames)
        content = unpack(call.payload, inbound.frames, tensors, self._references.of(inbound.envelope.source))
        inbound.let_go()
        function, args, kwargs = unpack_call(call.function, call.payload, content)
        del content, tensors
        if function is None:
            function = self._find(call.function)
        if serving_is_profiled():
            with callee_range(self._worker, inbound.envelope.source, call.function or function):
                return call_it(function, args, kwargs)
        return call_it(function, args, kwargs)

    def _find(self, reference: str) -> Any:
        method = method_of(reference)
        if method is None:
            return find_function(reference)
        # The caller keeps the value alive until it is answered; it may not have been made yet.
        value = self._references.value(method[0], self._worker.seconds(UNSET_RPC_TIMEOUT) or None)
        return getattr(value, method[1])
