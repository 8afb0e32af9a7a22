"""The ROUTER of a query server: binds it, and tells the admission of its connections."""

from __future__ import annotations

from collections.abc import Callable

import zmq

from zmqgrad.errors import TransportError
from zmqgrad.transport.bind_policy import bind_tcp
from zmqgrad.transport.query.admission import Admission
from zmqgrad.transport.query.sockets import set_up_query_socket
from zmqgrad.transport.security import Keys, ZapAuthenticator, secure_server
from zmqgrad.transport.sockets import ACCEPTED, DISCONNECTED, HANDSHAKE_FAILED, NOBLOCK_MORE, send_split
from zmqgrad.transport.tcp_listener import TcpListener

MAX_UNREAD_REPLIES = 16
"""Replies that may wait for one client. It has a single query at a time, and a ping."""


class RouterSocket:
    """A bound ROUTER and its listener. Used by one thread at a time.

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
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        keys: Keys | None,
        listen_fd: int | None,
        admission: Admission,
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._admission = admission
        self._listener: TcpListener | None = None
        self.zap: ZapAuthenticator | None = None
        """To be read in the server's thread."""
        self.socket = context.socket(zmq.ROUTER)
        secured = keys is not None and keys.from_secret
        try:
            set_up_query_socket(self.socket)
            self.socket.router_mandatory = True
            self.socket.sndhwm = self.socket.rcvhwm = MAX_UNREAD_REPLIES
            if keys is not None:
                self.zap = ZapAuthenticator(context, keys)
                secure_server(self.socket, keys)
            self._listener = TcpListener(
                self.socket,
                lambda fd: bind_tcp(self.socket, address, secured=secured, listen_fd=fd),
                call_later,
                listen_fd=listen_fd,
                events=HANDSHAKE_FAILED,
            )
        except OSError as e:
            self.close(linger=0)
            raise TransportError(f"cannot listen on {address}: {e.strerror}") from e
        except BaseException:
            self.close(linger=0)
            raise
        self.endpoint = self._listener.endpoint
        self.monitor_fd = self._listener.fd

    @property
    def silent(self) -> int:
        """How many connections have not sent a message yet."""
        return 0 if self._listener is None else self._listener.silent

    def send(self, route: bytes, data: bytearray) -> None:
        """Sends ``data`` to the client with routing id ``route``.

        Raises:
            zmq.ZMQError: if the client has disconnected, or does not read its replies.
        """
        self.socket.send(route, NOBLOCK_MORE)
        send_split(self.socket, data)

    def read_events(self) -> int:
        """Counts connections. Returns how many handshakes have failed."""
        failed = 0
        for kind, value in () if self._listener is None else self._listener.read():
            if kind == ACCEPTED:
                self._admission.on_accepted(value)
            elif kind == DISCONNECTED:
                self._admission.on_disconnected(value)
            elif kind & HANDSHAKE_FAILED:
                failed += 1
        return failed

    def hear(self, fd: int) -> None:
        """Notes that a message has arrived by the connection with descriptor ``fd``. After its events."""
        assert self._listener is not None
        self._listener.hear(fd)

    def close(self, linger: int) -> None:
        """Closes the socket; the last replies may take ``linger`` ms to leave. Idempotent."""
        if self._listener is not None:
            self._listener.close()
        if self.zap is not None:
            self.zap.close()
        self.socket.close(linger=linger)
