"""Large frames in chunks: whole at the other end, in memory that is used again; and what bad peers can do."""

from __future__ import annotations

import ctypes
import gc
import itertools
import mmap
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.signals import called_within, ends, interrupted_in_c
from tests.support.waiting import eventually
from tests.transport.contract import Office, office_of
from tests.transport.test_contract import OverZmq
from zmqgrad.errors import ProtocolError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.service_thread import ServiceThread
from zmqgrad.transport import bulk
from zmqgrad.transport.bulk import BufferPool, Reassembler, inline, split, split_first
from zmqgrad.transport.flow_control import DEFAULT_INFLIGHT_BYTES
from zmqgrad.transport.local import MAX_PACKET_BYTES
from zmqgrad.transport.mailbox import ZmqMailbox
from zmqgrad.transport.shared_memory.packing import PreparedFrames, pack_for_socket
from zmqgrad.transport.shared_memory.segment import supported
from zmqgrad.transport.shared_memory.settings import ArenaSettings
from zmqgrad.transport.tap import Tapped, observer
from zmqgrad.wire.codec import encode
from zmqgrad.wire.messages import (
    Chunk,
    FrameBuffer,
    FrameSlice,
    Hello,
    LargeMessage,
    Manifest,
    MessageType,
    StoreSet,
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "CHUNK_BYTES", 1000)


@pytest.fixture
def service() -> Iterator[ServiceThread]:
    service = ServiceThread("w")
    service.start()
    yield service
    service.close()
    assert service.join(Deadline.after(10)) == []


