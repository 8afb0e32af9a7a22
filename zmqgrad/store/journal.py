"""The journal of a store's server: an SQLite file with the state of the store, written ahead of replies.

An acknowledged change survives the death of the process. It uses WAL mode, and one commit for each batch
of changes. ``sync`` flushes each commit to the disk, to survive a power failure as well.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections import deque

import msgspec

from zmqgrad.errors import JournalError, ProtocolError, StoreError
from zmqgrad.store.contents import Contents, Item
from zmqgrad.store.reply_cache import ReplyCache
from zmqgrad.store.sqlite import DAMAGE_ERRORS, absolute, checked, connect, is_busy
from zmqgrad.wire.codec import decode, encode
from zmqgrad.wire.messages import Message

KIND, VERSION = "journal", 1001
"""Distinguishes journals from files of FileStores, whose versions are small."""

SCHEMA = """
CREATE TABLE keys (key BLOB PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE items (id INTEGER PRIMARY KEY, name BLOB NOT NULL, value BLOB NOT NULL);
CREATE TABLE replies (client INTEGER PRIMARY KEY, request INTEGER NOT NULL, reply BLOB NOT NULL);
CREATE TABLE counters (revision INTEGER NOT NULL, last_item INTEGER NOT NULL);
INSERT INTO counters VALUES (0, 0)
"""


_IDS = 1 << 64
"""Ids of clients and requests have 64 bits."""


class Journal:
    """The journal at ``path``, created if missing; one process uses it at a time.

    It records each change of the contents that it has loaded; the changes are written at :meth:`commit`.

    Args:
        sync: flush the disk at each commit.

    Raises:
        JournalError: if it cannot be opened, is another kind of file, or another process uses it.
    """

    def __init__(self, path: str | os.PathLike[str], *, sync: bool = False) -> None:
        try:
            self.path = absolute(path)
            self._db = connect(self.path, KIND, SCHEMA, VERSION)
            try:
                self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
                self._db.execute("BEGIN IMMEDIATE")  # takes the lock, which is held until the end
                self._db.execute("COMMIT")
            except BaseException:
                self._db.close()
                raise
        except StoreError as e:
            raise JournalError(str(e)) from e
        except DAMAGE_ERRORS as e:
            if is_busy(e):
                raise JournalError(f"another process uses the journal {self.path}: end it first") from None
            raise self._damaged(e) from e
        self._failure: sqlite3.Error | None = None

    def load(self, contents: Contents, replies: ReplyCache) -> None:
        """Load the file into the new ``contents`` and ``replies``.

        Raises:
            JournalError: if the file is damaged.
        """
        try:
            (problem,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            if problem != "ok":
                raise sqlite3.DatabaseError(" ".join(problem.split()))
            for key, value in self._db.execute("SELECT key, value FROM keys"):
                contents.put(checked(key, bytes).decode(), checked(value, bytes), [])
            for number, name, value in self._db.execute("SELECT id, name, value FROM items ORDER BY id"):
                queue = contents.queues.setdefault(checked(name, bytes).decode(), deque())
                queue.append(Item(number, checked(value, bytes)))
            for client, request, reply in self._db.execute("SELECT client, request, reply FROM replies"):
                message = decode(checked(reply, bytes))[1]
                replies.remember(client % _IDS, checked(request, int) % _IDS, message)
            counters = self._db.execute("SELECT revision, last_item FROM counters").fetchone()
            contents.revision, contents.last_item = (checked(each, int) for each in checked(counters, tuple))
        except (*DAMAGE_ERRORS, ProtocolError, msgspec.MsgspecError) as e:
            raise self._damaged(e) from e
        self._contents = contents
        contents.recorder = self
        replies.on_forgotten = self.forget

    def _damaged(self, error: Exception) -> JournalError:
        return JournalError(
            f"the journal {self.path} is damaged: {error}. `sqlite3 {self.path} .recover` may recover the "
            f"contents, as statements that create a new file"
        )

    # ---- recording changes ------------------------------------------------------------------------------

    def _write(self, statement: str, *values: object) -> None:
        if self._failure is not None:
            return  # commit() raises it
        try:
            if not self._db.in_transaction:
                self._db.execute("BEGIN")
            self._db.execute(statement, values)
        except sqlite3.Error as e:
            self._failure = e

    def put(self, key: str, value: bytes) -> None:
        """``key`` was set."""
        self._write("INSERT OR REPLACE INTO keys VALUES (?, ?)", key.encode(), value)

    def delete(self, key: str) -> None:
        """``key`` was deleted."""
        self._write("DELETE FROM keys WHERE key = ?", key.encode())

    def push(self, name: str, item: Item) -> None:
        """``item`` was pushed to the queue ``name``."""
        self._write("INSERT INTO items VALUES (?, ?, ?)", item.id, name.encode(), item.value)

    def delivered(self, item: Item) -> None:
        """``item`` has left its queue for good."""
        self._write("DELETE FROM items WHERE id = ?", item.id)

    def remember(self, client: int, request: int, reply: Message) -> None:
        """Record ``reply`` to the last change of ``client``, in case the query is repeated."""
        encoded = bytes(encode(reply, 0, 0, 0))
        self._write(
            "INSERT OR REPLACE INTO replies VALUES (?, ?, ?)", _signed(client), _signed(request), encoded
        )

    def forget(self, client: int) -> None:
        """Drop the recorded reply of ``client``."""
        self._write("DELETE FROM replies WHERE client = ?", _signed(client))

    def commit(self) -> None:
        """Write the changes since the last commit. Replies to them may be sent afterwards.

        Raises:
            OSError: if writing fails; no reply may be sent any more.
        """
        if not self._db.in_transaction and self._failure is None:
            return
        contents = self._contents
        self._write("UPDATE counters SET revision = ?, last_item = ?", contents.revision, contents.last_item)
        try:
            if self._failure is not None:
                raise self._failure
            self._db.execute("COMMIT")
        except sqlite3.Error as e:
            self._failure = e
            full = "full" in str(e)
            reason = os.strerror(errno.ENOSPC) if full else str(e)
            raise OSError(errno.ENOSPC if full else errno.EIO, reason) from e

    def close(self) -> None:
        """Close the file, which drops uncommitted changes. Idempotent."""
        self._db.close()

    def __repr__(self) -> str:
        return f"<Journal {self.path}>"


def _signed(number: int) -> int:
    """An id as an integer of SQLite, which has a sign."""
    return number - _IDS if number >= _IDS // 2 else number
