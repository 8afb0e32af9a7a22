"""Tensors travel as they are, whatever modes their thread has: a default device, fake tensors, one's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from zmqgrad.wire.lazy_frame import Frame, LazyFrame, materialize
from zmqgrad.wire.tensors import decode_tensors, encode_tensors
from zmqgrad.wire.tensors.batches import MIN_TENSORS
from zmqgrad.wire.tensors.blobs import MAX_INLINE_BYTES


class Refuses(TorchDispatchMode):
    """Sees what is called of torch, and must not see ours."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called under the program's mode")


class Counts(TorchFunctionMode):
    """The same for the other kind of modes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called under the program's mode")


MODES: list[Callable[[], AbstractContextManager[Any]]] = [
    lambda: torch.device("meta"),
    FakeTensorMode,
    Refuses,
    Counts,
]

LARGE = MAX_INLINE_BYTES

TENSORS = {
    "small": [torch.arange(6.0).view(2, 3)],
    "empty": [torch.ones(0, 3)],
    "large": [torch.arange(LARGE)],
    "with gaps": [torch.arange(2.0 * LARGE)[::2], torch.arange(12.0).view(3, 4).t()],
    "many": [torch.full((n,), n) for n in range(1, 3 * MIN_TENSORS)],
    "large and many": [torch.arange(LARGE), *(torch.full((n,), n) for n in range(1, 3 * MIN_TENSORS))],
    "sharing": [base := torch.arange(10.0), base[2:5]],
    "sparse": [torch.eye(3).to_sparse()],
    "requires grad": [torch.ones(3, requires_grad=True)],
}


@pytest.mark.parametrize("mode", MODES, ids=["default device", "fake", "dispatch", "function"])
@pytest.mark.parametrize("tensors", TENSORS.values(), ids=TENSORS)
@pytest.mark.parametrize("in_place", [False, True])
def test_tensors_under_modes(
    tensors: list[torch.Tensor], mode: Callable[[], AbstractContextManager[Any]], in_place: bool
) -> None:
    frames: list[Frame] = []

    def arrived(frame: Frame) -> Any:
        if not (in_place and isinstance(frame, LazyFrame)):
            return bytearray(materialize(frame))
        room = bytearray(len(frame))
        frame.write_to(memoryview(room))
        return room

    with mode():
        described = encode_tensors(tensors, frames)
        rebuilt = decode_tensors(described, [arrived(f) for f in frames])
    assert [t.device.type for t in rebuilt] == ["cpu"] * len(tensors)
    for t, r in zip(tensors, rebuilt, strict=True):
        assert type(r) is torch.Tensor
        assert r.requires_grad == t.requires_grad
        assert torch.equal(t.to_dense(), r.to_dense())
