"""What a store's journal is made of: entries to bytes and back, and where bytes are not as they were written.

    file     MAGIC, then records
    record   length(4)  checksum of the body(4)  checksum of these eight bytes(4) | body
    body     a frame as on the wire, envelope and header. The envelope's source is the entry's role, its
             incarnation and message id are the line and number of who asked

All numbers are big-endian, the checksums CRC-32. The head has one of its own, so that a damaged length is
not taken for that of a record which was cut off at the end of the file. Pure.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from zmqgrad.errors import ProtocolError
from zmqgrad.wire.codec import decode, encode
from zmqgrad.wire.messages import Message

MAGIC = b"zmqgrad store journal 1\n"
_HEAD = struct.Struct("!III")
_CHECKED = 8  # bytes of the head that its checksum covers


class Role(enum.IntEnum):
    """What an entry is for."""

    CHANGE = 0  # a query that changed something
    ANSWER = 1  # in a compacted journal: the answer to a change that may be asked for again
    REVISION = 2  # in a compacted journal: its number is the store's revision


class Entry(NamedTuple):
    """One thing that a journal says. ``line`` and ``number`` are 0 where nobody will ask again."""

    role: Role
    line: int
    number: int
    message: Message


class Damage(NamedTuple):
    """Here, bytes are not as they were written."""

    why: str


class CutOff(NamedTuple):
    """Here, the file ends before a record does: it was being written."""


class Piece(NamedTuple):
    """Bytes ``begin`` to ``end`` of a journal."""

    begin: int
    end: int
    what: Entry | Damage | CutOff


def write_record(entry: Entry) -> list[bytes]:
    """``entry`` as a record, head and body.

    Raises:
        ProtocolError: if its message cannot be encoded.
    """
    body = bytes(encode(entry.message, entry.role, entry.line, entry.number))
    checked = struct.pack("!II", len(body), zlib.crc32(body))
    return [checked + struct.pack("!I", zlib.crc32(checked)), body]


def scan(data: memoryview) -> Iterator[Piece]:
    """What is in ``data``, a journal from its beginning (MAGIC has been looked at), to its end."""
    at = len(MAGIC)
    while at < len(data):
        length, body_sum, head_ok = _read_head(data, at)
        end = at + _HEAD.size + length
        if not head_ok and _is_blank(data, at):
            piece = Piece(at, len(data), CutOff())
        elif not head_ok:
            piece = Piece(at, _next_whole(data, at + 1), Damage("the head of a record is damaged"))
        elif end > len(data):
            piece = Piece(at, len(data), CutOff())
        elif zlib.crc32(data[at + _HEAD.size : end]) != body_sum:
            piece = Piece(at, end, Damage(f"a record of {length} bytes is damaged"))
        else:
            piece = Piece(at, end, _read_body(data[at + _HEAD.size : end]))
        yield piece
        at = piece.end


def _read_head(data: memoryview, at: int) -> tuple[int, int, bool]:
    """Length, checksum of the body, and whether the head is whole."""
    head = data[at : at + _HEAD.size]
    if len(head) < _HEAD.size:
        return 0, 0, False
    length, body_sum, head_sum = _HEAD.unpack(head)
    return length, body_sum, zlib.crc32(head[:_CHECKED]) == head_sum


def _read_body(body: memoryview) -> Entry | Damage:
    try:
        envelope, message = decode(body)
        return Entry(Role(envelope.source), envelope.incarnation, envelope.message_id, message)
    except (ProtocolError, ValueError) as e:
        return Damage(f"a record cannot be read ({e}): was it written by another release?")


def _is_blank(data: memoryview, at: int) -> bool:
    """Is this a head that was cut off, or the zeros by which a file grows before it is written?"""
    return len(data) - at < _HEAD.size or not (
        any(data[at : at + _HEAD.size]) or bytes(data[at:]).strip(b"\0")
    )


def _next_whole(data: memoryview, at: int) -> int:
    """Where the next whole record begins; the end if there is none."""
    for begin in range(at, len(data) - _HEAD.size + 1):
        length, body_sum, head_ok = _read_head(data, begin)
        if head_ok:
            body = data[begin + _HEAD.size : begin + _HEAD.size + length]
            if len(body) == length and zlib.crc32(body) == body_sum:
                return begin
    return len(data)
