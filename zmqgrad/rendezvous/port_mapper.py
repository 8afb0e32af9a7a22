"""The port mapper: tells at a known port where the stores are of the groups that meet there.

As that of `RFC 1833 <https://www.rfc-editor.org/rfc/rfc1833>`_, it authenticates nobody, because it tells
nothing but numbers of ports, which anybody on the host can list: a forged one leads to a store that fails the
handshake. In return it stores nothing for anybody, and limits connections
(:mod:`~zmqgrad.transport.strangers`).

A client sends :data:`REQUEST`. A store of torch, which may listen at the same port, replies to it with its
last bytes; a port mapper with lines: :data:`GREETING`, and ``key=value`` for all that is published, now or
later. It sends nothing first, and nothing to clients of torch: they wait until it ends, and connect again.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterable, Iterator

from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.forks import in_forks
from zmqgrad.runtime.polling import READ
from zmqgrad.runtime.service_thread import ServiceThread
from zmqgrad.transport.strangers import Strangers

logger = logging.getLogger(__name__)

NONCE = b"zgpm"
"""More than any process number, which clients of torch send."""

_HANDSHAKE = b"\x00\xce\xf7\x85\x3c\x0d"
"""How clients of torch's store begin: the queries VALIDATE, with a magic number, and PING."""

REQUEST = _HANDSHAKE + NONCE

GREETING = b"zmqgrad ports\n"

MAX_CONNECTIONS = 512
"""Open connections; beyond that, the oldest of the host with the most is closed."""

PAUSE_SECONDS = 1.0
"""How long nothing is accepted after the process ran out of file descriptors."""

CLOSE_SECONDS = 10.0
"""Time limit of closing, which normally takes less than a millisecond."""

_MAX_LINE = 4096


class PortMapper:
    """Serves at a socket that listens, from :meth:`start` on; takes ownership of it."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._received: dict[socket.socket, bytes] = {}  # by the service thread only, as the next one
        self._clients: set[socket.socket] = set()  # those that have sent REQUEST
        self._lock = threading.Lock()  # guards _lines
        self._lines: dict[str, str] = {}
        self._service = ServiceThread("zmqgrad-port-mapper")
        self._strangers = Strangers(MAX_CONNECTIONS, self._service.call_later)
        listening.setblocking(False)
        in_forks(self, PortMapper._close_sockets)

    def start(self) -> None:
        """Begin to serve. Not by the constructor: Ctrl-C may come before its caller can close this."""
        self._service.start()
        self._listen()

    def _listen(self) -> None:
        self._service.watch(self._listening.fileno(), READ, lambda _: self._accept())

    def publish(self, key: str, value: str) -> None:
        """Tell ``value`` to all clients, now and later."""
        with self._lock:
            self._lines[key] = value
        self._service.call_soon(lambda: self._tell_clients(f"{key}={value}\n".encode()))

    def withdraw(self, keys: Iterable[str]) -> None:
        """Forget ``keys``."""
        with self._lock:
            for key in keys:
                self._lines.pop(key, None)

    def published(self) -> dict[str, str]:
        """All that is published."""
        with self._lock:
            return dict(self._lines)

    # ---- the service thread -----------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            client, address = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has closed the connection again
            return
        except OSError as e:
            logger.warning("the port mapper cannot accept connections: %s", e)
            self._service.unwatch(self._listening.fileno())
            self._service.call_later(PAUSE_SECONDS, self._listen)
            return
        client.setblocking(False)
        self._received[client] = b""
        surplus = self._strangers.add(client, address[0])
        self._service.watch(client.fileno(), READ, lambda _: self._read(client))
        if surplus is not None:
            self._read(surplus)  # what it has sent may wait behind the connections of others
            self._disconnect(surplus)

    def _read(self, client: socket.socket) -> None:
        if client not in self._received:
            return  # disconnected a moment ago
        try:
            data = client.recv(len(REQUEST))
        except BlockingIOError:
            return
        except OSError:
            data = b""  # the connection broke
        received = self._received[client] = self._received[client] + data
        if not data or len(received) > len(REQUEST) or not received.startswith(_HANDSHAKE[: len(received)]):
            self._disconnect(client)
        elif received == REQUEST:
            self._clients.add(client)
            lines = "".join(f"{key}={value}\n" for key, value in self.published().items())
            self._send(client, GREETING + lines.encode())

    def _tell_clients(self, line: bytes) -> None:
        for client in list(self._clients):
            self._send(client, line)

    def _send(self, client: socket.socket, data: bytes) -> None:
        try:
            sent = client.send(data)
        except OSError:
            sent = -1
        if sent != len(data):  # it does not read
            self._disconnect(client)

    def _disconnect(self, client: socket.socket) -> None:
        self._service.unwatch(client.fileno())
        if self._received.pop(client, None) is not None:
            self._clients.discard(client)
            self._strangers.remove(client)
            client.close()

    # ---- the end ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the port and all connections. Idempotent."""
        self._service.close()
        self._service.join(Deadline.after(CLOSE_SECONDS))
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._listening.close()
        for client in self._received:
            client.close()


class PortMapperClient:
    """A connection to a port mapper, which has replied to :data:`REQUEST`. Close it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = b""  # less than a line

    def read(self, key: str, deadline: Deadline) -> str | None:
        """Wait for the value of ``key``. None if the connection ends first, or ``deadline`` passes."""
        for line in self._read_lines(deadline):
            name, _, value = line.decode(errors="replace").strip().rpartition("=")
            if name == key:
                return value
        return None

    def wait_closed(self, deadline: Deadline) -> None:
        """Return when the connection has ended, or after ``deadline``."""
        for _ in self._read_lines(deadline):
            pass

    def _read_lines(self, deadline: Deadline) -> Iterator[bytes]:
        try:
            while not deadline.passed():
                line, newline, rest = self._received.partition(b"\n")
                if newline:
                    self._received = rest
                    yield line
                    continue
                timeout = deadline.timeout()
                self._connection.settimeout(None if timeout is None else max(0.001, timeout))
                data = self._connection.recv(_MAX_LINE)
                if not data or len(line) > _MAX_LINE:
                    return
                self._received += data
        except OSError:
            return  # reset, or timed out

    def close(self) -> None:
        """Disconnect."""
        self._connection.close()
