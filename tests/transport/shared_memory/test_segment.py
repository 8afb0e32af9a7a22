"""Segments: what the system promises of them, and which ones are not mapped."""

from __future__ import annotations

import fcntl
import gc
import os
import weakref

import msgspec
import pytest

from tests.support.interpreter import run_python
from zmqgrad.transport.shared_memory.segment import NONCE_BYTES, MappedSegment, Segment, supported
from zmqgrad.wire.messages import ArenaOffer

pytestmark = pytest.mark.skipif(not supported(), reason="this system has no sealed shared memory")

SIZE = 1 << 20


def descriptors() -> set[str]:
    """The open descriptors of this process that are memory of ours."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if "zmqgrad" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(name)
        except FileNotFoundError:  # the one that listed them
            continue
    return found


def test_data_written_by_the_creator_is_read_by_the_reader() -> None:
    segment = Segment(SIZE)
    mapped = MappedSegment(segment.offer(1))
    assert mapped.nonce == segment.nonce
    for data in (b"bytes", bytearray(b"bytearray"), memoryview(b"read-only"), memoryview(bytearray(b"view"))):
        segment.write(4096, data)
        assert bytes(mapped.block(4096, len(data))) == bytes(data)
    block = mapped.block(8192, 4)
    block[0:4] = b"back"
    assert bytes(MappedSegment(segment.offer(2)).block(8192, 4)) == b"back"
    segment.close()


def test_it_cannot_shrink_or_grow() -> None:
    segment = Segment(SIZE)
    for size in (SIZE - 4096, SIZE + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(segment._descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    segment.close()


def test_memory_is_allocated_on_use_and_returned() -> None:
    segment = Segment(1 << 40)  # more than any machine has
    assert segment.memory() < 1 << 16
    at = segment.free_list.allocate(4 << 20)
    assert at is not None
    segment.write(at, bytes(4 << 20))
    assert segment.memory() >= 4 << 20
    segment.free_list.free(at)
    assert segment.trim() >= 3 << 20
    assert segment.memory() < 1 << 20
    assert segment.trim() == 0
    assert segment.nonce == MappedSegment(segment.offer(1)).nonce
    segment.close()


def test_a_segment_counts_as_mapped_until_the_last_block_is_freed() -> None:
    segment = Segment(SIZE)
    mapped = MappedSegment(segment.offer(7))
    assert segment.is_mapped_by_peer(7)
    assert not segment.is_mapped_by_peer(8)
    block = mapped.block(4096, 10)
    view = memoryview(block)
    del mapped, block
    assert segment.is_mapped_by_peer(7)
    del view
    gc.collect()
    assert not segment.is_mapped_by_peer(7)
    segment.close()


def test_one_byte_is_locked_by_one_reader() -> None:
    segment = Segment(SIZE)
    mapped = MappedSegment(segment.offer(7))
    with pytest.raises(OSError, match="temporarily unavailable"):
        MappedSegment(segment.offer(7))
    del mapped
    segment.close()


def test_a_mapping_outlives_the_creator() -> None:
    segment = Segment(SIZE)
    at = segment.free_list.allocate(100)
    assert at is not None
    segment.write(at, b"x" * 100)
    mapped = MappedSegment(segment.offer(1))
    segment.close()
    segment.close()
    del segment
    assert bytes(mapped.block(at, 100)) == b"x" * 100


def test_no_descriptor_is_left() -> None:
    before = descriptors()
    segment = Segment(SIZE)
    mapped = MappedSegment(segment.offer(1))
    block = mapped.block(0, 100)
    gone = weakref.ref(block)
    segment.close()
    del segment, mapped, block
    gc.collect()
    assert gone() is None
    assert descriptors() == before


def test_a_child_process_inherits_no_segment() -> None:
    segment = Segment(SIZE)
    mapped = MappedSegment(segment.offer(1))
    said = run_python("import os; print([os.readlink(f'/proc/self/fd/{n}') for n in range(3, 64)"
                      " if os.path.exists(f'/proc/self/fd/{n}')])")  # fmt: skip
    assert "zmqgrad" not in said
    del mapped
    segment.close()


@pytest.mark.parametrize(
    "change",
    [
        {"pid": 1},
        {"pid": 2**40},
        {"pid": 0},
        {"descriptor": 0},
        {"descriptor": 2**31},
        {"descriptor": 2**62},
        {"device": 2**40},
        {"inode": 2**40},
        {"size": SIZE + 4096},
        {"size": SIZE - 4096},
        {"size": 0},
        {"size": 2**62},
        {"nonce_at": SIZE - NONCE_BYTES + 1},
        {"nonce_at": 2**62},
    ],
    ids=str,
)
def test_an_offer_with_a_wrong_field_is_refused(change: dict[str, int]) -> None:
    before = descriptors()
    segment = Segment(SIZE)
    offer = segment.offer(1)
    with pytest.raises(
        OSError,
        match=r"Permission denied|No such file|stands at that|other memory than|outside of the memory|is '/",
    ):
        MappedSegment(msgspec.structs.replace(offer, **change))
    segment.close()
    del segment
    assert descriptors() == before


def made_by_hand(seals: int, name: str = "zmqgrad") -> tuple[int, ArenaOffer]:
    """Shared memory that was not made as it should be, and an offer of it."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    stat = os.fstat(descriptor)
    return descriptor, ArenaOffer(5, SIZE, os.getpid(), descriptor, stat.st_dev, stat.st_ino, 0, 1)


def test_memory_that_could_shrink_is_refused() -> None:
    descriptor, offer = made_by_hand(fcntl.F_SEAL_GROW)
    with pytest.raises(OSError, match="not sealed"):
        MappedSegment(offer)
    os.close(descriptor)


def test_an_unrelated_descriptor_is_not_opened() -> None:
    descriptor, offer = made_by_hand(fcntl.F_SEAL_SHRINK, "other")
    with pytest.raises(OSError, match="different process numbers"):
        MappedSegment(offer)
    os.close(descriptor)


def test_a_pipe_is_not_opened() -> None:
    read, write = os.pipe()  # opening it again to write would be harmless; a terminal or a device may not be
    stat = os.fstat(read)
    with pytest.raises(OSError, match="pipe:"):
        MappedSegment(ArenaOffer(5, 0, os.getpid(), read, stat.st_dev, stat.st_ino, 0, 1))
    os.close(read)
    os.close(write)
