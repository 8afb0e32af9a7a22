"""Frames that are no bytes yet: whoever has room for them has them written there, so they are copied once.

A tensor with gaps, or many small ones, have to be packed before they can travel. Packed first and then copied
into shared memory, they would be copied twice, once into fresh memory, which costs most.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

Buffer = bytes | bytearray | memoryview


class Unwritten(ABC):
    """Bytes to be; ``len`` tells how many. Made of what must not change before the message is sent."""

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def write_to(self, room: memoryview) -> None:
        """Write them to ``room``, which has exactly their size, and keep no hold of it."""

    @abstractmethod
    def written(self) -> Buffer:
        """They, in memory of their own."""


Frame = Buffer | Unwritten


def written(frame: Frame) -> Buffer:
    """The bytes of ``frame``."""
    return frame.written() if isinstance(frame, Unwritten) else frame
