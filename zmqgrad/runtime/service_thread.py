"""The service thread: runs jobs at a given time, and handlers of file descriptors, for all of a worker.

Timeouts, heartbeats and the writing of what the kernel did not accept at once share it. Jobs
and handlers must be short, and must not wait.

Note [Finalizers only enqueue]: a finalizer can run at any line of any thread, while that thread holds one of
our locks. It must therefore call nothing but :meth:`ServiceThread.call_soon` and ``call_later``, which are
re-entrant (``deque.append``).
"""

from __future__ import annotations

import functools
import heapq
import itertools
import logging
import math
import threading
import traceback
from collections import deque
from collections.abc import Callable

from zmqgrad.runtime.blocking import thread_state
from zmqgrad.runtime.clock import MONOTONIC, Clock, Deadline, ManualClock
from zmqgrad.runtime.polling import MAX_SECONDS, READ, SPENT, Poller, Wakeup

logger = logging.getLogger(__name__)

Job = Callable[[], None]

MIN_SWEEP_JOBS = 1024
"""How many jobs must wait, cancelled ones included, before cancelled jobs are removed."""

MAX_EVENTS = 64
"""Events that one poll returns at most."""


class TimerHandle:
    """A scheduled job."""

    __slots__ = ("job",)

    def __init__(self, job: Job | None = None) -> None:
        self.job = job
        """None once it runs."""

    def cancel(self) -> None:
        """Cancels the job. No effect if it has run."""
        self.job = None


class CoalescedJob:
    """A job that runs once for all that schedule it in the meantime.

    Its last handle says whether it is scheduled. A flag would stay set, and the job would never run again, if
    Ctrl-C came between setting it and scheduling.

    Args:
        job: what runs.
        call_later: of the timer.
    """

    __slots__ = ("_call_later", "_handle", "_job")

    def __init__(self, job: Job, call_later: Callable[[float, Job], TimerHandle]) -> None:
        self._job = job
        self._call_later = call_later
        self._handle = TimerHandle()

    def schedule(self, seconds: float) -> None:
        """Lets the job run in ``seconds``, unless it will run anyway. From any thread. Safe in finalizers."""
        if self._handle.job is None:
            self._handle = self._call_later(seconds, self._job)


class Alarm:
    """A job that runs at the earliest of the times that it was set to, and sets its next time itself.

    Only the last timer runs it. Timers that each set the next one would be more after each earlier time, for
    ever. All of its state changes in the service thread, so it has no lock.

    Args:
        job: what runs.
        timer: what runs it.
        tolerance: seconds; it is not set again for a time that is earlier by no more.
    """

    __slots__ = ("_handle", "_job", "_timer", "_tolerance", "at")

    def __init__(self, job: Job, timer: ServiceThread, tolerance: float = 0.0) -> None:
        self.at = math.inf
        """When the job runs. For an earlier time, call :meth:`set`."""
        self._job = job
        self._timer = timer
        self._tolerance = tolerance
        self._handle = TimerHandle(job)

    def set(self, due: float) -> None:
        """Lets the job run at ``due``, or earlier if it was set so. From any thread. Safe in finalizers."""
        if due < self.at - self._tolerance:
            self._timer.call_soon(functools.partial(self._set, due))

    def _set(self, due: float) -> None:
        if due < self.at - self._tolerance:
            self._handle.cancel()
            self._handle = self._timer.call_at(due, self._ring)
            self.at = due

    def _ring(self) -> None:
        self.at = math.inf
        self._job()


