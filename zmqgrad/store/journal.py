"""The journal of a store: each change is in a file before it is answered (P9).

A change that was answered survives the death of the process: what ``write`` took, the kernel keeps. To
survive the machine's as well (power, kernel), it takes ``sync``, which costs each batch of changes a
flush of the disk.

A record that is cut off at the end of the file was never answered: it is dropped. Anything else that is
not as it was written is refused, with where it is; :func:`salvage` saves what is whole. The format is that
of :mod:`~zmqgrad.store.records`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from zmqgrad.errors import JournalError
from zmqgrad.store.records import MAGIC, Damage, Entry, Piece, Role, scan, write_record
from zmqgrad.wire.messages import Message, StoreQueuePop

COMPACT_BYTES = 4 << 20
"""A journal that has grown by this much, and to twice its size, is written anew."""

_BUFFER = 1 << 20


class Journal:
    """The journal at ``path``, made if it is not there; one process has it at a time.

    You must take all of :meth:`entries` before anything else.

    Args:
        sync: flush the disk at each :meth:`commit`.

    Raises:
        JournalError: if it cannot be opened, or another process has it.
    """

    def __init__(self, path: str | os.PathLike[str], *, sync: bool = False) -> None:
        self.path = Path(path)
        self._sync = sync
        self._pending: list[bytes] = []
        self._file = _open_alone(self.path)
        self.size = os.fstat(self._file).st_size
        self._compacted = 0  # its size when it was last written anew

    def entries(self) -> Iterator[Entry]:
        """What is written there, from the first on.

        Raises:
            JournalError: if it is damaged: naming the place, and what can be saved.
        """
        if self.size < len(MAGIC):
            self._begin()
            return
        with _mapped(self._file, self.path) as data:
            end = len(MAGIC)
            for piece in scan(data):
                if isinstance(piece.what, Damage):
                    raise _damage(self.path, piece, list(scan(data)))
                if isinstance(piece.what, Entry):
                    end = piece.end
                    yield piece.what
        if end < self.size:  # what was cut off is dropped
            os.ftruncate(self._file, end)
            self.size = end
        os.lseek(self._file, 0, os.SEEK_END)

    def _begin(self) -> None:
        if not MAGIC.startswith(os.pread(self._file, len(MAGIC), 0)):
            raise _no_journal(self.path)
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        _write_all(self._file, MAGIC)
        self.size = len(MAGIC)
        if self._sync:
            os.fsync(self._file)
            _sync_directory(self.path)

    def note(self, line: int, number: int, query: Message) -> None:
        """``query`` has changed something; :meth:`commit` writes it down."""
        if type(query) is StoreQueuePop:
            query = StoreQueuePop(query.key, False, 0.0)  # it has waited already
        self._pending += write_record(Entry(Role.CHANGE, line, number, query))

    def commit(self) -> None:
        """Write what was noted since the last time. Only then it may be answered.

        Raises:
            OSError: if it cannot be written; nothing may be answered any more.
        """
        if not self._pending:
            return
        data, self._pending = b"".join(self._pending), []
        _write_all(self._file, data)
        self.size += len(data)
        if self._sync:
            os.fdatasync(self._file)

    @property
    def has_grown(self) -> bool:
        """Is it worth to be written anew?"""
        return self.size - self._compacted > max(COMPACT_BYTES, self._compacted)

    def rewrite(self, entries: Iterable[Entry]) -> None:
        """Put ``entries``, which say the same in fewer words, in place of what is there, or nothing.

        Raises:
            OSError: if there is no room, say; then the journal is as it was, and may be written to.
        """
        self._compacted = self.size  # should it fail: again only when it has doubled
        path = _beside(self.path)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = _write_journal(file, entries)
            os.rename(path, self.path)
        except BaseException:
            os.close(file)
            path.unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file, self.size, self._compacted = file, size, size
        _sync_directory(self.path)

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __repr__(self) -> str:
        return f"<Journal {self.path} of {self.size} bytes>"


class Salvaged(NamedTuple):
    """How many entries were saved, and how many stretches of how many bytes were not."""

    entries: int
    gaps: int
    lost: int


def salvage(path: str | os.PathLike[str], into: str | os.PathLike[str], *, beyond: bool = False) -> Salvaged:
    """Write what is whole of the damaged journal at ``path`` to a new one.

    Args:
        beyond: also take what is whole behind the first damage. It may build on what was lost there: a
            sum lacks what was added, a deleted key is there again.

    Raises:
        JournalError: if ``path`` cannot be read or is no journal, or ``into`` exists.
    """
    try:
        source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        raise JournalError(f"cannot open the journal {path}: {e.strerror}") from e
    try:
        with _mapped(source, Path(path)) as data:
            saved, gaps, lost = _saved(list(scan(data)), beyond)
    finally:
        os.close(source)
    try:
        file = os.open(into, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise JournalError(f"cannot write what was saved to {into}: {e.strerror}") from e
    try:
        _write_journal(file, saved)
    finally:
        os.close(file)
    return Salvaged(len(saved), gaps, lost)


def _saved(pieces: list[Piece], beyond: bool) -> tuple[list[Entry], int, int]:
    """The entries to keep, and how many stretches of how many bytes are not kept."""
    damaged = [i for i, piece in enumerate(pieces) if isinstance(piece.what, Damage)]
    if damaged and not beyond:
        first = damaged[0]
        lost = pieces[-1].end - pieces[first].begin
        return [p.what for p in pieces[:first] if isinstance(p.what, Entry)], 1, lost
    entries = [piece.what for piece in pieces if isinstance(piece.what, Entry)]
    return entries, len(damaged), sum(pieces[i].end - pieces[i].begin for i in damaged)


# ---- files ------------------------------------------------------------------------------------------------


def _open_alone(path: Path) -> int:
    """``path``, opened for this process alone."""
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise JournalError(f"cannot open the journal {path}: {e.strerror}") from e
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        except BlockingIOError:
            os.close(file)
            raise JournalError(f"another process uses the journal {path}: end that one first") from None
        except FileNotFoundError:
            pass
        os.close(file)  # it was written anew between our opening and locking it


def _write_journal(file: int, entries: Iterable[Entry]) -> int:
    """``entries`` as a journal, safe on the disk; gives its size."""
    size, batch, batched = 0, [MAGIC], len(MAGIC)
    for entry in entries:
        pieces = write_record(entry)
        batch += pieces
        batched += sum(map(len, pieces))
        if batched > _BUFFER:
            _write_all(file, b"".join(batch))
            size, batch, batched = size + batched, [], 0
    _write_all(file, b"".join(batch))
    os.fsync(file)
    return size + batched


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _beside(path: Path) -> Path:
    """Where a journal is written before it takes the place of the one at ``path``."""
    return path.with_name(f"{path.name}.new")


def _sync_directory(path: Path) -> None:
    """Make the name ``path`` last."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def _mapped(file: int, path: Path) -> Iterator[memoryview]:
    """All of ``file``, which must begin as a journal."""
    if os.fstat(file).st_size < len(MAGIC):
        raise _no_journal(path)
    with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
        if data[: len(MAGIC)] != MAGIC:
            raise _no_journal(path)
        yield data


def _no_journal(path: Path) -> JournalError:
    return JournalError(f"{path} is no journal of a store of this release: it begins otherwise")


def _damage(path: Path, first: Piece, pieces: list[Piece]) -> JournalError:
    assert isinstance(first.what, Damage)
    before = sum(isinstance(piece.what, Entry) for piece in pieces if piece.begin < first.begin)
    behind = sum(isinstance(piece.what, Entry) for piece in pieces if piece.begin > first.begin)
    return JournalError(
        f"the journal {path} is damaged at byte {first.begin}: {first.what.why}. {before} changes before it "
        f"are whole, and {behind} behind it: `zmqgrad store salvage {path} NEW` saves the first, with "
        f"--beyond the others, too, in a new journal"
    )
