"""The arena: which peer may read which block, and when a block is used again."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.signals import called_within, ends
from zmqgrad.transport.shared_memory.arena import SEGMENT_BYTES, Arena, Lease
from zmqgrad.transport.shared_memory.segment import MappedSegment, Segment, supported

pytestmark = pytest.mark.skipif(not supported(), reason="this system has no sealed shared memory")

MB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(64 * MB)
    yield made
    made.close()


def leased(arena: Arena) -> int:
    """How many blocks are leased."""
    found: int = arena.statistics()["blocks_leased"]
    return found


class Reader:
    """A peer that maps the segments of what it is leased."""

    def __init__(self, arena: Arena, peer: int = 1) -> None:
        self.arena = arena
        self.peer = peer
        self.mapped: dict[int, MappedSegment] = {}

    def map(self, segment: Segment) -> MappedSegment:
        """Map ``segment``, as when its descriptor arrives."""
        if segment.id not in self.mapped:
            fd = self.arena.open_for(self.peer, segment)
            self.mapped[segment.id] = MappedSegment(fd, segment.size)
        return self.mapped[segment.id]

    def lease(self, *sizes: int) -> list[Lease]:
        """Lease blocks, which must succeed, and map them."""
        leases = self.arena.lease(self.peer, sizes)
        assert not isinstance(leases, str), leases
        for lease in leases:
            self.map(lease.segment)
        return leases

    def release(self, *leases: Lease) -> None:
        self.arena.release(self.peer, [lease.number for lease in leases])


def test_a_shared_block_is_free_when_its_last_lease_has_ended(arena: Arena) -> None:
    one, two = Reader(arena, 1), Reader(arena, 2)
    (first,) = one.lease(MB)
    second = arena.share(2, first)
    third = arena.share(2, second)
    two.map(second.segment)
    assert len({lease.number for lease in (first, second, third)}) == 3
    assert {lease.offset for lease in (first, second, third)} == {first.offset}
    assert arena.statistics()["bytes_leased"] == leased(arena) * MB == MB
    one.release(first)
    one.release(first)  # late, and repeated
    two.release(third)
    assert leased(arena) == 1
    arena.forget(2)
    assert leased(arena) == 1, "its process maps the block"
    two.mapped.clear()
    arena.reclaim()
    assert leased(arena) == 0


def test_blocks_are_leased_again_after_their_release(arena: Arena) -> None:
    reader = Reader(arena)
    (one,) = reader.lease(MB)
    (two,) = reader.lease(MB)
    assert one.offset != two.offset
    reader.release(one)
    (three,) = reader.lease(MB)
    assert three.offset == one.offset
    assert three.number not in (one.number, two.number)
    assert leased(arena) == 2


def test_a_repeated_release_frees_nothing_else(arena: Arena) -> None:
    reader = Reader(arena)
    (one,) = reader.lease(MB)
    reader.release(one)
    (two,) = reader.lease(MB)
    assert two.offset == one.offset
    arena.release(1, [one.number, one.number, 10**9])
    assert leased(arena) == 1
    assert arena.statistics()["unknown_releases"] == 3


def test_a_peer_cannot_release_a_block_of_another(arena: Arena) -> None:
    one, two = Reader(arena, 1), Reader(arena, 2)
    (lease,) = one.lease(MB)
    two.lease(MB)
    two.release(lease)
    assert leased(arena) == 2
    assert arena.statistics()["unknown_releases"] == 1


def test_all_blocks_or_none(arena: Arena) -> None:
    reader = Reader(arena)
    reader.lease(40 * MB)
    assert arena.lease(1, [MB, 30 * MB]) == "full"
    assert leased(arena) == 1


@pytest.mark.parametrize("limit", [4096, MB, 64 * MB])
def test_a_block_can_take_all_there_is(limit: int) -> None:
    arena = Arena(limit)
    assert not isinstance(arena.lease(1, [limit]), str)
    assert arena.lease(1, [1]) == "full"
    arena.close()


def test_blocks_of_a_lost_reader_are_freed(arena: Arena) -> None:
    one, two = Reader(arena, 1), Reader(arena, 2)
    one.lease(MB, MB)
    two.lease(MB)
    one.mapped.clear()
    arena.forget(1)
    assert leased(arena) == 1


def test_blocks_of_a_lost_reader_are_kept_while_they_are_mapped(arena: Arena) -> None:
    """1. A worker leaves, its program keeps a tensor. 2. Its block is not written again, 3. until it dies."""
    one, two = Reader(arena, 1), Reader(arena, 2)
    (lease,) = one.lease(MB)
    kept = one.mapped[lease.segment.id].block(lease.offset, lease.size)
    one.mapped.clear()
    arena.forget(1)
    assert leased(arena) == 1
    assert two.lease(MB)[0].offset != lease.offset
    del kept
    arena.reclaim()
    assert leased(arena) == 1
    assert two.lease(MB)[0].offset == lease.offset


def test_a_block_larger_than_a_segment_has_a_segment_of_its_own() -> None:
    arena = Arena(5 * SEGMENT_BYTES)
    reader = Reader(arena)
    (small,) = reader.lease(MB)
    (large,) = reader.lease(SEGMENT_BYTES + MB)
    assert large.segment is not small.segment
    assert large.segment.size > SEGMENT_BYTES
    assert arena.statistics()["segments"] == 2
    assert arena.statistics()["memory"] < MB  # nothing has been written yet
    arena.close()


@pytest.mark.parametrize(("limit", "largest"), [(6, 5), (4, 3), (3, 3), (2, 2)])
def test_growing_blocks_find_room_as_long_as_the_limit_allows(limit: int, largest: int) -> None:
    arena = Arena(limit * SEGMENT_BYTES)
    reader = Reader(arena)
    for size in [MB, *range(SEGMENT_BYTES // 2, largest * SEGMENT_BYTES, SEGMENT_BYTES // 4)]:
        reader.release(*reader.lease(size))
    assert arena.statistics()["segments"] == (1 if limit == largest else 2)
    assert arena.statistics()["memory"] < MB
    arena.close()


def test_a_smaller_segment_where_the_system_refuses_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a bound on address space (ulimit -v)."""
    truncate = os.ftruncate

    def bounded(descriptor: int, size: int) -> None:
        if size > SEGMENT_BYTES // 2:
            raise OSError(27, "File too large")
        truncate(descriptor, size)

    monkeypatch.setattr(os, "ftruncate", bounded)
    arena = Arena(4 * SEGMENT_BYTES)
    (lease,) = Reader(arena).lease(MB)
    assert lease.segment.size == SEGMENT_BYTES // 16
    assert arena.lease(2, [SEGMENT_BYTES]) == "no memory"
    arena.close()


