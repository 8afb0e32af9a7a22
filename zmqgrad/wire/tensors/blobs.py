"""Placement of tensor bytes: in the header, in a frame that small tensors share, or in their own frame."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from zmqgrad.errors import PayloadError
from zmqgrad.wire.lazy_frame import Frame, LazyFrame
from zmqgrad.wire.messages import MAX_TENSORS, Blob, BlobLocation, TensorBatch, TensorDescriptor, Tensors
from zmqgrad.wire.tensors.memory import copyable
from zmqgrad.wire.tensors.modes import without_modes

MAX_INLINE_BYTES = 16_000
"""Limit for blobs in the header of a message; larger ones travel in a frame of their own. A message of that
size still fits, with its header, in one packet within a host (16 KiB)."""

MAX_INLINE_BYTES_AMONG_MANY = 256
"""Limit for blobs in the header in a message with more than ``MAX_INLINE_BYTES`` of tensors."""

MAX_SHARED_BYTES = 1 << 20
"""A frame of this size gets no more blobs: one tensor that is kept alive keeps the frame that it is in."""

ALIGNMENT_BYTES = 64
"""Alignment of blobs that share a frame: enough for every dtype, and one cache line."""

Place = tuple[Any, int, int]
"""What keeps some memory alive, its address, and its size in bytes."""

_string_at = ctypes.string_at


def blob_of(owner: Any, address: int, size: int, frames: list[Frame]) -> Blob:
    """The blob of a message with one tensor: ``size`` bytes at ``address``, which ``owner`` keeps alive."""
    if size <= MAX_INLINE_BYTES:
        return Blob(BlobLocation.INLINE, size, _string_at(address, size) if size else b"")
    frames.append(window(owner, address, size))
    return Blob(BlobLocation.FRAME, size, b"", len(frames) - 1)


class Blobs:
    """Collects the blobs of the tensors of one message.

    Small blobs go in the header. If there are many, they share frames instead, which need no encoding and on
    which tensors can be built without a copy. :meth:`finish` must be called last.
    """

    __slots__ = ("_inline", "_shared", "_shared_index", "_shared_size", "blobs", "frames")

    def __init__(self, frames: list[Frame], many: bool) -> None:
        self.blobs: list[Blob] = []
        self.frames = frames
        self._inline = MAX_INLINE_BYTES_AMONG_MANY if many else MAX_INLINE_BYTES
        self._shared: list[bytes] = []
        self._shared_index = -1
        self._shared_size = 0

    def add(self, owner: Any, address: int, size: int) -> int:
        """Add ``size`` bytes at ``address``, which ``owner`` keeps alive. Returns the index of the blob."""
        if size <= MAX_INLINE_BYTES:
            data = _string_at(address, size) if size else b""
            if size > self._inline:
                return self.add_bytes(data)
            self.blobs.append(Blob(BlobLocation.INLINE, size, data))
            return len(self.blobs) - 1
        self.blobs.append(Blob(BlobLocation.FRAME, size, b"", len(self.frames)))
        self.frames.append(window(owner, address, size))
        return len(self.blobs) - 1

    def add_packed(self, t: torch.Tensor) -> int:
        """Add the elements of non-contiguous ``t``, packed. Returns the index of the blob."""
        return self.add_lazy(_Packed(t))

    def add_bytes(self, data: bytes) -> int:
        """Add ``data``. Returns the index of the blob."""
        size = len(data)
        if size <= self._inline:
            blob = Blob(BlobLocation.INLINE, size, data)
        elif size <= MAX_INLINE_BYTES:
            if self._shared_size >= MAX_SHARED_BYTES:
                self._end_shared()
            if self._shared_index < 0:
                self._shared_index = len(self.frames)
                self.frames.append(b"")  # filled by _end_shared()
            gap = -self._shared_size % ALIGNMENT_BYTES
            if gap:
                self._shared.append(bytes(gap))
            offset = self._shared_size + gap
            self._shared.append(data)
            self._shared_size = offset + size
            blob = Blob(BlobLocation.FRAME, size, b"", self._shared_index, offset)
        else:
            blob = Blob(BlobLocation.FRAME, size, b"", len(self.frames))
            self.frames.append(data)
        self.blobs.append(blob)
        return len(self.blobs) - 1

    def add_lazy(self, data: LazyFrame) -> int:
        """Add a frame that is written later. Returns the index of the blob."""
        size = len(data)
        if size <= MAX_INLINE_BYTES:
            return self.add_bytes(bytes(data.materialize()) if size else b"")
        self.blobs.append(Blob(BlobLocation.FRAME, size, b"", len(self.frames)))
        self.frames.append(data)
        return len(self.blobs) - 1

    def finish(self, descriptors: Sequence[TensorDescriptor], batches: Sequence[TensorBatch] = ()) -> Tensors:
        """Build the header struct after all blobs were added.

        Raises:
            PayloadError: if there are more tensors than a message may hold.
        """
        if max(len(descriptors), len(self.blobs)) > MAX_TENSORS:
            raise PayloadError(
                f"{len(descriptors)} tensors cannot be sent at once (at most {MAX_TENSORS}); join some"
            )
        if self._shared_index >= 0:
            self._end_shared()
        return Tensors(tuple(descriptors), tuple(self.blobs), tuple(batches))

    def _end_shared(self) -> None:
        self.frames[self._shared_index] = b"".join(self._shared)
        self._shared, self._shared_index, self._shared_size = [], -1, 0


def window(owner: Any, address: int, size: int) -> memoryview:
    """A view of ``size`` bytes at ``address``, which keeps ``owner``, and so the bytes, alive.

    That is a storage, or a tensor of this library: one of the program may be given other memory before the
    bytes are sent (``.data``).
    """
    array: Any = (ctypes.c_char * size).from_address(address)
    array.owner = owner
    return memoryview(array).cast("B")


class _Packed(LazyFrame):
    """The elements of a non-contiguous tensor, packed."""

    __slots__ = ("_size", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = copyable(tensor.detach())
        self._size = tensor.nbytes

    def __len__(self) -> int:
        return self._size

    @without_modes
    def write_to(self, buffer: memoryview) -> None:
        t = self._tensor
        torch.frombuffer(buffer, dtype=torch.uint8).view(t.dtype).view(t.shape).copy_(t)

    @without_modes
    def materialize(self) -> memoryview:
        packed = self._tensor.contiguous()
        return window(packed, packed.data_ptr(), packed.nbytes)
