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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from zmqgrad.runtime.future import Outcome
from zmqgrad.transport.arena.allocator import PAGE, Allocator, rounded
from zmqgrad.transport.arena.segment import NONCE, Segment

logger = logging.getLogger(__name__)

SEGMENT = 1 << 30
"""Bytes of a segment (of address space: memory is taken as it is used), unless a block needs more."""

FEW = 3
"""Where the limit allows no more than so many segments, there is a single one."""


class Lendable(Protocol):
    """Memory to lend from: a :class:`~zmqgrad.transport.arena.segment.Segment`, or what is like one."""

    id: int
    size: int
    nonce: bytes
    space: Allocator
    """Of which one block was taken at birth, of ``NONCE`` bytes."""

    def offer(self, lock: int) -> Any:
        """What a peer has to know to open it; it shall hold ``lock``. Raises OSError."""
        ...

    def is_held(self, lock: int) -> bool:
        """Does anybody hold ``lock``, so may look at what was lent to him?"""
        ...

    def take_back(self, offset: int) -> None:
        """The block at ``offset`` is free."""
        ...

    def trim(self) -> int:
        """Give memory that is free back to the system; gives how many bytes that were."""
        ...

    def memory(self) -> int:
        """Bytes of memory that it takes in truth."""
        ...

    def close(self) -> None:
        """Lend no more. Idempotent."""
        ...


class Loan(NamedTuple):
    """A block that a peer has."""

    number: int
    segment: Any  # Lendable, of the kind that the lender makes
    offset: int
    size: int


class Borrower:
    """One peer, as long as it lives. Touched with the lender's lock held, but for what is about answers."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.locks: dict[int, int] = {}  # segment id -> the byte that this peer locks, of all offered
        self.mapped: set[int] = set()  # ids of the segments that it has mapped
        self.loans: dict[int, Loan] = {}
        self.refused = ""  # why it takes no blocks
        self.lost = False
        self.answer: Outcome[None] | None = None  # set once it has answered the last offer
        self.is_slow = False  # that was waited for in vain

    def settle(self) -> None:
        """It has answered, or never will."""
        if self.answer is not None:
            self.answer.set(None)

    @property
    def waiting(self) -> bool:
        """Is an answer of it on its way?"""
        return len(self.locks) > len(self.mapped)

    def __repr__(self) -> str:
        said = f"refused: {self.refused}" if self.refused else f"{len(self.loans)} blocks"
        return f"<Borrower {self.peer}: {said}>"


class Lender:
    """Segments of up to ``limit`` bytes together, and who has what of them.

    ``make`` makes one of so many bytes, usually ``usual``, or raises OSError.
    ``numbers``: those of blocks. ``lazy``: memory is taken as it is used, a segment by itself costs nothing.
    """

    def __init__(
        self,
        limit: int,
        make: Callable[[int], Lendable] = Segment,
        usual: int = SEGMENT,
        numbers: Iterator[int] | None = None,
        lazy: bool = True,
    ) -> None:
        self.limit = limit
        self._lazy = lazy
        self._make = make
        self._usual = usual
        self.strange = 0  # releases of blocks that the peer did not have
        self._lock = threading.Lock()  # guards everything
        self._segments: list[Lendable] = []
        self._departed: list[Borrower] = []  # lost, but something of them still maps segments
        self._numbers = itertools.count(1) if numbers is None else numbers
        self._byte = itertools.count(1)
        self._used = False  # was anything lent since the last look of trim?
        self._trimmed = True
        self._closed = False

    def lend(self, borrower: Borrower, sizes: Sequence[int]) -> list[Loan] | None:
        """A block for each of ``sizes``, of what ``borrower`` has mapped; None if there is no room."""
        with self._lock:
            if self._closed or borrower.lost:
                return None
            if self._departed:
                self._reclaim()
            self._used, self._trimmed = True, False
            loans: list[Loan] = []
            for size in sizes:
                loan = self._take(borrower, size)
                if loan is None:
                    self._free(loans)
                    return None
                loans.append(loan)
            for loan in loans:
                borrower.loans[loan.number] = loan
            return loans

    def _take(self, borrower: Borrower, size: int) -> Loan | None:
        for segment in self._segments:
            if segment.id in borrower.mapped:
                offset = segment.space.take(size)
                if offset is not None:
                    return Loan(next(self._numbers), segment, offset, size)
        return None

    def release(self, borrower: Borrower, numbers: Iterable[int]) -> None:
        """``borrower`` has finished with these blocks."""
        with self._lock:
            loans = [borrower.loans.pop(n, None) for n in numbers]
            mine = [loan for loan in loans if loan is not None]
            self.strange += len(loans) - len(mine)
            self._free(mine)

    def _free(self, loans: Iterable[Loan]) -> None:
        for loan in loans:
            loan.segment.take_back(loan.offset)

    def room_for(self, borrower: Borrower, sizes: Sequence[int]) -> Any:
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

    def _grow(self, needed: int) -> Lendable | None:
        left = self.limit - sum(s.size for s in self._segments)
        least = needed + PAGE  # for the nonce
        if left < least:
            return None
        usual = min(max(self._usual, least), left)
        sizes = [usual, max(least, usual // 16)]
        if self._lazy and (least > self._usual or left <= FEW * self._usual):
            sizes.insert(0, left)  # of several, none might have room for a block that the limit allows
        segment = self._make_first_of(sizes)
        self._segments.append(segment)
        return segment

    def _make_first_of(self, sizes: Sequence[int]) -> Lendable:
        """A segment. A bound on address space or file sizes (ulimit) may have room for a later size alone."""
        for size in sizes[:-1]:
            with contextlib.suppress(OSError):
                return self._make(size)
        return self._make(sizes[-1])

    def answered(self, borrower: Borrower, nonce: bytes, segment_id: int, why: str) -> bool:
        """``borrower`` answered an offer; has it mapped the segment?"""
        with self._lock:
            segment = next((s for s in self._segments if s.id == segment_id), None)
            if segment is not None and nonce == segment.nonce:
                borrower.mapped.add(segment_id)
                return True
            borrower.refused = why or "the proof is wrong"
            return False

    def lose(self, borrower: Borrower) -> None:
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

    def retire(self, borrowers: Collection[Borrower]) -> list[tuple[Lendable, list[int]]]:
        """Lend no more of segments that were not used since the last time; those, and which peers have them.

        They are the caller's to close. ``borrowers`` are all there are; they forget that they have them.
        """
        with self._lock:
            used, self._used = self._used, False
            if self._closed or used:
                return []
            self._reclaim()
            asked = {s for b in borrowers for s in b.locks if s not in b.mapped}
            idle = [s for s in self._segments if len(s.space) == 1 and s.id not in asked]  # but for the nonce
            self._segments = [s for s in self._segments if s not in idle]
            retired: list[tuple[Lendable, list[int]]] = []
            for segment in idle:
                retired.append((segment, [b.peer for b in borrowers if b.locks.pop(segment.id, None)]))
                for borrower in borrowers:
                    borrower.mapped.discard(segment.id)
            return retired

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
