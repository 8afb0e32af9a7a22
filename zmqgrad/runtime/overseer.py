"""A thread that looks after something every millisecond, as long as there is something to see.

For what must not wait for long, but should not cost the wake-up of a thread each time either: rousing the
overseer while it is awake costs a comparison, and it falls asleep when it has seen nothing for a while.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from zmqgrad.runtime.clock import Deadline

logger = logging.getLogger(__name__)

PERIOD = 0.001
"""Seconds between two looks."""

QUIET_LOOKS = 10
"""After so many looks at nothing it falls asleep."""


class Overseer:
    """Calls ``look`` in a thread named ``<name>-overseer`` while roused; it says whether it saw anything."""

    def __init__(self, name: str, look: Callable[[], bool]) -> None:
        self._look = look
        self._inbox: SimpleQueue[bool | None] = SimpleQueue()
        self._awake = False
        self._thread = threading.Thread(target=self._run, name=f"{name}-overseer", daemon=True)
        self._thread.start()

    def rouse(self) -> None:
        """There is something to look after."""
        if not self._awake:
            self._awake = True
            self._inbox.put(True)

    def _run(self) -> None:
        while self._inbox.get() is not None:
            quiet = 0
            while quiet < QUIET_LOOKS:
                try:
                    if self._inbox.get(timeout=PERIOD) is None:
                        return
                except Empty:
                    pass
                quiet = 0 if self._look() else quiet + 1
            self._awake = False
            if self._look():  # it came between the last look and falling asleep
                self.rouse()

    def close(self) -> None:
        """Look no more. Idempotent."""
        self._inbox.put(None)

    def join(self, deadline: Deadline) -> list[str]:
        """Wait for the thread; gives its name if it has not ended by ``deadline``."""
        if self._thread is not threading.current_thread():
            self._thread.join(deadline.timeout())
        return [self._thread.name] if self._thread.is_alive() else []
