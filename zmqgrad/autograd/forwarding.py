"""How autograd takes part in RPC: it fills the doors of one worker.

Outgoing calls and answers of a recording thread are wrapped with the context; those that arrive are opened,
served inside the context, and answered in it. Gradients (:mod:`~zmqgrad.autograd.backward`) and clean-up
(:mod:`~zmqgrad.autograd.releases`) have messages of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zmqgrad.autograd.backward.participant import Participant
from zmqgrad.autograd.context import ActiveContext, Context, Contexts, active_context, wants_result_grad
from zmqgrad.autograd.releases import Releases
from zmqgrad.autograd.roots import check_roots
from zmqgrad.autograd.send_recv import record_send
from zmqgrad.rpc.calls import What, describe
from zmqgrad.rpc.dispatch import Opened
from zmqgrad.rpc.packing.unpacking import unpack_tensors
from zmqgrad.rpc.worker import Worker
from zmqgrad.transport.base import Inbound
from zmqgrad.wire.messages import (
    NOTHING,
    RESPONSE,
    Call,
    ForwardAutogradReq,
    ForwardAutogradResp,
    Message,
    MessageType,
    Payload,
    RemoteCall,
    RemoteResult,
    Result,
    RRefFetch,
    RRefValue,
)

_ASKING = (Call, RemoteCall, RRefFetch)
_WRAPPED = (*_ASKING, Result, RemoteResult, RRefValue)


def install(worker: Worker) -> None:
    """Let ``worker`` record, and answer what other workers ask of a context."""
    autograd = Autograd(worker)
    doors = worker.doors
    doors.extensions["autograd"] = autograd
    doors.outgoing = autograd.outgoing
    doors.unsent = autograd.unsent
    doors.with_history = _keeps_history
    doors.backward = autograd.backward_from
    doors.debug["autograd"] = autograd.debug_info
    doors.requests[MessageType.FORWARD_AUTOGRAD_REQ] = autograd.on_forward
    doors.openers[MessageType.FORWARD_AUTOGRAD_RESP] = autograd.open_forward
    autograd.participant.install()
    autograd.releases.install()


def _keeps_history() -> bool:
    return active_context() is not None and torch.is_grad_enabled()


def autograd_of(worker: Worker) -> Autograd:
    """The autograd floor of ``worker``."""
    found: Autograd = worker.doors.extensions["autograd"]
    return found


class Autograd:
    """The contexts of one worker, and what is recorded for them."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.contexts = Contexts()
        self.releases = Releases(worker, self.contexts)
        self.participant = Participant(worker, self.contexts, self.releases.end_passes)

    def begin(self) -> Context:
        """A new context that begins here."""
        return self.contexts.new(self._worker.ids.next())

    def outgoing(self, peer: int, message: Message, tensors: Sequence[torch.Tensor], what: What) -> Message:
        """``message``, wrapped if the calling thread records."""
        context = active_context()
        if context is None or not isinstance(message, _WRAPPED):
            return message
        context.add_peer(peer)
        if context.released:  # meanwhile: whoever told of its end may have missed this peer
            return message
        if isinstance(message, _ASKING):
            differentiates = torch.is_grad_enabled()
            autograd_id = self._record(context, peer, tensors, what) if differentiates else 0
            return ForwardAutogradReq(context.id, autograd_id, message, differentiates)
        autograd_id = self._record(context, peer, tensors, what) if wants_result_grad() else 0
        return ForwardAutogradResp(context.id, autograd_id, message)

    def _record(self, context: Context, peer: int, tensors: Sequence[torch.Tensor], what: What) -> int:
        """The id of a send of ``tensors``; 0 if none of them requires grad."""
        differentiable = [t for t in tensors if t.requires_grad]
        if not differentiable:
            return 0
        autograd_id = self._worker.ids.next()
        context.add_send(record_send(autograd_id, peer, differentiable, describe(what)))
        return autograd_id

    def unsent(self, message: Message) -> None:
        """What was recorded for ``message`` did not go."""
        context = active_context()
        if context is not None and isinstance(message, ForwardAutogradReq):
            context.remove_send(message.autograd_id)

    def on_forward(self, inbound: Inbound) -> None:
        """A call as part of a context: run it there."""
        message = inbound.message
        assert isinstance(message, ForwardAutogradReq)
        context = self.contexts.get_or_create(message.context_id)
        tensors = self._received(context, message.autograd_id, message.wrapped, inbound)
        with ActiveContext(context, message.answer_wanted):
            self._worker.callee.run(inbound, message.wrapped, tensors)

    def open_forward(self, inbound: Inbound) -> Opened:
        """An answer as part of a context, in the thread that waits for it."""
        message = inbound.message
        assert isinstance(message, ForwardAutogradResp)
        context = self.contexts.get_or_create(message.context_id)
        tensors = self._received(context, message.autograd_id, message.wrapped, inbound)
        if not message.autograd_id:  # asked for under no_grad: constants, whatever they are over there
            tensors = [t.detach() if t.requires_grad else t for t in tensors]
        return Opened(message.wrapped, tensors)

    def _received(
        self, context: Context | None, autograd_id: int, wrapped: Message, inbound: Inbound
    ) -> list[torch.Tensor]:
        payload: Payload = getattr(wrapped, "payload", NOTHING)
        if context is None:
            return unpack_tensors(payload, inbound.frames)
        source = inbound.envelope.source
        context.add_peer(source)
        if not autograd_id:
            return unpack_tensors(payload, inbound.frames)
        wanted = payload.tensors.requiring_grad()
        tensors = unpack_tensors(payload, inbound.frames, differentiable=False)
        in_reply = inbound.envelope.type & RESPONSE != 0
        return context.receive(autograd_id, source, tensors, wanted, in_reply)

    def debug_info(self) -> dict[str, int]:
        """How many contexts are known here, and how many passes that began here are under way."""
        return {
            "num_autograd_contexts": len(self.contexts.live()),
            "num_current_backward_passes": self.participant.running(),
        }

    def backward_from(self, context_id: int, root: torch.Tensor, retain_graph: bool) -> None:
        """One backward pass from one tensor of this worker, for ``RRef.backward``."""
        self.participant.run(self.contexts.find(context_id), check_roots([root]), retain_graph, "auto")
