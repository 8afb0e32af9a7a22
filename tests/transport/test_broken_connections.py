"""Mailboxes over tcp whose connections break deliver each message once, in order (docs/guarantees.md, P1)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import Empty, SimpleQueue

import pytest
import zmq

from tests.support.relay import Direction, Fate, Relay, at_random
from tests.support.waiting import eventually
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport import session
from zmqgrad.transport.base import Inbound, PeerAddress, PeerEnd
from zmqgrad.transport.mailbox import ZmqMailbox
from zmqgrad.transport.sealed import transport as sealed_transport
from zmqgrad.transport.security import Keys, load_keys
from zmqgrad.wire.codec import encode
from zmqgrad.wire.frames import write_session
from zmqgrad.wire.messages import Ack, Call, Chunk, Goodbye, LargeMessage, Payload, Result

WAIT = 60.0

RESULT = Result(Payload())
CALL = Call("f", Payload())


class Pair:
    """Two mailboxes, each of which reaches the other by a relay."""

    def __init__(self, keys: Keys | None = None) -> None:
        self.keys = keys
        self.mailboxes = [self.make(n) for n in (0, 1)]
        self.relays = [Relay(port_of(mailbox)) for mailbox in self.mailboxes]
        self.addresses = [
            PeerAddress((f"tcp://127.0.0.1:{relay.port}",), mailbox.incarnation)
            for relay, mailbox in zip(self.relays, self.mailboxes, strict=True)
        ]
        self.arrived: list[SimpleQueue[Inbound]] = [SimpleQueue(), SimpleQueue()]
        self.ended: list[SimpleQueue[PeerEnd]] = [SimpleQueue(), SimpleQueue()]
        for n in (0, 1):
            self.start(n)

    def make(self, n: int) -> ZmqMailbox:
        return ZmqMailbox(f"w{n}", n, keys=self.keys)

    def start(self, n: int) -> None:
        self.mailboxes[n].start(self.arrived[n].put, self.addresses.__getitem__, on_end=self.ended[n].put)

    def take(self, n: int, count: int) -> list[Inbound]:
        """The next messages that arrive at ``n``."""
        try:
            return [self.arrived[n].get(timeout=WAIT) for _ in range(count)]
        except Empty:
            raise AssertionError([mailbox.statistics()["sessions"] for mailbox in self.mailboxes]) from None

    def sessions(self, n: int) -> dict[str, int]:
        statistics = self.mailboxes[n].statistics()["sessions"]
        assert isinstance(statistics, dict)
        return statistics

    def close(self) -> None:
        for mailbox in self.mailboxes:
            mailbox.close()
            assert mailbox.join(Deadline.after(WAIT)) == []
        for relay in self.relays:
            relay.close()


def port_of(mailbox: ZmqMailbox) -> int:
    [endpoint] = [e for e in mailbox.endpoints if e.startswith("tcp:")]
    return int(endpoint.rpartition(":")[2])


@pytest.fixture(params=["open", "keyed"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(load_keys("the secret of this job, of 33 bytes") if request.param == "keyed" else None)
    try:
        yield pair
    finally:
        pair.close()


def ids(messages: list[Inbound]) -> list[int]:
    return [inbound.envelope.message_id for inbound in messages]


def test_a_goodbye_reaches_a_peer_whose_first_connection_is_not_open_yet(pair: Pair) -> None:
    began = threading.Event()

    def swallow_the_first(direction: Direction, chunk: bytes) -> Fate:
        if not began.is_set():
            pair.relays[0].swallow()
            began.set()
        return "pass"

    pair.relays[0].fate = swallow_the_first
    pair.mailboxes[0].send(1, RESULT, 1)
    assert ids(pair.take(1, 1)) == [1]
    pair.mailboxes[1].send(0, RESULT, 1)
    assert began.wait(WAIT)
    pair.mailboxes[1].close("it has finished")
    assert pair.ended[0].get(timeout=WAIT).reason == "it has finished"


@pytest.mark.timeout(120)
def test_connections_that_break_at_random_lose_and_repeat_nothing(pair: Pair) -> None:
    count = 20_000
    for n, relay in enumerate(pair.relays):
        relay.fate = at_random(0.02, seed=n)

    def send(n: int) -> None:
        for i in range(count):
            pair.mailboxes[n].send(1 - n, RESULT, i, [b"frame %d" % i] if i % 7 == 0 else ())

    senders = [threading.Thread(target=send, args=(n,)) for n in (0, 1)]
    for sender in senders:
        sender.start()
    for n in (0, 1):
        arrived = pair.take(n, count)
        assert ids(arrived) == list(range(count))
        assert all(bytes(x.frames[0]) == b"frame %d" % i for i, x in enumerate(arrived) if i % 7 == 0)
    for sender in senders:
        sender.join()
    for relay in pair.relays:
        relay.fate = lambda direction, chunk: "pass"
    assert sum(relay.cuts for relay in pair.relays) > 5
    assert sum(pair.sessions(n)["reconnects"] for n in (0, 1)) > 5
    eventually(lambda: [pair.sessions(n)["unacknowledged"] for n in (0, 1)], lambda counts: counts == [0, 0])
    assert all(q.empty() for q in pair.arrived)


@pytest.mark.parametrize("kind", [RESULT, CALL], ids=["reply", "request"])
def test_a_large_frame_arrives_though_its_connection_breaks_in_the_middle(
    pair: Pair, kind: Result | Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks. A reply's memory may be written to as soon as it was sent; it arrives as it was."""
    monkeypatch.setattr(
        sealed_transport, "MIN_SEALED_BYTES", 1 << 40
    )  # tests/transport/test_sealed.py has sealed ones
    size = 24 << 20
    left = [7]

    def fate(direction: str, chunk: bytes) -> str:
        left[0] -= direction == "to server" and len(chunk) > 10_000
        if left[0] <= 0:
            left[0] = 150
            return "truncate"
        return "pass"

    pair.relays[1].fate = fate  # type: ignore[assignment]
    frame = bytearray(b"0123456789abcdef" * (size // 16))
    as_sent = bytes(frame)
    pair.mailboxes[0].send(1, kind, 1, [memoryview(frame)])
    if kind is RESULT:
        frame[:] = bytes(size)
    [inbound] = pair.take(1, 1)
    assert bytes(inbound.frames[0]) == as_sent
    assert pair.relays[1].cuts >= 1


def test_a_silent_connection_is_replaced(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """No event reports it, as with a NAT that forgets: the retransmission timer does."""
    monkeypatch.setattr(session, "RESEND_SECONDS", 0.3)
    pair.mailboxes[0].send(1, RESULT, 0)
    pair.take(1, 1)
    pair.relays[1].swallow()
    for i in range(1, 100):
        pair.mailboxes[0].send(1, RESULT, i)
    assert ids(pair.take(1, 99)) == list(range(1, 100))


def test_messages_sent_without_a_listener_arrive_later(pair: Pair) -> None:
    pair.relays[1].refusing = True
    for i in range(1000):
        pair.mailboxes[0].send(1, RESULT, i)
    pair.relays[1].refusing = False
    assert ids(pair.take(1, 1000)) == list(range(1000))


def test_a_new_incarnation_gets_nothing_of_the_old(pair: Pair) -> None:
    """Another worker at the same port, even under the same number: nothing is meant for it."""
    pair.mailboxes[0].send(1, RESULT, 0)
    pair.take(1, 1)
    pair.relays[1].refusing = True
    pair.relays[1].cut()
    for i in range(1, 50):
        pair.mailboxes[0].send(1, RESULT, i)
    pair.mailboxes[1].close()
    assert pair.mailboxes[1].join(Deadline.after(WAIT)) == []
    old, pair.mailboxes[1] = pair.mailboxes[1], pair.make(1)
    pair.arrived[1] = SimpleQueue()
    pair.relays[1].target = ("127.0.0.1", port_of(pair.mailboxes[1]))  # as if it had the same port
    pair.start(1)
    pair.relays[1].refusing = False
    eventually(lambda: pair.sessions(1)["misdirected"], lambda misdirected: misdirected > 0)
    assert pair.arrived[1].empty()
    assert old.incarnation != pair.mailboxes[1].incarnation


def test_flush_waits_until_a_broken_connection_has_delivered_everything(pair: Pair) -> None:
    for n in (0, 1):
        pair.mailboxes[n].send(1 - n, RESULT, 0)
        pair.take(1 - n, 1)
    pair.relays[1].refusing = True
    pair.relays[1].cut()
    for i in range(1, 100):
        pair.mailboxes[0].send(1, RESULT, i)
    assert not pair.mailboxes[0].flush(Deadline.after(0.01))
    pair.relays[1].refusing = False
    assert pair.mailboxes[0].flush(Deadline.after(WAIT))
    assert pair.arrived[1].qsize() == 99
    assert ids(pair.take(1, 99)) == list(range(1, 100))


def test_one_direction_is_acknowledged_without_any_message_back(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "RESEND_SECONDS", 0.3)  # few acknowledgements are read only by its timer
    for i in range(300):
        pair.mailboxes[0].send(1, RESULT, i, [b"x" * 1000])
    pair.take(1, 300)
    eventually(lambda: pair.sessions(0)["unacknowledged"], lambda unacknowledged: unacknowledged == 0)
    assert pair.sessions(0)["unacknowledged_bytes"] == 0
    assert pair.arrived[0].empty()


def test_an_acknowledgement_of_what_was_never_sent_counts_for_nothing() -> None:
    """Else all later messages were kept, and sent again for ever, and yet seemed to have arrived."""
    pair = Pair()
    near, far = pair.mailboxes
    near.send(1, RESULT, 1)
    assert ids(pair.take(1, 1)) == [1]
    eventually(lambda: pair.sessions(0)["unacknowledged"] == 0)
    wrong = encode(Ack(), 1, far.incarnation, 0)
    write_session(wrong, 0, 1 << 63, near.incarnation)
    before = near.statistics()["messages_received"]
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"tcp://127.0.0.1:{port_of(near)}")
        dealer.send(wrong)
        eventually(lambda: near.statistics()["messages_received"] > before)
    near.send(1, RESULT, 2)
    assert ids(pair.take(1, 1)) == [2]
    eventually(lambda: pair.sessions(0)["unacknowledged"] == 0)
    pair.close()


def test_a_message_in_chunks_is_of_the_worker_that_has_sent_it() -> None:
    """Here one worker says in chunks that another has left."""
    pair = Pair()
    near = pair.mailboxes[0]
    inner = encode(Goodbye("it has left"), 2, 22, 0)
    chunk, last = Chunk(7, 0, len(inner)), LargeMessage(7, len(inner))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"tcp://127.0.0.1:{port_of(near)}")
        dealer.send_multipart([encode(chunk, 1, 11, 0), inner])
        dealer.send(encode(last, 1, 11, 0))
        dealer.send(encode(RESULT, 1, 11, 8))
        assert ids(pair.take(0, 1)) == [8]
    assert near.statistics()["malformed"] == 1
    assert pair.ended[0].empty()
    pair.close()
