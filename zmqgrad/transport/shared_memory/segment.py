"""One piece of shared memory: the side that made it, and the side that maps it.

A segment is a sealed ``memfd``: it has no name anywhere, cannot shrink under a reader (who would die of
SIGBUS), and is gone with the last process that maps it. Its size costs nothing: memory is taken page by page
as blocks are first written. A reader opens it by ``/proc/<pid>/fd``, makes sure that it is what was offered,
and proves that by the nonce that it finds there.

While a reader has the segment mapped, it holds an open-file-description lock on one byte of it. The kernel
drops that lock when the mapping goes, with its last tensor or with the process (and the copies that a fork
made), so the maker can tell whether blocks may still be looked at, whatever became of the reader.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from zmqgrad.transport.shared_memory.free_list import PAGE, FreeList
from zmqgrad.wire.lazy_frame import Frame, LazyFrame
from zmqgrad.wire.messages import ArenaOffer

try:
    import fcntl
except ImportError:  # pragma: no cover  (not a Unix)
    fcntl = None  # type: ignore[assignment]

NAME = "zmqgrad"
NONCE = 16
"""Bytes of proof, at the start of every segment."""

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock: type, whence, start, length, pid

Copy = Callable[[int, Any, int], object]
"""To which address, from what, and how many bytes: ``ctypes.memmove``, or what does the same."""

TRIM_LEAST = 1 << 20
"""Free ranges below so many bytes keep their memory."""


def supported() -> bool:
    """Has this system all that segments are made of? (Linux has.)"""
    return (
        hasattr(os, "memfd_create")
        and hasattr(fcntl, "F_ADD_SEALS")
        and hasattr(fcntl, "F_OFD_SETLK")
        and os.path.isdir("/proc/self/fd")
    )


class Segment:
    """Shared memory of this process, for its arena to lend from. ``size`` is a multiple of a page.

    Raises:
        OSError: if the system gives none.
    """

    def __init__(self, size: int) -> None:
        self.id = secrets.randbits(62) + 1
        self.size = -(-size // PAGE) * PAGE
        self.nonce = secrets.token_bytes(NONCE)
        self.space = FreeList(self.size)
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
        at = self.space.take(NONCE)
        assert at is not None
        self.nonce_at = at
        self._map[at : at + NONCE] = self.nonce

    def offer(self, lock: int) -> ArenaOffer:
        """What a peer has to know to map it; it shall lock byte ``lock``."""
        stat = os.fstat(self._descriptor)
        return ArenaOffer(
            self.id, self.size, os.getpid(), self._descriptor, stat.st_dev, stat.st_ino, self.nonce_at, lock
        )

    def write(self, offset: int, data: Frame, copy: Copy = ctypes.memmove) -> None:
        """Copy ``data`` to ``offset``; where it can be written to, or is bytes, the GIL is free meanwhile."""
        size = len(data)
        assert offset + size <= self.size
        if not size:
            return
        if isinstance(data, LazyFrame):
            data.write_to(memoryview(self._map)[offset : offset + size])
        elif isinstance(data, memoryview) and data.readonly:  # ctypes does not give the address of such
            self._map[offset : offset + size] = data
        else:
            source = data if isinstance(data, bytes) else _array_of(size).from_buffer(data)
            copy(self._address + offset, source, size)

    def take_back(self, offset: int) -> None:
        """The block at ``offset`` is free."""
        self.space.give_back(offset)

    def is_held(self, lock: int) -> bool:
        """Does anybody hold the lock of byte ``lock``, so may look at what was lent to him?"""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, lock, 1, 0)
        kind: int = _FLOCK.unpack(fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, asked))[0]
        return kind != fcntl.F_UNLCK

    def trim(self) -> int:
        """Give the memory of large free ranges back to the system; gives how many bytes that were."""
        given = 0
        for offset, size in self.space.free_ranges():
            start, end = -(-offset // PAGE) * PAGE, min(offset + size, self.space.touched) // PAGE * PAGE
            if end - start >= TRIM_LEAST:
                self._map.madvise(mmap.MADV_REMOVE, start, end - start)
                given += end - start
        self.space.untouch()
        return given

    def memory(self) -> int:
        """Bytes of memory that it takes in truth."""
        return os.fstat(self._descriptor).st_blocks * 512

    def close(self) -> None:
        """Lend no more. The memory that others still look at stays until they have done. Idempotent."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # a system that cannot punch holes keeps them a while longer
                self.trim()
            os.close(self._descriptor)
            self._descriptor = -1
            # Unmapped with the last reference: a thread may be copying into it at this moment.


@lru_cache(maxsize=1024)
def _array_of(size: int) -> Any:
    """The ctypes array of ``size`` bytes; making one anew costs more than a small message."""
    return ctypes.c_char * size


class MappedSegment:
    """A peer's segment, mapped here. Gone with its last block, or when nobody knows it any more.

    Raises:
        OSError: if it cannot be opened or mapped, or is not what was offered.
    """

    def __init__(self, offer: ArenaOffer) -> None:
        self.id = offer.segment
        self.size = offer.size
        path = f"/proc/{offer.pid}/fd/{offer.descriptor}"
        target = os.readlink(path)
        if not target.startswith(f"/memfd:{NAME}"):  # opening a stranger's pipe or device may do anything
            raise OSError(f"{path} is {target!r}: the processes see different process numbers")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _check(descriptor, offer)
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offer.lock, 1, 0)
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, asked)
            self._map = mmap.mmap(descriptor, offer.size)  # keeps the lock: it holds a copy of descriptor
        finally:
            os.close(descriptor)

    def read(self, offset: int, size: int) -> bytes:
        """A copy of ``size`` bytes."""
        return self._map[offset : offset + size]

    def block(self, offset: int, size: int) -> Any:
        """``size`` bytes as a ctypes array, which ``weakref`` can watch; whatever is built on it keeps it.

        Raises:
            ValueError: if they do not lie in the segment.
        """
        return _array_of(size).from_buffer(self._map, offset)


def _check(descriptor: int, offer: ArenaOffer) -> None:
    stat = os.fstat(descriptor)
    if (stat.st_dev, stat.st_ino, stat.st_size) != (offer.device, offer.inode, offer.size):
        raise OSError("another piece of memory stands at that descriptor")
    if stat.st_uid != os.geteuid():
        raise OSError(f"the memory belongs to user {stat.st_uid}")
    if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise OSError("the memory is not sealed against shrinking")
    if offer.nonce_at + NONCE > offer.size:
        raise OSError("the nonce lies outside of the memory")
