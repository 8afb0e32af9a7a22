"""The arena: which peer may read which block, and when a block is used again."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from zmqgrad.transport.shared_memory.arena import NO_REPLY, SEGMENT_BYTES, Arena, Lease
from zmqgrad.transport.shared_memory.segment import NONCE_BYTES, MappedSegment, supported
from zmqgrad.wire.messages import ArenaOffer, ArenaReply

pytestmark = pytest.mark.skipif(not supported(), reason="this system has no sealed shared memory")

MB = 1 << 20


class Host:
    """An arena, and the offers that it has sent."""

    def __init__(self, limit: int) -> None:
        self.offers: dict[int, tuple[ArenaOffer, int]] = {}
        self.arena = Arena(limit, self.send, lambda: False)

    def send(self, peer: int, offer: ArenaOffer, offer_id: int) -> None:
        assert peer not in self.offers  # one at a time
        self.offers[peer] = offer, offer_id

    @property
    def leased(self) -> int:
        found: int = self.arena.statistics()["blocks_leased"]
        return found


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host(64 * MB)
    yield made
    made.arena.close()


class Reader:
    """A peer that maps what it is offered."""

    def __init__(self, host: Host, peer: int = 1) -> None:
        self.host = host
        self.arena = host.arena
        self.peer = peer
        self.mapped: dict[int, MappedSegment] = {}

    def accept(self) -> None:
        """Map the segment that was offered, and reply."""
        offer, offer_id = self.host.offers.pop(self.peer)
        mapped = self.mapped[offer.segment] = MappedSegment(offer)
        self.arena.on_reply(self.peer, ArenaReply(mapped.nonce), offer_id)

    def lease(self, *sizes: int) -> list[Lease]:
        """Lease blocks, which must succeed after at most one offer."""
        leases = self.arena.lease(self.peer, sizes)
        if isinstance(leases, str):
            self.accept()
            leases = self.arena.lease(self.peer, sizes)
        assert not isinstance(leases, str)
        return leases

    def release(self, *leases: Lease) -> None:
        self.arena.release(self.peer, [lease.number for lease in leases])


def test_nothing_is_leased_before_the_peer_has_mapped_the_segment(host: Host) -> None:
    reader = Reader(host)
    for _ in range(2):  # the second time, the reply is still on its way
        assert host.arena.lease(1, [10]) == NO_REPLY
    reader.accept()
    assert len(reader.lease(10)) == 1


@pytest.mark.parametrize("nonce", [b"", b"x" * NONCE_BYTES, b"x"])
def test_a_wrong_nonce_refuses_the_segment(host: Host, nonce: bytes) -> None:
    host.arena.lease(1, [10])
    _, offer_id = host.offers.pop(1)
    host.arena.on_reply(1, ArenaReply(nonce), offer_id)
    assert host.arena.statistics()["refused_by"] == {1: "the nonce is wrong"}
    assert host.arena.lease(1, [10]) == "refused"
    assert host.offers == {}


def test_blocks_are_leased_again_after_their_release(host: Host) -> None:
    reader = Reader(host)
    (one,) = reader.lease(MB)
    (two,) = reader.lease(MB)
    assert one.offset != two.offset
    reader.release(one)
    (three,) = reader.lease(MB)
    assert three.offset == one.offset
    assert three.number not in (one.number, two.number)
    assert host.leased == 2


def test_a_repeated_release_frees_nothing_else(host: Host) -> None:
    reader = Reader(host)
    (one,) = reader.lease(MB)
    reader.release(one)
    (two,) = reader.lease(MB)
    assert two.offset == one.offset
    host.arena.release(1, [one.number, one.number, 10**9])
    assert host.leased == 1
    assert host.arena.statistics()["unknown_releases"] == 3


def test_a_peer_cannot_release_a_block_of_another(host: Host) -> None:
    one, two = Reader(host, 1), Reader(host, 2)
    (lease,) = one.lease(MB)
    two.lease(MB)
    two.release(lease)
    assert host.leased == 2
    assert host.arena.statistics()["unknown_releases"] == 1


def test_all_blocks_or_none(host: Host) -> None:
    reader = Reader(host)
    reader.lease(40 * MB)
    assert host.arena.lease(1, [MB, 30 * MB]) == "full"
    assert host.leased == 1
    assert host.offers == {}


def test_blocks_of_a_lost_reader_are_freed(host: Host) -> None:
    one, two = Reader(host, 1), Reader(host, 2)
    one.lease(MB, MB)
    two.lease(MB)
    one.mapped.clear()
    host.arena.forget(1)
    assert host.leased == 1
    assert host.arena.lease(1, [MB]) == NO_REPLY  # it gets a new offer


def test_blocks_of_a_lost_reader_are_kept_while_they_are_mapped(host: Host) -> None:
    """1. A worker leaves, its program keeps a tensor. 2. Its block is not written again, 3. until it dies."""
    one, two = Reader(host, 1), Reader(host, 2)
    (lease,) = one.lease(MB)
    kept = one.mapped[lease.segment.id].block(lease.offset, lease.size)
    one.mapped.clear()
    host.arena.forget(1)
    assert host.leased == 1
    assert two.lease(MB)[0].offset != lease.offset
    del kept
    host.arena.reclaim()
    assert host.leased == 1
    assert two.lease(MB)[0].offset == lease.offset


def test_a_block_larger_than_a_segment_has_a_segment_of_its_own() -> None:
    host = Host(5 * SEGMENT_BYTES)
    reader = Reader(host)
    (small,) = reader.lease(MB)
    (large,) = reader.lease(SEGMENT_BYTES + MB)
    assert large.segment is not small.segment
    assert large.segment.size > SEGMENT_BYTES
    assert host.arena.statistics()["segments"] == 2
    assert host.arena.statistics()["memory"] < MB  # nothing has been written yet
    host.arena.close()


@pytest.mark.parametrize(("limit", "largest"), [(6, 5), (4, 3), (3, 3), (2, 2)])
def test_growing_blocks_find_room_as_long_as_the_limit_allows(limit: int, largest: int) -> None:
    host = Host(limit * SEGMENT_BYTES)
    reader = Reader(host)
    for size in [MB, *range(SEGMENT_BYTES // 2, largest * SEGMENT_BYTES, SEGMENT_BYTES // 4)]:
        reader.release(*reader.lease(size))
    assert host.arena.statistics()["segments"] == (1 if limit == largest else 2)
    assert host.arena.statistics()["memory"] < MB
    host.arena.close()


def test_a_smaller_segment_where_the_system_refuses_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a bound on address space (ulimit -v)."""
    truncate = os.ftruncate

    def bounded(descriptor: int, size: int) -> None:
        if size > SEGMENT_BYTES // 2:
            raise OSError(27, "File too large")
        truncate(descriptor, size)

    monkeypatch.setattr(os, "ftruncate", bounded)
    host = Host(4 * SEGMENT_BYTES)
    (lease,) = Reader(host).lease(MB)
    assert lease.segment.size == SEGMENT_BYTES // 16
    assert host.arena.lease(2, [SEGMENT_BYTES]) == "no memory"
    host.arena.close()


