"""Decides how the frames of a message are transferred: by shared memory, or by a socket in chunks, on credit.

Each mailbox has one. It combines three mechanisms that are independent of one another: shared
memory (:mod:`~zmqgrad.transport.shared_memory`), credit (:mod:`~zmqgrad.transport.flow_control`) and chunks
(:mod:`~zmqgrad.transport.bulk`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from zmqgrad.errors import ZmqgradError
from zmqgrad.runtime.thread_pool import Task
from zmqgrad.transport.base import Buffer, Frame, Handler, Inbound, Timer
from zmqgrad.transport.bulk import Reassembler
from zmqgrad.transport.flow_control import ReceiveWindow, SendWindow
from zmqgrad.transport.shared_memory.packing import PreparedFrames
from zmqgrad.transport.shared_memory.settings import ArenaSettings
from zmqgrad.transport.shared_memory.transport import Send, SharedMemoryTransport
from zmqgrad.wire.lazy_frame import LazyFrame
from zmqgrad.wire.messages import (
    RESPONSE,
    Chunk,
    Credit,
    CreditWanted,
    Manifest,
    Message,
    MessageType,
)

logger = logging.getLogger(__name__)

DATA_PLANE_TYPES = frozenset(
    {
        MessageType.ARENA_OFFER,
        MessageType.ARENA_REPLY,
        MessageType.RELEASE,
        MessageType.CREDIT,
        MessageType.CREDIT_WANTED,
        MessageType.CHUNK,
        MessageType.ACK,
    }
)
"""Messages between data planes, which are not passed to the handler."""


class DataPlane:
    """Prepares outgoing frames, and resolves incoming ones.

    Args:
        name: of the worker.
        arena: settings of its shared memory.
        inflight: limit of the bytes in flight to each peer through sockets; 0: no limit.
        send: of the mailbox.
        send_behind: sends a message behind all that were sent before.
        may_wait: returns whether the calling thread may wait for messages: all but the reading thread may.
    """

    def __init__(
        self,
        name: str,
        arena: ArenaSettings,
        inflight: int,
        send: Send,
        send_behind: Callable[[int, Message], None],
        may_wait: Callable[[], bool],
    ) -> None:
        self.shared_memory = SharedMemoryTransport(name, arena, send, may_wait)
        self.has_releases = self.shared_memory.has_releases
        """Returns, as a truth value, whether there are blocks to release to a peer."""
        self.send_window = SendWindow(name, inflight, self.notify)
        self._name = name
        self._receive_window = ReceiveWindow(inflight, self.notify)
        self.reassembler = Reassembler()
        self._send = send
        self._send_behind = send_behind
        self._may_wait = may_wait

    def start(self, timer: Timer | None) -> None:
        """Starts the periodic work, which ``timer`` runs."""
        self.shared_memory.start(timer)
        self.reassembler.buffers.start(timer)

    def notify(self, peer: int, message: Message, message_id: int = 0) -> None:
        try:
            if isinstance(message, CreditWanted) and message.again:
                self._send_behind(peer, message)
            else:
                self._send(peer, message, message_id)
        except ZmqgradError as e:
            logger.debug("%s cannot send worker %d %s: %s", self._name, peer, message, e)

    # ---- sending ------------------------------------------------------------------------------------------

    def prepare(
        self, peer: int, local: bool, message: Message, frames: Sequence[Frame], timeout: float
    ) -> PreparedFrames:
        """Prepares ``frames`` for ``peer``, which is on this host if ``local``.

        If they must use the socket and the peer's credit is used up, waits up to ``timeout`` seconds (0: no
        limit).

        Raises:
            CongestionError, ClosedError: as :meth:`SendWindow.wait`.
        """
        prepared = self.shared_memory.prepare(peer, local, frames)
        if not prepared.frames:
            return prepared
        reply, size = bool(message.TYPE & RESPONSE), frames_size(prepared.frames)
        if self.send_window.try_reserve(peer, reply, size, wait=self._may_wait()):
            return prepared
        self.shared_memory.rollback(peer, prepared)  # releases carried by this message must not wait
        self.send_window.wait(peer, reply, size, timeout)
        try:
            prepared = self.shared_memory.prepare(peer, local, frames)
        except BaseException:
            self.send_window.return_credit(peer, reply, size)
            raise
        if not prepared.frames:  # by now there is shared memory for them
            self.send_window.return_credit(peer, reply, size)
        return prepared

    def copies(self, frames: Sequence[Frame]) -> list[Frame]:
        """Returns copies of ``frames`` that later changes of the tensors do not affect."""
        return [f if isinstance(f, (bytes, LazyFrame)) else self.reassembler.buffers.copy(f) for f in frames]

    def rollback(self, peer: int, message: Message, prepared: PreparedFrames) -> None:
        """Undoes :meth:`prepare` for a message that could not be sent."""
        self.shared_memory.rollback(peer, prepared)
        if prepared.frames:
            self.send_window.return_credit(peer, bool(message.TYPE & RESPONSE), frames_size(prepared.frames))

    # ---- receiving -----------------------------------------------------------------------------------------

    def find_frames(self, peer: int, manifest: Manifest, frames: Sequence[Buffer]) -> Sequence[Buffer]:
        """Returns the frames of a message from its manifest and the ``frames`` received with it.

        Raises:
            ProtocolError: if the manifest does not match the frames and chunks that were received.
        """
        if any([buffer.block and not buffer.segment for buffer in manifest.buffers]):
            manifest, frames = self.reassembler.complete(peer, manifest, frames)
        return self.shared_memory.open(peer, manifest, frames)

    def on_message(self, inbound: Inbound) -> None:
        """Handles one of the messages in ``DATA_PLANE_TYPES``.

        Raises:
            ProtocolError: if it is a chunk that does not continue its frame.
        """
        source, message = inbound.envelope.source, inbound.message
        if isinstance(message, Credit):
            self.send_window.on_credit(source, message)
        elif isinstance(message, CreditWanted):
            self._receive_window.credit_requested(source, message)
        elif isinstance(message, Chunk):
            self.reassembler.add(source, message, inbound.frames)
        elif inbound.envelope.type != MessageType.ACK:  # its envelope was handled by the session
            self.shared_memory.on_message(source, message, inbound.envelope.message_id)

    def deliver(self, inbound: Inbound, handler: Handler) -> Task | None:
        """Passes a message whose frames arrived through a socket to ``handler``.

        It counts as consumed when its task begins, or at once if there is none.
        """
        source, reply = inbound.envelope.source, bool(inbound.envelope.type & RESPONSE)
        size, task = inbound.socket_bytes, None
        self._receive_window.received(source, reply, size)
        try:
            task = handler(inbound)
        finally:
            if task is None:
                self._receive_window.consumed(source, reply, size)
        if task is None:
            return None

        def begin() -> None:
            self._receive_window.consumed(source, reply, size)
            task()

        return begin

    # ---- closing -------------------------------------------------------------------------------------------

    def forget(self, peer: int) -> None:
        """Drops all state of ``peer``: nothing in flight in either direction will arrive."""
        self.shared_memory.forget(peer)
        self.reassembler.forget(peer)
        self._receive_window.forget(peer)
        self.send_window.forget(peer)  # last: threads that wait for it now fail

    def close(self) -> None:
        """Stops sharing, waiting and pooling. Tensors that were received stay valid. Idempotent."""
        self.send_window.close()
        self.shared_memory.close()
        self.reassembler.close()

    def statistics(self) -> dict[str, Any]:
        """Returns the state of the arena, the bytes in flight, and the size of the buffer pool."""
        return {
            "arena": self.shared_memory.statistics(),
            "inflight": self.send_window.statistics(),
            "kept_warm": self.reassembler.buffers.kept(),
        }


def frames_size(frames: Sequence[Buffer]) -> int:
    """Returns the bytes of all ``frames``."""
    return sum(map(len, frames))
