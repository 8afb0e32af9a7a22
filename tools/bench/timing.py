"""How one thing is timed: again and again for so long, and the median counts.

What is timed may give the seconds that count itself, where only a part of it does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """How long each thing is measured for, after a tenth of that to warm up; and at least so many times."""

    seconds: float = 1.0
    at_least: int = 5

    def median(self, work: Callable[[], object]) -> float:
        """Seconds that ``work()`` takes, or gives."""
        _repeat(work, self.seconds / 10, 2)
        return statistics.median(_repeat(work, self.seconds, self.at_least))

    def medians(self, works: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Seconds that each of ``works`` takes, or gives; they take turns, as the machine's speed varies."""
        taken: dict[str, list[float]] = {name: [] for name in works}
        end = time.perf_counter() + self.seconds * len(works)
        while time.perf_counter() < end or len(taken[next(iter(works))]) < self.at_least:
            for name, work in works.items():
                taken[name] += _repeat(work, 0.0, 1)
        return {name: statistics.median(figures) for name, figures in taken.items()}


def seconds_of(work: Callable[[], object]) -> float:
    """How long ``work()`` takes."""
    before = time.perf_counter()
    work()
    return time.perf_counter() - before


def _repeat(work: Callable[[], object], seconds: float, at_least: int) -> list[float]:
    taken: list[float] = []
    now = time.perf_counter()
    end = now + seconds
    while now < end or len(taken) < at_least:
        given = work()
        before, now = now, time.perf_counter()
        taken.append(given if isinstance(given, float) else now - before)
    return taken
