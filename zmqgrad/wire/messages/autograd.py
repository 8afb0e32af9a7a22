"""Distributed autograd: what travels is noted, gradients go back, contexts are forgotten (DESIGN section 10).

Send: what a context notes of tensors that went out; recv: of those that came in; the autograd id joins the
two. Root: the worker that called ``backward``; it counts what is under way.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from zmqgrad.wire.messages.base import (
    MAX_TENSORS,
    Id,
    Mask,
    Message,
    MessageType,
    Size,
    Text,
    WireStruct,
    WorkerId,
)
from zmqgrad.wire.messages.calls import Call, ExceptionReply, RemoteCall, RemoteResult, Result
from zmqgrad.wire.messages.payloads import NO_TENSORS, Tensors
from zmqgrad.wire.messages.references import RRefFetch, RRefValue


class ForwardAutogradReq(Message, frozen=True):
    """Caller to callee: ``wrapped``, as part of a context.

    ``autograd_id`` joins the *send* of the caller to the *recv* of the callee; 0 if no tensor that
    travels requires grad. Without ``answer_wanted`` the caller does not differentiate (``torch.no_grad``),
    and the answer shall leave no send.
    """

    TYPE: ClassVar[MessageType] = MessageType.FORWARD_AUTOGRAD_REQ
    context_id: Id
    autograd_id: Id
    wrapped: Call | RemoteCall | RRefFetch
    answer_wanted: bool = True


class ForwardAutogradResp(Message, frozen=True):
    """Callee to caller: ``wrapped``, as part of a context; the same the other way round."""

    TYPE: ClassVar[MessageType] = MessageType.FORWARD_AUTOGRAD_RESP
    context_id: Id
    autograd_id: Id
    wrapped: Result | RemoteResult | RRefValue


class StallReport(WireStruct, frozen=True):
    """What stood still on ``worker`` after its ``step``-th step of a pass."""

    worker: WorkerId
    step: Size
    waits: bool = False
    """Groups that something has reached wait for something else."""


Ids = Annotated[tuple[Id, ...], Meta(max_length=MAX_TENSORS)]


class ProgressReport(WireStruct, frozen=True):
    """A worker has handled ``requests`` of a pass, and that set off those in ``sent``.

    Gradients for a send are a request, known by its autograd id. ``sent`` gives workers, and the requests
    that went to each. ``error`` is what went wrong.
    """

    requests: Ids
    sent: Annotated[tuple[tuple[WorkerId, Ids], ...], Meta(max_length=MAX_TENSORS)]
    waiting: StallReport
    error: ExceptionReply | None = None


NOT_REACHED, NO_GRADIENT = -1, -2
"""In place of the index of a gradient."""

GradientIndices = Annotated[tuple[Annotated[int, Meta(ge=NO_GRADIENT)], ...], Meta(max_length=MAX_TENSORS)]


class BackwardAutogradReq(Message, frozen=True):
    """Worker of *recvs* to worker of their *sends*: the gradients of the tensors that you sent.

    ``sends`` gives the autograd id of each, and for each of its tensors the index in ``tensors``; or where no
    gradient exists (which is not the same as zeros), -1 if the backward pass did not come there, and -2 if it
    did and nothing came out. ``root`` started the pass and counts what is under way. Where
    the message goes to the root itself, ``handled`` spares an answer of its own (BACKWARD_AUTOGRAD_RESP,
    whose message id is the pass id).
    """

    TYPE: ClassVar[MessageType] = MessageType.BACKWARD_AUTOGRAD_REQ
    context_id: Id
    pass_id: Id
    root: WorkerId
    sends: Annotated[tuple[tuple[Id, GradientIndices], ...], Meta(max_length=MAX_TENSORS)]
    tensors: Tensors = NO_TENSORS
    retain_graph: bool = False
    handled: ProgressReport | None = None

    def is_awaited_by(self, worker: int) -> bool:
        """The root of the pass waits for it."""
        return worker == self.root


class BackwardAutogradResp(Message, frozen=True):
    """Worker to the root of the pass: what I have handled.

    When the root has seen every request that it was told of handled, nothing of the pass is in flight.
    """

    TYPE: ClassVar[MessageType] = MessageType.BACKWARD_AUTOGRAD_RESP
    handled: ProgressReport


class ReachabilityReport(WireStruct, frozen=True):
    """Which recvs on ``worker`` each of its entries leads to, as far as they have not been sent on.

    ``sends`` gives (autograd id, receiving worker, what was sent). Masks are little-endian, bit 0 for the
    roots of the pass and bit i + 1 for send i: ``arrived``, and in ``groups`` that of each group, beside the
    (autograd id, worker) of its recvs.
    """

    worker: WorkerId
    sends: Annotated[tuple[tuple[Id, WorkerId, Text], ...], Meta(max_length=MAX_TENSORS)]
    arrived: Mask
    groups: Annotated[
        tuple[tuple[Mask, Annotated[tuple[tuple[Id, WorkerId], ...], Meta(max_length=MAX_TENSORS)]], ...],
        Meta(max_length=MAX_TENSORS),
    ]


class DiscoverAutogradReq(Message, frozen=True):
    """Root of a pass to a worker: what may still arrive with you, and where would it lead?

    Reply: DISCOVER_AUTOGRAD_RESP.
    """

    TYPE: ClassVar[MessageType] = MessageType.DISCOVER_AUTOGRAD_REQ
    context_id: Id
    pass_id: Id
    retain_graph: bool


class DiscoverAutogradResp(Message, frozen=True):
    """Answer to the above."""

    TYPE: ClassVar[MessageType] = MessageType.DISCOVER_AUTOGRAD_RESP
    reach: ReachabilityReport


class DropAutogradReq(Message, frozen=True):
    """Root of a pass to a worker: no gradient will come for ``sends``, go on without them.

    ``request`` stands for this message in the report, which is a BACKWARD_AUTOGRAD_RESP.
    """

    TYPE: ClassVar[MessageType] = MessageType.DROP_AUTOGRAD_REQ
    context_id: Id
    pass_id: Id
    request: Id
    root: WorkerId
    retain_graph: bool
    sends: Annotated[tuple[Id, ...], Meta(max_length=MAX_TENSORS)]


class CleanupAutogradContextReq(Message, frozen=True):
    """Worker that leaves contexts to those it told of them: forget them, and pass it on.

    ``passes``: context and number of backward passes that have ended in contexts that go on: the same.
    """

    TYPE: ClassVar[MessageType] = MessageType.CLEANUP_AUTOGRAD_CONTEXT_REQ
    contexts: Annotated[tuple[Id, ...], Meta(max_length=MAX_TENSORS)]
    passes: Annotated[tuple[tuple[Id, Id], ...], Meta(max_length=MAX_TENSORS)] = ()


class CleanupAutogradContextResp(Message, frozen=True):
    """Answer to the above: forgotten, or never known."""

    TYPE: ClassVar[MessageType] = MessageType.CLEANUP_AUTOGRAD_CONTEXT_RESP
