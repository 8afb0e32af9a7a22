"""Segments of shared memory: :class:`Segment` where created, :class:`MappedSegment` where read.

A segment is a sealed ``memfd``. It has no name in any file system, it cannot shrink under a reader (which
would get SIGBUS), and the kernel frees it with the last process that maps it. Its size costs nothing: memory
is allocated page by page, as blocks are first written. A reader opens it through ``/proc/<pid>/fd``, checks
that it is the segment that was offered, and proves that by the nonce found there.

As long as a reader maps the segment, it holds an open-file-description lock on one byte of it. The kernel
drops that lock with the mapping: with the last tensor on it, or with the process and its forks. So the
creator can tell whether blocks may still be read, even after the reader has crashed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from zmqgrad.transport.shared_memory.free_list import PAGE_BYTES, FreeList, align_up
from zmqgrad.wire.lazy_frame import Frame, LazyFrame
from zmqgrad.wire.messages import ArenaOffer

NAME = "zmqgrad"
NONCE_BYTES = 16

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock: type, whence, start, length, pid

Copy = Callable[[int, Any, int], object]
"""Copies like ``ctypes.memmove``: destination address, source, number of bytes."""

MIN_TRIM_BYTES = 1 << 20
"""Smaller free ranges keep their memory."""


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
        self.nonce = secrets.token_bytes(NONCE_BYTES)
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
        offset = self.free_list.allocate(NONCE_BYTES)
        assert offset is not None
        self._nonce_at = offset
        self._map[offset : offset + NONCE_BYTES] = self.nonce

    def offer(self, lock: int) -> ArenaOffer:
        """Return what a peer needs to map the segment. The peer must lock byte ``lock``."""
        stat = os.fstat(self._descriptor)
        place = os.getpid(), self._descriptor, stat.st_dev, stat.st_ino
        return ArenaOffer(self.id, self.size, *place, self._nonce_at, lock)

    def write(self, offset: int, data: Frame, copy: Copy = ctypes.memmove) -> None:
        """Copy ``data`` to ``offset``. ``copy`` (without the GIL) is used for bytes and writable buffers."""
        size = len(data)
        assert offset + size <= self.size
        if not size:
            return
        if isinstance(data, LazyFrame):
            data.write_to(memoryview(self._map)[offset : offset + size])
        elif isinstance(data, memoryview) and data.readonly:  # ctypes has no address of such
            self._map[offset : offset + size] = data
        else:
            source = data if isinstance(data, bytes) else _array_type(size).from_buffer(data)
            copy(self._address + offset, source, size)

    def is_mapped_by_peer(self, lock: int) -> bool:
        """Return whether the peer that locks byte ``lock``, or a fork of it, maps the segment."""
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

    ``nonce`` is what was read there, the proof that this is the segment that was offered.

    Raises:
        OSError, ValueError, OverflowError: if it cannot be opened or mapped, or is not what was offered.
    """

    def __init__(self, offer: ArenaOffer) -> None:
        self.size = offer.size
        path = f"/proc/{offer.pid}/fd/{offer.descriptor}"
        target = os.readlink(path)
        if not target.startswith(f"/memfd:{NAME}"):  # opening an unrelated pipe or device may have effects
            raise OSError(f"{path} is {target!r}: the processes see different process numbers")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _check(descriptor, offer)
            lock = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offer.lock, 1, 0)
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)
            self._map = mmap.mmap(descriptor, offer.size)  # duplicates the descriptor, which keeps the lock
        finally:
            os.close(descriptor)
        self.nonce = self._map[offer.nonce_at : offer.nonce_at + NONCE_BYTES]

    def block(self, offset: int, size: int) -> Any:
        """Return ``size`` bytes as a ctypes array, which allows weak references and is kept by what uses it.

        Raises:
            ValueError: if the block is not within the segment.
        """
        return _array_type(size).from_buffer(self._map, offset)


def _check(descriptor: int, offer: ArenaOffer) -> None:
    stat = os.fstat(descriptor)
    if (stat.st_dev, stat.st_ino, stat.st_size) != (offer.device, offer.inode, offer.size):
        raise OSError("the descriptor refers to other memory than was offered")
    if stat.st_uid != os.geteuid():
        raise OSError(f"the memory belongs to user {stat.st_uid}")
    if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise OSError("the memory is not sealed against shrinking")
    if offer.nonce_at + NONCE_BYTES > offer.size:
        raise OSError("the nonce is outside of the memory")
