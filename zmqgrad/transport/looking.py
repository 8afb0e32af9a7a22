"""Looking before sleeping: what is waited for often comes in less time than it takes to wake up.

A thread that waits for a message of this host looks for a while whether it is there, and sleeps only then.
Each look lets go of the interpreter and of the processor: the kernel likes to put a thread where the one runs
that wakes it, so the peer whose answer is awaited may be on the same processor, and could not run before its
turn. Still, looking takes a processor from others. So of the threads of one worker only one looks at a time
(whoever began last), none beside one that works, and none where it has been in vain too often.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import TypeVar

from zmqgrad.runtime.clock import MONOTONIC, Clock

SECONDS = 8e-3
"""So long a thread looks for an answer before it sleeps, unless it is told otherwise.

A call takes a hundredth of that, a step of a backward pass or of training some milliseconds; and who has
slept is slow for a while, as others have had the caches. With 1 ms, calls within calls had runs in which
looks were in vain, so that all slept, so that looks were in vain: those took twice as long. 20 ms were no
better.
"""

UNASKED_SECONDS = 1e-3
"""And no longer than this for what it has not asked for. Nothing got faster by more, and a worker that is
called every few milliseconds took a whole processor."""

MOST_LUCK = 8
PATIENCE = 16
"""Where looks were in vain too often, so many waits sleep at once."""

_yield = ctypes.CDLL(None).sched_yield
"""By ctypes, as ``os.sched_yield`` keeps the interpreter while others run."""

T = TypeVar("T")


class Eyes:
    """What the threads of one worker look with: one at a time, for ``seconds`` (0: nobody ever looks)."""

    __slots__ = ("expecting", "of", "seconds")

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self.of: object = None
        self.expecting = 0
        """So many threads wait for an answer, each at a place of its own."""

    def look_away(self) -> None:
        """A thread is about to work: whoever looks sleeps meanwhile. From any thread."""
        self.of = None


class Look:
    """Looks at one place, by one thread at a time; ``at_most`` for so many seconds, whatever the eyes say."""

    __slots__ = ("_at_most", "_clock", "_eyes", "_luck")

    def __init__(self, eyes: Eyes, clock: Clock = MONOTONIC, at_most: float = math.inf) -> None:
        self._eyes = eyes
        self._clock = clock
        self._at_most = at_most
        # Falls by looks in vain; up to zero nobody looks, and it counts up.
        self._luck: float = MOST_LUCK if eyes.seconds else -math.inf

    def at(self, poll: Callable[[float], list[T]]) -> list[T]:
        """What ``poll(0)`` finds, if it soon finds something; else nothing."""
        if self._luck <= 0:
            self._luck += 1
            return []
        eyes, now = self._eyes, self._clock.now
        eyes.of = self
        until = now() + min(eyes.seconds, self._at_most)
        while True:
            found = poll(0)
            if found:
                self._luck = min(self._luck + 1, MOST_LUCK)
                return found
            if eyes.of is not self:
                return []
            if now() >= until:
                self._luck = self._luck - 2 if self._luck > 2 else -PATIENCE
                return []
            _yield()
