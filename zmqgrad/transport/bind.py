"""Binding ZeroMQ sockets to tcp: addresses are checked, errors say what to do, bound sockets are adopted."""

from __future__ import annotations

import socket as sockets

import zmq

from zmqgrad.errors import AddressInUseError, ConfigurationError, TransportError
from zmqgrad.transport.exposure import check_exposure

ACCEPT_BACKLOG = 4096
"""Connections that may wait to be accepted; the system may allow fewer."""


def bind_tcp(socket: zmq.Socket[bytes], address: str, *, keyed: bool, listen_fd: int | None = None) -> str:
    """Bind ``socket`` to ``address`` (``tcp://host:port``; port ``*`` lets the system pick one).

    Args:
        keyed: whether who connects has to prove that it has the job's secret.
        listen_fd: a socket that is bound to that port already; it belongs to ``socket`` afterwards.

    Returns:
        The address with its port.

    Raises:
        AddressInUseError: if another socket listens there.
        ConfigurationError: if other hosts could connect and nothing protects the traffic, or ``listen_fd`` is
            not a tcp socket bound to that port; then it is left as it was.
        TransportError: if it cannot be bound for another reason.
    """
    socket.ipv6 = "[" in address
    socket.backlog = ACCEPT_BACKLOG
    if listen_fd is not None:
        address = _listen(listen_fd, address.rpartition(":")[2], keyed=keyed)
        socket.set(zmq.USE_FD, listen_fd)
    else:
        check_exposure(address, keyed)
    try:
        socket.bind(address)
    except zmq.ZMQError as e:
        if e.errno == zmq.EADDRINUSE:
            raise AddressInUseError(
                f"cannot listen on {address}: another socket does. Choose another port, or end the process "
                f"that has this one"
            ) from e
        raise TransportError(f"cannot listen on {address}: {e}") from e
    finally:
        if listen_fd is not None:
            socket.set(zmq.USE_FD, -1)  # what is bound next has its own
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _listen(number: int, port: str, *, keyed: bool) -> str:
    """Listen at file descriptor ``number``, which remains the caller's. Returns its address."""
    try:
        bound = sockets.socket(fileno=number)
    except OSError as e:
        raise ConfigurationError(f"file descriptor {number} is no socket to listen at: {e.strerror}") from e
    try:
        if bound.family not in (sockets.AF_INET, sockets.AF_INET6) or bound.type != sockets.SOCK_STREAM:
            raise ConfigurationError(f"file descriptor {number} is no tcp socket")
        host, own = bound.getsockname()[:2]
        if not own or port not in ("*", str(own)):
            raise ConfigurationError(f"file descriptor {number} is bound to port {own}, not {port}")
        address = f"tcp://[{host}]:{own}" if ":" in host else f"tcp://{host}:{own}"
        check_exposure(address, keyed)
        bound.listen(ACCEPT_BACKLOG)
        bound.setblocking(False)
        return address
    except OSError as e:
        raise TransportError(f"cannot listen at file descriptor {number}: {e}") from e
    finally:
        bound.detach()
