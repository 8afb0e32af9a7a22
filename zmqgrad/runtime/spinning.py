"""Adaptive spinning (spin-then-park): a reply often arrives in less time than it takes to wake a thread.

A thread that waits for a message of this host first polls for a while, and blocks only then. Each poll
releases the GIL and yields the processor: the kernel likes to put a thread on the core of the thread
that wakes it, so the peer whose reply is awaited may need this very core.

Spinning uses at most one core per worker: only the thread that began last spins, none spins beside a thread
that works, and a thread whose spins rarely succeed backs off. None spins on a core that others need: while
the workers of a host compute, all cores are theirs. A thread that waits for as many workers as there are
cores does not even try.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable
from typing import TypeVar

from zmqgrad.runtime.clock import MONOTONIC, Clock

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
"""How many threads of this process can run at a time."""

SPIN_SECONDS = 8e-3
"""Default time that a thread spins for a reply before it blocks.

A call takes a hundredth of it, a step of a backward pass or of training some milliseconds, and a thread that
has blocked is slow for a while, as its caches are cold. With 1 ms, nested calls had runs in which no spin
succeeded, all threads backed off, and calls took twice as long. 20 ms were no better.
"""

UNSOLICITED_SPIN_SECONDS = 1e-3
"""Limit for a thread that waits for requests. Longer spins made nothing faster, and cost a worker that is
called every few milliseconds a whole core."""

MAX_CREDIT = 8
"""Upper limit of a spinner's credit: each successful spin adds 1, each unsuccessful one subtracts 2."""

COOLDOWN_WAITS = 16
"""After too many unsuccessful spins, this many waits block at once."""

CROWDED_SECONDS = 2e-4
"""If so much time passes between two polls, which take a hundredth of it, others need this core."""

_yield = ctypes.CDLL(None).sched_yield
"""By ctypes, as ``os.sched_yield`` does not release the GIL."""

T = TypeVar("T")


class SpinBudget:
    """Shared by the threads of one worker, of which one spins at a time.

    Args:
        seconds: how long a thread spins before it blocks. 0 disables spinning.
        recency: a thread that has not waited for this long blocks at once: its peer spins no more, either.
    """

    __slots__ = ("owner", "recency", "seconds", "waits")

    def __init__(self, seconds: float = SPIN_SECONDS, recency: float = math.inf) -> None:
        self.seconds = seconds
        self.recency = recency
        self.owner: object = None
        """The :class:`Spinner` that may spin."""
        self.waits = False
        """Whether a thread waits for a reply at a channel of its own."""

    def yield_cpu(self) -> None:
        """Ends the current spin, as a thread is about to work. From any thread."""
        self.owner = None


class Spinner:
    """Spins for one source of events, in one thread at a time.

    Args:
        budget: of the worker.
        at_most: limit in seconds, if lower than that of the budget.
    """

    __slots__ = ("_at_most", "_began", "_budget", "_clock", "_credit")

    def __init__(self, budget: SpinBudget, clock: Clock = MONOTONIC, at_most: float = math.inf) -> None:
        self._budget = budget
        self._clock = clock
        self._at_most = at_most
        self._began = -math.inf
        # Falls with each unsuccessful spin. At zero or less no spin is tried, and it rises with each wait.
        self._credit: float = MAX_CREDIT if budget.seconds else -math.inf

    def spin(self, poll: Callable[[float], list[T]]) -> list[T]:
        """Calls ``poll(0)`` until it returns events, and returns them. Returns an empty list at the time
        limit."""
        if self._credit <= 0:
            self._credit += 1
            return []
        budget, now = self._budget, self._clock.now
        before, self._began = self._began, now()
        if self._began - before > budget.recency:
            return []
        budget.owner = self
        at, until = self._began, self._began + min(budget.seconds, self._at_most)
        while True:
            found = poll(0)
            if found:
                self._credit = min(self._credit + 1, MAX_CREDIT)
                return found
            if budget.owner is not self:
                return []
            before, at = at, now()
            if at >= until:
                self._credit = self._credit - 2 if self._credit > 2 else -COOLDOWN_WAITS
                return []
            if at - before > CROWDED_SECONDS:
                return []  # what ran here meanwhile was not the awaited peer, or has not answered yet
            _yield()
