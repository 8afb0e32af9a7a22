"""The engine threads: they run user functions and backward work.

Promise: a task that waits in one of our waits never keeps another from running (pytorch#26362 is the
fault that this avoids). The pool keeps up to ``size`` threads *working*; one that says it is about to
block no longer counts, and one too many retires when it finds nothing to do. A task that blocks
somewhere we cannot see (a lock of the user's, a C++ wait) is noticed when tasks queue and nothing has
finished for a while; then, too, a thread is added.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from zmqgrad.errors import ClosedError
from zmqgrad.runtime.blocking import about_to_block, belong_to
from zmqgrad.runtime.clock import Deadline

logger = logging.getLogger(__name__)

Task = Callable[[], None]

STALL_SECONDS = 0.1
"""Tasks queue and nothing finished for so long: add a thread."""


class EnginePool:
    """Runs tasks on at most ``size`` working threads named ``<name>-engine-<n>``, started as needed."""

    def __init__(
        self, name: str, size: int, call_later: Callable[[float, Callable[[], None]], object] | None = None
    ) -> None:
        if size < 1:
            raise ValueError(f"an engine pool needs at least one thread, not {size}")
        self._name = name
        self._size = size
        self._call_later = call_later
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        # Guards all below. A thread is idle (waits for a task that was not promised to another),
        # blocked, or working; a task is promised to an idle or new thread, or counts as backlog.
        self._lock = threading.Lock()
        self._idle = 0
        self._blocked = 0
        self._live = 0
        self._backlog = 0
        self._finished = 0
        self._watching = False
        self._closed = False
        self._threads: set[threading.Thread] = set()
        self._numbers = 0

    def submit(self, task: Task) -> None:
        """Run ``task`` soon. It must handle its own errors; one that escapes is logged.

        Raises:
            ClosedError: after :meth:`close`.
        """
        with self._lock:
            if self._closed:
                raise ClosedError(f"the engine pool of {self._name} is closed")
            watch = False
            if self._idle:
                self._idle -= 1
                spawn = False
            elif self._live - self._blocked < self._size:
                spawn = True
            else:
                spawn = False
                self._backlog += 1
                watch = not self._watching and self._call_later is not None
                self._watching |= watch
            self._tasks.put(task)
            if spawn:
                self._spawn()
        if watch:
            self._watch()

    def blocked(self) -> _Blocked:
        """A context manager around a wait in one of our threads: another may work meanwhile."""
        return _Blocked(self)

    def _block(self) -> None:
        with self._lock:
            self._blocked += 1
            if self._backlog and not self._closed:
                self._backlog -= 1
                self._spawn()

    def _unblock(self) -> None:
        with self._lock:
            self._blocked -= 1

    def _spawn(self) -> None:
        """Start a thread, to which one task in the queue is promised. Called with the lock held."""
        self._live += 1
        self._numbers += 1
        thread = threading.Thread(target=self._work, name=f"{self._name}-engine-{self._numbers}", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _work(self) -> None:
        belong_to(self)
        tasks = self._tasks
        try:
            while True:
                task = tasks.get()
                if task is None:
                    return
                try:
                    task()
                except BaseException:
                    logger.exception("a task of %s failed", self._name)
                del task  # else an idle thread keeps the last task's tensors alive
                if not self._goes_on():
                    return
        finally:
            with self._lock:
                self._live -= 1
                self._threads.discard(threading.current_thread())

    def _goes_on(self) -> bool:
        with self._lock:
            self._finished += 1
            if self._closed:
                return False
            if self._backlog:
                self._backlog -= 1
            elif self._live - self._blocked > self._size:
                return False
            else:
                self._idle += 1
            return True

    def _watch(self) -> None:
        assert self._call_later is not None
        before = self._finished
        self._call_later(STALL_SECONDS, lambda: self._check_stall(before))

    def _check_stall(self, before: int) -> None:
        with self._lock:
            if self._closed or not self._backlog:
                self._watching = False
                return
            if self._finished == before:
                self._backlog -= 1
                self._spawn()
        self._watch()

    def close(self) -> None:
        """Take no more tasks; those queued are dropped, those running go on. Idempotent."""
        with self._lock:
            self._closed = True
            for _ in range(self._live):
                self._tasks.put(None)

    def join(self, deadline: Deadline) -> list[str]:
        """Wait for the threads to end; gives the names of those that did not by ``deadline``."""
        with self._lock:
            threads = [t for t in self._threads if t is not threading.current_thread()]
        with about_to_block():
            for thread in threads:
                thread.join(deadline.left_or_none())
        return [t.name for t in threads if t.is_alive()]

    def statistics(self) -> dict[str, int]:
        """How many threads and tasks there are, by state."""
        with self._lock:
            return {
                "threads": self._live,
                "idle": self._idle,
                "blocked": self._blocked,
                "queued": self._backlog,
                "finished": self._finished,
            }

    def busy(self) -> bool:
        """Does any thread run or wait inside a task, or is one queued?"""
        with self._lock:
            return self._backlog > 0 or self._live > self._idle

    def __repr__(self) -> str:
        said = ", ".join(f"{v} {k}" for k, v in self.statistics().items())
        return f"<EnginePool {self._name}: {said}>"


class _Blocked:
    __slots__ = ("_pool",)

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    def __enter__(self) -> None:
        self._pool._block()

    def __exit__(self, *exc: object) -> None:
        self._pool._unblock()
