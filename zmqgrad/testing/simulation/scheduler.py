"""The scheduler: real threads of which one runs at a time, in an order given by a seed, on simulated time.

Threads are real since torch's grad mode and autograd state belong to a thread. One baton passes between them:
each has a lock of its own, which is free only while it is the thread's turn. Every use of a lock, a socket or
the clock is a *point* where the baton may pass on. Who goes on is chosen as in probabilistic concurrency
testing (PCT): the thread of the highest random priority, with a few changes of priority at random points.
Such an order finds a bug that needs d events in a certain order with a known probability. Some seeds choose
at random at each point instead, which mixes the threads more finely.

Time passes only when all threads wait: it jumps to the next deadline. If there is none, that is a deadlock.
"""

from __future__ import annotations

import _thread
import heapq
import itertools
import math
import random
import sys
import traceback
import zlib
from collections.abc import Callable
from typing import Any

from zmqgrad.testing.simulation.network.scheduler import State

TICK = 1e-6
"""Seconds that each point takes, so that a thread which polls the clock gets on."""

LONGEST_TURN = 20_000
"""Points after which a thread that has not waited gives way: no priority lets it starve the others."""

SHORTEST_JOB, LONGEST_JOB = 30, 30_000
"""Changes of priority happen within a number of points between these, so that some fall into any phase."""


class Failure(Exception):
    """What a run found: a deadlock, a job that does not end, a broken oracle."""


def _never() -> bool:
    return False


class Task:
    """A simulated thread."""

    __slots__ = (
        "baton",
        "deadline",
        "ident",
        "name",
        "number",
        "priority",
        "process",
        "ready",
        "since",
        "states",
        "turn",
        "words",
    )

    def __init__(self, number: int, name: str, process: Any, priority: float) -> None:
        self.number = number
        self.name = name
        self.process = process
        self.priority = priority
        self.ident = 0
        """Of the real thread; 0 until it runs."""
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.ready: Callable[[], bool] = _never
        """What it waits for, unless another thread wakes it."""
        self.states: tuple[State, ...] = ()
        """On which that depends."""
        self.deadline = math.inf
        self.since = 0
        """The number of its latest wait."""
        self.turn = 0
        self.words: dict[str, bytes] = {}
        """Of its points, for the digest."""

    def __repr__(self) -> str:
        return f"{getattr(self.process, 'name', '-')}/{self.name}"


