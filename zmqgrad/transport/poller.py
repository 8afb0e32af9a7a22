"""Which file descriptors are ready: epoll, or poll where there is none, called alike.

Not :mod:`selectors`, whose bookkeeping costs as much as all that a server does for a small query.
"""

from __future__ import annotations

import select
import sys

READ, WRITE = 1, 4
"""Of epoll and of poll alike."""

MAX_SECONDS = 3600.0
"""How long to wait at a time at most: both count milliseconds in 31 bits."""


class _Poll:
    """Poll, called as epoll is."""

    def __init__(self) -> None:
        poller = select.poll()
        self.register, self.modify, self.unregister = poller.register, poller.modify, poller.unregister
        self._poll = poller.poll

    def poll(self, seconds: float | None, most: int) -> list[tuple[int, int]]:
        """Descriptors that are ready, and for what. Waits up to ``seconds`` for one (None: no limit)."""
        return self._poll(None if seconds is None else seconds * 1000)

    def close(self) -> None:
        """There is nothing to be closed."""


if sys.platform == "linux":
    Poller = select.epoll
else:
    Poller = _Poll
