"""The service thread: each job at its time, in order, whatever jobs do; and handlers of descriptors."""

from __future__ import annotations

import gc
import logging
import math
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import eventually
from zmqgrad.runtime.clock import Deadline, ManualClock
from zmqgrad.runtime.polling import READ, WRITE
from zmqgrad.runtime.service_thread import MIN_SWEEP_JOBS, Alarm, CoalescedJob, ServiceThread, TimerHandle


@pytest.fixture
def keeper(clock: ManualClock) -> Iterator[ServiceThread]:
    keeper = ServiceThread("t", clock)
    keeper.start()
    yield keeper
    keeper.close()
    assert keeper.join(Deadline.after(10)) == []


def settle(keeper: ServiceThread) -> None:
    """Wait until all that is due has run: a post is taken in before what is due, so it takes two."""
    for _ in range(2):
        reached = threading.Event()
        keeper.call_soon(reached.set)
        assert reached.wait(10)


def test_jobs_run_when_their_time_has_come_and_not_before(keeper: ServiceThread, clock: ManualClock) -> None:
    ran: list[str] = []
    keeper.call_later(2.0, lambda: ran.append("two"))
    keeper.call_later(1.0, lambda: ran.append("one"))
    settle(keeper)
    assert ran == []
    clock.advance(1.0)
    settle(keeper)
    assert ran == ["one"]
    clock.advance(1.0)
    settle(keeper)
    assert ran == ["one", "two"]


@given(st.lists(st.integers(0, 5), max_size=12))
def test_due_jobs_run_by_time_then_in_order_of_scheduling(times: list[int]) -> None:
    clock = ManualClock()
    keeper = ServiceThread("t", clock)
    keeper.start()
    try:
        ran: list[tuple[int, int]] = []
        busy, go = threading.Event(), threading.Event()
        keeper.call_soon(lambda: (busy.set(), go.wait(10)))  # all below is asked for while it is busy
        assert busy.wait(10)
        for i, t in enumerate(times):
            keeper.call_later(t, lambda t=t, i=i: ran.append((t, i)))  # type: ignore[misc]
        clock.advance(5)
        go.set()
        settle(keeper)
        assert ran == sorted((t, i) for i, t in enumerate(times))
    finally:
        keeper.close()
        assert keeper.join(Deadline.after(10)) == []


def test_a_coalesced_job_runs_once_for_all_that_schedule_it(
    keeper: ServiceThread, clock: ManualClock
) -> None:
    ran: list[str] = []

    def run() -> None:
        ran.append("it")
        if len(ran) == 2:
            job.schedule(1.0)  # while it runs, for what has come since

    job = CoalescedJob(run, keeper.call_later)
    for expected in (1, 2, 3):
        if expected < 3:
            job.schedule(1.0)
            job.schedule(1.0)
        clock.advance(1.0)
        settle(keeper)
        assert len(ran) == expected


def test_a_cancelled_job_does_not_run(keeper: ServiceThread, clock: ManualClock) -> None:
    ran: list[str] = []
    handle = keeper.call_later(1.0, lambda: ran.append("cancelled"))
    kept = keeper.call_later(1.0, lambda: ran.append("kept"))
    handle.cancel()
    clock.advance(1.0)
    settle(keeper)
    kept.cancel()  # harmless once it ran
    assert ran == ["kept"]


def test_a_job_in_infinite_time_never_runs(keeper: ServiceThread, clock: ManualClock) -> None:
    ran: list[str] = []
    keeper.call_later(math.inf, lambda: ran.append("never"))
    clock.advance(1e300)
    settle(keeper)
    assert ran == []


def test_nan_is_no_time(keeper: ServiceThread) -> None:
    with pytest.raises(ValueError, match="nan"):
        keeper.call_later(math.nan, lambda: None)


def test_a_job_of_the_past_runs_at_once(keeper: ServiceThread) -> None:
    ran = threading.Event()
    keeper.call_later(-5.0, ran.set)
    assert ran.wait(10)


