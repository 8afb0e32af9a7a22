"""Futures are completed, whatever happens to others: in which order replies, callbacks and waits come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.waiting import eventually
from tests.support.workers import WAIT, two_workers
from zmqgrad import rpc
from zmqgrad.rpc.futures import CompletionQueue, RpcFuture
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.future import Promise
from zmqgrad.runtime.service_thread import ServiceThread, TimerHandle
from zmqgrad.runtime.thread_pool import Task, ThreadPool


class Reading:
    """Reads replies, in the thread of the test, for a queue with threads of its own."""

    def __init__(self) -> None:
        self.pool = ThreadPool("test", 2)
        self.timer = ServiceThread("test")
        self.timer.start()
        self.queue = CompletionQueue(self.pool.submit, self.timer.call_later, self.decode)

    def decode(self, reply: Promise[Any]) -> Any:
        """A value, or what a function returns."""
        value: Any = reply.result()
        return value() if callable(value) else value

    def futures(self, number: int) -> list[tuple[RpcFuture[Any], Promise[Any]]]:
        """As for so many calls, with their replies."""
        made: list[tuple[RpcFuture[Any], Promise[Any]]] = []
        for _ in range(number):
            reply: Promise[Any] = Promise()
            future: RpcFuture[Any] = RpcFuture(reply, self.queue)
            future.batched = True
            reply.add_done_callback(future.on_reply)
            made.append((future, reply))
        return made

    def go_on(self) -> None:
        """What the reader does before it polls."""
        task = self.queue.drain()
        if task is not None:
            self.pool.submit(task)


@pytest.fixture
def reading() -> Iterator[Reading]:
    made = Reading()
    yield made
    made.pool.close()
    made.timer.close()
    assert made.pool.join(Deadline.after(WAIT)) + made.timer.join(Deadline.after(WAIT)) == []


def when_done(future: Any, callback: Callable[[], object]) -> None:
    """Add a callback as C++ does: of it, an :class:`RpcFuture` does not know."""
    torch._C.Future.add_done_callback(future, lambda _: callback())


def test_a_callback_may_wait_for_a_future_of_the_same_batch(reading: Reading) -> None:
    """Nothing else arrives, which would show that the thread which completes them is stuck."""
    (first, _), (second, _) = pair = reading.futures(2)
    finished = threading.Event()
    when_done(second, finished.set)
    outcome: list[bool] = []
    when_done(first, lambda: outcome.append(finished.wait(WAIT)))
    for n, (_, reply) in enumerate(pair):
        reply.set_result(n)
    reading.go_on()
    eventually(lambda: outcome, bool)
    assert outcome == [True]


def exit_here() -> None:
    """As a ``__setstate__`` of the program can."""
    raise KeyboardInterrupt


@pytest.mark.parametrize("how", ["set by the program", "decoding is interrupted"])
def test_a_future_that_cannot_be_completed_stops_no_other(reading: Reading, how: str) -> None:
    (first, one), (second, two) = reading.futures(2)
    finished = threading.Event()
    when_done(second, finished.set)
    if how == "set by the program":
        first.set_result("by hand")
    one.set_result(exit_here)
    two.set_result("value")
    reading.go_on()
    assert finished.wait(WAIT)
    assert second.wait() == "value"


def test_a_future_that_the_program_has_set_does_not_end_what_closes(reading: Reading) -> None:
    (first, one), (second, two) = reading.futures(2)
    first.set_result("by hand")
    one.set_result("reply")
    two.set_result("value")
    reading.queue.close()
    reading.queue.finish()
    assert (first.wait(), second.done()) == ("by hand", True)


@pytest.mark.parametrize("called_back", [False, True])
def test_a_reply_that_arrives_while_the_threads_end_completes_its_future(
    called_back: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """1. The reader finds the queue open. 2. The queue and the pool are closed. 3. The reader submits."""
    pool = ThreadPool("test", 1)

    def submit(task: Task) -> None:
        queue.close()
        pool.close()
        pool.submit(task)

    queue = CompletionQueue(submit, lambda seconds, job: TimerHandle(), Promise.result)
    reply: Promise[Any] = Promise()
    future: RpcFuture[Any] = RpcFuture(reply, queue)
    seen: list[Any] = []
    if called_back:
        future.add_done_callback(lambda done: seen.append(done.wait()))
    reply.add_done_callback(future.on_reply)
    reply.set_result("value")
    queue.finish()
    assert (future.done(), future.wait(), seen) == (True, "value", ["value"] * called_back)
    assert caplog.text == ""  # nobody is told that something failed
    assert pool.join(Deadline.after(WAIT)) == []


def test_a_reply_may_be_read_while_its_future_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a reader that then has nothing else to do, and no thread waits for the future."""
    with two_workers() as (worker, _):
        reader: Any = worker.mailbox._endpoint.reader  # type: ignore[attr-defined]
        add, drain = Promise.add_done_callback, reader.on_idle
        posted, polls = threading.Event(), threading.Event()

        def drain_and_tell() -> Task | None:
            task: Task | None = drain()
            if posted.is_set():
                polls.set()
            return task

        def add_late(reply: Promise[Any], callback: Callable[[Any], None]) -> None:
            if callback.__name__ == "on_reply":
                eventually(reply.done, bool)
                reader.post(posted.set)
                assert polls.wait(WAIT)
            add(reply, callback)

        reader.on_idle = drain_and_tell
        monkeypatch.setattr(Promise, "add_done_callback", add_late)
        future = rpc.rpc_async(1, abs, args=(-5,))
        finished = threading.Event()
        when_done(future, finished.set)
        assert finished.wait(WAIT)


gate = threading.Event()


def wait_there() -> int:
    """Until the test lets go."""
    gate.wait(WAIT)
    return 7


def test_callbacks_run_after_a_wait_that_was_interrupted_at_its_beginning() -> None:
    with two_workers() as (worker, _):
        gate.clear()
        future = rpc.rpc_async(1, wait_there)
        interrupt_once(worker)
        with pytest.raises(KeyboardInterrupt):
            future.wait()
        finished = threading.Event()
        future.add_done_callback(lambda _: finished.set())
        gate.set()
        assert finished.wait(WAIT)


def interrupt_once(worker: Worker) -> None:
    """Press Ctrl-C in the next thread that asks whether waits are recorded."""

    def interrupt() -> None:
        worker.replies.queue.tracer = lambda: None
        raise KeyboardInterrupt

    worker.replies.queue.tracer = interrupt
