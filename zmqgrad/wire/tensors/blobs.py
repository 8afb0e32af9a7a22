"""Where the bytes of the tensors of a message go: the header, a frame that small ones share, or their own."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from zmqgrad.errors import PayloadError
from zmqgrad.wire.messages import MAX_TENSORS, Blob, Place, Row, TensorDescriptor, Tensors
from zmqgrad.wire.tensors.modes import unseen
from zmqgrad.wire.unwritten import Frame, Unwritten

INLINE = 16 << 10
"""Blobs of up to so many bytes travel in the header; larger ones in a frame of their own."""

MANY = 64 << 10
LITTLE = 256
"""In a message with more than ``MANY`` bytes of tensors, only blobs of up to so many go in the header."""

ALIGNMENT = 64
"""Blobs that share a frame begin at multiples of so many bytes: enough for every dtype, and a cache line."""

_string_at = ctypes.string_at


def blob_of(owner: torch.Tensor, address: int, size: int, frames: list[Frame]) -> Blob:
    """The one blob of a message: ``size`` bytes at ``address``, which ``owner`` keeps alive."""
    if size <= INLINE:
        return Blob(Place.INLINE, size, _string_at(address, size) if size else b"")
    frames.append(window(owner, address, size))
    return Blob(Place.FRAME, size, b"", len(frames) - 1)


class Blobs:
    """Where the bytes of the tensors of one message go.

    What is small goes in the header. Where the small ones are many, they lie side by side in one frame
    instead, which needs no encoding and which tensors can be built on. :meth:`finish` must follow.
    """

    __slots__ = ("_inline", "_shared", "_shared_index", "_shared_size", "blobs", "frames")

    def __init__(self, frames: list[Frame], many: bool) -> None:
        self.blobs: list[Blob] = []
        self.frames = frames
        self._inline = LITTLE if many else INLINE
        self._shared: list[bytes] = []
        self._shared_index = -1
        self._shared_size = 0

    def add(self, owner: torch.Tensor, address: int, size: int) -> int:
        """Take in ``size`` bytes at ``address``, which ``owner`` keeps alive; gives the blob's number."""
        if size <= INLINE:
            return self.add_bytes(_string_at(address, size) if size else b"")
        self.blobs.append(Blob(Place.FRAME, size, b"", len(self.frames)))
        self.frames.append(window(owner, address, size))
        return len(self.blobs) - 1

    def add_packed(self, t: torch.Tensor) -> int:
        """Take in the elements of ``t``, which has gaps, side by side; gives the blob's number."""
        return self.add_unwritten(_Packed(t))

    def add_bytes(self, data: bytes) -> int:
        """Take in ``data``; gives the blob's number."""
        size = len(data)
        if size <= self._inline:
            blob = Blob(Place.INLINE, size, data)
        elif size <= INLINE:
            if self._shared_index < 0:
                self._shared_index = len(self.frames)
                self.frames.append(b"")  # finish() puts them here
            gap = -self._shared_size % ALIGNMENT
            if gap:
                self._shared.append(bytes(gap))
            offset = self._shared_size + gap
            self._shared.append(data)
            self._shared_size = offset + size
            blob = Blob(Place.FRAME, size, b"", self._shared_index, offset)
        else:
            blob = Blob(Place.FRAME, size, b"", len(self.frames))
            self.frames.append(data)
        self.blobs.append(blob)
        return len(self.blobs) - 1

    def add_unwritten(self, data: Unwritten) -> int:
        """Take in what has yet to be written; gives the blob's number."""
        size = len(data)
        if size <= INLINE:
            return self.add_bytes(bytes(data.written()) if size else b"")
        self.blobs.append(Blob(Place.FRAME, size, b"", len(self.frames)))
        self.frames.append(data)
        return len(self.blobs) - 1

    def finish(self, descriptors: Sequence[TensorDescriptor], rows: Sequence[Row] = ()) -> Tensors:
        """All is taken in.

        Raises:
            PayloadError: if that is more than a message holds: its reader would refuse it.
        """
        if max(len(descriptors), len(self.blobs)) > MAX_TENSORS:
            raise PayloadError(
                f"{len(descriptors)} tensors cannot be sent at once (at most {MAX_TENSORS}); join some"
            )
        if self._shared_index >= 0:
            self.frames[self._shared_index] = b"".join(self._shared)
        return Tensors(tuple(descriptors), tuple(self.blobs), tuple(rows))


def window(owner: torch.Tensor, address: int, size: int) -> memoryview:
    """``size`` bytes of ``owner`` at ``address``, which live as long as this does."""
    array: Any = (ctypes.c_char * size).from_address(address)
    array.owner = owner
    return memoryview(array).cast("B")


class _Packed(Unwritten):
    """The elements of a tensor with gaps."""

    __slots__ = ("_size", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._size = tensor.nbytes

    def __len__(self) -> int:
        return self._size

    @unseen
    def write_to(self, room: memoryview) -> None:
        t = self._tensor
        torch.frombuffer(room, dtype=torch.uint8).view(t.dtype).view(t.shape).copy_(t)

    @unseen
    def written(self) -> memoryview:
        packed = self._tensor.contiguous()
        return window(packed, packed.data_ptr(), packed.nbytes)
