"""Publishes notifications: the server's half of the watch channel, an XPUB in the server's thread.

Topics are matched by prefix, and a subscriber that reconnects sends its topics in sorted order. A client
subscribes last to a *nonce*, a topic that sorts behind all others: once the server sees it, all subscriptions
that the client made before are in place.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

import zmq

from zmqgrad.runtime.clock import monotonic_ns
from zmqgrad.transport import local
from zmqgrad.transport import tap as tapping
from zmqgrad.transport.query.sockets import set_up_query_socket
from zmqgrad.transport.reader import BURST, Reader
from zmqgrad.transport.security import Keys, secure_server
from zmqgrad.transport.sockets import NOBLOCK, NOBLOCK_MORE, connection_fd, get_int
from zmqgrad.transport.tap import Identity, Tracer
from zmqgrad.transport.tcp_listener import TcpListener
from zmqgrad.wire.codec import encode
from zmqgrad.wire.messages import Message

logger = logging.getLogger(__name__)

NONCE = b"\xff"
"""Prefix of the topics of nonces. No other topic has it: UTF-8 has no such byte."""

MAX_SUBSCRIPTION_BYTES = 4096
"""Size limit of what subscribers send; longer topics end the connection. libzmq needs some 50 times as much
memory for a topic, and no topic of a store has more than some 260 bytes."""

PUBLISHER_DESCRIPTORS = 9
"""That must be free where a publisher is opened."""

MAX_NONCES = 100_000
"""How many nonces are remembered; a client unsubscribes from each after use."""


class Publisher:
    """An XPUB at a tcp port. Used by the server's thread alone.

    Not at an ipc endpoint: there, libzmq aborts the process if it has no descriptor left for a connection.

    Args:
        context: of the server; with ``keys`` it has an authenticator.
        incarnation: of the server.
        address: tcp address to listen on; port ``*`` lets the system choose one.
        on_nonce: called with each nonce that a client subscribes to.
        reader: that of the server.

    Raises:
        AddressInUseError, ConfigurationError, TransportError: as
            :class:`~zmqgrad.transport.tcp_listener.TcpListener`.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        incarnation: int,
        address: str,
        keys: Keys | None,
        on_nonce: Callable[[str], None],
        reader: Reader,
    ) -> None:
        self.published = 0
        """How many notifications were published."""
        self._incarnation = incarnation
        self._on_nonce = on_nonce
        self._reader = reader
        self._nonces: OrderedDict[str, None] = OrderedDict()
        local.check_can_open(PUBLISHER_DESCRIPTORS, "a publisher cannot be opened")
        self._socket = context.socket(zmq.XPUB)
        self._unread = True  # the descriptor does not report again what it has reported
        try:
            set_up_query_socket(self._socket)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_SUBSCRIPTION_BYTES)
            if keys is not None:
                secure_server(self._socket, keys)
            secured = keys is not None and keys.from_secret
            self._listener = TcpListener(self._socket, address, reader, secured=secured)
        except BaseException:
            self._socket.close(linger=0)
            raise
        self.endpoint = self._listener.endpoint
        self.port = self._listener.port
        reader.watch(get_int(self._socket, zmq.FD), self.read)
        self.tracer: Tracer | None = None
        tapping.register(self)

    def identity(self) -> Identity:
        """As :class:`~zmqgrad.transport.tap.Traced`."""
        return Identity(tapping.STORE_SERVER, "publisher", 0, self._incarnation, address=self.endpoint)

    def publish(self, topic: bytes, message: Message) -> None:
        """Publishes ``message`` under ``topic``. Slow subscribers may miss it."""
        self.published += 1
        self._unread = True
        self._socket.send(topic, NOBLOCK_MORE)
        data = encode(message, 0, self._incarnation, 0)
        if self.tracer is not None:
            revision: int = getattr(message, "revision", 0)
            envelope = (message.TYPE, 0, self._incarnation, revision, 0, 0, 0, 0)
            self.tracer.tap(True, 0, envelope, message, len(data), monotonic_ns())
        self._socket.send(data, NOBLOCK)

    def read(self) -> None:
        """Reads subscriptions: some of them now, if there are many."""
        self._unread = False
        try:
            for _ in range(BURST):
                frame = self._socket.recv(NOBLOCK, copy=False)
                event = frame.bytes
                self._listener.hear(connection_fd(frame))
                if event[1:2] == NONCE:
                    self._on_nonce_topic(event[2:], subscribed=event[0] == 1)
            self._reader.call_again(self.read)
        except zmq.Again:
            return

    def read_if_unread(self) -> None:
        """As :meth:`read`, if there may be subscriptions that the descriptor does not report."""
        if self._unread:
            self.read()

    def _on_nonce_topic(self, topic: bytes, subscribed: bool) -> None:
        try:
            nonce = topic.decode()
        except UnicodeDecodeError:
            return  # not from a client of ours
        if not subscribed:
            self._nonces.pop(nonce, None)
            return
        self._nonces[nonce] = None
        if len(self._nonces) > MAX_NONCES:
            self._nonces.popitem(last=False)
        self._on_nonce(nonce)

    def has_seen(self, nonce: str) -> bool:
        """Returns whether a client is subscribed to ``nonce``."""
        return nonce in self._nonces

    def close(self) -> None:
        """Closes the socket. Idempotent."""
        tapping.unregister(self)
        self._socket.close(linger=0)
