"""Sealed records: what an attacker changes does not open, and broken connections lose and repeat nothing."""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from tests.support.relay import Relay, at_random
from tests.support.waiting import eventually
from zmqgrad.errors import ClosedError, ProtocolError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport import session
from zmqgrad.transport.base import Inbound, PeerAddress, PeerEnd
from zmqgrad.transport.mailbox import ZmqMailbox
from zmqgrad.transport.sealed import records, transport
from zmqgrad.transport.sealed.records import Cipher, generate_key, read_head, sealed_size
from zmqgrad.transport.security import Keys, load_keys, password_client
from zmqgrad.transport.tap import Tapped, observer
from zmqgrad.wire.messages import BulkOpen, BulkReady, Call, Payload, Result

pytest.importorskip("cryptography")

WAIT = 60.0
RESULT = Result(Payload())
CALL = Call("f", Payload())
KEYS = load_keys("the secret of this job, of 33 bytes")
Record = list[Any]

FRAMES = st.lists(st.binary(max_size=200), min_size=1, max_size=5)


def seal(cipher: Cipher, frames: Sequence[bytes], sequence: int = 1) -> Record:
    head, parts = cipher.seal(sequence, frames, memoryview(bytearray(sealed_size(frames))))
    return [head, *parts]


def open_all(cipher: Cipher, record: Record) -> list[bytes]:
    return [cipher.open(record, i) for i in range(read_head(record).parts)]


@given(FRAMES)
def test_a_record_opens_to_what_was_sealed(frames: list[bytes]) -> None:
    key = generate_key()
    record = seal(Cipher(key, 1, 2, 3), frames)
    other = Cipher(key, 1, 2, 3)
    assert open_all(other, record) == frames
    for i, frame in enumerate(frames):
        target = bytearray(len(frame))
        other.open_into(record, i, memoryview(target))
        assert target == frame


