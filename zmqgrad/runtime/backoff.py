"""Pauses between looks at what cannot tell that it has changed: a file of others, a lock of theirs."""

from __future__ import annotations

FACTOR = 1.5


class Backoff:
    """Pauses that begin at ``least`` seconds and grow to ``most``, and begin anew after news.

    So news that come soon are seen soon, and who waits long costs little.
    """

    def __init__(self, least: float, most: float) -> None:
        self._least = least
        self._most = most
        self._next = least

    def pause(self, at_most: float) -> float:
        """How long to wait now, in seconds, where only ``at_most`` are left."""
        pause, self._next = self._next, min(FACTOR * self._next, self._most)
        return min(pause, at_most)

    def reset(self) -> None:
        """There was news: look again soon."""
        self._next = self._least
