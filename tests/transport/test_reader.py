"""The reader handles everything that it was told to read, in order, and stops for nothing but its end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest
import zmq

from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.thread_pool import Task, ThreadPool
from zmqgrad.transport.reader import Reader

WAIT = 20.0


class Reading:
    """A reader of a ROUTER, in a pool, and what it has handled."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind("inproc://reader")
        self.handled: SimpleQueue[object] = SimpleQueue()
        self.reader = Reader("reading", self.close_sockets)
        self.reader.read_router(self.router, self.receive, self.take_message)
        self.pool = ThreadPool("reading", 2)
        self.reader.start(self.pool.serve_from)

    def receive(self) -> Task | None:
        return self.take_message()()

    def take_message(self) -> Callable[[], Task | None]:
        message = self.router.recv_multipart()[1]

        def handle() -> None:
            self.on_message(message)
            self.handled.put(message)

        return handle

    def on_message(self, message: bytes) -> None:
        """A test may replace it."""

    def close_sockets(self) -> None:
        self.handled.put("closed")
        self.router.close(linger=0)

    def take(self, count: int) -> list[object]:
        return [self.handled.get(timeout=WAIT) for _ in range(count)]

    def close(self) -> None:
        self.reader.close()
        self.reader.close()
        self.pool.close()
        assert self.reader.join(Deadline.after(WAIT)) == []
        assert self.pool.join(Deadline.after(WAIT)) == []
        self.context.term()


@pytest.fixture
def reading() -> Iterator[Reading]:
    made = Reading()
    yield made
    made.close()
    assert made.handled.get(timeout=WAIT) == "closed"
    assert made.handled.empty()


def test_the_router_is_found_empty_though_a_message_arrives_for_each_one_that_is_handled(
    reading: Reading,
) -> None:
    """What waits for it is called behind all that had arrived, and not only when nobody sends any more."""
    before, answered, stopped = 100, 0, threading.Event()
    with reading.context.socket(zmq.DEALER) as sender:
        sender.linger = 0
        sender.connect("inproc://reader")

        def answer(message: bytes) -> None:
            nonlocal answered
            answered += 1
            if answered < 100 * before and not stopped.is_set():
                sender.send(b"another")

        def flood() -> None:
            for _ in range(before):
                sender.send(b"one")
            reading.on_message = answer  # type: ignore[method-assign]
            reading.reader.call_when_empty(lambda: reading.handled.put(answered))

        def stop() -> None:
            stopped.set()
            sender.send(b"last")

        reading.reader.post(flood)
        while not isinstance(handled := reading.handled.get(timeout=WAIT), int):
            pass
        assert before <= handled < 2 * before
        reading.reader.post(stop)
        while reading.handled.get(timeout=WAIT) != b"last":
            pass


def test_all_tasks_of_one_event_run(reading: Reading) -> None:
    """Nothing else happens that could bring the reader to look again."""
    reading.reader.post(
        lambda: reading.reader.tasks.extend(lambda n=n: reading.handled.put(n) for n in range(3))  # type: ignore[misc]
    )
    assert sorted(reading.take(3), key=str) == [0, 1, 2]


def test_the_router_is_found_empty_though_a_task_comes_first(reading: Reading) -> None:
    """The thread that asked for it goes off to run the task, and the ROUTER reports nothing."""
    empty = threading.Event()

    def ask() -> None:
        reading.reader.call_when_empty(empty.set)
        reading.reader.tasks.append(lambda: reading.handled.put(empty.wait(WAIT)))

    reading.reader.post(ask)
    assert reading.take(1) == [True]


def test_what_is_at_the_router_comes_before_it_is_empty(reading: Reading) -> None:
    stopped, goes_on = threading.Event(), threading.Event()

    def stop() -> None:
        stopped.set()
        assert goes_on.wait(WAIT)
        reading.reader.call_when_empty(lambda: reading.handled.put("empty"))

    reading.reader.post(stop)
    assert stopped.wait(WAIT)
    with reading.context.socket(zmq.DEALER) as sender:
        sender.connect("inproc://reader")
        for n in range(200):
            sender.send(b"%d" % n)
        goes_on.set()
        assert reading.take(201) == [*(b"%d" % n for n in range(200)), "empty"]


