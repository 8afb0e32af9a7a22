"""Plain TCP sockets by ZeroMQ's addresses (``tcp://host:port``), for those who speak ZMTP themselves."""

from __future__ import annotations

import errno
import math
import socket
import struct

from zmqgrad.errors import AddressInUseError, ConfigurationError, TransportError
from zmqgrad.transport.exposure import check_exposure

BACKLOG = 4096
"""Connections that wait to be taken; the system may allow fewer."""

KEEPALIVE_IDLE, KEEPALIVE_EVERY, KEEPALIVE_TIMES = 20, 5, 4
"""Seconds of silence, seconds between probes, and how many may go unanswered: a host that vanished
without a word is noticed within 40 s."""


def listen(address: str, *, keyed: bool) -> tuple[socket.socket, str]:
    """A socket that listens at ``address`` (port ``*``: the system picks), and that address with its port.

    ``keyed``: whoever connects has to prove that he has the job's secret.

    Raises:
        AddressInUseError: if another socket listens there.
        ConfigurationError: if others than this host could connect, and nothing protects the traffic.
        TransportError: if the address cannot be listened on.
    """
    check_exposure(address, keyed)
    host, port = _parts(address)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            None if host == "*" else host,
            0 if port == "*" else int(port),
            socket.AF_UNSPEC if ":" in host else socket.AF_INET,
            socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, ValueError) as e:
        raise TransportError(f"cannot listen on {address}: {e}") from e
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except (OSError, OverflowError) as e:
        listener.close()
        if isinstance(e, OSError) and e.errno == errno.EADDRINUSE:
            raise AddressInUseError(
                f"cannot listen on {address}: another socket does. Choose another port, or end the process "
                f"that has this one"
            ) from e
        raise TransportError(f"cannot listen on {address}: {e}") from e
    return listener, _name_of(listener)[0]


def adopt(number: int, port: int, *, keyed: bool) -> tuple[socket.socket, str]:
    """As :func:`listen`, with the socket that file descriptor ``number`` is: it is ours from now on.

    Whoever started this process has bound it to ``port`` (0: to any), and may listen at it already.

    Raises:
        ConfigurationError: if it is no such socket, or others than this host could connect unprotected.
        TransportError: if it cannot be listened at.
    """
    try:
        listener = socket.socket(fileno=number)
    except OSError as e:
        raise ConfigurationError(f"file descriptor {number} is no socket to listen at: {e.strerror}") from e
    try:
        if listener.family not in (socket.AF_INET, socket.AF_INET6) or listener.type != socket.SOCK_STREAM:
            raise ConfigurationError(f"file descriptor {number} is no tcp socket")
        address, bound = _name_of(listener)
        if not bound or bound != (port or bound):
            raise ConfigurationError(f"file descriptor {number} is bound to port {bound}, not {port}")
        check_exposure(address, keyed)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as e:
        listener.close()
        raise TransportError(f"cannot listen at file descriptor {number}: {e}") from e
    except BaseException:
        listener.detach()  # not ours, after all
        raise
    return listener, address


def _name_of(listener: socket.socket) -> tuple[str, int]:
    """Where it listens, as an address and as a port."""
    host, port = listener.getsockname()[:2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}", port


def dial(address: str, seconds: float) -> socket.socket:
    """A socket connected to ``address``, or to the first that answers if its host has several.

    Raises:
        OSError: if nobody listens there, or the name is not known, or it takes longer than ``seconds``.
    """
    host, port = _parts(address)
    return set_up(socket.create_connection((host, int(port)), seconds))


def set_up(connection: socket.socket) -> socket.socket:
    """What every connection gets at birth: small messages leave at once, dead hosts are noticed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_TIMES)
    return connection


def limit_waits(connection: socket.socket, seconds: float) -> None:
    """Let ``recv`` and ``send`` block for so long at most; then they raise ``BlockingIOError``.

    Infinite: as long as it takes. By the kernel's own timeout: Python's would cost each call a ``poll``.
    """
    micros = 0 if seconds == math.inf else max(1, round(seconds * 1e6))
    limit = struct.pack("@ll", micros // 1_000_000, micros % 1_000_000)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def hang_up(connection: socket.socket) -> None:
    """End ``connection`` for whoever reads or writes it, here in other threads and at the other end."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the other end was first


def _parts(address: str) -> tuple[str, str]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), port
