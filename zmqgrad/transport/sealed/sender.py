"""The sending half: one channel to each peer, opened with the first message that needs one.

Any thread sends. The key of a channel is told to the peer over the main connection (CURVE, with a secret);
until the peer has replied and the channel is connected, the caller gets none and sends over the main one. A
thread that may wait does so once, for a short time.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from zmqgrad.errors import ClosedError
from zmqgrad.runtime.clock import MONOTONIC, Deadline
from zmqgrad.runtime.future import Promise
from zmqgrad.transport.base import Buffer
from zmqgrad.transport.bulk import BufferPool
from zmqgrad.transport.sealed.records import RENEW_AFTER_PARTS, Cipher, NullCipher, generate_key
from zmqgrad.transport.security import password_client
from zmqgrad.transport.session_socket import Hooks, SessionSocket
from zmqgrad.transport.sessions import Sessions
from zmqgrad.transport.sockets import send_all, set_up, use_io_thread
from zmqgrad.wire.messages import BulkAck, BulkOpen, BulkReady, Message

logger = logging.getLogger(__name__)

MIN_SEALED_BYTES = 256 << 10
"""Messages whose frames have at least this size together use a channel."""

BLOCK_BYTES = 8 << 20
"""Sealed records are kept in blocks of this size, so that their memory is soon used for the next ones."""

CONNECT_SECONDS = 1.0
"""How long the first message waits for the channel at most."""


class ChannelSocket(SessionSocket):
    """The session of one channel. Its messages are sealed when they are sent, and kept sealed."""

    def __init__(
        self,
        name: str,
        endpoint: str,
        cipher: Cipher | NullCipher,
        make_socket: Callable[[], zmq.Socket[bytes]],
        hooks: Hooks,
    ) -> None:
        self.cipher = cipher
        self.connected: Promise[None] = Promise()
        self.closed = False
        super().__init__(name, endpoint, 0, threading.Lock(), make_socket, hooks, b"", MONOTONIC.now())

    def seal_and_send(self, frames: Sequence[Buffer], memory: memoryview, now: float) -> None:
        """Seals a message into ``memory`` and sends it. Sealed frames may be modified afterwards.

        Raises:
            ClosedError: if the channel was closed.
            ProtocolError: as :meth:`Cipher.seal`.
        """
        if self.closed:
            raise ClosedError(f"{self._name}: the connection to {self._endpoint} was dropped")
        self.send(*self.cipher.seal(self.outgoing.next_sequence, frames, memory), now)

    def _transmit(self, sequence: int, first: bytearray, frames: Sequence[Buffer]) -> None:
        assert self._socket is not None
        if sequence > self._sent:
            self._sent = sequence
        else:
            self.resends += 1
        send_all(self._socket, first, frames)

    def on_events(self, now: float) -> None:
        """As :class:`SessionSocket`; the first connection makes the channel usable."""
        super().on_events(now)
        if self._connected:
            self.connected.set_result(None)

    def close(self, linger: int) -> None:
        """As :class:`SessionSocket`; nothing can be sent any more."""
        self.closed = True
        super().close(linger)


class _Opening:
    """A channel of which the peer was told. ``replied`` ends the wait for BULK_READY."""

    __slots__ = ("failed", "key", "number", "previous", "replied", "slow", "socket")

    def __init__(self, key: bytes) -> None:
        self.number = secrets.randbits(63)
        self.key = key
        self.replied: Promise[None] = Promise()
        self.socket: ChannelSocket | None = None
        self.previous: _Opening | None = None  # the channel that this one replaced
        self.failed = False  # the peer has no such port, or was forgotten
        self.slow = False  # a message waited in vain: no other does

    def is_connected(self) -> bool:
        return self.socket is not None and self.socket.connected.done()


class ChannelPool:
    """The channels of one mailbox to its peers.

    Args:
        name, incarnation: of the worker.
        sessions: of the mailbox; handles timeouts.
        notify: sends a small message over CURVE, and does not raise because of the peer.
        endpoint: returns the tcp endpoint in use to a peer, "" if there is none.
        buffers: provides memory for sealed records.
        secured: whether the job has a secret; records are sealed if so.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        context: zmq.Context[zmq.Socket[bytes]],
        sessions: Sessions,
        notify: Callable[[int, Message], None],
        endpoint: Callable[[int], str],
        buffers: BufferPool,
        secured: bool,
    ) -> None:
        self._name = name
        self._incarnation = incarnation
        self._context = context
        self._sessions = sessions
        self._notify = notify
        self._endpoint = endpoint
        self._buffers = buffers
        self._secured = secured
        self._lock = threading.Lock()  # guards all below; sending to a channel has the channel's lock
        self._channels: dict[int, _Opening] = {}
        self._closed = False

    def to(self, peer: int, size: int, may_wait: Callable[[], bool]) -> ChannelSocket | None:
        """Returns the channel to ``peer`` for a message of ``size`` bytes; None: use the main one."""
        if size < MIN_SEALED_BYTES:
            return None
        opening = self._channels.get(peer) or self._open(peer)
        if opening is None or opening.failed:
            return None
        if not opening.is_connected() and (opening.slow or not may_wait() or not self._wait(opening)):
            return None
        socket = opening.socket
        if socket is not None and socket.cipher.sealed >= RENEW_AFTER_PARTS:
            self._renew(peer, opening)
        return socket

    def _wait(self, opening: _Opening) -> bool:
        deadline = Deadline.after(CONNECT_SECONDS)
        if opening.replied.wait_done(CONNECT_SECONDS) and opening.socket is not None:
            opening.socket.connected.wait_done(deadline.timeout())
        if not opening.failed and not opening.is_connected():
            opening.slow = True
            logger.warning(
                "%s: a channel for large messages was not connected within %.1f s; until it is, they "
                "share the connection of the others: these wait, and with a secret CURVE is slower",
                self._name,
                CONNECT_SECONDS,
            )
        return opening.is_connected()

    def _open(self, peer: int) -> _Opening | None:
        with self._lock:
            if self._closed:
                return None
            if peer in self._channels:
                return self._channels[peer]
            opening = self._channels[peer] = self._new_opening()
        self._notify(peer, BulkOpen(opening.number, opening.key))
        return opening

    def _new_opening(self) -> _Opening:
        return _Opening(generate_key() if self._secured else b"")

    def _renew(self, peer: int, opening: _Opening) -> None:
        """Opens another channel, with another key. This one stays until that is replaced, too."""
        with self._lock:
            if self._channels.get(peer) is not opening:
                return
            self._channels[peer] = renewed = self._new_opening()
            older, opening.previous = opening.previous, None
            renewed.previous = opening
        if older is not None:
            self._end(older, 0)
        self._notify(peer, BulkOpen(renewed.number, renewed.key))

    def on_ready(self, peer: int, incarnation: int, message: BulkReady) -> None:
        """Handles the reply of ``peer`` to BULK_OPEN: connects the channel."""
        with self._lock:
            opening = self._channels.get(peer)
            if opening is None or opening.number != message.channel or opening.socket is not None:
                return  # outdated
        endpoint = bulk_endpoint(self._endpoint(peer), message.port) if message.port else ""
        if not endpoint:
            opening.failed = True
            logger.info("%s: no channel for sealed data to worker %d: %s", self._name, peer, message.why)
        else:
            self._connect(peer, opening, endpoint, incarnation, message.token)
        opening.replied.set_result(None)

    def _connect(self, peer: int, opening: _Opening, endpoint: str, incarnation: int, token: bytes) -> None:
        def dealer() -> zmq.Socket[bytes]:
            socket = self._context.socket(zmq.DEALER)
            set_up(socket)
            socket.ipv6 = "[" in endpoint
            socket.sndhwm = 0  # credit bounds what is queued
            use_io_thread(socket, bulk=True)
            if self._secured:
                password_client(socket, token)
            return socket

        cipher: Cipher | NullCipher = NullCipher(opening.number)
        if self._secured:
            cipher = Cipher(opening.key, opening.number, self._incarnation, incarnation)
        try:
            socket = ChannelSocket(self._name, endpoint, cipher, dealer, self._sessions.hooks)
        except zmq.ZMQError as e:
            opening.failed = True
            logger.warning("%s cannot open a channel to %s: %s", self._name, endpoint, e)
            return
        with self._lock:
            if self._channels.get(peer) is opening and not self._closed:
                opening.socket = socket
                self._sessions.add_channel(socket)
                return
        with socket.lock:  # forgotten meanwhile
            socket.close(0)

    def send(
        self,
        socket: ChannelSocket,
        parts: Sequence[tuple[bytearray, memoryview]],
        first: bytearray,
        frames: Sequence[Buffer],
    ) -> None:
        """Seals and sends a message, after its chunks ``parts``. The lock is free between them.

        Raises:
            ClosedError, ProtocolError: as :meth:`ChannelSocket.seal_and_send`.
        """
        messages: list[Sequence[Buffer]] = [*parts, (first, *frames)]
        memory_size = socket.cipher.memory_size
        left = sum(map(memory_size, messages))
        memory = memoryview(b"")
        for message in messages:
            size = memory_size(message)
            if size > len(memory):
                memory = self._buffers.empty(max(size, min(left, BLOCK_BYTES)))
            with socket.lock:
                socket.seal_and_send(message, memory[:size], MONOTONIC.now())
            if socket.outgoing.due < self._sessions.armed_at:
                self._sessions.arm(socket.outgoing.due)
            memory, left = memory[size:], left - size

    def on_ack(self, peer: int, message: BulkAck) -> None:
        """Handles an acknowledgement. Does not wait for a thread that sends: that one will apply it."""
        opening = self._channels.get(peer)
        if opening is not None and opening.number != message.channel:
            opening = opening.previous
        if opening is None or opening.number != message.channel or opening.socket is None:
            return
        socket = opening.socket
        if message.sequence > socket.peer_acknowledged:
            socket.peer_acknowledged = message.sequence
        if socket.lock.acquire(blocking=False):
            try:
                socket.apply_ack(MONOTONIC.now())
            finally:
                socket.lock.release()

    def unacknowledged(self, peer: int) -> int:
        """Returns the bytes that were sent to ``peer`` and have perhaps not arrived."""
        opening, size = self._channels.get(peer), 0
        while opening is not None:
            size += 0 if opening.socket is None else opening.socket.outgoing.size
            opening = opening.previous
        return size

    def forget(self, peer: int) -> None:
        """Closes the channel to ``peer``; what has not arrived is lost. The next message opens another."""
        with self._lock:
            opening = self._channels.pop(peer, None)
        if opening is not None:
            self._end(opening, 0)

    def _end(self, opening: _Opening, linger: int) -> None:
        opening.failed = True
        opening.replied.set_result(None)
        if opening.previous is not None:
            self._end(opening.previous, linger)
        if opening.socket is not None:
            self._sessions.remove_channel(opening.socket)
            with opening.socket.lock:
                opening.socket.close(linger)
            opening.socket.connected.set_result(None)

    def close(self, linger: int) -> None:
        """Closes all channels; what libzmq has queued may take ``linger`` ms to leave. Idempotent."""
        with self._lock:
            self._closed = True
            openings, self._channels = list(self._channels.values()), {}
        for opening in openings:
            self._end(opening, linger)

    def statistics(self) -> dict[str, Any]:
        """Returns the number of connected channels, and what they have sealed."""
        sockets = [o.socket for o in list(self._channels.values()) if o.socket is not None]
        return {
            "channels": sum(socket.connected.done() for socket in sockets),
            "sealed": sum(socket.cipher.sealed for socket in sockets),
        }


def bulk_endpoint(endpoint: str, port: int) -> str:
    """Returns the endpoint at ``port`` of the host of ``endpoint``; "" if that is not tcp."""
    return f"{endpoint.rpartition(':')[0]}:{port}" if endpoint.startswith("tcp:") else ""
