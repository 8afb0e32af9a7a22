"""A leader reads tasks and runs them itself; whatever a task does, another thread continues reading."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.future import Promise
from zmqgrad.runtime.thread_pool import MAX_FOLLOWERS, Task, ThreadPool

WAIT = 10.0


class Source:
    """What a pool attends: tasks by hand."""

    def __init__(self) -> None:
        self.tasks: SimpleQueue[Task | None] = SimpleQueue()
        self.changed = threading.Semaphore(0)
        self.turn = threading.Semaphore(0)
        self.leader: int | None = None
        self.faults: list[str] = []
        self.over = False

    def wait_for_lead(self) -> bool:
        self.turn.acquire()
        if self.over:
            self.turn.release()
            return False
        return True

    def try_lead(self) -> bool:
        if not self.turn.acquire(blocking=False):
            return False
        if self.over:
            self.turn.release()
        return not self.over

    def read(self) -> Task | None:
        me = threading.get_ident()
        if self.leader not in (None, me):
            self.faults.append("two threads read at a time")
        self.leader = me
        task = self.tasks.get()
        self.changed.release()
        if task is None:
            self.over = True
            self.turn.release()
        return task

    def promote(self) -> None:
        self.leader = None
        self.turn.release()


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def make_pool(source: Source) -> Iterator[Callable[[int], ThreadPool]]:
    made: list[ThreadPool] = []

    def make(size: int) -> ThreadPool:
        pool = ThreadPool("led", size)
        made.append(pool)
        pool.serve_from(source)
        return pool

    yield make
    for pool in made:
        source.tasks.put(None)
        pool.close()
        assert pool.join(Deadline.after(WAIT)) == []
    assert source.faults == []


def result_of(source: Source, work: Callable[[], object]) -> Promise[object]:
    outcome: Promise[object] = Promise()
    source.tasks.put(lambda: outcome.set_result(work()) and None)
    return outcome


def test_a_thread_that_waits_to_lead_counts_as_idle(
    source: Source, make_pool: Callable[[int], ThreadPool]
) -> None:
    pool = make_pool(4)
    idents = [result_of(source, threading.get_ident).wait(WAIT) for _ in range(20)]
    assert threading.get_ident() not in idents
    assert pool.wait_idle(Deadline.after(WAIT))
    assert not pool.busy()


def test_a_follower_is_ready_before_the_leader_runs_its_task(
    source: Source, make_pool: Callable[[int], ThreadPool]
) -> None:
    pool = make_pool(4)
    gates = [threading.Event() for _ in range(4)]
    held = [result_of(source, lambda gate=gate: gate.wait(WAIT)) for gate in gates]
    while source.tasks.qsize():  # four work, a fifth reads
        source.changed.acquire(timeout=WAIT)
    for gate in gates:
        gate.set()
    assert all(outcome.wait(WAIT) for outcome in held)
    assert pool.wait_idle(Deadline.after(WAIT))
    threads = pool.statistics()["threads"]
    for _ in range(20):
        assert result_of(source, lambda: "run").wait(WAIT) == "run"
    assert pool.wait_idle(Deadline.after(WAIT))
    assert pool.statistics()["threads"] == threads
    assert pool.statistics()["idle"] == threads - MAX_FOLLOWERS


def test_a_task_that_blocks_in_our_waits_hands_on_the_lead(
    source: Source, make_pool: Callable[[int], ThreadPool]
) -> None:
    make_pool(1)
    inner: Promise[int] = Promise()
    outer = result_of(source, lambda: inner.wait(WAIT))
    assert result_of(source, lambda: inner.set_result(3)).wait(WAIT) is True
    assert outer.wait(WAIT) == 3


def test_reading_continues_while_a_task_blocks_elsewhere(
    source: Source, make_pool: Callable[[int], ThreadPool]
) -> None:
    make_pool(2)
    gate = threading.Event()
    outer = result_of(source, lambda: gate.wait(WAIT))
    assert result_of(source, lambda: gate.set() or "set").wait(WAIT) == "set"
    assert outer.wait(WAIT) is True


def test_tasks_queue_while_all_threads_work_and_reading_continues(
    source: Source, make_pool: Callable[[int], ThreadPool]
) -> None:
    make_pool(1)
    gate = threading.Event()
    first = result_of(source, lambda: gate.wait(WAIT))
    others = [result_of(source, lambda i=i: i) for i in range(5)]
    while source.tasks.qsize():  # the lead goes on beside the one thread that may work, and queues them
        source.changed.acquire(timeout=WAIT)
    assert not any(o.done() for o in others)
    gate.set()
    assert first.wait(WAIT) is True
    assert [o.wait(WAIT) for o in others] == list(range(5))


def test_a_failing_task_does_not_end_the_lead(
    source: Source, make_pool: Callable[[int], ThreadPool], caplog: pytest.LogCaptureFixture
) -> None:
    make_pool(1)
    source.tasks.put(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert result_of(source, lambda: "on").wait(WAIT) == "on"
    assert "a task of led failed" in caplog.text


def test_many_tasks_from_many_threads_all_run(source: Source, make_pool: Callable[[int], ThreadPool]) -> None:
    make_pool(3)
    outcomes = [[result_of(source, lambda i=i: i) for i in range(200)] for _ in range(4)]
    for batch in outcomes:
        assert [o.wait(WAIT) for o in batch] == list(range(200))
