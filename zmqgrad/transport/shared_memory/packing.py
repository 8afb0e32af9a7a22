"""How frames share pieces of memory. Pure: sizes in, places out.

Large frames have a piece each, so that each goes back when its own tensor dies. Small ones lie side by side
in one piece: a hundred small tensors are one block, or one frame, not a hundred.
"""

from __future__ import annotations

from collections.abc import Sequence

from zmqgrad.transport.shared_memory.free_list import ALIGNMENT
from zmqgrad.wire.messages import Window

LARGE = 128 << 10
"""Frames of at least so many bytes have a piece to themselves."""


def arrange(sizes: Sequence[int]) -> tuple[list[int], tuple[Window, ...]]:
    """The size of each piece, and for each of the frames of ``sizes`` where it lies."""
    if len(sizes) == 1:
        return [max(sizes[0], 1)], (Window(0, 0, sizes[0]),)
    pieces: list[int] = []
    windows: list[Window] = []
    shared = -1  # number of the piece that small frames share
    for size in sizes:
        if size >= LARGE:
            windows.append(Window(len(pieces), 0, size))
            pieces.append(size)
            continue
        if shared < 0:
            shared = len(pieces)
            pieces.append(0)
        start = -(-pieces[shared] // ALIGNMENT) * ALIGNMENT
        windows.append(Window(shared, start, size))
        pieces[shared] = max(start + size, 1)  # no piece is empty, even if all its frames are
    return pieces, tuple(windows)
