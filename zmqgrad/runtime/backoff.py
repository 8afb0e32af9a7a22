"""Exponential backoff, to poll what cannot notify: a file, or a lock held by another process."""

from __future__ import annotations

FACTOR = 1.5


class Backoff:
    """Pauses that grow from ``least`` to ``most`` seconds, and start again after :meth:`reset`.

    Frequent changes are seen early, and long waits cost little.
    """

    def __init__(self, least: float, most: float) -> None:
        self._least = least
        self._most = most
        self._next = least

    def pause(self, at_most: float) -> float:
        """Returns how many seconds to wait now, limited to ``at_most``."""
        pause, self._next = self._next, min(FACTOR * self._next, self._most)
        return min(pause, at_most)

    def reset(self) -> None:
        """Starts again with the shortest pause, after a change was seen."""
        self._next = self._least
