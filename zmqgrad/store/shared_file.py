"""The SQLite file of a :class:`~zmqgrad.store.file.FileStore`: keys and queues that many processes change.

:class:`FileContents` is the state machine's storage, kept in the file: each query is one transaction around
the machine. :class:`SharedFile` is the connection of this process. There is one for each file, whatever
number of stores use it: POSIX locks belong to the process, and closing one descriptor of a file drops all
of them.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zmqgrad.errors import StoreError, StoreTimeoutError
from zmqgrad.runtime.backoff import Backoff
from zmqgrad.runtime.clock import MONOTONIC, Clock, Deadline
from zmqgrad.store.contents import Item
from zmqgrad.store.sqlite import connect, is_busy
from zmqgrad.store.watch_targets import INTERNAL_PREFIX, Target

KIND, VERSION = "FileStore", 1

SCHEMA = """
CREATE TABLE meta (revision INTEGER NOT NULL, closed INTEGER NOT NULL);
INSERT INTO meta VALUES (0, 0);
CREATE TABLE keys (key BLOB PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE items (id INTEGER PRIMARY KEY AUTOINCREMENT, name BLOB NOT NULL, value BLOB NOT NULL);
CREATE INDEX items_by_name ON items (name, id)
"""

POLL_SECONDS = (0.0005, 0.05)
"""Shortest and longest poll interval of a waiting client. SQLite has no way to wake it."""

_FIRST_SHOWN, _HIDDEN_END = INTERNAL_PREFIX.encode(), b"\x01"  # between these lie the library's own keys


class _Values(Mapping[str, bytes]):
    """The keys in the file and their values."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __getitem__(self, key: str) -> bytes:
        row = self._db.execute("SELECT value FROM keys WHERE key = ?", (key.encode(),)).fetchone()
        if row is None:
            raise KeyError(key)
        value: bytes = row[0]
        return value

    def __len__(self) -> int:
        count: int = self._db.execute("SELECT count(*) FROM keys").fetchone()[0]
        return count

    def __iter__(self) -> Iterator[str]:
        return iter([row[0].decode() for row in self._db.execute("SELECT key FROM keys").fetchall()])

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, str)
        row = self._db.execute("SELECT 1 FROM keys WHERE key = ?", (key.encode(),)).fetchone()
        return row is not None


class _Queues:
    """The queues in the file that are not empty."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __len__(self) -> int:
        count: int = self._db.execute("SELECT count(DISTINCT name) FROM items").fetchone()[0]
        return count

    def __contains__(self, name: object) -> bool:
        assert isinstance(name, str)
        row = self._db.execute("SELECT 1 FROM items WHERE name = ? LIMIT 1", (name.encode(),)).fetchone()
        return row is not None

    def get(self, name: str, default: object = ()) -> range:
        """A range as long as the queue ``name``."""
        row = self._db.execute("SELECT count(*) FROM items WHERE name = ?", (name.encode(),)).fetchone()
        return range(row[0])


class FileContents:
    """Keys and queues in an SQLite file (:class:`~zmqgrad.store.contents.Storage`), inside a transaction.

    It makes no notifications: watches compare snapshots.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.values = _Values(db)
        self.queues = _Queues(db)
        self.changes = 0
        self.watched = 0

    @property
    def revision(self) -> int:
        """Increased by each change of a key."""
        revision: int = self._db.execute("SELECT revision FROM meta").fetchone()[0]
        return revision

    @revision.setter
    def revision(self, revision: int) -> None:
        self._db.execute("UPDATE meta SET revision = ?", (revision,))

    @property
    def num_keys(self) -> int:
        """Number of keys, without the library's own."""
        hidden = self._db.execute(
            "SELECT count(*) FROM keys WHERE key >= ? AND key < ?", (_FIRST_SHOWN, _HIDDEN_END)
        ).fetchone()[0]
        return len(self.values) - int(hidden)

    def keys(self, prefix: str) -> list[str]:
        """The sorted keys that begin with ``prefix``; internal keys only if ``prefix`` is internal."""
        start = prefix.encode()
        rows = self._db.execute(
            "SELECT key FROM keys WHERE key >= ? AND substr(key, 1, ?) = ? ORDER BY key",
            (start, len(start), start),
        )
        keys = [row[0].decode() for row in rows.fetchall()]
        return (
            keys
            if prefix.startswith(INTERNAL_PREFIX)
            else [key for key in keys if not key.startswith(INTERNAL_PREFIX)]
        )

    def put(self, key: str, value: bytes, notifications: list[Any]) -> None:
        """Set ``key``."""
        self._db.execute("INSERT OR REPLACE INTO keys VALUES (?, ?)", (key.encode(), value))
        self._db.execute("UPDATE meta SET revision = revision + 1")

    def delete(self, key: str, notifications: list[Any]) -> bool:
        """Delete ``key``. Returns whether it existed."""
        existed = self._db.execute("DELETE FROM keys WHERE key = ?", (key.encode(),)).rowcount > 0
        if existed:
            self._db.execute("UPDATE meta SET revision = revision + 1")
        return existed

    def push(self, name: str, value: bytes) -> None:
        """Append ``value`` to the queue ``name``."""
        self._db.execute("INSERT INTO items (name, value) VALUES (?, ?)", (name.encode(), value))

    def pop(self, name: str) -> Item:
        """Remove and return the first item of the non-empty queue ``name``."""
        row = self._db.execute(
            "SELECT id, value FROM items WHERE name = ? ORDER BY id LIMIT 1", (name.encode(),)
        ).fetchone()
        self._db.execute("DELETE FROM items WHERE id = ?", (row[0],))
        return Item(*row)

    def delivered(self, item: Item) -> None:
        """Does nothing: the item left the file when it was popped."""

    def watch(self, target: Target) -> None:
        """Does nothing: there are no notifications."""

    def unwatch(self, target: Target) -> None:
        """Does nothing: there are no notifications."""


