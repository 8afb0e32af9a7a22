"""Questions and answers in one step: head, envelope and header, for messages that come whole and alone.

Nearly all that goes between a store and its clients does. What :mod:`~zmqgrad.transport.zmtp` and
:mod:`~zmqgrad.wire.codec` do one after the other, for whatever may come, is done here at once: two processes
that take turns find little of their code in the processor's caches, and pay for each line of it.

Where something is out of the ordinary, :func:`read` knows nothing: the caller asks those two, which say what.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from zmqgrad.transport.zmtp import HEAD_ROOM, write_head
from zmqgrad.wire.codec import HEADER_READERS, UNREADABLE, UNWRITABLE, encode, header_of
from zmqgrad.wire.frames import ENVELOPE_SIZE, MAGIC, MAX_HEADER, VERSION
from zmqgrad.wire.messages import BY_TYPE, Message

_SHORT = struct.Struct("!H6s2xQQ")
"""Flags, which are none, and size together as one number; then the envelope, whose source nobody looks at."""

_LONG = struct.Struct("!BQ6s2xQQ")
LONG_FLAG = 2

_START = MAGIC + bytes([VERSION, 0])
"""An envelope's first bytes; there are no lanes here."""

STARTS: dict[type[Message], bytes] = {cls: _START + kind.to_bytes(2, "big") for kind, cls in BY_TYPE.items()}
"""How an envelope begins, its type included, by what is in it."""

READERS: dict[bytes, Callable[[bytes | memoryview], Message]] = {
    STARTS[cls]: HEADER_READERS[kind] for kind, cls in BY_TYPE.items()
}
"""What makes a message of a header, by how its envelope begins."""

START, NUMBER, HEADER = slice(2, 8), slice(18, _SHORT.size), slice(_SHORT.size, None)
"""Parts of a message with a short head, and the header after it."""

LAST = slice(-8, None)
"""The number, of a head alone, short or long."""

_AFTER_LONG = _LONG.size

read_short = struct.Struct("!2x6s2xQQ").unpack_from
"""Start, incarnation and number, of a message with a short head. Raises ``struct.error``."""

_read_short, _read_long = _SHORT.unpack_from, _LONG.unpack_from
write_short, write_long = _SHORT.pack, _LONG.pack


def write(message: Message, incarnation: int, number: int) -> bytes | bytearray:
    """``message`` as it goes out, with all that comes before it.

    Raises:
        ProtocolError: as :func:`~zmqgrad.wire.codec.encode`.
    """
    try:
        header = header_of(message)
        size = len(header) + ENVELOPE_SIZE
        if size < 256:
            return write_short(size, STARTS[type(message)], incarnation, number) + header
        if size <= MAX_HEADER:
            return write_long(LONG_FLAG, size, STARTS[type(message)], incarnation, number) + header
    except UNWRITABLE:
        pass
    return write_head(encode(message, 0, incarnation, number, room=HEAD_ROOM))  # which says why not


def read(data: bytes) -> tuple[int, int, Message] | None:
    """Incarnation and number (of a question: line and number) and message. None: ``data`` is not just one."""
    try:
        size, start, incarnation, number = _read_short(data)
        if size < 256 and size == len(data) - 2:  # a long head looks like a short one, of 512 bytes
            return incarnation, number, READERS[start](data[HEADER])
        flag, size, start, incarnation, number = _read_long(data)
        if flag == LONG_FLAG and size == len(data) - HEAD_ROOM:
            return incarnation, number, READERS[start](memoryview(data)[_AFTER_LONG:])
    except (*UNREADABLE, KeyError):
        pass
    return None


def frame_in(data: bytes) -> bytes | None:
    """The frame of which ``data`` is the whole message; None if it is not just that."""
    for flag, room, width in ((0, 2, 1), (LONG_FLAG, HEAD_ROOM, 8)):
        if data[:1] == bytes([flag]) and int.from_bytes(data[1 : 1 + width], "big") == len(data) - room:
            return data[room:]
    return None
