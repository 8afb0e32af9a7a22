"""Decides how the frames of a message are transferred: by shared memory, or by a socket in chunks, on credit.

Each mailbox has one. It combines three mechanisms that are independent of one another: the arena
(:mod:`~zmqgrad.transport.arena.exchange`), credit (:mod:`~zmqgrad.transport.flow_control`) and chunks
(:mod:`~zmqgrad.transport.bulk`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from zmqgrad.errors import ZmqgradError
from zmqgrad.runtime.thread_pool import Task
from zmqgrad.transport.arena.exchange import Exchange, Load, Send
from zmqgrad.transport.arena.settings import ArenaSettings
from zmqgrad.transport.base import Buffer, Frame, Handler, Inbound, Timer
from zmqgrad.transport.bulk import Reassembler
from zmqgrad.transport.flow_control import ReceiveWindow, SendWindow
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
        MessageType.ARENA_ANSWER,
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
        self.exchange = Exchange(name, arena, send, may_wait)
        self.owes = self.exchange.owes
        """Is there memory to give back to that peer?"""
        self.send_window = SendWindow(name, inflight, self._notify)
        self._name = name
        self._receive_window = ReceiveWindow(inflight, self._notify)
        self._reassembler = Reassembler()
        self._send = send
        self._send_behind = send_behind
        self._may_wait = may_wait

    def start(self, timer: Timer | None) -> None:
        """Starts the periodic work, which ``timer`` runs."""
        self.exchange.start(timer)
        self._reassembler.buffers.start(timer)

    def _notify(self, peer: int, message: Message, message_id: int = 0) -> None:
        try:
            if isinstance(message, CreditWanted) and message.again:
                self._send_behind(peer, message)
            else:
                self._send(peer, message, message_id)
        except ZmqgradError as e:
            logger.debug("%s cannot send worker %d %s: %s", self._name, peer, message, e)

    # ---- sending ------------------------------------------------------------------------------------------

    def load(
        self, peer: int, local: bool, message: Message, frames: Sequence[Frame], patience: float
    ) -> Load:
        """Prepares ``frames`` for ``peer``, which is on this host if ``local``.

        If they must use the socket and the peer's credit is used up, waits up to ``patience`` seconds (0: no
        limit).

        Raises:
            CongestionError, ClosedError: as :meth:`SendWindow.wait`.
        """
        load = self.exchange.load(peer, local, frames)
        if not load.frames:
            return load
        reply, size = bool(message.TYPE & RESPONSE), frames_size(load.frames)
        if self.send_window.take(peer, reply, size, wait=self._may_wait()):
            return load
        self.exchange.unload(peer, load)  # releases carried by this message must not wait
        self.send_window.wait(peer, reply, size, patience)
        try:
            load = self.exchange.load(peer, local, frames)
        except BaseException:
            self.send_window.give_back(peer, reply, size)
            raise
        if not load.frames:  # by now there is shared memory for them
            self.send_window.give_back(peer, reply, size)
        return load

    def copies(self, frames: Sequence[Frame]) -> list[Frame]:
        """Returns copies of ``frames`` that later changes of the tensors do not affect."""
        return [f if isinstance(f, (bytes, LazyFrame)) else self._reassembler.buffers.copy(f) for f in frames]

    def unload(self, peer: int, message: Message, load: Load) -> None:
        """Undoes :meth:`load` for a message that could not be sent."""
        self.exchange.unload(peer, load)
        if load.frames:
            self.send_window.give_back(peer, bool(message.TYPE & RESPONSE), frames_size(load.frames))

    # ---- receiving -----------------------------------------------------------------------------------------

    def find_frames(self, peer: int, manifest: Manifest, frames: Sequence[Buffer]) -> Sequence[Buffer]:
        """Returns the frames of a message from its manifest and the ``frames`` received with it.

        Raises:
            ProtocolError: if the manifest does not match the frames and chunks that were received.
        """
        if any([piece.block and not piece.segment for piece in manifest.pieces]):
            manifest, frames = self._reassembler.complete(peer, manifest, frames)
        return self.exchange.open(peer, manifest, frames)

    def heard(self, inbound: Inbound) -> None:
        """Handles one of the messages in ``OWN``.

        Raises:
            ProtocolError: if it is a chunk that does not continue its frame.
        """
        source, message = inbound.envelope.source, inbound.message
        if isinstance(message, Credit):
            self.send_window.on_credit(source, message)
        elif isinstance(message, CreditWanted):
            self._receive_window.credit_requested(source, message)
        elif isinstance(message, Chunk):
            self._reassembler.add(source, message, inbound.frames)
        elif inbound.envelope.type != MessageType.ACK:  # its envelope was handled by the session
            self.exchange.heard(source, message, inbound.envelope.message_id)

    def take_in(self, inbound: Inbound, handler: Handler) -> Task | None:
        """Passes a message whose frames came through a socket to ``handler``.

        It counts as consumed when its task begins, or at once if there is none.
        """
        source, reply = inbound.envelope.source, bool(inbound.envelope.type & RESPONSE)
        size, task = inbound.by_socket, None
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
        self.exchange.forget(peer)
        self._reassembler.forget(peer)
        self._receive_window.forget(peer)
        self.send_window.forget(peer)  # last: threads that wait for it now fail

    def close(self) -> None:
        """Stops sharing, waiting and pooling. Tensors that were received stay valid. Idempotent."""
        self.send_window.close()
        self.exchange.close()
        self._reassembler.close()

    def statistics(self) -> dict[str, Any]:
        """Returns the state of the arena, the bytes in flight, and the size of the buffer pool."""
        return {
            "arena": self.exchange.statistics(),
            "inflight": self.send_window.statistics(),
            "kept_warm": self._reassembler.buffers.kept(),
        }


def frames_size(frames: Sequence[Buffer]) -> int:
    """Returns the bytes of all ``frames``."""
    return sum(map(len, frames))
