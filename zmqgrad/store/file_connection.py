"""Connection of one :class:`~zmqgrad.store.file.FileStore` to its SQLite file.

Each query is one transaction around the state machine. SQLite cannot wake a waiting client, so clients poll
``PRAGMA data_version``; threads of one store also wake each other.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from zmqgrad.errors import StoreError, StoreTimeoutError
from zmqgrad.runtime.backoff import Backoff
from zmqgrad.runtime.blocking import blocking_section
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store.file_contents import SCHEMA, FileContents
from zmqgrad.store.sqlite import BESIDE, DAMAGE_ERRORS, checked, connect, is_busy
from zmqgrad.store.state import State
from zmqgrad.store.watch import WatchRegistry
from zmqgrad.wire.messages import Message

logger = logging.getLogger(__name__)

KIND, VERSION = "FileStore", 1

POLL_SECONDS = (0.0005, 0.05)
"""Shortest and longest poll interval of a waiting client."""

OPEN_SECONDS = 10.0
CLOSE_SECONDS = 5.0
"""Time limits of opening and closing, which wait for the lock on the file."""

_T = TypeVar("_T")


class FileConnection:
    """Connection to the file at ``path``. Safe to use from any thread. You must close it.

    Args:
        name: for threads and log lines.
        world_size: the file is removed once this many stores on it were closed and none is open; -1: never.

    Raises:
        StoreError: if the file cannot be opened, or is another kind of file.
        StoreTimeoutError: if others hold its lock for ``OPEN_SECONDS``.
    """

    watches: WatchRegistry
    """The watches of the store. Must be set before :meth:`start_watching`."""

    def __init__(self, name: str, path: Path, world_size: int) -> None:
        self.name = name
        self.path = path
        self.blocked = 0
        """Number of blocked queries."""
        self._world_size = world_size
        self.lock = threading.RLock()  # guards all that follows; held during each transaction
        self._changed = threading.Condition(self.lock)
        self._closed = False
        self._disowned = False
        self._removed = False
        self._watcher: threading.Thread | None = None
        self.inherited = False
        """Whether this process is a fork of the one that opened the file."""
        with _fork_lock:
            self._open(Deadline.after(OPEN_SECONDS))
            _connections.add(self)

    def _open(self, deadline: Deadline) -> None:
        """Open the file, and count this store as open; again, if the file is removed meanwhile."""
        while True:
            self._db = self._connect(deadline)
            self._contents = FileContents(self._db)
            try:
                if self._world_size >= 0:
                    self._count("opened = opened + 1")
            except BaseException as e:
                self._db.close()
                if not (isinstance(e, StoreError) and self._removed) or deadline.passed():
                    raise
                self._removed = False
            else:
                return

    def _connect(self, deadline: Deadline) -> sqlite3.Connection:
        while True:
            before = _identity(self.path)
            try:
                db = self._retry_while_locked(lambda: connect(self.path, KIND, SCHEMA, VERSION), deadline)
            except StoreError:
                if before == _identity(self.path) or deadline.passed():
                    raise
                continue  # the file was replaced or removed meanwhile: SQLite has no error for that
            identity = _identity(self.path)
            if identity is not None and before in (None, identity):
                self._identity = identity
                break
            db.close()  # the file was replaced meanwhile
        db.execute("PRAGMA journal_mode = TRUNCATE")
        # Safe against SIGKILL, as the kernel keeps what was written. NORMAL makes each write ten times slower
        # (0.9 ms on a disk), and protects only against a power failure, which ends the job anyway.
        db.execute("PRAGMA synchronous = OFF")
        return db

    # ---- queries ----------------------------------------------------------------------------------------

    def request(self, query: Message, deadline: Deadline) -> Message:
        """The reply to ``query``, perhaps a refusal. Blocks as the query requires, until ``deadline``.

        Raises:
            StoreTimeoutError: if others hold the lock on the file until ``deadline``.
            StoreError: if the file was removed or cannot be used, this is closed, or this process is a fork.
        """
        reply = self._apply(query, deadline)
        if reply is not None:
            return reply
        with self.lock:
            self.blocked += 1
        try:
            with blocking_section():
                return self._wait(query, deadline)
        finally:
            with self.lock:
                self.blocked -= 1

    def _wait(self, query: Message, deadline: Deadline) -> Message:
        while True:
            seen = self._version()  # read before the query, so that no change is missed
            reply = self._apply(query, deadline)
            if reply is not None:
                return reply
            self._wait_changed(seen, deadline)

    def _apply(self, query: Message, deadline: Deadline) -> Message | None:
        """Apply ``query`` in one transaction. Returns None if it blocks and ``deadline`` has not passed."""
        self._check_open()
        expired = deadline.passed()

        def apply(contents: FileContents) -> Message | None:
            return State(contents).answer(query, expired=expired)

        return self._transact(deadline, apply, write=State.may_change(query))

    def _check_open(self) -> None:
        if self.inherited:
            raise StoreError(f"the store at {str(self.path)!r} was opened before a fork: open it again here")
        if self._closed:
            raise StoreError(f"the store at {str(self.path)!r} is closed")

    # ---- transactions -----------------------------------------------------------------------------------

    def _transact(self, deadline: Deadline, work: Callable[[FileContents], _T], *, write: bool) -> _T:
        """The result of ``work``, called in a transaction: committed at the end, rolled back by an error.

        Ctrl-C may come at any line. ``with`` releases the lock even so, which a generator, kept by the
        traceback, would not. A signal handler, or a finalizer, may call the store again at any line: that
        would end this transaction, so it is refused.
        """

        def attempt() -> _T:
            is_nested = self.lock._is_owned()  # type: ignore[attr-defined]
            with self.lock:
                if is_nested and self._db.in_transaction:
                    raise StoreError(
                        f"the store at {str(self.path)!r} is in the middle of a call of this thread, which a "
                        f"signal handler or a finalizer has interrupted: call it in another thread there"
                    )
                try:
                    self._begin(write=write)
                    result = work(self._contents)
                    if self._db.in_transaction:
                        self._db.execute("COMMIT")
                    if write:
                        self._changed.notify_all()
                    return result
                except BaseException:
                    with suppress(sqlite3.ProgrammingError):  # another thread has closed the file
                        self._roll_back()
                    raise

        return self._retry_while_locked(attempt, deadline)

    def _begin(self, *, write: bool) -> None:
        self._roll_back()  # what a second Ctrl-C has kept from that
        self._db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
        self._db.execute("SELECT revision FROM meta").fetchone()  # takes the lock for reading
        if self._removed or _identity(self.path) != self._identity:
            self._removed = True  # the journal of this transaction would belong to another file
            raise StoreError(f"the store's file {str(self.path)!r} was removed")

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def _retry_while_locked(self, attempt: Callable[[], _T], deadline: Deadline) -> _T:
        """Call ``attempt`` until no other connection holds the lock on the file. Returns its result."""
        backoff = Backoff(*POLL_SECONDS)
        while True:
            try:
                return attempt()
            except DAMAGE_ERRORS as e:
                if not is_busy(e):
                    raise self._explained(e) from e
                if deadline.passed():
                    raise StoreTimeoutError(
                        f"another process holds the lock on the store's file {str(self.path)!r}, and has not "
                        f"released it in time; is one stopped?"
                    ) from e
            threading.Event().wait(backoff.pause(deadline.left()))  # no event signals the release of a lock

    def _explained(self, error: Exception) -> StoreError:
        reason = f"{error} ({os.strerror(errno.ENOSPC)})" if "full" in str(error) else str(error)
        return StoreError(f"cannot use the store's file {str(self.path)!r}: {reason}")

    # ---- waiting for changes ----------------------------------------------------------------------------

    def _version(self) -> tuple[int, int]:
        """Differs after each change, by this store or another."""
        with self.lock:
            self._check_open()
            try:
                others: int = self._db.execute("PRAGMA data_version").fetchone()[0]
            except DAMAGE_ERRORS as e:
                if not is_busy(e):
                    raise self._explained(e) from e
                others = -1  # another connection is writing: check again soon
            return self._db.total_changes, others

    def _wait_changed(self, seen: tuple[int, int], deadline: Deadline) -> None:
        """Wait until :meth:`_version` differs from ``seen``, or ``deadline`` has passed."""
        backoff = Backoff(*POLL_SECONDS)
        with self.lock:
            while not deadline.passed() and self._version() == seen:
                self._changed.wait(backoff.pause(deadline.left()))

    def start_watching(self) -> None:
        """Start the thread that watches the file for changes, unless it runs."""
        with self.lock:
            if self._watcher is None and not self._closed:
                self._watcher = threading.Thread(target=self._watch, name=f"{self.name}-watch", daemon=True)
                try:
                    self._watcher.start()
                except RuntimeError:  # no thread can be started
                    self._watcher = None
                    raise

    def _watch(self) -> None:
        seen = (-1, -1)
        try:
            while True:
                self._wait_changed(seen, Deadline())
                seen = self._version()
                self.watches.on_disconnect()  # registers all watches again
        except StoreError as e:
            if not self._closed:
                logger.warning("%s: watches end: %s", self.name, e)

    # ---- closing ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Refuse blocked queries, and close the file; the last of ``world_size`` removes it. Idempotent."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        try:
            self.watches.close()  # first, as they cannot be registered again any more
            if self._world_size >= 0:
                self._count("opened = opened - 1" if self._disowned else "closed = closed + 1")
        except StoreError as e:
            logger.warning("%s: closed, but not counted as such: %s", self.name, e)
        finally:
            if self._watcher is not None:
                self._watcher.join(CLOSE_SECONDS)
            with _fork_lock, self.lock:
                _connections.discard(self)
                self._db.close()

    def disown(self) -> None:
        """Do not count this store when it is closed: the file belongs to others, who still use it."""
        self._disowned = True

    def _count(self, change: str) -> None:
        """Count this store as opened or closed. The last one removes the file.

        A worker that joins its next group through the same file has opened it again before others close it.
        """

        def count(_: FileContents) -> None:
            self._db.execute(f"UPDATE meta SET {change}")
            opened, closed = checked(self._db.execute("SELECT opened, closed FROM meta").fetchone(), tuple)
            if closed < max(1, self._world_size) or closed < opened:
                return
            # Under the lock, and before any write: processes that wait for the lock then find the file
            # removed.
            for name in (*(f"{self.path}{suffix}" for suffix in BESIDE), str(self.path)):
                try:
                    os.unlink(name)
                except FileNotFoundError:
                    pass  # there is no journal, or another process has removed it
                except OSError as e:
                    raise StoreError(f"cannot remove the store's file {name!r}: {e.strerror}") from e
            self._db.execute("ROLLBACK")

        self._transact(Deadline.after(CLOSE_SECONDS), count, write=True)


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of the file at ``path``; None if it does not exist."""
    try:
        status = os.stat(path)
    except OSError as e:
        if e.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise StoreError(f"cannot access the store's file {str(path)!r}: {e.strerror}") from e
    return status.st_dev, status.st_ino


# ---- forks ------------------------------------------------------------------------------------------------
# A fork must not copy a transaction, nor SQLite's own locks while they are held. The child neither uses nor
# closes an inherited connection, because that would undo what the parent is writing.

_fork_lock = threading.RLock()  # guards _connections; held while connections are opened and closed
_connections: set[FileConnection] = set()
_inherited: list[FileConnection] = []  # keeps them from being collected, which would close them


def _before_fork() -> None:
    _fork_lock.acquire()
    for connection in _connections:
        connection.lock.acquire()


def _after_fork_in_parent() -> None:
    for connection in _connections:
        connection.lock.release()
    _fork_lock.release()


def _after_fork_in_child() -> None:
    for connection in _connections:
        connection.inherited = True
    _inherited.extend(_connections)
    _after_fork_in_parent()
    _connections.clear()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
