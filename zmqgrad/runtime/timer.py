"""The timer thread: runs jobs at a given time, such as timeouts and retries, and the jobs of finalizers.

Note [Finalizers only enqueue]: a finalizer can run at any line of any thread, while that thread holds one of
our locks. It must therefore call nothing but :meth:`TimerThread.call_soon` and ``call_later``, which are
re-entrant (``SimpleQueue.put``).
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

MIN_SWEEP_JOBS = 1024
"""How many jobs must wait, cancelled ones included, before cancelled jobs are removed."""


class TimerHandle:
    """A scheduled job."""

    __slots__ = ("job",)

    def __init__(self, job: Job) -> None:
        self.job: Job | None = job

    def cancel(self) -> None:
        """Cancels the job. No effect if it has run."""
        self.job = None


class TimerThread:
    """Runs short jobs at given times, in one thread named ``<name>-timer``."""

    def __init__(self, name: str, clock: Clock = MONOTONIC) -> None:
        self._clock = clock
        self._inbox: SimpleQueue[tuple[float, TimerHandle] | None] = SimpleQueue()
        self._heap: list[tuple[float, int, TimerHandle]] = []  # used by the thread only
        self._order = itertools.count()
        self._thread = threading.Thread(target=self._run, name=f"{name}-timer", daemon=True)
        self._sweep_at = MIN_SWEEP_JOBS

    def start(self) -> None:
        """Starts the thread."""
        if isinstance(self._clock, ManualClock):
            self._clock.on_advance(lambda: self.call_soon(_nothing))
        self._thread.start()

    def call_soon(self, job: Job) -> None:
        """Runs ``job`` as soon as possible. Safe in finalizers."""
        self._inbox.put((-math.inf, TimerHandle(job)))

    def call_later(self, seconds: float, job: Job) -> TimerHandle:
        """Runs ``job`` in ``seconds`` (infinite: never), unless its handle is cancelled. Safe in finalizers.

        Raises:
            ValueError: if ``seconds`` is not a number.
        """
        if math.isnan(seconds):
            raise ValueError("a job cannot run in nan seconds")
        handle = TimerHandle(job)
        self._inbox.put((self._clock.now() + max(0.0, seconds), handle))
        return handle

    def _run(self) -> None:
        while self._receive():
            while self._heap and self._heap[0][0] <= self._clock.now():
                self._run_job(heapq.heappop(self._heap)[2])
            if len(self._heap) > self._sweep_at:
                self._sweep()

    def _receive(self) -> bool:
        """Waits for the next job, then empties the inbox, so that of two due jobs the earlier runs first.

        Returns False after :meth:`close`.
        """
        try:
            item = self._inbox.get(timeout=self._seconds_to_next())
        except Empty:
            return True
        waiting = self._inbox.qsize()  # no more: a job that schedules itself must not delay others for ever
        while item is not None:
            at, handle = item
            if at == -math.inf:
                self._run_job(handle)
            elif at < math.inf:
                heapq.heappush(self._heap, (at, next(self._order), handle))
            if waiting == 0:
                return True
            waiting -= 1
            item = self._inbox.get()
        return False

    def _seconds_to_next(self) -> float | None:
        if not self._heap or isinstance(self._clock, ManualClock):
            return None  # a job wakes the thread; a manual clock enqueues one when it advances
        return min(max(0.0, self._heap[0][0] - self._clock.now()), threading.TIMEOUT_MAX)

    def _sweep(self) -> None:
        """Removes cancelled jobs: most jobs are timeouts of calls that have returned long ago."""
        self._heap = [entry for entry in self._heap if entry[2].job is not None]
        heapq.heapify(self._heap)
        self._sweep_at = max(MIN_SWEEP_JOBS, 2 * len(self._heap))

    def _run_job(self, handle: TimerHandle) -> None:
        job, handle.job = handle.job, None  # a handle that is still referenced must not keep the job alive
        if job is None:
            return
        try:
            job()
        except BaseException:  # SystemExit, too, would end the thread, and with it all timeouts
            logger.exception("a job of %s failed", self._thread.name)

    def close(self) -> None:
        """Drops the jobs that have not run, and ends the thread. Idempotent."""
        self._inbox.put(None)

    def join(self, deadline: Deadline) -> list[str]:
        """Waits for the thread to end. Returns its name if it has not by ``deadline``."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(deadline.timeout())
        return [self._thread.name] if self._thread.is_alive() else []


def _nothing() -> None:
    return None
