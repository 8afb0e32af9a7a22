"""Frames whose bytes are written straight into the memory of the transport, so that they are copied once.

A non-contiguous tensor and a batch of small tensors have to be packed before they can be sent. Packing them
first and copying the result into shared memory would copy twice, once into fresh memory, which costs most.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

Buffer = bytes | bytearray | memoryview


class LazyFrame(ABC):
    """A frame that is written on demand; ``len`` is its size in bytes.

    What it is made of must not change before the message is sent.
    """

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def write_to(self, buffer: memoryview) -> None:
        """Write the frame to ``buffer``, which has exactly its size. Keeps no reference to ``buffer``."""

    @abstractmethod
    def materialize(self) -> Buffer:
        """Return the frame in memory of its own."""


Frame = Buffer | LazyFrame


def materialize(frame: Frame) -> Buffer:
    """Return the bytes of ``frame``."""
    return frame.materialize() if isinstance(frame, LazyFrame) else frame
