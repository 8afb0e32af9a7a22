"""Splits large frames into chunks for sockets, and reassembles them in memory that is reused.

libzmq allocates memory for each frame that arrives. Of large frames every page faults, and nothing overlaps:
64 MB took 200 ms over loopback, a tenth of it for copying. Chunks stay in the cache, and sending, receiving
and the copy that reassembles them overlap. Several connections were no faster than one.

The chunks of a frame precede its message on the same connection, in order, and the manifest names them.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from zmqgrad.errors import ProtocolError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.finalizers import Finalizers
from zmqgrad.runtime.service_thread import ServiceThread
from zmqgrad.transport.base import Buffer, no_memory
from zmqgrad.transport.shared_memory.packing import PreparedFrames, array_beneath
from zmqgrad.transport.sockets import FRAME_BYTES
from zmqgrad.wire.messages import Chunk, FrameBuffer, FrameSlice, LargeMessage, Manifest

CHUNK_BYTES = FRAME_BYTES
"""Size of a chunk; larger frames are split."""

MAX_INLINE_CHUNK_BYTES = 15 << 10
"""Size of a chunk that fits in a packet of this host (:mod:`zmqgrad.transport.local`) with its header."""

MIN_POOLED_BYTES = 1 << 20
"""Copies of at least this size use pooled memory."""

MAX_STREAMS = 1 << 16
"""Maximum number of incomplete frames of one peer."""

MAX_TOTAL_BYTES = 1 << 44
"""Size limit of a frame: no process has so much memory."""

MAX_POOL_BYTES = 512 << 20
"""Limit of the free buffers in the pool."""

COLLECT_SECONDS = 0.05
"""How soon memory beyond the limit is unmapped. So buffers that are returned together wake a thread once."""

TRIM_SECONDS = 30.0
"""A pool that was not used for this long, or at most twice that, frees its buffers."""

_stream_ids = itertools.count(1)

Part = tuple[Chunk, memoryview]
"""A chunk, and its data."""


def split(prepared: PreparedFrames, size_limit: int = CHUNK_BYTES) -> tuple[PreparedFrames, list[Part]]:
    """Splits the frames of ``prepared`` that are larger than a chunk.

    Args:
        size_limit: of a chunk and of the frames that are not split; 0: all are split.

    Returns:
        ``prepared`` without them, and their chunks, to be sent before it.
    """
    if all(len(frame) <= size_limit for frame in prepared.frames) and (size_limit or not prepared.frames):
        return prepared, []
    manifest = prepared.manifest or Manifest()
    buffers = list(manifest.buffers) or [FrameBuffer(size=len(f)) for f in prepared.frames]
    slices = manifest.slices or tuple(FrameSlice(i, 0, len(f)) for i, f in enumerate(prepared.frames))
    chunks: list[Part] = []
    rest: list[Buffer] = []
    for i, frame in enumerate(prepared.frames):
        size = len(frame)
        if size_limit and size <= size_limit:
            rest.append(frame)
            continue
        buffers[i] = FrameBuffer(block=next(_stream_ids), size=size)
        chunks += _chunks(buffers[i].block, frame, size_limit or MAX_INLINE_CHUNK_BYTES)
    manifest = replace(manifest, buffers=tuple(buffers), slices=slices)
    return PreparedFrames(manifest, rest, prepared.offers), chunks


def _chunks(stream: int, frame: Buffer, size_limit: int) -> list[Part]:
    view, size, shared = memoryview(frame), len(frame), array_beneath(frame) is not None
    return [
        (Chunk(stream, start, size, shared=shared), view[start : start + size_limit])
        for start in range(0, size, size_limit)
    ]


def split_first(first: bytearray, size_limit: int) -> tuple[LargeMessage, list[Part]]:
    """Splits a first frame. Returns the message to send in its place, and the chunks to send before it."""
    stream = next(_stream_ids)
    return LargeMessage(stream, len(first)), _chunks(stream, first, size_limit)


def inline(part: Part) -> Chunk:
    """Returns a chunk that contains its data, for a packet."""
    return replace(part[0], data=bytes(part[1]))


def copy_into(target: memoryview, source: Buffer) -> None:
    """Copies ``source``, a received frame, to ``target``, which has its size. Releases the GIL."""
    kind = ctypes.c_char * len(target)
    ctypes.memmove(kind.from_buffer(target), kind.from_buffer(source), len(target))


@dataclass(eq=False, slots=True)
class _PartialFrame:
    """A frame of which some chunks have arrived. ``array`` is None if there is no memory for it."""

    array: Any
    size: int
    received: int = 0

    def reserve(self, chunk: Chunk, size: int) -> memoryview | None:
        if chunk.offset != self.received or chunk.total != self.size or self.received + size > self.size:
            raise ProtocolError(
                f"a chunk of {size} bytes at {chunk.offset} of {chunk.total} does not continue a frame of "
                f"which {self.received} of {self.size} bytes were received"
            )
        if self.array is None:
            return None
        return memoryview(self.array).cast("B")[self.received : self.received + size]


class Reassembler:
    """The incomplete frames of all peers.

    One thread at a time adds to a stream; another may complete it afterwards. :meth:`forget` is for any.

    Args:
        allocate: as :meth:`SharedMemoryTransport.allocate`, for frames that the receiver may pass on.
    """

    def __init__(self, allocate: Callable[[int, Deadline], Any] = lambda size, deadline: "off") -> None:
        self.buffers = BufferPool()
        self._allocate = allocate
        self._streams: dict[int, dict[int, _PartialFrame]] = {}  # by peer, and by stream id

    def add(self, peer: int, chunk: Chunk, frames: Sequence[Buffer]) -> None:
        """Adds a chunk, whose data is the only one of ``frames``, or in it.

        Raises:
            ProtocolError: if it does not continue the frame.
        """
        data = frames[0] if len(frames) == 1 else bytearray(chunk.data)
        target = self.reserve(peer, chunk, len(data))
        if target is not None:
            copy_into(target, data)
        self.advance(peer, chunk, len(data))

    def reserve(self, peer: int, chunk: Chunk, size: int) -> memoryview | None:
        """Returns the memory for the ``size`` bytes of a chunk; :meth:`advance` adds it once written to.

        Returns:
            None if there is no memory for the frame, as whoever takes it is told, or if it was given up.

        Raises:
            ProtocolError: if it does not continue the frame.
        """
        streams = self._streams.setdefault(peer, {})
        stream = streams.get(chunk.stream)
        if not (chunk.total or size):
            streams.pop(chunk.stream, None)
            return None
        try:
            if not size:
                raise ProtocolError("a chunk must have one frame, which is not empty")
            if stream is None:
                if len(streams) >= MAX_STREAMS:
                    raise ProtocolError(f"more than {MAX_STREAMS} incomplete frames of worker {peer}")
                if chunk.offset:
                    raise ProtocolError(f"the beginning of a frame of worker {peer} is missing")
                stream = streams[chunk.stream] = _PartialFrame(self._memory_for(chunk), chunk.total)
            return stream.reserve(chunk, size)
        except (ProtocolError, ValueError) as e:  # an invalid size
            streams.pop(chunk.stream, None)
            raise ProtocolError(f"a chunk of worker {peer} was dropped: {e}") from e

    def _memory_for(self, chunk: Chunk) -> Any:
        if chunk.total > MAX_TOTAL_BYTES:
            raise ProtocolError(f"a frame of {chunk.total} bytes (at most {MAX_TOTAL_BYTES})")
        array = self._allocate(chunk.total, Deadline.after(0.0)) if chunk.shared else ""
        try:
            # It is not to be shared, or there is no room.
            return self.buffers.take(chunk.total) if isinstance(array, str) else array
        except (OSError, MemoryError):
            return None

    def advance(self, peer: int, chunk: Chunk, size: int) -> None:
        """Adds a chunk that was written to the memory of :meth:`reserve`, unless the peer was forgotten."""
        stream = self._streams.get(peer, {}).get(chunk.stream)
        if stream is not None:
            stream.received += size

    def complete(
        self, peer: int, manifest: Manifest, frames: Sequence[Buffer]
    ) -> tuple[Manifest, list[Buffer]]:
        """Restores the manifest and frames of a message as they were before :func:`split`.

        Raises:
            ProtocolError: if a chunk is missing.
            MemoryError: if there was no memory for a frame.
        """
        following = iter(frames)
        whole: list[Buffer] = []
        buffers: list[FrameBuffer] = []
        missing: MemoryError | None = None
        for buffer in manifest.buffers:
            if buffer.segment or not buffer.block:
                buffers.append(buffer)
                if not buffer.segment:
                    whole += itertools.islice(following, 1)
                continue
            try:
                whole.append(self.take(peer, buffer.block, buffer.size))
            except MemoryError as e:  # the others must be taken, too: nobody else would
                missing = missing or e
            buffers.append(FrameBuffer(size=buffer.size))
        if missing is not None:
            raise missing
        return replace(manifest, buffers=tuple(buffers)), [*whole, *following]

    def take(self, peer: int, number: int, size: int) -> memoryview:
        """Returns the frame of ``size`` bytes that was received as stream ``number``.

        Raises:
            ProtocolError: if a chunk is missing.
            MemoryError: if there was no memory for it.
        """
        if not size:
            return memoryview(bytearray())
        stream = self._streams.get(peer, {}).pop(number, None)
        if stream is None or not stream.received == stream.size == size:
            raise ProtocolError(f"chunks of a frame of worker {peer} are missing")
        if stream.array is None:
            raise no_memory(size, peer)
        return memoryview(stream.array).cast("B")

    def forget(self, peer: int) -> None:
        """Drops the incomplete frames of ``peer``."""
        self._streams.pop(peer, None)

    def close(self) -> None:
        """Drops everything. Buffers in use stay valid."""
        self._streams.clear()
        self.buffers.close()


def _new_memory(size: int) -> mmap.mmap:
    # Private: a forked child keeps its contents when this process reuses the memory.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # not supported; huge pages only save time
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class _BufferRef(weakref.ref[Any]):
    """Weak reference to an array on ``memory``; None after the pool was closed."""

    __slots__ = ("memory",)
    __hash__ = object.__hash__  # that of a weak reference raises once its object is gone
    memory: mmap.mmap | None


class BufferPool:
    """Memory for large frames, which is reused when nothing refers to it any more."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards all but the deque; see Note [Calls of handlers] in links
        self._free: deque[mmap.mmap] = deque()  # the longest unused first
        self._finalizers = Finalizers(self._collect, COLLECT_SECONDS)
        self._returned = self._finalizers.notes()  # of instances of _BufferRef
        self._lent: dict[_BufferRef, None] = {}
        self._timer: ServiceThread | None = None
        self._armed = False
        self._used = False
        self._closed = False

    def start(self, timer: ServiceThread | None) -> None:
        """Frees unused buffers by ``timer`` from now on."""
        self._timer = timer
        if timer is not None:
            self._finalizers.start(timer)

    def take(self, size: int) -> Any:
        """Returns a ctypes array of ``size`` bytes, whose memory is reused when it is garbage.

        Raises:
            OSError, ValueError, OverflowError: if that memory cannot be allocated.
        """
        self._collect()
        with self._lock:
            fitting = [m for m in self._free.copy() if size <= len(m) <= 2 * size]
            memory: mmap.mmap | None
            try:
                memory = min(fitting, key=len)
                self._free.remove(memory)
            except ValueError:  # none fits, or it was dropped meanwhile
                memory = None
            self._used = True
            arm, self._armed = not self._armed, True
        if memory is None:
            memory = _new_memory(size)
        array: Any = (ctypes.c_char * size).from_buffer(memory)
        if size <= MAX_POOL_BYTES:  # otherwise it is unmapped at once
            reference = _BufferRef(array, self._returned.__missing__)
            reference.memory = memory
            array.reference = reference  # so that it lives until its callback has returned
            self._lent[reference] = None
            if self._closed:
                reference.memory = None
        if arm and self._timer is not None:
            self._timer.call_later(TRIM_SECONDS, self._trim)
        return array

    def _collect(self) -> None:
        """Keeps the memory of returned buffers, and drops other memory beyond the limit."""
        with contextlib.suppress(KeyError, IndexError):  # another thread took the last
            while self._returned:
                reference, _ = self._returned.popitem()
                self._lent.pop(reference, None)
                if reference.memory is not None:
                    self._free.append(reference.memory)
                del reference  # it has the memory
            while sum(map(len, self._free.copy())) > (0 if self._closed else MAX_POOL_BYTES):
                self._free.popleft()  # unmapped with its last reference

    def copy(self, frame: bytearray | memoryview) -> Buffer:
        """Returns a copy of ``frame``."""
        size = len(frame)
        if size < MIN_POOLED_BYTES:
            return bytes(frame)
        copied = self.empty(size)
        copied[:] = frame
        return copied

    def empty(self, size: int) -> memoryview:
        """Returns writable memory of ``size`` bytes."""
        if size < MIN_POOLED_BYTES:
            return memoryview(bytearray(size))
        return memoryview(self.take(size)).cast("B")

    def _trim(self) -> None:
        with self._lock:
            used, self._used = self._used, False
            if not used:
                self._free.clear()
            self._armed = used and not self._closed
            again = self._armed
        if again and self._timer is not None:
            self._timer.call_later(TRIM_SECONDS, self._trim)

    def close(self) -> None:
        """Frees all buffers, now or when they are returned."""
        self._closed = True
        for reference in list(self._lent):
            reference.memory = None
        self._finalizers.close()
        self._free.clear()

    def kept(self) -> int:
        """Returns the size of all free buffers in bytes."""
        self._collect()
        return sum(map(len, self._free.copy()))
