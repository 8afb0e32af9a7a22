"""Questions and answers in one step: head, envelope and header, for messages that come whole and alone.

Nearly all that goes between a store and its clients does. What :mod:`~zmqgrad.transport.zmtp` and
:mod:`~zmqgrad.wire.codec` do one after the other, for whatever may come, is done here at once: two processes
that take turns find little of their code in the processor's caches, and pay for each line of it.

Where something is out of the ordinary, :func:`read` knows nothing: the caller asks those two, which say what.
"""

from __future__ import annotations

import struct

from zmqgrad.transport.zmtp import HEAD_ROOM, write_head
from zmqgrad.wire.codec import HEADER_READERS, UNREADABLE, UNWRITABLE, encode, write_header
from zmqgrad.wire.frames import ENVELOPE_SIZE, MAGIC, MAX_HEADER, VERSION
from zmqgrad.wire.messages import Message

_SHORT = struct.Struct("!H4sH2xQQ")
"""Flags, which are none, and size together as one number; then the envelope, whose source nobody looks at."""

_LONG = struct.Struct("!BQ4sH2xQQ")
_LONG_FLAG = 2
_START = MAGIC + bytes([VERSION, 0])
"""An envelope's first bytes; there are no lanes here."""

_AFTER_SHORT, _AFTER_LONG = _SHORT.size, _LONG.size
_write_short, _write_long = _SHORT.pack, _LONG.pack
_read_short, _read_long = _SHORT.unpack_from, _LONG.unpack_from


def write(message: Message, incarnation: int, number: int) -> bytes:
    """``message`` as it goes out, with all that comes before it.

    Raises:
        ProtocolError: as :func:`~zmqgrad.wire.codec.encode`.
    """
    try:
        header = write_header(message)
        size = ENVELOPE_SIZE + len(header)
        if size < 256:
            return _write_short(size, _START, message.TYPE, incarnation, number) + header
        if size <= MAX_HEADER:
            return _write_long(_LONG_FLAG, size, _START, message.TYPE, incarnation, number) + header
    except UNWRITABLE:
        pass
    return bytes(write_head(encode(message, 0, incarnation, number, room=HEAD_ROOM)))  # which says why not


def read(data: bytes) -> tuple[int, int, Message] | None:
    """Incarnation and number (of a question: line and number) and message. None: ``data`` is not just one."""
    try:
        size, start, kind, incarnation, number = _read_short(data)
        if size == len(data) - 2 and start == _START:
            return incarnation, number, HEADER_READERS[kind](data[_AFTER_SHORT:])
        flag, size, start, kind, incarnation, number = _read_long(data)
        if flag == _LONG_FLAG and size == len(data) - HEAD_ROOM and start == _START:
            return incarnation, number, HEADER_READERS[kind](memoryview(data)[_AFTER_LONG:])
    except (*UNREADABLE, KeyError):
        pass
    return None
