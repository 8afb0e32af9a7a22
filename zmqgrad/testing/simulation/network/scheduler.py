"""What the network needs of the scheduler of a simulation, and one for programs of a single thread."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any, Protocol


class Deadlock(Exception):
    """The only thread waits for what can never happen."""


class State:
    """What threads wait for. Whoever changes it tells the scheduler.

    Attributes:
        waiters: the threads that wait for it to change: of the scheduler.
        watchers: called whenever it changes, as by an epoll.
    """

    def __init__(self) -> None:
        self.waiters: dict[Any, None] = {}
        self.watchers: dict[Any, Callable[[], None]] = {}


class Scheduler(Protocol):
    """Decides what runs, and owns the clock."""

    rng: random.Random

    def now(self) -> float:
        """Returns the time in seconds."""

    def wait_until(self, ready: Callable[[], bool], deadline: float | None, *states: State) -> bool:
        """Blocks the calling thread until ``ready()``, or ``deadline``. Returns ``ready()``.

        Args:
            ready: has no side effects; may be called in any thread.
            states: all on which the outcome of ``ready`` depends.
        """

    def notify(self, state: State) -> None:
        """Tells the waiters and watchers of ``state`` that it has changed. Does not switch threads."""

    def point(self, what: str) -> None:
        """Lets other threads run, as a system call does. The state is consistent then."""

    def call_at(self, moment: float, action: Callable[[], None]) -> None:
        """Calls ``action``, which never blocks, at ``moment``: those of the same moment in order."""


class ManualScheduler:
    """The :class:`Scheduler` of a single thread. Time passes only while that thread waits."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self._now = 0.0
        self._order = itertools.count()
        self._actions: list[tuple[float, int, Callable[[], None]]] = []  # a heap

    def now(self) -> float:
        """As :class:`Scheduler`."""
        return self._now

    def notify(self, state: State) -> None:
        """Tells the watchers: nobody else waits."""
        for watch in state.watchers.values():
            watch()

    def point(self, what: str) -> None:
        """Does what is due."""
        while self._actions and self._actions[0][0] <= self._now:
            heapq.heappop(self._actions)[2]()

    def call_at(self, moment: float, action: Callable[[], None]) -> None:
        """As :class:`Scheduler`."""
        heapq.heappush(self._actions, (moment, next(self._order), action))

    def wait_until(self, ready: Callable[[], bool], deadline: float | None, *states: State) -> bool:
        """As :class:`Scheduler`.

        Raises:
            Deadlock: if nothing is left that could happen.
        """
        while True:
            self.point("wait")
            if ready():
                return True
            if deadline is not None and deadline <= self._now:
                return False
            following = self._actions[0][0] if self._actions else None
            if following is None and deadline is None:
                raise Deadlock("the only thread waits for ever")
            self._now = min(moment for moment in (following, deadline) if moment is not None)