def test_a_peer_whose_descriptor_has_not_arrived_keeps_its_blocks(arena: Arena) -> None:
    """The descriptor holds the lock: in a queue, in the kernel, and where it is mapped."""
    leases = arena.lease(1, [MB])
    assert not isinstance(leases, str)
    fd = arena.open_for(1, leases[0].segment)
    arena.forget(1)
    assert leased(arena) == 1
    mapped = MappedSegment(fd, leases[0].segment.size)
    arena.reclaim()
    assert leased(arena) == 1
    del mapped
    arena.reclaim()
    assert leased(arena) == 0


def test_a_segment_is_mapped_as_long_as_one_of_several_descriptors(arena: Arena) -> None:
    """A peer gets one by each of its connections."""
    reader = Reader(arena)
    (lease,) = reader.lease(MB)
    second = MappedSegment(arena.open_for(1, lease.segment), lease.segment.size)
    reader.mapped.clear()
    arena.forget(1)
    assert leased(arena) == 1
    del second
    arena.reclaim()
    assert leased(arena) == 0


def test_a_process_without_descriptors_says_so(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    leases = arena.lease(1, [MB])
    assert not isinstance(leases, str)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(OSError, match="Too many"):
            arena.open_for(1, leases[0].segment)
    assert bytes(Reader(arena).map(leases[0].segment).block(0, 1)) == b"\0"


def test_two_readers_share_a_segment(arena: Arena) -> None:
    one, two = Reader(arena, 1), Reader(arena, 2)
    one.lease(MB)
    two.lease(MB)
    assert arena.statistics()["segments"] == 1


def test_memory_returns_to_the_system_at_the_second_trim_without_use(arena: Arena) -> None:
    reader = Reader(arena)
    (lease,) = reader.lease(8 * MB)
    lease.segment.write(lease.offset, bytes(8 * MB))
    reader.release(lease)
    assert arena.trim() == 0  # it was used just now
    assert arena.trim() >= 7 * MB
    assert arena.trim() == 0
    assert arena.statistics()["memory"] < MB


def test_a_closed_arena_leases_nothing(arena: Arena) -> None:
    reader = Reader(arena)
    (lease,) = reader.lease(MB)
    arena.close()
    arena.close()
    assert arena.lease(1, [1]) == "full"
    reader.release(lease)
    arena.forget(1)
    arena.reclaim()
    assert arena.trim() == 0


@pytest.mark.parametrize("change", ["lease", "release"])
def test_a_handler_that_makes_a_call_may_come_at_any_point(change: str) -> None:
    """It gets a reply that releases blocks, and sends some: none overlap, and none is lost."""
    for number in itertools.count(1):
        arena = Arena(MB)
        sizes = [64, 64, 128, 64, 4096, 64, 64, 8192, 64, 64, 64, 16384, 64, 64]
        held: list[Any] = list(arena.lease(1, sizes))
        arena.release(1, [held.pop(index).number for index in (11, 7, 4, 1)])
        first, second = [held.pop(5), held.pop(3)], [held.pop(4), held.pop(2)]

        def handler() -> None:
            for lease in reversed(first):  # noqa: B023
                arena.release(1, [lease.number])  # noqa: B023
            more = arena.lease(2, [64, 100])  # noqa: B023
            held.extend(() if isinstance(more, str) else more)  # noqa: B023

        def outer() -> None:
            if change == "lease":
                held.extend([*second, *arena.lease(1, [8192, 64, 100])])  # noqa: B023
            else:
                arena.release(1, [lease.number for lease in second])  # noqa: B023

        complete = not called_within(outer, handler, number)
        for size in (64, 128, 4096, 8192, 64, 256, 65536):
            held.extend(arena.lease(1, [size]))
        spans = sorted((lease.offset, lease.offset + lease.size) for lease in held)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        for peer in (1, 2):
            arena.release(peer, [lease.number for lease in [*held, *first, *second]])
        assert leased(arena) == 0
        arena.close()
        if complete:
            break


def test_blocks_are_released_whatever_a_signal_handler_that_waits_for_it_has_interrupted() -> None:
    """It waits for a reply; the thread that reads it first ends the leases that the reply releases."""
    for number in itertools.count(1):
        arena, read = Arena(MB), list[bool]()
        held: Any = arena.lease(1, [64, 4096])
        called = called_within(
            lambda: held.extend(arena.lease(1, [64])),  # noqa: B023
            lambda: read.append(ends(lambda: arena.release(1, [held[0].number]))),  # noqa: B023
            number,
        )
        assert read == [True] * called
        assert leased(arena) == (2 if called else 3)
        arena.close()
        if not called:
            break
