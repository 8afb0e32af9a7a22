"""Messages to the first frame and back. Pure functions; everything a peer sends is validated here."""

from __future__ import annotations

import struct

import msgspec

from zmqgrad.errors import ProtocolError
from zmqgrad.wire.frames import ENVELOPE_SIZE, MAX_HEADER, Envelope, read_envelope, write_envelope
from zmqgrad.wire.messages import BY_TYPE, Message

_encoder = msgspec.msgpack.Encoder()
_decoders = {int(kind): msgspec.msgpack.Decoder(cls) for kind, cls in BY_TYPE.items()}


def encode(
    message: Message, source: int, incarnation: int, message_id: int, lane: int = 0, *, room: int = 0
) -> bytearray:
    """The first frame of ``message``: envelope and header, after ``room`` bytes that are the caller's.

    Raises:
        ProtocolError: if a field of ``message`` cannot be written (a number beyond 64 bits, a text with
            half a surrogate pair), or if the frame is one that no reader would take (``MAX_HEADER``).
            Bounds of single fields are the reader's to check.
    """
    frame = bytearray(room + ENVELOPE_SIZE)
    try:
        _encoder.encode_into(message, frame, room + ENVELOPE_SIZE)
        write_envelope(frame, Envelope(message.TYPE, source, incarnation, message_id, lane), room)
    except (msgspec.MsgspecError, OverflowError, TypeError, UnicodeError, RecursionError, struct.error) as e:
        raise ProtocolError(f"cannot encode {type(message).__name__} of worker {source}: {e}") from e
    size = len(frame) - room
    if size > MAX_HEADER:
        raise ProtocolError(
            f"cannot encode {type(message).__name__}: {size} bytes in one frame (at most {MAX_HEADER})"
        )
    return frame


def decode(frame: bytes | bytearray | memoryview) -> tuple[Envelope, Message]:
    """The envelope and message of a first frame.

    Raises:
        ProtocolError: naming what is wrong with the bytes. Nothing else escapes.
    """
    envelope = read_envelope(frame)
    decoder = _decoders.get(envelope.type)
    if decoder is None:
        raise ProtocolError(f"unknown message type {envelope.type:#x} from worker {envelope.source}")
    try:
        return envelope, decoder.decode(memoryview(frame)[ENVELOPE_SIZE:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        kind = BY_TYPE[envelope.type].__name__  # type: ignore[index]
        raise ProtocolError(f"malformed {kind} from worker {envelope.source}: {e}") from e
