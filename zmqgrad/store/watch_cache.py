"""Client-side copy of watched keys, kept by notifications that may be late, early or lost. Pure.

Each notification carries the revision of the one before it, so a gap reveals a lost one. After a gap or a
lost connection the cache is not ``live``: the watch has to be registered again, and the differences that this
reveals become events, one for each key, so that the last one holds the last value.
"""

from __future__ import annotations

from collections import deque

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


class WatchCache:
    """Last known values of one target. Unless it is ``live``, the watch must be registered again."""

    def __init__(self) -> None:
        self.live = False
        self.revision = -1  # of the last notification or registration; -1 before the first
        self.values: dict[str, bytes] = {}
        """The keys of the target that exist. Read-only for others."""
        self._oldest = -1  # a registration of an older revision was overtaken by another, or by notifications
        self._early: deque[ChangeNotification] = deque(maxlen=MAX_EARLY_NOTIFICATIONS)

    def initial_events(self) -> list[WatchEvent]:
        """One event for each existing key, as if it had just been created."""
        return [WatchEvent(key, None, value, self.revision) for key, value in sorted(self.values.items())]

    def on_registered(self, found: Registration) -> list[WatchEvent]:
        """Apply the reply to a registration. Returns what has changed since the last known state.

        A reply that others have overtaken changes nothing, not even whether the cache is live.
        """
        if found.revision < self._oldest or (self.live and found.revision <= self.revision):
            return []
        before, self.values = self.values, _values_of(found)
        events = [
            WatchEvent(key, before.get(key), self.values.get(key), found.revision)
            for key in sorted({*before, *self.values} if self.revision >= 0 else ())
            if before.get(key) != self.values.get(key)
        ]
        self.revision = self._oldest = found.revision
        self.live = True
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
        if notification.previous > self.revision or _lacks_value(notification):
            self.live = False
            return []
        self.revision = self._oldest = notification.revision
        key, new = notification.key, None if isinstance(notification, KeyDeleted) else notification.new
        old = self.values.get(key)
        if new is None:
            self.values.pop(key, None)
        else:
            self.values[key] = new
        return [WatchEvent(key, old, new, notification.revision)]

    def invalidate(self) -> None:
        """Mark the state as outdated, because the connection was lost. A new server may count anew."""
        self.live, self._oldest = False, -1
        self._early.clear()


def _values_of(found: Registration) -> dict[str, bytes]:
    if isinstance(found, PrefixCallbackRegistered):
        return dict(zip(found.keys, found.values, strict=False))
    return {} if found.value is None else {found.key: found.value}


def _lacks_value(notification: ChangeNotification) -> bool:
    """Whether the value was too large for ``notification``, and has to be read."""
    if isinstance(notification, PrefixChanged):
        return notification.left_out
    return not isinstance(notification, KeyDeleted) and notification.new is None
