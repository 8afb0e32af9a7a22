"""Segments: what the system promises of them, and which ones are not mapped."""

from __future__ import annotations

import fcntl
import gc
import os
import socket
import weakref
from pathlib import Path

import pytest

from tests.support.interpreter import run_python
from zmqgrad.transport.shared_memory.segment import MappedSegment, Segment, supported

pytestmark = pytest.mark.skipif(not supported(), reason="this system has no sealed shared memory")

SIZE = 1 << 20


def mapped_by(segment: Segment, lock: int = 1) -> MappedSegment:
    """``segment`` as the reader maps it that locks byte ``lock``."""
    return MappedSegment(segment.open_for_reader(lock), segment.size)


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
    mapped = mapped_by(segment, 1)
    for data in (b"bytes", bytearray(b"bytearray"), memoryview(b"read-only"), memoryview(bytearray(b"view"))):
        segment.write(4096, data)
        assert bytes(mapped.block(4096, len(data))) == bytes(data)
    block = mapped.block(8192, 4)
    block[0:4] = b"back"
    assert bytes(mapped_by(segment, 2).block(8192, 4)) == b"back"
    segment.close()


@pytest.mark.parametrize("offset", [0, 64, 4096, 5000 * 64])
def test_what_is_written_to_a_shared_block_is_seen_by_its_writer_only(offset: int) -> None:
    before = descriptors()
    segment = Segment(SIZE)
    segment.write(offset, b"x" * 10_000)
    one, two, alone = mapped_by(segment, 1), mapped_by(segment, 2), mapped_by(segment, 3)
    views = [memoryview(each.block(offset, 10_000, shared=True)).cast("B") for each in (one, one, two)]
    del one, two
    assert all(bytes(view) == b"x" * 10_000 for view in views)
    views[0][:] = b"y" * 10_000
    views[2][5000] = 0
    assert bytes(views[1]) == bytes(alone.block(offset, 10_000)) == b"x" * 10_000
    assert bytes(views[0]) == b"y" * 10_000
    assert bytes(views[2]) == b"x" * 5000 + b"\0" + b"x" * 4999
    assert segment.is_mapped_by_peer(1)
    del views
    assert not segment.is_mapped_by_peer(1)
    del alone
    segment.close()
    del segment
    assert descriptors() == before


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
    assert bytes(mapped_by(segment).block(at, 8)) == bytes(8)
    segment.close()


def test_a_segment_counts_as_mapped_until_the_last_block_is_freed() -> None:
    segment = Segment(SIZE)
    mapped = mapped_by(segment, 7)
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


def test_a_descriptor_on_its_way_counts_as_mapped() -> None:
    segment = Segment(SIZE)
    fd = segment.open_for_reader(7)
    assert segment.is_mapped_by_peer(7)
    assert not segment.is_mapped_by_peer(8)
    one, other = socket.socketpair()
    socket.send_fds(one, [b"x"], [fd])
    os.close(fd)
    assert segment.is_mapped_by_peer(7)
    one.close()
    other.close()  # nobody has read it
    assert not segment.is_mapped_by_peer(7)
    segment.close()


def test_a_reader_may_have_several_descriptors() -> None:
    segment = Segment(SIZE)
    one, two = mapped_by(segment, 7), mapped_by(segment, 7)
    del one
    assert segment.is_mapped_by_peer(7)
    del two
    assert not segment.is_mapped_by_peer(7)
    segment.close()


def test_a_mapping_outlives_the_creator() -> None:
    segment = Segment(SIZE)
    at = segment.free_list.allocate(100)
    assert at is not None
    segment.write(at, b"x" * 100)
    mapped = mapped_by(segment, 1)
    segment.close()
    segment.close()
    del segment
    assert bytes(mapped.block(at, 100)) == b"x" * 100


def test_no_descriptor_is_left() -> None:
    before = descriptors()
    segment = Segment(SIZE)
    mapped = mapped_by(segment, 1)
    block = mapped.block(0, 100)
    gone = weakref.ref(block)
    segment.close()
    del segment, mapped, block
    gc.collect()
    assert gone() is None
    assert descriptors() == before


def test_a_child_process_inherits_no_segment() -> None:
    segment = Segment(SIZE)
    mapped = mapped_by(segment, 1)
    said = run_python("import os; print([os.readlink(f'/proc/self/fd/{n}') for n in range(3, 64)"
                      " if os.path.exists(f'/proc/self/fd/{n}')])")  # fmt: skip
    assert "zmqgrad" not in said
    del mapped
    segment.close()


@pytest.mark.parametrize("size", [SIZE + 4096, SIZE - 4096, 0, 2**62, 2**64])
def test_a_wrong_size_is_refused(size: int) -> None:
    before = descriptors()
    segment = Segment(SIZE)
    with pytest.raises(OSError, match="expected"):
        MappedSegment(segment.open_for_reader(1), size)
    assert not segment.is_mapped_by_peer(1)
    segment.close()
    del segment
    assert descriptors() == before


def test_memory_that_could_shrink_is_refused() -> None:
    """Its reader would get SIGBUS."""
    before = descriptors()
    descriptor = os.memfd_create("zmqgrad", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    with pytest.raises(OSError, match="may shrink"):
        MappedSegment(descriptor, SIZE)
    assert descriptors() == before


def test_memory_that_cannot_be_read_is_refused() -> None:
    """Its first block raised an error of the system, in whatever thread read it."""
    before = descriptors()
    segment = Segment(SIZE)
    descriptor = os.open(f"/proc/self/fd/{segment._descriptor}", os.O_WRONLY | os.O_CLOEXEC)
    with pytest.raises(OSError, match="Bad file descriptor"):
        MappedSegment(descriptor, SIZE)
    segment.close()
    del segment
    assert descriptors() == before


def test_what_is_no_memory_is_refused(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(write)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, SIZE)
    for descriptor, size in ((read, 0), (file, SIZE)):
        with pytest.raises(OSError, match=r"Invalid argument|may shrink"):
            MappedSegment(descriptor, size)
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(descriptor)