@given(FRAMES, st.data())
def test_a_record_that_was_changed_anywhere_does_not_open(frames: list[bytes], data: st.DataObject) -> None:
    key = generate_key()
    record = [bytearray(x) for x in seal(Cipher(key, 1, 2, 3), frames)]
    frame = data.draw(st.sampled_from(record))
    how = data.draw(st.sampled_from(["flip", "truncate", "extend"]))
    if how == "flip":
        at = data.draw(st.integers(0, len(frame) * 8 - 1))
        frame[at // 8] ^= 1 << at % 8
    elif how == "truncate":
        del frame[data.draw(st.integers(0, len(frame) - 1)) :]
    else:
        frame += b"\0"
    with pytest.raises(ProtocolError):
        open_all(Cipher(key, 1, 2, 3), record)


@given(st.lists(st.binary(max_size=50), min_size=2, max_size=4, unique=True), st.integers(0, 2))
def test_parts_open_in_their_own_place_only(frames: list[bytes], seed: int) -> None:
    key = generate_key()
    cipher = Cipher(key, 1, 2, 3)
    record, second = seal(cipher, frames, 1), seal(cipher, frames, 2)
    for wrong in (
        [record[0], *record[:0:-1]],  # another order
        record[:-1],  # one missing
        [record[0], *second[1:]],  # those of another record
        [record[0], record[1], *second[2:]],
    ):
        with pytest.raises(ProtocolError):
            open_all(cipher, wrong)


@pytest.mark.parametrize("other", [(9, 2, 3), (1, 9, 3), (1, 2, 9)], ids=["channel", "source", "target"])
def test_a_record_opens_for_its_channel_and_processes_only(other: tuple[int, int, int]) -> None:
    key = generate_key()
    record = seal(Cipher(key, 1, 2, 3), [b"frame"])
    record[0][4:12] = other[0].to_bytes(8, "big")
    with pytest.raises(ProtocolError, match="not authentic"):
        open_all(Cipher(key, *other), record)


@given(st.lists(st.tuples(FRAMES, st.integers(1, 9)), max_size=8))
def test_no_nonce_is_used_twice_whatever_the_sequence_numbers(
    messages: list[tuple[list[bytes], int]],
) -> None:
    cipher = Cipher(generate_key(), 1, 2, 3)
    used: list[int] = []
    for frames, sequence in messages:
        head = read_head(seal(cipher, frames, sequence))
        used += range(head.nonce, head.nonce + head.parts)
    assert len(used) == len(set(used)) == cipher.sealed


def test_a_fork_does_not_seal_with_the_key_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    cipher = Cipher(generate_key(), 1, 2, 3)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(ClosedError, match="fork"):
        seal(cipher, [b"frame"])
    assert cipher.sealed == 0


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_garbage_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        read_head(frames)


def test_keys_and_passwords_are_not_printed() -> None:
    key = generate_key()
    for shown in (BulkOpen(1, key), BulkReady(1, 2, key), Cipher(key, 1, 2, 3)):
        assert repr(key)[2:10] not in repr(shown)


class Pair:
    """Two mailboxes. Large messages from the first to the second pass a relay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, keys: Keys | None = KEYS) -> None:
        self.relay: Relay | None = None
        self.tokens: list[bytes] = []
        self.records: list[Record] = []
        self.port = 0
        monkeypatch.setattr(transport, "CONNECT_SECONDS", WAIT)  # else the first may take the other way
        monkeypatch.setattr(transport, "bulk_endpoint", self.endpoint)
        monkeypatch.setattr(transport, "send_all", self.send_all)
        monkeypatch.setattr(transport, "password_client", self.password)
        self.mailboxes = [ZmqMailbox(f"w{n}", n, keys=keys) for n in (0, 1)]
        self.addresses = [PeerAddress(m.endpoints[1:], m.incarnation) for m in self.mailboxes]
        self.arrived: list[SimpleQueue[Inbound]] = [SimpleQueue(), SimpleQueue()]
        self.ends: list[SimpleQueue[PeerEnd]] = [SimpleQueue(), SimpleQueue()]
        for n, mailbox in enumerate(self.mailboxes):
            mailbox.start(self.arrived[n].put, self.addresses.__getitem__, on_end=self.ends[n].put)

    def endpoint(self, endpoint: str, port: int) -> str:
        self.port = port
        if self.relay is None:
            self.relay = Relay(port)
        return f"tcp://127.0.0.1:{self.relay.port}"

    def password(self, socket: zmq.Socket[bytes], token: bytes) -> None:
        self.tokens.append(token)
        password_client(socket, token)

    def send_all(self, socket: zmq.Socket[bytes], first: Any, frames: Sequence[Any]) -> None:
        self.records.append([bytes(first), *map(bytes, frames)])
        send_all(socket, first, frames)

    def send(self, message_id: int, frame: Any, message: Result | Call = CALL) -> None:
        self.mailboxes[0].send(1, message, message_id, [memoryview(frame)])

    def take(self) -> Inbound:
        try:
            return self.arrived[1].get(timeout=WAIT)
        except Empty:
            raise AssertionError([m.statistics() for m in self.mailboxes]) from None

    def sealed(self, n: int) -> dict[str, int]:
        return self.mailboxes[n].statistics()["sealed"]  # type: ignore[no-any-return]

    def sessions(self) -> dict[str, int]:
        return self.mailboxes[0].statistics()["sessions"]  # type: ignore[no-any-return]

    @contextmanager
    def intruder(self, intrusions: Sequence[Record], password: bytes) -> Iterator[None]:
        """Sends records from outside."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            password_client(dealer, password)
            dealer.connect(f"tcp://127.0.0.1:{self.port}")
            for record in intrusions:
                dealer.send_multipart(record)
            yield
        context.term()

    def close(self) -> None:
        for mailbox in self.mailboxes:
            mailbox.close()
            assert mailbox.join(Deadline.after(WAIT)) == []
        if self.relay is not None:
            self.relay.close()


send_all = transport.send_all


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    pair = Pair(monkeypatch)
    try:
        yield pair
    finally:
        pair.close()


@pytest.fixture(params=[KEYS, None], ids=["secret", "open"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """With a secret, so sealed, and without."""
    pair = Pair(monkeypatch, request.param)
    try:
        yield pair
    finally:
        pair.close()


def some(mb: int, seed: int = 0) -> bytearray:
    return bytearray(bytes([seed, *range(1, 256)]) * (mb << 12))


def test_large_messages_arrive_sealed_and_may_be_written_to(pair: Pair) -> None:
    frames = [some(3), bytearray(b"small"), bytearray(), some(1)]
    pair.mailboxes[0].send(1, RESULT, 7, [memoryview(f) for f in frames])
    inbound = pair.take()
    assert inbound.envelope.message_id == 7
    assert [bytes(f) for f in inbound.frames] == [bytes(f) for f in frames]
    inbound.frames[0][0] = inbound.frames[1][0] = 1  # type: ignore[index]
    assert pair.sealed(0)["channels"] == 1
    assert pair.sealed(1)["refused"] == 0
    wire = b"".join(x for record in pair.records for x in record)
    assert bytes(some(1)[:256]) not in wire
    assert b"small" not in wire
    assert pair.mailboxes[1].statistics()["received_by_path"]["frames"] >= 4 << 20
    eventually(lambda: pair.sessions()["unacknowledged"], lambda n: n == 0)


def test_a_small_message_overtakes_a_large_one(either: Pair) -> None:
    either.send(1, some(1))
    either.take()
    assert either.relay is not None
    passing, either.relay.fate = either.relay.fate, lambda direction, chunk: "drop"
    either.send(2, some(4))
    either.mailboxes[0].send(1, CALL, 3)
    assert either.take().envelope.message_id == 3
    either.relay.fate = passing
    assert either.take().envelope.message_id == 2


def test_a_tensor_that_changes_while_its_connection_breaks_arrives_as_sent_and_no_nonce_repeats(
    pair: Pair,
) -> None:
    pair.send(0, some(1), RESULT)
    pair.take()
    assert pair.relay is not None
    pair.relay.fate = at_random(0.003, seed=3)
    frame = some(8)
    for i in range(1, 9):
        frame[:] = some(8, i)
        pair.send(i, frame, RESULT)
        frame[:] = bytes(len(frame))
    for i in range(1, 9):
        inbound = pair.take()
        assert inbound.envelope.message_id == i
        assert inbound.frames[0] == some(8, i)
    assert pair.relay.cuts > 0
    assert pair.sessions()["resends"] > 0
    assert pair.sealed(1)["refused"] == 0
    sealed: dict[int, bytes] = {}  # by nonce
    for record in pair.records:
        head = read_head(record)
        for i, part in enumerate(record[1:]):
            assert sealed.setdefault(head.nonce + i, part) == part
    assert pair.arrived[1].empty()


@pytest.mark.parametrize("kind", [RESULT, CALL], ids=["reply", "request"])
def test_without_a_secret_large_messages_arrive_once_and_as_sent_though_their_connection_breaks(
    monkeypatch: pytest.MonkeyPatch, kind: Result | Call
) -> None:
    """Whole and in chunks, by the channel. The memory of a reply may be written to once it was sent."""
    pair = Pair(monkeypatch, None)
    try:
        pair.send(0, some(1), kind)
        pair.take()
        assert pair.relay is not None
        pair.relay.fate = at_random(0.003, seed=3)
        for i in range(1, 9):
            frame = some(1 if i % 2 else 8, i)
            pair.send(i, frame, kind)
            if kind is RESULT:
                frame[:] = bytes(len(frame))
        for i in range(1, 9):
            inbound = pair.take()
            assert inbound.envelope.message_id == i
            assert inbound.frames[0] == some(1 if i % 2 else 8, i)
        assert pair.relay.cuts > 0
        assert pair.sessions()["resends"] > 0
        assert pair.sealed(0) | {"channels": 1, "sealed": 0} == pair.sealed(0)
        assert pair.sealed(1)["refused"] == 0
        assert pair.arrived[1].empty()
        eventually(lambda: pair.sessions()["unacknowledged"], lambda n: n == 0)
    finally:
        pair.close()


@pytest.mark.parametrize("key", [b"", bytes(16)], ids=["none", "short"])
def test_with_a_secret_no_channel_opens_without_a_key(
    pair: Pair, key: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    pair.mailboxes[0].send(1, BulkOpen(1, key), 0)
    eventually(lambda: pair.mailboxes[1].statistics()["malformed"], lambda n: n == 1)
    assert "a channel's key of" in caplog.text
    assert pair.port == 0


def test_a_replayed_record_is_not_delivered_again(pair: Pair) -> None:
    pair.send(1, some(1))
    pair.take()
    with pair.intruder(list(pair.records), pair.tokens[0]):
        eventually(lambda: pair.sealed(1)["duplicates"], lambda n: n == len(pair.records))
        pair.send(2, some(1, 2))
        assert pair.take().envelope.message_id == 2
    assert pair.arrived[1].empty()


@pytest.mark.parametrize("change", ["sequence", "part", "garbage"])
def test_a_forged_record_is_refused_and_disturbs_nothing(
    pair: Pair, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair.send(1, some(1))
    pair.take()
    record = [bytearray(x) for x in pair.records[-1]]
    if change == "sequence":  # the next one, so that the true one would be a duplicate
        record[0][12:20] = (read_head(record).sequence + 1).to_bytes(8, "big")
    elif change == "part":
        record[1][0] ^= 1
    else:
        record = [bytearray(b"GET / HTTP/1.1"), bytearray(3)]
    with pair.intruder([record], pair.tokens[0]):
        eventually(lambda: pair.sealed(1)["refused"], lambda n: n == 1)
    pair.send(2, some(2))
    assert pair.take().envelope.message_id == 2
    assert "refused a sealed record" in caplog.text


def test_records_of_a_peer_that_was_lost_are_dropped_in_silence(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not know yet that it is. Each was a warning of an unknown channel, as if somebody intruded."""
    pair.send(1, some(1))
    pair.take()
    pair.mailboxes[1].end(0, "lost")
    assert pair.ends[1].get(timeout=WAIT).reason == "lost"
    eventually(lambda: pair.sealed(1)["channels"], lambda n: n == 0)
    with pair.intruder([*pair.records, [b"GET / HTTP/1.1", bytes(3)]], pair.tokens[0]):
        eventually(lambda: pair.sealed(1)["refused"], lambda n: n > 0)
    assert pair.sealed(1)["refused"] == 1
    assert "unknown channel" not in caplog.text


def test_after_too_many_forgeries_a_key_is_dropped(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As is its link, to which the key belonged: neither end takes it for a connection that only broke."""
    monkeypatch.setattr(records, "MAX_FORGED_PARTS", 5)
    pair.send(1, some(1))
    pair.take()
    forged = [bytearray(x) for x in pair.records[-1]]
    forged[1][0] ^= 1
    with pair.intruder([forged] * 4, pair.tokens[0]):
        eventually(lambda: pair.sealed(1)["refused"], lambda n: n == 4)
    pair.send(2, some(2))
    assert pair.take().envelope.message_id == 2
    assert pair.sealed(1)["keys_dropped"] == 0
    with pair.intruder([forged], pair.tokens[0]):
        assert "forged on their way" in pair.ends[1].get(timeout=WAIT).reason
    assert pair.sealed(1)["keys_dropped"] == 1
    assert "forged on their way" in pair.ends[0].get(timeout=WAIT).reason
    assert pair.arrived[1].empty()


def test_nobody_connects_without_the_password(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.send(1, some(1))
    pair.take()
    with pair.intruder([[b"x"]], b"another"):
        eventually(lambda: caplog.text, lambda text: "refused 127.0.0.1" in text)
    assert pair.sealed(1)["refused"] == 0


def test_a_record_tampered_with_on_its_way_is_sent_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by somebody who controls the network: the transfer completes when he stops."""
    monkeypatch.setattr(session, "RESEND_SECONDS", 0.3)
    pair.send(1, some(1))
    pair.take()
    tampered = []

    def tamper(socket: zmq.Socket[bytes], first: Any, frames: Sequence[Any]) -> None:
        if len(tampered) < 2 and len(frames) == 2:
            tampered.append(first)
            frames = [frames[0], bytes(len(frames[1]))]
        send_all(socket, first, frames)

    monkeypatch.setattr(transport, "send_all", tamper)
    pair.send(2, some(4))
    inbound = pair.take()
    assert inbound.frames[0] == some(4)
    assert pair.sealed(1)["refused"] == 1
    assert pair.sealed(1)["gaps"] > 0


def test_a_channel_is_replaced_before_its_key_is_worn_out(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "RENEW_AFTER_PARTS", 20)
    for i in range(20):
        pair.send(i, some(2, i))
        assert pair.take().frames[0] == some(2, i)
    channels = {read_head(record).channel for record in pair.records}
    assert len(channels) > 2
    assert pair.sealed(1)["refused"] == 0
    eventually(lambda: pair.sessions()["unacknowledged"], lambda n: n == 0)


def test_the_end_of_a_peer_follows_what_has_arrived_by_its_channel(either: Pair) -> None:
    """In its order, whether sealed or not, though another thread receives it."""
    for n in range(5):
        either.send(n, some(2, n))
    either.take()
    assert either.mailboxes[0].flush(Deadline.after(WAIT))
    either.mailboxes[1].end(0, "lost")
    for n in range(1, 5):
        inbound = either.take()
        assert isinstance(inbound, Inbound)
        assert (inbound.envelope.message_id, inbound.frames[0]) == (n, some(2, n))
    assert either.ends[1].get(timeout=WAIT).reason == "lost"
    assert either.arrived[1].empty()
    assert either.sealed(1)["channels"] == 0


def test_a_goodbye_does_not_overtake_large_messages(either: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for their acknowledgements, as long as a worker may take to leave: here, as long as needed."""
    monkeypatch.setattr("zmqgrad.transport.mailbox.GOODBYE_LINGER_MS", int(WAIT * 1000))
    either.send(0, some(1))
    either.take()
    assert either.relay is not None
    passes = threading.Event()
    either.relay.fate = lambda direction, chunk: "pass" if passes.wait(WAIT) else "drop"
    for n in (1, 3):
        either.mailboxes[0].send(1, CALL, n)
        either.send(n + 1, some(2))
    closing = threading.Thread(target=either.mailboxes[0].close, args=("it leaves",))
    closing.start()
    closing.join(0.2)  # if it does not wait, the other one hears that it leaves
    passes.set()
    assert either.ends[1].get(timeout=WAIT).reason == "it leaves"
    closing.join(WAIT)
    assert sorted(either.take().envelope.message_id for _ in range(either.arrived[1].qsize())) == [1, 2, 3, 4]


def test_the_tap_sees_no_keys(pair: Pair) -> None:
    seen: list[Tapped] = []
    for mailbox in pair.mailboxes:
        mailbox.tap = observer(seen.append)
    pair.send(1, some(1))
    pair.take()
    assert {type(tapped.message) for tapped in seen} == {Call}


def test_without_cryptography_large_messages_go_through_curve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (transport, records):
        monkeypatch.setattr(module, "AVAILABLE", False)
    transport._log_unavailable.cache_clear()
    pair = Pair(monkeypatch)
    try:
        assert "zmqgrad[secure]" not in caplog.text  # a job on one host needs no cipher
        pair.send(1, some(2))
        assert pair.take().frames[0] == some(2)
        assert pair.records == []
        assert caplog.text.count("zmqgrad[secure]") == 1
    finally:
        pair.close()


def test_a_peer_without_cryptography_gets_large_messages_through_curve(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("zmqgrad.transport.sealed.receiver.AVAILABLE", False)
    caplog.set_level(logging.INFO)
    pair.send(1, some(2))
    assert pair.take().frames[0] == some(2)
    assert pair.records == []
    assert "w1 has no package cryptography" in caplog.text


def test_large_messages_go_with_the_others_if_the_port_cannot_be_reached(
    either: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transport, "CONNECT_SECONDS", 0.1)
    monkeypatch.setattr(transport, "bulk_endpoint", lambda endpoint, port: "tcp://127.0.0.1:1")
    for i in range(3):
        either.send(i, some(2, i))
        assert either.take().frames[0] == some(2, i)
    assert either.records == []
    assert caplog.text.count("was not connected within") == 1


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (threading.Thread, "start", RuntimeError("can't start new thread")),
        (select, "epoll", OSError(errno.EMFILE, "Too many open files")),
    ],
    ids=["thread", "descriptor"],
)
def test_a_channel_opens_once_there_is_a_thread_and_a_descriptor_for_it(
    pair: Pair,
    owner: object,
    name: str,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another one was to be opened before, when there was none."""

    def refuse(*_: object) -> None:
        raise error

    with monkeypatch.context() as without:
        without.setattr(owner, name, refuse)
        pair.mailboxes[0].notify(1, BulkOpen(1, generate_key()))
        eventually(lambda: str(error) in caplog.text)
    pair.send(7, some(2))
    assert pair.take().frames[0] == some(2)
    assert pair.sealed(0)["channels"] == 1


def test_of_many_threads_that_wait_for_a_channel_in_vain_one_says_so(
    either: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transport, "CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(transport, "bulk_endpoint", lambda endpoint, port: "tcp://127.0.0.1:1")
    with ThreadPoolExecutor(4) as threads:
        sent = [threads.submit(either.send, i, some(2)) for i in range(4)]
        for _ in sent:
            either.take()
    assert caplog.text.count("was not connected within") == 1