class ServiceThread:
    """Runs short jobs at given times, and handles ready descriptors, in a thread named ``<name>-service``."""

    def __init__(self, name: str, clock: Clock = MONOTONIC) -> None:
        self._clock = clock
        self._inbox: deque[tuple[float, TimerHandle]] = deque()
        self._heap: list[tuple[float, int, TimerHandle]] = []  # used by the thread only
        self._order = itertools.count()
        self._poller = Poller()
        self._wakeup = Wakeup()
        self._poller.register(self._wakeup.fd, READ)
        # Guards _handlers and the poller's end. A signal handler may watch something while its thread does.
        self._lock = threading.RLock()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._wakes_at = -math.inf  # when it wakes up by itself: an earlier job must wake it
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"{name}-service", daemon=True)
        self._sweep_at = MIN_SWEEP_JOBS

    def start(self) -> None:
        """Starts the thread."""
        if isinstance(self._clock, ManualClock):
            self._clock.on_advance(lambda: self.call_soon(_nothing))
        try:
            self._thread.start()
        except RuntimeError:  # no thread can be started
            self._closed = True
            self._close_poller()
            raise

    # ---- jobs -------------------------------------------------------------------------------------------

    def call_soon(self, job: Job) -> None:
        """Runs ``job`` as soon as possible. Safe in finalizers."""
        self._enqueue(-math.inf, TimerHandle(job))

    def call_later(self, seconds: float, job: Job) -> TimerHandle:
        """Runs ``job`` in ``seconds`` (infinite: never), unless its handle is cancelled. Safe in finalizers.

        Raises:
            ValueError: if ``seconds`` is not a number.
        """
        if math.isnan(seconds):
            raise ValueError("a job cannot run in nan seconds")
        return self.call_at(self._clock.now() + max(0.0, seconds), job)

    def call_at(self, due: float, job: Job) -> TimerHandle:
        """Runs ``job`` when the clock shows ``due``, as :meth:`call_later`."""
        handle = TimerHandle(job)
        self._enqueue(due, handle)
        return handle

    def _enqueue(self, at: float, handle: TimerHandle) -> None:
        self._inbox.append((at, handle))
        if at < self._wakes_at:
            self._wakeup.set()

    # ---- descriptors ------------------------------------------------------------------------------------

    def watch(self, fd: int, mask: int, handler: Callable[[int], None]) -> None:
        """Calls ``handler(events)`` whenever ``fd`` is ready for ``mask``. From any thread.

        Errors and the end of a connection are always reported. Events may be outdated.
        """
        with self._lock:
            if not self._closed:
                known = fd in self._handlers
                self._handlers[fd] = handler
                (self._poller.modify if known else self._poller.register)(fd, mask)

    def rewatch(self, fd: int, mask: int) -> None:
        """Changes the mask of a descriptor that is watched. From any thread."""
        with self._lock:
            if fd in self._handlers and not self._closed:
                self._poller.modify(fd, mask)

    def is_current(self) -> bool:
        """Whether the calling thread is this one, which must not wait."""
        return threading.current_thread() is self._thread

    def unwatch(self, fd: int) -> None:
        """Undoes :meth:`watch`. Must be called before the descriptor is closed. Idempotent."""
        with self._lock:
            if self._handlers.pop(fd, None) is not None and not self._closed:
                self._poller.unregister(fd)

    # ---- the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        thread_state.all_depend_on_it = True
        while not self._closed:
            self._receive()
            while self._heap and self._heap[0][0] <= self._clock.now():
                self._run_job(heapq.heappop(self._heap)[2])
            if len(self._heap) > self._sweep_at:
                self._sweep()
            self._wakes_at = self._next_due()
            ready = [] if self._inbox else self._poller.poll(self._seconds_to_next(), MAX_EVENTS)
            self._wakes_at = -math.inf
            if not ready:
                continue
            self._wakeup.clear()
            self._receive()  # first: what was unwatched must not be handled
            for fd, events in ready:
                handler = self._handlers.get(fd)
                if handler is not None:
                    self._handle(handler, events)
        self._close_poller()

    def _close_poller(self) -> None:
        with self._lock:
            self._handlers.clear()
            self._poller.close()
            self._wakeup = SPENT

    def _receive(self) -> None:
        """Empties the inbox, so that of two due jobs the earlier runs first."""
        # No more than there are now: a job that schedules itself must not delay others for ever.
        for _ in range(len(self._inbox)):
            at, handle = self._inbox.popleft()
            if at == -math.inf:
                self._run_job(handle)
            elif at < math.inf:
                heapq.heappush(self._heap, (at, next(self._order), handle))

    def _next_due(self) -> float:
        if isinstance(self._clock, ManualClock) or not self._heap:
            return math.inf  # a manual clock enqueues a job when it advances
        return self._heap[0][0]

    def _seconds_to_next(self) -> float | None:
        due = self._wakes_at
        return None if due == math.inf else min(max(0.0, due - self._clock.now()), MAX_SECONDS)

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
            self._report_failure("a job")

    def _handle(self, handler: Callable[[int], None], events: int) -> None:
        try:
            handler(events)
        except BaseException:
            self._report_failure("a handler")

    def _report_failure(self, what: str) -> None:
        """Logs the exception that is being handled."""
        try:
            logger.exception("%s of %s failed", what, self._thread.name)
        except Exception:  # of a logging handler of the program
            traceback.print_exc()

    def close(self) -> None:
        """Drops the jobs that have not run, and ends the thread. Idempotent."""
        self._closed = True
        self._wakeup.set()

    def join(self, deadline: Deadline) -> list[str]:
        """Waits for the thread to end. Returns its name if it has not by ``deadline``."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(deadline.timeout())
        return [self._thread.name] if self._thread.is_alive() else []


def _nothing() -> None:
    return None
