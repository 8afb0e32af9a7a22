"""Where frames lie in their buffers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.transport.shared_memory.free_list import ALIGNMENT
from zmqgrad.transport.shared_memory.packing import MAX_SHARED_BYTES, OWN_BUFFER_BYTES, plan

sizes = st.lists(st.integers(0, 500) | st.integers(OWN_BUFFER_BYTES - 1, OWN_BUFFER_BYTES + 1), max_size=20)


@given(sizes)
def test_every_frame_has_a_slice_of_its_own(sizes: list[int]) -> None:
    buffers, slices = plan(sizes)
    assert [w.size for w in slices] == sizes
    assert all(w.offset % ALIGNMENT == 0 for w in slices)
    for number, size in enumerate(buffers):
        inside = sorted((w.offset, w.offset + w.size) for w in slices if w.buffer == number)
        assert inside
        assert inside[-1][1] <= size
        assert all(one[1] <= two[0] for one, two in pairwise(inside))


@given(sizes)
def test_large_frames_are_alone_and_small_ones_together(sizes: list[int]) -> None:
    buffers, slices = plan(sizes)
    large = [w for w in slices if w.size >= OWN_BUFFER_BYTES]
    assert all(w.offset == 0 and buffers[w.buffer] == w.size for w in large)
    assert len({w.buffer for w in large}) == len(large)
    assert len({w.buffer for w in slices if w.size < OWN_BUFFER_BYTES}) <= 1 + sum(sizes) // MAX_SHARED_BYTES


def test_a_shared_buffer_ends_so_that_no_tensor_keeps_much_more_than_itself() -> None:
    buffers, slices = plan([100_000] * 100)
    assert max(buffers) < MAX_SHARED_BYTES + OWN_BUFFER_BYTES
    assert all(w.offset + w.size <= buffers[w.buffer] for w in slices)
    assert len(buffers) == len({w.buffer for w in slices})
