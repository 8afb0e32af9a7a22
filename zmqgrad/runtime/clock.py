"""Clocks and deadlines. Everything that waits is passed a clock; no other module calls :mod:`time`.

Wall clocks differ between hosts, so deadlines are sent as durations and each side uses its own monotonic
clock.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

monotonic_ns, wall_ns = time.monotonic_ns, time.time_ns
"""Nanoseconds, for traces: they record the real time, so no clock is handed to them."""

_OFFSET_READS = 5

thread_time = time.thread_time
"""Seconds of processor time of the calling thread."""


def wall_offset() -> int:
    """How far the wall clock is ahead of the monotonic clock.

    Returns:
        Nanoseconds, by the closest of several reads of both: the thread may lose the processor between two.
    """
    reads = [(monotonic_ns(), wall_ns(), monotonic_ns()) for _ in range(_OFFSET_READS)]
    before, wall, after = min(reads, key=lambda read: read[2] - read[0])
    return wall - (before + after) // 2


def unix_time() -> float:
    """Seconds since 1970, for people and files. It may jump, so nothing may be timed by it."""
    return time.time()


def local_time(seconds: int, date: bool = False) -> str:
    """The time of day, here, at ``seconds`` since 1970; ``date``: with the date before it."""
    return time.strftime("%Y-%m-%d %H:%M:%S" if date else "%H:%M:%S", time.localtime(seconds))


class Clock(Protocol):
    """A monotonic clock."""

    def now(self) -> float:
        """Returns seconds since some fixed moment. Never decreases."""


class MonotonicClock:
    """The clock of the system."""

    now = staticmethod(time.monotonic)


class ManualClock:
    """A clock for tests, which only changes by :meth:`advance`."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []

    def now(self) -> float:
        """Returns the current time in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Moves the clock by ``seconds`` and calls the listeners.

        Raises:
            ValueError: if ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"time does not go back (cannot advance by {seconds})")
        with self._lock:
            self._now += seconds
        for listener in list(self._listeners):
            listener()

    def on_advance(self, listener: Callable[[], None]) -> None:
        """Registers ``listener``, which is called after each advance, in the thread that advances."""
        self._listeners.append(listener)


MONOTONIC: Clock = MonotonicClock()


class Deadline:
    """A point in time that several waits share. ``at`` is infinite if there is no limit."""

    __slots__ = ("_clock", "at")

    def __init__(self, at: float = math.inf, clock: Clock = MONOTONIC) -> None:
        self.at = at
        self._clock = clock

    @classmethod
    def after(cls, seconds: float | None, clock: Clock = MONOTONIC) -> Deadline:
        """Returns the deadline ``seconds`` from now on ``clock``; None means no limit."""
        return cls(math.inf if seconds is None else clock.now() + seconds, clock)

    def left(self) -> float:
        """Returns the seconds left: 0 after the deadline, infinite if there is no limit."""
        return max(0.0, self.at - self._clock.now())

    def timeout(self) -> float | None:
        """Returns the seconds left as ``threading`` expects them: None if there is no limit."""
        return None if self.at == math.inf else min(self.left(), threading.TIMEOUT_MAX)

    def call_timeout(self) -> float:
        """Returns the seconds left as calls expect them: 0 if there is no limit, and only then."""
        return 0.0 if self.at == math.inf else max(1e-6, self.left())

    def passed(self) -> bool:
        """Whether the deadline has passed."""
        return self._clock.now() >= self.at

    def capped(self, seconds: float | None) -> Deadline:
        """Returns the earlier of this deadline and ``seconds`` from now (None: this deadline)."""
        if seconds is None:
            return self
        return Deadline(min(self.at, self._clock.now() + seconds), self._clock)

    def __repr__(self) -> str:
        return "<Deadline never>" if self.at == math.inf else f"<Deadline in {self.left():.3f} s>"
