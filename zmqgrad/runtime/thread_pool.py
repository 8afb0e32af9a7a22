"""The engine threads: they run user functions and backward work.

Promise: a task that waits in one of our waits never keeps another from running (pytorch#26362 is the
fault that this avoids). The pool keeps up to ``size`` threads *working*; one that says it is about to
block no longer counts. When it goes on there may be one too many for a moment: whichever finishes its
task first retires. A task that blocks somewhere we cannot see (a lock of the user's, a C++ wait) is
noticed when tasks queue, nothing has finished for a while, and fewer than ``size`` threads have used the
processor meanwhile; then, too, a thread is added. Long computations add none.

A :class:`Source` of tasks is read by threads of the pool themselves, so that a task starts without waiting
for a thread to wake. One of them *leads*: it reads, and runs what it has read; others stand by in the kernel
and one of those leads next; or the same once more, if it is back before there is something to read. While
there is more at hand, the leader runs one task after another and keeps the lead. If one of them blocks, or
takes longer than a millisecond or two, another leads meanwhile: nothing waits behind user code for longer
than that.
"""

from __future__ import annotations

import enum
import logging
import math
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from zmqgrad.errors import ClosedError
from zmqgrad.runtime.blocking import blocking_section, set_pool
from zmqgrad.runtime.clock import Deadline, cpu_seconds
from zmqgrad.runtime.overseer import Overseer

logger = logging.getLogger(__name__)

Task = Callable[[], None]

STALL_SECONDS = 0.1
"""Tasks queue and nothing finished for so long: see whether threads are stuck."""

STUCK_SECONDS = 0.001
"""A thread that has used less of the processor between two looks is stuck."""


MAX_FOLLOWERS = 4
"""So many threads that have nothing else to do stand by at the source."""


class Source(Protocol):
    """Where tasks come from. One thread at a time leads."""

    def wait_for_lead(self) -> bool:
        """Wait until the calling thread is to lead; False: it is over."""
        ...

    def read(self) -> Task | None:
        """By the leader: the next task, as soon as there is one; None: it is over."""
        ...

    def has_more(self) -> bool:
        """By the leader: is there another task already, or will there be one in no time?"""
        ...

    def try_lead(self) -> bool:
        """The calling thread, which has nothing else to do, leads from now on, unless another does."""
        ...

    def promote(self) -> None:
        """Whoever stands by leads next, as soon as there is something to read. Not while anybody reads."""
        ...


