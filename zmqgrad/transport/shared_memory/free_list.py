"""Which bytes of a segment are free. Pure: numbers in, numbers out; the caller holds a lock.

Best fit, lowest address among equals: what was used before is used again, so it stays warm (fresh memory
costs a page fault every 4 KB, ten times what copying costs), and the untouched end of a segment, being the
largest free range, is touched last. Neighbours that are free become one range.
"""

from __future__ import annotations

from bisect import bisect_left, insort

ALIGNMENT = 64
"""Blocks begin at multiples of so many bytes: a cache line, and enough for every dtype."""

PAGE = 4096
"""Blocks of :data:`COARSE` bytes and more are multiples of a page: sizes nearly alike fit each other."""

COARSE = 64 << 10


def rounded(size: int) -> int:
    """The bytes that a block for ``size`` bytes takes."""
    step = PAGE if size >= COARSE else ALIGNMENT
    return -(-max(size, 1) // step) * step


class FreeList:
    """The free ranges of ``size`` bytes. ``touched`` is where what was never used begins."""

    def __init__(self, size: int) -> None:
        self.size = size // ALIGNMENT * ALIGNMENT
        self.touched = 0
        self.used = 0
        self._blocks: dict[int, int] = {}  # offset -> size, of what is taken
        self._by_size: list[tuple[int, int]] = []  # (size, offset) of what is free, sorted
        self._by_start: dict[int, int] = {}  # offset -> size
        self._by_end: dict[int, int] = {}  # end -> offset
        if self.size:
            self._add(0, self.size)

    def take(self, size: int) -> int | None:
        """The offset of a block of at least ``size`` bytes; None if no free range is large enough."""
        wanted = rounded(size)
        place = bisect_left(self._by_size, (wanted, -1))
        if place == len(self._by_size):
            return None
        found, offset = self._by_size[place]
        self._remove(offset, found)
        if found > wanted:
            self._add(offset + wanted, found - wanted)
        self._blocks[offset] = wanted
        self.used += wanted
        self.touched = max(self.touched, offset + wanted)
        return offset

    def give_back(self, offset: int) -> None:
        """Free the block at ``offset``.

        Raises:
            KeyError: if no block begins there.
        """
        size = self._blocks.pop(offset)
        self.used -= size
        before = self._by_end.get(offset)
        if before is not None:
            self._remove(before, offset - before)
            offset, size = before, size + offset - before
        after = self._by_start.get(offset + size)
        if after is not None:
            self._remove(offset + size, after)
            size += after
        self._add(offset, size)

    def free_ranges(self) -> list[tuple[int, int]]:
        """``(offset, size)`` of what is free, by offset."""
        return sorted(self._by_start.items())

    def untouch(self) -> None:
        """What is free behind the last block counts as never used: its memory was given back."""
        self.touched = max((offset + size for offset, size in self._blocks.items()), default=0)

    def __len__(self) -> int:
        return len(self._blocks)

    def _add(self, offset: int, size: int) -> None:
        insort(self._by_size, (size, offset))
        self._by_start[offset] = size
        self._by_end[offset + size] = offset

    def _remove(self, offset: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, offset))]
        del self._by_start[offset]
        del self._by_end[offset + size]

    def __repr__(self) -> str:
        return f"<FreeList: {self.used} of {self.size} bytes in {len(self._blocks)} blocks>"