class SharedFile:
    """This process's connection to the file at ``path``. Safe to use from any thread.

    Raises:
        StoreError: if it cannot be opened, or is another kind of file.
        StoreTimeoutError: if others hold its lock until ``deadline``.
    """

    def __init__(self, path: Path, deadline: Deadline, clock: Clock = MONOTONIC) -> None:
        self.path = path
        self.users = 0
        self._clock = clock
        self._lock = threading.RLock()  # guards all that follows; held during each transaction
        self._changed = threading.Condition(self._lock)
        self._commits = 0
        self._closed = False
        self._removed = False
        self._inherited = False
        self._db = self._connect(deadline)
        self.contents = FileContents(self._db)

    def _connect(self, deadline: Deadline) -> sqlite3.Connection:
        while True:
            before = _identity(self.path)
            db: sqlite3.Connection = self._retry_while_locked(
                lambda: connect(self.path, KIND, SCHEMA, VERSION), deadline
            )
            identity = _identity(self.path)
            if identity is not None and before in (None, identity):
                self.identity = identity
                break
            db.close()  # the file was replaced meanwhile
        db.execute("PRAGMA journal_mode = TRUNCATE")
        # Safe against SIGKILL, as the kernel keeps what was written. NORMAL took ten times as long for each
        # write (0.9 ms on a disk), for what a job whose host lost power has no use of.
        db.execute("PRAGMA synchronous = OFF")
        return db

    def _retry_while_locked(self, attempt: Any, deadline: Deadline) -> Any:
        """Call ``attempt`` until no other process holds the lock, and return its result.

        Raises:
            StoreTimeoutError: if one does until ``deadline``.
        """
        backoff = Backoff(*POLL_SECONDS)
        while True:
            try:
                return attempt()
            except sqlite3.OperationalError as e:
                if not is_busy(e):
                    raise self._explained(e) from e
                if deadline.passed():
                    raise StoreTimeoutError(
                        f"another process holds the lock on the store's file {str(self.path)!r}, and has not "
                        f"released it in time; is one stopped?"
                    ) from e
            except sqlite3.DatabaseError as e:
                raise self._explained(e) from e
            threading.Event().wait(backoff.pause(deadline.left()))  # nothing tells when a lock is released

    def _explained(self, error: sqlite3.Error) -> StoreError:
        said = str(error)
        if "full" in said:
            said = f"{said} ({os.strerror(errno.ENOSPC)})"
        return StoreError(f"cannot use the store's file {str(self.path)!r}: {said}")

    @contextmanager
    def transaction(self, deadline: Deadline, *, write: bool) -> Iterator[FileContents]:
        """The contents, in a transaction; committed at the end, rolled back by an exception.

        Raises:
            StoreTimeoutError: if others hold the lock until ``deadline``.
            StoreError: if the file was removed or cannot be used, this is closed, or this process is a fork.
        """
        self._retry_while_locked(lambda: self._begin(write), deadline)  # which takes the lock of threads, too
        try:
            try:
                self._check_present()
                yield self.contents
                if self._db.in_transaction:
                    self._retry_while_locked(lambda: self._db.execute("COMMIT"), deadline)
            except BaseException as e:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                if isinstance(e, sqlite3.Error):
                    raise self._explained(e) from e
                raise
            if write:
                self._commits += 1
                self._changed.notify_all()
        finally:
            self._lock.release()

    def _begin(self, write: bool) -> None:
        self._lock.acquire()
        try:
            self._check_open()
            self._db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            try:
                self._db.execute("SELECT revision FROM meta").fetchone()  # takes the lock for reading
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
        except BaseException:
            self._lock.release()
            raise

    def _check_open(self) -> None:
        if self._inherited:
            raise StoreError(f"the store at {str(self.path)!r} was opened before a fork: open it anew here")
        if self._closed:
            raise StoreError(f"the store at {str(self.path)!r} is closed")

    def _check_present(self) -> None:
        """Raise if the path was unlinked or replaced: its journal would belong to another file."""
        if self._removed or _identity(self.path) != self.identity:
            self._removed = True
            raise StoreError(f"the store's file {str(self.path)!r} was removed")

    # ---- waiting for changes ----------------------------------------------------------------------------

    def version(self) -> tuple[int, int]:
        """Differs after each change, by this process or another."""
        with self._lock:
            self._check_open()
            try:
                others: int = self._db.execute("PRAGMA data_version").fetchone()[0]
            except sqlite3.OperationalError as e:
                if not is_busy(e):
                    raise self._explained(e) from e
                others = -1  # another process is writing: check again soon
            return self._commits, others

    def wait_changed(self, seen: tuple[int, int], deadline: Deadline) -> None:
        """Wait until :meth:`version` differs from ``seen``, or ``deadline`` has passed, or this is closed."""
        backoff = Backoff(*POLL_SECONDS)
        with self._lock:
            while not (deadline.passed() or self._closed or self.version() != seen):
                self._changed.wait(backoff.pause(deadline.left()))

    def wake(self) -> None:
        """Wake threads in :meth:`wait_changed`."""
        with self._lock:
            self._commits += 1
            self._changed.notify_all()

    # ---- the end ----------------------------------------------------------------------------------------

    def leave(self, world_size: int, deadline: Deadline) -> None:
        """Count a store of ``world_size`` as closed. The last one removes the file."""
        with self.transaction(deadline, write=True):
            self._db.execute("UPDATE meta SET closed = closed + 1")
            closed: int = self._db.execute("SELECT closed FROM meta").fetchone()[0]
            if closed != world_size:
                return
            self._removed = True
            # Under the lock, and before any write: processes that wait for the lock then find the file
            # removed.
            for name in (f"{self.path}-journal", str(self.path)):
                try:
                    os.unlink(name)
                except FileNotFoundError:
                    pass  # there is no journal, or another process has removed it
                except OSError as e:
                    raise StoreError(f"cannot remove the store's file {name!r}: {e.strerror}") from e
            self._db.execute("ROLLBACK")

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._changed.notify_all()
                if not self._inherited:
                    self._db.close()

    def before_fork(self) -> None:
        """A fork must not copy a transaction: see :data:`files`."""
        self._lock.acquire()

    def after_fork(self, in_child: bool) -> None:
        """The child never uses nor closes the connection: that would undo what the parent is writing."""
        self._inherited |= in_child
        self._lock.release()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError as e:
        if e.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise StoreError(f"cannot look at the store's file {str(path)!r}: {e.strerror}") from e
    return status.st_dev, status.st_ino


