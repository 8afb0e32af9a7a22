"""Credit: what may be on its way to a peer, who waits for what, and that everybody's turn comes."""

from __future__ import annotations

import itertools
import re
import threading
import tracemalloc
from collections import deque
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.signals import called_within, ends
from tests.transport.contract import Box, Office, office_of
from tests.transport.test_contract import OverZmq, TcpAlone
from zmqgrad.errors import ClosedError, CongestionError
from zmqgrad.runtime.thread_pool import Source, Task
from zmqgrad.transport.base import Inbound, Mailbox
from zmqgrad.transport.flow_control import MIN_COUNTED_BYTES, NOTHING_CONSUMED, ReceiveWindow, SendWindow
from zmqgrad.transport.mailbox import ZmqMailbox
from zmqgrad.transport.tap import Tapped, observer
from zmqgrad.wire.codec import decode, encode
from zmqgrad.wire.messages import Credit, CreditWanted, Message, RRefAck, StoreSet

REQUEST, ANSWER = StoreSet("key", b"value"), RRefAck()
LIMIT = 1 << 20
PART = 400 << 10
"""Bytes of which two are within the limit, and three are not."""


class Waits:
    """Threads that wait at an send_window. ``said`` gets what it tells its peers."""

    def __init__(self, limit: int = 100) -> None:
        self.said: SimpleQueue[Message] = SimpleQueue()
        self.send_window = SendWindow("w", limit, lambda _, message: self.said.put(message))
        self.went: SimpleQueue[Any] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def send(self, size: int, answer: bool = False, seconds: float = 0.0) -> None:
        """In a thread of its own; returns once it waits, or has gone."""
        if self.send_window.try_reserve(1, answer, size):
            self.went.put(size)
            return
        before = self.waiting()

        def wait() -> None:
            try:
                self.send_window.wait(1, answer, size, seconds)
                self.went.put(size)
            except Exception as e:
                self.went.put(e)

        self._threads.append(threading.Thread(target=wait, daemon=True))
        self._threads[-1].start()
        while self.waiting() == before and self.went.empty():
            self._threads[-1].join(0.001)

    def waiting(self) -> int:
        return sum(w["messages"] for w in self.send_window.statistics()["waiting"].values())

    def next(self) -> Any:
        return self.went.get(timeout=20)

    def end(self) -> None:
        self.send_window.close()
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture
def waits() -> Iterator[Waits]:
    made = Waits()
    yield made
    made.end()


def test_messages_within_the_limit_are_sent_immediately(waits: Waits) -> None:
    assert all(waits.send_window.try_reserve(1, False, 25) for _ in range(4))
    assert not waits.send_window.try_reserve(1, False, 1)
    assert waits.send_window.try_reserve(2, False, 100)  # another peer
    assert waits.send_window.try_reserve(1, True, 100)  # answers pass while requests wait
    assert waits.send_window.statistics() == {
        "limit": 100,
        "bytes": {1: 200, 2: 100},
        "waiting": {},
        "waits": 0,
    }


def test_without_a_limit_senders_never_wait() -> None:
    send_window = SendWindow("w", 0, lambda *_: None)
    assert all(send_window.try_reserve(1, False, 1 << 40) for _ in range(3))


def test_a_message_larger_than_the_limit_passes_alone(waits: Waits) -> None:
    assert waits.send_window.try_reserve(1, False, 1000)
    waits.send(1)
    assert waits.waiting() == 1
    waits.send_window.on_consumed(1, 1000, 0)
    assert waits.next() == 1
    waits.send(1000)
    assert waits.said.get(timeout=20) == CreditWanted(901, 0)  # of the 1
    assert waits.said.get(timeout=20) == CreditWanted(1001, 0)
    waits.send_window.on_consumed(1, 1001, 0)
    assert waits.next() == 1000


def test_waiting_senders_continue_in_order(waits: Waits) -> None:
    assert waits.send_window.try_reserve(1, False, 90)
    waits.send(80)
    waits.send(5)  # would fit, but is second
    assert waits.waiting() == 2
    assert waits.send_window.statistics()["waiting"] == {1: {"messages": 2, "bytes": 85}}
    assert waits.said.get(timeout=20) == CreditWanted(70, 0)
    waits.send_window.on_consumed(1, 60, 0)
    assert waits.said.get(timeout=20) == CreditWanted(70, 0)  # not enough yet
    waits.send_window.on_consumed(1, 70, 0)
    assert waits.next() == 80
    waits.send_window.on_consumed(1, 90, 0)
    assert waits.next() == 5
    assert waits.send_window.statistics()["bytes"] == {1: 85}


