"""What has come for the sends of one pass on one worker, and how many threads handle it. Pure, with a lock.

As long as there is little to compute, one thread at a time takes what is there: what came in one message, and
what comes while it is at work. So the gradients that it makes can travel together, and threads do not
queue for the interpreter. Where entries take long, as many threads as there are processors work side by
side. How long they take is known from those before, in this pass or in the last one.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Sequence

from zmqgrad.autograd.graph.single import Gradient
from zmqgrad.wire.tensors.streams import NO_COPIES, DeviceCopies

Arrival = tuple[int, Sequence[Gradient]]
"""What has come in: where (the autograd id of a send, or the number of an entry), and its gradients."""

LONG = 0.5e-3
"""Seconds for an entry from which on another thread is worth it: to begin takes it a tenth of that."""

CLEAR = 10e-3
"""Seconds that are not lost by chance: others have the processor for a few milliseconds."""

STEP = 1.25
"""What the pace goes up by, at most, if it is not clear why."""

LEAST = 1e-7
"""Seconds that anything takes."""

THREADS = os.cpu_count() or 1
"""How many threads at most handle the entries of one pass."""


class Desk:
    """What waits, each once. Times are those of any one clock, in seconds."""

    def __init__(self) -> None:
        self.pace = math.inf
        """Seconds that an entry takes lately; infinite if that is not known."""
        self._lock = threading.Lock()  # guards all below
        self._arrived: dict[int, DeviceCopies] = {}  # by autograd id, of gradients on devices
        self.waiting: deque[Arrival] = deque()
        """For others: is there anything?"""
        self._seen: set[int] = set()
        self._threads = 0
        self._begun = 0  # of these; others wait for a place in the pool, and may wait for long
        self._taken = 0.0  # when something was taken the last time

    def put(self, arrivals: Sequence[Arrival], now: float, arrived: DeviceCopies = NO_COPIES) -> int:
        """Gradients have come. Gives how many threads shall take: 0 if enough are at it.

        The first of them is the calling one, which has begun. Each takes, and leaves when nothing is left.
        What has come before is left out.
        ``arrived``: those that were brought to devices, by the calling thread.
        """
        with self._lock:
            for arrival in arrivals:
                send = arrival[0]
                if send not in self._seen:
                    self._seen.add(send)
                    self.waiting.append(arrival)
                    if arrived.events:
                        self._arrived[send] = arrived
            missing = self._hire(now)
            if not missing and self.waiting and not self._begun:
                self._threads += 1
                missing = 1
            self._begun += missing > 0
            return missing

    def take_alone(self, send: int, now: float) -> bool:
        """Shall the calling thread handle what has come for ``send`` at once? It counts as taken then.

        So it is where nothing waits and nobody is at it: the least work for the hops of a chain.
        """
        with self._lock:
            if self._threads or self.waiting or send in self._seen:
                return False
            self._seen.add(send)
            self._threads = self._begun = 1
            self._taken = now
            return True

    def begin(self) -> None:
        """A thread that was hired has its place."""
        with self._lock:
            self._begun += 1

    def take(self, most: int, now: float) -> list[Arrival]:
        """Up to ``most`` of what waits, in the order of the calling thread's streams."""
        with self._lock:
            self._taken = now
            waiting = self.waiting
            taken: list[Arrival] = []
            while waiting and len(taken) < most:
                taken.append(waiting.popleft())
            if not self._arrived:
                return taken
            on_devices = [self._arrived.pop(send) for send, _ in taken if send in self._arrived]
        for arrived in {id(arrived): arrived for arrived in on_devices}.values():
            arrived.wait_on_current_stream()
        return taken

    def hire(self, now: float) -> int:
        """How many threads shall :meth:`begin` besides those that are at it."""
        with self._lock:
            return self._hire(now)

    def learn(self, count: int, seconds: float) -> float:
        """So many entries took so long together. Gives the pace.

        One alone takes longer than one among others, and often another thread or process is in the way. So
        the pace comes down at once; it goes up so only if it is clear why, and else step by step.
        """
        each = max(seconds, LEAST) / count
        self.pace = each if seconds > CLEAR else min(each, STEP * self.pace)
        return self.pace

    def fitting(self, seconds: float) -> int:
        """How many entries there is time for."""
        return int(seconds / self.pace) if seconds > 0 else 0

    def leave(self) -> bool:
        """A thread has nothing to do. False if it has."""
        with self._lock:
            if self.waiting:
                return False
            self._go()
            return True

    def flee(self) -> None:
        """A thread cannot go on."""
        with self._lock:
            self._go()

    def _go(self) -> None:
        self._threads -= 1
        self._begun -= 1

    def _hire(self, now: float) -> int:
        if not self.waiting:
            return 0
        known = LONG <= self.pace < math.inf
        most = THREADS if known or (self._threads and now - self._taken > CLEAR) else 1
        missing = min(most - self._threads, len(self.waiting))
        if missing <= 0:
            return 0
        self._threads += missing
        return missing