class SharedFiles:
    """The connections of this process, by file."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards _files, and the number of users of each
        self._files: dict[tuple[int, int], SharedFile] = {}
        self._inherited: list[SharedFile] = []  # kept, as their connections must not be closed

    def open(self, path: Path, deadline: Deadline) -> SharedFile:
        """The connection to the file at ``path``; a new one if this process has none to that file."""
        with self._lock:
            identity = _identity(path)
            file = None if identity is None else self._files.get(identity)
            if file is None:
                file = SharedFile(path, deadline)
                self._files[file.identity] = file
            file.users += 1
            return file

    def release(self, file: SharedFile) -> None:
        """End one use of ``file``; the last one closes its connection."""
        with self._lock:
            file.users -= 1
            if not file.users:
                if self._files.get(file.identity) is file:
                    del self._files[file.identity]
                file.close()

    def before_fork(self) -> None:
        """No connection is in a transaction while the process forks."""
        self._lock.acquire()
        for file in self._files.values():
            file.before_fork()

    def after_fork(self, in_child: bool) -> None:
        """Resume; the child keeps none of the connections."""
        for file in self._files.values():
            file.after_fork(in_child)
        if in_child:
            self._inherited += self._files.values()
            self._files.clear()
        self._lock.release()


files = SharedFiles()

os.register_at_fork(
    before=files.before_fork,
    after_in_parent=lambda: files.after_fork(in_child=False),
    after_in_child=lambda: files.after_fork(in_child=True),
)
