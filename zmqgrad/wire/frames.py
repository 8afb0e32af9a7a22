"""The envelope: fixed-size, before every header.

    offset  size  field
         0     2  magic          b"zg"
         2     1  version        4
         3     2  type           MessageType; plus 0x8000 if a manifest precedes the header
         5     2  source         worker id of the sender
         7     8  incarnation    of the sender: random, new at every start
        15     8  message id     of the request; a response repeats it
        23     1  channel        0, or the reply channel where the requester waits (transport/local)
        24     8  sequence       number of the message in its session (transport/session.py), 0: no session
        32     8  acknowledged   number of the last message received from the reader, 0: none
        40     8  target         incarnation of the receiver, 0: any
        48     8  requests       bytes of the receiver's requests that the sender has consumed so far
        56     8  replies        the same for replies (transport/flow_control.py)
        64        header         msgpack, see messages

A manifest (of the frames that follow, see messages/delivery.py) begins with its size, in 4 bytes. All numbers
are big-endian. A reader checks magic, version and size first, so that a foreign client on the port (HTTP, a
scanner) costs no more than a counter (docs/guarantees.md, P5).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from zmqgrad.errors import ProtocolError

MAGIC = b"zg"
VERSION = 4
ENVELOPE_FORMAT = struct.Struct("!2sBHHQQBQQQQQ")
ENVELOPE_BYTES = ENVELOPE_FORMAT.size
WITH_MANIFEST = 0x8000
"""Flag in the type field: a manifest precedes the header."""

_MANIFEST_LENGTH = struct.Struct("!I")
"""The size of the manifest in bytes, in front of it."""

MANIFEST_OFFSET = ENVELOPE_BYTES + _MANIFEST_LENGTH.size
read_manifest_length, write_manifest_length = _MANIFEST_LENGTH.unpack_from, _MANIFEST_LENGTH.pack_into

MAX_HEADER_BYTES = 512 << 20
"""Limit for envelope and header together; larger first frames are rejected unread."""

PREFIX = MAGIC + bytes((VERSION,))
NO_ENVELOPE = PREFIX + bytes(ENVELOPE_BYTES - len(PREFIX))
"""An envelope whose fields are to be written."""

NO_ENVELOPE_BEFORE_MANIFEST = NO_ENVELOPE + bytes(_MANIFEST_LENGTH.size)

START_OFFSET = len(PREFIX)
read_start = struct.Struct("!3sHHQQ").unpack_from
"""Reads magic and version, type, source, incarnation and message id."""

write_start = struct.Struct("!HHQQB").pack_into
"""Writes type, source, incarnation, message id and channel at ``START_OFFSET``."""

CONSUMED_OFFSET = 48
write_consumed = struct.Struct("!QQ").pack_into
"""Writes the bytes of requests and replies that the sender has consumed at ``CONSUMED_OFFSET``."""

read_fields = struct.Struct("!3xHHQQBQQQQQ").unpack_from
"""Reads all fields of an envelope."""

read_fields_but_type = struct.Struct("!5xHQQBQQQQQ").unpack_from
"""Reads those behind the type."""

new_tuple = tuple.__new__
"""Faster than the class of a named tuple itself."""

_SESSION_OFFSET = 24
_pack_session = struct.Struct("!QQQ").pack_into


class Envelope(NamedTuple):
    """The fixed-size part of a message; the module describes its fields, which are all integers."""

    type: int
    source: int
    incarnation: int
    message_id: int
    channel: int = 0
    sequence: int = 0
    acknowledged: int = 0
    target: int = 0
    requests: int = 0
    replies: int = 0


def write_session(frame: bytearray, sequence: int, acknowledged: int, target: int) -> None:
    """Write the fields of the session into the envelope at the start of ``frame``."""
    _pack_session(frame, _SESSION_OFFSET, sequence, acknowledged, target)


def read_envelope(frame: bytes | bytearray | memoryview) -> Envelope:
    """Read the envelope at the start of ``frame``.

    Raises:
        ProtocolError: if magic or version differ, or the frame is too short or too long.
    """
    if not ENVELOPE_BYTES <= len(frame) <= MAX_HEADER_BYTES:
        raise ProtocolError(
            f"first frame of {len(frame)} bytes (expected {ENVELOPE_BYTES} to {MAX_HEADER_BYTES})"
        )
    if frame[:3] != PREFIX:
        raise ProtocolError(_describe_foreign(bytes(frame[:3])))
    return new_tuple(Envelope, read_fields(frame))


def _describe_foreign(prefix: bytes) -> str:
    magic, version = prefix[:2], prefix[2]
    if magic != MAGIC:
        return f"first bytes are {magic!r}, not {MAGIC!r}: the sender does not speak zmqgrad"
    return f"protocol version {version}, this side speaks {VERSION}: install the same release"
