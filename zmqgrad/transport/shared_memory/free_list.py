"""Best-fit allocation of the bytes of one segment. Pure: numbers in, numbers out; the caller holds a lock.

Among free ranges of equal size, the one at the lowest offset is used. Memory that was used before is thus
used again and stays warm (a fresh page costs ten times as much as copying into it), and the untouched end of
a segment, which is its largest free range, is touched last. Adjacent free ranges are merged.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

ALIGNMENT = 64
"""Blocks begin at multiples of this many bytes: a cache line, and enough for every dtype."""

PAGE_BYTES = 4096
"""Blocks of at least :data:`PAGE_GRANULAR_BYTES` are multiples of a page, so blocks of similar size fit each
other's place."""

PAGE_GRANULAR_BYTES = 64 << 10


def align_up(size: int, alignment: int = ALIGNMENT) -> int:
    """Round ``size`` up to a multiple of ``alignment``."""
    return -(-size // alignment) * alignment


def block_size(size: int) -> int:
    """Return the number of bytes allocated for a request of ``size`` bytes."""
    step = PAGE_BYTES if size >= PAGE_GRANULAR_BYTES else ALIGNMENT
    return -(-size // step) * step or ALIGNMENT


class FreeList:
    """Free and allocated ranges of ``size`` bytes.

    ``high_water`` is the end of the highest block allocated since the last :meth:`reset_high_water`: memory
    beyond it was never written. ``used`` counts the allocated bytes, ``len`` the blocks.
    """

    def __init__(self, size: int) -> None:
        self.size = size // ALIGNMENT * ALIGNMENT
        self.high_water = 0
        self.used: int
        self._blocks: dict[int, int]  # offset -> size of each block
        self._by_size: list[tuple[int, int]]  # (size, offset) of each free range, sorted
        self._by_start: dict[int, int]  # offset -> size of each free range
        self._by_end: dict[int, int]  # end -> offset of each free range
        self.keep_only(())

    def keep_only(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Allocate these ``blocks``, offset and size of each, and free all else, whatever was half done."""
        self._blocks = {offset: block_size(size) for offset, size in blocks}
        self.used = sum(self._blocks.values())
        self._by_size, self._by_start, self._by_end = [], {}, {}
        end = 0
        for offset, size in [*sorted(self._blocks.items()), (self.size, 0)]:
            if offset > end:
                self._add(end, offset - end)
            end = offset + size

    def allocate(self, size: int) -> int | None:
        """Return the offset of a new block of at least ``size`` bytes, or None if no free range fits."""
        needed = block_size(size)
        index = bisect_left(self._by_size, (needed, -1))
        if index == len(self._by_size):
            return None
        found, offset = self._by_size[index]
        end = offset + needed
        del self._by_size[index], self._by_start[offset], self._by_end[offset + found]
        if found > needed:
            self._add(end, found - needed)
        self._blocks[offset] = needed
        self.used += needed
        if end > self.high_water:
            self.high_water = end
        return offset

    def free(self, offset: int) -> None:
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
        """Return ``(offset, size)`` of each free range, by offset."""
        return sorted(self._by_start.items())

    def reset_high_water(self) -> None:
        """Lower ``high_water`` to the end of the last block, after the memory beyond it was trimmed."""
        self.high_water = max((offset + size for offset, size in self._blocks.items()), default=0)

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
