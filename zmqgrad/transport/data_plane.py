"""Decides how the frames of a message are transferred: by shared memory, or by a socket in chunks, on credit.

Each mailbox has one. It combines three mechanisms that are independent of one another: shared
memory (:mod:`~zmqgrad.transport.shared_memory`), credit (:mod:`~zmqgrad.transport.flow_control`) and chunks
(:mod:`~zmqgrad.transport.bulk`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from zmqgrad.runtime.service_thread import ServiceThread
from zmqgrad.runtime.thread_pool import Task
from zmqgrad.transport.base import Buffer, Frame, Handler, Inbound
from zmqgrad.transport.bulk import Reassembler
from zmqgrad.transport.flow_control import ReceiveWindow, SendWindow
from zmqgrad.transport.shared_memory.packing import array_beneath
from zmqgrad.transport.shared_memory.settings import ArenaSettings
from zmqgrad.transport.shared_memory.transport import SharedMemoryTransport
from zmqgrad.wire.frames import Envelope
from zmqgrad.wire.lazy_frame import LazyFrame
from zmqgrad.wire.messages import RESPONSE, Chunk, CreditWanted, Manifest, Message, MessageType

logger = logging.getLogger(__name__)

DATA_PLANE_TYPES = frozenset(
    {MessageType.RELEASE, MessageType.CREDIT, MessageType.CREDIT_WANTED, MessageType.CHUNK, MessageType.ACK}
)
"""Messages between data planes, which are not passed to the handler."""


class DataPlane:
    """Prepares outgoing frames, and resolves incoming ones.

    Args:
        name: of the worker.
        arena: settings of its shared memory.
        inflight: limit of the bytes in flight to each peer through sockets; 0: no limit.
        notify: sends a control message to a peer, and does not raise because of the peer.
    """

    def __init__(
        self, name: str, arena: ArenaSettings, inflight: int, notify: Callable[[int, Message], None]
    ) -> None:
        self.shared_memory = SharedMemoryTransport(name, arena, notify)
        self.has_releases = self.shared_memory.has_releases
        """Returns, as a truth value, whether there are blocks to release to a peer."""
        self.send_window = SendWindow(name, inflight, notify)
        self._receive_window = ReceiveWindow(inflight, notify)
        self.consumed = self._receive_window.totals
        """As :attr:`ReceiveWindow.totals`."""
        self.reassembler = Reassembler(self.shared_memory.allocate)
        self.prepare, self.rollback = self.shared_memory.prepare, self.shared_memory.rollback
        self.on_offer, self.open = self.shared_memory.on_offer, self.shared_memory.open

    def start(self, service: ServiceThread) -> None:
        """Starts the periodic work, which ``service`` runs."""
        self.shared_memory.start(service)
        self.reassembler.buffers.start(service)

    # ---- sending ------------------------------------------------------------------------------------------

    def copies(self, frames: Sequence[Frame]) -> list[Frame]:
        """Returns copies of ``frames`` that later changes of the tensors do not affect."""
        copy = self.reassembler.buffers.copy
        return [f if isinstance(f, (bytes, LazyFrame)) or array_beneath(f) else copy(f) for f in frames]

    # ---- receiving -----------------------------------------------------------------------------------------

    def on_message(self, inbound: Inbound) -> None:
        """Handles one of the messages in ``DATA_PLANE_TYPES``.

        Raises:
            ProtocolError: if it is a chunk that does not continue its frame.
        """
        source, message = inbound.envelope.source, inbound.message
        if isinstance(message, CreditWanted):
            self._receive_window.credit_requested(source, message)
        elif isinstance(message, Chunk):
            self.reassembler.add(source, message, inbound.frames)
        # The envelopes and manifests of the others have done their work.
        if inbound.socket_bytes:
            self._receive_window.consumed(source, False, inbound.socket_bytes)

    def complete(
        self, peer: int, manifest: Manifest, frames: Sequence[Buffer]
    ) -> tuple[Manifest, Sequence[Buffer]]:
        """As :meth:`Reassembler.complete`. If it fails, what came by shared memory is released."""
        try:
            return self.reassembler.complete(peer, manifest, frames)
        except MemoryError:
            shared = tuple(buffer for buffer in manifest.buffers if buffer.segment)
            self.open(peer, replace(manifest, buffers=shared, slices=()), ())
            raise

    def deliver(self, inbound: Inbound, handler: Handler) -> Task | None:
        """Passes a message that counts for flow control to ``handler``.

        It counts as consumed when its task begins, or at once if there is none.
        """
        source, reply = inbound.envelope.source, bool(inbound.envelope.type & RESPONSE)
        size, task = inbound.socket_bytes, None
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

    def count_consumed(self, envelope: Envelope, size: int) -> None:
        """Counts a message that is not delivered here: it is malformed, or was read at a reply channel."""
        self._receive_window.consumed(envelope.source, bool(envelope.type & RESPONSE), size)

    # ---- closing -------------------------------------------------------------------------------------------

    def forget(self, peer: int) -> None:
        """Drops all state of ``peer``: nothing in flight in either direction will arrive."""
        self.shared_memory.forget(peer)
        self.reassembler.forget(peer)
        self._receive_window.forget(peer)
        self.send_window.forget(peer)  # last: threads that wait for it now fail

    def close(self) -> None:
        """Stops sharing and waiting. What is still read can be opened. Idempotent."""
        self.send_window.close()
        self.shared_memory.stop()

    def drop_received(self) -> None:
        """Drops what was received, once nothing is read any more. Tensors stay valid. Idempotent."""
        self.shared_memory.close()
        self.reassembler.close()

    def statistics(self) -> dict[str, Any]:
        """Returns the state of the arena, the bytes in flight, and the size of the buffer pool."""
        return {
            "arena": self.shared_memory.statistics(),
            "inflight": self.send_window.statistics(),
            "kept_warm": self.reassembler.buffers.kept(),
        }
