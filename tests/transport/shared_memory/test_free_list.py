"""The allocator against a model: a list of bytes that are taken or not."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from zmqgrad.transport.shared_memory.free_list import ALIGNMENT, COARSE, PAGE, FreeList, rounded

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
    def take(self, size: int) -> int:
        wanted = rounded(size)
        fitting = sorted((length, at) for at, length in self.gaps() if length >= wanted)
        offset = self.space.take(size)
        if not fitting:
            assert offset is None
            return -1
        assert offset == fitting[0][1]  # the smallest that fits, the lowest of these
        self.taken[offset] = wanted
        self.reached = max(self.reached, offset + wanted)
        return offset

    @rule(offset=consumes(offsets))
    def give_back(self, offset: int) -> None:
        if offset >= 0:
            del self.taken[offset]
            self.space.give_back(offset)

    @rule(offset=st.integers(0, SIZE))
    def give_back_what_is_no_block(self, offset: int) -> None:
        if offset not in self.taken:
            with pytest.raises(KeyError):
                self.space.give_back(offset)

    @rule()
    def untouch(self) -> None:
        self.space.untouch()
        self.reached = max((o + s for o, s in self.taken.items()), default=0)

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.space.free_ranges() == self.gaps()
        assert self.space.used == sum(self.taken.values())
        assert len(self.space) == len(self.taken)
        assert self.space.touched == self.reached
        assert all(offset % ALIGNMENT == 0 for offset in self.taken)


TestFreeList = FreeListAgainstModel.TestCase


def test_all_of_it_can_be_taken_and_comes_back_in_one_piece() -> None:
    space = FreeList(SIZE)
    offsets = [space.take(ALIGNMENT) for _ in range(SIZE // ALIGNMENT)]
    assert None not in offsets
    assert space.take(1) is None
    for offset in offsets[::2] + offsets[1::2]:
        assert offset is not None
        space.give_back(offset)
    assert space.free_ranges() == [(0, SIZE)]


def test_sizes_are_rounded_up_to_what_keeps_blocks_aligned() -> None:
    assert [rounded(n) for n in (0, 1, 64, 65)] == [64, 64, 64, 128]
    assert rounded(COARSE) == COARSE
    assert rounded(COARSE + 1) == COARSE + PAGE


def test_a_block_that_came_back_is_used_again_before_fresh_memory() -> None:
    space = FreeList(SIZE)
    first = space.take(100_000)
    second = space.take(100_000)
    assert first is not None
    space.give_back(first)
    assert space.take(100_000) == first
    assert second is not None
    assert space.touched == second + rounded(100_000)


@pytest.mark.parametrize("size", [0, 1, 63])
def test_nothing_fits_into_less_than_a_line(size: int) -> None:
    assert FreeList(size).take(1) is None