def test_a_sender_that_times_out_unblocks_the_next(waits: Waits) -> None:
    assert waits.send_window.try_reserve(1, False, 90)
    waits.send(80, seconds=0.05)
    waits.send(5)
    error, sent = sorted([waits.next(), waits.next()], key=lambda each: each == 5)  # by two threads
    assert sent == 5
    assert isinstance(error, CongestionError)
    assert "worker 1" in str(error)
    assert "90 bytes" in str(error)
    assert "ZMQGRAD_INFLIGHT_BYTES" in str(error)


def test_forgetting_a_peer_drops_its_account_and_fails_its_waiters(waits: Waits) -> None:
    assert waits.send_window.try_reserve(1, False, 90)
    assert waits.send_window.try_reserve(1, True, 90)
    waits.send(80)
    waits.send(80, answer=True)
    waits.send_window.forget(1)
    assert [type(waits.next()) for _ in range(2)] == [ClosedError, ClosedError]
    waits.send_window.on_consumed(1, 90, 90)  # late
    assert waits.send_window.try_reserve(1, False, 100)
    assert not waits.send_window.try_reserve(1, False, 1)


def test_closing_ends_every_wait(waits: Waits) -> None:
    assert waits.send_window.try_reserve(1, False, 100)
    waits.send(1)
    waits.send_window.close()
    assert isinstance(waits.next(), ClosedError)
    with pytest.raises(ClosedError):
        waits.send_window.wait(1, False, 1, 0.0)


def test_unexpected_credit_does_not_make_the_count_negative(waits: Waits) -> None:
    assert waits.send_window.try_reserve(1, False, 10)
    waits.send_window.on_consumed(1, 1 << 62, 1 << 62)
    assert waits.send_window.statistics()["bytes"] == {}
    assert waits.send_window.try_reserve(1, False, 100)


def test_a_peer_that_repeats_its_counters_takes_no_memory() -> None:
    """As in each call of a worker to which this one sends nothing that counts any more."""
    send_window = SendWindow("w", 100, lambda *_: None)
    assert send_window.try_reserve(1, False, 50)
    tracemalloc.start()
    try:
        for _ in range(20_000):
            send_window.on_consumed(1, 20, 0)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 50_000
    assert send_window.statistics()["bytes"] == {1: 30}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_counters_may_be_lost_repeated_and_outdated(heard: list[tuple[int, int]]) -> None:
    """Each counter tells everything, so the highest that has arrived counts."""
    send_window = SendWindow("w", 100, lambda *_: None)
    for _ in range(9):
        assert send_window.try_reserve(1, False, 10)
        assert send_window.try_reserve(1, True, 10)
    for requests, replies in heard:
        send_window.on_consumed(1, 10 * requests, 10 * replies)
    left = 180 - 10 * max((r for r, _ in heard), default=0) - 10 * max((r for _, r in heard), default=0)
    assert send_window.statistics()["bytes"] == ({1: left} if left else {})


def test_a_message_that_was_not_sent_gives_its_bytes_back(waits: Waits) -> None:
    assert waits.send_window.try_reserve(1, False, 60)
    assert waits.send_window.try_reserve(1, False, 40)
    waits.send(50)
    waits.send_window.cancel(1, False, 40)
    waits.send_window.on_consumed(1, 60, 0)
    assert waits.next() == 50
    waits.send_window.cancel(2, False, 40)  # of a peer that is forgotten


def test_credit_arrives_whatever_a_signal_handler_that_waits_for_it_has_interrupted() -> None:
    """It waits for a reply, of which the thread that reads it first handles the credit."""
    for number in itertools.count(1):
        window = SendWindow("w", 100, lambda peer, message: None)
        assert window.try_reserve(1, False, 60)
        read: list[bool] = []
        called = called_within(
            lambda: window.try_reserve(1, False, 40),  # noqa: B023
            lambda: read.append(ends(lambda: window.on_consumed(1, 60, 0))),  # noqa: B023
            number,
        )
        assert read == [True] * called
        assert window.statistics()["bytes"] == {1: 40 if called else 100}
        if not called:
            break


