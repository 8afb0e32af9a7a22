"""Gradients for the sends of one worker, which travel in one message.

A message costs as much as the engine takes for a small graph, on either side. So what one step of a pass
makes for a worker goes together, unless it is large: then copying it takes longer than a message does, and
the other side can begin with the first part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zmqgrad.autograd.graph.node import Gradient
from zmqgrad.autograd.graph.undefined import UNDEFINED
from zmqgrad.autograd.send_recv import RecvMetadata
from zmqgrad.transport.base import Frame
from zmqgrad.wire.messages import NO_GRADIENT, NOT_REACHED, Tensors
from zmqgrad.wire.tensors import Devices, describe, rebuild
from zmqgrad.wire.unwritten import Buffer

LARGE = 1 << 20
"""Bytes of gradients after which a message is full."""

EACH = 64
"""Bytes that each gradient counts for besides its own: so a message has at most 16384 of them."""

FEW = 1024
"""Gradients of up to so many elements are sent contiguous, which takes less work; others as they are."""

_ABSENT = {NOT_REACHED: None, NO_GRADIENT: UNDEFINED}


class Batch:
    """What waits to go to one worker."""

    __slots__ = ("_present", "_size", "sends")

    def __init__(self) -> None:
        self.sends: list[tuple[int, tuple[int, ...]]] = []
        """Autograd ids, and of each the numbers of its gradients, as the message has them."""
        self._present: list[torch.Tensor] = []
        self._size = 0

    def add(self, recv: RecvMetadata, gradients: Sequence[Gradient]) -> None:
        """The gradients of one recv."""
        numbers: list[int] = []
        for gradient in gradients:
            if gradient is None or gradient is UNDEFINED:
                numbers.append(NOT_REACHED if gradient is None else NO_GRADIENT)
            else:
                numbers.append(len(self._present))
                self._present.append(_packed(gradient))
                self._size += gradient.numel() * gradient.itemsize
        self._size += EACH * len(numbers)
        self.sends.append((recv.autograd_id, tuple(numbers)))

    @property
    def is_full(self) -> bool:
        """Shall it go as it is?"""
        return self._size >= LARGE

    def requests(self) -> tuple[int, ...]:
        """How the root knows them."""
        return tuple([send for send, _ in self.sends])

    def describe(self, frames: list[Frame], devices: Devices) -> Tensors:
        """The tensors, as they travel; bytes too many for the header are appended to ``frames``."""
        return describe(self._present, frames, devices)


def unpack(
    sends: Sequence[tuple[int, Sequence[int]]], tensors: Tensors, frames: Sequence[Buffer]
) -> list[tuple[int, list[Gradient]]]:
    """What came in a message: for each of its ``sends`` the gradients."""
    there: list[Gradient] = list(rebuild(tensors, frames))
    if len(sends) == 1 and sends[0][1] == tuple(range(len(there))):
        return [(sends[0][0], there)]  # one, which is complete: so most are
    return [(send, [there[i] if i >= 0 else _ABSENT[i] for i in numbers]) for send, numbers in sends]


def _packed(gradient: torch.Tensor) -> torch.Tensor:
    strided = gradient.layout is torch.strided
    return gradient.contiguous() if strided and gradient.numel() <= FEW else gradient
