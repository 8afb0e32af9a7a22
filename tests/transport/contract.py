"""What every mailbox must do: one suite, run over each implementation (see test_contract.py).

Each test works through an :class:`Office`, which opens mailboxes of one kind, collects what arrives, and
closes everything at the end, insisting that all threads have ended.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Protocol

import pytest

from tests.support.waiting import eventually
from zmqgrad.errors import ClosedError, ProtocolError, UnknownPeerError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.base import Inbound, Mailbox, PeerAddress, PeerEnd, ReplyChannel
from zmqgrad.transport.tap import Tapped, observer
from zmqgrad.wire.codec import encode
from zmqgrad.wire.messages import Hello, MessageType, RRefAck, StoreListKeys, StoreSet

SMALL = 64 << 10
"""Frames up to so many bytes are the sender's again once send has returned; larger ones are handed over."""

HELLO = Hello("x")
CALL = StoreSet("key", b"value")


class Kind(Protocol):
    """One implementation."""

    def open(self, name: str, worker_id: int) -> Mailbox:
        """A new mailbox, bound but not started."""
        ...

    def send_raw(self, mailbox: Mailbox, frames: Sequence[bytes]) -> None:
        """Put ``frames`` before ``mailbox``, as a stranger on the port would."""
        ...

    def close(self) -> None:
        """Close what :meth:`send_raw` opened."""
        ...


def acquire(mailbox: Mailbox, peer: int) -> ReplyChannel | None:
    """A reply channel of ``mailbox``, if one is free."""
    held: list[ReplyChannel] = []
    return held[0] if mailbox.acquire_channel(peer, held) else None


class Box:
    """A mailbox and what arrived in it."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.arrived: SimpleQueue[Inbound] = SimpleQueue()
        self.events: SimpleQueue[Inbound | PeerEnd] = SimpleQueue()
        """Messages and ends in their order, if the box was opened with ``ends``."""

    def drop(self) -> None:
        """Drop messages that were not read: their frames may be shared memory."""
        for queue in (self.arrived, self.events):
            while not queue.empty():
                queue.get_nowait()

    def take(self, count: int = 1) -> list[Inbound]:
        """The next ``count`` messages."""
        return [self.arrived.get(timeout=20) for _ in range(count)]

    def take_until_end(self, peer: int) -> tuple[list[int], str]:
        """The ids of the messages that arrive from ``peer`` before its end, and the reason of that."""
        ids: list[int] = []
        while True:
            event = self.events.get(timeout=20)
            if isinstance(event, PeerEnd):
                assert event.peer == peer
                return ids, event.reason
            if event.envelope.source == peer:
                ids.append(event.envelope.message_id)

    def nothing_more(self) -> bool:
        """Has everything that arrived been taken?"""
        try:
            self.arrived.get_nowait()
        except Empty:
            return True
        return False


class Office:
    """Opens mailboxes of one kind, tells them of one another, and closes them."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.known: dict[int, Mailbox] = {}
        self.looked_up: list[int] = []
        self._opened: list[Box] = []

    def open(
        self,
        worker_id: int,
        handler: Callable[[Inbound], None] | None = None,
        start: bool = True,
        ends: bool = False,
    ) -> Box:
        """A mailbox that collects what arrives, or hands it to ``handler``; with ``ends``, also the ends."""
        box = Box(self.kind.open(f"w{worker_id}", worker_id))
        self._opened.append(box)
        self.known[worker_id] = box.mailbox
        if ends:
            box.mailbox.start(handler or box.events.put, self.resolve, on_end=box.events.put)
        elif start:
            box.mailbox.start(handler or box.arrived.put, self.resolve)
        return box

    def resolve(self, peer: int) -> PeerAddress:
        """Where ``peer`` is."""
        self.looked_up.append(peer)
        if peer not in self.known:
            raise UnknownPeerError(f"nobody knows worker {peer}")
        return PeerAddress(self.known[peer].endpoints, self.known[peer].incarnation)

    def pair(self) -> tuple[Box, Box]:
        """Mailboxes 0 and 1."""
        return self.open(0), self.open(1)

    def pair_with_ends(self) -> tuple[Box, Box]:
        """Mailboxes 0 and 1, which know one another, and collect messages and ends in order."""
        a, b = self.open(0, ends=True), self.open(1, ends=True)
        a.mailbox.send(1, HELLO, 0)
        assert isinstance(b.events.get(timeout=20), Inbound)
        b.mailbox.send(0, HELLO, 0)
        assert isinstance(a.events.get(timeout=20), Inbound)
        return a, b

    def close(self) -> None:
        """Close all, and see them end."""
        self.kind.close()
        for box in self._opened:
            box.mailbox.close()
        assert [name for b in self._opened for name in b.mailbox.join(Deadline.after(10))] == []
        for box in self._opened:
            box.drop()


