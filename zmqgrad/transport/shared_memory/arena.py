"""The arena of one worker: blocks of its segments, lent to peers until they release them.

A block has a number that is never used again, so that a release heard twice, or late, frees nothing that is
in use. A peer that is lost gives back its blocks; but not while its process, or a fork of it, still maps the
segment: a worker may have left and its program still hold tensors.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zmqgrad.runtime.future import Promise
from zmqgrad.transport.shared_memory.free_list import PAGE, rounded
from zmqgrad.transport.shared_memory.segment import NONCE, Segment
from zmqgrad.wire.messages import ArenaOffer

logger = logging.getLogger(__name__)

SEGMENT = 1 << 30
"""Bytes of a segment (of address space: memory is taken as it is used), unless a block needs more."""

FEW = 3
"""Where the limit allows no more than so many segments, there is a single one."""


class Lease(NamedTuple):
    """A block that a peer has."""

    number: int
    segment: Segment
    offset: int
    size: int


class LeaseState:
    """One peer, as long as it lives. Touched with the lender's lock held, but for what is about answers."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.locks: dict[int, int] = {}  # segment id -> the byte that this peer locks, of all offered
        self.mapped: set[int] = set()  # ids of the segments that it has mapped
        self.loans: dict[int, Lease] = {}
        self.refused = ""  # why it takes no blocks
        self.lost = False
        self.answer: Promise[None] | None = None  # set once it has answered the last offer
        self.is_slow = False  # that was waited for in vain

    def settle(self) -> None:
        """It has answered, or never will."""
        if self.answer is not None:
            self.answer.set_result(None)

    @property
    def waiting(self) -> bool:
        """Is an answer of it on its way?"""
        return len(self.locks) > len(self.mapped)

    def __repr__(self) -> str:
        said = f"refused: {self.refused}" if self.refused else f"{len(self.loans)} blocks"
        return f"<LeaseState {self.peer}: {said}>"


class BlockAllocator:
    """Segments of up to ``limit`` bytes together, and who has what of them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.strange = 0  # releases of blocks that the peer did not have
        self._lock = threading.Lock()  # guards everything
        self._segments: list[Segment] = []
        self._departed: list[LeaseState] = []  # lost, but something of them still maps segments
        self._numbers = itertools.count(1)
        self._byte = itertools.count(1)
        self._used = False  # was anything lent since the last look of trim?
        self._trimmed = True
        self._closed = False

    def lend(self, borrower: LeaseState, sizes: Sequence[int]) -> list[Lease] | None:
        """A block for each of ``sizes``, of what ``borrower`` has mapped; None if there is no room."""
        with self._lock:
            if self._closed or borrower.lost:
                return None
            if self._departed:
                self._reclaim()
            self._used, self._trimmed = True, False
            loans: list[Lease] = []
            for size in sizes:
                loan = self._take(borrower, size)
                if loan is None:
                    self._free(loans)
                    return None
                loans.append(loan)
            for loan in loans:
                borrower.loans[loan.number] = loan
            return loans

    def _take(self, borrower: LeaseState, size: int) -> Lease | None:
        for segment in self._segments:
            if segment.id in borrower.mapped:
                offset = segment.space.take(size)
                if offset is not None:
                    return Lease(next(self._numbers), segment, offset, size)
        return None

    def release(self, borrower: LeaseState, numbers: Iterable[int]) -> None:
        """``borrower`` has finished with these blocks."""
        with self._lock:
            loans = [borrower.loans.pop(n, None) for n in numbers]
            mine = [loan for loan in loans if loan is not None]
            self.strange += len(loans) - len(mine)
            self._free(mine)

    def _free(self, loans: Iterable[Lease]) -> None:
        for loan in loans:
            loan.segment.take_back(loan.offset)

    def room_for(self, borrower: LeaseState, sizes: Sequence[int]) -> ArenaOffer | None:
        """What to offer to ``borrower`` so that blocks of ``sizes`` fit; None if there is nothing to offer.

        That may be a segment that others have, or a new one, if the limit allows.

        Raises:
            OSError: if the system gives no memory.
        """
        with self._lock:
            if self._closed or borrower.lost or borrower.waiting:
                return None  # wait for it
            needed = sum(map(rounded, sizes))
            known = [s for s in self._segments if s.id not in borrower.locks]
            segment = next((s for s in known if s.size - s.space.used >= needed), None) or self._grow(needed)
            if segment is None:
                return None
            lock = next(self._byte)
            offer = segment.offer(lock)
            borrower.locks[segment.id] = lock
            return offer

    def _grow(self, needed: int) -> Segment | None:
        left = self.limit - sum(s.size for s in self._segments)
        least = needed + PAGE  # for the nonce
        if left < least:
            return None
        usual = min(max(SEGMENT, least), left)
        sizes = [usual, max(least, usual // 16)]
        if least > SEGMENT or left <= FEW * SEGMENT:
            sizes.insert(0, left)  # of several, none might have room for a block that the limit allows
        segment = self._make_first_of(sizes)
        self._segments.append(segment)
        return segment

    def _make_first_of(self, sizes: Sequence[int]) -> Segment:
        """A segment. A bound on address space or file sizes (ulimit) may have room for a later size alone."""
        for size in sizes[:-1]:
            with contextlib.suppress(OSError):
                return Segment(size)
        return Segment(sizes[-1])

    def answered(self, borrower: LeaseState, nonce: bytes, segment_id: int, why: str) -> bool:
        """``borrower`` answered an offer; has it mapped the segment?"""
        with self._lock:
            segment = next((s for s in self._segments if s.id == segment_id), None)
            if segment is not None and nonce == segment.nonce:
                borrower.mapped.add(segment_id)
                return True
            borrower.refused = why or "the proof is wrong"
            return False

    def lose(self, borrower: LeaseState) -> None:
        """``borrower`` is gone; its blocks come back as soon as nothing of it maps them any more."""
        with self._lock:
            borrower.lost = True
            self._departed.append(borrower)
            self._reclaim()

    def reclaim(self) -> None:
        """Take back what those who are gone have let go since."""
        with self._lock:
            if self._departed and not self._closed:
                self._reclaim()

    def _reclaim(self) -> None:
        for borrower in self._departed:
            held = {s.id for s in self._segments if s.is_held(borrower.locks.get(s.id, 0))}
            back = [loan for loan in borrower.loans.values() if loan.segment.id not in held]
            for loan in back:
                del borrower.loans[loan.number]
            self._free(back)
        self._departed = [b for b in self._departed if b.loans]

    def trim(self) -> int:
        """Give memory that was not used since the last time back to the system; gives how many bytes."""
        with self._lock:
            used, self._used = self._used, False
            if self._closed or used or self._trimmed:
                return 0
            self._trimmed = True
            self._reclaim()
            return sum(s.trim() for s in self._segments)

    def close(self) -> None:
        """Lend no more; what is lent stays valid. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for segment in self._segments:
                    segment.close()
                self._segments, self._departed = [], []

    def statistics(self) -> dict[str, int]:
        """The limit, segments and their memory, blocks and bytes that are lent, strange releases."""
        with self._lock:
            return {
                "limit": self.limit,
                "segments": len(self._segments),
                "memory": sum(s.memory() for s in self._segments),
                "blocks_lent": sum(len(s.space) - 1 for s in self._segments),
                "bytes_lent": sum(s.space.used - rounded(NONCE) for s in self._segments),
                "strange_releases": self.strange,
            }
