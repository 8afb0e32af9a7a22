"""Delivery: where the frames of a message are, and what two workers say so that they get there.

Nobody's program sees these; :mod:`zmqgrad.transport` says and hears them.
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


class Piece(WireStruct, frozen=True):
    """Memory that frames lie in: block ``block`` of the sender's arena, or the next frame that follows.

    ``segment`` names the arena's segment, in which the block has ``size`` bytes at ``offset``. Where that is
    0, the frame follows, or it came before in chunks, as stream ``block``, if that is not 0.
    """

    segment: Id = 0
    block: Id = 0
    offset: Size = 0
    size: Size = 0


class Window(WireStruct, frozen=True):
    """One frame as its reader sees it: ``size`` bytes at ``offset`` of piece number ``piece``."""

    piece: Size
    offset: Size
    size: Size


class Manifest(WireStruct, frozen=True):
    """Where the frames of a message are, if not one by one behind it, and blocks that go back.

    Without ``windows``, the frames are those that follow. ``released``: blocks of the reader's own arena
    that the sender of the message has finished with.
    """

    pieces: Annotated[tuple[Piece, ...], Meta(max_length=MAX_TENSORS)] = ()
    windows: Annotated[tuple[Window, ...], Meta(max_length=MAX_TENSORS)] = ()
    released: Annotated[tuple[Id, ...], Meta(max_length=MAX_TENSORS)] = ()


class Hello(Message, frozen=True):
    """Reserved: worker to a peer, who I am.

    Nobody sends it. Who sends, and in which incarnation, each envelope says; whether memory can be shared
    is found out by ARENA_OFFER, before the first large message.
    """

    TYPE: ClassVar[MessageType] = MessageType.HELLO
    name: Name


class Goodbye(Message, frozen=True):
    """Worker to a peer that it has declared lost and hears of again: for this ``reason``.

    The loss is final, for both: what the peer waits for from this worker will not come.
    """

    TYPE: ClassVar[MessageType] = MessageType.GOODBYE
    reason: Text = ""


class ArenaOffer(Message, frozen=True):
    """Worker to a peer, before the first large message: can you read my memory?

    ``segment`` is ``size`` bytes of shared memory, descriptor ``descriptor`` of process ``pid``, whose
    device and inode are ``device`` and ``inode``. What stands at ``nonce_at`` is the proof that you can.
    While you use it, hold the lock of byte ``lock``.
    """

    TYPE: ClassVar[MessageType] = MessageType.ARENA_OFFER
    segment: Id
    size: Size
    pid: Size
    descriptor: Size
    device: Id
    inode: Id
    nonce_at: Size
    lock: Size


class ArenaAnswer(Message, frozen=True):
    """Answer to ARENA_OFFER: the ``nonce`` that I read, or empty if I cannot, and ``why``."""

    TYPE: ClassVar[MessageType] = MessageType.ARENA_ANSWER
    nonce: Annotated[bytes, Meta(max_length=64)]
    why: Text = ""


class Release(Message, frozen=True):
    """Worker to a peer that it has no message for: its manifest releases blocks."""

    TYPE: ClassVar[MessageType] = MessageType.RELEASE


class Credit(Message, frozen=True):
    """Worker to a peer: of the frames that you sent me I have taken in so many bytes more.

    ``requests`` in those of requests, ``answers`` in those of answers.
    """

    TYPE: ClassVar[MessageType] = MessageType.CREDIT
    requests: Size = 0
    answers: Size = 0


class CreditWanted(Message, frozen=True):
    """Worker to a peer: a message waits here; tell me (CREDIT) when you have taken in so many bytes more.

    0 in ``requests`` or in ``answers``: nothing of that kind waits. ``again``: it has waited for long, and
    this comes behind all that I sent, so count what you have not got as taken in.
    """

    TYPE: ClassVar[MessageType] = MessageType.CREDIT_WANTED
    requests: Size = 0
    answers: Size = 0
    again: bool = False


class Chunk(Message, frozen=True):
    """Worker to a peer: the part at ``offset`` of a frame of ``total`` bytes; its message will follow.

    The manifest of that names the frame by ``stream``. Chunks come in order.
    """

    TYPE: ClassVar[MessageType] = MessageType.CHUNK
    stream: Id
    offset: Size
    total: Size


class Ack(Message, frozen=True):
    """Worker to a peer that it has no message for: its envelope acknowledges what has arrived."""

    TYPE: ClassVar[MessageType] = MessageType.ACK
