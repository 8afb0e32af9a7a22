"""A DEALER that is connected to the server, and the outcome of its handshakes."""

from __future__ import annotations

import math
import secrets
import select
from contextlib import suppress
from typing import NamedTuple

import zmq

from zmqgrad import environment
from zmqgrad.errors import AuthenticationError, TransportError
from zmqgrad.transport.heartbeat.failure_detector import REFUSED_SECONDS, is_on_this_host
from zmqgrad.transport.local.handshake import ANY
from zmqgrad.transport.query.pending import PING_ID, REPEAT_SECONDS
from zmqgrad.transport.query.sockets import close_client_socket, open_client_socket, speaks_curve
from zmqgrad.transport.security import Keys, store_endpoint
from zmqgrad.transport.sockets import (
    CONNECTED,
    DISCONNECTED,
    HANDSHAKE_CUT,
    HANDSHAKE_DENIED,
    HANDSHAKE_FAILED,
    HANDSHAKE_MALFORMED,
    MECHANISM_MISMATCH,
    NOBLOCK,
    SocketMonitor,
    get_int,
    joined,
    send_split,
)
from zmqgrad.wire.codec import COPY_LIMIT_BYTES, encode
from zmqgrad.wire.messages import StorePing

MAX_CUT_HANDSHAKES = 3
"""After this many handshakes in a row that the server cut off, test whether it has another secret."""

MAX_LOOK_SECONDS = 2 * REPEAT_SECONDS[-1]
"""How much time there may be between two refused connections without an accepted one."""


class LocalAddress(NamedTuple):
    """The server's endpoint of the fast path, and its incarnation."""

    incarnation: int
    endpoint: str


class ServerInfo:
    """What the channels of one client know about their server. Updated by any of their threads."""

    def __init__(self, address: str, keys: Keys | None) -> None:
        self.address = address
        self.keys = keys
        known = store_endpoint(keys, address)
        self.local: LocalAddress | None = LocalAddress(ANY, known) if known else None
        """Where the fast path connects; None if that is unknown, or does not work."""
        self.was_connected = False
        """Whether any handshake has ever succeeded, so the secret is right."""
        self.restarts = True
        """Whether queries wait for another server at the address once it has ended."""
        self.ended = ""
        """How it is known that it has ended, and that none follows."""
        self.refused_seconds = 0.0 if is_on_this_host(address) else REFUSED_SECONDS
        """For how long it must refuse connections to have ended."""
        self._refused_at = self._looked_at = -math.inf

    def refused(self, now: float) -> float:
        """Records a refused connection. Returns for how many seconds all of them were refused."""
        if now - self._looked_at > MAX_LOOK_SECONDS:
            self._refused_at = now  # what was before is unknown
        self._looked_at = now
        return now - self._refused_at

    def accepted(self) -> None:
        """Records an accepted connection."""
        self._looked_at = -math.inf


