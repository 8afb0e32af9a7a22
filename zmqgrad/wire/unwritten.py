"""Frames that are no bytes yet: whoever has room for them has them written there, so they are copied once.

A tensor with gaps, or many small ones, have to be packed before they can travel. Packed first and then copied
into shared memory, they would be copied twice, once into fresh memory, which costs most. What lies on a
device need not become bytes at all, where its reader sees the memory of that device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

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


class OnDevice(Unwritten):
    """What lies on a device: it is copied to other memory of the device, or written as bytes."""

    __slots__ = ()

    made: ClassVar[bool] = False
    """Was there ever one in this process? Most have none, and need not look for them."""

    @property
    @abstractmethod
    def device(self) -> str:
        """The name of the device."""


class Foreign(ABC):
    """A frame that came and is no bytes: it lies on a device, in memory of who sent it."""

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def copy_to(self, tensor: Any) -> None:
        """Fill ``tensor``, contiguous, of no more bytes, on a device: in the order of the current streams.

        Raises:
            RuntimeError: torch's words, if that cannot be.
        """


Frame = Buffer | Unwritten

Received = Buffer | Foreign


def written(frame: Frame) -> Buffer:
    """The bytes of ``frame``."""
    return frame.written() if isinstance(frame, Unwritten) else frame
