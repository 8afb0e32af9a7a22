"""Replies to the heartbeats of other workers.

Over tcp, peers do not authenticate here. Their connections may therefore use at most half of the file
descriptors of the process; beyond that, the oldest connection is closed. A worker of the job then connects
again, which is proof of life enough. On one host only processes of the same user are accepted.
"""

from __future__ import annotations

import logging
import resource
import secrets
import socket as sockets
from functools import partial
from typing import Any

from zmqgrad.errors import TransportError
from zmqgrad.runtime.polling import READ
from zmqgrad.runtime.service_thread import ServiceThread
from zmqgrad.transport.bind_policy import bind_in_range, tcp_address
from zmqgrad.transport.heartbeat.protocol import PINGS_AT_ONCE, SCHEME, SUFFIX, TOKEN_SIZE, write
from zmqgrad.transport.local import is_same_user, unix_name

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0
"""How long the listener pauses after the process ran out of file descriptors."""

MAX_PEERS = 1 << 16
"""Maximum number of connections, which is the maximum number of workers."""


class HeartbeatListener:
    """The listening sockets for heartbeats. Created with the mailbox, as its address is published.

    Args:
        ipc_endpoint, tcp_host, advertised: of the mailbox.

    Raises:
        TransportError: if it cannot listen.
    """

    def __init__(self, ipc_endpoint: str | None, tcp_host: str | None, advertised: str | None = None) -> None:
        self.token = secrets.token_bytes(TOKEN_SIZE)
        self.sockets: list[sockets.socket] = []
        self.endpoint: str | None = None
        try:
            if ipc_endpoint is not None:
                self._listen(sockets.AF_UNIX, unix_name(ipc_endpoint + SUFFIX))
            if tcp_host is not None:
                family = sockets.AF_INET6 if ":" in tcp_host else sockets.AF_INET
                listening = bind_in_range(lambda port: self._listen(family, (tcp_host, port)))
                shown = tcp_address(advertised or tcp_host, listening.getsockname()[1])
                self.endpoint = f"{shown.replace('tcp://', SCHEME)}/{self.token.hex()}"
        except (OSError, TransportError) as e:
            self.close()
            raise TransportError(f"cannot listen for heartbeats: {e}") from e

    def _listen(self, family: int, address: Any) -> sockets.socket:
        listening = sockets.socket(family, sockets.SOCK_STREAM)
        try:
            listening.setblocking(False)
            if family != sockets.AF_UNIX:  # ports of connections that have ended are free
                listening.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(1024)
        except OSError:
            listening.close()
            raise
        self.sockets.append(listening)
        return listening

    def close(self) -> None:
        """Closes the listening sockets. Idempotent."""
        for listening in self.sockets:
            listening.close()


class HeartbeatServer:
    """Accepts the connections of peers at ``listener``, and returns their pings, in the service thread."""

    def __init__(self, name: str, listener: HeartbeatListener, service: ServiceThread) -> None:
        self._name = name
        self._listener = listener
        self._service = service
        self._peers: dict[sockets.socket, None] = {}  # oldest first
        self._most = _max_peers()
        self._closed = False

    def start(self) -> None:
        """Starts to accept connections."""
        for listening in self._listener.sockets:
            self._listen(listening)

    def _listen(self, listening: sockets.socket) -> None:
        if not self._closed:
            self._service.watch(listening.fileno(), READ, lambda _: self._accept(listening))

    def _accept(self, listening: sockets.socket) -> None:
        try:
            peer, _ = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the peer has closed it again
            return
        except OSError as e:  # the process has no more file descriptors: peers must wait
            logger.warning("%s cannot accept: %s", self._name, e)
            self._service.unwatch(listening.fileno())
            self._service.call_later(PAUSE_SECONDS, partial(self._listen, listening))
            return
        if peer.family == sockets.AF_UNIX and not is_same_user(peer):
            peer.close()
            return
        if len(self._peers) >= self._most:
            self._disconnect(next(iter(self._peers)))
        peer.setblocking(False)
        self._peers[peer] = None
        self._service.watch(peer.fileno(), READ, lambda _: self._echo(peer))
        write(peer, self._listener.token)

    def _echo(self, peer: sockets.socket) -> None:
        if peer not in self._peers:
            return  # disconnected a moment ago
        try:
            pings = peer.recv(PINGS_AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            pings = b""  # the connection broke
        if pings:
            write(peer, pings)
        else:
            self._disconnect(peer)

    def _disconnect(self, peer: sockets.socket) -> None:
        self._service.unwatch(peer.fileno())
        del self._peers[peer]
        peer.close()

    def close(self) -> None:
        """Closes all connections and listening sockets. Idempotent."""
        self._closed = True
        for open_socket in (*self._listener.sockets, *self._peers):
            self._service.unwatch(open_socket.fileno())
        self.close_sockets()

    def close_sockets(self) -> None:
        """Closes all sockets in this process (in a fork: its copies)."""
        self._listener.close()
        for peer in self._peers:
            peer.close()


def _max_peers() -> int:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_PEERS if allowed == resource.RLIM_INFINITY else max(1, min(MAX_PEERS, allowed // 2))