class DealerConnection:
    """A DEALER and its monitor, registered with ``poll``. Used by one thread at a time.

    Args:
        client: the id of the channel, which its pings carry.

    Raises:
        TransportError: if the system has no socket left, or the address is malformed.
    """

    def __init__(self, server: ServerInfo, poll: select.poll, client: int) -> None:
        self.connected = False
        self.refused = False
        """Whether the server has ended the connection for good, so that nothing can be sent."""
        self.trouble = ""
        """The last problem, for error messages."""
        self._server = server
        self._poll = poll
        self._client = client
        self._interrupted = False  # the connection broke: what was sent may be lost
        self._cut_handshakes = 0  # in a row
        self._monitor: SocketMonitor | None = None
        self._socket = open_client_socket(zmq.DEALER, server.address, server.keys)
        try:
            self.fd = get_int(self._socket, zmq.FD)
            self._monitor = SocketMonitor(self._socket, CONNECTED | DISCONNECTED | HANDSHAKE_FAILED)
            poll.register(self.fd, select.POLLIN)
            poll.register(self._monitor.fd, select.POLLIN)
            self._socket.connect(server.address)
            self.ping()
        except BaseException as e:
            self.close()
            if isinstance(e, zmq.ZMQError):
                raise TransportError(f"cannot connect to {server.address}: {e}") from e
            raise

    def send(self, packet: bytearray) -> None:
        """Queues ``packet``, which leaves as soon as there is a connection."""
        try:
            send_split(self._socket, packet)
        except zmq.Again:  # a handshake failed so soon; the monitor reports why
            self.refused = True

    def ping(self) -> None:
        """Requests a PONG, which shows that the server responds and where its fast path is."""
        self.send(encode(StorePing(secrets.token_hex(8)), 0, self._client, PING_ID))

    def receive(self) -> bytes | memoryview | None:
        """Returns the next message. Must be called until it returns None before ``fd`` is polled again."""
        try:
            frames = self._socket.recv_multipart(NOBLOCK, copy=False)
        except zmq.Again:
            return None
        if len(frames) != 1:
            return joined(frames)
        frame = frames[0]
        return frame.bytes if len(frame) <= COPY_LIMIT_BYTES else frame.buffer

    def read_events(self) -> bool:
        """Handles the events of the monitor.

        Returns:
            Whether the connection was re-established, so that what was sent before may be lost.

        Raises:
            AuthenticationError: if handshakes fail, and will go on failing.
        """
        reconnected = False
        assert self._monitor is not None
        for kind, value in self._monitor.read():
            if kind == CONNECTED:
                self.connected = self._server.was_connected = True
                self._server.accepted()
                self._cut_handshakes = 0
                reconnected, self._interrupted = reconnected or self._interrupted, False
            elif kind != DISCONNECTED:
                self._on_handshake_failed(kind, value)
            elif self.connected:
                self.trouble = "it closes connections"
                self.connected, self._interrupted = False, True
        return reconnected

    def _on_handshake_failed(self, kind: int, value: int) -> None:
        server = self._server
        if kind == HANDSHAKE_DENIED or (kind == HANDSHAKE_MALFORMED and value == MECHANISM_MISMATCH):
            raise AuthenticationError(_describe(server, mechanism=kind == HANDSHAKE_MALFORMED))
        self.trouble = "connections are cut off during the handshake: is it a store?"
        if kind != HANDSHAKE_CUT or server.keys is None or server.was_connected:
            return
        self._cut_handshakes += 1
        if self._cut_handshakes >= MAX_CUT_HANDSHAKES:
            self.check_secret()

    def check_secret(self) -> None:
        """Tests whether the server has another secret, if it has cut off a handshake since the last test.

        Raises:
            AuthenticationError: if it has.
        """
        cuts, self._cut_handshakes = self._cut_handshakes, 0
        if cuts and speaks_curve(self._server.address):
            raise AuthenticationError(_describe(self._server, mechanism=False))

    def close(self) -> None:
        """Closes the socket. Idempotent."""
        if self._monitor is not None:
            for fd in (self._monitor.fd, self.fd):
                with suppress(KeyError):  # Ctrl-C may have come before, or in the last call
                    self._poll.unregister(fd)
            self._monitor.close()
            self._monitor = None
        close_client_socket(self._socket)


def _describe(server: ServerInfo, *, mechanism: bool) -> str:
    """Says what differs at the two ends; ``mechanism``: one end encrypts, and the other does not."""
    if server.keys is None:
        return "the other end wants a secret, and there is none here"
    if server.keys.from_secret:
        return (
            "the other end has no secret, or another one" if mechanism else "the other end has another secret"
        )
    if mechanism:
        return (
            f"the other end authenticates nobody: it has no secret, but {environment.ALLOW_INSECURE}=1, "
            f"which is not set here"
        )
    return "the other end wants a secret, and there is none here; or it belongs to another user of this host"
