"""Queries that many threads share, run in a thread of their own so that each caller can time out."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.future import Promise
from zmqgrad.runtime.late_threads import start_thread

logger = logging.getLogger(__name__)


class Lookup:
    """Runs ``query`` for all callers that wait for it, one query at a time.

    A caller is served by a query that starts after it called, never by one in progress.

    Args:
        name: of the thread, which exists only while a caller waits.
        query: must return in bounded time. What it raises is logged.
    """

    def __init__(self, name: str, query: Callable[[], None]) -> None:
        self._name = name
        self._query = query
        self._lock = threading.Lock()  # guards all below
        self._next: Promise[None] | None = None
        self._thread: threading.Thread | None = None

    def wait(self, seconds: float | None) -> bool:
        """Wait until a query that starts from now on has ended; False if it does not within ``seconds``."""
        with self._lock:
            promise = self._next
            if promise is None:
                promise = self._next = Promise()
            if self._thread is None:
                self._thread = start_thread(
                    self._run, self._name
                )  # if there can be none now, the next call does
        return promise.wait_done(seconds)

    def _run(self) -> None:
        while True:
            with self._lock:
                promise, self._next = self._next, None
                if promise is None:
                    self._thread = None
                    return
            try:
                self._query()
            except Exception:  # the records that others have written may be malformed
                logger.exception("%s failed", self._name)
            finally:
                promise.set_result(None)

    def join(self, deadline: Deadline) -> list[str]:
        """Wait for the thread, whose query must be about to end; names it if it does not by ``deadline``."""
        with self._lock:
            thread = self._thread
        if thread is None:
            return []
        thread.join(deadline.timeout())
        return [self._name] if thread.is_alive() else []
