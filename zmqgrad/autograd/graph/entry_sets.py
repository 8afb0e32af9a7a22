"""Sets of entries that share memory and are compared at once. Pure.

A recurrence whose *n* states are all sent has *n* nested sets of entries: as bit masks they would have n² / 2
bits, and as much work. So a set is a binary tree of blocks of bits, and equal trees are one object (hash
consing; Filliâtre and Conchon, "Type-safe modular hash-consing", 2006). The union of two sets visits only
the parts where they differ, and takes every other part from one of them.
"""

from __future__ import annotations

from collections.abc import Iterator

BLOCK_BITS = 256
"""Size of a block. Sets of so few entries are bit masks, and nothing else."""


class _Branch:
    """Two halves of a set. Equal branches are one object, so they are compared by identity."""

    __slots__ = ("high", "low")

    def __init__(self, low: EntrySet, high: EntrySet) -> None:
        self.low = low
        self.high = high


EntrySet = int | _Branch
"""A set: hashable, and equal sets (of one :class:`EntrySets`) compare equal. Not zero, which is falsy."""


class EntrySets:
    """Makes sets of the numbers below ``entries``."""

    def __init__(self, entries: int) -> None:
        self._size = BLOCK_BITS
        while self._size < entries:
            self._size *= 2
        self._branches: dict[tuple[EntrySet, EntrySet], _Branch] = {}
        self._unions: dict[tuple[EntrySet, EntrySet], EntrySet] = {}

    def of(self, entry: int) -> EntrySet:
        """Return the set of one entry."""
        found: EntrySet = 1 << entry % BLOCK_BITS
        size = BLOCK_BITS
        while size < self._size:
            found = self._branch(0, found) if entry & size else self._branch(found, 0)
            size *= 2
        return found

    def union(self, a: EntrySet, b: EntrySet) -> EntrySet:
        """Return the union of two sets."""
        if a is b or not b:
            return a
        if not a:
            return b
        if isinstance(a, int):
            assert isinstance(b, int), "the sets differ in height"
            return a | b
        assert not isinstance(b, int), "the sets differ in height"
        found = self._unions.get((a, b))
        if found is None:
            found = self._branch(self.union(a.low, b.low), self.union(a.high, b.high))
            self._unions[a, b] = found
        return found

    def entries(self, of: EntrySet) -> Iterator[int]:
        """Yield the entries in a set, lowest first."""
        return self._entries(of, 0, self._size)

    def _entries(self, of: EntrySet, first: int, size: int) -> Iterator[int]:
        if isinstance(of, int):
            while of:
                lowest = of & -of
                yield first + lowest.bit_length() - 1
                of ^= lowest
        else:
            yield from self._entries(of.low, first, size // 2)
            yield from self._entries(of.high, first + size // 2, size // 2)

    def _branch(self, low: EntrySet, high: EntrySet) -> _Branch:
        found = self._branches.get((low, high))
        if found is None:
            found = self._branches[low, high] = _Branch(low, high)
        return found
