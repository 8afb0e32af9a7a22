"""What kind of server listens at a TCP address: one of zmqgrad or torch, a web server, or an unknown one.

A client of the wrong kind often waits for its whole timeout, because neither side understands the other. A
:class:`Probe` only listens for a greeting, and optionally sends a request that a server of one kind answers.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
from enum import Enum

from zmqgrad.rendezvous.port_mapper import GREETING, NONCE, PortMapperClient
from zmqgrad.runtime.backoff import Backoff
from zmqgrad.runtime.clock import MONOTONIC, Deadline
from zmqgrad.runtime.wait_log import WaitLog

logger = logging.getLogger(__name__)

ZMTP_SIGNATURE = 0xFF
"""First byte of the greeting that a ZeroMQ socket sends to each new connection (RFC 23)."""

CONNECT_TIMEOUT_SECONDS = 5.0
"""How long one attempt to connect may take: a host that is starting drops earlier packets."""

_POLL_SECONDS = (0.002, 0.05)
_SHORTEST_SECONDS = 0.01


class Server(Enum):
    """A kind of server."""

    ZEROMQ = "a ZeroMQ socket (a store of zmqgrad, or another program)"
    HTTP = "a web server (HTTP)"
    TORCH = "a store of torch"
    PORT_MAPPER = "rank 0 of a group of zmqgrad"
    OTHER = "a server that is neither a store of torch nor of zmqgrad"


HTTP_REQUEST = b"GET / HTTP/1.0\r\n\r\n"
"""Servers of other protocols refuse it."""


class Probe:
    """A connection to a server whose kind is unknown. Use it in a ``with`` statement.

    Args:
        host, port: where the server listens.
        deadline: how long to retry while nothing listens there. Its host may start later, and only then
            have a name, or this host a route to it.

    Attributes:
        connect_seconds: how long connecting took: about one round trip.

    Raises:
        OSError: of the last attempt, if nothing listens there by ``deadline``.
    """

    def __init__(self, host: str, port: int, deadline: Deadline) -> None:
        self._socket, self.connect_seconds = _connect(host, port, deadline)

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def identify(self, seconds: float, request: bytes = b"") -> Server | None:
        """Wait at most ``seconds`` for the server to identify itself.

        Args:
            seconds: how long to wait.
            request: send this first: :data:`HTTP_REQUEST`, or that of a
                :mod:`~zmqgrad.rendezvous.port_mapper`, to which stores of torch reply, too.

        Returns:
            The kind of server. None if it sent nothing, or closed the connection.
        """
        try:
            self._socket.sendall(request)
            if not select.select([self._socket], [], [], seconds)[0]:
                return None
            reply = self._socket.recv(len(GREETING), socket.MSG_PEEK)
        except OSError:  # reset: torch's store does this to what is not its protocol
            return None
        if not reply:
            return None
        if reply[0] == ZMTP_SIGNATURE:
            return Server.ZEROMQ
        if reply == NONCE:
            return Server.TORCH
        if reply == GREETING:
            return Server.PORT_MAPPER
        return Server.HTTP if reply.startswith(b"HTTP/") else Server.OTHER

    def connect_port_mapper(self) -> PortMapperClient:
        """The connection, for the port mapper that the server is. This probe no longer closes it."""
        connection, self._socket = self._socket, socket.socket()
        return PortMapperClient(connection)


def _connect(host: str, port: int, deadline: Deadline) -> tuple[socket.socket, float]:
    backoff, pause, log = Backoff(*_POLL_SECONDS), threading.Event(), WaitLog(logger)
    while True:
        began = MONOTONIC.now()
        try:
            found = socket.create_connection(
                (host, port), min(CONNECT_TIMEOUT_SECONDS, max(_SHORTEST_SECONDS, deadline.left()))
            )
            if _leads_elsewhere(found):
                return found, MONOTONIC.now() - began
            found.close()
            seen = "nothing accepts connections"
        except OSError as e:
            if deadline.passed():
                raise
            seen = e.strerror or str(e)
        log.warning("waiting for %s:%d, where rank 0 should listen: %s", host, port, seen)
        pause.wait(backoff.pause(deadline.left()))  # a refused connection leaves nothing to wait for


def _leads_elsewhere(connection: socket.socket) -> bool:
    """Whether a connection does not lead to itself: TCP connects a socket so at its own port.

    Raises:
        ConnectionError: if it has ended already.
    """
    try:
        return bool(connection.getsockname() != connection.getpeername())
    except OSError as e:
        connection.close()
        raise ConnectionResetError(*e.args) from e
