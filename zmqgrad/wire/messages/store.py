"""Store queries, client to server, and their replies.

Timeouts are the time left at the client, in seconds; the server stops waiting when it has passed. The reply
to any query may be STORE_REFUSED instead.
"""

from __future__ import annotations

import enum
from typing import Annotated, ClassVar

from msgspec import Meta

from zmqgrad.wire.messages.base import (
    Key,
    Keys,
    Message,
    MessageType,
    Name,
    Seconds,
    Size,
    Text,
    Value,
    Values,
)


class StoreSet(Message, frozen=True):
    """Set ``key``. Reply: STORE_DONE."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_SET
    key: Key
    value: Value


class StoreCompareSet(Message, frozen=True):
    """Set ``key`` if it holds ``expected`` (or is missing and ``expected`` is empty). Reply: STORE_VALUE."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_COMPARE_SET
    key: Key
    expected: Value
    desired: Value


class StoreGet(Message, frozen=True):
    """Get the value of ``key``, once it exists. Reply: STORE_VALUE."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_GET
    key: Key
    timeout: Seconds


class StoreAdd(Message, frozen=True):
    """Add ``amount`` to the number at ``key`` (0 if missing). Reply: STORE_NUMBER, the sum."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_ADD
    key: Key
    amount: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class StoreCheck(Message, frozen=True):
    """Check whether all ``keys`` exist. Reply: STORE_NUMBER, 1 or 0."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_CHECK
    keys: Keys


class StoreWait(Message, frozen=True):
    """Wait until all ``keys`` exist. Reply: STORE_DONE."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_WAIT
    keys: Keys
    timeout: Seconds


class StoreGetNumKeys(Message, frozen=True):
    """Count the keys. Reply: STORE_NUMBER."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_GETNUMKEYS


class StoreDeleteKey(Message, frozen=True):
    """Delete ``key``. Reply: STORE_NUMBER, 1 if it existed."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_DELETE_KEY
    key: Key


class StoreAppend(Message, frozen=True):
    """Append ``value`` to ``key`` (created if missing). Reply: STORE_DONE."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_APPEND
    key: Key
    value: Value


class StoreMultiGet(Message, frozen=True):
    """Get the values of ``keys``, once all exist. Reply: STORE_VALUES."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_MULTI_GET
    keys: Keys
    timeout: Seconds


class StoreMultiSet(Message, frozen=True):
    """Set ``keys`` to ``values``, one to one. Reply: STORE_DONE."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_MULTI_SET
    keys: Keys
    values: Values


class StoreQueuePush(Message, frozen=True):
    """Push ``value`` to the end of the queue ``key``. Reply: STORE_DONE."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_QUEUE_PUSH
    key: Key
    value: Value


class StoreQueuePop(Message, frozen=True):
    """Pop the first item of the queue ``key``; with ``block``, wait for one. Reply: STORE_ITEM."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_QUEUE_POP
    key: Key
    block: bool
    timeout: Seconds


class StoreQueueAck(Message, frozen=True):
    """Acknowledge ``item`` (STORE_ITEM), which then counts as delivered.

    Reply: STORE_NUMBER, 1; or 0 if the item has returned to its queue meanwhile.
    """

    TYPE: ClassVar[MessageType] = MessageType.STORE_QUEUE_ACK
    item: Size


class StoreQueueLen(Message, frozen=True):
    """Count the items of the queue ``key``. Reply: STORE_NUMBER."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_QUEUE_LEN
    key: Key


class StoreListKeys(Message, frozen=True):
    """List the keys that start with ``prefix``. Reply: STORE_KEYS, sorted."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_LIST_KEYS
    prefix: Key


class StorePing(Message, frozen=True):
    """Check that the server is alive. Reply: STORE_PONG with the same nonce."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_PING
    nonce: Name


# ---- replies --------------------------------------------------------------------------------------------


class StoreValue(Message, frozen=True):
    """A value, and the store's revision when it was read."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_VALUE
    value: Value
    revision: Size = 0


class StoreItem(Message, frozen=True):
    """An item of a queue, and its id. It returns to the queue unless it is acknowledged."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_ITEM
    item: Size
    value: Value


class StoreNumber(Message, frozen=True):
    """A number."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_NUMBER
    number: int


class StoreValues(Message, frozen=True):
    """Values, in the order of the requested keys."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_VALUES
    values: Values


class StoreKeys(Message, frozen=True):
    """Keys."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_KEYS
    keys: Keys


class StoreDone(Message, frozen=True):
    """Done."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_DONE


class Refusal(enum.IntEnum):
    """Why a store query was refused."""

    TIMEOUT = 0
    MISSING = 1
    INVALID = 2
    LIMIT = 3
    CLOSING = 4
    UNSUBSCRIBED = 5  # the subscription of a watch has not arrived


class StoreRefused(Message, frozen=True):
    """Not done, and why."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_REFUSED
    reason: Refusal
    text: Text


class StorePong(Message, frozen=True):
    """The server is alive. ``endpoint`` is its fast path for clients of its host, if there is one."""

    TYPE: ClassVar[MessageType] = MessageType.STORE_PONG
    nonce: Name
    endpoint: Name = ""