def some_bytes(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def carry(assembly: Reassembler, load: PreparedFrames) -> tuple[Manifest | None, list[Any]]:
    """Send ``load`` in chunks; what the other side makes of it."""
    rest, parts = split(load, 1000)
    for chunk, data in parts:
        assembly.add(1, chunk, [bytearray(data)])
    if not parts:
        return load.manifest, list(load.frames)
    assert rest.manifest is not None
    return assembly.complete(1, rest.manifest, [bytearray(f) for f in rest.frames])


@given(sizes=st.lists(st.sampled_from([0, 1, 999, 1000, 1001, 4000, 4001, 8000, 12_345]), max_size=12))
def test_frames_arrive_as_they_were(sizes: list[int]) -> None:
    """Whether small ones are joined (many frames) or not."""
    frames = [some_bytes(n) for n in sizes]
    load = pack_for_socket(frames, sizes, (7,))
    manifest, came = carry(Reassembler(), load)
    assert [bytes(f) for f in came] == [bytes(f) for f in load.frames]
    if any(n > 1000 for n in sizes):
        assert manifest is not None
        assert manifest.released == (7,)
        assert all(p.segment == p.block == 0 for p in manifest.buffers)
        windows = [bytes(came[w.buffer])[w.offset : w.offset + w.size] for w in manifest.slices]
        assert windows == frames


def test_small_frames_are_not_split() -> None:
    load = PreparedFrames(None, [bytes(1000)])
    assert split(load, 1000) == (load, [])
    nothing = PreparedFrames(None, [])
    assert split(nothing, 0) == (nothing, [])


def test_without_frames_of_its_own_a_message_is_split_in_all() -> None:
    """As on one host, where a message is a packet."""
    load = PreparedFrames(None, [b"", b"x", some_bytes(50_000)])
    rest, parts = split(load, 0)
    assert rest.frames == []
    assert all(len(encode(inline(part), 1, 2, 3)) <= MAX_PACKET_BYTES for part in parts)
    assembly = Reassembler()
    for part in parts:
        assembly.add(1, inline(part), [])
    assert rest.manifest is not None
    _, whole = assembly.complete(1, rest.manifest, [])
    assert list(map(bytes, whole)) == [b"", b"x", some_bytes(50_000)]


@given(st.integers(1, 100_000))
def test_a_first_frame_in_chunks_is_put_together(size: int) -> None:
    first = bytearray(some_bytes(size))
    large, parts = split_first(first, 1000)
    assembly = Reassembler()
    for part in parts:
        assembly.add(1, inline(part), [])
    with pytest.raises(ProtocolError, match="missing"):
        assembly.take(2, large.stream, large.size)
    assert assembly.take(1, large.stream, large.size) == first
    with pytest.raises(ProtocolError, match="missing"):
        assembly.take(1, large.stream, large.size)


def test_buffers_are_reused_when_their_reader_is_done() -> None:
    assembly = Reassembler()
    _, (first,) = carry(assembly, PreparedFrames(None, [some_bytes(8000)]))
    _, (second,) = carry(assembly, PreparedFrames(None, [some_bytes(8001)]))
    assert bytes(first) == some_bytes(8000)
    assert assembly.buffers.kept() == 0
    first[:3] = b"own"  # it is the reader's
    part = first[5:10]
    del first
    gc.collect()
    assert assembly.buffers.kept() == 0  # a part is looked at still
    del part
    gc.collect()
    assert assembly.buffers.kept() == 8000
    _, (third,) = carry(assembly, PreparedFrames(None, [some_bytes(7000)]))
    assert assembly.buffers.kept() == 0
    assert [bytes(second), bytes(third)] == [some_bytes(8001), some_bytes(7000)]
    assembly.close()
    del second, third
    gc.collect()
    assert assembly.buffers.kept() == 0


def test_unused_buffers_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Any] = []

    class Later:
        def call_later(self, seconds: float, job: Any) -> None:
            jobs.append(job)

        def watch(self, fd: int, mask: int, handler: Any) -> None:
            pass

    buffers = BufferPool()
    buffers.start(Later())
    for _ in range(2):
        buffers.take(100)
        gc.collect()
    assert buffers.kept() == 100
    assert len(jobs) == 1
    jobs.pop()()  # it was used since
    assert buffers.kept() == 100
    jobs.pop()()
    assert (buffers.kept(), jobs) == (0, [])
    monkeypatch.setattr(bulk, "MAX_POOL_BYTES", 150)
    taken = [buffers.take(100) for _ in range(3)]
    taken.clear()
    gc.collect()
    assert buffers.kept() == 100


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
@pytest.mark.parametrize("one", [True, False])
def test_more_than_the_pool_may_keep_returns_to_the_system_soon(
    one: bool, service: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    monkeypatch.setattr(bulk, "MAX_POOL_BYTES", 1 << 20)
    buffers, size = BufferPool(), 64 << 20 if one else 1 << 20
    buffers.start(service)
    taken = [buffers.take(size) for _ in range((64 << 20) // size)]
    for each in taken:
        ctypes.memset(each, 1, size)
    before = resident()
    del each
    taken.clear()
    eventually(lambda: before - resident() > 32 << 20)


def test_a_signal_is_not_lost_where_a_buffer_is_returned() -> None:
    """As in shared memory: what its handler raised in a finalizer reached nobody."""
    buffers = BufferPool()
    kept = [buffers.take(100)]
    interrupted_in_c(kept.clear)
    assert not kept
    assert buffers.kept() == 100


@pytest.mark.parametrize(
    ("chunk", "frames"),
    [
        (Chunk(1, 0, 10), []),
        (Chunk(1, 0, 10), [bytearray(b"")]),
        (Chunk(1, 0, 10), [bytearray(b"a"), bytearray(b"b")]),
        (Chunk(1, 0, 10), [bytearray(11)]),
        (Chunk(1, 5, 10), [bytearray(5)]),
        (Chunk(1, 0, 0), [bytearray(1)]),
        (Chunk(1, 0, 1 << 62), [bytearray(1)]),
    ],
)
def test_a_chunk_that_cannot_be_right_is_refused(
    chunk: Chunk, frames: list[bytearray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "MAX_STREAMS", 1)
    assembly = Reassembler()
    with pytest.raises(ProtocolError, match="of worker 3"):
        assembly.add(3, chunk, frames)
    assembly.add(3, Chunk(2, 0, 10), [bytearray(5)])  # there is room: nothing of the other was kept


@pytest.mark.parametrize("following", [Chunk(1, 0, 10), Chunk(1, 4, 10), Chunk(1, 5, 11), Chunk(1, 6, 10)])
def test_a_chunk_that_does_not_follow_ends_its_frame(following: Chunk) -> None:
    assembly = Reassembler()
    assembly.add(3, Chunk(1, 0, 10), [bytearray(5)])
    with pytest.raises(ProtocolError, match="5 of 10 bytes were received"):
        assembly.add(3, following, [bytearray(5)])
    with pytest.raises(ProtocolError, match="missing"):
        assembly.complete(3, Manifest((FrameBuffer(0, 1, 0, 10),), (FrameSlice(0, 0, 10),)), [])


def test_a_message_with_missing_chunks_is_refused() -> None:
    assembly = Reassembler()
    manifest = Manifest((FrameBuffer(0, 1, 0, 10),), (FrameSlice(0, 0, 10),))
    assembly.add(3, Chunk(1, 0, 10), [bytearray(9)])
    for peer in (4, 3, 3):  # of another; in part; and then no more at all
        with pytest.raises(ProtocolError, match="missing"):
            assembly.complete(peer, manifest, [])
    assembly.add(3, Chunk(1, 0, 9), [bytearray(9)])
    with pytest.raises(ProtocolError, match="missing"):  # another size
        assembly.complete(3, manifest, [])


class NoMemory:
    """In the place of mappings."""

    def __init__(self, *_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")


def test_who_takes_a_frame_is_told_that_there_was_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all frames of its message nothing is kept."""
    assembly = Reassembler()
    assembly.add(3, Chunk(1, 0, 10), [bytearray(10)])
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", NoMemory)
        assembly.add(3, Chunk(2, 0, 10), [bytearray(5)])
    assembly.add(3, Chunk(2, 5, 10), [bytearray(5)])
    assembly.add(3, Chunk(3, 0, 10), [bytearray(10)])
    buffers = tuple(FrameBuffer(0, stream, 0, 10) for stream in (1, 2, 3))
    with pytest.raises(MemoryError, match="no memory for 10 bytes that worker 3 has sent"):
        assembly.complete(3, Manifest(buffers, ()), [])
    for stream in (1, 2, 3):
        with pytest.raises(ProtocolError, match="missing"):
            assembly.take(3, stream, 10)


def test_a_peer_cannot_begin_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "MAX_STREAMS", 3)
    assembly = Reassembler()
    for n in range(3):
        assembly.add(3, Chunk(n, 0, 10), [bytearray(5)])
    assembly.add(4, Chunk(9, 0, 10), [bytearray(5)])
    with pytest.raises(ProtocolError, match="more than 3"):
        assembly.add(3, Chunk(4, 0, 10), [bytearray(5)])
    assembly.forget(3)
    assembly.add(3, Chunk(5, 0, 10), [bytearray(5)])
    for peer, number in ((3, 5), (4, 9)):  # these are kept, and can be completed
        assembly.add(peer, Chunk(number, 5, 10), [bytearray(5)])
        assembly.complete(peer, Manifest((FrameBuffer(0, number, 0, 10),), (FrameSlice(0, 0, 10),)), [])
    for n in range(3):
        with pytest.raises(ProtocolError, match="missing"):
            assembly.add(3, Chunk(n, 5, 10), [bytearray(5)])


def test_beginning_a_frame_costs_the_same_however_many_are_incomplete() -> None:
    """Else a peer stops the reading thread, with small messages."""
    assembly = Reassembler()

    def steps_of(stream: int) -> int:
        events: list[str] = []
        sys.setprofile(lambda frame, event, arg: events.append(event))
        try:
            assembly.add(3, Chunk(stream, 0, 10), [bytearray(5)])
        finally:
            sys.setprofile(None)
        return len(events)

    first = steps_of(1)
    for stream in range(2, 1000):
        assembly.add(3, Chunk(stream, 0, 10), [bytearray(5)])
    assert steps_of(1000) < 2 * first


def test_a_signal_handler_may_take_memory_while_its_thread_does() -> None:
    def at_every_moment() -> None:
        for number in itertools.count(1):
            pool, taken = BufferPool(), list[Any]()
            pool.empty(1 << 20)  # which is free again
            is_last = not called_within(
                lambda: taken.append(pool.empty(1 << 20)),  # noqa: B023
                lambda: taken.append(pool.empty(1 << 20)),  # noqa: B023
                number,
            )
            for index, view in enumerate(taken):
                view[0] = index
            assert [view[0] for view in taken] == list(range(len(taken)))
            pool.close()
            if is_last:
                return

    assert ends(at_every_moment)


# ---- in a mailbox ----------------------------------------------------------------------------------------


@pytest.fixture(params=["ipc", "tcp"])
def office(request: pytest.FixtureRequest) -> Iterator[Office]:
    with office_of(OverZmq(request.param)) as opened:
        yield opened


def test_a_message_arrives_though_there_is_no_memory_for_its_frames(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read them is an error; messages after it are whole."""
    a, b = office.pair()
    large = some_bytes((1 << 20) + 1)
    for n in range(3):
        with monkeypatch.context() as patch:
            if n == 1:
                patch.setattr(mmap, "mmap", NoMemory)
            a.mailbox.send(1, StoreSet("key", b"value"), n, [large, b"more"])
            (inbound,) = b.take()
        assert inbound.envelope.message_id == n
        if n != 1:
            assert list(map(bytes, inbound.frames)) == [large, b"more"]
            continue
        with pytest.raises(MemoryError, match="no memory for 1048577 bytes that worker 0 has sent"):
            inbound.frames[1]
        assert b.mailbox.statistics()["malformed"] == 0


class SmallArenas(OverZmq):
    """Mailboxes with little shared memory."""

    def __init__(self) -> None:
        super().__init__("ipc")

    def open(self, name: str, worker_id: int) -> ZmqMailbox:
        return ZmqMailbox(name, worker_id, tcp_host=None, arena=ArenaSettings(256 << 10, threshold=1))


@pytest.mark.skipif(not supported(), reason="this system has no sealed shared memory")
def test_a_message_for_which_there_is_no_memory_releases_what_it_is_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its frames are lost, but not the memory of messages before it."""
    with office_of(SmallArenas()) as office:
        a, b = office.pair()
        b.mailbox.send(0, StoreSet("key", b"value"), 1, [some_bytes(100_000)])
        received = a.take()
        assert b.mailbox.statistics()["arena"]["blocks_leased"] == 1
        with monkeypatch.context() as patch:
            patch.setattr(mmap, "mmap", NoMemory)
            received.clear()
            a.mailbox.send(1, StoreSet("key", b"value"), 2, [some_bytes((1 << 20) + 1)])
            (inbound,) = b.take()
        assert b.mailbox.statistics()["arena"]["blocks_leased"] == 0
        with pytest.raises(MemoryError):
            inbound.frames[0]


def test_a_message_with_large_frames_is_one_message(office: Office) -> None:
    a, b = office.pair()
    shown: list[MessageType] = []

    def tap(tapped: Tapped) -> None:
        shown.append(MessageType(tapped.envelope.type))

    b.mailbox.tap = observer(tap)
    frames = [some_bytes(n) for n in (10, 5000, 3000, 1 << 20)]
    for n in range(3):
        a.mailbox.send(1, StoreSet("key", b"value"), n, frames)
        (inbound,) = b.take()
        assert [bytes(f) for f in inbound.frames] == frames
        assert sum(map(len, frames)) < inbound.socket_bytes < sum(map(len, frames)) + 1000
        assert a.mailbox.statistics()["inflight"]["bytes"].get(1, 0) <= DEFAULT_INFLIGHT_BYTES
    assert shown == [MessageType.STORE_SET] * 3
    sent, received = a.mailbox.statistics(), b.mailbox.statistics()
    assert (
        sent["sent_by_path"]["frames"] == received["received_by_path"]["frames"] == 3 * sum(map(len, frames))
    )
    del inbound


def test_a_chunk_of_nothing_costs_a_counter(office: Office) -> None:
    a, b = office.pair()
    a.mailbox.send(1, Chunk(5, 17, 20, b"abc"), 0)
    a.mailbox.send(1, LargeMessage(9, 100), 0)
    a.mailbox.send(1, Hello("x"), 1)
    a.mailbox.send(1, Hello("x"), 2, [b"more"])
    b.take(2)
    assert b.mailbox.statistics()["malformed"] == 2


def test_large_messages_within_one_another_cost_a_counter(office: Office) -> None:
    """So many of them exceeded the stack, which was logged at length and not counted."""
    a, b = office.pair()
    content = bytes(encode(Hello("x"), 0, 1, 0))
    for stream in range(1, 600):
        a.mailbox.send(1, Chunk(stream, 0, len(content), content), 0)
        large = LargeMessage(stream, len(content))
        content = bytes(encode(large, 0, 1, 0))
    a.mailbox.send(1, large, 0)
    a.mailbox.send(1, Hello("x"), 1)
    b.take(1)
    assert b.mailbox.statistics()["malformed"] == 1


# ---- frames that are passed on ---------------------------------------------------------------------------


def test_a_frame_of_shared_memory_is_assembled_in_shared_memory() -> None:
    array = (ctypes.c_char * 10)()
    asked = []

    def allocate(size: int, deadline: Deadline) -> Any:
        asked.append(size)
        return array if size == 10 else "full"

    assembly = Reassembler(allocate)
    for stream, size, shared in [(1, 10, True), (2, 11, True), (3, 10, False)]:
        assembly.add(3, Chunk(stream, 0, size, shared=shared), [bytearray(b"x" * size)])
        assert bytes(assembly.take(3, stream, size)) == b"x" * size
    assert bytes(array) == b"x" * 10
    assert asked == [10, 11]


def test_chunks_tell_that_their_frame_is_of_shared_memory() -> None:
    array = (ctypes.c_char * 10)()
    array.lease = object()  # as the arena marks its own
    frames = [memoryview(array).cast("B"), memoryview(bytearray(10))]
    _, chunks = split(PreparedFrames(None, frames), 4)
    assert [chunk.shared for chunk, _ in chunks] == [True] * 3 + [False] * 3