@contextmanager
def office_of(kind: Kind) -> Iterator[Office]:
    """An office that is closed at the end."""
    office = Office(kind)
    try:
        yield office
    finally:
        office.close()


def content(inbound: Inbound) -> list[bytes]:
    """The frames' bytes."""
    return [bytes(f) for f in inbound.frames]


def is_about(size: int, least: int, parts: int = 1) -> bool:
    """Is ``size`` that of a message of ``least`` bytes? Locally each part has a small header of its own."""
    return least <= size <= least + 150 * parts


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run ``work(i)`` in ``count`` threads at once; raise what one of them raised."""
    start = threading.Barrier(count)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            start.wait(20)
            work(i)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(40)
    if errors:
        raise errors[0]


class MailboxContract:
    """Derive, and give a fixture ``kind``."""

    @pytest.fixture
    def office(self, kind: Kind, caplog: pytest.LogCaptureFixture) -> Iterator[Office]:
        with office_of(kind) as office:
            yield office
        assert "handling an event of a connection failed" not in caplog.text

    # ---- what arrives ------------------------------------------------------------------------------------

    def test_a_message_arrives_as_it_was_sent(self, office: Office) -> None:
        a, b = office.pair()
        a.mailbox.send(1, CALL, 99, [b"tensor"])
        (inbound,) = b.take()
        assert inbound.message == CALL
        assert inbound.envelope[:5] == (MessageType.STORE_SET, 0, a.mailbox.incarnation, 99, 0)
        assert content(inbound) == [b"tensor"]
        assert is_about(inbound.size, len(encode(CALL, 0, a.mailbox.incarnation, 99)) + 6)

    @pytest.mark.parametrize(
        "frames",
        [
            pytest.param([], id="none"),
            pytest.param([b""], id="one empty"),
            pytest.param([b"", b"", b"x", b""], id="empty among others"),
            pytest.param(
                [bytes([n % 251]) * n for n in (1, 2, 3, 255, 256, 257, 8191, 65537)], id="odd sizes"
            ),
            pytest.param([b"%d" % n for n in range(2000)], id="very many"),
            pytest.param([bytes(range(256)) * (10 << 12)], id="10 MB"),
            pytest.param([b"a", bytes(3 << 20), b"", bytes(1 << 20), b"z"], id="large and small"),
        ],
    )
    def test_frames_arrive_intact(self, office: Office, frames: list[bytes]) -> None:
        a, b = office.pair()
        for message_id in (1, 2):
            a.mailbox.send(1, HELLO, message_id, frames)
        for inbound in b.take(2):
            assert content(inbound) == frames

    def test_each_message_arrives_once(self, office: Office) -> None:
        a, b = office.pair()
        for i in range(500):
            a.mailbox.send(1, HELLO, i, [b"x" * (i % 7 * 20_000)] if i % 3 else ())
        assert sorted(inbound.envelope.message_id for inbound in b.take(500)) == list(range(500))
        assert b.nothing_more()

    @pytest.mark.parametrize("cls", [bytes, bytearray, memoryview])
    def test_any_buffer_can_be_sent(self, office: Office, cls: Callable[[bytes], bytes]) -> None:
        a, b = office.pair()
        a.mailbox.send(1, HELLO, 1, [cls(b"small"), cls(bytes(1 << 20)), memoryview(b"..part..")[2:6]])
        assert content(b.take()[0]) == [b"small", bytes(1 << 20), b"part"]

    def test_received_frames_are_writable_copies(self, office: Office) -> None:
        """Frames can be written to, and outlive the handler, the sender and the mailbox."""
        a, b = office.pair()
        sent = [bytearray(b"a" * n) for n in (1, 100, SMALL)]
        large = bytes(1 << 20)
        a.mailbox.send(1, HELLO, 1, [*sent, large])
        for frame in sent:
            frame[:] = b"b" * len(frame)
        (inbound,) = b.take()
        b.mailbox.close()
        assert b.mailbox.join(Deadline.after(10)) == []
        for arrived, frame in zip(inbound.frames, sent, strict=False):
            view = memoryview(arrived)
            assert bytes(view) == b"a" * len(frame)
            view[:] = b"c" * len(frame)
            assert bytes(arrived) == b"c" * len(frame)
        view = memoryview(inbound.frames[3])
        view[:3] = b"new"
        assert bytes(inbound.frames[3][:4]) == b"new\0"
        assert large == bytes(1 << 20)

    def test_a_frame_sent_to_several_is_each_ones_own(self, office: Office) -> None:
        a, b, c = office.open(0), office.open(1), office.open(2)
        for size in (100, 1 << 20):
            frame = bytes(size)
            for peer in (1, 2, 0):
                a.mailbox.send(peer, HELLO, 1, [frame])
            views = [memoryview(box.take()[0].frames[0]) for box in (a, b, c)]
            for i, view in enumerate(views):
                view[:1] = bytes([i + 1])
            assert [v[0] for v in views] == [1, 2, 3]
            assert frame == bytes(size)

    def test_a_handled_message_is_not_kept_alive(self, office: Office) -> None:
        """An idle receiver does not keep the last message: its memory may be gigabytes."""
        a, b = office.pair()
        a.mailbox.send(1, HELLO, 1, [bytes(1 << 20)])
        (inbound,) = b.take()
        # References of the frames and of the call itself.
        eventually(lambda: sys.getrefcount(inbound.frames[0]), lambda references: references <= 2)

    # ---- who sends ---------------------------------------------------------------------------------------

    def test_a_mailbox_can_send_to_itself(self, office: Office) -> None:
        a = office.open(5)
        a.mailbox.send(5, HELLO, 1, [b"me"])
        (inbound,) = a.take()
        assert (inbound.envelope.source, content(inbound)) == (5, [b"me"])

    def test_all_mailboxes_send_to_all(self, office: Office) -> None:
        count, each = 6, 20
        boxes = [office.open(i) for i in range(count)]
        for n in range(each):
            for box in boxes:
                for peer in range(count):
                    box.mailbox.send(peer, HELLO, n, [b"%d" % peer])
        for i, box in enumerate(boxes):
            inbounds = box.take(count * each)
            for source in range(count):
                mine = [x for x in inbounds if x.envelope.source == source]
                assert sorted(x.envelope.message_id for x in mine) == list(range(each))
                assert all(content(x) == [b"%d" % i] for x in mine)

    def test_threads_that_send_at_once_do_not_mix(self, office: Office) -> None:
        """Each message has several frames that must stay together, and arrives once."""
        a, b = office.pair()
        threads, each = 8, 100

        def send(i: int) -> None:
            for n in range(each):
                a.mailbox.send(1, HELLO, i << 16 | n, [b"%d" % i, b"%d" % n, bytes([i]) * (n * 100)])

        in_threads(threads, send)
        seen: dict[int, list[int]] = {i: [] for i in range(threads)}
        for inbound in b.take(threads * each):
            i, n = inbound.envelope.message_id >> 16, inbound.envelope.message_id & 0xFFFF
            assert content(inbound) == [b"%d" % i, b"%d" % n, bytes([i]) * (n * 100)]
            seen[i].append(n)
        assert {i: sorted(numbers) for i, numbers in seen.items()} == {
            i: list(range(each)) for i in range(threads)
        }

    def test_the_first_messages_of_many_threads_share_a_connection(self, office: Office) -> None:
        a, b = office.pair()
        in_threads(8, lambda i: a.mailbox.send(1, HELLO, i))
        assert sorted(x.envelope.message_id for x in b.take(8)) == list(range(8))
        assert a.mailbox.statistics()["peers"] == 1

    def test_a_handler_may_reply(self, office: Office) -> None:
        rounds = 300
        done = threading.Event()

        def back(inbound: Inbound) -> None:
            office.known[1].send(0, RRefAck(), inbound.envelope.message_id, inbound.frames)

        def forth(inbound: Inbound) -> None:
            if inbound.envelope.message_id == rounds:
                done.set()
            else:
                office.known[0].send(1, HELLO, inbound.envelope.message_id + 1, inbound.frames)

        a = office.open(0, forth)
        office.open(1, back)
        a.mailbox.send(1, HELLO, 0, [b"ball"])
        assert done.wait(20)

    # ---- whom they know ----------------------------------------------------------------------------------

    def test_a_peer_is_looked_up_at_the_first_message_and_once(self, office: Office) -> None:
        a, b = office.pair()
        assert office.looked_up == []
        for i in range(5):
            a.mailbox.send(1, HELLO, i)
        b.take(5)
        assert office.looked_up.count(1) == 1  # b may have looked up a, to acknowledge

    def test_an_unknown_peer_is_an_error_and_may_become_known(self, office: Office) -> None:
        a = office.open(0)
        with pytest.raises(UnknownPeerError, match="worker 1"):
            a.mailbox.send(1, HELLO, 1)
        b = office.open(1)
        a.mailbox.send(1, HELLO, 2)
        assert b.take()[0].envelope.message_id == 2

    def test_a_peer_without_an_address_that_can_be_reached(self, office: Office) -> None:
        a = office.open(0, start=False)
        a.mailbox.start(lambda _: None, lambda _: PeerAddress(()))
        with pytest.raises(UnknownPeerError):
            a.mailbox.send(1, HELLO, 1)

    def test_before_start_no_peer_is_known(self, office: Office) -> None:
        a = office.open(0, start=False)
        with pytest.raises(UnknownPeerError, match="not started"):
            a.mailbox.send(1, HELLO, 1)

    def test_messages_from_before_the_start_are_delivered_after_it(self, office: Office) -> None:
        a, b = office.open(0), office.open(1, start=False)
        for i in range(3):
            a.mailbox.send(1, HELLO, i, [b"early"])
        b.mailbox.start(b.arrived.put, office.resolve)
        assert [x.envelope.message_id for x in b.take(3)] == [0, 1, 2]

    # ---- what goes wrong ---------------------------------------------------------------------------------

    def test_a_handler_that_fails_costs_one_message(
        self, office: Office, caplog: pytest.LogCaptureFixture
    ) -> None:
        got: SimpleQueue[int] = SimpleQueue()

        def handler(inbound: Inbound) -> None:
            if inbound.envelope.message_id % 2:
                raise ZeroDivisionError("in the handler")
            got.put(inbound.envelope.message_id)

        a = office.open(0)
        office.open(1, handler)
        with caplog.at_level(logging.ERROR):
            for i in range(6):
                a.mailbox.send(1, HELLO, i)
            assert sorted(got.get(timeout=20) for _ in range(3)) == [0, 2, 4]
            a.mailbox.send(1, HELLO, 6)
            assert got.get(timeout=20) == 6
        assert len([r for r in caplog.records if r.exc_info]) == 3

    @pytest.mark.parametrize(
        "frames",
        [
            pytest.param([b""], id="empty"),
            pytest.param([b"", b"", b""], id="empty frames"),
            pytest.param([b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"], id="http"),
            pytest.param([bytes(encode(HELLO, 0, 1, 1))[:-1]], id="cut short"),
            pytest.param([bytes(encode(HELLO, 0, 1, 1)) + b"?", b"frame"], id="too long"),
            pytest.param([b"zg\x01" + bytes(encode(HELLO, 0, 1, 1))[3:]], id="of another version"),
            pytest.param([b"zg\x04\xff\xff" + bytes(59) + b"\x90"], id="of no known type"),
            pytest.param([b"\xff" * (1 << 20), b"\xff" * 100], id="a megabyte of noise"),
        ],
    )
    def test_garbage_costs_a_counter(
        self, office: Office, frames: list[bytes], caplog: pytest.LogCaptureFixture
    ) -> None:
        """P5 of docs/guarantees.md."""
        a, b = office.pair()
        a.mailbox.send(1, HELLO, 1)
        b.take()
        office.kind.send_raw(b.mailbox, frames)
        office.kind.send_raw(b.mailbox, [bytes(encode(CALL, 9, 9, 9))])  # behind it, from the same
        assert b.take()[0].message == CALL
        a.mailbox.send(1, HELLO, 2)
        assert b.take()[0].envelope.message_id == 2
        assert b.mailbox.statistics()["malformed"] == 1
        assert "malformed" in caplog.text

    def test_a_message_that_cannot_be_encoded_leaves_the_connection_usable(self, office: Office) -> None:
        a, b = office.pair()
        with pytest.raises(ProtocolError, match="StoreListKeys"):
            a.mailbox.send(1, StoreListKeys("\ud800"), 1)
        a.mailbox.send(1, HELLO, 2)
        assert b.take()[0].envelope.message_id == 2

    def test_an_invalid_frame_leaves_the_connection_usable(self, office: Office) -> None:
        """Half a message must not stay in the pipe, for what is sent next would be taken for its end."""
        a, b = office.pair()
        with pytest.raises(TypeError):
            a.mailbox.send(1, HELLO, 1, [b"good", 5])  # type: ignore[list-item]
        a.mailbox.send(1, HELLO, 2, [b"whole"])
        (inbound,) = b.take()
        assert (inbound.envelope.message_id, content(inbound)) == (2, [b"whole"])

    def test_sending_to_a_closed_mailbox_neither_fails_nor_waits(self, office: Office) -> None:
        a, b = office.pair()
        a.mailbox.send(1, HELLO, 1)
        b.take()
        b.mailbox.close()
        assert b.mailbox.join(Deadline.after(10)) == []
        try:
            for i in range(50):
                a.mailbox.send(1, HELLO, i, [bytes(100_000)])
        except ClosedError:  # where it is known by now that its process has closed it
            pass
        assert b.nothing_more()

    # ---- the tap -----------------------------------------------------------------------------------------

    def test_the_tap_sees_both_directions(self, office: Office) -> None:
        a, b = office.pair()
        seen: SimpleQueue[Tapped] = SimpleQueue()
        a.mailbox.tap = b.mailbox.tap = observer(seen.put)
        a.mailbox.send(1, HELLO, 3, [b"12345", b""])
        b.take()
        out, into = sorted((seen.get(timeout=20) for _ in range(2)), key=lambda t: not t.outgoing)
        assert (out.outgoing, out.peer, into.outgoing, into.peer) == (True, 1, False, 0)
        assert out.envelope[:5] == into.envelope[:5] == (MessageType.HELLO, 0, a.mailbox.incarnation, 3, 0)
        assert out.message == into.message == HELLO
        assert out.size == into.size
        assert is_about(out.size, len(encode(HELLO, 0, a.mailbox.incarnation, 3)) + 5)
        a.mailbox.tap = b.mailbox.tap = None
        a.mailbox.send(1, HELLO, 4)
        b.take()
        assert seen.empty()

    def test_statistics_count_sent_and_received(self, office: Office) -> None:
        a, b = office.pair()
        sizes = [len(encode(HELLO, 0, a.mailbox.incarnation, i)) + 10 * i for i in range(4)]
        for i in range(4):
            a.mailbox.send(1, HELLO, i, [b"x" * 10] * i)
        b.take(4)
        sent, received = a.mailbox.statistics(), b.mailbox.statistics()
        assert sent["messages_sent"] == received["messages_received"] == 4
        assert is_about(sent["bytes_sent"], sum(sizes), 9)
        assert is_about(received["bytes_received"], sum(sizes), 9)
        assert sent["malformed"] == received["malformed"] == sent["messages_received"] == 0
        a.mailbox.end(1, "lost")
        assert a.mailbox.statistics()["messages_sent"] >= 4  # what was sent stays sent

    # ---- ends of links -----------------------------------------------------------------------------------

    def test_an_end_follows_everything_that_has_arrived(self, office: Office) -> None:
        a, b = office.pair_with_ends()
        for i in range(1, 200):
            b.mailbox.send(0, HELLO, i, [bytes(i % 5 * 20_000)] if i % 3 else ())
        assert b.mailbox.flush(Deadline.after(20))
        a.mailbox.end(1, "for a reason")
        assert a.take_until_end(1) == (list(range(1, 200)), "for a reason")

    def test_a_link_ends_once_and_nothing_follows(self, office: Office) -> None:
        a, b = office.pair_with_ends()
        c = office.open(2)
        in_threads(4, lambda i: a.mailbox.end(1, f"reason {i}"))
        assert a.take_until_end(1)[1] in {f"reason {i}" for i in range(4)}
        a.mailbox.end(1, "once more")
        with suppress(ClosedError):  # the peer learns it at some time
            for i in range(20):
                b.mailbox.send(0, HELLO, i, [b"late"])
        c.mailbox.send(0, HELLO, 7)
        event = a.events.get(timeout=20)
        assert isinstance(event, Inbound)
        assert event.envelope.source == 2
        b.take_until_end(0)
        assert a.events.empty()

    def test_nothing_is_sent_after_the_end(self, office: Office) -> None:
        a, _ = office.pair_with_ends()
        a.mailbox.end(1, "for a reason")
        a.take_until_end(1)
        office.looked_up.clear()
        for frames in ((), [b"x"], [bytes(1 << 20)]):
            with pytest.raises(ClosedError, match="for a reason"):
                a.mailbox.send(1, HELLO, 1, frames)
        assert office.looked_up == []

    def test_a_peer_that_was_never_sent_to_can_be_ended(self, office: Office) -> None:
        """By the number alone: it may be unreachable."""
        a = office.open(0, ends=True)
        a.mailbox.end(7, "not found")
        assert a.take_until_end(7) == ([], "not found")
        with pytest.raises(ClosedError):
            a.mailbox.send(7, HELLO, 1)

    def test_a_peer_that_was_ended_before_it_connects_is_told_so(self, office: Office) -> None:
        a, b = office.open(0, ends=True), office.open(1, ends=True)
        a.mailbox.end(1, "it was silent")
        assert a.take_until_end(1) == ([], "it was silent")
        with suppress(ClosedError):
            for i in range(20):
                b.mailbox.send(0, HELLO, i, [b"x"])
        ids, reason = b.take_until_end(0)
        assert ids == []
        assert "lost" in reason or "its process has ended" in reason
        assert a.events.empty()

    def test_the_end_of_one_leaves_others_alone(self, office: Office) -> None:
        a, _ = office.pair_with_ends()
        c = office.open(2, ends=True)
        a.mailbox.send(2, HELLO, 1)
        a.mailbox.end(1, "lost")
        a.take_until_end(1)
        a.mailbox.send(2, HELLO, 2, [bytes(1 << 20)])
        assert [c.events.get(timeout=20).envelope.message_id for _ in range(2)] == [1, 2]  # type: ignore[union-attr]
        c.mailbox.send(0, HELLO, 3)
        assert a.events.get(timeout=20).envelope.message_id == 3  # type: ignore[union-attr]

    def test_a_peer_learns_that_it_was_declared_lost(self, office: Office) -> None:
        a, b = office.pair_with_ends()
        for i in range(1, 6):
            a.mailbox.send(1, HELLO, i)
        a.mailbox.end(1, "it was silent")
        with suppress(ClosedError):
            b.mailbox.send(0, HELLO, 1)  # where nothing is told before it is asked
        ids, reason = b.take_until_end(0)
        assert ids == [1, 2, 3, 4, 5]
        assert "w0 has declared worker 1 lost: it was silent" in reason

    def test_ends_of_both_sides_at_once(self, office: Office) -> None:
        a, b = office.pair_with_ends()
        in_threads(2, lambda i: (a, b)[i].mailbox.end(1 - i, "lost"))
        for box, peer in ((a, 1), (b, 0)):
            assert "lost" in box.take_until_end(peer)[1]

    def test_ending_while_others_send(self, office: Office) -> None:
        """Messages may be lost, nothing else: they hear that it has ended, and no socket is left open."""
        a, b = office.pair_with_ends()

        def work(i: int) -> None:
            if i == 0:
                a.mailbox.end(1, "lost")
                return
            with pytest.raises(ClosedError):  # noqa: PT012 (whichever is the first after the end)
                while True:
                    a.mailbox.send(1, HELLO, 5, [b"x", b"y"])

        in_threads(3, work)
        assert a.take_until_end(1) == ([], "lost")
        with suppress(ClosedError):
            b.mailbox.send(0, HELLO, 1)
        assert set(b.take_until_end(0)[0]) <= {5}

    def test_a_goodbye_is_the_last_message(self, office: Office) -> None:
        a, b = office.pair_with_ends()
        for i in range(1, 100):
            a.mailbox.send(1, HELLO, i, [bytes(30_000)] if i % 10 == 0 else ())
        assert a.mailbox.flush(Deadline.after(20))
        a.mailbox.close("it has finished")
        assert b.take_until_end(0) == (list(range(1, 100)), "it has finished")
        with pytest.raises(ClosedError, match="it has finished"):
            b.mailbox.send(0, HELLO, 1)

    def test_a_goodbye_reaches_a_peer_to_which_nothing_was_sent(self, office: Office) -> None:
        a, b = office.open(0, ends=True), office.open(1, ends=True)
        a.mailbox.send(1, HELLO, 1)
        assert isinstance(b.events.get(timeout=20), Inbound)
        b.mailbox.close("it has finished")
        assert a.take_until_end(1) == ([], "it has finished")

    # ---- flushing ----------------------------------------------------------------------------------------

    def test_flush_waits_until_everything_has_left(self, office: Office) -> None:
        go, got = threading.Event(), SimpleQueue[int]()

        def slow(inbound: Inbound) -> None:
            go.wait(20)
            got.put(inbound.envelope.message_id)

        a = office.open(0)
        office.open(1, slow)
        assert a.mailbox.flush(Deadline.after(0))
        for i in range(3000):
            a.mailbox.send(1, HELLO, i)
        flushed: list[bool] = []
        flushing = threading.Thread(target=lambda: flushed.append(a.mailbox.flush(Deadline.after(20))))
        flushing.start()
        go.set()
        flushing.join(20)
        assert flushed == [True]
        a.mailbox.close()
        assert [got.get(timeout=20) for _ in range(3000)] == list(range(3000))

    # ---- large messages ----------------------------------------------------------------------------------

    def test_a_large_first_frame_arrives(self, office: Office) -> None:
        a, b = office.pair()
        for size, frames in ((100_000, []), (100_000, [b"x", bytes(20_000)]), (3_000_000, [b""]), (9, [])):
            message = StoreSet("key", bytes(range(256)) * (size // 256))
            a.mailbox.send(1, message, 5, frames)
            (inbound,) = b.take()
            assert inbound.message == message
            assert content(inbound) == frames
            assert inbound.envelope[:5] == (MessageType.STORE_SET, 0, a.mailbox.incarnation, 5, 0)
            del inbound

    @pytest.mark.parametrize("sizes", [[0], [1], [20_000], [3_000_000], [0, 1, 20_000, 3_000_000, 0]])
    def test_frames_of_any_size_arrive(self, office: Office, sizes: list[int]) -> None:
        a, b = office.pair()
        frames = [(b"%d." % size * size)[:size] for size in sizes]
        for message in (HELLO, StoreSet("key", bytes(100_000))):
            a.mailbox.send(1, message, 1, frames)
            (inbound,) = b.take()
            assert inbound.message == message
            assert content(inbound) == frames
            del inbound

    # ---- the end -----------------------------------------------------------------------------------------

    def test_after_close_nothing_is_sent(self, office: Office) -> None:
        a, b = office.pair()
        a.mailbox.send(1, HELLO, 1)
        b.take()
        a.mailbox.close()
        for peer in (1, 7):
            with pytest.raises(ClosedError, match="w0 is closed"):
                a.mailbox.send(peer, HELLO, 2)
        assert b.nothing_more()

    def test_close_and_join_leave_no_thread(self, office: Office) -> None:
        before = {t for t in threading.enumerate()}
        a, b = office.pair()
        names = {t.name for t in set(threading.enumerate()) - before}
        assert {"w0-receiver", "w1-receiver"} <= names
        a.mailbox.send(1, HELLO, 1)
        b.take()
        for box in (a, b):
            box.mailbox.close()
            box.mailbox.close()
            assert box.mailbox.join(Deadline.after(10)) == []
            assert box.mailbox.join(Deadline.after(10)) == []
        assert set(threading.enumerate()) <= before

    def test_an_unstarted_mailbox_can_be_closed(self, office: Office) -> None:
        a = office.open(0, start=False)
        a.mailbox.close()
        assert a.mailbox.join(Deadline.after(10)) == []

    def test_a_handler_may_close_its_mailbox(self, office: Office) -> None:
        closed = threading.Event()

        def handler(inbound: Inbound) -> None:
            office.known[1].close()
            closed.set()

        a, b = office.open(0), office.open(1, handler)
        a.mailbox.send(1, HELLO, 1)
        assert closed.wait(20)
        assert b.mailbox.join(Deadline.after(10)) == []

    def test_close_waits_for_no_handler_and_join_names_it(self, office: Office) -> None:
        entered, go = threading.Event(), threading.Event()

        def handler(inbound: Inbound) -> None:
            entered.set()
            go.wait(20)

        a, b = office.open(0), office.open(1, handler)
        a.mailbox.send(1, HELLO, 1)
        assert entered.wait(20)
        b.mailbox.close()
        assert b.mailbox.join(Deadline.after(0)) == ["w1-receiver"]
        go.set()
        assert b.mailbox.join(Deadline.after(10)) == []

    def test_close_while_others_send(self, office: Office) -> None:
        """They hear that it is closed, and nothing worse; and no socket is left open."""
        a, b = office.pair()
        a.mailbox.send(1, HELLO, 0)
        b.take()
        under_way = threading.Barrier(4)

        def work(i: int) -> None:
            if i == 0:
                under_way.wait(20)
                a.mailbox.close()
                return
            for n in range(5):
                a.mailbox.send(1, HELLO, n, [b"x", b"y"])
            under_way.wait(20)
            with pytest.raises(ClosedError):  # noqa: PT012 (whichever is the first after close)
                while True:
                    a.mailbox.send(1, HELLO, 5, [b"x", b"y"])

        in_threads(4, work)
        assert a.mailbox.join(Deadline.after(10)) == []


class KeepsOrder:
    """Of transports with one way to each peer: what a thread sends does not overtake what it sent before."""

    def test_messages_arrive_in_the_order_sent(self, office: Office) -> None:
        a, b = office.pair()
        for i in range(500):
            a.mailbox.send(1, HELLO, i, [b"x" * (i % 7 * 20_000)] if i % 3 else ())
        assert [inbound.envelope.message_id for inbound in b.take(500)] == list(range(500))

    def test_each_thread_keeps_its_order(self, office: Office) -> None:
        a, b = office.pair()
        threads, each = 8, 100

        def send(i: int) -> None:
            for n in range(each):
                a.mailbox.send(1, HELLO, i << 16 | n, [bytes([i]) * (n * 100)])

        in_threads(threads, send)
        seen: dict[int, list[int]] = {i: [] for i in range(threads)}
        for inbound in b.take(threads * each):
            seen[inbound.envelope.message_id >> 16].append(inbound.envelope.message_id & 0xFFFF)
        assert seen == {i: list(range(each)) for i in range(threads)}
