"""Kills the workers of a node when its lease has run out, also while the agent's own thread blocks.

That thread shows the output of the workers, and blocks as long as nobody reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class LeaseGuard:
    """A thread that watches a lease until it is closed.

    Args:
        lease_left: returns the seconds that are left. Called in the thread; never blocks.
        kill: kills the workers. Called in the thread.

    Attributes:
        has_killed: whether the lease had run out, if only for a moment.
    """

    def __init__(self, lease_left: Callable[[], float], kill: Callable[[], None]) -> None:
        self.has_killed = False
        self._lease_left = lease_left
        self._kill = kill
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="zmqgrad-agent-lease", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while (left := self._lease_left()) > 0:
            if self._closed.wait(min(left, threading.TIMEOUT_MAX)):
                return
        if not self._closed.is_set():
            self.has_killed = True
            self._kill()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._closed.set()
        self._thread.join()
