"""The ROUTER of a query server: binds it, and counts its connections. Pauses when descriptors run out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import zmq

from zmqgrad.errors import TransportError
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
    LISTENING,
    NOBLOCK_MORE,
    SocketMonitor,
    send_split,
)

logger = logging.getLogger(__name__)

MAX_UNREAD_REPLIES = 16
"""Replies that may wait for one client. It has a single query at a time, and a ping."""

REBIND_SECONDS = 1.0
"""How long the server accepts nothing after the process ran out of file descriptors."""


class RouterSocket:
    """A bound ROUTER and its monitor. Used by one thread at a time.

    Args:
        context: of the server. With ``keys``, it gets an authenticator.
        listen_fd: see :func:`~zmqgrad.transport.bind_policy.bind_tcp`.
        admission: is informed of every connection.
        call_later: runs a job later, in the thread that uses this.

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
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._is_bound = True
        self._listening_fd = -1  # a copy of libzmq's: keeps the port, and queues connections, while unbound
        self._admission = admission
        self._secured = keys is not None and keys.from_secret
        self._call_later = call_later
        self._has_warned = False
        self._monitor: SocketMonitor | None = None
        self.zap: ZapAuthenticator | None = None
        """To be read in the server's thread."""
        self.socket = context.socket(zmq.ROUTER)
        try:
            set_up_query_socket(self.socket)
            self.socket.router_mandatory = True
            self.socket.sndhwm = self.socket.rcvhwm = MAX_UNREAD_REPLIES
            if keys is not None:
                self.zap = ZapAuthenticator(context, keys)
                secure_server(self.socket, keys)
            self._monitor = SocketMonitor(
                self.socket,
                LISTENING | ACCEPTED | ACCEPT_FAILED | CONNECTED | HANDSHAKE_FAILED | DISCONNECTED,
            )
            self.endpoint = bind_tcp(self.socket, address, secured=self._secured, listen_fd=listen_fd)
            self.read_events()  # the first event names the descriptor, which libzmq has not closed yet
        except OSError as e:
            self.close(linger=0)
            raise TransportError(f"cannot listen on {address}: {e.strerror}") from e
        except BaseException:
            self.close(linger=0)
            raise
        self.monitor_fd = self._monitor.fd

    def send(self, route: bytes, data: bytearray) -> None:
        """Sends ``data`` to the client with routing id ``route``.

        Raises:
            zmq.ZMQError: if the client has disconnected, or does not read its replies.
        """
        self.socket.send(route, NOBLOCK_MORE)
        send_split(self.socket, data)

    def read_events(self) -> int:
        """Counts connections. Accepts no more if the process has no file descriptors left.

        Returns:
            How many handshakes have failed.
        """
        failed = 0
        admission = self._admission
        while self._monitor is not None and (events := self._monitor.read()):
            for kind, value in events:
                if kind == LISTENING:
                    if self._listening_fd < 0:
                        self._listening_fd = os.dup(value)
                elif kind == ACCEPTED:
                    admission.on_accepted(value)
                elif kind == CONNECTED:
                    admission.connected += 1
                elif kind == DISCONNECTED:
                    admission.on_disconnected(value)
                elif kind == ACCEPT_FAILED:
                    self._unbind()
                else:
                    failed += 1
        admission.failed += failed
        return failed

    def _unbind(self) -> None:
        """Accepts nothing for a while: libzmq would try again without a pause. The port remains ours."""
        if self._is_bound:
            self.socket.unbind(self.endpoint)
            self._is_bound = False
            self._call_later(REBIND_SECONDS, self._rebind)
            logger.log(
                logging.DEBUG if self._has_warned else logging.WARNING,
                "%s: no more file descriptors; new clients have to wait until others have left",
                self.endpoint,
            )
            self._has_warned = True

    def _rebind(self) -> None:
        """Accepts connections again if the process has file descriptors."""
        copy = -1
        try:
            copy = os.dup(self._listening_fd)
            bind_tcp(self.socket, self.endpoint, secured=self._secured, listen_fd=copy)
            self._is_bound = True
        except (OSError, TransportError) as e:
            logger.debug("%s: cannot accept connections yet: %s", self.endpoint, e)
            self._call_later(REBIND_SECONDS, self._rebind)
            if copy >= 0:
                os.close(copy)

    def close(self, linger: int) -> None:
        """Closes the socket; the last replies may take ``linger`` ms to leave. Idempotent."""
        if self._monitor is not None:
            self._monitor.close()
        if self.zap is not None:
            self.zap.close()
        self.socket.close(linger=linger)
        if self._listening_fd >= 0:
            os.close(self._listening_fd)
            self._listening_fd = -1
