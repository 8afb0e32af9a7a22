"""Message types, bounds of fields, and the base classes of messages.

Requests carry 0x100 and responses 0x200; notifications and other one-way messages carry neither. Messages
that torch's RPC has as well use its numbers.
"""

from __future__ import annotations

import enum
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

REQUEST = 0x100
RESPONSE = 0x200

MAX_DIMENSIONS = 64
MAX_TENSORS = 1 << 20
MAX_TEXT = 1 << 20
MAX_KEY = 64 << 10
MAX_VALUE = 256 << 20
MAX_KEYS = 1 << 20

Id = Annotated[int, Meta(ge=0)]  # msgpack itself ends at 2**64 - 1
WorkerId = Annotated[int, Meta(ge=0, lt=1 << 16)]
Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Seconds = Annotated[float, Meta(ge=0)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Traceparent = Annotated[str, Meta(max_length=64)]
Name = Annotated[str, Meta(max_length=1024)]
Key = Annotated[str, Meta(max_length=MAX_KEY)]
Value = Annotated[bytes, Meta(max_length=MAX_VALUE)]
Mask = Annotated[bytes, Meta(max_length=MAX_TENSORS >> 3)]
Keys = Annotated[tuple[Key, ...], Meta(max_length=MAX_KEYS)]
Values = Annotated[tuple[Value, ...], Meta(max_length=MAX_KEYS)]


class MessageType(enum.IntEnum):
    """The type field of the envelope."""

    # calls
    CALL = 0x02 | REQUEST
    RESULT = 0x03 | RESPONSE
    REMOTE_CALL = 0x05 | REQUEST
    REMOTE_RESULT = 0x06 | RESPONSE
    EXCEPTION = 0x37 | RESPONSE
    CANCEL = 0x38 | REQUEST
    # references
    RREF_FETCH = 0x08 | REQUEST
    RREF_VALUE = 0x0A | RESPONSE
    RREF_USER_DELETE = 0x0B | REQUEST
    RREF_FORK_REQUEST = 0x0C | REQUEST
    RREF_CHILD_ACCEPT = 0x0D | REQUEST
    RREF_ACK = 0x0E | RESPONSE
    # autograd
    FORWARD_AUTOGRAD_REQ = 0x0F | REQUEST
    FORWARD_AUTOGRAD_RESP = 0x10 | RESPONSE
    BACKWARD_AUTOGRAD_REQ = 0x11 | REQUEST
    BACKWARD_AUTOGRAD_RESP = 0x12 | RESPONSE
    CLEANUP_AUTOGRAD_CONTEXT_REQ = 0x13 | REQUEST
    CLEANUP_AUTOGRAD_CONTEXT_RESP = 0x14 | RESPONSE
    DISCOVER_AUTOGRAD_REQ = 0x1A | REQUEST
    DISCOVER_AUTOGRAD_RESP = 0x1B | RESPONSE
    DROP_AUTOGRAD_REQ = 0x1C | REQUEST
    # store queries
    STORE_SET = 0x40 | REQUEST
    STORE_COMPARE_SET = 0x41 | REQUEST
    STORE_GET = 0x42 | REQUEST
    STORE_ADD = 0x43 | REQUEST
    STORE_CHECK = 0x44 | REQUEST
    STORE_WAIT = 0x45 | REQUEST
    STORE_GETNUMKEYS = 0x46 | REQUEST
    STORE_DELETE_KEY = 0x47 | REQUEST
    STORE_WATCH_KEY = 0x48 | REQUEST
    STORE_UNWATCH_KEY = 0x49 | REQUEST
    STORE_APPEND = 0x4A | REQUEST
    STORE_MULTI_GET = 0x4B | REQUEST
    STORE_MULTI_SET = 0x4C | REQUEST
    STORE_QUEUE_PUSH = 0x4D | REQUEST
    STORE_QUEUE_POP = 0x4E | REQUEST
    STORE_QUEUE_LEN = 0x4F | REQUEST
    STORE_LIST_KEYS = 0x50 | REQUEST
    STORE_PING = 0x51 | REQUEST
    STORE_WATCH_PREFIX = 0x52 | REQUEST
    STORE_WATCH_CHANNEL = 0x53 | REQUEST
    STORE_UNWATCH_PREFIX = 0x54 | REQUEST
    STORE_RENEW_WATCHES = 0x55 | REQUEST
    STORE_QUEUE_ACK = 0x56 | REQUEST
    PREFIX_CALLBACK_REGISTERED = 0x57 | RESPONSE
    STORE_VALUE = 0x58 | RESPONSE
    STORE_NUMBER = 0x59 | RESPONSE
    STORE_VALUES = 0x5A | RESPONSE
    STORE_KEYS = 0x5B | RESPONSE
    STORE_DONE = 0x5C | RESPONSE
    STORE_REFUSED = 0x5D | RESPONSE
    STORE_PONG = 0x5E | RESPONSE
    KEY_CALLBACK_REGISTERED = 0x5F | RESPONSE
    STORE_CHANNEL = 0x64 | RESPONSE
    STORE_REVISIONS = 0x65 | RESPONSE
    STORE_ITEM = 0x66 | RESPONSE
    # notifications: published, neither request nor response
    KEY_CREATED = 0x60
    KEY_UPDATED = 0x61
    KEY_DELETED = 0x62
    PREFIX_CHANGED = 0x63
    # delivery
    HELLO = 0x70  # reserved, as GOODBYE
    GOODBYE = 0x71
    ARENA_OFFER = 0x72
    LARGE_MESSAGE = 0x73
    RELEASE = 0x74
    CREDIT = 0x75
    CREDIT_WANTED = 0x76
    CHUNK = 0x77
    ACK = 0x78
    BULK_OPEN = 0x79 | REQUEST
    BULK_READY = 0x7A | RESPONSE
    BULK_ACK = 0x7B
    # commits
    COMMIT_COPY = 0x80 | REQUEST
    COMMIT_KEPT = 0x81 | RESPONSE
    COMMIT_FETCH = 0x82 | REQUEST
    COMMIT_FETCHED = 0x83 | RESPONSE


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of every header. ``TYPE`` is sent in the envelope."""

    TYPE: ClassVar[MessageType]

    def is_awaited_by(self, worker: int) -> bool:
        """Whether ``worker`` waits for this at the reply channel in the envelope."""
        return self.TYPE & RESPONSE != 0


class WireStruct(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of the structs that messages contain."""
