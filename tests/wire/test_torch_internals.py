"""What the wire layer uses of torch's private API behaves as it relies on.

Each test fails with the name of what a torch release has changed.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad

from zmqgrad.wire.tensors import torch_internals


def test_function_modes_counts_a_default_device() -> None:
    assert torch_internals.function_modes() == 0
    with torch.device("meta"):
        assert torch_internals.function_modes() == 1
    assert torch_internals.function_modes() == 0


def test_dispatch_modes_counts_fake_tensors() -> None:
    assert torch_internals.dispatch_modes() == 0
    with FakeTensorMode():
        assert torch_internals.dispatch_modes() == 1
    assert torch_internals.dispatch_modes() == 0


def test_disable_torch_function_disables_a_default_device() -> None:
    with torch.device("meta"), torch_internals.disable_torch_function():
        assert torch.ones(1).device.type == "cpu"


def test_disable_dispatch_modes_disables_fake_tensors() -> None:
    with FakeTensorMode():
        assert isinstance(torch.ones(1), FakeTensor)
        with torch_internals.disable_dispatch_modes():
            assert not isinstance(torch.ones(1), FakeTensor)


def test_dual_tensors_are_told_apart() -> None:
    assert not torch_internals.in_dual_level()
    with forward_ad.dual_level():
        assert torch_internals.in_dual_level()
        x = torch.ones(1)
        assert torch_internals.is_dual(forward_ad.make_dual(x, torch.ones(1)))
        assert not torch_internals.is_dual(x)
