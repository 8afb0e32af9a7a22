"""Finds the tensors of a message that share memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zmqgrad.wire.messages import TensorDescriptor
from zmqgrad.wire.tensors.blobs import Blobs
from zmqgrad.wire.tensors.dtypes import NAMES
from zmqgrad.wire.tensors.memory import extent, holds


class Sharing:
    """Tensors of a message that overlap in one storage, which are sent as views of one blob.

    Tensors that require grad are excluded: each gets a history of its own at the receiver, where a write to
    one must not change what another has saved for backward.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        by_storage: dict[int, list[tuple[int, int, torch.Tensor]]] = {}
        for t in tensors:
            # The bytes of a lazily conjugated, negated or zero tensor are not its values: it cannot share.
            lazy = t.is_conj() or t.is_neg() or t._is_zerotensor()
            if t.is_cpu and t.layout is torch.strided and not (t.requires_grad or t.is_quantized or lazy):
                size = extent(t) * t.itemsize
                if size and holds(t, size):
                    start = t.data_ptr()
                    pointer = t.untyped_storage().data_ptr()
                    by_storage.setdefault(pointer, []).append((start, start + size, t))
        # id of a tensor -> the span of bytes [start, end) that it is a view of
        self._spans: dict[int, tuple[int, int]] = {}
        self._blobs: dict[tuple[int, int], int] = {}
        for pointer, windows in by_storage.items():
            if len(windows) > 1:
                self._merge(pointer, windows)

    def _merge(self, storage: int, windows: list[tuple[int, int, torch.Tensor]]) -> None:
        """Merge overlapping views, unless more than half of the merged span belongs to none of them.

        A span begins where an element of the largest dtype may, seen from the start of the ``storage``: so
        all of its views are aligned in it.
        """
        windows.sort(key=lambda w: w[:2])
        group: list[tuple[int, int, torch.Tensor]] = []
        end = 0
        for window in [*windows, (math.inf, math.inf, None)]:
            if group and window[0] >= end:
                shown = sum(t.nbytes for _, _, t in group)
                if len(group) > 1 and end - group[0][0] <= 2 * shown:
                    start = group[0][0] - (group[0][0] - storage) % max([t.itemsize for _, _, t in group])
                    self._spans.update({id(t): (start, end) for _, _, t in group})
                group = []
            if window[2] is not None:
                group.append(window)  # type: ignore[arg-type]
                end = window[1] if len(group) == 1 else max(end, window[1])  # type: ignore[assignment]

    def shares(self, t: torch.Tensor) -> bool:
        return id(t) in self._spans

    def encode_tensors(self, t: torch.Tensor, out: Blobs) -> TensorDescriptor:
        span = self._spans[id(t)]
        number = self._blobs.get(span)
        if number is None:
            number = self._blobs[span] = out.add(t.detach(), span[0], span[1] - span[0])
        offset = t.data_ptr() - span[0]
        return TensorDescriptor(NAMES[t.dtype], tuple(t.shape), tuple(t.stride()), offset, number, False)
