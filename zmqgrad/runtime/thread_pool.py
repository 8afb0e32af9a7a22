"""The worker's thread pool: runs user functions and backward work.

A task that blocks in one of our waits never keeps another task from running (pytorch#26362). The pool keeps
up to ``size`` threads *working*. A thread inside a :func:`~zmqgrad.runtime.blocking.blocking_section` does
not count as working, so another takes its place (managed blocking, as in Java's ``ForkJoinPool``). When the
wait ends, one thread too many may work for a moment; the first to finish its task retires.

A :class:`Source` of tasks is read by the pool's own threads (leader/followers, Schmidt et al., POSA2), so a
task starts without waking another thread. The *leader* reads a task, promotes a follower, runs the task, and
becomes leader again if no follower was woken meanwhile. Messages therefore never queue behind user code.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from zmqgrad.errors import ClosedError
from zmqgrad.runtime.blocking import blocking_section, set_pool, thread_state
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.forks import in_forks
from zmqgrad.runtime.late_threads import are_scarce, start_thread

logger = logging.getLogger(__name__)

Task = Callable[[], None]

MAX_FOLLOWERS = 4
"""How many threads without a task wait to lead."""


class Source(Protocol):
    """Where tasks come from. One thread at a time leads."""

    def wait_for_lead(self) -> bool:
        """Blocks until the calling thread is the leader. Returns False if the source was closed."""

    def read(self) -> Task | None:
        """Blocks until there is a task, and returns it; None if the source was closed. Leader only."""

    def try_lead(self) -> bool:
        """Makes the calling thread the leader if there is none. Returns whether it leads. Never blocks."""

    def promote(self) -> None:
        """Gives up the lead: the next task makes a follower the leader. Called by the leader, or at first."""


class ThreadPool:
    """Runs tasks in at most ``size`` working threads named ``<name>-engine-<n>``, started as needed.

    Args:
        name: prefix of the thread names.
        size: the number of threads that may work at a time. Blocked threads do not count.
        prepare: called first in each thread.
    """

    def __init__(self, name: str, size: int, prepare: Callable[[], object] | None = None) -> None:
        if size < 1:
            raise ValueError(f"a thread pool needs at least one thread, not {size}")
        self._name = name
        self._size = size
        self._prepare = prepare
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        # Guards everything below. A thread is a follower (or the leader), idle (waits for a task that was not
        # promised to another thread), blocked, or working. A task is promised to an idle or a new thread, or
        # counts as backlog. While there is a backlog no thread is idle.
        self._lock = threading.Lock()
        self._idle = 0
        self._blocked = 0
        self._live = 0
        self._followers = 0
        self._backlog = 0
        self._finished = 0
        self._closed = False
        self._threads: set[threading.Thread] = set()
        self._retired: list[threading.Thread] = []  # no longer counted, but perhaps not ended
        self._started = 0
        self._reader = 0  # id of the thread that reads from the source; 0: none
        self._all_idle = threading.Condition(self._lock)
        self._idle_waiters = 0
        self._forked = False
        in_forks(self, ThreadPool._note_fork)

    def _note_fork(self) -> None:
        self._forked = True

    def _end_fork(self) -> None:
        """Ends this process, forked by a task that has returned in it: it would wait for tasks for ever."""
        logger.error(
            "process %d ends, which a task of %s has forked, as the task has returned there; "
            "end it by os._exit()",
            os.getpid(),
            self._name,
        )
        os._exit(1)

    def submit(self, task: Task) -> None:
        """Runs ``task`` soon. It must handle its own errors; an exception that escapes is logged.

        Raises:
            ClosedError: after :meth:`close`.
            RuntimeError: if the pool has no thread yet and the system refuses to start one.
        """
        with self._lock:
            if self._closed:
                raise ClosedError(f"the thread pool of {self._name} is closed")
            if self._idle:
                self._idle -= 1
            elif self._has_room():
                self._spawn()
            else:
                self._backlog += 1
            self._tasks.put(task)

    def serve_from(self, source: Source) -> None:
        """Reads tasks from ``source``, one thread at a time, and runs them. A pool serves one source.

        Raises:
            ClosedError: after :meth:`close`.
        """
        with self._lock:
            if self._closed:
                raise ClosedError(f"the thread pool of {self._name} is closed")
            self._promote(source)

    def _promote(self, source: Source) -> None:
        """Gives the lead to a follower, starting one if there is none. Called with the lock held."""
        source.promote()
        if not self._followers:
            if self._idle:
                self._idle -= 1
            else:
                self._spawn()
            self._followers = 1  # last, as the system may refuse to start one
            self._tasks.put(partial(self._follow, source))

    def _follow(self, source: Source) -> None:
        """Follows and leads until the thread becomes an ordinary thread of the pool, or ``source`` is closed.

        One function, so that few frames lie under a task.
        """
        me, leads = threading.get_ident(), source.wait_for_lead()
        while leads:
            self._reader = me
            task = source.read()
            self._reader = 0  # before another thread is promoted
            if task is None:
                leads = source.wait_for_lead()
                continue
            if not self._promote_to_run(source):
                self._submit_read(task)
                continue
            try:
                task()
            except BaseException:
                logger.exception("a task of %s failed", self._name)
            if self._forked:
                self._end_fork()
            del task  # a follower would keep the tensors of its last task alive
            with self._lock:
                if self._closed or self._backlog or self._followers >= MAX_FOLLOWERS:
                    return
                self._finished += 1
                self._followers += 1
                if self._idle_waiters:
                    self._note_idle()
                leads = source.try_lead()
            leads = leads or source.wait_for_lead()
        with self._lock:
            self._followers -= 1

    def _promote_to_run(self, source: Source) -> bool:
        """Hands the lead on if the leader may run the task that it has read. Returns whether it may."""
        with self._lock:
            if self._closed or self._live - self._followers - self._blocked - self._idle >= self._size:
                return False
            self._followers -= 1
            self._promote(source)
            return True

    def _submit_read(self, task: Task) -> None:
        """Submits a task that the leader has read while ``size`` threads work."""
        try:
            self.submit(task)
        except ClosedError:
            logger.debug("%s: dropped a task that arrived while the pool was closing", self._name)

    def blocked(self) -> _Blocked:
        """A context manager around a wait in one of the pool's threads. Another thread may work meanwhile."""
        return _Blocked(self)

    def reads_here(self) -> bool:
        """Whether the calling thread is reading from the source."""
        return self._reader == threading.get_ident()

    def runs_here(self) -> bool:
        """Whether the calling thread is one of the pool's, and does not wait."""
        return thread_state.pool is self

    def _block(self) -> None:
        """Counts the calling thread as blocked, and starts a thread for a queued task."""
        with self._lock:
            self._blocked += 1
            if self._backlog and not self._closed and self._has_room():
                self._backlog -= 1
                self._spawn()

    def _unblock(self) -> None:
        with self._lock:
            self._blocked -= 1

    def _has_room(self) -> bool:
        """Whether another thread may work. Called with the lock held."""
        return self._live - self._followers - self._blocked < self._size

    def _note_idle(self) -> None:
        """Wakes :meth:`wait_idle` if no task runs. Called with the lock held."""
        if self._idle_waiters and self._live - self._followers == self._idle:
            self._all_idle.notify_all()

    def _spawn(self) -> None:
        """Starts a thread for one promised task. Called with the lock held."""
        self._started += 1
        try:
            thread = start_thread(self._work, f"{self._name}-engine-{self._started}")
        except RuntimeError:  # the system refuses to start more threads
            if not self._live:
                raise
            logger.error("%s cannot start a thread beside its %d: tasks wait", self._name, self._live)
            self._backlog += 1
            return
        self._live += 1
        self._threads.add(thread)

    def _work(self) -> None:
        with self._lock:  # which :meth:`_spawn` holds, that Ctrl-C may have interrupted
            if threading.current_thread() not in self._threads:
                return
        set_pool(self)
        if self._prepare is not None:
            self._prepare()
        tasks = self._tasks
        while (task := tasks.get()) is not None:
            try:
                task()
            except BaseException:
                logger.exception("a task of %s failed", self._name)
            if self._forked:
                self._end_fork()
            del task  # an idle thread would keep the tensors of its last task alive
            if not self._continue():
                return
        with self._lock:
            self._retire()

    def _continue(self) -> bool:
        """Decides after a task whether the thread waits for another one. If not, the thread has retired."""
        with self._lock:
            self._finished += 1
            is_one_too_many = self._live - self._followers - self._blocked > self._size
            if self._closed or (is_one_too_many and not are_scarce()):
                self._retire()
                return False
            if self._backlog:
                self._backlog -= 1
            elif self._idle >= self._size and not are_scarce():
                self._retire()
                return False
            else:
                self._idle += 1
                self._note_idle()
            return True

    def _retire(self) -> None:
        """Removes the calling thread from the pool.

        Called with the lock held, in the same critical section that decided it: a task promised to this
        thread in between would never run.
        """
        me = threading.current_thread()
        self._live -= 1
        self._threads.discard(me)
        self._retired = [*(t for t in self._retired if t.is_alive()), me]
        self._note_idle()

    def close(self) -> None:
        """Accepts no more tasks and drops those that are queued. Running tasks continue. Idempotent."""
        with self._lock:
            self._closed = True
            self._backlog = self._idle = 0
            for _ in range(self._live):
                self._tasks.put(None)
            self._all_idle.notify_all()

    def join(self, deadline: Deadline) -> list[str]:
        """Waits for the threads to end. Returns the names of those that have not by ``deadline``."""
        with self._lock:
            threads = [t for t in (*self._threads, *self._retired) if t is not threading.current_thread()]
        with blocking_section():
            for thread in threads:
                thread.join(deadline.timeout())
        return [t.name for t in threads if t.is_alive()]

    def statistics(self) -> dict[str, int]:
        """Number of threads and tasks by state."""
        with self._lock:
            return {
                "threads": self._live,
                "idle": self._idle,
                "blocked": self._blocked,
                "queued": self._backlog,
                "finished": self._finished,
            }

    def busy(self) -> bool:
        """Whether a task runs, waits or is queued."""
        with self._lock:
            return self._backlog > 0 or self._live - self._followers > self._idle

    def wait_idle(self, deadline: Deadline) -> bool:
        """Waits until no task runs, waits or is queued, or :meth:`close` was called.

        Returns:
            False if ``deadline`` passes first.
        """
        with self._lock:
            self._idle_waiters += 1
            try:
                return self._all_idle.wait_for(
                    lambda: (
                        self._closed or (not self._backlog and self._live - self._followers == self._idle)
                    ),
                    deadline.timeout(),
                )
            finally:
                self._idle_waiters -= 1

    def __repr__(self) -> str:
        counts = ", ".join(f"{v} {k}" for k, v in self.statistics().items())
        return f"<ThreadPool {self._name}: {counts}>"


class _Blocked:
    """While it is open the thread has no pool, so a wait inside a wait counts once."""

    __slots__ = ("_pool",)

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool

    def __enter__(self) -> None:
        set_pool(None)
        self._pool._block()

    def __exit__(self, *exc: object) -> None:
        self._pool._unblock()
        set_pool(self._pool)
