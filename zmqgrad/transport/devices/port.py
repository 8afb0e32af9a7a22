"""What the exchange needs of a device: memory that other processes can open, copies, and events.

:mod:`zmqgrad.rpc.cuda_memory` does it with torch and CUDA; tests have a stand-in in main memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from zmqgrad.wire.unwritten import OnDevice


class Unshareable(Exception):
    """Memory of this device cannot be opened by other processes, now or ever; the text says why."""


class Done(Protocol):
    """Something queued on a device."""

    def done(self) -> bool:
        """Is it done? Does not wait. Of a device that has failed, nothing is ever done."""
        ...

    def wait(self) -> None:
        """Wait until it is :meth:`done`, or the device has failed."""
        ...


class Event(Done, Protocol):
    """A moment in the work of a device, which other processes can wait for. Used again and again."""

    handle: bytes
    """By which others open it."""


class Memory(Protocol):
    """Memory on a device, of this process."""

    device: str
    """What others know the device by: its UUID."""

    def share(self) -> bytes:
        """A handle by which one more process can open it.

        Raises:
            Unshareable: if that cannot be.
        """
        ...

    def unshare(self, handle: bytes) -> None:
        """Whoever was given ``handle`` does not have it open (any more), and cannot say so himself."""
        ...

    def new_event(self) -> Event:
        """An event of its device."""
        ...

    def write(self, frames: Iterable[tuple[int, OnDevice]], event: Event, after: Iterable[Event]) -> None:
        """Queue copies of ``frames`` to their offsets, and ``event`` behind them, on the current stream.

        The copies come after all of ``after``.
        """
        ...

    def close(self, after: Iterable[Event]) -> None:
        """It is needed no more, here, once all of ``after`` have come; others may still have it open."""
        ...


class Opened(Protocol):
    """Memory of another process, open here until nothing refers to it."""

    def copy(self, offset: int, ready: bytes, tensor: Any) -> Done:
        """Queue a copy of what is at ``offset`` to ``tensor``, behind the event of handle ``ready``.

        Both on the current stream. Gives what tells that the copy is done.

        Raises:
            RuntimeError: torch's words, if that cannot be.
        """
        ...


class Port(Protocol):
    """The devices of this process."""

    def limit(self, device: str) -> int:
        """Bytes of ``device`` that may be lent at a time; 0: none."""
        ...

    def allocate(self, device: str, size: int) -> Memory:
        """``size`` bytes on ``device``.

        Raises:
            OSError: if there are none.
        """
        ...

    def open(self, device: str, handle: bytes, size: int, own: bool) -> Opened:
        """What ``handle`` opens: ``size`` bytes on the device of that UUID; of this very process, if ``own``.

        Raises:
            OSError: if that cannot be.
        """
        ...
