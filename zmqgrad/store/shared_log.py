"""A file to which many processes append: format, locks, and what is done about a writer that died.

    offset  size  field
         0     8  b"zgstore1", which is magic and version
         8    16  random: the same log, though written anew, has the same
        24        records, one after the other:
                     4  length of the body
                     4  crc32 of those four bytes
                     4  crc32 of the body
                        body

Numbers are big-endian. Who appends holds the lock alone, who reads shares it, so a record that is not
complete was left by a writer that was killed: it is ignored, and the next writer cuts it off. Anything
else that cannot be read is damage, and refused.

A log can be written anew, shorter, as another file that takes the place of this one. Who has the old one
open finds, once it has the lock, that this has no name any more, and goes over to the new one.

The locks belong to the open file (``F_OFD_SETLK`` on Linux, ``flock`` elsewhere), not to the process as
plain ``fcntl`` locks do: two stores of one process exclude each other, and closing one leaves the other's
lock alone. They work across hosts where the file system's do (NFS does); taking one also makes NFS look
at the server rather than at what it remembers. Waiting for one is polling with a deadline, since the
holder may be a process that stands still.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys
import threading
import weakref
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zmqgrad.errors import StoreError, StoreTimeoutError
from zmqgrad.runtime.backoff import Backoff
from zmqgrad.runtime.clock import Deadline

MAGIC = b"zgstore1"
START = len(MAGIC) + 16
"""Where the first record begins."""

_HEAD = struct.Struct("!4sII")
_LENGTH = struct.Struct("!I")
_FLOCK = struct.Struct("@hhqqi")  # struct flock of 64-bit Linux: type, whence, start, length, pid

BLOCK = 1 << 20
"""How much is read at a time; a longer record is read as a whole."""

NEW = ".new"
"""What is appended to the path while the log is written anew."""

LOCK_PAUSES = (0.0002, 0.02)
"""Least and longest pause, in seconds, between two attempts at a lock that others hold."""

_FLAGS = os.O_RDWR | os.O_CLOEXEC

_logs: weakref.WeakSet[SharedLog] = weakref.WeakSet()


class LogRemovedError(StoreError):
    """The file was removed, and with it the log."""


class SharedLog:
    """The file at ``path``, created if it is not there. You must close it. Not thread-safe.

    Raises:
        StoreError: if it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.moves = 0
        """How often it went over to a file that somebody has written anew: read that from its beginning."""
        self._name = b""  # the random bytes; empty: not read yet
        self._pause = threading.Event()  # never set: what the pauses wait on
        try:
            self._file = os.open(path, _FLAGS | os.O_CREAT, 0o600)
        except OSError as e:
            raise StoreError(f"cannot open the store's file {path!r}: {e.strerror}") from e
        _logs.add(self)

    # ---- locks ------------------------------------------------------------------------------------------

    @contextmanager
    def locked(self, deadline: Deadline, *, alone: bool) -> Iterator[None]:
        """Hold the lock, ``alone`` (to write) or with other readers.

        Raises:
            StoreTimeoutError: if others hold it until ``deadline``.
            LogRemovedError: if the file was removed.
            StoreError: if this is closed, or the file system has no locks.
        """
        self._lock(deadline, alone)
        try:
            while not self._is_at_its_path():
                self._go_over()
                self._lock(deadline, alone)
            yield
        finally:
            self._try_lock(fcntl.LOCK_UN)

    def _lock(self, deadline: Deadline, alone: bool) -> None:
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

    def _go_over(self) -> None:
        """Open the file that has taken the place of this one, which no name leads to any more."""
        try:
            file = os.open(self.path, _FLAGS)
        except OSError as e:
            raise LogRemovedError(f"the store's file {self.path!r} was removed") from e
        if self._name not in (b"", os.pread(file, START, 0)[len(MAGIC) :]):
            os.close(file)
            raise LogRemovedError(
                f"the store's file {self.path!r} was removed, and another store's is there now"
            )
        os.close(self._file)
        self._file = file
        self.moves += 1

    # ---- with the lock held -----------------------------------------------------------------------------

    def read(self, offset: int) -> tuple[list[bytes], int]:
        """The bodies of the complete records from ``offset`` (0: all) on, and where the next will begin.

        Raises:
            StoreError: if the file is damaged, not ours, or was cut.
        """
        status = os.fstat(self._file)
        if status.st_size < offset:
            raise StoreError(f"the store's file {self.path!r} was cut to {status.st_size} bytes by somebody")
        if offset == 0:
            if not self._begins_well(status.st_size):
                return [], 0
            offset = START
        bodies: list[bytes] = []
        while offset < status.st_size:
            found = self._read_block(offset, status.st_size, bodies)
            if found == offset:
                break  # a writer died here
            offset = found
        return bodies, offset

    def _begins_well(self, size: int) -> bool:
        start = os.pread(self._file, START, 0)
        begins = start[: len(MAGIC)]
        if not MAGIC.startswith(begins) and size > 0:
            raise StoreError(
                f"{self.path!r} is no file of a FileStore of ours (it begins with {begins!r}); choose "
                f"another path, or remove it if nobody uses it"
            )
        if len(start) < START:
            return False
        self._name = start[len(MAGIC) :]
        return True

    def _read_block(self, offset: int, size: int, bodies: list[bytes]) -> int:
        """Read some records to ``bodies``; gives the offset behind the last complete one."""
        block = os.pread(self._file, min(BLOCK, size - offset), offset)
        at = 0
        while at + _HEAD.size <= len(block):
            head, check, body_check = _HEAD.unpack_from(block, at)
            (length,) = _LENGTH.unpack(head)
            end = at + _HEAD.size + length
            if zlib.crc32(head) != check:
                if self._is_blank(offset + at, size):
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

    def _is_blank(self, offset: int, size: int) -> bool:
        """Are there but zeros from ``offset`` to the end?"""
        starts = range(offset, size, BLOCK)
        return not any(any(os.pread(self._file, min(BLOCK, size - at), at)) for at in starts)

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
        record = _record(body)
        if offset == 0:
            record = MAGIC + os.urandom(START - len(MAGIC)) + record
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

    def write_anew(self, bodies: Iterable[bytes | bytearray]) -> int:
        """Let a log of ``bodies`` take the place of this one; gives where its next record will begin.

        Raises:
            StoreError: if that cannot be written; then all is as before.
        """
        path = f"{self.path}{NEW}"  # left there if this process is killed now; overwritten by the next
        try:
            file = os.open(path, _FLAGS | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                with os.fdopen(os.dup(file), "wb") as writer:
                    writer.write(MAGIC + self._name)
                    for body in bodies:
                        writer.write(_record(body))
                    writer.flush()
                    os.fsync(file)
                    size = writer.tell()
                os.replace(path, self.path)
            except BaseException:
                os.close(file)
                raise
        except OSError as e:
            raise StoreError(f"cannot write the store's file {self.path!r} anew: {e.strerror}") from e
        os.close(self._file)
        self._file = file
        return size

    def remove(self) -> None:
        """Remove the file; those who have it open are told when they next look."""
        try:
            with suppress(FileNotFoundError):  # there if somebody was killed while writing it anew
                os.unlink(f"{self.path}{NEW}")
            os.unlink(self.path)
        except FileNotFoundError:
            pass  # somebody was faster, with the same intent
        except OSError as e:
            raise StoreError(f"cannot remove the store's file {self.path!r}: {e.strerror}") from e

    def _is_at_its_path(self) -> bool:
        try:
            status = os.fstat(self._file)
            return status.st_nlink > 0 and os.path.samestat(os.stat(self.path), status)
        except FileNotFoundError:
            return False
        except OSError as e:
            if e.errno == errno.ESTALE:  # so NFS says that another host has removed it
                return False
            raise StoreError(f"cannot look at the store's file {self.path!r}: {e.strerror}") from e

    # ---- the end ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the file. Idempotent."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def __repr__(self) -> str:
        return f"<SharedLog {Path(self.path).name!r}{', closed' if self._file < 0 else ''}>"


def _record(body: bytes | bytearray) -> bytes:
    head = _LENGTH.pack(len(body))
    return b"".join((head, _LENGTH.pack(zlib.crc32(head)), _LENGTH.pack(zlib.crc32(body)), body))


def _close_inherited() -> None:
    # A lock of the parent would outlive it as long as its children have the file open.
    for log in list(_logs):
        log.close()


os.register_at_fork(after_in_child=_close_inherited)
