"""What a mailbox does with frames: shared memory if the peer is on this host, a socket otherwise.

If the arena is full, the frames go through the socket, and a counter per reason is incremented.

Blocks are released by the manifest of the next message to their owner, or after :data:`RELEASE_SECONDS` by a
message of their own.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from zmqgrad.runtime.blocking import blocking_section
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.finalizers import Finalizers
from zmqgrad.runtime.service_thread import CoalescedJob, ServiceThread, TimerHandle
from zmqgrad.transport.base import Buffer
from zmqgrad.transport.local.connection import Offer
from zmqgrad.transport.shared_memory import forks
from zmqgrad.transport.shared_memory.arena import OWN, Arena, Lease
from zmqgrad.transport.shared_memory.copier import Copier
from zmqgrad.transport.shared_memory.free_list import PAGE_BYTES, align_up
from zmqgrad.transport.shared_memory.mapped_blocks import BlockRef, MappedBlocks, watch_block
from zmqgrad.transport.shared_memory.packing import PreparedFrames, pack_for_socket, plan, shared_part
from zmqgrad.transport.shared_memory.segment import Segment, supported
from zmqgrad.transport.shared_memory.settings import ArenaSettings
from zmqgrad.wire.codec import encode
from zmqgrad.wire.lazy_frame import Frame, materialize
from zmqgrad.wire.messages import ArenaOffer, FrameBuffer, FrameSlice, Manifest, Message, Release

logger = logging.getLogger(__name__)

RELEASE_SECONDS = 0.05
"""How long released blocks wait for a message that can carry the release."""

RECLAIM_SECONDS = 0.5
"""How often a thread that waits for memory looks for blocks that lost peers have unmapped: nothing tells."""

TRIM_SECONDS = 30.0
"""Free memory of an arena that was not used for once to twice this time returns to the system."""


class SharedMemoryTransport:
    """The shared memory of one mailbox: its arena, and the blocks that it has mapped.

    Args:
        name: of the worker.
        settings: of its arena. If that is disabled, blocks of peers are still mapped.
        notify: sends a control message to a peer, and does not raise because of the peer.
    """

    def __init__(self, name: str, settings: ArenaSettings, notify: Callable[[int, Message], None]) -> None:
        self._name = name
        self._threshold = settings.threshold
        self._notify = notify
        self._pid = os.getpid()
        self._arena = Arena(settings.limit if supported() else 0)
        self._copier = Copier(name)
        self._copy, self.join = self._copier.copy, self._copier.join
        self._finalizers = Finalizers(self._release, RELEASE_SECONDS)
        self._mapped_blocks = MappedBlocks(self._finalizers.notes)
        self.on_offer = self._mapped_blocks.map
        self._dropped = self._finalizers.notes()  # of own leases of shared blocks
        self._references: dict[int, BlockRef] = {}  # of their arrays, by lease
        self.has_releases = self._mapped_blocks.has_releases
        """Returns, as a truth value, whether there are blocks to release to a peer."""
        self.sender = (0, 0)
        """Worker id and incarnation, for the packets with descriptors."""
        self._timer: ServiceThread | None = None
        self._trim_job = CoalescedJob(self._trim, self._call_later)
        self._closed = False
        self._counting = threading.RLock()  # guards the next three
        self.fallbacks: Counter[str] = Counter()
        self.bytes_out = 0
        self.bytes_in = 0

    def start(self, timer: ServiceThread | None) -> None:
        """Release blocks by ``timer`` if no other message does."""
        self._timer = timer
        if timer is not None:
            self._finalizers.start(timer)
            forks.unpin_in(timer)

    # ---- sending ----------------------------------------------------------------------------------------

    def prepare(self, peer: int, local: bool, frames: Sequence[Frame]) -> PreparedFrames:
        """Copy ``frames`` to shared memory if possible. The manifest releases blocks of ``peer``.

        Args:
            peer: the receiver.
            local: whether it is on this host.
            frames: of one message.

        Returns:
            What to send. If that fails, the caller must call :meth:`rollback`.
        """
        released = self._mapped_blocks.take_releases(peer)
        if not frames:
            return PreparedFrames(Manifest(released=released) if released else None, ())
        leases: list[Lease] = []
        try:
            if local and self._references and any(own := [shared_part(f) for f in frames]):
                return self._prepare_shared(peer, frames, own, released, leases)
            sizes = list(map(len, frames))
            total = sum(sizes)
            if total >= self._threshold:
                buffers, slices = plan(sizes)
                leases += self._lease(peer, local, buffers, slices, frames)
                if leases:
                    placed: list[FrameBuffer] = []
                    offers: dict[int, Offer] = {}
                    for number, segment, offset, size in leases:
                        placed.append(FrameBuffer(segment.id, number, offset, size))
                        offers[segment.id] = Offer(segment.id, partial(self._describe, peer, segment))
                    manifest = Manifest(tuple(placed), slices, released)
                    with self._counting:
                        self.bytes_out += total
                    return PreparedFrames(manifest, (), tuple(offers.values()))
            return pack_for_socket(frames, sizes, released)
        except BaseException:
            self._mapped_blocks.restore_releases(peer, released)
            self._arena.release(peer, [lease.number for lease in leases])
            raise

    def _prepare_shared(
        self,
        peer: int,
        frames: Sequence[Frame],
        shared: Sequence[tuple[Lease, int] | None],
        released: tuple[int, ...],
        leases: list[Lease],
    ) -> PreparedFrames:
        """Add to ``leases`` the blocks of ``frames`` that are ``shared`` ones; others use the socket."""
        rest = [materialize(f) for f, part in zip(frames, shared, strict=True) if part is None]
        buffers, slices, number = [FrameBuffer(size=len(f)) for f in rest], [], 0
        offers: dict[int, Offer] = {}
        indices: dict[int, int] = {}  # of the buffers, by the own lease of their block
        for frame, part in zip(frames, shared, strict=True):
            if part is None:
                slices.append(FrameSlice(number, 0, len(frame)))
                number += 1
                continue
            own, start = part
            if own.number not in indices:
                indices[own.number] = len(buffers)
                lease = self._arena.share(peer, own)
                leases.append(lease)
                segment = lease.segment
                offers[segment.id] = Offer(segment.id, partial(self._describe, peer, segment))
                buffers.append(FrameBuffer(segment.id, lease.number, lease.offset, lease.size, True))
            slices.append(FrameSlice(indices[own.number], start, len(frame)))
            with self._counting:
                self.bytes_out += len(frame)
        manifest = Manifest(tuple(buffers), tuple(slices), released)
        return PreparedFrames(manifest, rest, tuple(offers.values()))

    def allocate(self, size: int, deadline: Deadline) -> Any:
        """Allocate a block that many peers of this host may read, each without a copy.

        Once it has been written, it must not change. The block of a frame that is a view of the array is
        leased to the peer that it is sent to; it is freed when the array and all leases have ended.

        Args:
            size: in bytes.
            deadline: for peers to release memory if too little is left.

        Returns:
            A ctypes array with the attribute ``lease``; or the reason for having none: ``off``, ``full`` or
            ``no memory``.
        """
        if not self._arena.limit or self._pid != os.getpid():
            return "off"
        while True:
            self._collect_dropped()
            frees = self._arena.frees
            leases = self._arena.lease(OWN, [size])
            if not isinstance(leases, str):
                break
            never = align_up(size, PAGE_BYTES) > self._arena.limit
            if leases != "full" or never or deadline.passed() or self._closed:
                return leases
            with blocking_section():
                self._arena.wait_freed(frees, min(deadline.left(), RECLAIM_SECONDS))
            self._arena.reclaim()
        self._trim_job.schedule(TRIM_SECONDS)
        (lease,) = leases
        array = lease.segment.block(lease.offset, size)
        array.lease = lease
        watch_block(array, lease.number, self._references, self._dropped)
        return array

    def write(self, array: Any, offset: int, data: Frame) -> None:
        """Copy ``data`` to ``offset`` of an array that :meth:`allocate` has returned."""
        lease = array.lease
        lease.segment.write(lease.offset + offset, data, self._copy)

    def share(self, frames: Sequence[Frame]) -> Sequence[Frame]:
        """Copy ``frames`` to such blocks; returns them as they are if they are small, or there is no room."""
        sizes = [len(f) for f in frames]
        if sum(sizes) < self._threshold:
            return frames
        buffers, slices = plan(sizes)
        arrays = [self.allocate(size, Deadline.after(0.0)) for size in buffers]
        why = [array for array in arrays if isinstance(array, str)]
        if why:
            self._count_fallback(why[0])
            return frames
        for part, frame in zip(slices, frames, strict=True):
            self.write(arrays[part.buffer], part.offset, frame)
        views = [memoryview(array).cast("B") for array in arrays]
        return [views[part.buffer][part.offset : part.offset + part.size] for part in slices]

    def holders(self, lease: Lease) -> list[int]:
        """As :meth:`Arena.holders`."""
        self._collect_dropped()
        return self._arena.holders(lease)

    def _collect_dropped(self) -> None:
        while self._dropped:
            try:
                gone, _ = self._dropped.popitem()
            except KeyError:  # another thread took it
                return
            assert isinstance(gone, BlockRef)
            self._arena.release(OWN, [gone.end()])

    def rollback(self, peer: int, prepared: PreparedFrames, *, perhaps_sent: bool = False) -> None:
        """Undo :meth:`prepare`: ``prepared`` was not sent.

        Args:
            peer: the receiver.
            prepared: what :meth:`prepare` returned.
            perhaps_sent: the peer may read the blocks, so they stay leased until it releases them or is lost.
        """
        if prepared.manifest is not None:
            self._mapped_blocks.restore_releases(peer, prepared.manifest.released)
            if perhaps_sent:
                return
            self._arena.release(peer, [p.block for p in prepared.manifest.buffers if p.segment])

    def _lease(
        self,
        peer: int,
        local: bool,
        sizes: list[int],
        slices: Sequence[FrameSlice],
        frames: Sequence[Frame],
    ) -> list[Lease]:
        """Lease blocks to ``peer`` with the bytes of ``frames``; none if that is not possible."""
        if self._dropped:
            self._collect_dropped()
        arena = self._arena
        if not arena.limit or self._pid != os.getpid():
            result: list[Lease] | str = "off"
        else:
            result = arena.lease(peer, sizes, keep=True) if local else "other host"
        if isinstance(result, str):
            self._count_fallback(result)
            return []
        try:
            for part, frame in zip(slices, frames, strict=True):
                lease = result[part.buffer]
                lease.segment.write(lease.offset + part.offset, frame, self._copy)
            arena.written(result)
            self._trim_job.schedule(TRIM_SECONDS)
        except BaseException:  # including Ctrl-C, as large copies take long
            arena.written(result)
            arena.release(peer, [lease.number for lease in result])
            raise
        return result

    def _describe(self, peer: int, segment: Segment) -> tuple[bytes, int]:
        offer = ArenaOffer(segment.id, segment.size)
        return bytes(encode(offer, *self.sender, 0)), self._arena.open_for(peer, segment)

    # ---- receiving --------------------------------------------------------------------------------------

    def open(self, peer: int, manifest: Manifest, frames: Sequence[Buffer]) -> Sequence[Buffer]:
        """Return the frames of a message of ``peer``, and end the leases that its manifest releases.

        Raises:
            ProtocolError: if the manifest contradicts the ZeroMQ ``frames`` or the segments of ``peer``.
        """
        if manifest.released:
            self._arena.release(peer, manifest.released)
        if not manifest.buffers and not manifest.slices:
            return frames
        opened = self._mapped_blocks.open(peer, manifest, frames)
        received = 0
        for buffer in manifest.buffers:
            if buffer.segment:
                received += buffer.size
        with self._counting:
            self.bytes_in += received
        return opened

    # ---- releases and unused memory ---------------------------------------------------------------------

    def _call_later(self, seconds: float, job: Callable[[], None]) -> TimerHandle:
        # In a fork, another thread may hold the timer's lock for ever.
        if self._timer is None or self._closed or self._pid != os.getpid():
            return TimerHandle()
        return self._timer.call_later(seconds, job)

    def _release(self) -> None:
        self._collect_dropped()
        for peer in self._mapped_blocks.peers_with_releases():
            if not self._closed:
                self._notify(peer, Release())  # with a manifest, which contains the releases
        self._arena.reclaim()

    def _trim(self) -> None:
        if not self._closed:
            trimmed = self._arena.trim()
            if trimmed:
                logger.debug("%s returned %d bytes of its arena to the system", self._name, trimmed)
            self._trim_job.schedule(TRIM_SECONDS)

    # ---- counters ---------------------------------------------------------------------------------------

    def _count_fallback(self, why: str) -> None:
        with self._counting:
            self.fallbacks[why] += 1

    # ---- the end ----------------------------------------------------------------------------------------

    def forget(self, peer: int) -> None:
        """Drop all state of ``peer``."""
        self._mapped_blocks.forget(peer)
        self._arena.forget(peer)

    def stop(self) -> None:
        """Stop leasing and releasing. What was received can still be opened. Idempotent."""
        self._closed = True
        self._finalizers.close()
        self._copier.close()
        self._arena.close()

    def close(self) -> None:
        """As :meth:`stop`, once nothing is read any more. Tensors that were received stay valid."""
        self.stop()
        self._mapped_blocks.close()

    def statistics(self) -> dict[str, Any]:
        """Return the use of the arena and of mapped blocks, and the messages that went through a socket."""
        return {
            **self._arena.statistics(),
            **self._mapped_blocks.statistics(),
            "fallbacks": dict(self.fallbacks),
        }
