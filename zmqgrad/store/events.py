"""Watch events, their handlers, and the queue in front of a slow handler."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from zmqgrad.runtime.blocking import blocking_section

MAX_PENDING_EVENTS = 1000
"""Events queued for a slow handler; beyond that, the newest two of a key are merged."""

WatchCallback = Callable[[bytes | None, bytes | None], None]
"""``callback(old, new)``: values of a key; None where the key did not, or does not, exist."""

PrefixCallback = Callable[[str, bytes | None, bytes | None], None]
"""``callback(key, old, new)``, for watches of a prefix."""


class WatchEvent(NamedTuple):
    """``key`` changed from ``old`` to ``new`` (None: it did not, or does not, exist).

    ``revision`` is the store's after that change, or a later one if several changes were merged. It increases
    from event to event of a key as long as the server runs, or has a journal.

    Example:
        >>> store = HashStore()
        >>> with store.watch("step", timeout=30) as changes:
        ...     store.set("step", "7")
        ...     event = next(changes)
        >>> event.key, event.old, event.new
        ('step', None, b'7')
    """

    key: str
    old: bytes | None
    new: bytes | None
    revision: int


class EventBacklog:
    """Events queued for a slow handler. Beyond ``limit``, a new event is merged into the newest of its key.

    Its size is therefore bounded by ``limit`` plus the number of keys. The events of a key form a chain of
    old and new values that ends with the last value.
    """

    def __init__(self, limit: int = MAX_PENDING_EVENTS) -> None:
        self._limit = limit
        self._events: deque[list[WatchEvent]] = deque()  # each in a list of one, so that it can be replaced
        self._newest: dict[str, list[WatchEvent]] = {}

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: WatchEvent) -> None:
        """Append ``event``, or merge it into the newest event of its key."""
        box = self._newest.get(event.key)
        if box is not None and len(self._events) >= self._limit:
            box[0] = event._replace(old=box[0].old)
            return
        box = [event]
        self._events.append(box)
        self._newest[event.key] = box

    def pop(self) -> WatchEvent:
        """Remove and return the first event."""
        box = self._events.popleft()
        if self._newest.get(box[0].key) is box:
            del self._newest[box[0].key]
        return box[0]

    def clear(self) -> None:
        """Drop all events."""
        self._events.clear()
        self._newest.clear()


class EventHandler:
    """Handles events one at a time; this one ignores them. Equal handlers belong to the same watch."""

    def __call__(self, event: WatchEvent) -> None:
        """Handle ``event``."""

    def end(self) -> None:
        """Called once the watch has ended."""


IGNORE_EVENTS = EventHandler()
"""Keeps the watch, and so the cached value, alive."""


@dataclass(frozen=True)
class KeyCallbackAdapter(EventHandler):
    """Passes the values of events to a callback of one key."""

    callback: WatchCallback

    def __call__(self, event: WatchEvent) -> None:
        with blocking_section():  # a slow callback must not hold up others
            self.callback(event.old, event.new)


@dataclass(frozen=True)
class PrefixCallbackAdapter(EventHandler):
    """Passes key and values of events to a callback of a prefix."""

    callback: PrefixCallback

    def __call__(self, event: WatchEvent) -> None:
        with blocking_section():
            self.callback(event.key, event.old, event.new)
