"""The watch channel of a store: subscribing to notifications, and the notifications.

The server publishes notifications (PUB/SUB), each under the topic of its key or prefix. Each contains the
revision of the one before, so that a gap is detected. A watch belongs to a *watcher*, a client that renews
all its watches every few seconds; watches that are not renewed are dropped.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from zmqgrad.wire.messages.base import (
    MAX_KEYS,
    Id,
    Key,
    Keys,
    Message,
    MessageType,
    Name,
    Size,
    Value,
    Values,
)

UNKNOWN_WATCH = -1
"""In STORE_REVISIONS: the server has no such watch."""

Port = Annotated[int, Meta(ge=0, le=65535)]
Revisions = Annotated[tuple[int, ...], Meta(max_length=2 * MAX_KEYS)]


class StoreWatchChannel(Message, frozen=True):
    """Get the endpoint of the notifications. Reply: STORE_CHANNEL."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_WATCH_CHANNEL


class StoreChannel(Message, frozen=True):
    """At this tcp ``port`` of the server's host."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_CHANNEL
    port: Port


class StoreWatchKey(Message, frozen=True):
    """Publish each change of ``key``, on behalf of ``watcher``.

    The client has subscribed to the key's topic, and then to that of ``nonce``, which is used once. The reply
    is sent when the server has seen the latter subscription, so the former is in place.

    Reply: KEY_CALLBACK_REGISTERED; or STORE_REFUSED (UNSUBSCRIBED) if the subscription does not arrive.
    """

    TYPE: ClassVar[MessageType] = MessageType.STORE_WATCH_KEY
    key: Key
    nonce: Name = ""
    watcher: Id = 0


class KeyCallbackRegistered(Message, frozen=True):
    """Your watch of ``key`` is live since ``revision``, when it held ``value`` (None: it did not exist)."""

    TYPE: ClassVar[MessageType] = MessageType.KEY_CALLBACK_REGISTERED
    key: Key
    revision: Size
    value: Value | None


class StoreUnwatchKey(Message, frozen=True):
    """End the watch of ``key`` by ``watcher``. Reply: STORE_DONE."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_UNWATCH_KEY
    key: Key
    watcher: Id = 0


class StoreWatchPrefix(Message, frozen=True):
    """As STORE_WATCH_KEY, for all keys that begin with ``prefix``. Reply: PREFIX_CALLBACK_REGISTERED."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_WATCH_PREFIX
    prefix: Key
    nonce: Name = ""
    watcher: Id = 0


class PrefixCallbackRegistered(Message, frozen=True):
    """Your watch of ``prefix`` is live since ``revision``, when these ``keys`` held these ``values``."""

    TYPE: ClassVar[MessageType] = MessageType.PREFIX_CALLBACK_REGISTERED
    prefix: Key
    revision: Size
    keys: Keys
    values: Values


class StoreUnwatchPrefix(Message, frozen=True):
    """As STORE_UNWATCH_KEY, for a watch of all keys that begin with ``prefix``. Reply: STORE_DONE."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_UNWATCH_PREFIX
    prefix: Key
    watcher: Id = 0


class StoreRenewWatches(Message, frozen=True):
    """Keep the watches of these keys and prefixes by ``watcher``. Reply: STORE_REVISIONS."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_RENEW_WATCHES
    watcher: Id
    keys: Keys
    prefixes: Keys


class StoreRevisions(Message, frozen=True):
    """For each key, then each prefix: the revision of its last notification.

    0: none yet; -1: the server has no such watch. A client that has not received that notification reads the
    key or prefix again.
    """

    TYPE: ClassVar[MessageType] = MessageType.STORE_REVISIONS
    revisions: Revisions


# ---- notifications: neither request nor response -------------------------------------------------------


class KeyCreated(Message, frozen=True):
    """``key`` was created. ``previous`` is the revision of the key's previous notification, 0 if none."""

    TYPE: ClassVar[MessageType] = MessageType.KEY_CREATED
    key: Key
    revision: Size
    previous: Size
    new: Value | None


class KeyUpdated(Message, frozen=True):
    """``key`` was set. Values above a size are left out (None): read them."""

    TYPE: ClassVar[MessageType] = MessageType.KEY_UPDATED
    key: Key
    revision: Size
    previous: Size
    old: Value | None
    new: Value | None


class KeyDeleted(Message, frozen=True):
    """``key`` was deleted."""

    TYPE: ClassVar[MessageType] = MessageType.KEY_DELETED
    key: Key
    revision: Size
    previous: Size
    old: Value | None


class PrefixChanged(Message, frozen=True):
    """``key``, which begins with ``prefix``, holds ``new`` now; None: it was deleted.

    ``previous`` is the revision of the prefix's previous notification, 0 if none. With ``left_out``, the
    value is too large for a notification: read it.
    """

    TYPE: ClassVar[MessageType] = MessageType.PREFIX_CHANGED
    prefix: Key
    revision: Size
    previous: Size
    key: Key
    new: Value | None
    left_out: bool = False
