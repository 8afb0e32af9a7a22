"""The receiving side: segments of peers that are mapped here, their blocks in use, and blocks to release.

A block is in use as long as anything is built on it. A weak reference notices the end. Until it is
released, a block belongs to its reader: the sender does not write to it. It is not released while a fork of
this process may read it: see Note [Forks and blocks] in :mod:`~zmqgrad.transport.shared_memory.forks`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from zmqgrad.errors import ProtocolError
from zmqgrad.runtime.finalizers import Notes
from zmqgrad.transport.base import Buffer, no_memory
from zmqgrad.transport.local.connection import check_is_of_system
from zmqgrad.transport.shared_memory import forks
from zmqgrad.transport.shared_memory.free_list import ALIGNMENT
from zmqgrad.transport.shared_memory.segment import MappedSegment
from zmqgrad.wire.messages import MAX_TENSORS, ArenaOffer, FrameBuffer, FrameSlice, Manifest


class BlockRef(weakref.ref[Any]):
    """Weak reference to the array of ``block``, which is in ``references``."""

    __slots__ = ("block", "references")
    __hash__ = object.__hash__  # that of a weak reference raises once its object is gone
    block: int
    references: dict[int, BlockRef]

    def end(self) -> int:
        """Drop this reference, as its array is gone. Returns the number of the block."""
        if self.references.get(self.block) is self:
            del self.references[self.block]
        return self.block


def watch_block(array: Any, block: int, references: dict[int, BlockRef], ended: Notes) -> None:
    """Add a reference to the array of ``block`` to ``references``, which ``ended`` gets in the end."""
    reference = BlockRef(array, ended.__missing__)
    reference.block, reference.references = block, references
    # Kept by the array, too: a function of C does not keep its argument, which others may drop meanwhile from
    # ``references``, if the collector runs in it.
    array.reference = references[block] = reference


class _PeerSegment:
    """One mapped segment with its blocks in use, of which ``released`` gets those that are not any more."""

    def __init__(self, mapped: MappedSegment, released: Notes) -> None:
        self._mapped = mapped
        self._released = released
        self._in_use: dict[int, BlockRef] = {}
        # The arrays that each living fork may read. Weak: a fork may end while it is added here.
        self._pins: weakref.WeakKeyDictionary[forks.Fork, list[Any]] = weakref.WeakKeyDictionary()
        forks.watch(self)

    def open(self, buffer: FrameBuffer) -> memoryview:
        """Return the bytes of a block, which is in use until nothing refers to them."""
        block, offset, size = buffer.block, buffer.offset, buffer.size
        known = self._in_use.get(block)
        if known is not None and known() is not None:
            raise ProtocolError(f"block {block} was received twice")
        if offset % ALIGNMENT or not 0 < size <= self._mapped.size - offset:
            raise ProtocolError(
                f"a block of {size} bytes at {offset} is not within its segment of {self._mapped.size}"
            )
        try:
            array = self._mapped.block(offset, size, buffer.shared)
        except MemoryError:
            self._released.__missing__(block)
            raise
        watch_block(array, block, self._in_use, self._released)
        for fork in forks.beginning.copy():
            self._pins.setdefault(fork, []).append(array)
        return memoryview(array).cast("B")

    def pin(self, fork: forks.Fork) -> bool:
        """Implements :meth:`forks.Pinnable.pin`."""
        arrays = [reference() for reference in list(self._in_use.values())]
        pins = self._pins.setdefault(fork, [])
        pins.extend(array for array in arrays if array is not None)
        return bool(pins)

    def unpin(self, fork: forks.Fork) -> None:
        """Implements :meth:`forks.Pinnable.unpin`."""
        self._pins.pop(fork, None)

    def close(self) -> None:
        """Unmap with the last block in use. Nothing will be released, so forks need not keep anything."""
        forks.unwatch(self)
        self._pins.clear()
        self._in_use.clear()

    def counts(self) -> tuple[int, int]:
        """Return the numbers of blocks in use and of blocks pinned by forks."""
        of_forks = [fork for reference in self._pins.keyrefs() if (fork := reference()) is not None]
        pinned = {id(array) for fork in of_forks for array in self._pins.get(fork, ())}
        return sum(reference() is not None for reference in list(self._in_use.values())), len(pinned)


class MappedBlocks:
    """Blocks of peers.

    Args:
        notes: returns what notes the blocks to release to a peer.
    """

    def __init__(self, notes: Callable[[], Notes]) -> None:
        self._notes = notes
        self._segments: dict[tuple[int, int], _PeerSegment] = {}  # by peer and segment id
        self._released: dict[int, Notes] = {}  # by peer; references to blocks, and numbers of blocks
        self._closed = False
        self._lock = threading.RLock()  # guards additions to _segments; see Note [Calls of handlers] in links
        self.has_releases: Callable[[int], object] = self._released.get
        """Returns, as a truth value, whether there are blocks to release to a peer."""

    def map(self, peer: int, offer: ArenaOffer, fd: int) -> None:
        """Map a segment of ``peer``, unless another of its connections has sent it. Closes ``fd``.

        Raises:
            ProtocolError: if it cannot be mapped.
        """
        with self._lock:  # the readers of several connections
            if (peer, offer.segment) in self._segments or self._closed:
                os.close(fd)
                return
            try:
                mapped = MappedSegment(fd, offer.size)
            except (OSError, ValueError, OverflowError) as e:
                if isinstance(e, OSError):
                    check_is_of_system(e)
                raise ProtocolError(f"shared memory of worker {peer} cannot be mapped: {e}") from e
            released = self._released.setdefault(peer, self._notes())
            # A handler that has interrupted this may have mapped it, and opened blocks of it.
            self._segments.setdefault((peer, offer.segment), _PeerSegment(mapped, released))

    def open(self, peer: int, manifest: Manifest, frames: Sequence[Buffer]) -> list[Buffer]:
        """Return the frames of a message of ``peer``. ``Inbound.release_frames`` can empty the list.

        Raises:
            ProtocolError: if the manifest contradicts the segments or the received ``frames``.
            MemoryError: if there is no memory for a block.
        """
        following = iter(frames)
        buffers: list[memoryview] = []
        missing: MemoryError | None = None
        for buffer in manifest.buffers:
            segment = self._segments.get((peer, buffer.segment)) if buffer.segment else None
            if segment is None:
                buffers.append(_next(peer, buffer, following))
                continue
            try:
                buffers.append(segment.open(buffer))
            except MemoryError:  # the others are opened nevertheless, and so released when they are dropped
                missing = missing or no_memory(buffer.size, peer)
        if missing is not None:
            raise missing
        if next(following, None) is not None:
            raise ProtocolError(f"the manifest refers to fewer than the {len(frames)} frames of the message")
        return [_slice(part, buffers) for part in manifest.slices]

    def take_releases(self, peer: int) -> tuple[int, ...]:
        """Return blocks to release to ``peer``, as many as a manifest holds. The caller must send them."""
        released = self._released.get(peer)
        if not released:
            return ()
        taken: list[int] = []
        while released and len(taken) < MAX_TENSORS:
            try:
                gone, _ = released.popitem()
            except KeyError:  # another thread took the last one
                break
            taken.append(gone if isinstance(gone, int) else gone.end())
        return tuple(taken)

    def restore_releases(self, peer: int, blocks: Sequence[int]) -> None:
        """Put back what :meth:`take_releases` returned and could not be sent."""
        released = self._released.get(peer)
        if released is not None:
            released.update(dict.fromkeys(blocks))

    def peers_with_releases(self) -> list[int]:
        """Return the peers with blocks to release."""
        return [peer for peer, released in list(self._released.items()) if released]

    def forget(self, peer: int) -> None:
        """Drop the segments of a lost ``peer``; they stay mapped as long as something is built on them."""
        self._released.pop(peer, None)
        for key in [key for key in list(self._segments) if key[0] == peer]:
            segment = self._segments.pop(key, None)
            if segment is not None:
                segment.close()

    def close(self) -> None:
        """Drop the segments of all peers, as :meth:`forget`. Idempotent."""
        with self._lock:
            self._closed = True
        for peer in {peer for peer, _ in list(self._segments)}:
            self.forget(peer)
        self._released.clear()

    def statistics(self) -> dict[str, int]:
        """Return the numbers of mapped segments, of blocks in use, and of those that forks keep in use."""
        counts = [segment.counts() for segment in list(self._segments.values())]
        return {
            "segments_mapped": len(counts),
            "blocks_in_use": sum(in_use for in_use, _ in counts),
            "blocks_pinned": sum(pinned for _, pinned in counts),
        }


def _next(peer: int, buffer: FrameBuffer, following: Iterator[Buffer]) -> memoryview:
    """Return the bytes of a buffer that is a frame of the message; its segment is not known."""
    if buffer.segment:
        raise ProtocolError(f"segment {buffer.segment} of a block was never sent by worker {peer}")
    frame = next(following, None)
    if frame is None:
        raise ProtocolError("the manifest refers to more frames than the message has")
    return memoryview(frame)


def _slice(part: FrameSlice, buffers: Sequence[memoryview]) -> memoryview:
    if part.buffer >= len(buffers):
        raise ProtocolError(f"a frame is a slice of buffer {part.buffer} of {len(buffers)}")
    buffer = buffers[part.buffer]
    end = part.offset + part.size
    if end > len(buffer):
        raise ProtocolError(
            f"a frame of {part.size} bytes at {part.offset} exceeds its buffer of {len(buffer)}"
        )
    return buffer[part.offset : end]
