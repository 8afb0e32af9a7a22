"""Following what is watched, from notifications that may be late, early or lost. Pure.

A follower knows what its target held last and at which revision. Each notification names the revision of the
one before it, so a lost one shows as a gap; then, and after a lost connection, the follower has to *look
again*: the watch is registered anew, and what that finds is turned into events, one a key (P8).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Any, NamedTuple

from zmqgrad.wire.messages import (
    KeyCallbackRegistered,
    KeyCreated,
    KeyDeleted,
    KeyUpdated,
    PrefixCallbackRegistered,
    PrefixChanged,
)

ChangeNotification = KeyCreated | KeyUpdated | KeyDeleted | PrefixChanged
Registered = KeyCallbackRegistered | PrefixCallbackRegistered

MAX_EARLY = 10_000
"""How many notifications are kept while looking again; if there are more, the oldest show as a gap."""

MAX_PENDING = 1000
"""How many events wait for who is slow; then a key's newest are joined."""


class WatchEvent(NamedTuple):
    """``key`` changed from ``old`` to ``new`` (None: it did not, or does not, exist).

    ``revision`` is the store's after that change, or a later one if several became one event. It grows
    from event to event for as long as the server lives, or has a journal.
    """

    key: str
    old: bytes | None
    new: bytes | None
    revision: int


class Follower(ABC):
    """What is known of one target. ``live`` is False from when it must look again until it has."""

    def __init__(self) -> None:
        self.live = False
        self.revision = -1  # of the last notification or registration; -1 before the first
        self._early: deque[Any] = deque(maxlen=MAX_EARLY)

    @abstractmethod
    def present(self) -> list[WatchEvent]:
        """What is there, as if it had just come to be."""

    @abstractmethod
    def _compare(self, found: Any) -> list[WatchEvent]:
        """What is other in ``found`` than what was known, which it replaces."""

    @abstractmethod
    def _take(self, notification: Any) -> list[WatchEvent] | None:
        """What is new in ``notification``; None if it has to be read, for it is not in there."""

    def registered(self, found: Registered) -> list[WatchEvent]:
        """The watch is in place, and this is what was there then."""
        if self.live and found.revision <= self.revision:
            return []  # two looked at a time, and we know more by now
        events = self._compare(found)
        if self.revision < 0:
            events = []
        self.revision, self.live = found.revision, True
        while self._early and self.live:
            events += self.noticed(self._early.popleft())
        return events

    def noticed(self, notification: ChangeNotification) -> list[WatchEvent]:
        """A notification came; gives what is new in it. May end ``live``: then look again."""
        if not self.live:
            self._early.append(notification)
            return []
        if notification.revision <= self.revision:
            return []  # published before the look that told us
        events = None if notification.previous > self.revision else self._take(notification)
        if events is None:
            self.live = False
            return []
        self.revision = notification.revision
        return events

    def lost(self) -> None:
        """The connection was: anything may have happened since."""
        self.live = False
        self._early.clear()


class KeyFollower(Follower):
    """Follows one key."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key
        self.value: bytes | None = None

    def present(self) -> list[WatchEvent]:
        return [] if self.value is None else [WatchEvent(self._key, None, self.value, self.revision)]

    def _become(self, value: bytes | None, revision: int) -> list[WatchEvent]:
        old, self.value = self.value, value
        return [WatchEvent(self._key, old, value, revision)]

    def _compare(self, found: KeyCallbackRegistered) -> list[WatchEvent]:
        return self._become(found.value, found.revision) if found.value != self.value else []

    def _take(self, notification: KeyCreated | KeyUpdated | KeyDeleted) -> list[WatchEvent] | None:
        if isinstance(notification, KeyDeleted):
            return self._become(None, notification.revision)
        return None if notification.new is None else self._become(notification.new, notification.revision)


class PrefixFollower(Follower):
    """Follows all keys that begin alike."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def present(self) -> list[WatchEvent]:
        return [WatchEvent(key, None, value, self.revision) for key, value in sorted(self._values.items())]

    def _compare(self, found: PrefixCallbackRegistered) -> list[WatchEvent]:
        before, self._values = self._values, dict(zip(found.keys, found.values, strict=False))
        return [
            WatchEvent(key, before.get(key), self._values.get(key), found.revision)
            for key in sorted({*before, *self._values})
            if before.get(key) != self._values.get(key)
        ]

    def _take(self, notification: PrefixChanged) -> list[WatchEvent] | None:
        if notification.left_out:
            return None
        old = self._values.pop(notification.key, None)
        if notification.new is not None:
            self._values[notification.key] = notification.new
        return [WatchEvent(notification.key, old, notification.new, notification.revision)]


class Backlog:
    """Events that wait for somebody slow: all of them, or beyond ``limit`` the newest of a key as one.

    So it is bounded by the number of keys, a chain of old and new values for each, and ends with the last.
    """

    def __init__(self, limit: int = MAX_PENDING) -> None:
        self._limit = limit
        self._events: deque[list[WatchEvent]] = deque()  # each in a box, so that it can be replaced
        self._newest: dict[str, list[WatchEvent]] = {}

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: WatchEvent) -> None:
        """Put ``event`` at the end, or into the newest one of its key."""
        box = self._newest.get(event.key)
        if box is not None and len(self._events) >= self._limit:
            box[0] = event._replace(old=box[0].old)
            return
        box = [event]
        self._events.append(box)
        self._newest[event.key] = box

    def pop(self) -> WatchEvent:
        """Take the first one."""
        box = self._events.popleft()
        if self._newest.get(box[0].key) is box:
            del self._newest[box[0].key]
        return box[0]

    def clear(self) -> None:
        """Forget them."""
        self._events.clear()
        self._newest.clear()
