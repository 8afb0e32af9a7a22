"""One piece of memory on a device, to lend from, as its maker sees it.

Beside it lies a page of main memory: whoever opens the one maps the other. By the nonce on the page he proves
that he is on this host, and by the lock that he holds on it the kernel tells whether he, or a process of his,
may still look (:mod:`zmqgrad.transport.arena.segment`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from zmqgrad.transport.arena.allocator import PAGE, Allocator
from zmqgrad.transport.arena.segment import NONCE, Segment
from zmqgrad.transport.devices.port import Event, Port
from zmqgrad.wire.messages import DeviceOffer
from zmqgrad.wire.unwritten import OnDevice


class _Written:
    """What was queued to write some blocks, and how many of them are not free yet."""

    __slots__ = ("blocks", "event")

    def __init__(self, event: Event, blocks: int) -> None:
        self.event = event
        self.blocks = blocks


class DeviceSegment:
    """``size`` bytes on ``device``.

    Raises:
        OSError: if there are none.
    """

    def __init__(self, port: Port, device: str, size: int) -> None:
        self._memory = port.allocate(device, size)
        self._page = Segment(PAGE)
        self.id = self._page.id
        self.nonce = self._page.nonce
        self.size = size
        self.space = Allocator(size)
        self.space.take(NONCE)  # as every lender expects, though the nonce is on the page
        self._handles: dict[int, bytes] = {}  # by the lock of who has them
        self._lock = threading.Lock()  # guards the events
        self._written: dict[int, _Written] = {}  # what was queued to write a block, by its offset
        self._idle: list[Event] = []
        self._late: list[Event] = []  # of blocks that are free again; they may not have been written yet
        self._retired = False
        self._closed = False

    def offer(self, lock: int) -> DeviceOffer:
        """What a peer has to know to open it; it shall hold ``lock``. Called with the lender's lock held.

        Raises:
            Unshareable: if memory of this device cannot be opened by others.
        """
        handle = self._handles[lock] = self._memory.share()
        return DeviceOffer(self._page.offer(lock), self._memory.device, self.size, handle)

    def is_held(self, lock: int) -> bool:
        """Does anybody hold ``lock``, so may look at what was lent to him?"""
        return self._page.is_held(lock)

    def write(self, frames: Sequence[tuple[int, OnDevice]]) -> bytes:
        """Queue copies of ``frames`` to their offsets on the current stream; the handle of the event behind.

        A reader may have dropped an earlier block unread, before what was to be in it had been written, on
        another stream: the copies wait for that.
        """
        with self._lock:
            late = self._late
            self._late = [e for e in late if not e.done()]
            self._idle += [e for e in late if e not in self._late]
            event = self._idle.pop() if self._idle else self._memory.new_event()
            written = _Written(event, len(frames))
            for offset, _ in frames:
                self._written[offset] = written
            after = tuple(self._late)
        self._memory.write(frames, event, after)
        return event.handle

    def take_back(self, offset: int) -> None:
        """The block at ``offset`` is free. Called with the lender's lock held."""
        with self._lock:
            written = self._written.pop(offset, None)
            if written is not None:
                written.blocks -= 1
                if not written.blocks:
                    self._late.append(written.event)
        self.space.give_back(offset)

    def trim(self) -> int:
        """Nothing: memory of a device is taken whole, and others have it open."""
        return 0

    def memory(self) -> int:
        """Bytes on the device."""
        return self.size

    def retire(self) -> None:
        """Need the memory no more. It is free when all have closed it: see :meth:`is_left`. Idempotent."""
        if self._retired:
            return
        self._retired = True
        with self._lock:
            events = {written.event for written in self._written.values()} | set(self._late)
        self._memory.close([event for event in events if not event.done()])

    def is_left(self) -> bool:
        """Has everybody closed it, or ended, who had it open?"""
        for lock, handle in list(self._handles.items()):
            if not self._page.is_held(lock):
                # He is dead, or never opened it, and nobody else will say so; or he has said so himself, and
                # it does no harm to say it twice.
                self._memory.unshare(handle)
                del self._handles[lock]
        return not self._handles

    def close(self) -> None:
        """Lend no more. Who has it open keeps it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.retire()
        self.is_left()
        self._page.close()

    def __repr__(self) -> str:
        return f"<DeviceSegment {self.id:x} on {self._memory.device}: {self.space!r}>"


def maker(port: Port, device: str) -> Any:
    """What makes segments on ``device``, for a lender."""
    return lambda size: DeviceSegment(port, device, size)
