"""Runs what other workers request: calls, remote calls (which create values of RRefs), and fetches."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import torch

from zmqgrad.errors import RpcError
from zmqgrad.rpc.client import Client
from zmqgrad.rpc.core import WorkerCore
from zmqgrad.rpc.functions import DeferredResult
from zmqgrad.rpc.functions import run as call_it
from zmqgrad.rpc.options import UNSET_RPC_TIMEOUT
from zmqgrad.rpc.peer_contexts import PeerContexts
from zmqgrad.rpc.profiling import callee_range, serving_is_profiled
from zmqgrad.rpc.remote_errors import describe_exception
from zmqgrad.rpc.rref.table import ReferenceTable
from zmqgrad.rpc.serialization.deserializer import deserialize_call, deserialize_tensors
from zmqgrad.rpc.serialization.naming import find_function, method_of
from zmqgrad.rpc.serialization.serializer import serialize
from zmqgrad.rpc.server import Server
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


class Callee:
    """Runs the functions that others call on ``worker``, in engine threads."""

    def __init__(
        self,
        worker: WorkerCore,
        client: Client,
        server: Server,
        contexts: PeerContexts,
        references: ReferenceTable,
    ) -> None:
        self._worker = worker
        self._membership = worker.membership
        self._resolve_timeout = client.resolve_timeout
        self._server = server
        self._contexts = contexts
        self._references = references
        for kind in (MessageType.CALL, MessageType.REMOTE_CALL, MessageType.RREF_FETCH):
            worker.hooks.requests[kind] = self._run_plain

    def _run_plain(self, inbound: Inbound) -> None:
        self.run(inbound, inbound.message, None)

    def run(self, inbound: Inbound, message: Message, tensors: list[torch.Tensor] | None) -> None:
        """Serve a call, remote call or fetch.

        Args:
            tensors: those of the payload, if they have been unpacked already.

        Raises:
            Exception: what the function raised; the server replies with it.
        """
        source = inbound.envelope.source
        if isinstance(message, Call):
            value = self._invoke(inbound, message, tensors)
            if value.__class__ is DeferredResult:
                self._await(inbound, value, lambda: self._reply(inbound, message, value.value()))
            else:
                self._reply(inbound, message, value)
        elif isinstance(message, RemoteCall):
            self._create(inbound, message, tensors)
        elif isinstance(message, RRefFetch):
            value = self._references.value(message.rref_id, message.timeout or None)
            packed = serialize(value, self._contexts.for_replies(self._membership.record(source)))
            self._server.reply(inbound, RRefValue(packed.payload), packed, "to_here")
        else:
            raise RpcError(f"{type(message).__name__} is not a call")

    def _reply(self, inbound: Inbound, call: Call, value: Any) -> None:
        caller = self._membership.record(inbound.envelope.source)
        packed = serialize(value, self._contexts.for_replies(caller))
        self._server.reply(inbound, Result(packed.payload), packed, call.function)

    def _create(self, inbound: Inbound, call: RemoteCall, tensors: list[torch.Tensor] | None) -> None:
        """Create the value of an RRef. A failure is raised where the value is fetched."""
        created = self._references.create_pending(inbound.envelope.source, call.rref_id, call.fork_id)
        try:
            value = self._invoke(inbound, call, tensors)
        except BaseException as e:
            created.set_exception(e)
        else:
            if value.__class__ is DeferredResult:
                self._await(inbound, value, lambda: self._created(inbound, call, value.resolve(created)))
                return
            created.set_result(value)
        self._created(inbound, call, created)

    def _created(self, inbound: Inbound, call: RemoteCall, created: Promise[Any]) -> None:
        error = created.exception()
        if error is not None:
            trace = describe_exception(error, self._worker.name).traceback
            self._server.log_failure(inbound.envelope.source, trace)
        self._references.value_ready(call.rref_id)
        self._server.reply(inbound, RemoteResult(call.rref_id, call.fork_id))

    def _await(self, inbound: Inbound, value: DeferredResult, finish: Callable[[], None]) -> None:
        """Call ``finish`` when ``value`` is done, with the context variables of the calling thread."""
        context = contextvars.copy_context()

        def reply() -> None:
            try:
                finish()
            except BaseException as e:
                self._server.reply_error(inbound, e)

        value.when_done(lambda: context.run(reply))

    def _invoke(self, inbound: Inbound, call: Call | RemoteCall, tensors: list[torch.Tensor] | None) -> Any:
        if tensors is None:
            tensors = deserialize_tensors(call.payload, inbound.frames)
        references = self._references.of(inbound.envelope.source)
        function, args, kwargs = deserialize_call(
            call.function, call.payload, inbound.frames, tensors, references
        )
        inbound.let_go()
        del tensors
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
        # The caller keeps the value alive until the reply; it may not have been created yet.
        value = self._references.value(method[0], self._resolve_timeout(UNSET_RPC_TIMEOUT) or None)
        return getattr(value, method[1])
