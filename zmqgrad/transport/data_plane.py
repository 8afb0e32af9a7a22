"""How the frames of a message travel: through shared memory, or through a socket, within credit and in
chunks.

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

OWN = frozenset(
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
"""Messages from one data plane to another, which no handler sees."""


class DataPlane:
    """Makes frames ready to go, and finds those that came.

    Args:
        name: of the worker.
        arena: settings of its shared memory.
        inflight: bytes that may be on their way to each peer through sockets; 0: no limit.
        send: of the mailbox.
        send_behind: sends a message that overtakes none that was sent before.
        may_wait: may the calling thread wait for what a peer says? (Not the one that reads it.)
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
        self.send_window = SendWindow(name, inflight, self._say)
        self._name = name
        self._receive_window = ReceiveWindow(inflight, self._say)
        self._reassembler = Reassembler()
        self._send = send
        self._send_behind = send_behind
        self._may_wait = may_wait

    def start(self, timer: Timer | None) -> None:
        """``timer`` runs what is done now and then."""
        self.shared_memory.start(timer)
        self._reassembler.buffers.start(timer)

    def _say(self, peer: int, message: Message, message_id: int = 0) -> None:
        try:
            if isinstance(message, CreditWanted) and message.again:
                self._send_behind(peer, message)
            else:
                self._send(peer, message, message_id)
        except ZmqgradError as e:
            logger.debug("%s cannot tell worker %d %s: %s", self._name, peer, message, e)

    # ---- going ------------------------------------------------------------------------------------------

    def prepare(
        self, peer: int, local: bool, message: Message, frames: Sequence[Frame], patience: float
    ) -> PreparedFrames:
        """``frames`` ready to go to ``peer``, which is on this host if ``local``.

        Waits, ``patience`` seconds at most (0: no limit), if they have to go through the socket and too much
        is on its way there.

        Raises:
            CongestionError, ClosedError: as :meth:`SendWindow.wait`.
        """
        prepared = self.shared_memory.prepare(peer, local, frames)
        if not prepared.frames:
            return prepared
        answer, size = bool(message.TYPE & RESPONSE), frames_size(prepared.frames)
        if self.send_window.take(peer, answer, size, wait=self._may_wait()):
            return prepared
        self.shared_memory.rollback(peer, prepared)  # its releases must not wait with it
        self.send_window.wait(peer, answer, size, patience)
        try:
            prepared = self.shared_memory.prepare(peer, local, frames)
        except BaseException:
            self.send_window.give_back(peer, answer, size)
            raise
        if not prepared.frames:  # by now there is shared memory for them
            self.send_window.give_back(peer, answer, size)
        return prepared

    def copies(self, frames: Sequence[Frame]) -> list[Frame]:
        """``frames``, which stay as they are though the tensors that they show are changed."""
        return [f if isinstance(f, (bytes, LazyFrame)) else self._reassembler.buffers.copy(f) for f in frames]

    def rollback(self, peer: int, message: Message, prepared: PreparedFrames) -> None:
        """``prepared`` could not be sent after all."""
        self.shared_memory.rollback(peer, prepared)
        if prepared.frames:
            self.send_window.give_back(peer, bool(message.TYPE & RESPONSE), frames_size(prepared.frames))

    # ---- coming -----------------------------------------------------------------------------------------

    def find_frames(self, peer: int, manifest: Manifest, frames: Sequence[Buffer]) -> Sequence[Buffer]:
        """The frames of a message that came with a manifest and ``frames``.

        Raises:
            ProtocolError: if they do not fit each other, or what came before.
        """
        if any([buffer.block and not buffer.segment for buffer in manifest.buffers]):
            manifest, frames = self._reassembler.complete(peer, manifest, frames)
        return self.shared_memory.open(peer, manifest, frames)

    def on_message(self, inbound: Inbound) -> None:
        """One of the messages in ``OWN``.

        Raises:
            ProtocolError: if it is a chunk that does not fit.
        """
        source, message = inbound.envelope.source, inbound.message
        if isinstance(message, Credit):
            self.send_window.on_credit(source, message)
        elif isinstance(message, CreditWanted):
            self._receive_window.credit_requested(source, message)
        elif isinstance(message, Chunk):
            self._reassembler.add(source, message, inbound.frames)
        elif inbound.envelope.type != MessageType.ACK:  # its envelope has said all
            self.shared_memory.on_message(source, message, inbound.envelope.message_id)

    def deliver(self, inbound: Inbound, handler: Handler) -> Task | None:
        """Hand on a message whose frames came through a socket.

        It counts as taken in as soon as it queues behind nothing here: when its task begins, or at once.
        """
        source, answer = inbound.envelope.source, bool(inbound.envelope.type & RESPONSE)
        size, task = inbound.by_socket, None
        self._receive_window.received(source, answer, size)
        try:
            task = handler(inbound)
        finally:
            if task is None:
                self._receive_window.consumed(source, answer, size)
        if task is None:
            return None

        def begin() -> None:
            self._receive_window.consumed(source, answer, size)
            task()

        return begin

    # ---- ends -------------------------------------------------------------------------------------------

    def forget(self, peer: int) -> None:
        """The way to ``peer`` was dropped: nothing that was on it will arrive, either way."""
        self.shared_memory.forget(peer)
        self._reassembler.forget(peer)
        self._receive_window.forget(peer)
        self.send_window.forget(peer)  # last: those who wait for it now fail

    def close(self) -> None:
        """Lend, wait and keep nothing any more. Tensors that were received stay valid. Idempotent."""
        self.send_window.close()
        self.shared_memory.close()
        self._reassembler.close()

    def statistics(self) -> dict[str, Any]:
        """Of the arena, of what is on its way, and of memory that is kept warm."""
        return {
            "arena": self.shared_memory.statistics(),
            "inflight": self.send_window.statistics(),
            "kept_warm": self._reassembler.buffers.kept(),
        }


def frames_size(frames: Sequence[Buffer]) -> int:
    """Bytes of all ``frames``."""
    return sum(map(len, frames))
