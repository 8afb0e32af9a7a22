"""The lender: who has what, and when it comes back."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from zmqgrad.transport.shared_memory.arena import SEGMENT, BlockAllocator, Lease, LeaseState
from zmqgrad.transport.shared_memory.segment import NONCE, MappedSegment, supported
from zmqgrad.wire.messages import ArenaOffer

pytestmark = pytest.mark.skipif(not supported(), reason="this system has no sealed shared memory")

MB = 1 << 20


@pytest.fixture
def lender() -> Iterator[BlockAllocator]:
    made = BlockAllocator(64 * MB)
    yield made
    made.close()


class Reader:
    """A peer: maps what it is offered."""

    def __init__(self, lender: BlockAllocator, peer: int = 1) -> None:
        self.lender = lender
        self.borrower = LeaseState(peer)
        self.mapped: dict[int, MappedSegment] = {}

    def accept(self, *sizes: int) -> ArenaOffer | None:
        """Take an offer for blocks of ``sizes`` and answer it."""
        offer = self.lender.room_for(self.borrower, sizes)
        if offer is not None:
            mapped = self.mapped[offer.segment] = MappedSegment(offer)
            nonce = mapped.read(offer.nonce_at, NONCE)
            assert self.lender.answered(self.borrower, nonce, offer.segment, "")
        return offer

    def borrow(self, *sizes: int) -> list[Lease]:
        """Blocks that must be there."""
        loans = self.lender.lend(self.borrower, sizes)
        if loans is None:
            self.accept(*sizes)
            loans = self.lender.lend(self.borrower, sizes)
        assert loans is not None
        return loans


def lent(lender: BlockAllocator) -> int:
    return lender.statistics()["blocks_lent"]


def test_nothing_is_lent_to_who_has_not_mapped(lender: BlockAllocator) -> None:
    reader = Reader(lender)
    assert lender.lend(reader.borrower, [10]) is None
    assert lender.room_for(reader.borrower, [10]) is not None
    assert lender.lend(reader.borrower, [10]) is None
    assert lender.room_for(reader.borrower, [10]) is None  # the answer is on its way


@pytest.mark.parametrize("nonce", [b"", b"x" * NONCE, b"x"])
def test_a_wrong_proof_is_a_refusal(lender: BlockAllocator, nonce: bytes) -> None:
    reader = Reader(lender)
    offer = lender.room_for(reader.borrower, [10])
    assert offer is not None
    assert not lender.answered(reader.borrower, nonce, offer.segment, "")
    assert reader.borrower.refused
    assert lender.lend(reader.borrower, [10]) is None


def test_blocks_come_back_and_are_lent_again(lender: BlockAllocator) -> None:
    reader = Reader(lender)
    (one,) = reader.borrow(MB)
    (two,) = reader.borrow(MB)
    assert one.offset != two.offset
    lender.release(reader.borrower, [one.number])
    (three,) = reader.borrow(MB)
    assert three.offset == one.offset
    assert three.number not in (one.number, two.number)
    assert lent(lender) == 2


def test_what_is_released_twice_frees_nothing_else(lender: BlockAllocator) -> None:
    reader = Reader(lender)
    (one,) = reader.borrow(MB)
    lender.release(reader.borrower, [one.number])
    (two,) = reader.borrow(MB)
    assert two.offset == one.offset
    lender.release(reader.borrower, [one.number, one.number, 10**9])
    assert lent(lender) == 1
    assert lender.strange == 3


def test_nobody_can_release_another_s_block(lender: BlockAllocator) -> None:
    one, two = Reader(lender, 1), Reader(lender, 2)
    (loan,) = one.borrow(MB)
    two.borrow(MB)
    lender.release(two.borrower, [loan.number])
    assert lent(lender) == 2
    assert lender.strange == 1


def test_all_or_nothing(lender: BlockAllocator) -> None:
    reader = Reader(lender)
    reader.borrow(40 * MB)
    assert lender.lend(reader.borrower, [MB, 30 * MB]) is None
    assert lent(lender) == 1
    assert lender.room_for(reader.borrower, [MB, 30 * MB]) is None  # beyond the limit


def test_a_lost_reader_gives_back_its_blocks(lender: BlockAllocator) -> None:
    one, two = Reader(lender, 1), Reader(lender, 2)
    one.borrow(MB, MB)
    two.borrow(MB)
    one.mapped.clear()
    lender.lose(one.borrower)
    assert lent(lender) == 1
    assert lender.lend(one.borrower, [MB]) is None


def test_not_while_its_process_still_looks_at_them(lender: BlockAllocator) -> None:
    """1. A worker leaves, its program keeps a tensor. 2. Its block is not written again, 3. until it dies."""
    one, two = Reader(lender, 1), Reader(lender, 2)
    (loan,) = one.borrow(MB)
    kept = one.mapped[loan.segment.id].block(loan.offset, loan.size)
    one.mapped.clear()
    lender.lose(one.borrower)
    assert lent(lender) == 1
    assert two.borrow(MB)[0].offset != loan.offset
    del kept
    lender.reclaim()
    assert lent(lender) == 1
    assert two.borrow(MB)[0].offset == loan.offset


def test_a_block_larger_than_a_segment_has_one_of_its_own() -> None:
    lender = BlockAllocator(5 * SEGMENT)
    reader = Reader(lender)
    (small,) = reader.borrow(MB)
    (large,) = reader.borrow(SEGMENT + MB)
    assert large.segment is not small.segment
    assert large.segment.size > SEGMENT
    assert lender.statistics()["segments"] == 2
    assert lender.statistics()["memory"] < MB  # nothing has been written yet
    lender.close()


@pytest.mark.parametrize(("limit", "largest"), [(6, 5), (4, 3), (3, 3), (2, 2)])
def test_blocks_that_grow_and_come_back_find_room_as_long_as_the_limit_allows(
    limit: int, largest: int
) -> None:
    lender = BlockAllocator(limit * SEGMENT)
    reader = Reader(lender)
    for size in [MB, *range(SEGMENT // 2, largest * SEGMENT, SEGMENT // 4)]:
        loans = reader.borrow(size)
        lender.release(reader.borrower, [loan.number for loan in loans])
    assert lender.statistics()["segments"] == (1 if limit == largest else 2)
    assert lender.statistics()["memory"] < MB
    lender.close()


def test_where_a_large_segment_cannot_be_had_a_small_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a bound on address space (ulimit -v)."""
    truncate = os.ftruncate

    def bounded(descriptor: int, size: int) -> None:
        if size > SEGMENT // 2:
            raise OSError(27, "File too large")
        truncate(descriptor, size)

    monkeypatch.setattr(os, "ftruncate", bounded)
    lender = BlockAllocator(4 * SEGMENT)
    (loan,) = Reader(lender).borrow(MB)
    assert loan.segment.size == SEGMENT // 16
    with pytest.raises(OSError, match="too large"):
        lender.room_for(LeaseState(2), [SEGMENT])
    lender.close()


def test_a_second_reader_is_offered_what_is_there(lender: BlockAllocator) -> None:
    one, two = Reader(lender, 1), Reader(lender, 2)
    one.borrow(MB)
    two.borrow(MB)
    assert lender.statistics()["segments"] == 1


def test_memory_goes_back_after_two_looks_without_use(lender: BlockAllocator) -> None:
    reader = Reader(lender)
    (loan,) = reader.borrow(8 * MB)
    loan.segment.write(loan.offset, bytes(8 * MB))
    lender.release(reader.borrower, [loan.number])
    assert lender.trim() == 0  # it was used just now
    assert lender.trim() >= 7 * MB
    assert lender.trim() == 0
    assert lender.statistics()["memory"] < MB


def test_a_closed_one_lends_nothing(lender: BlockAllocator) -> None:
    reader = Reader(lender)
    (loan,) = reader.borrow(MB)
    lender.close()
    lender.close()
    assert lender.lend(reader.borrower, [1]) is None
    assert lender.room_for(reader.borrower, [1]) is None
    lender.release(reader.borrower, [loan.number])
    lender.lose(reader.borrower)
    lender.reclaim()
    assert lender.trim() == 0