def test_an_offer_that_fails_is_made_again(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> os.stat_result:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", refuse)
        assert host.arena.lease(1, [MB]) == "no memory"
    assert len(Reader(host).lease(MB)) == 1


def test_a_second_reader_is_offered_the_same_segment(host: Host) -> None:
    one, two = Reader(host, 1), Reader(host, 2)
    one.lease(MB)
    two.lease(MB)
    assert host.arena.statistics()["segments"] == 1


def test_memory_returns_to_the_system_at_the_second_trim_without_use(host: Host) -> None:
    reader = Reader(host)
    (lease,) = reader.lease(8 * MB)
    lease.segment.write(lease.offset, bytes(8 * MB))
    reader.release(lease)
    assert host.arena.trim() == 0  # it was used just now
    assert host.arena.trim() >= 7 * MB
    assert host.arena.trim() == 0
    assert host.arena.statistics()["memory"] < MB


def test_a_closed_arena_leases_nothing(host: Host) -> None:
    reader = Reader(host)
    (lease,) = reader.lease(MB)
    host.arena.close()
    host.arena.close()
    assert host.arena.lease(1, [1]) == "full"
    assert host.offers == {}
    reader.release(lease)
    host.arena.forget(1)
    host.arena.reclaim()
    assert host.arena.trim() == 0


def test_offer_if_new_makes_one_offer_per_peer(host: Host) -> None:
    host.arena.offer_if_new(1, MB)
    assert list(host.offers) == [1]
    host.arena.offer_if_new(1, MB)
    Reader(host).accept()
    host.arena.offer_if_new(1, MB)
    assert (host.offers, host.leased) == ({}, 0)
