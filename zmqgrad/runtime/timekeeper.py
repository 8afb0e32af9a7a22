"""One thread for everything that happens later: deadlines, retries, and what finalizers left behind.

See Note [Finalizers only enqueue]: a finalizer can run at any line of any thread, with a lock of ours
held, so all that it may do is :meth:`Timekeeper.post`, which is re-entrant (``SimpleQueue.put``).
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from zmqgrad.runtime.clock import MONOTONIC, Clock, Deadline

logger = logging.getLogger(__name__)

Job = Callable[[], None]


class Handle:
    """A job that waits for its time."""

    __slots__ = ("job",)

    def __init__(self, job: Job) -> None:
        self.job: Job | None = job

    def cancel(self) -> None:
        """Do not run it. Harmless once it ran."""
        self.job = None


class Timekeeper:
    """Runs short jobs, each at its time, in one thread named ``<name>-timekeeper``."""

    def __init__(self, name: str, clock: Clock = MONOTONIC) -> None:
        self._clock = clock
        self._inbox: SimpleQueue[tuple[float, Handle] | None] = SimpleQueue()
        self._heap: list[tuple[float, int, Handle]] = []  # touched by the thread alone
        self._order = itertools.count()
        self._thread = threading.Thread(target=self._run, name=f"{name}-timekeeper", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def post(self, job: Job) -> None:
        """Run ``job`` as soon as possible. Safe inside finalizers."""
        self._inbox.put((-math.inf, Handle(job)))

    def call_later(self, seconds: float, job: Job) -> Handle:
        """Run ``job`` in ``seconds``, unless its handle is cancelled."""
        handle = Handle(job)
        self._inbox.put((self._clock.now() + seconds, handle))
        return handle

    def _run(self) -> None:
        while True:
            try:
                item = self._inbox.get(timeout=self._seconds_to_next())
            except Empty:
                item = (math.inf, Handle(_nothing))
            if item is None:
                return
            at, handle = item
            if at == -math.inf:
                self._do(handle)
            elif at < math.inf:
                heapq.heappush(self._heap, (at, next(self._order), handle))
            while self._heap and self._heap[0][0] <= self._clock.now():
                self._do(heapq.heappop(self._heap)[2])

    def _seconds_to_next(self) -> float | None:
        if not self._heap:
            return None
        return min(max(0.0, self._heap[0][0] - self._clock.now()), threading.TIMEOUT_MAX)

    def _do(self, handle: Handle) -> None:
        job = handle.job
        if job is None:
            return
        try:
            job()
        except Exception:
            logger.exception("a job of %s failed", self._thread.name)

    def close(self) -> None:
        """Drop what has not run yet, and end. Idempotent."""
        self._inbox.put(None)

    def join(self, deadline: Deadline) -> list[str]:
        """Wait for the thread; gives its name if it has not ended by ``deadline``."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(deadline.left_or_none())
        return [self._thread.name] if self._thread.is_alive() else []


def _nothing() -> None:
    return None
