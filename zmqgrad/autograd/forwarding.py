"""The hooks of autograd in RPC.

Calls and replies that a thread sends inside a context are wrapped with its id. The receiver unwraps them, and
runs the call and sends its reply inside the same context. Gradients (:mod:`~zmqgrad.autograd.engine`) and
releases (:mod:`~zmqgrad.autograd.releases`) have messages of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

from zmqgrad.autograd import local_passes
from zmqgrad.autograd.checkpoints import CheckpointedCall, checkpointed
from zmqgrad.autograd.context import (
    Context,
    Contexts,
    active_context,
    own_context,
    pass_context,
    recomputation,
    set_active_context,
    wants_result_grad,
)
from zmqgrad.autograd.engine.participant import Participant
from zmqgrad.autograd.releases import Releases
from zmqgrad.autograd.repeated_calls import Run, is_repeated, run_seeded, seed_for_call
from zmqgrad.autograd.roots import check_roots
from zmqgrad.autograd.torch_internals import (
    any_tensor,
    in_recomputation,
    saved_tensor_hooks,
    show_passes_to_torch,
)
from zmqgrad.autograd.versions import ParameterVersions, Reading
from zmqgrad.errors import AutogradError
from zmqgrad.rpc.calls import Description
from zmqgrad.rpc.hooks import Unwrapped
from zmqgrad.rpc.serialization.deserializer import deserialize_tensors
from zmqgrad.rpc.worker import Worker
from zmqgrad.transport.base import Inbound
from zmqgrad.wire.messages import (
    NONE_PAYLOAD,
    RESPONSE,
    Call,
    ForwardAutogradReq,
    ForwardAutogradResp,
    Message,
    MessageType,
    PassOptions,
    Payload,
    RemoteCall,
    RemoteResult,
    Result,
    RRefFetch,
    RRefValue,
)

_CALLS = (Call, RemoteCall, RRefFetch)
_WRAPPED = (*_CALLS, Result, RemoteResult, RRefValue)


def install(worker: Worker) -> None:
    """Enable distributed autograd on ``worker``."""
    autograd = Autograd(worker)
    hooks = worker.hooks
    hooks.extensions["autograd"] = autograd
    hooks.request_interceptor = autograd.outgoing
    hooks.on_send_failed = autograd.unsent
    hooks.with_history = _keeps_history
    hooks.backward = autograd.backward_from
    hooks.checkpointing = _checkpointing
    hooks.on_local_value = _note_use
    hooks.debug["autograd"] = autograd.debug_info
    hooks.requests[MessageType.FORWARD_AUTOGRAD_REQ] = worker.callee.run
    hooks.surroundings[MessageType.FORWARD_AUTOGRAD_REQ] = autograd.surround
    hooks.request_unwrappers[MessageType.FORWARD_AUTOGRAD_REQ] = autograd.open_request
    hooks.response_unwrappers[MessageType.FORWARD_AUTOGRAD_RESP] = autograd.open_response
    autograd.participant.install()
    autograd.releases.install()
    local_passes.install()
    show_passes_to_torch()


def _keeps_history() -> bool:
    return active_context() is not None and torch.is_grad_enabled()


def _note_use(value: Any) -> None:
    """Note that the calling thread uses a value of this worker."""
    context = active_context()
    if context is not None and is_repeated.get() and not recomputation.get()[0]:
        context.keeps_graphs |= any_tensor(lambda tensor: tensor.grad_fn is not None, value)


_checkpoints: ContextVar[bool] = ContextVar("zmqgrad_autograd_checkpoints", default=False)


@contextmanager
def _checkpointing() -> Iterator[None]:
    token = _checkpoints.set(True)
    try:
        yield
    finally:
        _checkpoints.reset(token)


def autograd_of(worker: Worker) -> Autograd:
    """Return the autograd layer of ``worker``."""
    found: Autograd = worker.hooks.extensions["autograd"]
    return found


class Autograd:
    """Distributed autograd on one worker: its contexts, and what RPCs record in them."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.versions = ParameterVersions()
        self.contexts = Contexts(worker.hooks, self.versions)
        self.releases = Releases(worker, self.contexts)
        self.participant = Participant(worker, self.contexts, self.releases.end_passes)

    def begin(self) -> Context:
        """Create a context."""
        return self.contexts.new(self._worker.ids.next())

    def outgoing(
        self, peer: int, message: Message, tensors: Sequence[torch.Tensor], what: Description
    ) -> Message:
        """Return ``message``, wrapped with the active context if there is one."""
        context = own_context()
        if context is None and (context := pass_context.get()) is not None and not in_recomputation():
            return message
        if context is None or not isinstance(message, _WRAPPED):
            return message
        if not context.released:
            context.add_peer(peer)
        if context.released:  # perhaps meanwhile: this peer may not have been notified of the release
            return self._of_ended(context, message, tensors)
        if isinstance(message, _CALLS):
            if is_repeated.get() or _checkpoints.get() or saved_tensor_hooks(False) or recomputation.get()[0]:
                return self._repeatable(context, peer, message, tensors, what)
            differentiates = torch.is_grad_enabled()
            autograd_id = context.record(self._worker.ids, peer, tensors, what) if differentiates else 0
            return ForwardAutogradReq(context.id, autograd_id, message, differentiates)
        if isinstance(message, RRefValue):
            _note_use(tensors)
        call = checkpointed.get()
        if call is not None and isinstance(message, Result):
            message, tensors = call.record(message, tensors)
        recorded = wants_result_grad()
        autograd_id = context.record(self._worker.ids, peer, tensors, what, reply=True) if recorded else 0
        return ForwardAutogradResp(context.id, autograd_id, message)

    def _repeatable(
        self,
        context: Context,
        peer: int,
        message: Call | RemoteCall | RRefFetch,
        tensors: Sequence[torch.Tensor],
        what: Description,
    ) -> Message:
        """Return ``message``, wrapped, where it may be sent again, or has been sent before."""
        # What a checkpointed call calls, and so on, is called again: nothing is recorded the first time.
        differentiates = torch.is_grad_enabled() and (wants_result_grad() or not is_repeated.get())
        # A checkpoint of torch wants the values again. No pass leads through what is sent for them.
        recorded = differentiates and not in_recomputation()
        autograd_id = context.record(self._worker.ids, peer, tensors, what) if recorded else 0
        seed = None if isinstance(message, RRefFetch) else seed_for_call()
        number = recomputation.get()[0] or None
        if number is None and (
            is_repeated.get()
            if isinstance(message, RRefFetch)
            else _checkpoints.get() and differentiates and isinstance(message, Call)
        ):
            number = 0
        return ForwardAutogradReq(context.id, autograd_id, message, differentiates, seed, number)

    def _of_ended(
        self,
        context: Context,
        message: Call | RemoteCall | RRefFetch | Result | RemoteResult | RRefValue,
        tensors: Sequence[torch.Tensor],
    ) -> Message:
        """Return ``message``; a reply whose context has ended says so, as it has lost its history."""
        if isinstance(message, _CALLS) or not wants_result_grad():
            return message
        if checkpointed.get() is None and not any(each.requires_grad for each in tensors):
            return message
        return ForwardAutogradResp(context.id, self._worker.ids.next(), message)

    def unsent(self, message: Message) -> None:
        """Remove the send of ``message``, which could not be sent."""
        context = active_context()
        if context is not None and isinstance(message, ForwardAutogradReq):
            context.remove_send(message.autograd_id)

    def surround(self, inbound: Inbound) -> Reading | None:
        """Begin to read shared parameters, for a call of a context."""
        message = inbound.message
        assert isinstance(message, ForwardAutogradReq)
        if not self.versions.are_shared():
            return None
        reading = Reading(self.versions, fresh=self.contexts.get(message.context_id) is None)
        reading.__enter__()
        return reading

    def open_request(self, inbound: Inbound) -> Unwrapped:
        """Unwrap a call, and make its context the active one of what runs it."""
        message = inbound.message
        assert isinstance(message, ForwardAutogradReq)
        context = self.contexts.get_or_create(message.context_id)
        tensors = self._received(context, message.autograd_id, message.wrapped, inbound)
        if context is None:  # the reply has to say that the context has ended
            context = Context(message.context_id, released=True)
        if message.seed is not None or message.recomputation is not None:
            context.computes_again = True
        set_active_context(context, message.wants_result_grad)
        envelope = inbound.envelope
        recomputation.set((message.recomputation or 0, (envelope.source, envelope.message_id)))
        run: Run | None = None
        if isinstance(message.wrapped, RRefFetch):
            is_repeated.set(message.recomputation == 0)
        elif message.recomputation == 0:
            call = CheckpointedCall(self._worker, context, envelope.source, tensors)
            checkpointed.set(call)
            run = call.run
        if message.seed is not None:
            is_repeated.set(True)
            run = partial(run_seeded, message.seed, run)
        return Unwrapped(message.wrapped, tensors, run)

    def open_response(self, inbound: Inbound) -> Unwrapped:
        """Unwrap a reply that belongs to a context. Runs in the thread that waits for it.

        Raises:
            AutogradError: if the context has ended, and the reply would have been part of its graph.
            RpcError: if it has because this worker was shut down.
        """
        message = inbound.message
        assert isinstance(message, ForwardAutogradResp)
        context = self.contexts.get_or_create(message.context_id)
        if context is None and message.autograd_id:
            if self._worker.closed:  # which has ended all contexts
                raise self._worker.closed_error()
            raise AutogradError(
                f"Couldn't find autograd context with id: {message.context_id}: it ended before the reply of "
                f"this call arrived, so the result cannot be differentiated any more. Wait for the reply "
                f"inside the 'with context()' block, or make the call under torch.no_grad() or outside of it"
            )
        tensors = self._received(context, message.autograd_id, message.wrapped, inbound)
        if not message.autograd_id:  # the call was made under no_grad: the results are constants
            tensors = [t.detach() if t.requires_grad else t for t in tensors]
        return Unwrapped(message.wrapped, tensors)

    def _received(
        self, context: Context | None, autograd_id: int, wrapped: Message, inbound: Inbound
    ) -> list[torch.Tensor]:
        payload: Payload = getattr(wrapped, "payload", NONE_PAYLOAD)
        if context is None:
            return deserialize_tensors(payload, inbound.frames)
        source = inbound.envelope.source
        context.add_peer(source)
        if source in self._worker.lost:  # meanwhile: its loss may have found nothing of this context here
            self.releases.miss(source, context)
        if not autograd_id:
            return deserialize_tensors(payload, inbound.frames)
        wanted = payload.tensors.requiring_grad()
        tensors = deserialize_tensors(payload, inbound.frames, differentiable=False)
        in_reply = inbound.envelope.type & RESPONSE != 0
        return context.receive(autograd_id, source, tensors, wanted, in_reply)

    def debug_info(self) -> dict[str, int]:
        """Return the number of contexts here, and of those with a running pass (see ``get_debug_info``)."""
        return {
            "num_autograd_contexts": len(self.contexts.live()),
            "num_current_backward_passes": self.participant.running(),
        }

    def backward_from(self, context_id: int, root: torch.Tensor, retain_graph: bool) -> None:
        """Run a backward pass from one tensor of this worker, for ``RRef.backward``."""
        options = PassOptions(retain_graph)
        self.participant.run(self.contexts.find(context_id), check_roots([root]), options, "auto")
