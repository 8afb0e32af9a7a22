"""Distributed autograd: recording calls, sending gradients back, releasing contexts.

A context records a *send* for tensors that were sent and a *recv* for tensors that were received; both have
the same autograd id. The root is the worker that called ``backward``; it detects the end of the pass.
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
    """Caller to callee: the request ``wrapped``, made inside a context.

    ``autograd_id`` matches the *send* of the caller with the *recv* of the callee; 0 if no tensor in the
    request requires grad. If ``wants_result_grad`` is false, the caller does not differentiate
    (``torch.no_grad``), and the result records no send. ``seed`` is for the random generators of the callee,
    if the caller runs a checkpointed function, which repeats its calls. ``recomputation`` is 0 if the call is
    checkpointed: the callee keeps no graph, and computes again when the gradient arrives. If the call is a
    part of such a recomputation, it is the number of the pass that leads through it. A checkpointed function
    fetches a value with 0, as it will do so again.
    """

    TYPE: ClassVar[MessageType] = MessageType.FORWARD_AUTOGRAD_REQ
    context_id: Id
    autograd_id: Id
    wrapped: Call | RemoteCall | RRefFetch
    wants_result_grad: bool = True
    seed: Size | None = None
    recomputation: Id | None = None


class ForwardAutogradResp(Message, frozen=True):
    """Callee to caller: the reply ``wrapped``, with the *send* of the callee."""

    TYPE: ClassVar[MessageType] = MessageType.FORWARD_AUTOGRAD_RESP
    context_id: Id
    autograd_id: Id
    wrapped: Result | RemoteResult | RRefValue


class StallReport(WireStruct, frozen=True):
    """Whether the pass was stalled on ``worker`` after its ``step``-th step."""

    worker: WorkerId
    step: Size
    waits: bool = False
    """Groups that were reached wait for further entries."""
    has_callbacks: bool = False
    """Hooks have queued callbacks, to be called at the end of the pass."""


Ids = Annotated[tuple[Id, ...], Meta(max_length=MAX_TENSORS)]


class ProgressReport(WireStruct, frozen=True):
    """A worker has handled ``requests`` of a pass, and sent the requests in ``sent``.

    A request is the gradients of one send, identified by its autograd id. ``sent`` lists workers, with the
    requests sent to each. ``error`` is set if handling failed, or if the worker has lost a peer: ``lost`` are
    requests that it may have sent to that peer, which may not have arrived.
    """

    requests: Ids
    sent: Annotated[tuple[tuple[WorkerId, Ids], ...], Meta(max_length=MAX_TENSORS)]
    waiting: StallReport
    error: ExceptionReply | None = None
    lost: Ids = ()


class PassOptions(WireStruct, frozen=True):
    """How a backward pass runs; the same on all its workers."""

    retain_graph: bool = False
    create_graph: bool = False
    """Whether the pass is recorded, so that its gradients can be differentiated."""
    accumulate: bool = True
    """Whether leaves accumulate their gradients. If not, the pass returns gradients of some tensors."""
    origin: Annotated[tuple[Id, ...], Meta(max_length=MAX_TENSORS)] = ()
    """Of an inner pass: the pass of the program that it is a part of, and the checkpointed calls that led to
    it, each as its worker and its number there. Gradients are added in that order."""


NOT_REACHED, NO_GRADIENT = -1, -2
"""Instead of the index of a gradient."""

GradientIndices = Annotated[tuple[Annotated[int, Meta(ge=NO_GRADIENT)], ...], Meta(max_length=MAX_TENSORS)]


class BackwardAutogradReq(Message, frozen=True):
    """Worker of *recvs* to worker of their *sends*: the gradients of the tensors that were sent.

    ``sends`` lists autograd ids, each with the index in ``tensors`` of the gradient of each of its tensors.
    If a gradient does not exist (which differs from zeros), the index is -1 if the pass did not reach the
    tensor, and -2 if it did and produced None. ``root`` started the pass. In a message to the root itself,
    ``handled`` replaces a separate report (BACKWARD_AUTOGRAD_RESP, whose message id is the pass id).

    In a recorded pass, ``history`` matches the *send* of the gradients that require grad with
    their *recv*; 0 if none does. ``in_reply``: the tensors had arrived in a reply, which matters for device
    maps.
    """

    TYPE: ClassVar[MessageType] = MessageType.BACKWARD_AUTOGRAD_REQ
    context_id: Id
    pass_id: Id
    root: WorkerId
    sends: Annotated[tuple[tuple[Id, GradientIndices], ...], Meta(max_length=MAX_TENSORS)]
    tensors: Tensors = NO_TENSORS
    options: PassOptions = PassOptions()
    handled: ProgressReport | None = None
    history: Id = 0
    in_reply: bool = False

    def is_awaited_by(self, worker: int) -> bool:
        """Whether ``worker`` is the root of the pass, which waits for it."""
        return worker == self.root


class BackwardAutogradResp(Message, frozen=True):
    """Worker to the root of the pass: the requests that were handled.

    When every request that was reported as sent is reported as handled, nothing of the pass is in flight.
    """

    TYPE: ClassVar[MessageType] = MessageType.BACKWARD_AUTOGRAD_RESP
    handled: ProgressReport


Indices = Annotated[tuple[Size, ...], Meta(max_length=MAX_TENSORS)]


class GroupReport(WireStruct, frozen=True):
    """Nodes that may run together, and what they wait for (a part of a :class:`ReachabilityReport`).

    ``starts`` lists the entries that start here: 0 for the roots of the pass, i + 1 for send i.
    ``dependents`` lists the groups behind this one by their indices, and ``recvs`` the (autograd id, worker)
    of the recvs that it leads to. ``reached``: an entry of it has arrived.
    """

    starts: Indices
    dependents: Indices
    recvs: Annotated[tuple[tuple[Id, WorkerId], ...], Meta(max_length=MAX_TENSORS)]
    reached: bool


class ReachabilityReport(WireStruct, frozen=True):
    """Which recvs on ``worker`` each of its entries reaches, without those already sent on.

    ``sends`` lists (autograd id, receiving worker, description of the tensors). Bit 0 of ``arrived``
    (little-endian) is for the roots of the pass, bit i + 1 for send i.
    """

    worker: WorkerId
    sends: Annotated[tuple[tuple[Id, WorkerId, Text], ...], Meta(max_length=MAX_TENSORS)]
    arrived: Mask
    groups: Annotated[tuple[GroupReport, ...], Meta(max_length=MAX_TENSORS)]


class DiscoverAutogradReq(Message, frozen=True):
    """Root of a pass to a worker: report which recvs each entry reaches.

    Reply: DISCOVER_AUTOGRAD_RESP.
    """

    TYPE: ClassVar[MessageType] = MessageType.DISCOVER_AUTOGRAD_REQ
    context_id: Id
    pass_id: Id
    options: PassOptions


class DiscoverAutogradResp(Message, frozen=True):
    """Reply to DISCOVER_AUTOGRAD_REQ."""

    TYPE: ClassVar[MessageType] = MessageType.DISCOVER_AUTOGRAD_RESP
    reach: ReachabilityReport


class DropAutogradReq(Message, frozen=True):
    """Root of a pass to a worker: no gradient will arrive for ``sends``; continue without them.

    Without ``sends``, the pass has come to its end everywhere: call the callbacks that were queued in it.
    ``request`` identifies this message in the report, which is a BACKWARD_AUTOGRAD_RESP.
    """

    TYPE: ClassVar[MessageType] = MessageType.DROP_AUTOGRAD_REQ
    context_id: Id
    pass_id: Id
    request: Id
    root: WorkerId
    options: PassOptions
    sends: Annotated[tuple[Id, ...], Meta(max_length=MAX_TENSORS)]


class CleanupAutogradContextReq(Message, frozen=True):
    """Worker to its peers in these contexts: release them, and notify further peers.

    ``passes`` lists backward passes (context id, pass number) that have ended in contexts that continue:
    release those too.
    """

    TYPE: ClassVar[MessageType] = MessageType.CLEANUP_AUTOGRAD_CONTEXT_REQ
    contexts: Annotated[tuple[Id, ...], Meta(max_length=MAX_TENSORS)]
    passes: Annotated[tuple[tuple[Id, Id], ...], Meta(max_length=MAX_TENSORS)] = ()


class CleanupAutogradContextResp(Message, frozen=True):
    """Reply to CLEANUP_AUTOGRAD_CONTEXT_REQ: released, or unknown."""

    TYPE: ClassVar[MessageType] = MessageType.CLEANUP_AUTOGRAD_CONTEXT_RESP
