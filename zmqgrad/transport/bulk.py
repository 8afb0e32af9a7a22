"""Large frames go through sockets in chunks, and are put together in memory that is kept warm.

libzmq takes memory for each frame as it arrives. Up to 32 MB it is memory that was used before; beyond that,
malloc maps it anew each time, and every page of it faults: 64 MB took 200 ms over loopback, of which copying
is a tenth. In chunks they take 80, with the copy that puts them together. Several connections were no faster
than one here.

The chunks of a frame come before its message on the same connection, in order, and its manifest names them.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from zmqgrad.errors import ProtocolError
from zmqgrad.transport.base import Buffer, Timer
from zmqgrad.transport.shared_memory.packing import PreparedFrames
from zmqgrad.wire.messages import Chunk, FrameBuffer, FrameSlice, Manifest

CHUNK = 4 << 20
"""Bytes of a chunk."""

LEAST = 32 << 20
"""Frames of more bytes are cut: what malloc, which cannot be asked, maps anew each time."""

LEAST_WARM = 1 << 20
"""Copies of at least this size are made in memory that is kept warm."""

MAX_STREAMS = 1024
"""Frames of one peer that are on their way in chunks at a time."""

KEPT = 512 << 20
"""Bytes of free buffers that are kept warm at most."""

TRIM_SECONDS = 30.0
"""Free buffers that were not used for so long, or at most twice that, go back to the system."""

_numbers = itertools.count(1)


def split(prepared: PreparedFrames) -> tuple[PreparedFrames, list[tuple[Chunk, memoryview]]]:
    """``prepared`` without its large frames, and those in chunks, to be sent before it."""
    if all(len(frame) <= LEAST for frame in prepared.frames):
        return prepared, []
    manifest = prepared.manifest or Manifest()
    buffers = list(manifest.buffers) or [FrameBuffer(size=len(f)) for f in prepared.frames]
    slices = manifest.slices or tuple(FrameSlice(i, 0, len(f)) for i, f in enumerate(prepared.frames))
    chunks: list[tuple[Chunk, memoryview]] = []
    rest: list[Buffer] = []
    for i, frame in enumerate(prepared.frames):
        size = len(frame)
        if size <= LEAST:
            rest.append(frame)
            continue
        buffers[i] = FrameBuffer(block=next(_numbers), size=size)
        view = memoryview(frame)
        chunks += [
            (Chunk(buffers[i].block, start, size), view[start : start + CHUNK])
            for start in range(0, size, CHUNK)
        ]
    return PreparedFrames(replace(manifest, buffers=tuple(buffers), slices=slices), rest), chunks


class _PartialFrame:
    """A frame on its way."""

    __slots__ = ("array", "came", "size")

    def __init__(self, array: Any, size: int) -> None:
        self.array = array
        self.size = size
        self.came = 0

    def add(self, chunk: Chunk, data: Buffer) -> None:
        size = len(data)
        if chunk.offset != self.came or chunk.total != self.size or self.came + size > self.size:
            raise ProtocolError(
                f"a chunk of {size} bytes at {chunk.offset} of {chunk.total} came where {self.came} of "
                f"{self.size} were there"
            )
        source = (ctypes.c_char * size).from_buffer(data)
        ctypes.memmove(ctypes.addressof(self.array) + self.came, source, size)  # the GIL is free meanwhile
        self.came += size


class Reassembler:
    """Frames of peers that come in chunks. Used by the thread that reads; forgets from any."""

    def __init__(self) -> None:
        self.buffers = BufferPool()
        self._streams: dict[tuple[int, int], _PartialFrame] = {}  # by peer and number

    def add(self, peer: int, chunk: Chunk, frames: Sequence[Buffer]) -> None:
        """Take in a chunk, which came with ``frames``.

        Raises:
            ProtocolError: if it does not follow the one before.
        """
        key = peer, chunk.stream
        stream = self._streams.get(key)
        try:
            if len(frames) != 1 or not len(frames[0]):
                raise ProtocolError(f"a chunk came with {len(frames)} frames")
            if stream is None:
                if sum(1 for p, _ in list(self._streams) if p == peer) >= MAX_STREAMS:
                    raise ProtocolError(f"more than {MAX_STREAMS} frames of worker {peer} came in part")
                if chunk.offset:
                    raise ProtocolError(f"the beginning of a frame of worker {peer} is missing")
                stream = self._streams[key] = _PartialFrame(self.buffers.take(chunk.total), chunk.total)
            stream.add(chunk, frames[0])
        except (ProtocolError, OSError, OverflowError, ValueError) as e:  # no memory; or what is no size
            self._streams.pop(key, None)
            raise ProtocolError(f"a chunk of worker {peer} was dropped: {e}") from e

    def complete(
        self, peer: int, manifest: Manifest, frames: Sequence[Buffer]
    ) -> tuple[Manifest, list[Buffer]]:
        """``manifest`` and ``frames`` of a message as they were before they were cut.

        Raises:
            ProtocolError: if a chunk is missing.
        """
        following = iter(frames)
        whole: list[Buffer] = []
        buffers: list[FrameBuffer] = []
        for buffer in manifest.buffers:
            if buffer.segment or not buffer.block:
                buffers.append(buffer)
                if not buffer.segment:
                    whole += itertools.islice(following, 1)
                continue
            stream = self._streams.pop((peer, buffer.block), None)
            if stream is None or not stream.came == stream.size == buffer.size:
                raise ProtocolError(f"chunks of a frame of worker {peer} are missing")
            buffers.append(FrameBuffer(size=buffer.size))
            whole.append(memoryview(stream.array).cast("B"))
        return replace(manifest, buffers=tuple(buffers)), [*whole, *following]

    def forget(self, peer: int) -> None:
        """No more will come of what ``peer`` began."""
        for key in [key for key in list(self._streams) if key[0] == peer]:
            self._streams.pop(key, None)

    def close(self) -> None:
        """Forget everybody. What is in use stays valid."""
        self._streams.clear()
        self.buffers.close()


def _new_memory(size: int) -> mmap.mmap:
    # Private: a fork keeps what it has, whatever this process does with the memory later.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without; it is only quicker to fill
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class BufferPool:
    """Memory for large frames that is used again when nothing refers to it any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all but the deque
        self._freed: deque[mmap.mmap] = deque()  # filled by finalizers, which only enqueue
        self._free: list[mmap.mmap] = []
        self._timer: Timer | None = None
        self._armed = False
        self._used = False
        self._closed = False

    def start(self, timer: Timer | None) -> None:
        """From here on, what is not used goes back to the system in time."""
        self._timer = timer

    def take(self, size: int) -> Any:
        """A ctypes array of ``size`` bytes; its memory is used again when it has died.

        Raises:
            OSError, ValueError, OverflowError: if there is no such memory.
        """
        with self._lock:
            self._collect()
            fitting = [m for m in self._free if size <= len(m) <= 2 * size]
            memory = min(fitting, key=len, default=None)
            if memory is not None:
                self._free.remove(memory)
            self._used = True
            arm, self._armed = not self._armed, True
        if memory is None:
            memory = _new_memory(size)
        array = (ctypes.c_char * size).from_buffer(memory)
        weakref.finalize(array, self._freed.append, memory).atexit = False
        if arm and self._timer is not None:
            self._timer.call_later(TRIM_SECONDS, self._trim)
        return array

    def copy(self, frame: bytearray | memoryview) -> Buffer:
        """A copy of ``frame``."""
        size = len(frame)
        if size < LEAST_WARM:
            return bytes(frame)
        array = self.take(size)
        memoryview(array).cast("B")[:] = frame
        return memoryview(array).cast("B")

    def _collect(self) -> None:
        """Called with the lock held."""
        while self._freed:
            self._free.append(self._freed.popleft())
        while sum(map(len, self._free)) > (0 if self._closed else KEPT):
            self._free.pop(0)  # unmapped with its last reference

    def _trim(self) -> None:
        with self._lock:
            self._collect()
            used, self._used = self._used, False
            if not used:
                self._free.clear()
            self._armed = used and not self._closed
            again = self._armed
        if again and self._timer is not None:
            self._timer.call_later(TRIM_SECONDS, self._trim)

    def close(self) -> None:
        """Keep nothing any more."""
        with self._lock:
            self._closed = True
            self._collect()

    def kept(self) -> int:
        """Bytes that are kept warm."""
        with self._lock:
            self._collect()
            return sum(map(len, self._free))