@pytest.mark.parametrize("error", [ValueError("bad job"), SystemExit("bad job")])
def test_a_failing_job_does_not_affect_others(
    keeper: ServiceThread, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def bad() -> None:
        raise error

    with caplog.at_level(logging.ERROR):
        keeper.call_soon(bad)
        settle(keeper)
    assert "bad job" in caplog.text


def test_a_job_may_schedule_itself_without_starving_others(keeper: ServiceThread, clock: ManualClock) -> None:
    """One that posts itself for ever does not keep what is due from running."""
    stop, timed = threading.Event(), threading.Event()

    def again() -> None:
        if not stop.is_set():
            keeper.call_soon(again)
            keeper.call_later(0.0, lambda: None)

    keeper.call_soon(again)
    keeper.call_later(1.0, timed.set)
    clock.advance(1.0)
    try:
        assert timed.wait(10)
    finally:
        stop.set()


class Node:
    """Lives in a cycle, so that the garbage collector is what finds it."""

    def __init__(self) -> None:
        self.me = self


def test_a_finalizer_may_post_wherever_it_runs(keeper: ServiceThread) -> None:
    """See Note [Finalizers only enqueue]: also while this very thread is inside the inbox's own ``put``."""
    freed: SimpleQueue[int] = SimpleQueue()
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for i in range(300):
            node = Node()
            weakref.finalize(node, keeper.call_soon, lambda i=i: freed.put(i)).atexit = False  # type: ignore[misc]
            del node
            keeper.call_soon(lambda: None)
    finally:
        gc.set_threshold(*threshold)
    # While another thread collects, and runs finalizers, gc.collect() returns at once.
    eventually(lambda: gc.collect() or freed.qsize() == 300)
    assert sorted(freed.get(timeout=10) for _ in range(300)) == list(range(300))


def test_a_job_that_ran_or_was_cancelled_is_not_kept_alive(keeper: ServiceThread) -> None:
    node = Node()
    node.me = None  # type: ignore[assignment]
    watched = weakref.ref(node)
    done = keeper.call_later(0.0, lambda node=node: None)  # type: ignore[misc]
    cancelled = keeper.call_later(5.0, lambda node=node: None)  # type: ignore[misc]
    cancelled.cancel()
    del node
    settle(keeper)
    assert watched() is None
    assert done.job is None


def handles_alive() -> int:
    return sum(type(each) is TimerHandle for each in gc.get_objects())


def test_cancelled_jobs_do_not_pile_up(keeper: ServiceThread, clock: ManualClock) -> None:
    """Nearly every call's time limit is cancelled long before it is due."""
    ran = threading.Event()
    keeper.call_later(60.0, ran.set)
    before = handles_alive()
    for _ in range(20 * MIN_SWEEP_JOBS):
        keeper.call_later(30.0, lambda: None).cancel()
    settle(keeper)
    assert handles_alive() - before <= 2 * MIN_SWEEP_JOBS
    clock.advance(60.0)
    assert ran.wait(10)


def test_real_time_passes_too() -> None:
    keeper = ServiceThread("real")
    keeper.start()
    ran: SimpleQueue[str] = SimpleQueue()
    keeper.call_later(0.02, lambda: ran.put("later"))
    keeper.call_later(0.01, lambda: ran.put("capped"))
    keeper.call_soon(lambda: ran.put("now"))
    assert [ran.get(timeout=10) for _ in range(3)] == ["now", "capped", "later"]
    keeper.close()
    keeper.close()
    assert keeper.join(Deadline.after(10)) == []


def test_close_drops_waiting_jobs(clock: ManualClock) -> None:
    keeper = ServiceThread("t", clock)
    ran: list[str] = []
    keeper.call_soon(lambda: ran.append("posted before the start"))
    keeper.start()
    settle(keeper)
    keeper.call_later(1.0, lambda: ran.append("timed"))
    keeper.close()
    assert keeper.join(Deadline.after(10)) == []
    clock.advance(5.0)
    keeper.call_soon(lambda: ran.append("after the end"))
    assert ran == ["posted before the start"]


def test_join_names_a_thread_that_does_not_end(clock: ManualClock) -> None:
    keeper = ServiceThread("slow", clock)
    keeper.start()
    busy, go = threading.Event(), threading.Event()
    keeper.call_soon(lambda: (busy.set(), go.wait(10)))
    assert busy.wait(10)
    keeper.close()
    assert keeper.join(Deadline.after(0)) == ["slow-service"]
    go.set()
    assert keeper.join(Deadline.after(10)) == []


def test_join_of_one_that_never_started(clock: ManualClock) -> None:
    keeper = ServiceThread("idle", clock)
    keeper.close()
    assert keeper.join(Deadline.after(10)) == []


def test_close_from_a_job(clock: ManualClock) -> None:
    keeper = ServiceThread("t", clock)
    keeper.start()
    keeper.call_soon(lambda: (keeper.close(), keeper.join(Deadline.after(10))))
    assert keeper.join(Deadline.after(10)) == []


def test_a_failing_job_ends_nothing_though_its_failure_cannot_be_logged(
    keeper: ServiceThread, capfd: pytest.CaptureFixture[str]
) -> None:
    class Refusing(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            raise ValueError("no records, please")

    logger, refusing = logging.getLogger("zmqgrad.runtime.service_thread"), Refusing()
    logger.addFilter(refusing)
    try:
        keeper.call_soon(lambda: {}["no such key"])
        settle(keeper)
    finally:
        logger.removeFilter(refusing)
    assert "no such key" in capfd.readouterr().err


# ---- descriptors -----------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    one.setblocking(False)
    other.setblocking(False)
    with one, other:
        yield one, other


def test_a_handler_is_called_when_its_descriptor_is_readable(
    keeper: ServiceThread, pair: tuple[socket.socket, socket.socket]
) -> None:
    one, other = pair
    got: SimpleQueue[bytes] = SimpleQueue()
    keeper.watch(one.fileno(), READ, lambda events: got.put(one.recv(100)))
    for n in range(3):
        other.send(b"%d" % n)
        assert got.get(timeout=10) == b"%d" % n
    other.close()
    assert got.get(timeout=10) == b"", "the end is reported, too"
    keeper.unwatch(one.fileno())


def test_the_mask_of_a_descriptor_can_be_changed(
    keeper: ServiceThread, pair: tuple[socket.socket, socket.socket]
) -> None:
    one, other = pair
    seen: SimpleQueue[int] = SimpleQueue()

    def handler(events: int) -> None:
        keeper.rewatch(one.fileno(), 0)
        seen.put(events)

    keeper.watch(one.fileno(), READ, handler)
    keeper.rewatch(one.fileno(), READ | WRITE)
    assert seen.get(timeout=10) & WRITE
    other.send(b"x")
    settle(keeper)
    assert seen.empty()
    keeper.watch(one.fileno(), READ, handler)  # again, which replaces mask and handler
    assert seen.get(timeout=10) & READ
    keeper.unwatch(one.fileno())


def test_an_unwatched_descriptor_is_not_handled(
    keeper: ServiceThread, pair: tuple[socket.socket, socket.socket]
) -> None:
    """Even if it was ready before: its number may belong to another file by now."""
    one, other = pair
    busy, go, seen = threading.Event(), threading.Event(), list[int]()
    keeper.watch(one.fileno(), READ, seen.append)
    keeper.call_soon(lambda: (busy.set(), go.wait(10)))
    assert busy.wait(10)
    other.send(b"x")
    keeper.unwatch(one.fileno())
    keeper.unwatch(one.fileno())
    keeper.rewatch(one.fileno(), READ)
    go.set()
    settle(keeper)
    assert seen == []


def test_a_handler_that_fails_affects_no_other(
    keeper: ServiceThread, pair: tuple[socket.socket, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = pair
    got: SimpleQueue[bytes] = SimpleQueue()

    def fail(events: int) -> None:
        one.recv(100)
        raise SystemExit("bad handler")

    keeper.watch(one.fileno(), READ, fail)
    keeper.watch(other.fileno(), READ, lambda events: got.put(other.recv(100)))
    other.send(b"x")
    one.send(b"y")
    assert got.get(timeout=10) == b"y"
    settle(keeper)
    assert "bad handler" in caplog.text
    for each in pair:
        keeper.unwatch(each.fileno())


def test_jobs_run_while_descriptors_are_always_ready(
    keeper: ServiceThread, clock: ManualClock, pair: tuple[socket.socket, socket.socket]
) -> None:
    one, _ = pair
    ran = threading.Event()
    keeper.watch(one.fileno(), WRITE, lambda events: None)
    keeper.call_later(1.0, ran.set)
    clock.advance(1.0)
    assert ran.wait(10)
    keeper.unwatch(one.fileno())


def test_after_the_end_nothing_is_watched(
    clock: ManualClock, pair: tuple[socket.socket, socket.socket]
) -> None:
    keeper = ServiceThread("t", clock)
    keeper.start()
    keeper.watch(pair[0].fileno(), READ, lambda events: None)
    keeper.close()
    assert keeper.join(Deadline.after(10)) == []
    keeper.watch(pair[1].fileno(), READ, lambda events: None)
    for each in pair:
        keeper.rewatch(each.fileno(), WRITE)
        keeper.unwatch(each.fileno())


def test_a_thread_can_tell_that_it_is_the_service_thread(keeper: ServiceThread) -> None:
    seen: SimpleQueue[bool] = SimpleQueue()
    keeper.call_soon(lambda: seen.put(keeper.is_current()))
    assert seen.get(timeout=10)
    assert not keeper.is_current()


def test_its_descriptors_are_closed() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        keeper = ServiceThread("t")
        keeper.start()
        keeper.close()
        assert keeper.join(Deadline.after(10)) == []
        del keeper
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_its_descriptors_are_closed_if_it_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    keeper = ServiceThread("t")
    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="can't start"):
        keeper.start()
    assert len(os.listdir("/proc/self/fd")) == before
    keeper.close()
    assert keeper.join(Deadline.after(10)) == []


def test_an_earlier_job_of_real_time_is_not_late() -> None:
    keeper = ServiceThread("real")
    keeper.start()
    ran = threading.Event()
    keeper.call_later(3600.0, lambda: None)
    settle(keeper)
    keeper.call_later(0.01, ran.set)
    assert ran.wait(10)
    keeper.close()
    assert keeper.join(Deadline.after(10)) == []


def test_an_alarm_runs_at_the_earliest_time_only(keeper: ServiceThread, clock: ManualClock) -> None:
    ran: list[float] = []
    alarm = Alarm(lambda: ran.append(clock.now()), keeper, tolerance=0.5)
    start = clock.now()
    for due in (5.0, 2.0, 3.0, 1.75):
        alarm.set(start + due)
    for _ in range(6):
        clock.advance(1.0)
        settle(keeper)
    assert ran == [start + 2.0]
    assert alarm.at == math.inf


def test_timers_of_an_alarm_do_not_multiply(keeper: ServiceThread, clock: ManualClock) -> None:
    ran: list[float] = []

    def job() -> None:
        ran.append(clock.now())
        alarm.set(clock.now() + 100.0)

    alarm = Alarm(job, keeper)
    for _ in range(10):
        alarm.set(clock.now() + 1.0)
        clock.advance(1.0)
        settle(keeper)
    assert len(ran) == 10
    for _ in range(3):
        clock.advance(100.0)
        settle(keeper)
    assert len(ran) == 13


@pytest.mark.parametrize("at", range(0, 60, 2))
def test_an_alarm_may_be_set_while_it_is_being_set(
    keeper: ServiceThread, clock: ManualClock, at: int
) -> None:
    """As a finalizer does that the collector runs there."""
    start = clock.now()
    alarm = Alarm(lambda: None, keeper)
    instructions = 0

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        nonlocal instructions
        frame.f_trace_opcodes = True
        if event == "opcode":
            instructions += 1
            if instructions == at:
                alarm.set(start + 1.0)
        return trace

    def set_traced() -> None:
        sys.settrace(trace)
        alarm.set(start + 2.0)
        sys.settrace(None)
        alarm.set(start + 1.0)

    thread = threading.Thread(target=set_traced, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    settle(keeper)
    assert alarm.at == start + 1.0


def test_an_alarm_that_is_set_by_many_threads_runs_in_time(keeper: ServiceThread, clock: ManualClock) -> None:
    start, ran = clock.now(), threading.Event()
    alarm = Alarm(ran.set, keeper)
    begin = threading.Barrier(4)

    def set_times(first: int) -> None:
        begin.wait(10)
        for due in range(100 + first, 0, -4):
            alarm.set(start + due)

    threads = [threading.Thread(target=set_times, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    settle(keeper)
    assert alarm.at == start + 1.0
    clock.advance(1.0)
    assert ran.wait(10)
