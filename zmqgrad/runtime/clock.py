"""Time. Everything that waits is handed a clock; nothing else in the package calls :mod:`time`.

Wall clocks differ between hosts, so deadlines travel as durations and each side counts on its own
monotonic clock (DESIGN 16.9).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Something that tells monotonic seconds."""

    def now(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        ...


class MonotonicClock:
    """The real one."""

    now = staticmethod(time.monotonic)


class ManualClock:
    """For tests: stands still until told to advance."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []

    def now(self) -> float:
        """Seconds since ``start``, as far as told."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        if seconds < 0:
            raise ValueError(f"time does not go back (asked to advance by {seconds})")
        with self._lock:
            self._now += seconds
        for listener in list(self._listeners):
            listener()

    def on_advance(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after each advance, in the thread that advances."""
        self._listeners.append(listener)


MONOTONIC: Clock = MonotonicClock()


def cpu_seconds(thread: threading.Thread) -> float:
    """Processor time that ``thread``, which must be alive, has used; 0.0 where the system does not tell."""
    if thread.ident is None or not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


class Deadline:
    """One moment that several waits share. ``at`` is infinite where there is no limit."""

    __slots__ = ("_clock", "at")

    def __init__(self, at: float = math.inf, clock: Clock = MONOTONIC) -> None:
        self.at = at
        self._clock = clock

    @classmethod
    def after(cls, seconds: float | None, clock: Clock = MONOTONIC) -> Deadline:
        """The moment ``seconds`` from now; None for never."""
        return cls(math.inf if seconds is None else clock.now() + seconds, clock)

    def left(self) -> float:
        """Seconds left: 0 once it has passed, infinite if there is no limit."""
        return max(0.0, self.at - self._clock.now())

    def left_or_none(self) -> float | None:
        """Seconds left, as ``threading`` takes them: None if there is no limit."""
        return None if self.at == math.inf else min(self.left(), threading.TIMEOUT_MAX)

    def passed(self) -> bool:
        """Is it over?"""
        return self._clock.now() >= self.at

    def sooner(self, seconds: float | None) -> Deadline:
        """This deadline or ``seconds`` from now, whichever comes first."""
        if seconds is None:
            return self
        return Deadline(min(self.at, self._clock.now() + seconds), self._clock)

    def __repr__(self) -> str:
        return "<Deadline never>" if self.at == math.inf else f"<Deadline in {self.left():.3f} s>"