class Returns:
    """A receive window, and the counters that its messages carried."""

    def __init__(self, limit: int = 100) -> None:
        self.said: list[tuple[int, int]] = []
        self.window = ReceiveWindow(limit, self._send)

    def _send(self, peer: int, message: Message) -> None:
        assert message == Credit()
        self.said.append(self.window.totals(peer, NOTHING_CONSUMED))


def test_a_signal_handler_may_read_a_message_while_its_thread_counts_another() -> None:
    def at_every_moment() -> None:
        for number in itertools.count(1):
            window = Returns().window
            called = called_within(
                lambda: window.consumed(1, False, 10),  # noqa: B023
                lambda: window.consumed(1, False, 5),  # noqa: B023
                number,
            )
            assert window.totals(1, NOTHING_CONSUMED) == (10 + 5 * called, 0)
            if not called:
                return

    assert ends(at_every_moment)


def test_credit_is_returned_in_batches_or_on_request() -> None:
    returns = Returns()
    window = returns.window
    window.consumed(1, False, 20)
    assert returns.said == []
    assert window.totals(1, NOTHING_CONSUMED) == (20, 0)  # in any message that is sent meanwhile
    window.consumed(1, False, 5)
    assert returns.said == [(25, 0)]
    window.consumed(1, True, 10)
    window.credit_requested(1, CreditWanted(28, 12))
    assert returns.said == [(25, 0)]
    window.consumed(1, False, 3)
    window.consumed(1, True, 2)
    assert returns.said == [(25, 0), (28, 10), (28, 12)]
    window.consumed(1, False, 3)  # back to batches
    assert len(returns.said) == 3
    window.credit_requested(1, CreditWanted(31, 0))  # consumed already: the last message may be lost
    assert returns.said[3:] == [(31, 12)]
    window.forget(1)
    assert window.totals(1, NOTHING_CONSUMED) == (0, 0)


def test_no_claim_of_a_peer_makes_counters_that_no_message_can_tell() -> None:
    """As that of a message in chunks of any size, which have not arrived."""
    returns = Returns()
    for reply in (False, True):
        for _ in range(3):
            returns.window.consumed(1, reply, (1 << 63) - 1)
    told = returns.window.totals(1, NOTHING_CONSUMED)
    assert decode(encode(Credit(), 0, 0, 0, consumed=told))[0].requests == told[0]


def test_credit_of_one_peer_is_not_that_of_another() -> None:
    returns = Returns()
    returns.window.consumed(1, False, 20)
    returns.window.consumed(2, False, 20)
    assert returns.said == []
    assert (returns.window.totals(1, NOTHING_CONSUMED), returns.window.totals(3, NOTHING_CONSUMED)) == (
        (20, 0),
        (0, 0),
    )


@given(
    limits=st.tuples(st.integers(1, 100), st.integers(1, 100)),
    sizes=st.lists(st.integers(1, 150), min_size=1, max_size=30),
    slowness=st.integers(1, 4),
)
def test_everything_arrives_whatever_the_limits_at_both_ends(
    limits: tuple[int, int], sizes: list[int], slowness: int
) -> None:
    """Two threads send by one send_window; never is more than the limit away, but for a message alone."""
    arrived: SimpleQueue[int] = SimpleQueue()
    send_window = SendWindow("w", limits[0], lambda _, message: receive_window.credit_requested(0, message))  # type: ignore[arg-type]
    receive_window = ReceiveWindow(
        limits[1], lambda peer, _: send_window.on_consumed(0, *receive_window.totals(peer, NOTHING_CONSUMED))
    )

    def send(mine: list[int]) -> None:
        for size in mine:
            if not send_window.try_reserve(0, False, size):
                send_window.wait(0, False, size, 0.0)
            arrived.put(size)

    senders = [threading.Thread(target=send, args=(sizes[i::2],), daemon=True) for i in range(2)]
    for sender in senders:
        sender.start()
    here: deque[int] = deque()
    for _ in sizes:
        if not here:
            here.append(arrived.get(timeout=20))
        while len(here) < slowness and not arrived.empty():
            here.append(arrived.get())
        assert sum(here) <= max(limits[0], *here)
        receive_window.consumed(0, False, here.popleft())
    for sender in senders:
        sender.join(20)
        assert not sender.is_alive()


