"""Disables torch function and dispatch modes of the user (default device, fake tensors) while encoding.

A mode intercepts every torch call of its thread. Encoding and decoding write to memory by address: under
``torch.device("cuda")`` or a ``FakeTensorMode`` they would get tensors without an address in main memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from zmqgrad.wire.tensors.torch_internals import (
    disable_dispatch_modes,
    disable_torch_function,
    dispatch_modes,
    function_modes,
)

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def modes_disabled() -> Iterator[None]:
    """Context in which no mode is active."""
    with disable_torch_function(), disable_dispatch_modes():
        yield


def without_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: run ``function`` with all modes disabled."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not function_modes() and not dispatch_modes():
            return function(*args, **kwargs)
        with modes_disabled():
            return function(*args, **kwargs)

    return run
