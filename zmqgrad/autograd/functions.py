"""What a message with differentiable tensors leaves in the graphs of its two ends: a send, and a recv.

    sender                                        receiver

    x -- ... -- [tensors] --(message)-->  recv -- [tensors] -- ... -- loss
                    |                       |
                   send  <--(gradients)-----+

A *send* is only a note: the gradient edges of the tensors that went, in their order. When the gradients
come back the engine starts there. A *recv* is a node of the autograd graph, whose outputs are the tensors
that came. The engine never runs it: it stops at its edges and sends on what arrived there.
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

from zmqgrad.errors import AutogradError


class Send(NamedTuple):
    """Tensors that went to ``peer`` in message ``autograd_id``.

    For people: ``what`` names the call, ``file`` and ``line`` say where the program made it; answers have
    no line.
    """

    autograd_id: int
    peer: int
    edges: tuple[GradientEdge, ...]
    what: str
    file: str = ""
    line: int = 0

    def describe(self) -> str:
        """What was sent, and where."""
        where = f", called in {self.file}:{self.line}" if self.file else ""
        return f"{self.what or 'a call'}{where}"


def record_send(autograd_id: int, peer: int, tensors: Sequence[torch.Tensor], what: str) -> Send:
    """The send of those ``tensors`` (all of which require grad), made by the line that the program is at."""
    return Send(autograd_id, peer, tuple(map(edge_of, tensors)), what, *_line_of_program())


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """Where the gradient of ``tensor`` enters the graph."""
    node = tensor.grad_fn
    if node is not None:
        return GradientEdge(node, tensor.output_nr)
    if tensor.layout is torch.strided:
        return get_gradient_edge(tensor)
    # Torch finds the node of a leaf behind a view of it; a sparse tensor has no views, but can be copied.
    with torch.enable_grad():
        copied = tensor.clone().grad_fn
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


class RecvNote(NamedTuple):
    """Where the gradients of a recv go: to the send ``autograd_id`` of ``peer``."""

    context_id: int
    autograd_id: int
    peer: int
    outputs: int


class _Box:
    """Holds tensors where autograd does not see them as inputs.

    A function that returns its inputs gives outputs that forbid in-place work (DESIGN 16.6).
    """

    __slots__ = ("note", "tensors")

    def __init__(self, tensors: list[torch.Tensor], note: RecvNote) -> None:
        self.tensors = tensors
        self.note = note


class Recv(torch.autograd.Function):
    """The node whose outputs are the tensors of one message."""

    @staticmethod
    def forward(ctx: Any, box: _Box, anchor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.note = box.note
        return tuple(box.tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise AutogradError(
            f"tensors that came from worker {ctx.note.peer} are part of the distributed graph of context "
            f"{ctx.note.context_id}: call zmqgrad.autograd.backward(context_id, roots), not Tensor.backward()"
        )


RECV_NODE: Any = Recv._backward_cls
"""The class of the nodes that :class:`Recv` leaves in a graph; they have a ``note``."""

SEND_NAME = "torch::distributed::autograd::SendRpcBackward"
RECV_NAME = "torch::distributed::autograd::RecvRpcBackward"
"""What torch calls them: programs that walk or draw graphs know the ends of messages by these names."""

RECV_NODE.name = lambda _: RECV_NAME


LEAF_NODE: Any = type(torch.ones((), requires_grad=True).view(()).grad_fn.next_functions[0][0])  # type: ignore[union-attr]
"""The class of the nodes that stand for leaves (AccumulateGrad); they have a ``variable``."""


_ANCHOR = torch.empty(0, requires_grad=True)
"""What makes the outputs of a recv require grad. Nothing ever flows to it."""


def attach_recv(note: RecvNote, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
    """``tensors`` as outputs of a recv where they require grad, the others as they are; and its node."""
    wanted = [i for i, t in enumerate(tensors) if t.requires_grad]
    box = _Box([tensors[i].detach() for i in wanted], note)
    if torch.is_grad_enabled():
        outputs = Recv.apply(box, _ANCHOR)  # type: ignore[no-untyped-call]
    else:
        with torch.enable_grad():
            outputs = Recv.apply(box, _ANCHOR)  # type: ignore[no-untyped-call]
    received = list(tensors)
    for i, output in zip(wanted, outputs, strict=True):
        received[i] = output
    return received, outputs[0].grad_fn
