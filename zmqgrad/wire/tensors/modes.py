"""Modes that a program has put on its thread (a default device, fake tensors) are for its own tensors.

A mode sees whatever its thread calls of torch. What packs and unpacks tensors writes to memory by address:
under ``torch.device("cuda")`` or a ``FakeTensorMode`` it would get tensors whose address is none of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

P = ParamSpec("P")
R = TypeVar("R")

function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""How many there are of the one kind, to which a default device belongs. A question at every message: no step
between."""

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""And of the other, to which fake tensors belong."""


@contextmanager
def hidden() -> Iterator[None]:
    """No mode sees what happens here."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def unseen(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, hidden from modes."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not function_modes() and not dispatch_modes():
            return function(*args, **kwargs)
        with hidden():
            return function(*args, **kwargs)

    return run
