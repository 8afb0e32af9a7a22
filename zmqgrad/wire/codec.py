"""Messages to the first frame and back. Pure functions; everything a peer sends is validated here."""

from __future__ import annotations

import msgspec

from zmqgrad.errors import ProtocolError
from zmqgrad.wire.frames import ENVELOPE_SIZE, Envelope, read_envelope, write_envelope
from zmqgrad.wire.messages import BY_TYPE, Message

_encoder = msgspec.msgpack.Encoder()
_decoders = {int(kind): msgspec.msgpack.Decoder(cls) for kind, cls in BY_TYPE.items()}


def encode(message: Message, source: int, incarnation: int, message_id: int) -> bytearray:
    """The first frame of ``message``: envelope and header.

    Raises:
        ProtocolError: if a field of ``message`` cannot be written (a number beyond 64 bits).
    """
    frame = bytearray(ENVELOPE_SIZE)
    try:
        _encoder.encode_into(message, frame, ENVELOPE_SIZE)
    except (msgspec.MsgspecError, OverflowError, TypeError) as e:
        raise ProtocolError(f"cannot encode {type(message).__name__}: {e}") from e
    write_envelope(frame, Envelope(message.TYPE, source, incarnation, message_id))
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
