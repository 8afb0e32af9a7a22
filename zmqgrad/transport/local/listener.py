"""Accepts the connections of peers on this host, and reads their packets."""

from __future__ import annotations

import errno
import logging
import select
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from zmqgrad.transport.local.connection import (
    PROTOCOL,
    WELCOME,
    Hello,
    LocalConnection,
    is_same_user,
    unix_name,
)

logger = logging.getLogger(__name__)

ACCEPT_BACKLOG = 1024
"""Connections that may wait to be accepted; the system may allow fewer."""

MAX_CONNECTIONS = 16_384
"""Peers beyond this limit use ZeroMQ."""

BURST_PACKETS = 16
"""Packets read from one connection in a row before others have their turn."""

PROBE_INTERVAL = 4
"""While packets arrive one by one, every 4th read tries a second one, which would announce a burst."""


class Registry(Protocol):
    """Polls file descriptors."""

    def register(self, fd: int, mask: int, /) -> None:
        """Polls ``fd`` for ``mask`` (``select.POLLIN``)."""

    def unregister(self, fd: int, /) -> None:
        """Stops polling ``fd``."""


class LocalListener:
    """Listens at ``endpoint`` (ipc), and reads from all connections. Used by one thread at a time.

    Args:
        endpoint: see :func:`~zmqgrad.transport.local.connection.unix_name`.
        poll: polls the listening socket and the connections for reading.
        job: connections of other jobs are refused.
        incarnation: connections for another process are refused.
        on_backlog: see :class:`LocalConnection`; None: nothing is sent by these connections.
        on_closed: called with a connection that has ended, before it is closed.
        max_connections: further connections are refused.

    Raises:
        OSError: if it cannot listen there.
    """

    def __init__(
        self,
        endpoint: str,
        poll: Registry,
        job: bytes,
        incarnation: int,
        on_backlog: Callable[[LocalConnection], None] | None = None,
        on_closed: Callable[[LocalConnection], None] | None = None,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self.endpoint = endpoint
        self.connections: dict[int, LocalConnection] = {}
        """The accepted connections, by file descriptor."""
        self.bursting = False
        """Whether the last burst had several packets."""
        self._poll = poll
        self._job = job
        self._incarnation = incarnation
        self._on_backlog = on_backlog or _ignore_backlog
        self._on_closed = on_closed
        self._max_connections = max_connections
        self._reads = 0
        self._handshaking: dict[int, socket.socket] = {}  # connected sockets that have not sent a hello
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listening.setblocking(False)
            self._listening.bind(unix_name(endpoint))
            self._listening.listen(ACCEPT_BACKLOG)
        except OSError:
            self._listening.close()
            raise
        poll.register(self._listening.fileno(), select.POLLIN)

    def read(self, fd: int) -> Sequence[bytes]:
        """Returns the packets that arrived at file descriptor ``fd``, which is ready."""
        connection = self.connections.get(fd)
        if connection is None:
            self._handshake(fd)
            return ()
        self._reads += 1
        try:
            packet = connection.receive()
            if not packet:
                self._end(fd, connection)
                return ()
            if not self.bursting and self._reads % PROBE_INTERVAL:
                return (packet,)
        except BlockingIOError:
            return ()
        except OSError as e:
            logger.debug("%s: dropped a connection: %s", self.endpoint, e)
            self._end(fd, connection)
            return ()
        return self._read_burst(fd, connection, packet)

    def _read_burst(self, fd: int, connection: LocalConnection, first: bytes) -> list[bytes]:
        packets = [first]
        try:
            while len(packets) < BURST_PACKETS and (packet := connection.receive()):
                packets.append(packet)
        except BlockingIOError:
            pass
        except OSError as e:  # the next read reports it, too
            logger.debug("%s: a connection is broken: %s", self.endpoint, e)
        self.bursting = len(packets) > 1
        return packets

    def _handshake(self, fd: int) -> None:
        """Handles the listening socket, or the hello of a new connection."""
        new = self._handshaking.get(fd)
        if new is None:
            if fd == self._listening.fileno():
                self._accept()
            return
        try:
            packet = new.recv(4096)
            hello = msgspec.msgpack.decode(packet, type=Hello) if packet else None
        except BlockingIOError:
            return
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as e:
            logger.warning("%s: refused a connection that does not speak zmqgrad: %s", self.endpoint, e)
            hello = None
        del self._handshaking[fd]
        full = len(self.connections) >= self._max_connections
        if hello is None or full or not self._is_for_us(hello) or not _sends(new, WELCOME):
            self._poll.unregister(fd)
            new.close()
            return
        self.connections[fd] = LocalConnection(new, self._on_backlog, ready=True)

    def _is_for_us(self, hello: Hello) -> bool:
        matches = hello == Hello(PROTOCOL, self._job, self._incarnation)
        if not matches:
            logger.warning(
                "%s: refused a connection that was meant for another job or process", self.endpoint
            )
        return matches

    def _accept(self) -> None:
        try:
            accepted, _ = self._listening.accept()
        except OSError as e:
            if e.errno in (errno.EMFILE, errno.ENFILE):
                # A connection left waiting would keep the poll from blocking. Refused, it uses ZeroMQ.
                self._refuse_without_descriptor()
            logger.debug("%s: nothing accepted: %s", self.endpoint, e)
            return
        if not is_same_user(accepted):
            logger.warning("%s: refused a process of another user", self.endpoint)
            accepted.close()
            return
        accepted.setblocking(False)
        self._handshaking[accepted.fileno()] = accepted
        self._poll.register(accepted.fileno(), select.POLLIN)

    def _refuse_without_descriptor(self) -> None:
        """Stops listening, as this process has no descriptor left for a connection."""
        logger.warning("%s: this process has no more file descriptors: peers use ZeroMQ", self.endpoint)
        self._poll.unregister(self._listening.fileno())
        self._listening.close()

    def _end(self, fd: int, connection: LocalConnection) -> None:
        self._poll.unregister(fd)
        del self.connections[fd]
        if self._on_closed is not None:
            self._on_closed(connection)
        connection.close()

    def drop(self, connection: LocalConnection) -> None:
        """Closes ``connection`` unless it has ended."""
        fd = connection.fd
        if self.connections.get(fd) is connection:
            self._end(fd, connection)

    def close(self) -> None:
        """Stops listening and reading. Idempotent."""
        self._listening.close()
        for new in self._handshaking.values():
            new.close()
        for connection in self.connections.values():
            connection.close()
        self._handshaking.clear()
        self.connections.clear()


def _sends(new: socket.socket, packet: bytes) -> bool:
    try:
        new.send(packet)
    except OSError as e:
        logger.debug("a peer left before it was accepted: %s", e)
        return False
    return True


def _ignore_backlog(connection: LocalConnection) -> None:
    """The default of ``on_backlog``: nothing is sent."""
