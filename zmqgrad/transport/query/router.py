"""The ROUTER of a query server: binds it, and counts its connections. Pauses when descriptors run out."""

from __future__ import annotations

import logging
import math

import zmq

from zmqgrad.errors import TransportError
from zmqgrad.runtime.clock import Clock
from zmqgrad.transport.bind_policy import bind_tcp
from zmqgrad.transport.query.admission import Admission
from zmqgrad.transport.query.sockets import set_up_query_socket
from zmqgrad.transport.security import Keys, ZapAuthenticator, secure_server
from zmqgrad.transport.sockets import (
    ACCEPT_FAILED,
    ACCEPTED,
    CONNECTED,
    DISCONNECTED,
    HANDSHAKE_FAILED,
    NOBLOCK,
    NOBLOCK_MORE,
    ZERO_COPY_BYTES,
    SocketMonitor,
    get_int,
)

logger = logging.getLogger(__name__)

MAX_UNREAD_REPLIES = 16
"""Replies that may wait for one client. It has a single query at a time, and a ping."""

REBIND_SECONDS = 1.0
"""How long the server does not listen after the process ran out of file descriptors."""


class RouterSocket:
    """A bound ROUTER and its monitor. Used by one thread at a time.

    Args:
        context: of the server. With ``keys``, it gets an authenticator.
        listen_fd: see :func:`~zmqgrad.transport.bind_policy.bind_tcp`.
        admission: is informed of every connection.

    Raises:
        AddressInUseError, ConfigurationError, TransportError: as :func:`bind_tcp`.
    """

    def __init__(
        self,
        name: str,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        keys: Keys | None,
        listen_fd: int | None,
        admission: Admission,
        clock: Clock,
    ) -> None:
        self.rebind_at = math.inf
        """When :meth:`rebind` must be called; infinite while the socket listens."""
        self._admission = admission
        self._secured = keys is not None
        self._clock = clock
        self._has_warned = False
        self._monitor: SocketMonitor | None = None
        self._socket = context.socket(zmq.ROUTER)
        try:
            set_up_query_socket(self._socket)
            self._socket.router_mandatory = True
            self._socket.sndhwm = self._socket.rcvhwm = MAX_UNREAD_REPLIES
            if keys is not None:
                ZapAuthenticator(name, context, keys)
                secure_server(self._socket, keys)
            self._monitor = SocketMonitor(
                self._socket, ACCEPTED | ACCEPT_FAILED | CONNECTED | HANDSHAKE_FAILED | DISCONNECTED
            )
            self.endpoint = bind_tcp(self._socket, address, secured=self._secured, listen_fd=listen_fd)
        except BaseException:
            self.close(linger=0)
            raise
        self.fd = get_int(self._socket, zmq.FD)
        self.monitor_fd = self._monitor.fd
        self.receive = self._socket.recv_multipart

    def send(self, route: bytes, data: bytearray) -> None:
        """Sends ``data`` to the client with routing id ``route``.

        Raises:
            zmq.ZMQError: if the client has disconnected, or does not read its replies.
        """
        self._socket.send(route, NOBLOCK_MORE)
        self._socket.send(data, NOBLOCK, copy=len(data) < ZERO_COPY_BYTES)

    def read_events(self) -> int:
        """Counts connections. Stops listening if the process has no file descriptors left.

        Returns:
            How many handshakes have failed.
        """
        failed = 0
        admission = self._admission
        while self._monitor is not None and (events := self._monitor.read()):
            for kind, _ in events:
                if kind == ACCEPTED:
                    admission.accepted += 1
                elif kind == CONNECTED:
                    admission.connected += 1
                elif kind == DISCONNECTED:
                    admission.disconnected += 1
                elif kind == ACCEPT_FAILED:
                    self._unbind()
                else:
                    failed += 1
        admission.failed += failed
        admission.readmit()
        return failed

    def _unbind(self) -> None:
        """Stops listening for a while: libzmq would try to accept again without a pause."""
        if self.rebind_at == math.inf:
            logger.log(
                logging.DEBUG if self._has_warned else logging.WARNING,
                "%s: no more file descriptors; new clients have to wait until others have left",
                self.endpoint,
            )
            self._has_warned = True
            self._socket.unbind(self.endpoint)
            self.rebind_at = self._clock.now() + REBIND_SECONDS

    def rebind(self, now: float) -> None:
        """Listens again if it is time to and the process has file descriptors."""
        if now < self.rebind_at:
            return
        try:
            bind_tcp(self._socket, self.endpoint, secured=self._secured)
            self.rebind_at = math.inf
        except TransportError as e:
            logger.debug("%s: cannot listen again yet: %s", self.endpoint, e)
            self.rebind_at = now + REBIND_SECONDS

    def close(self, linger: int) -> None:
        """Closes the socket; the last replies may take ``linger`` ms to leave. Idempotent."""
        if self._monitor is not None:
            self._monitor.close()
        self._socket.close(linger=linger)
