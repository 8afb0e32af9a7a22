"""Segments of shared memory: :class:`Segment` where created, :class:`MappedSegment` where read.

A segment is a sealed ``memfd``. It has no name in any file system, it cannot shrink under a reader (which
would get SIGBUS), and the kernel frees it with the last process that maps it. Its size costs nothing: memory
is allocated page by page, as blocks are first written. Its descriptor is sent to the readers of this host.

Each reader gets an open file description of its own, which holds a lock on one byte. The kernel drops that
lock with the description: with the last tensor on the mapping, with the process and its forks, or with the
packet if it is never read. So the creator can tell whether blocks may still be read.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import secrets
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from zmqgrad.transport.local.connection import check_is_of_system
from zmqgrad.transport.shared_memory.free_list import PAGE_BYTES, FreeList, align_up
from zmqgrad.wire.lazy_frame import Frame

logger = logging.getLogger(__name__)

NAME = "zmqgrad"

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock: type, whence, start, length, pid

Copy = Callable[[int, Any, int], object]
"""Copies like ``ctypes.memmove``: destination address, source, number of bytes."""

MIN_TRIM_BYTES = 1 << 20
"""Smaller free ranges keep their memory."""


_MAP_NORESERVE = 0x4000
"""Linux: a private mapping takes memory only where it is written, so it need not be reserved."""


def supported() -> bool:
    """Return whether this system has what segments need (Linux has)."""
    return (
        hasattr(os, "memfd_create")
        and hasattr(fcntl, "F_ADD_SEALS")
        and hasattr(fcntl, "F_OFD_SETLK")
        and os.path.isdir("/proc/self/fd")
    )


class Segment:
    """Shared memory created by this process.

    Args:
        size: in bytes; rounded up to a multiple of a page.

    Raises:
        OSError: if the system refuses it.
    """

    def __init__(self, size: int) -> None:
        self.id = secrets.randbits(62) + 1
        self.size = align_up(size, PAGE_BYTES)
        self.free_list = FreeList(self.size)
        self._descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, self.size)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, seals)
            self._map = mmap.mmap(self._descriptor, self.size)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._base: Any = ctypes.c_char.from_buffer(self._map)
        self._address = ctypes.addressof(self._base)

    def open_for_reader(self, lock: int) -> int:
        """Return a descriptor for a reader, whose description locks byte ``lock``. The caller must close it.

        Raises:
            OSError: if no descriptor is left.
        """
        fd = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, lock, 1, 0))
        except OSError:
            os.close(fd)
            raise
        return fd

    def write(self, offset: int, data: Frame, copy: Copy = ctypes.memmove) -> None:
        """Copy ``data`` to ``offset``. ``copy`` (without the GIL) is used for bytes and writable buffers."""
        size = len(data)
        assert offset + size <= self.size
        if not size:
            return
        if isinstance(data, memoryview) and data.readonly:  # ctypes has no address of such
            self._map[offset : offset + size] = data
        elif isinstance(data, (bytes, bytearray, memoryview)):
            source = data if isinstance(data, bytes) else _array_type(size).from_buffer(data)
            copy(self._address + offset, source, size)
        else:
            data.write_to(memoryview(self._map)[offset : offset + size])

    def block(self, offset: int, size: int) -> Any:
        """Return ``size`` bytes as a writable ctypes array, as :meth:`MappedSegment.block`."""
        return _array_type(size).from_buffer(self._map, offset)

    def is_mapped_by_peer(self, lock: int) -> bool:
        """Return whether the peer that locks byte ``lock``, or a fork of it, has or gets the segment."""
        query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, lock, 1, 0)
        kind: int = _FLOCK.unpack(fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, query))[0]
        return kind != fcntl.F_UNLCK

    def trim(self) -> int:
        """Return the memory of large free ranges to the system.

        Returns:
            The number of bytes that were returned.
        """
        trimmed = 0
        for offset, size in self.free_list.free_ranges():
            start = align_up(offset, PAGE_BYTES)
            end = min(offset + size, self.free_list.high_water) // PAGE_BYTES * PAGE_BYTES
            if end - start >= MIN_TRIM_BYTES:
                self._map.madvise(mmap.MADV_REMOVE, start, end - start)
                trimmed += end - start
        self.free_list.reset_high_water()
        return trimmed

    def memory(self) -> int:
        """Return the bytes of memory that are allocated."""
        return os.fstat(self._descriptor).st_blocks * 512

    def close(self) -> None:
        """Return free memory and close the descriptor. Blocks stay valid for their readers. Idempotent."""
        if self._descriptor >= 0:
            with contextlib.suppress(
                OSError
            ):  # where holes cannot be punched, memory lasts until it is unmapped
                self.trim()
            os.close(self._descriptor)
            self._descriptor = -1
            # Unmapped with the last reference: a thread may be copying into it now.


@lru_cache(maxsize=1024)
def _array_type(size: int) -> Any:
    """Return the ctypes array type of ``size`` bytes. Creating one costs more than a small message."""
    return ctypes.c_char * size


class MappedSegment:
    """A peer's segment, mapped here as long as it or one of its blocks is referenced.

    If the system does not map so much (``ulimit -v``), its blocks are copied.

    Args:
        fd: its descriptor, which this closes in the end.
        size: in bytes.

    Raises:
        OSError, ValueError, OverflowError: if it has another size, or may shrink.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._descriptor = -1
        try:
            stat, seals = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if stat.st_size != size or not seals & fcntl.F_SEAL_SHRINK:
                text = f"the memory has {stat.st_size} bytes (expected {size}), or may shrink"
                raise OSError(errno.EBADMSG, text)
            os.preadv(fd, [bytearray(1)], 0)  # where it is not mapped, it is read
            try:
                self._map: mmap.mmap | None = mmap.mmap(fd, size)  # keeps the lock
            except OSError as e:
                check_is_of_system(e)
                text = "a segment of %d bytes cannot be mapped, so its blocks are copied: %s"
                logger.warning(text, size, str(e))
                self._map = None
        except BaseException:
            os.close(fd)
            raise
        self._descriptor = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # Bound as a default: see Handle.__del__.
        if self._descriptor >= 0:
            close(self._descriptor)

    def block(self, offset: int, size: int, shared: bool = False) -> Any:
        """Return ``size`` bytes as a ctypes array, which allows weak references and is kept by what uses it.

        Args:
            offset, size: of the block.
            shared: others read it, too, and do not see what is written to the array: the kernel copies a page
                when it is first written to.

        Raises:
            ValueError: if the block is not within the segment.
            MemoryError: if there is no memory for a copy.
        """
        if self._map is None:
            return self._copy(offset, size)
        if not shared:
            return _array_type(size).from_buffer(self._map, offset)
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
        try:
            own = mmap.mmap(self._descriptor, offset + size - start, flags=flags, offset=start)
        except OSError as e:  # the system allows no more mappings
            logger.debug("a block of %d bytes is copied, as it cannot be mapped: %s", size, e)
            return self._copy(offset, size)
        return _array_type(size).from_buffer(own, offset - start)

    def _copy(self, offset: int, size: int) -> Any:
        array = _array_type(size)()
        left = memoryview(array).cast("B")
        while left:
            read = os.preadv(self._descriptor, [left], offset)
            left, offset = left[read:], offset + read
        return array
