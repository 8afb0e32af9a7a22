"""The allocator against a model: a list of bytes that are taken or not."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from zmqgrad.transport.shared_memory.free_list import (
    ALIGNMENT,
    PAGE_BYTES,
    PAGE_GRANULAR_BYTES,
    FreeList,
    block_size,
)

SIZE = 1 << 20


class FreeListAgainstModel(RuleBasedStateMachine):
    """The model knows which spans are taken; whatever is not, is free."""

    offsets: Bundle[int] = Bundle("offsets")

    def __init__(self) -> None:
        super().__init__()
        self.space = FreeList(SIZE)
        self.taken: dict[int, int] = {}
        self.reached = 0

    def gaps(self) -> list[tuple[int, int]]:
        """The free ranges, as large as they can be."""
        found, at = [], 0
        for offset, size in sorted(self.taken.items()):
            if offset > at:
                found.append((at, offset - at))
            at = offset + size
        return [*found, (at, SIZE - at)] if at < SIZE else found

    @rule(target=offsets, size=st.integers(0, 3000) | st.integers(0, SIZE // 3) | st.just(SIZE))
    def allocate(self, size: int) -> int:
        wanted = block_size(size)
        fitting = sorted((length, at) for at, length in self.gaps() if length >= wanted)
        offset = self.space.allocate(size)
        if not fitting:
            assert offset is None
            return -1
        assert offset == fitting[0][1]  # the smallest that fits, the lowest of these
        self.taken[offset] = wanted
        self.reached = max(self.reached, offset + wanted)
        return offset

    @rule(offset=consumes(offsets))
    def free(self, offset: int) -> None:
        if offset >= 0:
            del self.taken[offset]
            self.space.free(offset)

    @rule(offset=st.integers(0, SIZE))
    def free_an_offset_without_a_block(self, offset: int) -> None:
        if offset not in self.taken:
            with pytest.raises(KeyError):
                self.space.free(offset)

    @rule()
    def reset_high_water(self) -> None:
        self.space.reset_high_water()
        self.reached = max((o + s for o, s in self.taken.items()), default=0)

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.space.free_ranges() == self.gaps()
        assert self.space.used == sum(self.taken.values())
        assert len(self.space) == len(self.taken)
        assert self.space.high_water == self.reached
        assert all(offset % ALIGNMENT == 0 for offset in self.taken)


TestFreeList = FreeListAgainstModel.TestCase


def test_all_memory_can_be_allocated_and_merges_when_freed() -> None:
    space = FreeList(SIZE)
    offsets = [space.allocate(ALIGNMENT) for _ in range(SIZE // ALIGNMENT)]
    assert None not in offsets
    assert space.allocate(1) is None
    for offset in offsets[::2] + offsets[1::2]:
        assert offset is not None
        space.free(offset)
    assert space.free_ranges() == [(0, SIZE)]


def test_sizes_are_rounded_up_to_what_keeps_blocks_aligned() -> None:
    assert [block_size(n) for n in (0, 1, 64, 65)] == [64, 64, 64, 128]
    assert block_size(PAGE_GRANULAR_BYTES) == PAGE_GRANULAR_BYTES
    assert block_size(PAGE_GRANULAR_BYTES + 1) == PAGE_GRANULAR_BYTES + PAGE_BYTES


def test_a_freed_block_is_reused_before_fresh_memory() -> None:
    space = FreeList(SIZE)
    first = space.allocate(100_000)
    second = space.allocate(100_000)
    assert first is not None
    space.free(first)
    assert space.allocate(100_000) == first
    assert second is not None
    assert space.high_water == second + block_size(100_000)


@pytest.mark.parametrize("size", [0, 1, 63])
def test_a_free_list_smaller_than_a_cache_line_allocates_nothing(size: int) -> None:
    assert FreeList(size).allocate(1) is None
