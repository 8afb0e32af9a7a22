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
from zmqgrad.wire.frames import MAGIC, MAX_HEADER, VERSION
from zmqgrad.wire.messages import Message

_SHORT = struct.Struct("!H4sH2xQQ")
"""Flags, which are none, and size together as one number; then the envelope, whose source nobody looks at."""

_LONG = struct.Struct("!BQ4sH2xQQ")
_LONG_FLAG = 2
_START = MAGIC + bytes([VERSION, 0])
"""An envelope's first bytes; there are no lanes here."""

_AFTER_SHORT, _AFTER_LONG = _SHORT.size, _LONG.size
_SPARED = _AFTER_LONG - _AFTER_SHORT
"""By how much a short head is shorter than a long one."""

_write_short, _write_long = _SHORT.pack_into, _LONG.pack_into
_read_short, _read_long = _SHORT.unpack_from, _LONG.unpack_from


def write(message: Message, incarnation: int, number: int) -> bytearray:
    """``message`` as it goes out, with all that comes before it.

    Raises:
        ProtocolError: as :func:`~zmqgrad.wire.codec.encode`.
    """
    data = bytearray(_AFTER_LONG)
    try:
        write_header(message, data, _AFTER_LONG)
        size = len(data) - HEAD_ROOM
        if size < 256:
            _write_short(data, _SPARED, size, _START, message.TYPE, incarnation, number)
            del data[:_SPARED]  # moves a pointer, not the bytes
            return data
        if size <= MAX_HEADER:
            _write_long(data, 0, _LONG_FLAG, size, _START, message.TYPE, incarnation, number)
            return data
    except UNWRITABLE:
        pass
    return write_head(encode(message, 0, incarnation, number, room=HEAD_ROOM))  # which says why not


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
