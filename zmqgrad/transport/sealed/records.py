"""Sealed records: one message each, encrypted and authenticated with AES-256-GCM. Pure.

A record consists of a head, which is readable, and of one sealed part for each frame of the message:

    offset  size  field
         0     2  magic      b"zB"
         2     2  parts      number of sealed parts, at least 1
         4     8  channel    random number of the channel
        12     8  sequence   number of the record in its session (transport/session.py)
        20     8  nonce      of the first part; the others have the next ones

All numbers are big-endian. Each channel has a random key that only its sender seals with, and a counter, of
which each part takes the next value: no nonce is used twice (NIST SP 800-38D, 8.2.1). A resent record is the
stored one. The associated data of a part is the head, the incarnations of both workers, and the index of the
part. So a part that was changed, truncated, moved within its record or to another one, or that belongs to
another channel or process, does not open. The message itself, with stream, offset and total length if it is a
chunk, is the first part.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

from zmqgrad.errors import ClosedError, ProtocolError
from zmqgrad.transport.bulk import copy_into
from zmqgrad.wire.lazy_frame import Buffer

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    AVAILABLE = hasattr(AESGCM, "decrypt_into")
except ImportError:
    AVAILABLE = False

KEY_BYTES = 32
TAG_BYTES = 16

MAX_PARTS = 0xFFFF

RENEW_AFTER_PARTS = 1 << 28
"""After this many sealed parts, a channel is replaced by one with another key, long before the 2^32 that
SP 800-38D permits even where nonces are random."""

RENEW_AFTER_BYTES = 1 << 38
"""The same for bytes: about where the advantage of an attacker reaches 2^-57 (RFC 8446, section 5.5)."""

MAX_FORGED_PARTS = 1 << 32
"""After this many parts that did not open, a key is dropped. Each has a chance of 2^-111 to be a forgery that
opens (2^16 blocks of a part, a tag of 2^128); DTLS 1.3 permits 2^36 (RFC 9147, section 4.5.3)."""

_HEAD = struct.Struct("!2sHQQQ")
_MAGIC = b"zB"
_BINDING = struct.Struct("!QQ")
_INDEX = struct.Struct("!H").pack
_NONCE = struct.Struct("!4xQ").pack


class Head(NamedTuple):
    """The readable head of a record. Nothing in it may be trusted before a part was opened."""

    parts: int
    channel: int
    sequence: int
    nonce: int


def generate_key() -> bytes:
    """Returns a random key."""
    return os.urandom(KEY_BYTES)


def read_head(frames: Sequence[Buffer]) -> Head:
    """Reads the head of a record of ``frames``: the head, and its parts.

    Raises:
        ProtocolError: if it is malformed, or parts are missing.
    """
    if len(frames) < 2 or len(frames[0]) != _HEAD.size:
        raise ProtocolError(f"a record of {len(frames)} frames, or with a malformed head")
    magic, *fields = _HEAD.unpack(frames[0])
    head = Head(*fields)
    if magic != _MAGIC or head.parts != len(frames) - 1:
        raise ProtocolError(f"a record with magic {magic!r} and {len(frames) - 1} of {head.parts} parts")
    return head


def _pack_head(frames: Sequence[Buffer], channel: int, sequence: int, nonce: int) -> bytes:
    if len(frames) > MAX_PARTS:
        raise ProtocolError(f"a message of {len(frames)} frames is too long for a record")
    return _HEAD.pack(_MAGIC, len(frames), channel, sequence, nonce)


def sealed_size(frames: Sequence[Buffer]) -> int:
    """Returns the bytes of the parts into which ``frames`` are sealed."""
    return sum(map(len, frames)) + TAG_BYTES * len(frames)


class NullCipher:
    """Leaves records as they are, where the job has no secret (the NULL cipher of RFC 2410).

    Its parts are the frames of the message, without a copy; the interface is that of :class:`Cipher`.
    """

    encrypts = False
    tag_bytes = 0
    sealed = 0
    is_used_up = False
    is_forged = False

    def __init__(self, channel: int) -> None:
        self.channel = channel

    def memory_size(self, frames: Sequence[Buffer]) -> int:
        """Returns 0: no memory is needed."""
        return 0

    def seal(
        self, sequence: int, frames: Sequence[Buffer], memory: memoryview
    ) -> tuple[bytearray, Sequence[Buffer]]:
        """As :meth:`Cipher.seal`; the frames must not be modified as long as the record is needed."""
        return bytearray(_pack_head(frames, self.channel, sequence, 0)), frames

    def open(self, record: Sequence[Buffer], index: int) -> bytes:
        """Returns part ``index`` of ``record``."""
        return bytes(record[1 + index])

    def open_into(self, record: Sequence[Buffer], index: int, target: memoryview) -> None:
        """Copies part ``index`` of ``record`` to ``target``, which has its size."""
        copy_into(target, record[1 + index])

    def __repr__(self) -> str:
        return f"<NullCipher of channel {self.channel:#x}>"


class Cipher:
    """Seals or opens the records of one channel, which goes from one process to another.

    Only one process may seal with a key. Sealing is not thread-safe; opening is.

    Args:
        key: of the channel, from :func:`generate_key`.
        channel: its number.
        source, target: incarnations of the sender and the receiver.
    """

    encrypts = True
    """Whether records are sealed copies, so that the frames may be modified afterwards."""
    tag_bytes = TAG_BYTES
    """How much longer a part is than its frame."""

    def __init__(self, key: bytes, channel: int, source: int, target: int) -> None:
        self.channel = channel
        self.sealed = 0
        """How many parts were sealed: the next nonce."""
        self.forged = 0
        """How many parts did not open."""
        self._sealed_bytes = 0
        self._aead = AESGCM(key)
        self._binding = _BINDING.pack(source, target)
        self._pid = os.getpid()

    def memory_size(self, frames: Sequence[Buffer]) -> int:
        """Returns the bytes of the memory that :meth:`seal` needs for ``frames``."""
        return sealed_size(frames)

    def seal(
        self, sequence: int, frames: Sequence[Buffer], memory: memoryview
    ) -> tuple[bytearray, Sequence[Buffer]]:
        """Seals a message. Returns the head and the parts of its record, which are slices of ``memory``.

        Args:
            memory: of :func:`sealed_size` bytes; must not be written to as long as the record is needed.

        Raises:
            ProtocolError: if it has too many frames.
            ClosedError: in a fork of the process, which would use the same nonces.
        """
        if os.getpid() != self._pid:
            raise ClosedError(f"this channel belongs to process {self._pid}; a fork of it must not use it")
        nonce = self.sealed
        head = _pack_head(frames, self.channel, sequence, nonce)
        self.sealed = nonce + len(frames)  # before they are used: an interrupt must not repeat one
        self._sealed_bytes += sealed_size(frames)
        parts, start = [], 0
        for i, frame in enumerate(frames):
            end = start + len(frame) + TAG_BYTES
            parts.append(memory[start:end])
            self._aead.encrypt_into(_NONCE(nonce + i), frame, self._associated(head, i), parts[-1])
            start = end
        return bytearray(head), parts

    @property
    def is_used_up(self) -> bool:
        """Whether another key must replace this one: the more it has sealed, the less each seal is worth."""
        return self.sealed >= RENEW_AFTER_PARTS or self._sealed_bytes >= RENEW_AFTER_BYTES

    @property
    def is_forged(self) -> bool:
        """Whether nothing more must be opened: each part that did not open was one attempt at a forgery."""
        return self.forged >= MAX_FORGED_PARTS

    def _associated(self, head: Buffer, index: int) -> bytes:
        return bytes(head) + self._binding + _INDEX(index)

    def open(self, record: Sequence[Buffer], index: int) -> bytes:
        """Returns part ``index`` of ``record``, whose head was read.

        Raises:
            ProtocolError: if it is not exactly what the sender sealed in this place.
        """
        try:
            opened: bytes = self._aead.decrypt(*self._arguments(record, index))
        except InvalidTag:
            raise self._refused(index) from None
        return opened

    def open_into(self, record: Sequence[Buffer], index: int, target: memoryview) -> None:
        """Writes part ``index`` of ``record`` to ``target``, which has its size. Raises as :meth:`open`.

        If it raises, ``target`` may have been written to.
        """
        try:
            self._aead.decrypt_into(*self._arguments(record, index), target)
        except InvalidTag:
            raise self._refused(index) from None

    def _arguments(self, record: Sequence[Buffer], index: int) -> tuple[bytes, Buffer, bytes]:
        if len(record[1 + index]) < TAG_BYTES:
            raise self._refused(index)
        nonce = read_head(record).nonce + index
        return _NONCE(nonce), record[1 + index], self._associated(record[0], index)

    def _refused(self, index: int) -> ProtocolError:
        self.forged += 1
        return ProtocolError(f"part {index} of a record of channel {self.channel:#x} is not authentic")

    def __repr__(self) -> str:  # keys must not appear in logs
        return f"<Cipher of channel {self.channel:#x}>"
