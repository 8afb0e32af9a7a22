"""The thread pool: never more than it should be, never stuck."""

from __future__ import annotations

import gc
import logging
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from tests.support.waiting import eventually
from zmqgrad.errors import ClosedError
from zmqgrad.runtime.blocking import blocking_section
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.future import Promise
from zmqgrad.runtime.thread_pool import ThreadPool

Make = Callable[..., ThreadPool]


@pytest.fixture
def make() -> Iterator[Make]:
    pools: list[ThreadPool] = []

    def make(size: int) -> ThreadPool:
        pools.append(ThreadPool("p", size))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
        assert pool.join(Deadline.after(10)) == []
        assert pool.statistics()["threads"] == 0


def run(pool: ThreadPool, function: Callable[[], object]) -> Promise[object]:
    """Submit ``function``; its result, or error, as an outcome."""
    outcome: Promise[object] = Promise()

    def task() -> None:
        try:
            outcome.set_result(function())
        except Exception as e:
            outcome.set_exception(e)

    pool.submit(task)
    return outcome


def settled(pool: ThreadPool, condition: Callable[[dict[str, int]], bool]) -> dict[str, int]:
    """Wait until the statistics are such (a task's thread is idle only just after its outcome is set)."""
    return eventually(pool.statistics, condition)


def test_tasks_run_and_threads_are_kept(make: Make) -> None:
    pool = make(2)
    assert pool.statistics()["threads"] == 0
    for i in range(20):
        assert run(pool, lambda i=i: i).wait(10) == i  # type: ignore[misc]
        settled(pool, lambda s: s["idle"] == s["threads"])
    assert pool.statistics() == {"threads": 1, "idle": 1, "blocked": 0, "queued": 0, "finished": 20}
    assert not pool.busy()


def test_threads_are_named(make: Make) -> None:
    assert run(make(1), lambda: threading.current_thread().name).wait(10) == "p-engine-1"


def test_a_fork_that_returns_from_its_task_ends(make: Make) -> None:
    """It would wait for the next task for ever, and whoever waits for its end with it."""

    def fork() -> int | None:
        child = os.fork()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else None

    assert run(make(1), fork).wait(10) == 1


def test_no_more_threads_work_than_its_size(make: Make) -> None:
    pool = make(3)
    three = threading.Barrier(4)
    lock = threading.Lock()
    now = most = 0

    def task(first: bool) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        if first:
            three.wait(10)
        with lock:
            now -= 1

    outcomes = [run(pool, lambda i=i: task(i < 3)) for i in range(30)]  # type: ignore[misc]
    assert settled(pool, lambda s: s["threads"] == 3)["queued"] == 27
    three.wait(10)
    for outcome in outcomes:
        outcome.wait(10)
    assert most == 3


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("depth", [1, 2, 7, 40])
def test_nested_calls_never_starve(make: Make, size: int, depth: int) -> None:
    """pytorch#26362: with one thread each, a call that calls back hangs."""
    pool = make(size)

    def nested(level: int) -> int:
        if level == 0:
            return 0
        result = run(pool, lambda: nested(level - 1)).wait(20)
        assert isinstance(result, int)
        return result + 1

    assert run(pool, lambda: nested(depth)).wait(20) == depth
    settled(pool, lambda s: s["blocked"] == 0 and s["threads"] == s["idle"] <= size)


