"""The ZeroMQ sockets of queries and notifications: their options, and the context that clients share.

The context is shared so that a store client costs no thread of its own. It exists while a client has a
socket; afterwards no thread is left. Mailboxes and servers have contexts of their own.
"""

from __future__ import annotations

import logging
import os
import socket as sockets
import threading
import weakref

import zmq

from zmqgrad.errors import TransportError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.heartbeat.failure_detector import host_and_port
from zmqgrad.transport.local import check_can_open
from zmqgrad.transport.security import Keys, secure_client
from zmqgrad.transport.sockets import set_up
from zmqgrad.wire.frames import MAX_HEADER_BYTES

logger = logging.getLogger(__name__)

RECONNECT_MS, MAX_RECONNECT_MS = 10, 250
"""Initial pause between connection attempts, and the maximum that doubling it reaches."""

CONNECT_TIMEOUT_MS = 5000
"""How long one connection attempt may take."""

CLIENT_DESCRIPTORS = 12
"""That must be free where the first socket is opened: what all share needs most of them."""

BEGIN_OF_GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0"
"""Of a peer that speaks ZMTP 3.0: signature and version. A server replies with all of its own greeting."""

GREETING_BYTES = 64
_MECHANISM = slice(12, 32)

PROBE_SECONDS = 2.0
"""How long :func:`speaks_curve` waits for the server."""

_lock = threading.Lock()  # guards the next two
_context: zmq.Context[zmq.Socket[bytes]] | None = None
_sockets: weakref.WeakSet[zmq.Socket[bytes]] = weakref.WeakSet()  # not a count: Ctrl-C may lose one


def set_up_query_socket(socket: zmq.Socket[bytes]) -> None:
    """Sets the options that clients and servers have in common."""
    set_up(socket)
    # A host that vanishes without closing its connections is noticed within 40 s.
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = 20
    socket.tcp_keepalive_intvl = 5
    socket.tcp_keepalive_cnt = 4


def open_client_socket(kind: int, address: str, keys: Keys | None) -> zmq.Socket[bytes]:
    """Returns a socket that is ready to connect to ``address``. Close it by :func:`close_client_socket`.

    Raises:
        TransportError: if the system has no socket left.
    """
    global _context
    needs_ipv6 = _needs_ipv6(address)
    socket: zmq.Socket[bytes] | None = None
    try:
        with _lock:
            if _context is None:
                check_can_open(CLIENT_DESCRIPTORS, f"no socket can be had to connect to {address}")
                _context = zmq.Context(1)
                _context.set(zmq.MAX_SOCKETS, _context.get(zmq.SOCKET_LIMIT))
            socket = _context.socket(kind)
            _sockets.add(socket)
        set_up_query_socket(socket)
        socket.ipv6 = needs_ipv6
        socket.reconnect_ivl = RECONNECT_MS
        socket.reconnect_ivl_max = MAX_RECONNECT_MS
        socket.connect_timeout = CONNECT_TIMEOUT_MS
        if kind == zmq.SUB:
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_HEADER_BYTES)  # a notification is one frame
        if keys is not None:
            secure_client(socket, keys)
    except BaseException as e:
        close_client_socket(socket)
        if isinstance(e, zmq.ZMQError):
            raise TransportError(f"no socket can be had to connect to {address}: {e}") from e
        raise
    return socket


def close_client_socket(socket: zmq.Socket[bytes] | None) -> None:
    """Closes ``socket``, if any; the last one ends the shared context. Idempotent."""
    global _context
    if socket is not None:
        socket.close(linger=0)
    with _lock:
        if socket is not None:
            _sockets.discard(socket)
        if _sockets:
            return
        ending, _context = _context, None
    if ending is not None:
        ending.destroy(linger=0)  # with what Ctrl-C may have left


def _needs_ipv6(address: str) -> bool:
    """Returns whether ``address`` is IPv6, or a name with IPv6 addresses only: libzmq tries one of a name."""
    if not address.startswith("tcp://"):
        return False  # "ipc" is not a host name: looking it up would query DNS
    host = address.removeprefix("tcp://").rpartition(":")[0]
    if "[" in host:
        return True
    return not _resolves(host, sockets.AF_INET) and _resolves(host, sockets.AF_INET6)


def _resolves(host: str, family: int) -> bool:
    try:
        return bool(sockets.getaddrinfo(host, None, family))
    except OSError:
        return False


def speaks_curve(address: str) -> bool:
    """Returns whether the server at ``address`` requires a secret: its greeting says so (RFC 23, ZMTP 3.0).

    libzmq would report it, too, but not if the server ends the connection before it has read the greeting.
    """
    deadline, data = Deadline.after(PROBE_SECONDS), b""
    try:
        with sockets.create_connection(
            host_and_port(address.removeprefix("tcp://")), PROBE_SECONDS
        ) as connection:
            connection.sendall(BEGIN_OF_GREETING)
            while len(data) < _MECHANISM.stop and not deadline.passed():
                connection.settimeout(deadline.left())
                if not (more := connection.recv(GREETING_BYTES)):
                    break
                data += more
    except OSError as e:
        logger.debug("the server at %s has sent no greeting: %s", address, e)
    return data[_MECHANISM].rstrip(b"\0") == b"CURVE"


def _forget_context() -> None:
    """In a forked child, the context and its threads belong to the parent."""
    global _lock, _context, _sockets
    _lock, _context, _sockets = threading.Lock(), None, weakref.WeakSet()


os.register_at_fork(after_in_child=_forget_context)
