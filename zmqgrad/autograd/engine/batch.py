"""A batch: the gradients that one message brings to a worker.

A message costs each side as much time as the engine needs for a small graph. So the gradients that one step
of a pass produces for a worker travel together, unless they are large: then copying takes longer than a
message, and the other worker can begin with the first part.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch

from zmqgrad.autograd.context import Context
from zmqgrad.autograd.graph.node import Gradient
from zmqgrad.autograd.graph.undefined import UNDEFINED
from zmqgrad.autograd.send_recv import RecvMetadata
from zmqgrad.transport.base import Frame
from zmqgrad.wire.lazy_frame import Buffer
from zmqgrad.wire.messages import NO_GRADIENT, NOT_REACHED, BackwardAutogradReq, Tensors
from zmqgrad.wire.tensors import Devices, decode_tensors, encode_tensors

FULL_BYTES = 1 << 20
"""Size of the gradients from which on a message is full."""

GRADIENT_OVERHEAD_BYTES = 64
"""What each gradient adds to the size besides its data: so a message has at most 16384 gradients."""

CONTIGUOUS_ELEMENTS = 1024
"""Gradients of up to this many elements are made contiguous, which saves work later."""

_autograd_id: Callable[[tuple[int, tuple[int, ...]]], int] = operator.itemgetter(0)

_ABSENT = {NOT_REACHED: None, NO_GRADIENT: UNDEFINED}


class Batch:
    """Gradients for the sends of one worker."""

    __slots__ = ("_present", "_size", "sends")

    def __init__(self) -> None:
        self.sends: list[tuple[int, tuple[int, ...]]] = []
        """Autograd ids of sends, each with the indices of its gradients in the message."""
        self._present: list[torch.Tensor] = []
        self._size = 0

    def add(self, recv: RecvMetadata, gradients: Sequence[Gradient]) -> None:
        """Add the gradients of one recv."""
        indices: list[int] = []
        size = GRADIENT_OVERHEAD_BYTES * len(gradients)
        for gradient in gradients:
            if gradient is None or gradient is UNDEFINED:
                indices.append(NOT_REACHED if gradient is None else NO_GRADIENT)
                continue
            elements = gradient.numel()
            size += elements * gradient.itemsize
            indices.append(len(self._present))
            packs = elements <= CONTIGUOUS_ELEMENTS and gradient.layout is torch.strided
            self._present.append(gradient.contiguous() if packs else gradient)
        self._size += size
        self.sends.append((recv.autograd_id, tuple(indices)))

    @property
    def is_full(self) -> bool:
        """Whether the batch should be sent before more is added."""
        return self._size >= FULL_BYTES

    def requests(self) -> tuple[int, ...]:
        """Return the requests of this batch: the autograd ids of its sends."""
        return tuple(map(_autograd_id, self.sends))

    def describe(self, frames: list[Frame], devices: Devices) -> Tensors:
        """Encode the tensors. Data that does not fit into the header is appended to ``frames``."""
        return encode_tensors(self._present, frames, devices)

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The gradients that exist."""
        return self._present


def decode(
    message: BackwardAutogradReq, frames: Sequence[Buffer], context: Context, source: int
) -> list[torch.Tensor]:
    """Decode the gradients of a message from ``source``; those with history become outputs of a recv."""
    if not message.options.create_graph:
        return decode_tensors(message.tensors, frames)
    tensors = decode_tensors(message.tensors, frames, differentiable=False)
    if not message.history:
        return tensors
    requiring_grad = message.tensors.requiring_grad()
    with torch.enable_grad():  # gradients take the way of the tensors back, and theirs the way of the tensors
        return context.receive(message.history, source, tensors, requiring_grad, not message.in_reply)


def unpack(
    sends: Sequence[tuple[int, Sequence[int]]], tensors: Sequence[torch.Tensor]
) -> list[tuple[int, list[Gradient]]]:
    """Return the gradients for each of the ``sends`` of a message, of which ``tensors`` exist."""
    present: list[Gradient] = list(tensors)
    if len(sends) == 1 and sends[0][1] == tuple(range(len(present))):
        return [(sends[0][0], present)]  # the most frequent case
    return [(send, [present[i] if i >= 0 else _ABSENT[i] for i in indices]) for send, indices in sends]
