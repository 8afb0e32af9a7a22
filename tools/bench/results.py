"""What was measured, by row and side: a figure for each round; and what follows from it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.bench.plan import Row
from tools.bench.sides import OURS, TORCH

LIMIT = "limit"
"""The side of what the machine can do."""


@dataclass
class Results:
    """Seconds by side and row, one for each round."""

    rows: Sequence[Row]
    figures: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, side: str, found: Iterable[Mapping[str, float]]) -> None:
        """Note a piece's figures; of several processes the slowest counts."""
        slowest: dict[str, float] = {}
        for figures in found:
            for name, seconds in figures.items():
                slowest[name] = max(seconds, slowest.get(name, 0.0))
        for name, seconds in slowest.items():
            self.figures.setdefault((side, name), []).append(seconds)

    def median(self, side: str, name: str) -> float | None:
        """Seconds of row ``name``, over the rounds."""
        figures = self.figures.get((side, name))
        return statistics.median(figures) if figures else None

    def ratio(self, row: Row) -> float | None:
        """How much time zmqgrad takes where torch takes 1."""
        return _divided(self.median(OURS, row.name), self.median(TORCH, row.name))

    def times_limit(self, row: Row) -> float | None:
        """How much time zmqgrad takes where the machine takes 1."""
        return _divided(self.median(OURS, row.name), self.median(LIMIT, row.limit))

    def as_json(self) -> list[dict[str, Any]]:
        """All rows, with the figure of each round."""
        return [
            {
                "name": row.name,
                "says": row.says,
                "seconds": {side: self.figures.get((side, row.name), []) for side in (OURS, TORCH)},
                "ratio": self.ratio(row),
                "limit": {row.limit: self.figures.get((LIMIT, row.limit), [])} if row.limit else {},
                "times_limit": self.times_limit(row),
            }
            for row in self.rows
        ]


def _divided(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None
