"""Sends messages by the links: prepares frames, reserves credit, and undoes both if the message cannot leave.

Within a host a message is one packet, or several with its frames in shared memory or in chunks. Between hosts
it goes through the session of the link, its large frames through a channel for bulk
(:mod:`~zmqgrad.transport.sealed`). What is prepared for a message that does not leave must be given back:
memory, credit, and the releases that it would have carried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from zmqgrad.errors import ZmqgradError
from zmqgrad.transport.base import Frame
from zmqgrad.transport.bulk import CHUNK_BYTES, MAX_INLINE_CHUNK_BYTES, Part, inline, split, split_first
from zmqgrad.transport.data_plane import DataPlane
from zmqgrad.transport.flow_control import MIN_COUNTED_BYTES, NOTHING_CONSUMED
from zmqgrad.transport.links import Link, Links
from zmqgrad.transport.local import MAX_PACKET_BYTES, LocalConnection
from zmqgrad.transport.sealed.transport import SealedTransport
from zmqgrad.transport.shared_memory.packing import PreparedFrames
from zmqgrad.transport.tap import FRAMES, INLINE, SHARED_MEMORY
from zmqgrad.wire.codec import encode
from zmqgrad.wire.messages import RESPONSE, Chunk, Message, MessageType

STABLE_TENSOR_TYPES = frozenset({MessageType.CALL, MessageType.REMOTE_CALL, MessageType.FORWARD_AUTOGRAD_REQ})
"""Requests of the user's program, which must not modify their tensors until they are done. Tensors of other
messages may change as soon as they are sent; between hosts they are copied, as they may have to be resent."""

NO_FRAMES = PreparedFrames(None, ())
NO_CHUNKS: list[Part] = []


class Sender:
    """Sends the messages of one mailbox. From any thread.

    Args:
        source: worker id and incarnation.
        links: which are sent by.
        plane: prepares frames and counts credit.
        sealed: the channels for bulk.
        may_wait: whether the calling thread may wait for credit.
    """

    def __init__(
        self,
        source: tuple[int, int],
        links: Links,
        plane: DataPlane,
        sealed: SealedTransport,
        may_wait: Callable[[], bool],
    ) -> None:
        self._source = source
        self._links = links
        self._plane = plane
        self._sealed = sealed
        self._may_wait = may_wait
        self._has_releases = plane.has_releases
        self._consumed = plane.consumed

    def send_local(
        self,
        link: Link,
        connection: LocalConnection,
        message: Message,
        message_id: int,
        frames: Sequence[Frame],
        channel: int,
        timeout: float,
    ) -> tuple[int, int]:
        """Sends by a local connection. Returns the size of the first frame, and the path of the others."""
        peer, links = link.peer, self._links
        if not frames and not self._has_releases(peer):
            own, incarnation = self._source
            consumed = self._consumed(peer, NOTHING_CONSUMED)
            first = encode(message, own, incarnation, message_id, channel, None, consumed)
            size = len(first)
            if size < MIN_COUNTED_BYTES:
                if channel and message.is_awaited_by(peer):
                    connection = links.channel(link, channel) or connection
                links.send_packet(link, connection, first, channel != 0)
                return size, INLINE
            if not self._try_reserve(peer, message, size):
                self._plane.send_window.wait(peer, _is_reply(message), size, timeout)
            prepared, chunks = NO_FRAMES, NO_CHUNKS
        else:
            prepared, chunks, first, size = self._prepare(
                link, 0, message, message_id, frames, channel, timeout
            )
        sending = False
        try:
            small = not chunks and len(first) <= MAX_PACKET_BYTES
            if channel and small and message.is_awaited_by(peer):
                connection = links.channel(link, channel) or connection
            sending = True
            if small and not prepared.offers:
                links.send_packet(link, connection, first, channel != 0)
                return len(first), INLINE
            packets = [first]
            if not small:
                chunks, packets = self._packets(chunks, first)
            links.send_local(link, connection, packets, prepared.offers)
            if len(packets) > 1:
                in_chunks = len(first) if len(first) > MAX_PACKET_BYTES else 0
                links.count_chunks(link, in_chunks + sum(map(len, prepared.frames)))
        except BaseException as e:
            # What a signal handler raises comes behind a system call, which may have sent the message.
            perhaps_sent = sending and not isinstance(e, ZmqgradError)
            self._undo(peer, message, prepared, size, perhaps_sent)
            self._give_up(chunks, lambda last: links.send_local(link, link.local or connection, [last], ()))
            raise
        path = FRAMES if prepared.frames else SHARED_MEMORY if frames else INLINE
        return len(first), path

    def _packets(self, chunks: list[Part], first: bytearray) -> tuple[list[Part], list[bytearray]]:
        """Returns the chunks of a message, as far as a packet is too small, and its packets."""
        source = self._source
        if len(first) > MAX_PACKET_BYTES:
            large, more = split_first(first, MAX_INLINE_CHUNK_BYTES)
            chunks, first = chunks + more, encode(large, *source, 0)
        return chunks, [*(encode(inline(chunk), *source, 0) for chunk in chunks), first]

    def _give_up(self, chunks: list[Part], send: Callable[[bytearray], object]) -> None:
        """Lets the receiver drop what was sent of frames whose message was perhaps not sent to its end."""
        with suppress(ZmqgradError):
            for stream in {chunk.stream for chunk, _ in chunks}:
                send(encode(Chunk(stream, 0, 0), *self._source, 0))

    def send_tcp(
        self,
        link: Link,
        message: Message,
        message_id: int,
        frames: Sequence[Frame],
        channel: int,
        timeout: float,
    ) -> tuple[int, int]:
        """Sends by the session of ``link``, or its channel for bulk. Returns as :meth:`send_local`."""
        source = self._source
        sealed = self._sealed.to(link.peer, frames) if frames else None
        encrypts = sealed is not None and sealed.cipher.encrypts
        if not (encrypts or message.TYPE in STABLE_TENSOR_TYPES):
            frames = self._plane.copies(frames)
        prepared, chunks, first, size = self._prepare(
            link, CHUNK_BYTES, message, message_id, frames, channel, timeout
        )
        try:
            if len(first) > CHUNK_BYTES:
                large, more = split_first(first, CHUNK_BYTES)
                chunks, first = chunks + more, encode(large, *source, 0)
            parts = [(encode(chunk, *source, 0), data) for chunk, data in chunks]
            rest = [frame for frame in prepared.frames if len(frame) <= CHUNK_BYTES]
            if sealed and prepared.frames:
                with link.lock:
                    link.count(first, sum(map(len, prepared.frames)))
                self._sealed.send(sealed, parts, first, rest)
            else:
                self._links.send_session(link, first, rest, parts)
        except BaseException:
            self._undo(link.peer, message, prepared, size)
            if sealed and prepared.frames:
                self._give_up(chunks, lambda last: self._sealed.send(sealed, (), last, ()))
            else:
                self._give_up(chunks, lambda last: self._links.send_session(link, last, (), ()))
            raise
        return len(first), FRAMES if frames else INLINE

    def _prepare(
        self,
        link: Link,
        size_limit: int,
        message: Message,
        message_id: int,
        frames: Sequence[Frame],
        channel: int,
        timeout: float,
    ) -> tuple[PreparedFrames, list[Part], bytearray, int]:
        """Prepares and encodes a message, and reserves credit for what goes through a socket.

        Args:
            size_limit: of the frames that are not split; 0: of a local connection, which has no frames.

        Returns:
            The prepared frames, the chunks of them, the first frame, and the reserved bytes.
        """
        peer = link.peer
        own, incarnation = self._source
        reserved = -1
        while True:
            prepared = NO_FRAMES
            try:
                prepared = self._plane.prepare(peer, not size_limit, frames)
                going, chunks, size = prepared, NO_CHUNKS, 0
                if prepared.frames:
                    going, chunks = split(prepared, size_limit)
                    size = sum(map(len, prepared.frames))
                consumed = self._consumed(peer, NOTHING_CONSUMED)
                first = encode(message, own, incarnation, message_id, channel, going.manifest, consumed)
                size += len(first)
                if size < MIN_COUNTED_BYTES:
                    size = 0
                if reserved >= 0 or not size or self._try_reserve(peer, message, size):
                    break
            except BaseException:
                self._undo(peer, message, prepared, max(0, reserved))
                raise
            self._plane.rollback(peer, prepared)  # the releases in this message must not wait
            self._plane.send_window.wait(peer, _is_reply(message), size, timeout)
            reserved = size
        if reserved >= 0 and reserved != size:
            self._plane.send_window.cancel(peer, _is_reply(message), reserved - size)
        return prepared, chunks, first, size

    def _try_reserve(self, peer: int, message: Message, size: int) -> bool:
        return self._plane.send_window.try_reserve(peer, _is_reply(message), size, self._may_wait)

    def _undo(
        self,
        peer: int,
        message: Message,
        prepared: PreparedFrames,
        size: int,
        perhaps_sent: bool = False,
    ) -> None:
        """Undoes the preparation of a message that was not sent, or perhaps only not to its end."""
        self._plane.rollback(peer, prepared, perhaps_sent=perhaps_sent)
        if size:
            self._plane.send_window.cancel(peer, _is_reply(message), size)


def _is_reply(message: Message) -> bool:
    return message.TYPE & RESPONSE != 0
