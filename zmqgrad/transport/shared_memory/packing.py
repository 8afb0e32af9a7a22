"""How frames share buffers: which buffers a message needs, and which slice of them each frame is.

Each large frame has a buffer of its own, which is released when its own tensor dies. Small frames are slices
of shared buffers: a hundred small tensors are one block, or one ZeroMQ frame, not a hundred.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from zmqgrad.transport.base import Buffer
from zmqgrad.transport.local.connection import Offer
from zmqgrad.transport.shared_memory.arena import Lease
from zmqgrad.transport.shared_memory.free_list import ALIGNMENT
from zmqgrad.wire.lazy_frame import Frame, materialize
from zmqgrad.wire.messages import FrameBuffer, FrameSlice, Manifest

OWN_BUFFER_BYTES = 128 << 10
"""Frames of at least this size have a buffer of their own."""

MAX_SHARED_BYTES = 1 << 20
"""A buffer of this size gets no more frames: one tensor that is kept alive keeps the buffer that it is in."""

MIN_FRAMES_TO_JOIN = 8
"""With fewer frames, joining small ones for a socket saves less than it costs."""


class PreparedFrames(NamedTuple):
    """Frames ready to be sent: the manifest before the message's header, and the frames after it.

    ``offers`` are the segments of the blocks in the manifest.
    """

    manifest: Manifest | None
    frames: Sequence[Buffer]
    offers: tuple[Offer, ...] = ()


def plan(sizes: Sequence[int]) -> tuple[list[int], tuple[FrameSlice, ...]]:
    """Return the size of each buffer, and the slice for each frame of ``sizes``."""
    if len(sizes) == 1:
        return [sizes[0] or 1], (FrameSlice(0, 0, sizes[0]),)
    buffers: list[int] = []
    slices: list[FrameSlice] = []
    shared = -1  # index of the buffer that small frames share now
    for size in sizes:
        if size >= OWN_BUFFER_BYTES:
            slices.append(FrameSlice(len(buffers), 0, size))
            buffers.append(size)
            continue
        if shared < 0 or buffers[shared] >= MAX_SHARED_BYTES:
            shared = len(buffers)
            buffers.append(0)
        start = -(-buffers[shared] // ALIGNMENT) * ALIGNMENT
        slices.append(FrameSlice(shared, start, size))
        buffers[shared] = max(start + size, 1)  # a block has at least one byte, even for empty frames
    return buffers, tuple(slices)


def pack_for_socket(
    frames: Sequence[Frame], sizes: Sequence[int], released: tuple[int, ...]
) -> PreparedFrames:
    """Return ``frames`` as ZeroMQ frames; of many frames, small ones are joined: each costs system calls."""
    buffers, slices = plan(sizes) if len(frames) >= MIN_FRAMES_TO_JOIN else (sizes, ())
    if len(buffers) == len(frames):
        manifest = Manifest(released=released) if released else None
        return PreparedFrames(manifest, [materialize(f) for f in frames])
    joined: list[Any] = [None] * len(buffers)
    for part, frame in zip(slices, frames, strict=True):
        if part.size == buffers[part.buffer]:
            joined[part.buffer] = materialize(frame)
            continue
        if joined[part.buffer] is None:
            joined[part.buffer] = bytearray(buffers[part.buffer])
        joined[part.buffer][part.offset : part.offset + part.size] = materialize(frame)
    return PreparedFrames(Manifest(tuple(FrameBuffer(size=s) for s in buffers), slices, released), joined)


def unchanging(frame: Frame) -> Buffer:
    """``frame`` as one that nobody changes, not copied if possible: another host may get it as a block."""
    if array_beneath(frame) is not None:
        return frame  # type: ignore[return-value]
    data = memoryview(materialize(frame))
    array: Any = (ctypes.c_char * len(data)).from_buffer(bytearray(data) if data.readonly else data)
    array.lease = None
    return memoryview(array).cast("B")


def array_beneath(frame: object) -> Any:
    """The array that ``frame`` is a view of, if it does not change any more; None otherwise.

    Its attribute ``lease`` is None unless :meth:`SharedMemoryTransport.allocate` has made it.
    """
    while isinstance(frame, memoryview):  # of a pickled buffer, a view of a view
        frame = frame.obj
    return frame if hasattr(frame, "lease") else None


def shared_part(frame: Any) -> tuple[Lease, int] | None:
    """The lease of the array that ``frame`` is a view of, and where in it that begins; None if of none."""
    array = array_beneath(frame)
    if array is None or array.lease is None or not len(frame):
        return None
    return array.lease, ctypes.addressof(ctypes.c_char.from_buffer(frame)) - ctypes.addressof(array)
