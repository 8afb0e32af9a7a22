"""Memory of devices between two exchanges: what goes which way, who owns what, and what bad peers can do."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transport.devices.stand_in import MB, StandIn, StandInFrame
from zmqgrad.errors import ProtocolError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.arena.segment import supported
from zmqgrad.transport.devices.borrowings import Block
from zmqgrad.transport.devices.exchange import DeviceExchange
from zmqgrad.wire.messages import (
    DeviceAnswer,
    DeviceOffer,
    DevicePiece,
    DeviceWithdrawal,
    Manifest,
    Message,
    Release,
)
from zmqgrad.wire.unwritten import written

pytestmark = pytest.mark.skipif(not supported(), reason="this system has no sealed shared memory")


class Side:
    """An exchange whose messages reach the other side at once; ``jobs`` wait until they are run."""

    def __init__(self, worker_id: int, limit: int = 16 * MB, may_wait: bool = False) -> None:
        self.id = worker_id
        self.port = StandIn(limit)
        self.other = self
        self.said: list[Message] = []
        self.jobs: list[Callable[[], None]] = []
        self.exchange = DeviceExchange(f"worker{worker_id}", self.port, self.send, lambda: may_wait)
        self.exchange.start(self)

    def call_later(self, seconds: float, job: Callable[[], None]) -> None:
        self.jobs.append(job)

    def run_jobs(self) -> None:
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            job()

    def send(self, peer: int, message: Message, message_id: int) -> None:
        """As a mailbox does it."""
        self.said.append(message)
        released = self.exchange.take_owed(peer)
        if released:
            self.other.exchange.open(self.id, (), through_bytes(Manifest(released_on_device=released))[1], [])
        if not isinstance(message, Release):
            assert isinstance(message, (DeviceOffer, DeviceAnswer, DeviceWithdrawal))
            raw = msgspec.msgpack.encode(message)
            task = self.other.exchange.heard(
                self.id, msgspec.msgpack.decode(raw, type=type(message)), message_id
            )
            if task is not None:
                task()

    def pass_on(self, frames: Sequence[Any], local: bool = True) -> tuple[Sequence[DevicePiece], list[Any]]:
        """Send ``frames``; which go from device to device, and what the other side sees."""
        pieces, rest = self.exchange.load(self.other.id, local, frames)
        pieces, _ = through_bytes(Manifest(on_device=pieces))
        got = self.other.exchange.open(self.id, pieces, (), [bytes(written(f)) for f in rest])
        return pieces, list(got)

    def warm(self, device: str = "gpu:0") -> None:
        """Let the other side open our memory."""
        self.pass_on([StandInFrame(b"warm", device)])

    @property
    def lent(self) -> int:
        return sum(each["blocks_lent"] for each in self.exchange.statistics()["lent"].values())


def through_bytes(manifest: Manifest) -> tuple[Sequence[DevicePiece], Sequence[int]]:
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest)
    return read.on_device, read.released_on_device


def copied(frame: Any) -> bytes:
    """What ``frame`` holds."""
    if not isinstance(frame, Block):
        return bytes(frame)
    tensor = bytearray(len(frame))
    frame.copy_to(tensor)
    return bytes(tensor)


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    a, b = Side(0), Side(1)
    a.other, b.other = b, a
    yield a, b
    a.exchange.close()
    b.exchange.close()


# ---- the way there ---------------------------------------------------------------------------------------


def test_the_first_goes_as_bytes_and_asks_and_the_next_from_device_to_device(
    sides: tuple[Side, Side],
) -> None:
    a, b = sides
    frame = StandInFrame(os.urandom(2000))
    pieces, got = a.pass_on([frame])
    assert (list(pieces), got) == ([], [frame.data])
    assert [type(m) for m in (*a.said, *b.said)] == [DeviceOffer, DeviceAnswer]
    pieces, got = a.pass_on([frame])
    assert [p.size for p in pieces] == [2000]
    assert copied(got[0]) == frame.data
    assert a.exchange.fallbacks == {"no answer yet": 1}
    assert (a.exchange.bytes_out, b.exchange.bytes_in) == (2000, 2000)
    assert b.port.opened_as_own == [True]  # as it is, in this test


def test_who_may_wait_does_so_and_the_first_goes_from_device_to_device() -> None:
    a, b = Side(0, may_wait=True), Side(1)
    a.other, b.other = b, a
    pieces, got = a.pass_on([StandInFrame(bytes(2 * MB))])
    assert len(pieces) == 1
    assert a.exchange.fallbacks == {}
    del got
    for side in (a, b):
        side.exchange.close()


@given(
    kinds=st.lists(st.tuples(st.sampled_from(["bytes", "gpu:0", "gpu:1"]), st.integers(1, 3000)), max_size=9)
)
def test_frames_of_all_kinds_arrive_in_their_order(kinds: list[tuple[str, int]]) -> None:
    a, b = Side(0), Side(1)
    a.other, b.other = b, a
    for device in ("gpu:0", "gpu:1"):
        a.warm(device)
    data = [os.urandom(size) for _, size in kinds]
    sent = [d if kind == "bytes" else StandInFrame(d, kind) for (kind, _), d in zip(kinds, data, strict=True)]
    pieces, got = a.pass_on(sent)
    assert [p.frame for p in pieces] == [n for n, (kind, _) in enumerate(kinds) if kind != "bytes"]
    assert [copied(f) for f in got] == data
    got.clear()
    b.run_jobs()
    assert a.lent == 0
    for side in (a, b):
        side.exchange.close()


def test_what_changes_after_it_was_sent_arrives_as_it_was(sides: tuple[Side, Side]) -> None:
    a, _ = sides
    a.warm()
    frame = StandInFrame(b"then" * 500)
    _, got = a.pass_on([frame])
    frame.data = b"now!" * 500
    assert copied(got[0]) == b"then" * 500


def test_to_itself(sides: tuple[Side, Side]) -> None:
    a, _ = sides
    a.other = a
    a.warm()
    pieces, got = a.pass_on([StandInFrame(b"mine" * 10)])
    assert pieces
    assert copied(got[0]) == b"mine" * 10
    assert a.port.opened_as_own == [True]


# ---- until when ------------------------------------------------------------------------------------------


def test_a_block_goes_back_when_the_device_has_copied_it(sides: tuple[Side, Side]) -> None:
    a, b = sides
    a.warm()
    _, got = a.pass_on([StandInFrame(bytes(2000))])
    assert not b.exchange.owes(0)
    a.port.busy = True
    copied(got[0])
    got.clear()
    gc.collect()
    for _ in range(3):
        b.run_jobs()  # each time it looks again
        assert not b.exchange.owes(0)
        assert a.lent == 1
    a.port.busy = False
    b.run_jobs()
    assert a.lent == 0
    assert [type(m) for m in b.said] == [DeviceAnswer, Release]
    assert b.jobs == []  # and it looks no more


def test_who_parts_waits_for_what_is_being_copied(sides: tuple[Side, Side]) -> None:
    a, b = sides
    a.warm()
    _, got = a.pass_on([StandInFrame(bytes(2000))])
    a.port.busy = True
    copied(got[0])
    got.clear()
    assert not b.exchange.owes(0)
    b.exchange.finish_copies(None)
    assert b.exchange.owes(0)
    a.exchange.finish_copies(Deadline.after(0.01))
    assert a.lent == 1  # one that gives nothing back is not waited for for ever
    giving = threading.Timer(0.01, b.run_jobs)
    giving.start()
    a.exchange.finish_copies(Deadline.after(20))
    assert a.lent == 0
    giving.join()


def test_a_block_goes_back_with_the_next_message(sides: tuple[Side, Side]) -> None:
    a, b = sides
    a.warm()
    _, got = a.pass_on([StandInFrame(bytes(2000))])
    copied(got[0])
    got.clear()
    assert b.exchange.owes(0)
    b.send(0, Release(), 0)
    assert a.lent == 0


def test_what_is_dropped_unread_goes_back_and_is_written_again_only_after_the_first_copy(
    sides: tuple[Side, Side],
) -> None:
    a, b = sides
    a.warm()
    a.port.busy = True
    _, got = a.pass_on([StandInFrame(b"1" * 2000)])
    got.clear()  # timed out, refused, or its handler failed
    b.run_jobs()
    assert a.lent == 0
    _, got = a.pass_on([StandInFrame(b"2" * 2000)])
    first, second = a.port.memories[0].events.values()
    assert second.after == (first,)
    a.port.busy = False
    got.clear()
    b.run_jobs()
    a.pass_on([StandInFrame(b"3" * 2000)])
    assert len(a.port.memories[0].events) == 2  # they are used again


def test_the_blocks_of_a_message_have_one_event_which_is_used_again_after_the_last_of_them(
    sides: tuple[Side, Side],
) -> None:
    a, b = sides
    a.warm()
    b.run_jobs()
    pieces, got = a.pass_on([StandInFrame(bytes(99)) for _ in range(3)])
    assert len({piece.ready for piece in pieces}) == 1
    memory = a.port.memories[0]
    del got[:2]
    b.run_jobs()
    a.pass_on([StandInFrame(bytes(99))])[1].clear()
    assert len(memory.events) == 2
    got.clear()
    b.run_jobs()
    a.pass_on([StandInFrame(bytes(99))])
    assert len(memory.events) == 2


def test_what_could_not_be_sent_comes_back(sides: tuple[Side, Side]) -> None:
    a, b = sides
    a.warm()
    b.warm()
    _, got = a.pass_on([StandInFrame(bytes(2000))])
    got.clear()
    pieces, _ = b.exchange.load(0, True, [StandInFrame(bytes(10)), b"bytes"])
    released = b.exchange.take_owed(0)
    assert (len(pieces), len(released)) == (1, 1)
    b.exchange.unload(0, pieces, released)
    assert b.lent == 0
    assert b.exchange.owes(0)


def test_an_error_of_the_device_while_writing_leaves_nothing_lent(sides: tuple[Side, Side]) -> None:
    a, _ = sides
    a.warm()
    a.warm("gpu:1")
    a.port.broken = True
    with pytest.raises(RuntimeError, match="misaligned"):
        a.exchange.load(1, True, [StandInFrame(bytes(9)), StandInFrame(bytes(9), "gpu:1")])
    assert a.lent == 0


def test_blocks_of_a_lost_peer_come_back_when_nothing_of_it_looks_at_them(sides: tuple[Side, Side]) -> None:
    a, b = sides
    a.warm()
    _, got = a.pass_on([StandInFrame(b"kept" * 500)])
    a.exchange.forget(1)  # given up; but it lives, and reads on
    assert a.lent == 1
    assert copied(got[0]) == b"kept" * 500
    b.exchange.forget(0)
    got.clear()
    b.run_jobs()
    gc.collect()
    a.exchange._release()
    assert a.lent == 0
    pieces, _ = a.pass_on([StandInFrame(b"anew")])  # it is asked anew
    assert not pieces
    pieces, _ = a.pass_on([StandInFrame(b"anew")])
    assert pieces


def test_at_the_end_the_counters_of_the_dead_are_lowered_and_those_of_the_living_are_not() -> None:
    a, dead, living = Side(0), Side(1), Side(2)
    dead.other = living.other = a
    for other in (dead, living):
        a.other = other
        a.warm()
    _, got = a.pass_on([StandInFrame(b"held" * 9)])
    dead.exchange.close()
    gc.collect()
    memory = a.port.memories[0]
    a.exchange.close()
    assert memory.closed
    assert memory.unshared == memory.shared[:1]
    assert copied(got[0]) == b"held" * 9
    living.exchange.close()


def test_memory_that_nobody_used_for_a_while_goes_back(sides: tuple[Side, Side]) -> None:
    a, b = sides
    a.warm()
    _, got = a.pass_on([StandInFrame(bytes(2000))])
    (trim,) = a.jobs
    memory = a.port.memories[0]
    for _ in range(3):
        trim()  # it is in use
        assert not memory.closed
    got.clear()
    b.run_jobs()
    a.pass_on([StandInFrame(bytes(2000))])[1].clear()
    b.run_jobs()
    trim()  # it was used since
    assert not memory.closed
    trim()
    assert memory.closed
    assert b.exchange.statistics()["segments_open"] == 0
    assert memory.unshared == memory.shared  # after the other has closed it
    assert a.exchange.statistics()["lent"]["gpu:0"]["segments"] == 0
    a.warm()  # and it is there again when it is wanted
    assert a.pass_on([StandInFrame(bytes(2000))])[0]


def test_memory_that_was_offered_and_not_yet_answered_for_stays(sides: tuple[Side, Side]) -> None:
    a, b = sides
    a.warm()
    (b_heard, b.exchange.heard) = (b.exchange.heard, lambda *_: None)  # type: ignore[method-assign]
    a.pass_on([StandInFrame(b"x")])[1].clear()
    b.run_jobs()
    third = Side(2)
    third.exchange.heard = lambda *_: None  # type: ignore[method-assign]
    a.other = third
    a.warm()  # offered to the third, who says nothing
    (trim, *_) = a.jobs
    for _ in range(3):
        trim()
    assert not a.port.memories[0].closed
    a.exchange.forget(2)
    b.exchange.heard = b_heard  # type: ignore[method-assign]
    a.other = b
    for _ in range(2):
        trim()
    assert a.port.memories[0].closed


# ---- the other way ---------------------------------------------------------------------------------------


def test_other_hosts_and_who_lends_nothing(sides: tuple[Side, Side]) -> None:
    a, _ = sides
    off = Side(3, limit=0)
    off.other = a
    for side, local, why in ((a, False, "other host"), (off, True, "off")):
        pieces, got = side.pass_on([StandInFrame(b"x" * 99), StandInFrame(b"y")], local)
        assert (list(pieces), got) == ([], [b"x" * 99, b"y"])
        assert side.exchange.fallbacks == {why: 2}
        assert side.said == []
    off.exchange.close()


def test_memory_that_cannot_be_shared_is_tried_once(sides: tuple[Side, Side]) -> None:
    """With expandable segments, say, or where the system has no CUDA IPC."""
    a, _ = sides
    a.port.unshareable = True
    for _ in range(3):
        assert a.pass_on([StandInFrame(b"x" * 99)]) == ((), [b"x" * 99])
    assert a.exchange.fallbacks == {"not shareable": 3}
    assert len(a.port.memories) == 1
    assert a.port.memories[0].closed
    assert a.exchange.statistics()["not_shareable"] == {"gpu:0": "operation not supported"}


def test_a_device_that_the_other_does_not_see(sides: tuple[Side, Side]) -> None:
    a, b = sides
    b.port.invisible = True
    for _ in range(3):
        assert not a.pass_on([StandInFrame(b"x" * 99)])[0]
    assert a.exchange.fallbacks == {"no answer yet": 1, "refused": 2}
    assert a.exchange.statistics()["refused_by"] == {"gpu:0": {1: "this process does not see that device"}}
    assert b.exchange.statistics()["segments_open"] == 0


def test_a_device_without_memory_to_spare(sides: tuple[Side, Side]) -> None:
    a, _ = sides
    a.port.full = True
    assert a.pass_on([StandInFrame(b"x" * 99)]) == ((), [b"x" * 99])
    a.port.full = False
    a.warm()
    assert a.pass_on([StandInFrame(b"x" * 99)])[0]
    assert a.exchange.fallbacks == {"no memory": 1, "no answer yet": 1}


def test_what_has_no_room_goes_as_bytes_until_there_is(sides: tuple[Side, Side]) -> None:
    a, b = sides
    a.warm()
    _, got = a.pass_on([StandInFrame(bytes(10 * MB))])
    assert not a.pass_on([StandInFrame(bytes(10 * MB))])[0]
    assert a.exchange.fallbacks["full"] == 1
    got.clear()
    b.run_jobs()
    assert a.pass_on([StandInFrame(bytes(10 * MB))])[0]


def test_blocks_of_two_devices_are_not_taken_for_one_another(sides: tuple[Side, Side]) -> None:
    a, b = sides
    for device in ("gpu:0", "gpu:1"):
        a.warm(device)
    _, got = a.pass_on([StandInFrame(b"0" * 99, "gpu:0"), StandInFrame(b"1" * 99, "gpu:1")])
    del got[0]
    b.run_jobs()
    lent = a.exchange.statistics()["lent"]
    assert {device: each["blocks_lent"] for device, each in lent.items()} == {"gpu:0": 0, "gpu:1": 1}
    assert not any(each["strange_releases"] for each in lent.values())


# ---- lies ------------------------------------------------------------------------------------------------

LIES = {
    "segment": [0, 7, (1 << 64) - 1],
    "offset": [1, 63, 16 * MB, 64 * MB, (1 << 63) - 1, (1 << 63) - 64],
    "size": [0, 64 * MB + 1, (1 << 63) - 1],
    "frame": [1, 2, (1 << 63) - 1],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in LIES.items() for v in values])
def test_a_piece_with_a_false_field_is_refused_and_leaves_no_block_in_use(
    field: str, value: int, sides: tuple[Side, Side]
) -> None:
    a, b = sides
    a.warm()
    pieces, _ = a.exchange.load(1, True, [StandInFrame(bytes(2000))])
    false = msgspec.structs.replace(pieces[0], **{field: value})
    with pytest.raises(ProtocolError, match="on a device"):
        b.exchange.open(0, (false,), (), [])
    gc.collect()
    assert b.exchange.statistics()["blocks_in_use"] == 0


def test_a_block_that_comes_twice_and_one_of_somebody_else(sides: tuple[Side, Side]) -> None:
    a, b = sides
    a.warm()
    pieces, _ = a.exchange.load(1, True, [StandInFrame(bytes(2000))])
    got = b.exchange.open(0, pieces, (), [])
    with pytest.raises(ProtocolError, match="came twice"):
        b.exchange.open(0, pieces, (), [])
    with pytest.raises(ProtocolError, match="never offered"):
        b.exchange.open(5, pieces, (), [])
    assert len(got) == 1


def test_who_releases_what_he_does_not_have_frees_nothing(sides: tuple[Side, Side]) -> None:
    a, _ = sides
    a.warm()
    pieces, _ = a.exchange.load(1, True, [StandInFrame(bytes(2000))])
    a.exchange.open(5, (), [pieces[0].block], [])
    a.exchange.open(1, (), [1 << 60], [])
    assert a.lent == 1


@pytest.mark.parametrize(
    "false",
    [{"handle": b"none"}, {"device": "another"}, {"page": {"inode": 1}}, {"page": {"nonce_at": 1 << 40}}],
)
def test_a_false_offer_is_answered_by_no(false: dict[str, Any], sides: tuple[Side, Side]) -> None:
    a, b = sides
    a.warm()
    offer = next(m for m in a.said if isinstance(m, DeviceOffer))
    if "page" in false:
        false = {"page": msgspec.structs.replace(offer.page, **false["page"])}
    b.said.clear()
    task = b.exchange.heard(0, msgspec.structs.replace(offer, **false), 99)
    assert task is not None
    task()
    assert isinstance(b.said[0], DeviceAnswer)
    assert not b.said[0].nonce
    assert b.said[0].why


def test_an_answer_to_nothing_and_one_without_proof(sides: tuple[Side, Side]) -> None:
    a, b = sides
    a.exchange.heard(1, DeviceAnswer(b"anything"), 1)
    b.exchange.heard = lambda *_: None  # type: ignore[method-assign]
    a.warm()
    a.exchange.heard(1, DeviceAnswer(bytes(16)), 1)
    assert not a.pass_on([StandInFrame(b"x")])[0]
    assert a.exchange.fallbacks["refused"] == 1