@pytest.mark.parametrize("size", [1, 2])
def test_a_tree_of_nested_calls_from_many_threads(make: Make, size: int) -> None:
    """Each call makes two and waits for both: the sum over the tree says that each ran once."""
    pool = make(size)

    def tree(level: int) -> int:
        if level == 0:
            return 1
        below = [run(pool, lambda: tree(level - 1)) for _ in range(2)]
        return 1 + sum(o.wait(20) for o in below)  # type: ignore[misc]

    results: list[object] = []
    threads = [
        threading.Thread(target=lambda: results.append(run(pool, lambda: tree(4)).wait(20))) for _ in range(3)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert results == [31] * 3
    assert pool.statistics()["queued"] == 0


def test_a_task_that_waits_often_is_replaced_once(make: Make) -> None:
    """With much queued, each of its waits added another thread."""
    pool = make(1)
    halt = threading.Event()

    def waits_often() -> None:
        for _ in range(20):
            with blocking_section():
                pass

    first = run(pool, lambda: (settled(pool, lambda s: s["queued"] == 9), waits_often()))
    others = [run(pool, lambda: (halt.wait(10), threading.current_thread().name)[1]) for _ in range(9)]
    first.wait(10)
    assert settled(pool, lambda s: s["threads"] == 1)["queued"] == 8
    halt.set()
    assert {outcome.wait(10) for outcome in others} == {"p-engine-2"}  # no third was started


def test_excess_threads_retire_though_tasks_wait(make: Make) -> None:
    """Ten tasks wait, and go on together: ten work. As they finish, the pool goes back to its size."""
    pool = make(1)
    gate, halt = threading.Event(), threading.Event()

    def waits() -> None:
        with blocking_section():
            gate.wait(10)

    first = [run(pool, waits) for _ in range(10)]
    settled(pool, lambda s: s["blocked"] == 10)
    then = [run(pool, lambda: halt.wait(10)) for _ in range(30)]
    settled(pool, lambda s: s["threads"] == 11 and s["queued"] == 29)
    gate.set()
    for outcome in first:
        outcome.wait(10)
    settled(pool, lambda s: s["threads"] == 1 and s["queued"] == 29)
    halt.set()
    for outcome in then:
        outcome.wait(10)


def test_no_task_is_left_to_a_thread_that_retires(make: Make) -> None:
    """Threads retire while others submit: a task counted on one that had just decided to go (it was lost)."""
    rng = random.Random(1)
    pool = make(1)
    for _ in range(300):
        gates = [threading.Event() for _ in range(3)]

        def waits(gate: threading.Event) -> None:
            with blocking_section():
                gate.wait(10)

        first = [run(pool, lambda g=g: waits(g)) for g in gates]  # type: ignore[misc]
        rng.shuffle(gates)
        for gate in gates:
            gate.set()
        last = [run(pool, lambda: None) for _ in range(3)]
        for outcome in first + last:
            outcome.wait(10)


def test_a_wait_inside_a_wait_counts_once(make: Make) -> None:
    pool = make(1)
    entered, go = threading.Event(), threading.Event()

    def task() -> None:
        with blocking_section(), blocking_section():
            entered.set()
            go.wait(10)
        assert pool.statistics()["blocked"] == 0
        with blocking_section():
            assert pool.statistics()["blocked"] == 1

    outcome = run(pool, task)
    assert entered.wait(10)
    assert pool.statistics()["blocked"] == 1
    go.set()
    outcome.wait(10)


def test_a_wait_that_fails_is_over(make: Make) -> None:
    pool = make(1)

    def task() -> None:
        with pytest.raises(TimeoutError), blocking_section():
            raise TimeoutError

    run(pool, task).wait(10)
    assert pool.statistics()["blocked"] == 0


def test_blocking_section_outside_of_a_pool() -> None:
    with blocking_section():
        pass


def test_a_task_that_fails_costs_no_thread(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    pool = make(1)

    def bad() -> None:
        raise SystemExit("bad task")

    with caplog.at_level(logging.ERROR):
        pool.submit(bad)
        assert run(pool, lambda: 5).wait(10) == 5
    assert "bad task" in caplog.text
    settled(pool, lambda s: s["finished"] == 2)
    assert pool.statistics()["threads"] == 1


def test_an_idle_thread_lets_its_last_task_go(make: Make) -> None:
    class Tensor:
        pass

    pool = make(1)
    tensor = Tensor()
    watched = weakref.ref(tensor)
    done = threading.Event()
    pool.submit(lambda tensor=tensor: done.set())  # type: ignore[misc]
    del tensor
    assert done.wait(10)
    settled(pool, lambda s: s["idle"] == 1)
    gc.collect()
    assert watched() is None


# ---- the end ---------------------------------------------------------------------------------------------


def test_close_drops_queued_tasks_and_lets_running_ones_finish() -> None:
    pool = ThreadPool("p", 1)
    entered, go = threading.Event(), threading.Event()
    ran: list[str] = []

    def running() -> None:
        entered.set()
        go.wait(10)
        ran.append("running")

    pool.submit(running)
    assert entered.wait(10)
    pool.submit(lambda: ran.append("queued"))
    pool.close()
    pool.close()
    assert pool.join(Deadline.after(0)) == ["p-engine-1"]
    with pytest.raises(ClosedError, match="of p is closed"):
        pool.submit(lambda: None)
    go.set()
    assert pool.join(Deadline.after(10)) == []
    assert ran == ["running"]
    assert pool.statistics() == {"threads": 0, "idle": 0, "blocked": 0, "queued": 0, "finished": 1}


def test_close_while_tasks_are_blocked(make: Make) -> None:
    pool = make(1)
    outcome: Promise[int] = Promise()
    waiting = [run(pool, lambda: outcome.wait(20)) for _ in range(5)]
    settled(pool, lambda s: s["blocked"] == 5)
    pool.close()
    assert len(pool.join(Deadline.after(0))) == 5
    outcome.set_result(3)
    assert [w.wait(10) for w in waiting] == [3] * 5
    assert pool.join(Deadline.after(10)) == []


def test_close_from_a_task(make: Make) -> None:
    pool = make(2)
    assert run(pool, lambda: (pool.close(), pool.join(Deadline.after(10)))[1]).wait(10) == []
    assert pool.join(Deadline.after(10)) == []


def test_after_join_no_thread_is_alive() -> None:
    """Also those that had retired before and were at their last instruction."""
    for _ in range(50):
        pool = ThreadPool("p", 1)
        gate = threading.Event()

        def waits(gate: threading.Event = gate) -> None:
            with blocking_section():
                gate.wait(10)

        outcomes = [run(pool, waits) for _ in range(4)]
        gate.set()
        for outcome in outcomes:
            outcome.wait(10)
        pool.close()
        assert pool.join(Deadline.after(10)) == []
        assert not [t for t in threading.enumerate() if t.name.startswith("p-engine")]


@pytest.mark.open_outcomes  # those that close drops
def test_close_races_with_submit(make: Make) -> None:
    for _ in range(30):
        pool = make(2)
        start = threading.Barrier(3)
        refused: list[int] = []

        def submit(p: ThreadPool = pool, b: threading.Barrier = start, r: list[int] = refused) -> None:
            b.wait(10)
            for _ in range(20):
                try:
                    run(p, lambda: None)
                except ClosedError:
                    r.append(1)

        threads = [threading.Thread(target=submit) for _ in range(2)]
        for t in threads:
            t.start()
        start.wait(10)
        pool.close()
        for t in threads:
            t.join(10)
        assert pool.join(Deadline.after(10)) == []
        assert pool.statistics()["finished"] + len(refused) <= 40


def test_a_system_out_of_threads(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the pool has a thread, tasks wait for it; if it has none, submit() raises."""
    pool = make(4)
    entered, go = threading.Event(), threading.Event()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        pool.submit(lambda: None)
    assert pool.statistics()["threads"] == pool.statistics()["queued"] == 0
    monkeypatch.setattr(threading.Thread, "start", start)
    first = run(pool, lambda: (entered.set(), go.wait(10)))
    assert entered.wait(10)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with caplog.at_level(logging.ERROR):
        second = run(pool, lambda: "ran")
    assert "cannot start a thread" in caplog.text
    assert pool.statistics()["queued"] == 1
    go.set()
    assert second.wait(10) == "ran"
    first.wait(10)


def test_a_thread_whose_start_was_interrupted_ends(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knew of it, so it waited for tasks for ever, after shutdown, too."""
    pool, started = make(1), []
    start = threading.Thread.start

    def interrupted_start(thread: threading.Thread) -> None:
        started.append(thread)
        start(thread)
        if len(started) == 1:  # Ctrl-C comes as this thread waits until that one runs
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted_start)
    with pytest.raises(KeyboardInterrupt):
        pool.submit(lambda: None)
    started[0].join(10)
    assert not started[0].is_alive()
    assert run(pool, lambda: 7).wait(10) == 7


def test_a_pool_of_no_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="not 0"):
        ThreadPool("p", 0)


def test_repr_shows_the_state(make: Make) -> None:
    assert repr(make(2)) == "<ThreadPool p: 0 threads, 0 idle, 0 blocked, 0 queued, 0 finished>"
