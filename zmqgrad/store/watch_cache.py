"""Client-side copies of watched keys, kept by notifications that may be late, early or lost. Pure.

A cache holds the last known value of its target, and the revision. Each notification carries the revision of
the one before it, so a gap reveals a lost one. After a gap or a lost connection the cache is not ``live``:
the watch has to be registered again, and the differences that this reveals become events, one a key (P8).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Any

from zmqgrad.store.events import WatchEvent
from zmqgrad.wire.messages import (
    KeyCallbackRegistered,
    KeyCreated,
    KeyDeleted,
    KeyUpdated,
    PrefixCallbackRegistered,
    PrefixChanged,
)

ChangeNotification = KeyCreated | KeyUpdated | KeyDeleted | PrefixChanged
Registration = KeyCallbackRegistered | PrefixCallbackRegistered

MAX_EARLY_NOTIFICATIONS = 10_000
"""Notifications kept while a registration is under way; beyond that the oldest are dropped, as a gap."""


class WatchCache(ABC):
    """Last known state of one target. Unless it is ``live``, the watch must be registered again."""

    def __init__(self) -> None:
        self.live = False
        self.revision = -1  # of the last notification or registration; -1 before the first
        self._early: deque[Any] = deque(maxlen=MAX_EARLY_NOTIFICATIONS)

    @abstractmethod
    def initial_events(self) -> list[WatchEvent]:
        """One event for each existing key, as if it had just been created."""

    @abstractmethod
    def _replace_values(self, found: Any) -> list[WatchEvent]:
        """Replace the known values by those in ``found``. Returns the differences."""

    @abstractmethod
    def _apply(self, notification: Any) -> list[WatchEvent] | None:
        """Apply ``notification``. Returns None if it lacks the value, which then has to be read."""

    def on_registered(self, found: Registration) -> list[WatchEvent]:
        """Apply the reply to a registration. Returns what has changed since the last known state."""
        if self.live and found.revision <= self.revision:
            return []  # of two concurrent registrations, the other one was newer
        events = self._replace_values(found)
        if self.revision < 0:
            events = []
        self.revision, self.live = found.revision, True
        while self._early and self.live:
            events += self.on_notification(self._early.popleft())
        return events

    def on_notification(self, notification: ChangeNotification) -> list[WatchEvent]:
        """Apply ``notification`` and return its events. May clear ``live``: then register again."""
        if not self.live:
            self._early.append(notification)
            return []
        if notification.revision <= self.revision:
            return []  # published before the registration, which included it
        events = None if notification.previous > self.revision else self._apply(notification)
        if events is None:
            self.live = False
            return []
        self.revision = notification.revision
        return events

    def invalidate(self) -> None:
        """Mark the state as outdated, because the connection was lost."""
        self.live = False
        self._early.clear()


class KeyWatchCache(WatchCache):
    """The cache of one key."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key
        self.value: bytes | None = None

    def initial_events(self) -> list[WatchEvent]:
        return [] if self.value is None else [WatchEvent(self._key, None, self.value, self.revision)]

    def _set_value(self, value: bytes | None, revision: int) -> list[WatchEvent]:
        old, self.value = self.value, value
        return [WatchEvent(self._key, old, value, revision)]

    def _replace_values(self, found: KeyCallbackRegistered) -> list[WatchEvent]:
        return self._set_value(found.value, found.revision) if found.value != self.value else []

    def _apply(self, notification: KeyCreated | KeyUpdated | KeyDeleted) -> list[WatchEvent] | None:
        if isinstance(notification, KeyDeleted):
            return self._set_value(None, notification.revision)
        return None if notification.new is None else self._set_value(notification.new, notification.revision)


class PrefixWatchCache(WatchCache):
    """The cache of all keys with a prefix."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def initial_events(self) -> list[WatchEvent]:
        return [WatchEvent(key, None, value, self.revision) for key, value in sorted(self._values.items())]

    def _replace_values(self, found: PrefixCallbackRegistered) -> list[WatchEvent]:
        before, self._values = self._values, dict(zip(found.keys, found.values, strict=False))
        return [
            WatchEvent(key, before.get(key), self._values.get(key), found.revision)
            for key in sorted({*before, *self._values})
            if before.get(key) != self._values.get(key)
        ]

    def _apply(self, notification: PrefixChanged) -> list[WatchEvent] | None:
        if notification.left_out:
            return None
        old = self._values.pop(notification.key, None)
        if notification.new is not None:
            self._values[notification.key] = notification.new
        return [WatchEvent(notification.key, old, notification.new, notification.revision)]