class ThreadPool:
    """Runs tasks on at most ``size`` working threads named ``<name>-engine-<n>``, started as needed.

    ``call_later`` is used to look after stuck tasks; ``prepare`` is the first thing that each thread calls.
    """

    def __init__(
        self,
        name: str,
        size: int,
        call_later: Callable[[float, Callable[[], None]], object] | None = None,
        prepare: Callable[[], object] | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"an engine pool needs at least one thread, not {size}")
        self._name = name
        self._size = size
        self._call_later = call_later
        self._prepare = prepare
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        # Guards all below. A thread attends the source (leads it or stands by), is idle (waits for a task
        # that was not promised to another), blocked, or working; a task is promised to an idle or new thread,
        # or counts as backlog. While there is backlog nobody is idle. Up to size + extra threads work: extra
        # make up for stuck ones.
        self._lock = threading.Lock()
        self._idle = 0
        self._blocked = 0
        self._live = 0
        self._attending = 0
        self._extra = 0
        self._backlog = 0
        self._finished = 0
        self._watching = False
        self._closed = False
        self._threads: set[threading.Thread] = set()
        self._leaving: list[threading.Thread] = []  # no longer counted, perhaps at their last instruction
        self._numbers = 0
        self._at_rest = threading.Condition(self._lock)
        self._awaited = 0  # so many wait for that
        self._source: Source | None = None
        self._vacancy: _Vacancy | None = None  # the leader works, and will lead again if it is quick
        self._seen: _Vacancy | None = None  # by the overseer, when it looked last
        self._overseer: Overseer | None = None

    def submit(self, task: Task) -> None:
        """Run ``task`` soon. It must handle its own errors; one that escapes is logged.

        Raises:
            ClosedError: after :meth:`close`.
            RuntimeError: if there is no thread yet and the system refuses to start one.
        """
        with self._lock:
            if self._closed:
                raise ClosedError(f"the engine pool of {self._name} is closed")
            if self._idle:
                self._idle -= 1
            elif self._has_room():
                self._spawn()
            else:
                self._backlog += 1
            self._tasks.put(task)
            watch = self._backlog > 0 and not self._watching and self._call_later is not None
            self._watching |= watch
        if watch:
            self._watch()

    def serve_from(self, source: Source) -> None:
        """From now on threads of the pool read ``source``, one at a time, and run the tasks that it gives.

        A pool attends one source.

        Raises:
            ClosedError: after :meth:`close`.
        """
        with self._lock:
            if self._closed:
                raise ClosedError(f"the engine pool of {self._name} is closed")
            self._source = source
            self._overseer = Overseer(self._name, self._oversee)
            self._yield_lead(source)

    def _yield_lead(self, source: Source) -> None:
        """Whoever stands by leads next. Called with the lock held."""
        source.promote()
        if not self._attending:
            self._attending = 1
            if self._idle:
                self._idle -= 1
            else:
                self._spawn()
            self._tasks.put(partial(self._attend, source))

    def _attend(self, source: Source) -> None:
        """In an engine thread that counts as attending, until it does so no more."""
        while source.wait_for_lead():
            if not self._lead(source):
                return
        with self._lock:
            self._attending -= 1

    def _lead(self, source: Source) -> bool:
        """By the leader, until it leads no more. Does it still attend?"""
        while (task := source.read()) is not None:
            keeps = source.has_more()
            with self._lock:
                room = self._has_room_beside_attendants() and not self._closed
                vacancy = self._step_down(source, keeps) if room else None
            if not room:
                self._leave_to_others(task)
                continue
            if vacancy is not None and self._overseer is not None:
                self._overseer.rouse()
            try:
                task()
            except BaseException:
                logger.exception("a task of %s failed", self._name)
            del task  # else a thread that stands by keeps the last task's tensors alive
            following = self._step_up(source, vacancy)
            if following is not _Next.LEAD:
                return following is _Next.STAND_BY
        return True

    def _step_down(self, source: Source, keeps: bool) -> _Vacancy | None:
        """The leader is about to work. Called with the lock held.

        With more at hand (``keeps``), another thread would only get in its way, if the task is short. So the
        lead is left vacant; whoever notices first that it is not short (the wait that it blocks in, or the
        overseer) passes it on.
        """
        self._attending -= 1
        if keeps:
            self._vacancy = _Vacancy(threading.get_ident())
        else:
            self._yield_lead(source)
        return self._vacancy

    def _step_up(self, source: Source, vacancy: _Vacancy | None) -> _Next:
        """What the calling thread does after a task."""
        with self._lock:
            leads = vacancy is not None and self._vacancy is vacancy
            if self._closed or self._backlog or (not leads and self._attending >= MAX_FOLLOWERS):
                if leads:
                    self._fill_vacancy()
                return _Next.LEAVE
            if leads:
                self._vacancy = None
            self._finished += 1
            self._attending += 1
            if self._awaited and self._live - self._attending == self._idle:
                self._at_rest.notify_all()
            return _Next.LEAD if leads or source.try_lead() else _Next.STAND_BY

    def _fill_vacancy(self) -> None:
        """Pass on the lead if it is vacant. Called with the lock held."""
        if self._vacancy is not None and self._source is not None:
            self._vacancy = None
            self._yield_lead(self._source)

    def _oversee(self) -> bool:
        """Is a task under way beside a vacant lead? If it is the same as last time, it takes long."""
        with self._lock:
            if self._vacancy is None:
                return False
            if self._vacancy is self._seen:
                self._fill_vacancy()
            self._seen = self._vacancy
            return True

    def _leave_to_others(self, task: Task) -> None:
        try:
            self.submit(task)
        except ClosedError:
            logger.debug("%s: a task came while closing", self._name)

    def _has_room_beside_attendants(self) -> bool:
        """May one of those that attend work? Called with the lock held."""
        return self._live - self._attending - self._blocked - self._idle < self._size + self._extra

    def blocked(self) -> _Blocked:
        """A context manager around a wait in one of our threads: another may work meanwhile."""
        return _Blocked(self)

    def _block(self) -> None:
        with self._lock:
            self._blocked += 1
            if self._vacancy is not None and self._vacancy.thread == threading.get_ident():
                self._fill_vacancy()
            if self._backlog and not self._closed and self._has_room():
                self._backlog -= 1
                self._spawn()

    def _unblock(self) -> None:
        with self._lock:
            self._blocked -= 1

    def _has_room(self) -> bool:
        """May another thread work? Called with the lock held."""
        return self._live - self._attending - self._blocked < self._size + self._extra

    def _spawn(self) -> None:
        """Start a thread, to which one task is promised. Called with the lock held."""
        self._numbers += 1
        thread = threading.Thread(target=self._work, name=f"{self._name}-engine-{self._numbers}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads for us
            if not self._live:
                raise
            logger.error("%s cannot start a thread beside its %d: tasks wait", self._name, self._live)
            self._backlog += 1
            return
        self._live += 1
        self._threads.add(thread)

    def _work(self) -> None:
        set_pool(self)
        if self._prepare is not None:
            self._prepare()
        tasks = self._tasks
        while (task := tasks.get()) is not None:
            try:
                task()
            except BaseException:
                logger.exception("a task of %s failed", self._name)
            del task  # else an idle thread keeps the last task's tensors alive
            if not self._goes_on():
                return
        with self._lock:
            self._retire()

    def _goes_on(self) -> bool:
        """After a task: will there be another for this thread? If not, it has retired."""
        with self._lock:
            self._finished += 1
            if self._closed or self._live - self._attending - self._blocked > self._size + self._extra:
                self._retire()
                return False
            if self._backlog:
                self._backlog -= 1
            elif self._idle >= self._size:  # so what was stuck is not any more
                self._extra = max(0, self._extra - 1)
                self._retire()
                return False
            else:
                self._idle += 1
                if self._awaited and self._live - self._attending == self._idle:
                    self._at_rest.notify_all()
            return True

    def _retire(self) -> None:
        """The calling thread takes no more tasks. Called with the lock held, and the same that decided it:
        whoever still counted on this thread in between would leave a task to nobody.
        """
        me = threading.current_thread()
        self._live -= 1
        self._threads.discard(me)
        self._leaving = [*(t for t in self._leaving if t.is_alive()), me]
        if self._awaited and self._live - self._attending == self._idle:
            self._at_rest.notify_all()

    def _watch(self) -> None:
        assert self._call_later is not None
        with self._lock:
            before, used = self._finished, self._processor_used()
        self._call_later(STALL_SECONDS, lambda: self._check_stall(before, used))

    def _processor_used(self) -> dict[threading.Thread, float]:
        """Seconds by thread. Called with the lock held: so none of them can end meanwhile."""
        return {thread: cpu_seconds(thread) for thread in self._threads}

    def _check_stall(self, before: int, used: dict[threading.Thread, float]) -> None:
        with self._lock:
            if self._closed or not self._backlog:
                self._watching = False
                return
            now = self._processor_used()
            at_work = sum(now[t] - used.get(t, -math.inf) >= STUCK_SECONDS for t in now)
            if self._finished == before and at_work < self._size:
                self._extra += 1
                self._backlog -= 1
                self._spawn()
        self._watch()

    def close(self) -> None:
        """Take no more tasks; those queued are dropped, those running go on. Idempotent."""
        with self._lock:
            self._fill_vacancy()  # before the words that end threads: whoever reads must go on to its own end
            self._closed = True
            self._backlog = self._idle = 0
            for _ in range(self._live):
                self._tasks.put(None)
            overseer = self._overseer
        if overseer is not None:
            overseer.close()

    def join(self, deadline: Deadline) -> list[str]:
        """Wait for the threads to end; gives the names of those that did not by ``deadline``."""
        with self._lock:
            threads = [t for t in (*self._threads, *self._leaving) if t is not threading.current_thread()]
        with blocking_section():
            for thread in threads:
                thread.join(deadline.timeout())
        left = [t.name for t in threads if t.is_alive()]
        return left if self._overseer is None else left + self._overseer.join(deadline)

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
            return self._backlog > 0 or self._live - self._attending > self._idle

    def wait_idle(self, deadline: Deadline) -> bool:
        """Wait until no task runs, waits or is queued. False if that does not come by ``deadline``."""
        with self._lock:
            self._awaited += 1
            try:
                return self._at_rest.wait_for(
                    lambda: not self._backlog and self._live - self._attending == self._idle,
                    deadline.timeout(),
                )
            finally:
                self._awaited -= 1

    def __repr__(self) -> str:
        said = ", ".join(f"{v} {k}" for k, v in self.statistics().items())
        return f"<ThreadPool {self._name}: {said}>"


class _Next(enum.Enum):
    """What a thread does that has run a task of the source."""

    LEAD = enum.auto()
    STAND_BY = enum.auto()
    LEAVE = enum.auto()  # it is wanted elsewhere, or not at all


class _Vacancy:
    """Nobody leads: the leader runs a task, in ``thread``. One for each task."""

    __slots__ = ("thread",)

    def __init__(self, thread: int) -> None:
        self.thread = thread


class _Blocked:
    """While it is open the thread belongs to no pool, so that a wait inside a wait counts once."""

    __slots__ = ("_pool",)

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool

    def __enter__(self) -> None:
        set_pool(None)
        self._pool._block()

    def __exit__(self, *exc: object) -> None:
        self._pool._unblock()
        set_pool(self._pool)
