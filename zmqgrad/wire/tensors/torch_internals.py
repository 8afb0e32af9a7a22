"""All that this layer uses of torch's private API; ``tests/wire/test_torch_internals.py`` checks it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""Number of active function modes of the thread, such as a default device."""

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Number of active dispatch modes of the thread, such as ``FakeTensorMode``."""

disable_torch_function: Callable[[], AbstractContextManager[object]] = torch._C.DisableTorchFunction
"""Context without function modes, in which no ``__torch_function__`` is called."""

disable_dispatch_modes: Callable[[], AbstractContextManager[object]] = _disable_current_modes
"""Context without dispatch modes."""


def in_dual_level() -> bool:
    """Whether any thread of this process uses forward-mode AD."""
    return forward_ad._current_level >= 0


def is_dual(tensor: torch.Tensor) -> bool:
    """Whether forward-mode AD has given ``tensor`` a tangent."""
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
