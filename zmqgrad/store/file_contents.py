"""Keys and queues of a :class:`~zmqgrad.store.file.FileStore`, in SQLite tables."""

from __future__ import annotations

import sqlite3
from typing import Any

from zmqgrad.store.contents import Item
from zmqgrad.store.sqlite import checked
from zmqgrad.store.transactional import StoredContents
from zmqgrad.store.watch_targets import INTERNAL_PREFIX

SCHEMA = """
CREATE TABLE meta (revision INTEGER NOT NULL, opened INTEGER NOT NULL, closed INTEGER NOT NULL);
INSERT INTO meta VALUES (0, 0, 0);
CREATE TABLE keys (key BLOB PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE items (id INTEGER PRIMARY KEY AUTOINCREMENT, name BLOB NOT NULL, value BLOB NOT NULL);
CREATE INDEX items_by_name ON items (name, id)
"""


class FileContents(StoredContents):
    """Storage of the state machine in an SQLite file. Used inside a transaction."""

    def __init__(self, db: sqlite3.Connection) -> None:
        super().__init__()
        self._db = db

    def value(self, key: str) -> bytes | None:
        row = self._db.execute("SELECT value FROM keys WHERE key = ?", (key.encode(),)).fetchone()
        return None if row is None else checked(row[0], bytes)

    def has(self, key: str) -> bool:  # does not read the value, which may be large
        rows = self._db.execute("SELECT 1 FROM keys WHERE key = ?", (key.encode(),))
        return rows.fetchone() is not None

    def queue(self, name: str) -> range:
        rows = self._db.execute("SELECT count(*) FROM items WHERE name = ?", (name.encode(),))
        return range(rows.fetchone()[0])

    def has_items(self, name: str) -> bool:
        rows = self._db.execute("SELECT 1 FROM items WHERE name = ? LIMIT 1", (name.encode(),))
        return rows.fetchone() is not None

    @property
    def revision(self) -> int:
        """Increased by each change of a key."""
        row = checked(self._db.execute("SELECT revision FROM meta").fetchone(), tuple)
        return checked(row[0], int)

    @property
    def num_keys(self) -> int:
        """Number of keys, without the library's own."""
        count: int = self._db.execute(
            "SELECT count(*) FROM keys WHERE substr(key, 1, ?) IS NOT ?",
            (len(INTERNAL_PREFIX), INTERNAL_PREFIX.encode()),
        ).fetchone()[0]
        return count

    def keys(self, prefix: str) -> list[str]:
        """The sorted keys that begin with ``prefix``; internal keys only if ``prefix`` is internal."""
        start = prefix.encode()
        rows = self._db.execute(  # a part of the empty key is NULL
            "SELECT key FROM keys WHERE key >= ? AND coalesce(substr(key, 1, ?), x'') = ? ORDER BY key",
            (start, len(start), start),
        )
        keys = [checked(key, bytes).decode() for (key,) in rows.fetchall()]
        internal = prefix.startswith(INTERNAL_PREFIX)
        return [key for key in keys if key.startswith(INTERNAL_PREFIX) == internal]

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
        return Item(row[0], checked(row[1], bytes))