def test_what_fails_is_logged_and_the_rest_is_done_at_its_time(
    reading: Reading, caplog: pytest.LogCaptureFixture
) -> None:
    reader = reading.reader

    def begin() -> None:
        reader.call_later(0.02, lambda: reading.handled.put("second"))
        reader.call_later(0.01, lambda: reading.handled.put("first"))
        raise LookupError("a fault of the work")

    reader.post(begin)
    assert reading.take(2) == ["first", "second"]
    assert caplog.text.count("LookupError: a fault of the work") == 1


def test_malformed_messages_are_counted_and_logged_once_for_each_sender(
    reading: Reading, caplog: pytest.LogCaptureFixture
) -> None:
    for sender in (1, 1, 2):
        reading.reader.count_malformed(sender, f"message of {sender}")
    assert reading.reader.malformed == 3
    assert caplog.text.count("dropped a malformed message of 1") == 1
    assert caplog.text.count("dropped a malformed message of 2") == 1


def test_it_ends_before_it_has_begun() -> None:
    closed: SimpleQueue[bool] = SimpleQueue()
    reader = Reader("idle", lambda: closed.put(True))
    reader.close()
    reader.close()
    assert reader.join(Deadline.after(0)) == []
    assert closed.get(timeout=0)
    assert closed.empty()


def test_no_thread_is_left_when_it_was_joined() -> None:
    closed, gate = threading.Event(), threading.Event()

    class Late(Reader):
        """Returns late."""

        def shut(self) -> None:
            super().shut()
            closed.set()
            assert gate.wait(10)

    reader = Late("late-reader", lambda: None)
    reader.start()
    reader.close()
    assert closed.wait(10)
    assert reader.join(Deadline.after(0.0)) == ["late-reader"]
    gate.set()
    assert reader.join(Deadline.after(10.0)) == []
    assert "late-reader" not in [thread.name for thread in threading.enumerate()]


def test_a_task_can_wait_for_what_was_read_after_it(reading: Reading) -> None:
    """As a request to fetch a value waits for the reply that makes it, which was in the same batch."""
    done = threading.Event()
    batched: list[Task] = []
    readable, writable = os.pipe()

    def read_a_batch() -> None:
        os.read(readable, 1)
        reading.reader.tasks.append(lambda: reading.handled.put(done.wait(WAIT)))
        batched.append(done.set)

    reading.reader.on_idle = lambda: batched.pop() if batched else None
    reading.reader.watch(readable, read_a_batch)
    os.write(writable, b"1")
    assert reading.take(1) == [True]
    reading.reader.unwatch(readable)
    os.close(readable)
    os.close(writable)


def test_what_is_due_is_done_while_the_thread_that_has_read_it_runs_a_task(reading: Reading) -> None:
    """The next thread that reads does it at its time, and not when something arrives at last."""
    idle, done = threading.Event(), threading.Event()

    def begin() -> None:
        reading.reader.call_later(0.05, done.set)
        reading.reader.tasks.append(lambda: reading.handled.put(done.wait(WAIT)))

    reading.reader.on_idle = idle.set  # it waits for events next
    reading.reader.post(idle.clear)
    reading.reader.post(lambda: None)
    assert idle.wait(WAIT)
    reading.reader.post(begin)
    assert reading.take(1) == [True]


def test_a_reader_whose_thread_cannot_start_ends_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ended: list[str] = []
    pool = ThreadPool("reading", 1)
    for serve_from in (None, pool.serve_from):
        reader = Reader("reading", lambda: ended.append("ended"))
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            with pytest.raises(RuntimeError, match="can't start"):
                reader.start(serve_from)
        reader.close()
        assert reader.join(Deadline.after(WAIT)) == []
    assert ended == ["ended", "ended"]
    done, later = threading.Event(), Reader("later", lambda: None)
    later.start(pool.serve_from)
    later.post(done.set)
    assert done.wait(WAIT)
    later.close()
    assert later.join(Deadline.after(WAIT)) == []
    pool.close()
    assert pool.join(Deadline.after(WAIT)) == []
