"""A signal that comes in a call of C."""

from __future__ import annotations

import ctypes
import signal
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest


class Interrupt(BaseException):
    """What the handler raises."""


def _handle(signum: int, frame: Any) -> None:
    raise Interrupt


def interrupted_in_c(drop: Callable[[], object]) -> None:
    """Calls ``drop``, of C, and checks that the caller gets what the handler of a signal raises.

    The signal comes just before, in the same call of C, as Ctrl-C in a backward pass that drops tensors. Its
    handler runs before the next line of Python. In a line of a finalizer, its exception would reach nobody.
    """
    steps = [partial(ctypes.PyDLL(None)["raise"], signal.SIGUSR1), partial(drop)]
    before = signal.signal(signal.SIGUSR1, _handle)
    try:
        with pytest.raises(Interrupt):
            deque(map(partial.__call__, steps), maxlen=0)
    finally:
        signal.signal(signal.SIGUSR1, before)
