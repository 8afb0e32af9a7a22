"""Encodes messages into first frames and decodes them: pure functions that validate all input of peers."""

from __future__ import annotations

import struct

import msgspec

from zmqgrad.errors import ProtocolError
from zmqgrad.wire.frames import (
    CONSUMED_OFFSET,
    ENVELOPE_BYTES,
    MANIFEST_OFFSET,
    MAX_HEADER_BYTES,
    NO_ENVELOPE,
    NO_ENVELOPE_BEFORE_MANIFEST,
    PREFIX,
    START_OFFSET,
    WITH_MANIFEST,
    Envelope,
    new_tuple,
    read_envelope,
    read_fields,
    read_fields_but_type,
    read_manifest_length,
    read_start,
    write_consumed,
    write_manifest_length,
    write_start,
)
from zmqgrad.wire.messages import BY_TYPE, Manifest, Message

_decoders = {int(kind): msgspec.msgpack.Decoder(cls) for kind, cls in BY_TYPE.items()}

_write_header = msgspec.msgpack.Encoder().encode_into
_AT_END = -1

ENCODE_ERRORS: tuple[type[Exception], ...] = (
    msgspec.MsgspecError,
    OverflowError,
    TypeError,
    UnicodeError,
    RecursionError,
    struct.error,
)
DECODE_ERRORS = (msgspec.MsgspecError, struct.error, UnicodeDecodeError, RecursionError)

COPY_LIMIT_BYTES = 1024
"""Up to this size, copying is faster than creating a memoryview."""

_decode_manifest = msgspec.msgpack.Decoder(Manifest).decode

_START = slice(START_OFFSET + 2)
_decode_by_start = {
    PREFIX + kind.to_bytes(2, "big"): decoder.decode for kind, decoder in _decoders.items()
}.get
"""Returns what decodes the header of a message that begins with magic, version and type."""

_kind_by_start = {PREFIX + (kind | WITH_MANIFEST).to_bytes(2, "big"): kind for kind in _decoders}.get
"""Returns the type of a message with a manifest that begins so."""


def encode(
    message: Message,
    source: int,
    incarnation: int,
    message_id: int,
    channel: int = 0,
    manifest: Manifest | None = None,
    consumed: tuple[int, int] = (0, 0),
) -> bytearray:
    """Encode the first frame of ``message``: envelope, ``manifest`` if there is one, and header.

    ``consumed`` are the bytes of the receiver's requests and replies that were consumed here.

    Raises:
        ProtocolError: if a field of ``message`` cannot be encoded (an integer of more than 64 bits, a lone
            surrogate), or if the frame exceeds ``MAX_HEADER_BYTES``. The reader checks the bounds of fields.
    """
    frame = bytearray(NO_ENVELOPE if manifest is None else NO_ENVELOPE_BEFORE_MANIFEST)
    try:
        kind: int = message.TYPE
        if manifest is not None:
            _write_header(manifest, frame, _AT_END)
            write_manifest_length(frame, ENVELOPE_BYTES, len(frame) - MANIFEST_OFFSET)
            kind |= WITH_MANIFEST
        _write_header(message, frame, _AT_END)
        write_start(frame, START_OFFSET, kind, source, incarnation, message_id, channel)
        if consumed != (0, 0):
            write_consumed(frame, CONSUMED_OFFSET, *consumed)
    except ENCODE_ERRORS as e:
        raise ProtocolError(f"cannot encode {type(message).__name__} of worker {source}: {e}") from e
    if len(frame) > MAX_HEADER_BYTES:
        raise ProtocolError(
            f"cannot encode {type(message).__name__}: {len(frame)} bytes in one frame "
            f"(at most {MAX_HEADER_BYTES})"
        )
    return frame


def decode(frame: bytes | bytearray | memoryview) -> tuple[Envelope, Message]:
    """Decode envelope and message of a first frame without a manifest.

    Raises:
        ProtocolError: if the bytes are malformed. No other exception is raised.
    """
    envelope, manifest, message = decode_all(frame)
    if manifest is not None:
        raise ProtocolError(f"worker {envelope.source} sent a manifest to a reader without shared memory")
    return envelope, message


def decode_query(frame: bytes | bytearray | memoryview) -> tuple[int, int, Message]:
    """Decode a query or a reply: incarnation of the sender, message id, and message.

    Raises:
        ProtocolError: as :func:`decode`.
    """
    if type(frame) is bytes and ENVELOPE_BYTES <= len(frame) <= COPY_LIMIT_BYTES:  # in few steps
        prefix, kind, _, incarnation, message_id = read_start(frame)
        decoder = _decoders.get(kind)
        if prefix == PREFIX and decoder is not None:
            try:
                return incarnation, message_id, decoder.decode(frame[ENVELOPE_BYTES:])
            except DECODE_ERRORS:
                pass  # reported below
    envelope, message = decode(frame)
    return envelope.incarnation, envelope.message_id, message


def decode_all(frame: bytes | bytearray | memoryview) -> tuple[Envelope, Manifest | None, Message]:
    """Decode envelope, manifest (if there is one) and message of a first frame.

    Raises:
        ProtocolError: if the bytes are malformed. No other exception is raised.
    """
    manifest: Manifest | None = None
    if type(frame) is bytes and len(frame) <= COPY_LIMIT_BYTES:  # in few steps
        try:
            if (decode := _decode_by_start(frame[_START])) is not None:
                return new_tuple(Envelope, read_fields(frame)), manifest, decode(frame[ENVELOPE_BYTES:])
            if (kind := _kind_by_start(frame[_START])) is not None:
                manifest, start = _read_manifest(frame)
                envelope = new_tuple(Envelope, (kind, *read_fields_but_type(frame)))
                return envelope, manifest, _decoders[kind].decode(frame[start:])
        except DECODE_ERRORS:
            pass  # reported below
    envelope = read_envelope(frame)
    start, with_manifest = ENVELOPE_BYTES, 0
    decoder = _decoders.get(envelope[0])
    if decoder is None and (with_manifest := envelope.type & WITH_MANIFEST):
        envelope = Envelope(envelope.type & ~WITH_MANIFEST, *envelope[1:])  # faster than _replace
        decoder = _decoders.get(envelope.type)
    if decoder is None:
        raise ProtocolError(
            f"unknown message type {envelope.type | with_manifest:#x} from worker {envelope.source}"
        )
    try:
        if with_manifest:
            manifest, start = _read_manifest(frame)
        return envelope, manifest, decoder.decode(memoryview(frame)[start:])
    except DECODE_ERRORS as e:
        name = BY_TYPE[envelope.type].__name__  # type: ignore[index]
        raise ProtocolError(f"malformed {name} from worker {envelope.source}: {e}") from e


def _read_manifest(frame: bytes | bytearray | memoryview) -> tuple[Manifest, int]:
    """Return the manifest and the offset of the header."""
    end = MANIFEST_OFFSET + read_manifest_length(frame, ENVELOPE_BYTES)[0]
    return _decode_manifest(memoryview(frame)[MANIFEST_OFFSET:end]), end
