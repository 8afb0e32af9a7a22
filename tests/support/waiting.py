"""Waiting for a condition that no event reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.002


def eventually(read: Callable[[], T], is_met: Callable[[T], object] = bool, timeout: float = 20.0) -> T:
    """Polls ``read`` until ``is_met`` accepts the value that it returns.

    Use it only where nothing signals the change: an event, a condition or a queue is faster and never misses
    a value that lasts for a moment.

    Args:
        read: returns the current value. An exception that it raises ends the wait.
        is_met: decides about the value; by default, any true value is accepted.
        timeout: seconds after which the test fails. A value that is accepted at the last read still counts.

    Returns:
        The accepted value.

    Raises:
        AssertionError: if no value was accepted in time; the message shows the last one.
    """
    deadline = time.monotonic() + timeout
    while True:
        late = time.monotonic() >= deadline
        value = read()
        if is_met(value):
            return value
        assert not late, f"not met within {timeout:g} s; the last value was {value!r}"
        del value  # the condition may be that nothing refers to it
        time.sleep(POLL_SECONDS)
