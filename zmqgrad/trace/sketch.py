"""Quantiles of many values in little memory. Pure.

DDSketch (Masson, Rim, Lee: "DDSketch: A Fast and Fully-Mergeable Quantile Sketch with Relative-Error
Guarantees", VLDB 2019), without its limit of buckets: the values of a trace need fewer than 2,500.
"""

from __future__ import annotations

import math
from collections import Counter

RELATIVE_ERROR = 0.01

_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GAMMA = math.log(_GAMMA)


class Sketch:
    """Counts values, to tell their quantiles within ``RELATIVE_ERROR``; the maximum is exact."""

    def __init__(self) -> None:
        self.count = 0
        self.max = 0
        self._buckets: Counter[int] = Counter()

    def add(self, value: int) -> None:
        """Adds a value of at least 0; what is below 1 counts as 1."""
        self.count += 1
        self.max = max(self.max, value)
        self._buckets[math.ceil(math.log(value) / _LOG_GAMMA) if value > 1 else 0] += 1

    def merge(self, other: Sketch) -> None:
        """Adds all values of ``other``."""
        self.count += other.count
        self.max = max(self.max, other.max)
        self._buckets.update(other._buckets)

    def quantile(self, q: float) -> int | None:
        """The smallest value that at least the share ``q`` of all does not exceed; None without values."""
        rank = max(1, math.ceil(q * self.count))
        for bucket in sorted(self._buckets):
            rank -= self._buckets[bucket]
            if rank <= 0:
                return min(self.max, round(2 * _GAMMA**bucket / (_GAMMA + 1)))
        return None
