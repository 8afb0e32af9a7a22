"""What peers have lent to this worker of memory on devices, the blocks in use, and those to give back.

A block is in use from its arrival until the device has copied it out, or until it was dropped unread. Either
way its last reference goes, a weak reference notices, and its callback only enqueues (DESIGN 16.3). Copies
under way are looked at from time to time: nothing tells when a device is done.

A fork shares no memory of devices, so blocks need not be pinned at one.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from zmqgrad.errors import ProtocolError
from zmqgrad.transport.arena.allocator import ALIGNMENT
from zmqgrad.transport.arena.borrowings import MAX_SEGMENTS
from zmqgrad.transport.arena.debts import Debts
from zmqgrad.transport.arena.segment import NONCE, MappedSegment, supported
from zmqgrad.transport.devices.port import Done, Opened, Port
from zmqgrad.wire.messages import DeviceAnswer, DeviceOffer, DevicePiece
from zmqgrad.wire.unwritten import Foreign


class _Use(weakref.ref[Any]):
    """Notices the end of block ``block``."""

    __slots__ = ("block",)
    block: int


class _Source:
    """Memory of a peer that is open here, and which of its blocks are in use."""

    def __init__(
        self, page: MappedSegment, opened: Opened, size: int, dead: deque[int], copies: _Copies
    ) -> None:
        self.opened = opened
        self.copies = copies
        self.in_use: dict[int, _Use] = {}
        self._page = page  # holds the lock, as long as any block is in use
        self._size = size
        self._dead = dead

    def open(self, piece: DevicePiece) -> Block:
        """A block, which is in use until nothing refers to it."""
        if piece.block in self.in_use:
            raise ProtocolError(f"block {piece.block} on a device came twice")
        if piece.offset % ALIGNMENT or not 0 < piece.size <= self._size - piece.offset:
            raise ProtocolError(
                f"a block of {piece.size} bytes at {piece.offset} does not lie in its segment of "
                f"{self._size} on a device"
            )
        block = Block(self, piece)
        use = _Use(block, self._died)
        use.block = piece.block
        self.in_use[piece.block] = use
        return block

    def _died(self, use: _Use) -> None:
        """A callback of the collector: runs at any line of any thread, and so enqueues and nothing else."""
        self.in_use.pop(use.block, None)
        self._dead.append(use.block)
        self.copies.owing()


class Block(Foreign):
    """A frame that lies in a peer's memory on a device."""

    __slots__ = ("__weakref__", "_piece", "_source")

    def __init__(self, source: _Source, piece: DevicePiece) -> None:
        self._source = source
        self._piece = piece

    def __len__(self) -> int:
        return self._piece.size

    def copy_to(self, tensor: Any) -> None:
        """Fill ``tensor``; see :class:`~zmqgrad.wire.unwritten.Foreign`."""
        copied = self._source.opened.copy(self._piece.offset, self._piece.ready, tensor)
        self._source.copies.add(copied, self)


class _Copies:
    """Copies out of blocks that are under way, and the blocks, which are in use as long."""

    def __init__(self, owing: Callable[[], None]) -> None:
        self.owing = owing
        self._lock = threading.Lock()
        self._under_way: list[tuple[Done, Block]] = []

    def __len__(self) -> int:
        return len(self._under_way)

    def add(self, copied: Done, block: Block) -> None:
        """``block`` is in use until ``copied`` is done."""
        with self._lock:
            self._under_way.append((copied, block))
        self.owing()

    def finish(self) -> None:
        """Wait until all that is under way now is done."""
        with self._lock:
            under_way = [copied for copied, _ in self._under_way]
        for copied in under_way:
            copied.wait()
        self.look()

    def look(self) -> None:
        """Let go of blocks that have been copied."""
        with self._lock:
            before = self._under_way
            self._under_way = [each for each in before if not each[0].done()]
        del before  # not with the lock held: here they die


class DeviceBorrowings:
    """Blocks of peers. ``owing`` is called, at any line of any thread, when there may be one to give back."""

    def __init__(self, port: Port, owing: Callable[[], None]) -> None:
        self._port = port
        self._copies = _Copies(owing)
        self._sources: dict[tuple[int, int], _Source] = {}  # by peer and segment id
        self.debts = Debts()
        self._closed = False

    def accept(self, peer: int, offer: DeviceOffer) -> DeviceAnswer:
        """Open what ``peer`` offers; the answer to it, whether or not that went well. May take seconds."""
        if not supported():
            return DeviceAnswer(b"", "this system has no shared memory of this kind")
        if sum(1 for p, _ in list(self._sources) if p == peer) >= MAX_SEGMENTS:
            return DeviceAnswer(b"", f"{MAX_SEGMENTS} segments are open already")
        try:
            page = MappedSegment(offer.page)
            nonce = page.read(offer.page.nonce_at, NONCE)
            opened = self._port.open(offer.device, offer.handle, offer.size, offer.page.pid == os.getpid())
        except (OSError, ValueError, OverflowError) as e:
            return DeviceAnswer(b"", str(e))
        self._sources[peer, offer.segment] = _Source(
            page, opened, offer.size, self.debts.to(peer), self._copies
        )
        if self._closed:  # meanwhile
            self._sources.clear()
        return DeviceAnswer(nonce)

    def weave(self, peer: int, pieces: Sequence[DevicePiece], frames: Sequence[Any]) -> list[Any]:
        """All frames of a message: those of ``pieces`` at their places among the other ``frames``.

        Raises:
            ProtocolError: if a piece does not fit what ``peer`` has lent, or the frames.
        """
        woven = list(frames)
        last = -1
        for piece in pieces:
            source = self._sources.get((peer, piece.segment))
            if source is None:
                raise ProtocolError(
                    f"a block came of segment {piece.segment} on a device, which worker {peer} never offered"
                )
            if not last < piece.frame <= len(woven):
                raise ProtocolError(f"frame {piece.frame} on a device came with {len(woven)} before it")
            last = piece.frame
            woven.insert(piece.frame, source.open(piece))
        return woven

    def owed(self, peer: int) -> bool:
        """Is there a block to give back to ``peer``?"""
        if self._copies:
            self._copies.look()
        return bool(self.debts.owed(peer))

    def look(self) -> None:
        """Let go of what has been copied."""
        self._copies.look()

    def finish(self) -> None:
        """Wait until the devices have copied what is being copied."""
        self._copies.finish()

    def copying(self) -> bool:
        """Are copies under way?"""
        return len(self._copies) > 0

    def withdraw(self, peer: int, segment: int) -> None:
        """``peer`` wants this segment back."""
        self._sources.pop((peer, segment), None)

    def forget(self, peer: int) -> None:
        """``peer`` is gone: its memory stays open as long as a block of it is in use, no longer."""
        self.debts.forget(peer)
        for key in [k for k in list(self._sources) if k[0] == peer]:
            self._sources.pop(key, None)

    def close(self) -> None:
        """Forget everybody. What is being copied stays in use until :meth:`look` finds that it is done."""
        self._closed = True
        self._copies.look()
        self.debts.clear()
        self._sources.clear()

    def statistics(self) -> dict[str, int]:
        """Segments open, and blocks in use."""
        sources = list(self._sources.values())
        return {"segments_open": len(sources), "blocks_in_use": sum(len(s.in_use) for s in sources)}
