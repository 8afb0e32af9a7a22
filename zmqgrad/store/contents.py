"""Keys and queues of a store, and the notifications of their changes. Pure.

Each change of a key increments the revision. Each change of a watched key, or of a key under a watched
prefix, makes one notification. A notification carries the revision of the one before it, so that a lost one
is detected.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Container, Sized
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from zmqgrad.store.effects import Notification
from zmqgrad.store.watch_targets import INTERNAL_PREFIX, Prefix, Target, prefix_matches
from zmqgrad.wire.messages import KeyCreated, KeyDeleted, KeyUpdated, PrefixChanged

if TYPE_CHECKING:
    from zmqgrad.store.journal import Journal

MAX_NOTIFICATION_VALUE_BYTES = 64 << 10
"""Larger values are left out of notifications (None), and clients read them."""


class Item(NamedTuple):
    """One value in a queue. Ids increase with every push to any queue and are never reused."""

    id: int
    value: bytes


T_co = TypeVar("T_co", covariant=True)


class ByName(Container[str], Protocol[T_co]):
    """Keys or queues, by name."""

    def __getitem__(self, name: str, /) -> T_co: ...
    def get(self, name: str, /) -> T_co | None: ...


class Storage(Protocol):
    """Storage of keys and queues for the state machine: :class:`Contents`, or a file."""

    @property
    def revision(self) -> int: ...
    @property
    def values(self) -> ByName[bytes]: ...
    @property
    def queues(self) -> ByName[Sized]: ...  # the lengths of those that are not empty
    @property
    def num_keys(self) -> int: ...
    def statistics(self) -> dict[str, int]: ...
    def keys(self, prefix: str) -> list[str]: ...
    def put(self, key: str, value: bytes, notifications: list[Any]) -> None: ...
    def delete(self, key: str, notifications: list[Any]) -> bool: ...
    def push(self, name: str, value: bytes) -> None: ...
    def pop(self, name: str) -> Item: ...
    def delivered(self, item: Item) -> None: ...
    def watch(self, target: Target) -> None: ...
    def unwatch(self, target: Target) -> None: ...


class Contents:
    """Keys and queues in memory. Methods append notifications to the list that they are given."""

    def __init__(self) -> None:
        self.revision = 0
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[Item]] = {}  # only non-empty ones
        self.recorder: Journal | None = None
        """Records each change; None: nothing does."""
        self.last_item = 0
        self._num_internal = 0
        self._watched: dict[Target, int] = {}  # with the revision of the last notification
        self._prefixes: list[Prefix] = []  # the prefixes in _watched

    @property
    def num_keys(self) -> int:
        """Number of keys, without the library's own."""
        return len(self.values) - self._num_internal

    def statistics(self) -> dict[str, int]:
        """Number of keys, queues and watched targets, and the revision."""
        sizes = {"keys": len(self.values), "queues": len(self.queues), "watched": len(self._watched)}
        return {**sizes, "revision": self.revision}

    # ---- keys -------------------------------------------------------------------------------------------

    def put(self, key: str, value: bytes, notifications: list[Any]) -> None:
        """Set ``key``."""
        values = self.values
        old = values.get(key)
        values[key] = value
        self.revision += 1
        if old is None and key.startswith(INTERNAL_PREFIX):
            self._num_internal += 1
        if self.recorder is not None:
            self.recorder.put(key, value)
        if self._watched:
            self._notify(key, old, value, notifications)

    def delete(self, key: str, notifications: list[Any]) -> bool:
        """Delete ``key``. Returns whether it existed."""
        old = self.values.pop(key, None)
        if old is None:
            return False
        self._num_internal -= key.startswith(INTERNAL_PREFIX)
        self.revision += 1
        if self.recorder is not None:
            self.recorder.delete(key)
        if self._watched:
            self._notify(key, old, None, notifications)
        return True

    def _notify(self, key: str, old: bytes | None, new: bytes | None, notifications: list[Any]) -> None:
        """Append the notifications that the change of ``key`` from ``old`` to ``new`` causes."""
        revision, after = self.revision, None if new is None else _short(new)
        if key in self._watched:
            previous, self._watched[key] = self._watched[key], revision
            change: KeyCreated | KeyUpdated | KeyDeleted
            if old is None:
                change = KeyCreated(key, revision, previous, after)
            elif new is None:
                change = KeyDeleted(key, revision, previous, _short(old))
            else:
                change = KeyUpdated(key, revision, previous, _short(old), after)
            notifications.append(Notification(key, change))
        left_out = after is None and new is not None
        for prefix in self._prefixes:
            if prefix_matches(prefix.text, key):
                previous, self._watched[prefix] = self._watched[prefix], revision
                prefixed = PrefixChanged(prefix.text, revision, previous, key, after, left_out)
                notifications.append(Notification(prefix, prefixed))

    def keys(self, prefix: str) -> list[str]:
        """The sorted keys that begin with ``prefix``; internal keys only if ``prefix`` is internal."""
        return sorted(key for key in self.values if prefix_matches(prefix, key))

    # ---- queues -----------------------------------------------------------------------------------------

    def push(self, name: str, value: bytes) -> None:
        """Append ``value`` to the queue ``name``."""
        self.last_item += 1
        item = Item(self.last_item, value)
        self.queues.setdefault(name, deque()).append(item)
        if self.recorder is not None:
            self.recorder.push(name, item)

    def pop(self, name: str) -> Item:
        """Remove the first item of the non-empty queue ``name``; then call ``delivered`` or ``restore``."""
        queue = self.queues[name]
        item = queue.popleft()
        if not queue:
            del self.queues[name]
        return item

    def delivered(self, item: Item) -> None:
        """Confirm that the requester has received the popped ``item``."""
        if self.recorder is not None:
            self.recorder.delivered(item)

    def restore(self, name: str, item: Item) -> None:
        """Return the popped ``item``, which was not received, to its position at or near the head."""
        queue = self.queues.setdefault(name, deque())
        if not queue or item.id < queue[0].id:
            queue.appendleft(item)
        else:
            insort(queue, item)

    # ---- watches ----------------------------------------------------------------------------------------

    def watch(self, target: Target) -> None:
        """Make notifications of ``target``."""
        if target not in self._watched:
            self._watched[target] = 0
            if isinstance(target, Prefix):
                self._prefixes.append(target)

    def last_notification(self, target: Target) -> int:
        """The revision of the last notification of ``target``; 0 if there was none since the watch began."""
        return self._watched.get(target, 0)

    def unwatch(self, target: Target) -> None:
        """Make no more notifications of ``target``."""
        if self._watched.pop(target, None) is not None and isinstance(target, Prefix):
            self._prefixes.remove(target)


def _short(value: bytes) -> bytes | None:
    return value if len(value) <= MAX_NOTIFICATION_VALUE_BYTES else None
