"""A file to which many processes append: format, locks, and what is done about a writer that died.

    offset  size  field
         0     8  b"zgstore1", which is magic and version
         8        records, one after the other:
                     4  length of the body
                     4  crc32 of those four bytes
                     4  crc32 of the body
                        body

Numbers are big-endian. Who appends holds the lock alone, who reads shares it, so a record that is not
complete was left by a writer that was killed: it is ignored, and the next writer cuts it off. Anything
else that cannot be read is damage, and refused.

The locks belong to the open file (``F_OFD_SETLK`` on Linux, ``flock`` elsewhere), not to the process as
plain ``fcntl`` locks do: two stores of one process exclude each other, and closing one leaves the other's
lock alone. They work across hosts where the file system's do (NFS does); taking one also makes NFS look
at the server rather than at what it remembers. Waiting for one is polling with a deadline, since the
holder may be a process that stands still.
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import threading
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zmqgrad.errors import StoreError, StoreTimeoutError
from zmqgrad.runtime.backoff import Backoff
from zmqgrad.runtime.clock import Deadline

MAGIC = b"zgstore1"

_HEAD = struct.Struct("!4sII")
_LENGTH = struct.Struct("!I")
_FLOCK = struct.Struct("@hhqqi")  # struct flock of 64-bit Linux: type, whence, start, length, pid

BLOCK = 1 << 20
"""How much is read at a time; a longer record is read as a whole."""

LOCK_PAUSES = (0.0002, 0.02)
"""Least and longest pause, in seconds, between two attempts at a lock that others hold."""

_logs: weakref.WeakSet[SharedLog] = weakref.WeakSet()


class SharedLog:
    """The file at ``path``, created if it is not there. You must close it. Not thread-safe.

    Raises:
        StoreError: if it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._pause = threading.Event()  # never set: what the pauses wait on
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise StoreError(f"cannot open the store's file {path!r}: {e.strerror}") from e
        _logs.add(self)

    # ---- locks ------------------------------------------------------------------------------------------

    @contextmanager
    def locked(self, deadline: Deadline, *, alone: bool) -> Iterator[None]:
        """Hold the lock, ``alone`` (to write) or with other readers.

        Raises:
            StoreTimeoutError: if others hold it until ``deadline``.
            StoreError: if this is closed, or the file system has no locks.
        """
        if self._file < 0:
            raise StoreError(f"the store at {self.path!r} is closed, or was opened before a fork")
        backoff = Backoff(*LOCK_PAUSES)
        while not self._try_lock(fcntl.LOCK_EX if alone else fcntl.LOCK_SH):
            if deadline.passed():
                raise StoreTimeoutError(
                    f"others hold the lock on the store's file {self.path!r}, and have not let go of it in "
                    f"time; does one of them stand still?"
                )
            self._pause.wait(backoff.pause(deadline.left()))
        try:
            yield
        finally:
            self._try_lock(fcntl.LOCK_UN)

    def _try_lock(self, kind: int) -> bool:
        try:
            if sys.platform == "linux":
                kinds = {fcntl.LOCK_EX: fcntl.F_WRLCK, fcntl.LOCK_SH: fcntl.F_RDLCK}
                fcntl.fcntl(
                    self._file,
                    fcntl.F_OFD_SETLK,
                    _FLOCK.pack(kinds.get(kind, fcntl.F_UNLCK), os.SEEK_SET, 0, 0, 0),
                )
            else:
                fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, says POSIX
            return False
        except OSError as e:
            raise StoreError(f"cannot lock the store's file {self.path!r}: {e.strerror}") from e
        return True

    # ---- with the lock held -----------------------------------------------------------------------------

    def read(self, offset: int) -> tuple[list[bytes], int]:
        """The bodies of the complete records from ``offset`` (0: all) on, and where the next will begin.

        Raises:
            StoreError: if the file is damaged, not ours, or was removed or cut.
        """
        status = os.fstat(self._file)
        if status.st_nlink == 0:
            raise StoreError(f"the store's file {self.path!r} was removed")
        if status.st_size < offset:
            raise StoreError(f"the store's file {self.path!r} was cut to {status.st_size} bytes by somebody")
        if offset == 0:
            if not self._begins_well(status.st_size):
                return [], 0
            offset = len(MAGIC)
        bodies: list[bytes] = []
        while offset < status.st_size:
            found = self._read_block(offset, status.st_size, bodies)
            if found == offset:
                break  # a writer died here
            offset = found
        return bodies, offset

    def _begins_well(self, size: int) -> bool:
        begins = os.pread(self._file, len(MAGIC), 0)
        if begins == MAGIC:
            return True
        if not MAGIC.startswith(begins) and size > 0:
            raise StoreError(
                f"{self.path!r} is no file of a FileStore of ours (it begins with {begins!r}); choose "
                f"another path, or remove it if nobody uses it"
            )
        return False

    def _read_block(self, offset: int, size: int, bodies: list[bytes]) -> int:
        """Read some records to ``bodies``; gives the offset behind the last complete one."""
        block = os.pread(self._file, min(BLOCK, size - offset), offset)
        at = 0
        while at + _HEAD.size <= len(block):
            head, check, body_check = _HEAD.unpack_from(block, at)
            (length,) = _LENGTH.unpack(head)
            end = at + _HEAD.size + length
            if zlib.crc32(head) != check:
                if not any(block[at:]) and offset + len(block) == size:
                    break  # a crash of the host left room, but no bytes
                raise self._damaged(offset + at)
            if offset + end > size:
                break
            if end > len(block):
                if at > 0:
                    break  # the next block begins here
                block = os.pread(self._file, end, offset)
            body = block[at + _HEAD.size : end]
            if zlib.crc32(body) != body_check:
                if offset + end == size:
                    break
                raise self._damaged(offset + at)
            bodies.append(body)
            at = end
        return offset + at

    def _damaged(self, offset: int) -> StoreError:
        return StoreError(
            f"the store's file {self.path!r} is damaged at byte {offset}: no writer of ours, though killed, "
            f"can have left the record there so"
        )

    def append(self, body: bytes | bytearray, offset: int) -> None:
        """Write a record at ``offset``, which :meth:`read` gave; what stands there is of a dead writer.

        Raises:
            StoreError: if it cannot be written; then it is as if it had not been tried.
        """
        head = _LENGTH.pack(len(body))
        record = b"".join((head, _LENGTH.pack(zlib.crc32(head)), _LENGTH.pack(zlib.crc32(body)), body))
        if offset == 0:
            record = MAGIC + record
        try:
            if os.fstat(self._file).st_size > offset:
                os.ftruncate(self._file, offset)
            view, at = memoryview(record), offset
            while view:
                written = os.pwrite(self._file, view, at)
                view, at = view[written:], at + written
        except OSError as e:
            # What was written is a record without its end, or none: nobody will take it for one.
            raise StoreError(f"cannot write to the store's file {self.path!r}: {e.strerror}") from e

    def remove(self) -> None:
        """Remove the file; those who have it open are told when they next look."""
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass  # somebody was faster, with the same intent
        except OSError as e:
            raise StoreError(f"cannot remove the store's file {self.path!r}: {e.strerror}") from e

    def is_at_its_path(self) -> bool:
        """Is this file still the one at its path? Somebody may have removed it while it was being opened."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file))
        except FileNotFoundError:
            return False

    # ---- the end ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the file. Idempotent."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def __repr__(self) -> str:
        return f"<SharedLog {Path(self.path).name!r}{', closed' if self._file < 0 else ''}>"


def _close_inherited() -> None:
    # A lock of the parent would outlive it as long as its children have the file open.
    for log in list(_logs):
        log.close()


os.register_at_fork(after_in_child=_close_inherited)
