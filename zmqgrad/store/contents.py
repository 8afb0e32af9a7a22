"""What a store holds: keys, queues, and what is watched of them. Pure.

Each change of a key raises the revision by one, and each change of a watched key, or of one beneath a watched
prefix, makes one notice, which names the revision of the notice before it: so a lost one shows.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Container, Mapping, Sized
from typing import Any, NamedTuple, Protocol

from zmqgrad.store.effects import Notice
from zmqgrad.store.topics import HIDDEN, Prefix, Target, is_beneath
from zmqgrad.wire.messages import KeyCreated, KeyDeleted, KeyUpdated, PrefixChanged

MAX_NOTICE_VALUE = 64 << 10
"""Larger values are left out of notices (None): whoever wants them reads them."""


class Item(NamedTuple):
    """One value in a queue. Ids grow in the order of the pushes, over all queues, and are used once."""

    id: int
    value: bytes


class Queues(Container[str], Sized, Protocol):
    """The queues that are not empty, by name."""

    def get(self, name: str, default: Sized, /) -> Sized:
        """The items of queue ``name``, of which the length counts, or ``default``."""
        ...


class Recorder(Protocol):
    """Hears of each change of :class:`Contents` as it is made, to write it down."""

    def put(self, key: str, value: bytes) -> None:
        """``key`` was set."""
        ...

    def delete(self, key: str) -> None:
        """``key`` was deleted."""
        ...

    def push(self, name: str, item: Item) -> None:
        """``item`` was pushed to the queue ``name``."""
        ...

    def delivered(self, item: Item) -> None:
        """``item`` has left its queue for good."""
        ...


class Storage(Protocol):
    """Where a state machine keeps keys and queues: :class:`Contents`, or a file."""

    revision: int
    changes: int

    @property
    def values(self) -> Mapping[str, bytes]: ...
    @property
    def queues(self) -> Queues: ...
    @property
    def shown(self) -> int: ...
    @property
    def watched(self) -> int: ...
    def keys(self, prefix: str) -> list[str]: ...
    def put(self, key: str, value: bytes, notices: list[Any]) -> None: ...
    def delete(self, key: str, notices: list[Any]) -> bool: ...
    def push(self, name: str, value: bytes) -> None: ...
    def pop(self, name: str) -> Item: ...
    def delivered(self, item: Item) -> None: ...
    def watch(self, target: Target) -> None: ...
    def unwatch(self, target: Target) -> None: ...


class Contents:
    """Keys and queues in memory. Notices of what changes are appended to the list that is given.

    Args:
        recorder: hears of each change; None: nobody does.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.revision = 0
        self.changes = 0
        """How often a key or a queue was changed."""
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[Item]] = {}  # those that are not empty
        self.recorder = recorder
        self.last_item = 0
        self._hidden = 0
        self._watched: dict[Target, int] = {}  # and the revision of its last notice
        self._prefixes: list[Prefix] = []  # those of them that are some

    @property
    def shown(self) -> int:
        """How many keys there are that users have set."""
        return len(self.values) - self._hidden

    @property
    def watched(self) -> int:
        """How many keys and prefixes are watched."""
        return len(self._watched)

    # ---- keys -------------------------------------------------------------------------------------------

    def put(self, key: str, value: bytes, notices: list[Any]) -> None:
        """Set ``key``."""
        values = self.values
        old = values.get(key)
        values[key] = value
        self.changes += 1
        self.revision += 1
        if old is None and key.startswith(HIDDEN):
            self._hidden += 1
        if self.recorder is not None:
            self.recorder.put(key, value)
        if self._watched:
            self._tell(key, old, value, notices)

    def _tell(self, key: str, old: bytes | None, value: bytes, notices: list[Any]) -> None:
        """``key`` was set, and something is watched: note it for those to whom it matters."""
        if key in self._watched:
            previous, self._watched[key] = self._watched[key], self.revision
            new = _short(value)
            if old is None:
                notices.append(Notice(key, KeyCreated(key, self.revision, previous, new)))
            else:
                notices.append(Notice(key, KeyUpdated(key, self.revision, previous, _short(old), new)))
        if self._prefixes:
            self._tell_prefixes(key, value, notices)

    def delete(self, key: str, notices: list[Any]) -> bool:
        """Delete ``key``. Did it exist?"""
        old = self.values.pop(key, None)
        if old is None:
            return False
        self._hidden -= key.startswith(HIDDEN)
        self.changes += 1
        self.revision += 1
        if self.recorder is not None:
            self.recorder.delete(key)
        if key in self._watched:
            previous, self._watched[key] = self._watched[key], self.revision
            notices.append(Notice(key, KeyDeleted(key, self.revision, previous, _short(old))))
        if self._prefixes:
            self._tell_prefixes(key, None, notices)
        return True

    def _tell_prefixes(self, key: str, value: bytes | None, notices: list[Any]) -> None:
        """``key`` holds ``value`` now: note it for those who watch keys that begin so."""
        for prefix in self._prefixes:
            if is_beneath(prefix.text, key):
                previous, self._watched[prefix] = self._watched[prefix], self.revision
                new = None if value is None else _short(value)
                left_out = new is None and value is not None
                notice = PrefixChanged(prefix.text, self.revision, previous, key, new, left_out)
                notices.append(Notice(prefix, notice))

    def keys(self, prefix: str) -> list[str]:
        """The keys that begin with ``prefix``, sorted, those of the library's own if ``prefix`` is one."""
        return sorted(key for key in self.values if is_beneath(prefix, key))

    # ---- queues -----------------------------------------------------------------------------------------

    def push(self, name: str, value: bytes) -> None:
        """Append ``value`` to the queue ``name``."""
        self.changes += 1
        self.last_item += 1
        item = Item(self.last_item, value)
        self.queues.setdefault(name, deque()).append(item)
        if self.recorder is not None:
            self.recorder.push(name, item)

    def pop(self, name: str) -> Item:
        """Take the first item of ``name``, which is not empty, to be :meth:`delivered` or restored."""
        self.changes += 1
        queue = self.queues[name]
        item = queue.popleft()
        if not queue:
            del self.queues[name]
        return item

    def delivered(self, item: Item) -> None:
        """``item``, which was popped, has reached who popped it."""
        if self.recorder is not None:
            self.recorder.delivered(item)

    def restore(self, name: str, item: Item) -> None:
        """``item``, which was popped, has reached nobody: it returns to its place, at or near the head."""
        queue = self.queues.setdefault(name, deque())
        if not queue or item.id < queue[0].id:
            queue.appendleft(item)
        else:
            insort(queue, item)

    # ---- watches ----------------------------------------------------------------------------------------

    def watch(self, target: Target) -> None:
        """Make notices of ``target``."""
        if target not in self._watched:
            self._watched[target] = 0
            if isinstance(target, Prefix):
                self._prefixes.append(target)

    def last_notice(self, target: Target) -> int:
        """The revision of the last notice of ``target``; 0 if there was none since it is watched."""
        return self._watched.get(target, 0)

    def unwatch(self, target: Target) -> None:
        """Make no more notices of ``target``."""
        if self._watched.pop(target, None) is not None and isinstance(target, Prefix):
            self._prefixes.remove(target)


def _short(value: bytes) -> bytes | None:
    return value if len(value) <= MAX_NOTICE_VALUE else None
