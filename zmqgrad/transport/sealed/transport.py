"""The channels of a mailbox: one to each peer, opened with the first message that needs one.

Any thread sends. The key of a channel is told to the peer over the main connection (CURVE, with a secret);
until the peer has replied and the channel is connected, the caller gets none and sends over the main one. A
thread that may wait does so once, for a short time. With a secret but without ``cryptography``, no message
uses a channel. :mod:`~zmqgrad.transport.sealed.receiver` is the receiving half.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import zmq

from zmqgrad.errors import ClosedError
from zmqgrad.runtime.clock import MONOTONIC
from zmqgrad.runtime.future import Promise
from zmqgrad.transport.base import Buffer, Frame, Inbound
from zmqgrad.transport.bulk import Reassembler
from zmqgrad.transport.sealed.receiver import ChannelReceiver
from zmqgrad.transport.sealed.records import AVAILABLE, Cipher, NullCipher, generate_key
from zmqgrad.transport.security import ZapAuthenticator, password_client
from zmqgrad.transport.session_socket import SessionSocket
from zmqgrad.transport.sessions import Sessions
from zmqgrad.transport.sockets import send_all, set_up, use_io_thread
from zmqgrad.wire.messages import BulkAck, BulkOpen, BulkReady, MessageType

logger = logging.getLogger(__name__)

SEALED_TYPES = frozenset({MessageType.BULK_OPEN, MessageType.BULK_READY, MessageType.BULK_ACK})
"""Messages between sealed transports, which are not passed to the handler. They contain keys."""

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
        endpoint: str,
        cipher: Cipher | NullCipher,
        make_socket: Callable[[], zmq.Socket[bytes]],
        sessions: Sessions,
        on_connected: Callable[[], object],
    ) -> None:
        self.cipher = cipher
        self._on_connected = on_connected
        self._closed = False
        super().__init__(endpoint, 0, threading.RLock(), make_socket, sessions)

    def seal_and_send(self, frames: Sequence[Buffer], memory: memoryview, now: float) -> None:
        """Seals a message into ``memory`` and sends it. Sealed frames may be modified afterwards.

        Raises:
            ClosedError: if the channel was closed.
            ProtocolError: as :meth:`Cipher.seal`.
        """
        if self._closed:
            raise ClosedError(f"{self._sessions.name}: the connection to {self._endpoint} was dropped")
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
            self._on_connected()

    def close(self, linger: int) -> None:
        """As :class:`SessionSocket`; nothing can be sent any more."""
        self._closed = True
        super().close(linger)


@dataclass(eq=False, slots=True)
class _Channel:
    """A channel of which the peer was told. It is ``settled`` once it is connected, or has ``failed``."""

    key: bytes
    previous: _Channel | None = None  # the channel that this one replaced
    number: int = field(default_factory=partial(secrets.randbits, 63))
    settled: Promise[None] = field(default_factory=Promise)
    socket: ChannelSocket | None = None
    failed: bool = False  # the peer has no such port, or was forgotten
    slow: bool = False  # a message waited in vain: no other does

    def is_connected(self) -> bool:
        return self.settled.done() and not self.failed

    def fail(self) -> None:
        self.failed = True
        self.settled.set_result(None)


class SealedTransport:
    """Sends and receives large messages in records, which are sealed if the job has a secret.

    Args:
        host: address that the mailbox listens on by tcp; None: it does not.
        secured: whether the job has a secret.
        zap: authenticator of ``context``; None if the job has no secret, or the mailbox does not listen.
        sessions: of the mailbox; handles timeouts.
        reassembler: of the mailbox; provides memory for sealed records, too.
        notify: sends a small message over CURVE, and does not raise because of the peer.
        pass_on: called with the frames of each message that arrives, in the receiving thread.
        endpoint: returns the endpoint in use to a peer.
        may_wait: returns whether the calling thread may wait for messages.
        end: ends the link to a peer, for a reason.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str | None,
        secured: bool,
        zap: ZapAuthenticator | None,
        sessions: Sessions,
        reassembler: Reassembler,
        notify: Callable[..., None],
        pass_on: Callable[[bytes, Sequence[Buffer]], None],
        endpoint: Callable[[int], str],
        may_wait: Callable[[], bool],
        end: Callable[[int, str], None],
    ) -> None:
        self._context = context
        self._sessions = sessions
        self._notify = notify
        self._endpoint = endpoint
        self._may_wait = may_wait
        self._buffers = reassembler.buffers
        self._secured = secured
        self._receiver = ChannelReceiver(context, host, zap, pass_on, reassembler, notify, sessions, end)
        self.end, self.join = self._receiver.end, self._receiver.join
        self._lock = threading.RLock()  # guards all below; sending to a channel has the channel's lock
        self._channels: dict[int, _Channel] = {}
        self._closed = False

    def to(self, peer: int, frames: Sequence[Frame]) -> ChannelSocket | None:
        """Returns the channel for a message with ``frames`` to ``peer``; None if it must not use one."""
        if sum(map(len, frames)) < MIN_SEALED_BYTES:
            return None
        if self._secured and not AVAILABLE:
            _log_unavailable()
            return None
        channel = self._channels.get(peer) or self._open(peer)
        if channel is None or channel.failed:
            return None
        if not channel.is_connected() and (channel.slow or not self._may_wait() or not self._wait(channel)):
            return None
        socket = channel.socket
        if socket is not None and socket.cipher.is_used_up:
            self._renew(peer, channel)
        return socket

    def _wait(self, channel: _Channel) -> bool:
        if not channel.settled.wait_done(CONNECT_SECONDS):
            with self._lock:
                known, channel.slow = channel.slow, True
            if not known:
                logger.warning(
                    "%s: a channel for large messages was not connected within %.1f s; until it is, they "
                    "share the connection of the others: these wait, and with a secret CURVE is slower",
                    self._sessions.name,
                    CONNECT_SECONDS,
                )
        return channel.is_connected()

    def _open(self, peer: int) -> _Channel | None:
        with self._lock:
            if self._closed:
                return None
            if peer in self._channels:
                return self._channels[peer]
            channel = self._channels[peer] = self._new_channel()
        self._notify(peer, BulkOpen(channel.number, channel.key))
        return channel

    def _new_channel(self, previous: _Channel | None = None) -> _Channel:
        return _Channel(generate_key() if self._secured else b"", previous)

    def _renew(self, peer: int, channel: _Channel) -> None:
        """Opens another channel, with another key. This one stays until that is replaced, too."""
        with self._lock:
            if self._channels.get(peer) is not channel:
                return
            self._channels[peer] = renewed = self._new_channel(channel)
            older, channel.previous = channel.previous, None
        if older is not None:
            self._end(older, 0)
        self._notify(peer, BulkOpen(renewed.number, renewed.key))

    def on_message(self, inbound: Inbound) -> None:
        """Handles one of the messages in ``SEALED_TYPES``."""
        envelope, message = inbound.envelope, inbound.message
        if isinstance(message, BulkAck):
            self._on_ack(envelope.source, message)
        elif isinstance(message, BulkOpen):
            self._receiver.on_open(envelope, message)
        elif isinstance(message, BulkReady):
            self._on_ready(envelope.source, envelope.incarnation, message)

    def _on_ready(self, peer: int, incarnation: int, message: BulkReady) -> None:
        """Handles the reply of ``peer`` to BULK_OPEN: connects the channel."""
        with self._lock:
            channel = self._channels.get(peer)
            if channel is None or channel.number != message.channel or channel.socket is not None:
                return  # outdated
        endpoint = bulk_endpoint(self._endpoint(peer), message.port) if message.port else ""
        if endpoint:
            self._connect(peer, channel, endpoint, incarnation, message.token)
        else:
            channel.fail()
            logger.info(
                "%s: no channel for sealed data to worker %d: %s", self._sessions.name, peer, message.why
            )

    def _connect(self, peer: int, channel: _Channel, endpoint: str, incarnation: int, token: bytes) -> None:
        def dealer() -> zmq.Socket[bytes]:
            socket = self._context.socket(zmq.DEALER)
            set_up(socket)
            socket.ipv6 = "[" in endpoint
            socket.sndhwm = 0  # credit bounds what is queued
            use_io_thread(socket, bulk=True)
            if self._secured:
                password_client(socket, token)
            return socket

        cipher: Cipher | NullCipher = NullCipher(channel.number)
        if self._secured:
            cipher = Cipher(channel.key, channel.number, self._sessions.incarnation, incarnation)
        connected = partial(channel.settled.set_result, None)
        try:
            socket = ChannelSocket(endpoint, cipher, dealer, self._sessions, connected)
        except zmq.ZMQError as e:
            channel.fail()
            logger.warning("%s cannot open a channel to %s: %s", self._sessions.name, endpoint, e)
            return
        with self._lock:
            if self._channels.get(peer) is channel and not self._closed:
                channel.socket = socket
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
            self._sessions.alarm.set(socket.outgoing.due)
            memory, left = memory[size:], left - size

    def _on_ack(self, peer: int, message: BulkAck) -> None:
        """Handles an acknowledgement. Does not wait for a thread that sends: that one will apply it."""
        channel = self._channels.get(peer)
        if channel is not None and channel.number != message.channel:
            channel = channel.previous
        if channel is None or channel.number != message.channel or channel.socket is None:
            return
        socket = channel.socket
        if socket.peer_acknowledged < message.sequence < socket.outgoing.next_sequence:
            socket.peer_acknowledged = message.sequence
        if socket.lock.acquire(blocking=False):
            try:
                socket.apply_ack(MONOTONIC.now())
            finally:
                socket.lock.release()

    def unacknowledged(self, peer: int) -> int:
        """Returns the bytes that were sent to ``peer`` and have perhaps not arrived."""
        channel, size = self._channels.get(peer), 0
        while channel is not None:
            size += 0 if channel.socket is None else channel.socket.outgoing.size
            channel = channel.previous
        return size

    def forget(self, peer: int) -> None:
        """Drops the channels from and to ``peer``; what has not arrived is lost."""
        self._receiver.forget(peer)
        with self._lock:
            channel = self._channels.pop(peer, None)
        if channel is not None:
            self._end(channel, 0)

    def _end(self, channel: _Channel, linger: int) -> None:
        channel.fail()
        if channel.previous is not None:
            self._end(channel.previous, linger)
        if channel.socket is not None:
            with channel.socket.lock:
                channel.socket.close(linger)

    def close(self, linger: int) -> None:
        """Closes the channels to all peers; what libzmq has queued may take ``linger`` ms to leave.

        Idempotent. The receiving thread ends with :meth:`ChannelReceiver.join`.
        """
        with self._lock:
            self._closed = True
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            self._end(channel, linger)

    def bytes_in(self) -> int:
        """Returns how many bytes of chunks were received."""
        return self._receiver.bytes_in

    def statistics(self) -> dict[str, Any]:
        """Returns the state of the channels: those connected, parts sealed, records refused."""
        channels = list(self._channels.values())
        return {
            "channels": sum(channel.is_connected() for channel in channels),
            "sealed": sum(channel.socket.cipher.sealed for channel in channels if channel.socket is not None),
            **self._receiver.statistics(),
        }


@lru_cache(maxsize=1)
def _log_unavailable() -> None:
    logger.warning(
        "large messages between hosts are encrypted by CURVE, at about 0.3 GB/s: `pip install "
        "zmqgrad[secure]` installs the package cryptography, which is several times as fast"
    )


def bulk_endpoint(endpoint: str, port: int) -> str:
    """Returns the endpoint at ``port`` of the host of ``endpoint``; "" if that is not tcp."""
    return f"{endpoint.rpartition(':')[0]}:{port}" if endpoint.startswith("tcp:") else ""