class Scheduler:
    """Runs tasks one at a time.

    Args:
        on_switch: called with the process of the next task whenever another process goes on.
    """

    def __init__(self, on_switch: Callable[[Any], object] = lambda process: None) -> None:
        self.rng = random.Random(0)
        self.current: Task | None = None
        self.failure: Failure | None = None
        self.points = 0
        self.switches = 0
        self.digest = 0
        """Of all points so far: two runs with the same digest took the same way."""
        self.log: list[str] | None = None
        """All points in words, if it is a list."""
        self._now = 1.0
        self._limit = math.inf
        self._most_points = sys.maxsize
        self._random_turns = 0.0
        self._next_turn = sys.maxsize  # the point of the next random turn
        self._changes: dict[int, float] = {}
        self._next_change = 0  # the point at which any of these may be due, or earlier
        self._on_switch = on_switch
        self._process: Any = None
        self._ready: dict[Task, None] = {}
        self._waiting: dict[Task, None] = {}
        self._held: dict[Task, None] = {}  # would be ready if their process were not stopped
        self._stopped: set[Any] = set()
        self._leader: Task | None = (
            None  # of the highest priority among those that are ready; None: not known
        )
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._deadlines: list[tuple[float, int, Task]] = []  # a heap; waits that have ended are still in it
        self._alarm = math.inf  # when the next of both is due, or earlier
        self._numbers = itertools.count(1)
        self._waits = itertools.count(1)
        self._touched: dict[Task, None] = {}  # what these wait for may have happened
        self._busy = False  # a finalizer may call us at any line of our own
        self._end = _thread.allocate_lock()
        self._end.acquire()

    # ---- the run ------------------------------------------------------------------------------------------

    def seed(self, seed: int, limit: float, most_points: int = sys.maxsize) -> None:
        """Prepares a run of at most ``limit`` simulated seconds and ``most_points`` points."""
        self.rng.seed(seed)
        self._limit = limit
        self._most_points = most_points
        if self.rng.random() < 0.4:
            self._random_turns = self.rng.choice((0.01, 0.1, 0.3))
            self._next_turn = self._draw_turn()
        else:
            depth = self.rng.randrange(8)
            within = int(math.exp(self.rng.uniform(math.log(SHORTEST_JOB), math.log(LONGEST_JOB))))
            self._changes = {self.rng.randrange(within): i / 8 for i in range(depth)}

    def run(self) -> None:
        """Runs all tasks until :meth:`finish`. Called by a thread that is not simulated.

        Raises:
            Failure: see there.
        """
        self._pass_on(self._choose())
        self._end.acquire()
        if self.failure is not None:
            raise self.failure

    def finish(self, failure: Failure | None = None) -> None:
        """Ends the run. Does not return in a simulated thread: no thread runs any more."""
        self.failure = self.failure or failure
        me, self.current = self.current, None
        self._end.release()
        _stop(me)

    # ---- what the network and the modules use -------------------------------------------------------------

    def now(self) -> float:
        """Returns simulated seconds."""
        return self._now

    def spawn(self, function: Callable[[], object], name: str, process: Any) -> Task:
        """Adds a thread that runs ``function``."""
        task = Task(next(self._numbers), name, process, 1 + self.rng.random())
        self._make_ready(task)
        _thread.start_new_thread(self._bootstrap, (task, function))
        return task

    def point(self, what: str) -> None:
        """Lets another thread go on, perhaps."""
        me = self.current
        if me is None or self._busy:
            return
        self._busy = True
        self.points += 1
        self._now += TICK
        word = me.words.get(what)
        if word is None:
            word = me.words[what] = b"%d %s" % (me.number, what.encode())
        self.digest = zlib.crc32(word, self.digest)
        if self.log is not None:
            self.log.append(f"{self._now:.6f} {me} {what}")
        me.turn += 1
        if self.points >= self._next_change or me.turn > LONGEST_TURN:
            self._change_priorities(me)
        if self._leader is me and not self._touched and self._now < self._alarm:
            self._busy = False  # nine of ten times
        else:
            self._yield(me)

    def wait_until(self, ready: Callable[[], bool], deadline: float | None, *states: State) -> bool:
        """Blocks until ``ready()``, or the clock reads ``deadline``. Returns ``ready()``.

        Args:
            ready: has no side effects; may be called in any thread.
            states: all on which the outcome of ``ready`` depends.
        """
        while not ready():
            if deadline is not None and self._now >= deadline:
                return False
            self.park(deadline, ready, states)
        return True

    def notify(self, state: State) -> None:
        """Says that ``state`` has changed: what threads wait for may have happened."""
        if state.waiters:
            self._touched.update(state.waiters)
        for watch in state.watchers.values():
            watch()

    def call_at(self, moment: float, action: Callable[[], None]) -> None:
        """Runs ``action``, which must not block, when the clock reads ``moment``."""
        heapq.heappush(self._timers, (moment, next(self._numbers), action))
        self._alarm = min(self._alarm, moment)

    def park(
        self,
        deadline: float | None,
        ready: Callable[[], bool] = _never,
        states: tuple[State, ...] = (),
    ) -> None:
        """Blocks the calling thread until ``ready()``, :meth:`wake`, or ``deadline``."""
        me = self.current
        assert me is not None, "only a simulated thread can wait"
        me.ready, me.states, me.since, me.turn = ready, states, next(self._waits), 0
        me.deadline = math.inf
        if deadline is not None:
            me.deadline = deadline
            heapq.heappush(self._deadlines, (deadline, me.since, me))
            self._alarm = min(self._alarm, deadline)
        for state in states:
            state.waiters[me] = None
        del self._ready[me]
        self._leader = None
        self._waiting[me] = None
        self._yield(me)

    def wake(self, task: Task) -> None:
        """Ends the wait of ``task``."""
        if task in self._waiting:
            self._make_ready(task)

    def stop(self, process: Any) -> None:
        """Runs no task of ``process`` before :meth:`resume`, as the kernel after SIGSTOP."""
        self._stopped.add(process)
        for task in [t for t in self._ready if t.process is process]:
            del self._ready[task]
            self._held[task] = None
        self._leader = None

    def resume(self, process: Any) -> None:
        """Undoes :meth:`stop`."""
        self._stopped.discard(process)
        for task in [t for t in self._held if t.process is process]:
            del self._held[task]
            self._make_ready(task)

    def remove(self, gone: Callable[[Task], bool]) -> None:
        """Never again runs the tasks that are ``gone``. Does not return in one of them."""
        for tasks in (self._ready, self._waiting, self._held):
            for task in [t for t in tasks if gone(t)]:
                del tasks[task]
        self._leader = None
        me = self.current
        if me is not None and gone(me) and not self._busy:
            self._pass_on(self._choose())
            _stop(me)

    def tasks(self) -> list[Task]:
        """Returns the threads that have not ended."""
        return sorted((*self._ready, *self._waiting, *self._held), key=lambda task: task.number)

    def stacks(self) -> str:
        """Returns where each thread is."""
        frames = sys._current_frames()
        parts = []
        for task in self.tasks():
            until = "" if task.deadline == math.inf else f" until {task.deadline:.6f}"
            state = (
                "can run" if task in self._ready else "is stopped" if task in self._held else f"waits{until}"
            )
            frame = frames.get(task.ident)
            stack = traceback.format_stack(frame) if frame is not None else []
            own = [line for line in stack if "/testing/simulation/" not in line] or stack
            parts.append(f"--- {task} {state}\n{''.join(own[-12:])}")
        return "\n".join(parts)

    # ---- inside -------------------------------------------------------------------------------------------

    def _bootstrap(self, task: Task, function: Callable[[], object]) -> None:
        task.ident = _thread.get_ident()
        task.baton.acquire()
        try:
            function()
        except BaseException as e:  # a thread of the simulation itself: nothing may be lost
            self.finish(Failure(f"{task} failed: {''.join(traceback.format_exception(e))}"))
        self.remove(lambda other: other is task)

    def _change_priorities(self, me: Task) -> None:
        """Does what is due at this point."""
        if self.points > self._most_points:
            self._fail(f"the job has not ended within {self._most_points} points")
        if me.turn > LONGEST_TURN:
            me.turn, me.priority, self._leader = 0, self.rng.random() / 8, None
        if self.points in self._changes:
            me.priority, self._leader = self._changes.pop(self.points), None
        if self.points >= self._next_turn:
            self._next_turn = self._draw_turn()
            self._leader = self.rng.choice(list(self._ready))
            self._leader.priority = 1 + max(task.priority for task in self._ready)
        self._next_change = min(self._most_points + 1, self._next_turn, *self._changes)

    def _draw_turn(self) -> int:
        """Returns the next point at which a coin that is tossed at each one falls that way."""
        return self.points + 1 + int(math.log(1 - self.rng.random()) / math.log(1 - self._random_turns))

    def _yield(self, me: Task) -> None:
        """Lets the one go on whose turn it is, and returns at the turn of ``me``."""
        chosen = self._choose()
        if chosen is not me:
            self._pass_on(chosen)
            me.baton.acquire()

    def _pass_on(self, task: Task) -> None:
        self.switches += 1
        self.current = task
        task.turn = 0
        if task.process is not self._process:
            self._process = task.process
            self._on_switch(task.process)
        task.baton.release()

    def _make_ready(self, task: Task) -> None:
        self._waiting.pop(task, None)
        for state in task.states:
            state.waiters.pop(task, None)
        task.states = ()
        (self._held if task.process in self._stopped else self._ready)[task] = None
        self._leader = None

    def _refresh(self) -> None:
        """Runs due timers, and makes threads ready whose wait has ended: who has waited longest, first."""
        while self._timers and self._timers[0][0] <= self._now:
            heapq.heappop(self._timers)[2]()
        touched, self._touched = self._touched, {}
        ended = [task for task in touched if task in self._waiting and task.ready()]
        while (moment := self._next_deadline()) <= self._now:
            ended.append(heapq.heappop(self._deadlines)[2])
        self._alarm = min(moment, self._timers[0][0] if self._timers else math.inf)
        for task in sorted(ended, key=_wait):
            self._make_ready(task)

    def _next_deadline(self) -> float:
        """Returns when the next wait ends, if what it waits for does not happen."""
        while self._deadlines:
            deadline, since, task = self._deadlines[0]
            if task.since == since and task in self._waiting:
                return deadline
            heapq.heappop(self._deadlines)
        return math.inf

    def _choose(self) -> Task:
        """Returns who goes on, after a jump of time if need be."""
        self._busy = True
        if self._touched or self._now >= self._alarm:
            self._refresh()
        while not self._ready:
            moment = min(self._next_deadline(), self._timers[0][0] if self._timers else math.inf)
            if moment == math.inf:
                self._fail("deadlock: no thread can run, and none waits for a moment")
            if moment > self._limit:
                self._fail(f"the job has not ended within {self._limit:g} simulated seconds")
            self._now = max(self._now, moment)
            self._refresh()
        if self._leader is None:
            self._leader = max(self._ready, key=_priority)
        self._busy = False
        return self._leader

    def _fail(self, message: str) -> None:
        failure = Failure(f"{message}\n{self.stacks()}")
        if self.current is None:
            raise failure
        self.finish(failure)


def _priority(task: Task) -> float:
    return task.priority


def _wait(task: Task) -> int:
    return task.since


def _stop(me: Task | None) -> None:
    """Stops the calling thread for good, if it is simulated. Its process ends with all of them."""
    if me is not None:
        never = _thread.allocate_lock()
        never.acquire()
        never.acquire()