# ---- in a mailbox ----------------------------------------------------------------------------------------


class _Small(TcpAlone):
    def __init__(self, name: str, worker_id: int) -> None:
        ZmqMailbox.__init__(self, name, worker_id, inflight=LIMIT)


class WithCredit(OverZmq):
    """Mailboxes with a small limit."""

    def open(self, name: str, worker_id: int) -> Mailbox:
        if self._only == "ipc":
            return ZmqMailbox(name, worker_id, tcp_host=None, inflight=LIMIT)
        return _Small(name, worker_id)


class Desk:
    """In the place of a thread pool: tasks lie here until the test begins them."""

    def __init__(self) -> None:
        self.tasks: SimpleQueue[Task] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def serve_from(self, source: Source) -> None:
        def work() -> None:
            while (task := source.read()) is not None:
                self.tasks.put(task)

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        task()  # of the mailbox itself

    def begin_next(self) -> None:
        self.tasks.get(timeout=20)()


@pytest.fixture(params=["ipc", "tcp"])
def office(request: pytest.FixtureRequest) -> Iterator[Office]:
    with office_of(WithCredit(request.param)) as opened:
        yield opened


def slow_box(office: Office, worker_id: int, got: SimpleQueue[Inbound]) -> Desk:
    """A mailbox whose requests are tasks for a desk, and whose answers are taken at once."""
    box, desk = office.open(worker_id, start=False), Desk()

    def handler(inbound: Inbound) -> Task | None:
        if inbound.message == ANSWER:
            got.put(inbound)
            return None
        return lambda: got.put(inbound)

    box.mailbox.start(handler, office.resolve, desk)  # type: ignore[arg-type]
    return desk


def asks(box: Box) -> SimpleQueue[CreditWanted]:
    """What ``box`` waits for, as it says so."""
    said: SimpleQueue[CreditWanted] = SimpleQueue()

    def tap(tapped: Tapped) -> None:
        if tapped.outgoing and isinstance(tapped.message, CreditWanted):
            said.put(tapped.message)

    box.mailbox.tap = observer(tap)
    return said


class Sender:
    """A thread that sends ``count`` messages of ``PART`` bytes to worker 1."""

    def __init__(self, box: Box, count: int, message: Message = REQUEST, patience: float = 0.0) -> None:
        self.error: Exception | None = None
        self._work = (box, count, message, patience)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        box, count, message, patience = self._work
        try:
            for n in range(count):
                box.mailbox.send(1, message, n, [bytes([n]) * PART], timeout=patience)
        except Exception as e:
            self.error = e

    def join(self) -> None:
        self.thread.join(20)
        assert not self.thread.is_alive()


def test_a_slow_receiver_slows_its_sender(office: Office) -> None:
    got: SimpleQueue[Inbound] = SimpleQueue()
    a, desk = office.open(0), slow_box(office, 1, got)
    asked = asks(a)
    sender = Sender(a, 10)
    for n in range(10):
        if n < 8:
            assert asked.get(timeout=20).requests > 0
            inflight = a.mailbox.statistics()["inflight"]
            assert inflight["bytes"][1] <= LIMIT
            assert inflight["waiting"][1]["messages"] == 1
            assert PART < inflight["waiting"][1]["bytes"] < PART + 1000
            assert sender.thread.is_alive()
        desk.begin_next()
        inbound = got.get(timeout=20)
        assert inbound.envelope.message_id == n
        assert PART < inbound.socket_bytes < PART + 1000
    sender.join()
    assert sender.error is None
    assert a.mailbox.statistics()["inflight"]["waits"] == 8


def test_replies_and_small_messages_pass_while_requests_wait(office: Office) -> None:
    got: SimpleQueue[Inbound] = SimpleQueue()
    a, desk = office.open(0), slow_box(office, 1, got)
    asked = asks(a)
    sender = Sender(a, 3)
    asked.get(timeout=20)
    for n in range(10):
        a.mailbox.send(1, ANSWER, n, [bytes(PART)])
        assert got.get(timeout=20).envelope.message_id == n
    a.mailbox.send(1, StoreSet("small", b""), 77)
    arrived = [desk.tasks.get(timeout=20) for _ in range(3)]  # while the third request waits for credit
    for task in arrived:
        task()
    assert {got.get(timeout=20).envelope.message_id for _ in range(3)} == {0, 1, 77}
    desk.begin_next()
    sender.join()


