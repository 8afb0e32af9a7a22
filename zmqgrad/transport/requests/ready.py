"""Which descriptors are ready: by epoll, or by poll where a system has none. Without :mod:`selectors`, whose
bookkeeping costs as much as all that a server does for a small request.
"""

from __future__ import annotations

import select
import sys

READ, WRITE = 1, 4
"""Of epoll and of poll alike."""

LONGEST_SECONDS = 3600.0
"""How long anybody should wait at a time: both count milliseconds in 31 bits."""


class Poll:
    """Poll, called as epoll is."""

    def __init__(self) -> None:
        poller = select.poll()
        self.register, self.modify, self.unregister = poller.register, poller.modify, poller.unregister
        self._poll = poller.poll

    def poll(self, seconds: float | None, most: int) -> list[tuple[int, int]]:
        """Descriptors that are ready, and what for. Waits for one: so long, or (None) for ever."""
        return self._poll(None if seconds is None else seconds * 1000)

    def close(self) -> None:
        """There is nothing to be closed."""


if sys.platform == "linux":
    Poller = select.epoll
else:
    Poller = Poll
