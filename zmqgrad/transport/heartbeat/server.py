"""Replies to the heartbeats of other workers.

Only workers of the job are answered. Connections may use at most half of the file descriptors of the process;
beyond that, the oldest is closed. Those that have not proven yet to be of the job are limited further
(:mod:`~zmqgrad.transport.strangers`). A worker of the job then connects again. On one host only processes of
the same user are accepted.
"""

from __future__ import annotations

import hmac
import logging
import resource
import secrets
import socket as sockets
from functools import partial
from typing import Any

from zmqgrad.errors import TransportError
from zmqgrad.runtime.polling import READ
from zmqgrad.runtime.repeat_log import RepeatLog
from zmqgrad.runtime.service_thread import ServiceThread
from zmqgrad.transport.bind_policy import bind_in_range, tcp_address
from zmqgrad.transport.heartbeat.protocol import (
    CHALLENGE_SIZE,
    GOODBYE,
    NONCE_SIZE,
    OF_LISTENER,
    OF_PEER,
    PINGS_AT_ONCE,
    PROOF_SIZE,
    SCHEME,
    SUFFIX,
    TOKEN_SIZE,
    prove,
    write,
)
from zmqgrad.transport.local import is_same_user, process_of, unix_name
from zmqgrad.transport.strangers import Strangers

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0
"""How long the listener pauses after the process ran out of file descriptors."""

MAX_PEERS = 1 << 16
"""Maximum number of connections, which is the maximum number of workers."""

MAX_HANDSHAKES = 256
"""Connections that may not have proven yet to be of the job."""


class HeartbeatListener:
    """Accepts the connections of peers, and returns their pings, in the service thread.

    Created with the mailbox, as its address is published.

    Args:
        ipc_endpoint, tcp_host, advertised: of the mailbox.
        key: of the job's local connections.

    Raises:
        TransportError: if it cannot listen.
    """

    def __init__(
        self, ipc_endpoint: str | None, tcp_host: str | None, advertised: str | None = None, key: bytes = b""
    ) -> None:
        self.key = key
        self.token = secrets.token_bytes(TOKEN_SIZE)
        self.sockets: list[sockets.socket] = []
        self.endpoint: str | None = None
        self._peers: dict[sockets.socket, None] = {}  # oldest first
        self._handshaking: dict[sockets.socket, tuple[bytes, bytes]] = {}  # what was sent, and received
        self._closed = False
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

    def start(self, name: str, service: ServiceThread) -> None:
        """Starts to accept connections in the thread of ``service``, which calls this."""
        self._name, self._service = name, service
        self._most = _max_peers()
        self._strangers = Strangers(min(MAX_HANDSHAKES, max(1, self._most // 2)), service.call_later)
        self._refusals = RepeatLog(logger, name)
        for listening in self.sockets:
            self._watch(listening)

    def _watch(self, listening: sockets.socket) -> None:
        if not self._closed:
            self._service.watch(listening.fileno(), READ, lambda _: self._accept(listening))

    def _accept(self, listening: sockets.socket) -> None:
        try:
            peer, address = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the peer has closed it again
            return
        except OSError as e:  # the process has no more file descriptors: peers must wait
            logger.warning("%s cannot accept: %s", self._name, e)
            self._service.unwatch(listening.fileno())
            self._service.call_later(PAUSE_SECONDS, partial(self._watch, listening))
            return
        if peer.family == sockets.AF_UNIX and not is_same_user(peer):
            peer.close()
            return
        peer.setblocking(False)
        greeting = self.token + secrets.token_bytes(CHALLENGE_SIZE)
        self._handshaking[peer] = greeting, b""
        self._service.watch(peer.fileno(), READ, lambda _: self._read(peer))
        write(peer, greeting)
        surplus = self._strangers.add(
            peer, process_of(peer) if peer.family == sockets.AF_UNIX else address[0]
        )
        if surplus is not None:
            self._disconnect(surplus)

    def _read(self, peer: sockets.socket) -> None:
        if peer not in self._peers and peer not in self._handshaking:
            return  # disconnected a moment ago
        try:
            data = peer.recv(PINGS_AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            data = b""  # the connection broke
        if not data:
            self._disconnect(peer)
        elif peer in self._peers:
            write(peer, data)
        else:
            self._continue_handshake(peer, data)

    def _continue_handshake(self, peer: sockets.socket, data: bytes) -> None:
        greeting, before = self._handshaking[peer]
        received = before + data
        self._handshaking[peer] = greeting, received
        if len(received) < NONCE_SIZE + PROOF_SIZE:
            return
        nonce, proof = received[:NONCE_SIZE], received[NONCE_SIZE:]
        if not hmac.compare_digest(proof, prove(self.key, OF_PEER, greeting, nonce)):
            self._refusals.warning(f"{self._name} refused a process that does not know the key of this job")
            self._disconnect(peer)
            return
        del self._handshaking[peer]
        if not self._strangers.remove(peer):
            self._disconnect(peer)
            return
        if len(self._peers) >= self._most:
            self._disconnect(next(iter(self._peers)))
        self._peers[peer] = None
        write(peer, prove(self.key, OF_LISTENER, greeting, nonce))

    def _disconnect(self, peer: sockets.socket) -> None:
        self._service.unwatch(peer.fileno())
        self._peers.pop(peer, None)
        if self._handshaking.pop(peer, None) is not None:
            self._strangers.remove(peer)
        peer.close()

    def stop(self, goodbye: str = "") -> None:
        """Closes all sockets, after :meth:`start`. In the service thread.

        Args:
            goodbye: why this worker leaves, which peers are told; empty: nothing.
        """
        self._closed = True
        for peer in list(self._peers) if goodbye else ():
            self._read(peer)  # or the kernel resets the connection, for what was not read
            write(peer, GOODBYE + goodbye[:1000].encode())
        for open_socket in (*self.sockets, *self._peers, *self._handshaking):
            self._service.unwatch(open_socket.fileno())
        for peer in self._handshaking:
            self._strangers.remove(peer)
        self.close()

    def close(self) -> None:
        """Closes all sockets in this process, before :meth:`start` or in a fork. Idempotent."""
        for open_socket in (*self.sockets, *self._peers, *self._handshaking):
            open_socket.close()


def _max_peers() -> int:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_PEERS if allowed == resource.RLIM_INFINITY else max(1, min(MAX_PEERS, allowed // 2))