def test_the_timeout_of_a_waiting_sender_names_the_reason(office: Office) -> None:
    got: SimpleQueue[Inbound] = SimpleQueue()
    a, desk = office.open(0), slow_box(office, 1, got)
    sender = Sender(a, 3, patience=0.1)
    sender.join()
    assert isinstance(sender.error, CongestionError)
    in_flight = re.search(r"(\d+) bytes in flight", str(sender.error))
    assert in_flight is not None
    assert 2 * PART < int(in_flight[1]) < 2 * PART + 2000
    for _ in range(2):
        desk.begin_next()
    sender = Sender(a, 2)  # what gave up takes no credit with it
    sender.join()
    assert sender.error is None


def test_losing_a_peer_fails_senders_that_wait_for_it(office: Office) -> None:
    got: SimpleQueue[Inbound] = SimpleQueue()
    a, _ = office.open(0), slow_box(office, 1, got)
    asked = asks(a)
    sender = Sender(a, 3)
    asked.get(timeout=20)
    a.mailbox.end(1, "lost")
    sender.join()
    assert isinstance(sender.error, ClosedError)
    assert a.mailbox.statistics()["inflight"] == {"limit": LIMIT, "bytes": {}, "waiting": {}, "waits": 1}


def test_closing_fails_waiting_senders(office: Office) -> None:
    got: SimpleQueue[Inbound] = SimpleQueue()
    a, _ = office.open(0), slow_box(office, 1, got)
    asked = asks(a)
    sender = Sender(a, 3)
    asked.get(timeout=20)
    a.mailbox.close()
    sender.join()
    assert isinstance(sender.error, ClosedError)


def test_the_thread_that_reads_never_waits(office: Office) -> None:
    """It would wait for what only it can bring."""
    done = threading.Event()

    def forward(inbound: Inbound) -> None:
        for n in range(5):  # far beyond the limit, and the reader of 1 does not read
            office.known[0].send(1, REQUEST, n, [bytes(PART)])
        done.set()

    office.open(0, forward)
    got: SimpleQueue[Inbound] = SimpleQueue()
    desk = slow_box(office, 1, got)
    office.known[1].send(0, REQUEST, 1)
    assert done.wait(20)
    for _ in range(5):
        desk.begin_next()


def test_what_is_in_the_first_frame_counts_too(office: Office) -> None:
    """5,000 calls of 60 KB are 300 MB in the queues of a worker that does not execute them."""
    got: SimpleQueue[Inbound] = SimpleQueue()
    a, desk = office.open(0), slow_box(office, 1, got)
    asked = asks(a)
    count, argument, sent = 5000, bytes(60_000), SimpleQueue[int]()

    def send() -> None:
        for n in range(count):
            a.mailbox.send(1, StoreSet("key", argument), n)
            sent.put(n)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    asked.get(timeout=20)
    before = sent.qsize()
    assert before <= LIMIT // len(argument)
    assert sum(a.mailbox.statistics()["inflight"]["bytes"].values()) <= LIMIT
    for n in range(count):
        desk.begin_next()
        assert got.get(timeout=20).envelope.message_id == n
        assert sum(a.mailbox.statistics()["inflight"]["bytes"].values()) <= LIMIT
    sender.join(20)
    assert sent.qsize() == count


def test_small_messages_do_not_count(office: Office) -> None:
    got: SimpleQueue[Inbound] = SimpleQueue()
    a, desk = office.open(0), slow_box(office, 1, got)
    for n in range(2000):
        a.mailbox.send(1, StoreSet("key", bytes(MIN_COUNTED_BYTES // 2)), n)
    assert a.mailbox.statistics()["inflight"]["bytes"] == {}
    for _ in range(2000):
        desk.begin_next()


def test_a_handler_that_fails_keeps_no_credit(office: Office) -> None:
    def fail(inbound: Inbound) -> None:
        raise ZeroDivisionError

    a = office.open(0)
    office.open(1, fail)
    sender = Sender(a, 20)
    sender.join()
    assert sender.error is None
