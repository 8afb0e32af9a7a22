"""The engine threads: they run user functions and backward work.

Promise: a task that waits in one of our waits never keeps another from running (pytorch#26362 is the
fault that this avoids). The pool keeps up to ``size`` threads *working*; one that says it is about to
block no longer counts. When it goes on there may be one too many for a moment: whichever finishes its
task first retires. A task that blocks somewhere we cannot see (a lock of the user's, a C++ wait) is
noticed when tasks queue, nothing has finished for a while, and fewer than ``size`` threads have used the
processor meanwhile; then, too, a thread is added. Long computations add none.

One thread may *lead*: it reads where tasks come from, and runs what it has read itself, so that a task
starts without waiting for a thread to wake. If the task blocks, or takes longer than a millisecond or two,
another thread becomes the leader meanwhile: nothing waits behind user code for longer than that.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from queue import SimpleQueue

from zmqgrad.errors import ClosedError
from zmqgrad.runtime.blocking import about_to_block, belong_to
from zmqgrad.runtime.clock import Deadline, cpu_seconds
from zmqgrad.runtime.overseer import Overseer

logger = logging.getLogger(__name__)

Task = Callable[[], None]

STALL_SECONDS = 0.1
"""Tasks queue and nothing finished for so long: see whether threads are stuck."""

STUCK_SECONDS = 0.001
"""A thread that has used less of the processor between two looks is stuck."""


EAGER_TASKS = 16
"""After a task that took long, so many are expected to."""


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
        # blocked, or working; a task is promised to an idle or new thread, or counts as backlog. While
        # there is backlog nobody is idle. Up to size + extra threads work: extra make up for stuck ones.
        self._lock = threading.Lock()
        self._idle = 0
        self._blocked = 0
        self._live = 0
        self._leading = 0  # 1 while a thread reads; it is live, neither idle nor at work
        self._extra = 0
        self._backlog = 0
        self._finished = 0
        self._watching = False
        self._closed = False
        self._threads: set[threading.Thread] = set()
        self._leaving: list[threading.Thread] = []  # no longer counted, perhaps at their last instruction
        self._numbers = 0
        self._at_rest = threading.Condition(self._lock)
        self._vacancy: _Vacancy | None = None  # the leader works, and will lead again if it is quick
        self._seen: _Vacancy | None = None  # by the overseer, when it looked last
        self._eager = 0  # so many tasks more are not expected to be quick
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

    def lead(self, read: Callable[[], Task | None]) -> None:
        """Let threads of the pool, one at a time, call ``read``, and run the task that it gives.

        ``read`` blocks until there is something to do, and gives None when it is over. Only one at a time
        can be led by a pool.

        Raises:
            ClosedError: after :meth:`close`.
        """
        with self._lock:
            if self._closed:
                raise ClosedError(f"the engine pool of {self._name} is closed")
            if self._overseer is None:
                self._overseer = Overseer(self._name, self._oversee)
            self._pass_on(read)

    def _pass_on(self, read: Callable[[], Task | None]) -> None:
        """Make another thread the leader. Called with the lock held."""
        if self._idle:
            self._idle -= 1
        else:
            self._spawn()
        self._leading = 1
        self._tasks.put(lambda: self._lead(read))

    def _lead(self, read: Callable[[], Task | None]) -> None:
        """In the leader's thread, until another leads or there is nothing to read any more."""
        while (task := read()) is not None:
            with self._lock:
                room = self._has_room_beside_leader() and not self._closed
                vacancy = self._step_down(read) if room else None
            if not room:
                self._leave_to_others(task)
                continue
            if vacancy is not None and self._overseer is not None:
                self._overseer.rouse()
            try:
                task()
            except BaseException:
                logger.exception("a task of %s failed", self._name)
            del task
            if vacancy is None or not self._lead_again(vacancy):
                return
        with self._lock:
            self._leading = 0

    def _step_down(self, read: Callable[[], Task | None]) -> _Vacancy | None:
        """The leader is about to work. Called with the lock held.

        Waking a thread to read costs more than a short task takes. So the lead is left vacant, unless tasks
        were long lately; whoever notices first that this one is (the wait that it blocks in, or the
        overseer) makes another thread the leader.
        """
        self._leading = 0
        if self._eager:
            self._eager -= 1
            self._pass_on(read)
            return None
        self._vacancy = _Vacancy(read, threading.get_ident())
        return self._vacancy

    def _lead_again(self, vacancy: _Vacancy) -> bool:
        """After a task: is the lead still vacant? Then the calling thread takes it."""
        with self._lock:
            if self._vacancy is not vacancy:
                return False
            self._vacancy = None
            if self._backlog:  # which this thread is needed for
                self._pass_on(vacancy.read)
                return False
            self._finished += 1
            self._leading = 1
            if self._live - self._leading == self._idle:
                self._at_rest.notify_all()
            return True

    def _fill_vacancy(self) -> None:
        """Make another thread the leader where there is none. Called with the lock held."""
        vacancy, self._vacancy = self._vacancy, None
        if vacancy is not None:
            self._pass_on(vacancy.read)

    def _oversee(self) -> bool:
        """Is a task under way beside a vacant lead? If it is the same as last time, it takes long."""
        with self._lock:
            vacancy = self._vacancy
            if vacancy is None:
                return False
            if vacancy is self._seen:
                self._eager = EAGER_TASKS
                self._fill_vacancy()
            self._seen = vacancy
            return True

    def _leave_to_others(self, task: Task) -> None:
        try:
            self.submit(task)
        except ClosedError:
            logger.debug("%s: a task came while closing", self._name)

    def _has_room_beside_leader(self) -> bool:
        """May the leader, which does not count as such any more, work? Called with the lock held."""
        return self._live - 1 - self._blocked - self._idle < self._size + self._extra

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
        return self._live - self._leading - self._blocked < self._size + self._extra

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
        belong_to(self)
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
            if self._closed or self._live - self._leading - self._blocked > self._size + self._extra:
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
                if self._live - self._leading == self._idle:
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
        if self._live - self._leading == self._idle:
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
        with about_to_block():
            for thread in threads:
                thread.join(deadline.left_or_none())
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
            return self._backlog > 0 or self._live - self._leading > self._idle

    def wait_idle(self, deadline: Deadline) -> bool:
        """Wait until no task runs, waits or is queued. False if that does not come by ``deadline``."""
        with self._lock:
            return self._at_rest.wait_for(
                lambda: not self._backlog and self._live - self._leading == self._idle,
                deadline.left_or_none(),
            )

    def __repr__(self) -> str:
        said = ", ".join(f"{v} {k}" for k, v in self.statistics().items())
        return f"<EnginePool {self._name}: {said}>"


class _Vacancy:
    """Nobody leads: the leader runs a task. One for each task."""

    __slots__ = ("read", "thread")

    def __init__(self, read: Callable[[], Task | None], thread: int) -> None:
        self.read = read
        self.thread = thread


class _Blocked:
    """While it is open the thread belongs to no pool, so that a wait inside a wait counts once."""

    __slots__ = ("_pool",)

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    def __enter__(self) -> None:
        belong_to(None)
        self._pool._block()

    def __exit__(self, *exc: object) -> None:
        self._pool._unblock()
        belong_to(self._pool)
