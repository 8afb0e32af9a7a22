"""Delivery: where the frames of a message are, and the control messages of the transport.

Sent and received by :mod:`zmqgrad.transport` only.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from zmqgrad.wire.messages.base import (
    MAX_TENSORS,
    Id,
    Message,
    MessageType,
    Name,
    Size,
    Text,
    WireStruct,
)


class FrameBuffer(WireStruct, frozen=True):
    """Memory that contains frames: block ``block`` of the sender's arena, or a ZeroMQ frame.

    ``segment`` is the segment of the arena, in which the block has ``size`` bytes at ``offset``. If it is 0,
    the buffer is the next ZeroMQ frame of this message, or, if ``block`` is not 0, the frame that was
    received in chunks as stream ``block``.

    The receiver owns a block of the arena until it releases it, unless that is ``shared``: then others read
    it, too, and each of them maps it privately.
    """

    segment: Id = 0
    block: Id = 0
    offset: Size = 0
    size: Size = 0
    shared: bool = False


class FrameSlice(WireStruct, frozen=True):
    """One frame: ``size`` bytes at ``offset`` of the buffer with index ``buffer``."""

    buffer: Size
    offset: Size
    size: Size


class Manifest(WireStruct, frozen=True):
    """Where the frames of a message are, and which shared-memory blocks are released.

    Without ``slices``, the frames follow the message one by one. ``released`` lists blocks of the receiver's
    arena that the sender no longer uses.
    """

    buffers: Annotated[tuple[FrameBuffer, ...], Meta(max_length=MAX_TENSORS)] = ()
    slices: Annotated[tuple[FrameSlice, ...], Meta(max_length=MAX_TENSORS)] = ()
    released: Annotated[tuple[Id, ...], Meta(max_length=MAX_TENSORS)] = ()


class Hello(Message, frozen=True):
    """Reserved and never sent.

    Every envelope identifies its sender and incarnation.
    """

    TYPE: ClassVar[MessageType] = MessageType.HELLO
    name: Name


class Goodbye(Message, frozen=True):
    """Worker to a peer, as its last message: it leaves, or has declared the peer lost, for ``reason``."""

    TYPE: ClassVar[MessageType] = MessageType.GOODBYE
    reason: Text = ""


class ArenaOffer(Message, frozen=True):
    """Worker to a peer on its host: a segment of ``size`` bytes, whose descriptor is in the same packet.

    The descriptor holds a lock, by which the sender finds out whether the segment is still mapped.
    """

    TYPE: ClassVar[MessageType] = MessageType.ARENA_OFFER
    segment: Id
    size: Size


class LargeMessage(Message, frozen=True):
    """Worker to a peer: a message whose first frame of ``size`` bytes was sent in chunks as ``stream``."""

    TYPE: ClassVar[MessageType] = MessageType.LARGE_MESSAGE
    stream: Id
    size: Size


class Release(Message, frozen=True):
    """Worker to a peer, if no other message is due: its manifest releases blocks."""

    TYPE: ClassVar[MessageType] = MessageType.RELEASE


class Credit(Message, frozen=True):
    """Worker to a peer, if no other message is due: its envelope tells what was consumed."""

    TYPE: ClassVar[MessageType] = MessageType.CREDIT


class CreditWanted(Message, frozen=True):
    """Worker to a peer: a message waits; send CREDIT as soon as this many bytes in all were consumed.

    0 in ``requests`` or ``replies`` means that no message of that kind waits.
    """

    TYPE: ClassVar[MessageType] = MessageType.CREDIT_WANTED
    requests: Size = 0
    replies: Size = 0


class Chunk(Message, frozen=True):
    """Worker to a peer: the part at ``offset`` of a frame of ``total`` bytes, ahead of its message.

    The manifest of the message refers to the frame by ``stream``. Chunks arrive in order. The part is the
    frame of this message, or ``data`` within a host. A frame that is ``shared`` goes to shared memory of the
    receiver if possible, which will pass it on. With a ``total`` of 0 it has no part: its sender was
    interrupted, and sends no more of the frame.
    """

    TYPE: ClassVar[MessageType] = MessageType.CHUNK
    stream: Id
    offset: Size
    total: Size
    data: bytes = b""
    shared: bool = False


class Ack(Message, frozen=True):
    """Worker to a peer, if no other message is due: its envelope acknowledges received messages."""

    TYPE: ClassVar[MessageType] = MessageType.ACK


class BulkOpen(Message, frozen=True):
    """Worker to a peer, before the first large message: opens ``channel``, whose records have ``key``."""

    TYPE: ClassVar[MessageType] = MessageType.BULK_OPEN
    channel: Id
    key: Annotated[bytes, Meta(max_length=32)]

    def __repr__(self) -> str:  # keys must not appear in logs
        return f"BulkOpen(channel={self.channel})"


class BulkReady(Message, frozen=True):
    """Reply to BULK_OPEN: ``channel`` connects to ``port`` of the host, with ``token`` as the password.

    ``port`` is 0 if there is no such port; ``why`` states the reason.
    """

    TYPE: ClassVar[MessageType] = MessageType.BULK_READY
    channel: Id
    port: Annotated[int, Meta(ge=0, le=65535)]
    token: Annotated[bytes, Meta(max_length=64)] = b""
    why: Text = ""

    def __repr__(self) -> str:  # nor must passwords
        return f"BulkReady(channel={self.channel}, port={self.port}, why={self.why!r})"


class BulkAck(Message, frozen=True):
    """Worker to a peer: all records of ``channel`` up to ``sequence`` have arrived."""

    TYPE: ClassVar[MessageType] = MessageType.BULK_ACK
    channel: Id
    sequence: Id
