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

from zmqgrad.runtime.clock import MONOTONIC, Clock, Deadline, ManualClock

logger = logging.getLogger(__name__)

Job = Callable[[], None]

SWEEP_AT_LEAST = 1024
"""Jobs that wait, cancelled ones included, before the cancelled are looked for."""


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

        self._sweep_at = SWEEP_AT_LEAST

    def start(self) -> None:
        """Start the thread."""
        if isinstance(self._clock, ManualClock):
            self._clock.on_advance(lambda: self.post(_nothing))
        self._thread.start()

    def post(self, job: Job) -> None:
        """Run ``job`` as soon as possible. Safe inside finalizers."""
        self._inbox.put((-math.inf, Handle(job)))

    def call_later(self, seconds: float, job: Job) -> Handle:
        """Run ``job`` in ``seconds`` (infinite: never), unless its handle is cancelled.

        Raises:
            ValueError: if ``seconds`` is not a number.
        """
        if math.isnan(seconds):
            raise ValueError("a job cannot run in nan seconds")
        handle = Handle(job)
        self._inbox.put((self._clock.now() + max(0.0, seconds), handle))
        return handle

    def _run(self) -> None:
        while self._take_in():
            while self._heap and self._heap[0][0] <= self._clock.now():
                self._do(heapq.heappop(self._heap)[2])
            if len(self._heap) > self._sweep_at:
                self._sweep()

    def _take_in(self) -> bool:
        """Wait for something to do, then empty the inbox: of two jobs due, the earlier must run first."""
        try:
            item = self._inbox.get(timeout=self._seconds_to_next())
        except Empty:
            return True
        waiting = self._inbox.qsize()  # and no more: a job that posts itself must not keep the others out
        while item is not None:
            at, handle = item
            if at == -math.inf:
                self._do(handle)
            elif at < math.inf:
                heapq.heappush(self._heap, (at, next(self._order), handle))
            if waiting == 0:
                return True
            waiting -= 1
            item = self._inbox.get()
        return False

    def _seconds_to_next(self) -> float | None:
        if not self._heap or isinstance(self._clock, ManualClock):
            return None  # a post wakes us; a manual clock posts when it advances
        return min(max(0.0, self._heap[0][0] - self._clock.now()), threading.TIMEOUT_MAX)

    def _sweep(self) -> None:
        """Forget what was cancelled: most jobs are time limits of calls that came back long before."""
        self._heap = [entry for entry in self._heap if entry[2].job is not None]
        heapq.heapify(self._heap)
        self._sweep_at = max(SWEEP_AT_LEAST, 2 * len(self._heap))

    def _do(self, handle: Handle) -> None:
        job, handle.job = handle.job, None  # whoever keeps the handle must not keep what the job holds
        if job is None:
            return
        try:
            job()
        except BaseException:  # SystemExit too would end the thread, and with it every time limit
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
