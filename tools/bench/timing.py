"""How one thing is timed: again and again for so long, and the median counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """How long each thing is measured for, after a tenth of that to warm up; and at least so many times."""

    seconds: float = 1.0
    at_least: int = 5

    def median(self, work: Callable[[], object]) -> float:
        """Seconds that ``work()`` takes."""
        _repeat(work, self.seconds / 10, 2)
        return statistics.median(_repeat(work, self.seconds, self.at_least))


def _repeat(work: Callable[[], object], seconds: float, at_least: int) -> list[float]:
    taken: list[float] = []
    now = time.perf_counter()
    end = now + seconds
    while now < end or len(taken) < at_least:
        work()
        before, now = now, time.perf_counter()
        taken.append(now - before)
    return taken
