"""Send and recv: what a message with differentiable tensors adds to the graphs of its two ends.

    sender                                        receiver

    x -- ... -- [tensors] --(message)-->  recv -- [tensors] -- ... -- loss
                    |                       |
                   send  <--(gradients)-----+

A *send* is a record of the edges at which the gradients of the sent tensors enter the graph; the engine
starts there when they arrive. A *recv* is a node of the autograd graph whose outputs are the received
tensors. The engine never runs it: it stops at its edges, and the gradients there are sent to the peer. It is
torch's C++ node for what must not run (shown as ``grad_fn=<Error>``): a ``torch.autograd.Function`` takes
four times as long to create.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zmqgrad.autograd.torch_internals import ERROR_NODE, error_function

EdgeOrLeaf = GradientEdge | torch.Tensor
"""Where the gradient of a tensor enters the graph. A leaf is kept itself: finding its edge is slow."""


class Send(NamedTuple):
    """Tensors that were sent to ``peer`` in message ``autograd_id``.

    For error messages, ``what`` names the call, and ``file`` and ``line`` are where the program made it;
    replies have none. ``recomputation`` is not 0 if the message was sent in one: only the pass of that number
    leads through it. ``request`` is then the call that the sender served: its caller, and its number there,
    in the order of the program. ``checkpoint`` is the call that leads from the gradients of its results,
    which arrive here, to those of its arguments.
    """

    autograd_id: int
    peer: int
    edges: tuple[EdgeOrLeaf, ...]
    what: str
    file: str = ""
    line: int = 0
    recomputation: int = 0
    request: tuple[int, int] = (0, 0)
    checkpoint: Any = None

    def describe(self) -> str:
        """Return a description of the call and its line."""
        where = f", called in {self.file}:{self.line}" if self.file else ""
        return f"{self.what or 'a call'}{where}"


def record_send(
    autograd_id: int,
    peer: int,
    tensors: Sequence[torch.Tensor],
    what: str,
    line: tuple[str, int] = ("", 0),
    recomputation: int = 0,
    request: tuple[int, int] = (0, 0),
) -> Send:
    """Return the send of ``tensors``, all of which require grad."""
    return Send(autograd_id, peer, tuple(map(edge_or_leaf, tensors)), what, *line, recomputation, request)


_PYTHON_NODE: Any = BackwardCFunction
"""Any: to mypy, a node of the graph cannot be one."""


class _OwningEdge(GradientEdge):
    """An edge that keeps its graph alive by ``owner``, another node: before torch 2.13, the node of a
    ``torch.autograd.Function`` is not kept by its Python object."""

    owner: Any = None


def edge_or_leaf(tensor: torch.Tensor) -> EdgeOrLeaf:
    """Return where the gradient of ``tensor``, which requires grad, enters the graph."""
    node = tensor.grad_fn
    if node is None:
        return tensor
    if not isinstance(node, _PYTHON_NODE):
        return GradientEdge(node, tensor.output_nr)
    edge = _OwningEdge(node, tensor.output_nr)
    with torch.enable_grad():
        edge.owner = follow(tensor).grad_fn
    return edge


def follow(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the values of ``tensor`` that comes behind it in the graph.

    It is a view, whose node passes sparse gradients on as well (that of ``view_as`` cannot). A sparse tensor
    has no views, but can be copied.
    """
    return tensor.expand_as(tensor) if tensor.layout is torch.strided else tensor.clone()


def edge_of(place: EdgeOrLeaf) -> GradientEdge:
    """Return ``place`` as an edge of the graph."""
    if isinstance(place, GradientEdge):
        return place
    if not place.requires_grad:  # not any more: Context.accumulate drops its gradient
        substitute = place.detach().requires_grad_()
        edge = edge_of(substitute)
        substitute.requires_grad_(False)
        return edge
    with torch.inference_mode(False):  # which also enables grad
        if place.layout is torch.strided:
            return get_gradient_edge(place)
        following = follow(place).grad_fn  # torch finds the node of a leaf through a view
    assert following is not None
    leaf, number = following.next_functions[0]
    assert leaf is not None
    return GradientEdge(leaf, number)


_PACKAGE = str(Path(__file__).parent.parent) + os.sep


def line_of_program(depth: int) -> tuple[str, int]:
    """Return file and line of the innermost frame of the program; empty in a thread of this package.

    ``depth``: as many callers are known to belong to this package, so all but the last are left out.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename == threading.__file__:
        return "", 0
    return frame.f_code.co_filename, frame.f_lineno


class RecvMetadata(NamedTuple):
    """The send ``autograd_id`` of ``peer``, which the gradients of a recv go to.

    ``in_reply``: the tensors arrived in a reply, not in a call, which matters for device maps.
    ``sent_before``: the last send of this worker at that time; the tensors do not depend on later ones.
    ``arguments_of`` refers to the checkpointed call that takes the gradients instead, if they are arguments.
    """

    context_id: int
    autograd_id: int
    peer: int
    outputs: int
    in_reply: bool = False
    sent_before: int = 0
    arguments_of: Callable[[], Any] | None = None


_ANCHOR = torch.empty(0, requires_grad=True, device="cpu")
"""Makes the outputs of a recv require grad. It never receives a gradient."""

_METADATA_KEY = "zmqgrad"

_makers: dict[int, Any] = {}
"""Factories of recv nodes, by the number of their tensors."""


def _maker(outputs: int) -> Any:
    return _makers.setdefault(
        outputs,
        error_function(
            "tensors from another worker are part of the distributed graph of a context: call "
            "zmqgrad.autograd.backward(context_id, roots), not Tensor.backward() or torch.autograd.grad()",
            outputs + 1,
        ),
    )


def attach_recv(recv: RecvMetadata, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Any]:
    """Make ``tensors``, which must not require grad, outputs of a recv. Returns the outputs and the node."""
    maker = _makers.get(len(tensors)) or _maker(len(tensors))
    # Only the anchor requires grad, so that the node does not keep the memory of the tensors.
    outputs: tuple[torch.Tensor, ...] = maker(*tensors, _ANCHOR)
    node: Any = outputs[0].grad_fn
    node.metadata[_METADATA_KEY] = recv
    return outputs[:-1], node


RECV_NODE = ERROR_NODE
"""The class of recv nodes; those that this package made have metadata."""


def recv_metadata(node: Any) -> RecvMetadata | None:
    """Return the metadata of a ``RECV_NODE``; None if this package did not make it."""
    found: RecvMetadata | None = node.metadata.get(_METADATA_KEY)
    return found
