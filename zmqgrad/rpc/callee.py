"""Runs what other workers request: calls, remote calls (which create values of RRefs), and fetches."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from zmqgrad.errors import RpcError
from zmqgrad.rpc.core import WorkerCore
from zmqgrad.rpc.functions import MARK, DeferredResult, check_operator, check_result
from zmqgrad.rpc.hooks import Surrounding
from zmqgrad.rpc.in_flight import served, time_left_for_calls
from zmqgrad.rpc.peer_contexts import PeerContexts
from zmqgrad.rpc.profiling import callee_range
from zmqgrad.rpc.raising import forget_variables
from zmqgrad.rpc.relaying import complete
from zmqgrad.rpc.remote_errors import describe_exception
from zmqgrad.rpc.rref.table import ReferenceTable
from zmqgrad.rpc.serialization.context import SERIALIZED_NONE, SerializedPayload
from zmqgrad.rpc.serialization.deserializer import deserialize_call, deserialize_tensors
from zmqgrad.rpc.serialization.naming import find_function, method_of
from zmqgrad.rpc.serialization.serializer import serialize
from zmqgrad.rpc.server import Server
from zmqgrad.runtime.clock import monotonic_ns
from zmqgrad.runtime.future import Promise
from zmqgrad.transport.base import Inbound, Unreceived
from zmqgrad.wire.messages import (
    NONE_PAYLOAD,
    Call,
    Message,
    MessageType,
    PayloadFormat,
    RemoteCall,
    RemoteResult,
    Result,
    RRefFetch,
    RRefValue,
)

_CALLS = (Call, RemoteCall)

_Answer = tuple[Message, SerializedPayload, str]
"""What is sent as a reply, and the name of what it replies to."""


class Callee:
    """Runs the functions that others call on ``worker``, in engine threads."""

    def __init__(
        self,
        worker: WorkerCore,
        server: Server,
        contexts: PeerContexts,
        references: ReferenceTable,
    ) -> None:
        self._worker = worker
        self._membership = worker.membership
        self._server = server
        self._contexts = contexts
        self._references = references
        self._unwrappers = worker.hooks.request_unwrappers
        self._surroundings = worker.hooks.surroundings
        for kind in (MessageType.CALL, MessageType.REMOTE_CALL, MessageType.RREF_FETCH):
            worker.hooks.requests[kind] = self.run

    def run(self, inbound: Inbound) -> None:
        """Serve a call, remote call or fetch, which an upper layer may have wrapped.

        Calls the function itself, not through helpers, so that few frames lie under it. Context variables
        that an unwrapper sets are in force until this returns: the server runs it in a context of its own.

        Args:
            inbound: the request.

        Raises:
            Exception: what the function raised; the server replies with it. A remote call does not raise it:
                the error is raised where the value is fetched.
        """
        tensors = run = None
        envelope, message = inbound.envelope, inbound.message
        call: Any = getattr(message, "wrapped", message)
        source = envelope.source
        if inbound.frames.__class__ is Unreceived:  # to read them raises
            self._references.release_unread(inbound)
        created: Promise[Any] | None = None
        if isinstance(call, RemoteCall):
            created = self._references.create_pending(source, call.rref_id, call.fork_id)
        surround = self._surroundings.get(envelope.type)  # type: ignore[call-overload]
        surrounding = None if surround is None else surround(inbound)
        value: Any = None
        answer: _Answer | None = None
        try:
            is_call = isinstance(call, _CALLS)
            if is_call and call.payload.shelf:
                inbound = complete(inbound, call.payload.shelf)
            unwrap = self._unwrappers.get(envelope.type)
            if unwrap is not None:
                call, tensors, run = unwrap(inbound)
            if is_call:
                function, args, kwargs = self._decode(inbound, call, tensors)
                tensors = None  # the function decides how long they live
                try:
                    with callee_range(self._worker, source, call.function or function, call.traceparent):
                        try:
                            value = function(*args, **kwargs) if run is None else run(function, args, kwargs)
                        except TypeError as e:
                            check_operator(function, e)
                            raise
                    if hasattr(function, MARK):
                        value = check_result(function, value)
                finally:
                    del function, args, kwargs  # a traceback refers to this frame
                if created is None and type(value) is not DeferredResult:
                    answer = self._result(source, value, call.function)
            else:
                answer = self._fetch(source, call)
        except BaseException as e:
            if created is None:
                raise
            tensors = run = None  # as above
            created.set_exception(forget_variables(e))
        finally:
            if surrounding is not None:
                if created is None and type(value) is DeferredResult:
                    surrounding.suspend()
                else:
                    surrounding.__exit__(None, None, None)
        if answer is not None:
            self._server.reply(inbound, *answer)
            return
        if created is None:
            finish = partial(self._finish, inbound, call, value, surrounding)
        else:
            finish = partial(self._created, created, inbound, call, value)
        if type(value) is DeferredResult:
            self._await(inbound, value, finish)
        else:
            finish()

    def _fetch(self, source: int, fetch: Message) -> _Answer:
        if not isinstance(fetch, RRefFetch):
            raise RpcError(f"{type(fetch).__name__} is not a call")
        value = self._references.value(fetch.rref_id, fetch.timeout or None)
        requester = self._membership.record(source)
        serialized = serialize(value, self._contexts.for_replies(requester))
        return RRefValue(serialized.payload), serialized, "to_here"

    def _result(self, source: int, value: Any, function: str) -> _Answer:
        if value is None:
            return Result(NONE_PAYLOAD), SERIALIZED_NONE, function
        requester = self._membership.record(source)
        began = monotonic_ns() if self._worker.hooks.tracer is not None else 0
        serialized = serialize(value, self._contexts.for_replies(requester), function)
        if began:
            serialized = serialized._replace(nanoseconds=monotonic_ns() - began)
        return Result(serialized.payload), serialized, function

    def _finish(
        self, inbound: Inbound, call: Call, value: DeferredResult, surrounding: Surrounding | None
    ) -> None:
        """Reply with what an asynchronous function has set."""
        if surrounding is not None:
            surrounding.resume()
        try:
            answer = self._result(inbound.envelope.source, value.value(), call.function)
        finally:
            if surrounding is not None:
                surrounding.__exit__(None, None, None)
        self._server.reply(inbound, *answer)

    def _created(self, created: Promise[Any], inbound: Inbound, call: Call | RemoteCall, value: Any) -> None:
        """Set the value of an RRef, unless creating it failed, and confirm the remote call."""
        assert isinstance(call, RemoteCall)
        if type(value) is DeferredResult:
            value.resolve(created)
        else:
            created.set_result(value)
        error = created.exception()
        if error is not None:
            trace = describe_exception(error, self._worker.name).traceback
            self._server.log_failure(inbound.envelope.source, trace)
        self._references.value_ready(call.rref_id)
        self._server.reply(inbound, RemoteResult(call.rref_id, call.fork_id))

    def _await(self, inbound: Inbound, value: DeferredResult, finish: Callable[[], None]) -> None:
        """Call ``finish`` when ``value`` is done, with the context variables of the calling thread."""
        request = served()
        context = contextvars.copy_context()

        def reply() -> None:
            try:
                finish()
            except BaseException as e:
                self._server.reply_error(inbound, e)
            finally:
                if request is not None:
                    self._server.in_flight.end(request)

        value.when_done(lambda: context.run(reply))
        if request is not None:
            request.is_deferred = True  # if that has failed, the reply is an error, sent at once

    def _decode(
        self, inbound: Inbound, call: Call | RemoteCall, tensors: list[torch.Tensor] | None
    ) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
        """Decode function, args and kwargs, and release the message."""
        payload, frames = call.payload, inbound.frames
        if payload.format is PayloadFormat.NONE:
            return self._find(call.function), (), {}
        if tensors is None:
            tensors = deserialize_tensors(payload, frames)
        pickled = payload.format is PayloadFormat.PICKLE
        references = self._references.of(inbound.envelope.source) if pickled else None
        function, args, kwargs = deserialize_call(call.function, payload, frames, tensors, references)
        inbound.release_frames()
        return self._find(call.function) if function is None else function, args, kwargs

    def _find(self, reference: str) -> Any:
        method = method_of(reference)
        if method is None:
            return find_function(reference)
        # The caller keeps the value alive until the reply; it may not have been created yet.
        value = self._references.value(method[0], time_left_for_calls())
        return getattr(value, method[1])
