"""The watch channel of a store: asking for notices, and the notices (DESIGN section 7).

Notices go to all that watch a key or a prefix, on the connection that a client has set apart for them. Each
tells the revision of the one before, so that a gap is seen.
"""

from __future__ import annotations

from typing import ClassVar

from zmqgrad.wire.messages.base import Key, Keys, Message, MessageType, Name, Size, Value, Values


class StoreListen(Message, frozen=True):
    """This connection is for notices, and known as ``nonce``. Answer: STORE_DONE."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_LISTEN
    nonce: Name


class StoreWatchKey(Message, frozen=True):
    """Give notice of each change of ``key`` on the connection that is known as ``nonce`` (STORE_LISTEN).

    Answer: KEY_CALLBACK_REGISTERED.
    """

    TYPE: ClassVar[MessageType] = MessageType.STORE_WATCH_KEY
    key: Key
    nonce: Name


class KeyCallbackRegistered(Message, frozen=True):
    """Your watch of ``key`` is live since ``revision``, when it held ``value`` (None: it did not exist)."""

    TYPE: ClassVar[MessageType] = MessageType.KEY_CALLBACK_REGISTERED
    key: Key
    revision: Size
    value: Value | None


class StoreUnwatchKey(Message, frozen=True):
    """Give no more notice of ``key`` on the connection known as ``nonce``. Answer: STORE_DONE."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_UNWATCH_KEY
    key: Key
    nonce: Name = ""


class StoreWatchPrefix(Message, frozen=True):
    """As STORE_WATCH_KEY, for all keys that begin with ``prefix``; ``nonce`` likewise.

    Answer: PREFIX_CALLBACK_REGISTERED.
    """

    TYPE: ClassVar[MessageType] = MessageType.STORE_WATCH_PREFIX
    prefix: Key
    nonce: Name


class PrefixCallbackRegistered(Message, frozen=True):
    """Your watch of ``prefix`` is live since ``revision``, when these ``keys`` held these ``values``."""

    TYPE: ClassVar[MessageType] = MessageType.PREFIX_CALLBACK_REGISTERED
    prefix: Key
    revision: Size
    keys: Keys
    values: Values


class StoreUnwatchPrefix(Message, frozen=True):
    """As STORE_UNWATCH_KEY, for a watch of all keys that begin with ``prefix``. Answer: STORE_DONE."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_UNWATCH_PREFIX
    prefix: Key
    nonce: Name = ""


# ---- notices: neither request nor response ------------------------------------------------------------


class KeyCreated(Message, frozen=True):
    """``key`` came to exist. ``previous`` is the revision of the key's notice before, 0 if none."""

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

    ``previous`` is the revision of the prefix's notice before, 0 if none. With ``left_out``, the value is
    too large for a notice: read it.
    """

    TYPE: ClassVar[MessageType] = MessageType.PREFIX_CHANGED
    prefix: Key
    revision: Size
    previous: Size
    key: Key
    new: Value | None
    left_out: bool = False
