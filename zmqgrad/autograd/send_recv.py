"""What a message with differentiable tensors leaves in the graphs of its two ends: a send, and a recv.

    sender                                        receiver

    x -- ... -- [tensors] --(message)-->  recv -- [tensors] -- ... -- loss
                    |                       |
                   send  <--(gradients)-----+

A *send* is only a note: where the gradients of the tensors that went enter the graph, in their order. When
they come back the engine starts there. A *recv* is a node of the autograd graph, whose outputs are the
tensors that came. The engine never runs it: it stops at its edges and sends on what arrived there. It is
torch's own node for what must not be run, made in C++ (and shown as ``grad_fn=<Error>``): a
``torch.autograd.Function`` takes four times as long to make.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

EdgeOrLeaf = GradientEdge | torch.Tensor
"""Where the gradient of a tensor enters the graph. A leaf stands for itself: finding its edge takes long."""


class Send(NamedTuple):
    """Tensors that went to ``peer`` in message ``autograd_id``.

    For people: ``what`` names the call, ``file`` and ``line`` say where the program made it; answers have
    no line.
    """

    autograd_id: int
    peer: int
    edges: tuple[EdgeOrLeaf, ...]
    what: str
    file: str = ""
    line: int = 0

    def describe(self) -> str:
        """What was sent, and where."""
        where = f", called in {self.file}:{self.line}" if self.file else ""
        return f"{self.what or 'a call'}{where}"


def record_send(autograd_id: int, peer: int, tensors: Sequence[torch.Tensor], what: str) -> Send:
    """The send of those ``tensors`` (all of which require grad), made by the line that the program is at."""
    return Send(autograd_id, peer, tuple(map(edge_or_leaf, tensors)), what, *_line_of_program())


def edge_or_leaf(tensor: torch.Tensor) -> EdgeOrLeaf:
    """Where the gradient of ``tensor``, which requires grad, enters the graph."""
    node = tensor.grad_fn
    return tensor if node is None else GradientEdge(node, tensor.output_nr)


def edge_of(start: EdgeOrLeaf) -> GradientEdge:
    """``start`` as an edge of the graph."""
    if isinstance(start, GradientEdge):
        return start
    if not start.requires_grad:  # any more: what comes for it is dropped (Context.accumulate)
        stand_in = start.detach().requires_grad_()
        edge = edge_of(stand_in)
        stand_in.requires_grad_(False)
        return edge
    if start.layout is torch.strided:
        return get_gradient_edge(start)
    # Torch finds the node of a leaf behind a view of it; a sparse tensor has no views, but can be copied.
    with torch.enable_grad():
        copied = start.clone().grad_fn
    assert copied is not None
    leaf, number = copied.next_functions[0]
    assert leaf is not None
    return GradientEdge(leaf, number)


_PACKAGE = str(Path(__file__).parent.parent) + os.sep


def _line_of_program() -> tuple[str, int]:
    """File and line of the innermost frame outside this package; nothing if there is but the thread's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename == threading.__file__:
        return "", 0
    return frame.f_code.co_filename, frame.f_lineno


class RecvMetadata(NamedTuple):
    """Where the gradients of a recv go: to the send ``autograd_id`` of ``peer``.

    ``in_reply``: its tensors came in a reply, not in a call, which matters for device maps.
    """

    context_id: int
    autograd_id: int
    peer: int
    outputs: int
    in_reply: bool = False


_ANCHOR = torch.empty(0, requires_grad=True, device="cpu")
"""What makes the outputs of a recv require grad. Nothing ever flows to it."""

_NOTE = "zmqgrad"

_makers: dict[int, Any] = {}
"""By the number of tensors, what makes recvs of them."""


def _maker(outputs: int) -> Any:
    return _makers.setdefault(
        outputs,
        torch._C._functions.DelayedError(
            "tensors that came from another worker are part of the distributed graph of a context: call "
            "zmqgrad.autograd.backward(context_id, roots), not Tensor.backward() or torch.autograd.grad()",
            outputs + 1,
        ),
    )


def attach_recv(note: RecvMetadata, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Any]:
    """``tensors``, which must not require grad, as outputs of a recv; and its node."""
    maker = _makers.get(len(tensors)) or _maker(len(tensors))
    # The anchor is the only one to require grad, so that the node keeps no tensor's memory.
    outputs: tuple[torch.Tensor, ...] = maker(*tensors, _ANCHOR)
    node: Any = outputs[0].grad_fn
    node.metadata[_NOTE] = note
    return outputs[:-1], node


RECV_NODE: Any = type(_maker(0)(_ANCHOR).grad_fn)
"""The class of the nodes that stand for recvs; those of ours have a note."""


def recv_metadata(node: Any) -> RecvMetadata | None:
    """Where the gradients of a ``RECV_NODE`` go; None if it is not one of ours."""
    note: RecvMetadata | None = node.metadata.get(_NOTE)
    return note


LEAF_NODE: Any = type(_ANCHOR.view(0).grad_fn.next_functions[0][0])  # type: ignore[union-attr]
"""The class of the nodes that stand for leaves (AccumulateGrad); they have a ``variable``."""
