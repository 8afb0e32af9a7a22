"""Binds tcp sockets. Without a secret, only loopback addresses are allowed, unless the user opts out.

Where the system would choose the port, ``ZMQGRAD_PORT_RANGE`` limits the choice.
"""

from __future__ import annotations

import errno
import ipaddress
import socket as sockets
from collections.abc import Callable
from typing import TypeVar

import zmq

from zmqgrad import environment
from zmqgrad.errors import AddressInUseError, ConfigurationError, TransportError
from zmqgrad.transport.local import check_can_open

ACCEPT_BACKLOG = 4096
"""Maximum number of connections that wait to be accepted; the system may allow fewer."""

BIND_DESCRIPTORS = 4
"""That must be free where a socket is bound."""


def is_loopback(host: str) -> bool:
    """Returns whether ``host``, an address or ``localhost``, cannot be reached from other hosts."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def tcp_address(host: str, port: int | str) -> str:
    """Returns the ZeroMQ address of ``port`` at the numeric address ``host``."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def may_bind_publicly(secured: bool) -> bool:
    """Returns whether sockets may listen beyond loopback; ``secured``: they authenticate their peers."""
    return secured or environment.allows_insecure()


def check_bind_address(address: str, secured: bool) -> None:
    """Refuses to listen without authentication where other hosts could connect.

    Raises:
        ConfigurationError: naming the address, and what to do.
    """
    if not address.startswith("tcp://"):
        return
    host = address[len("tcp://") :].rpartition(":")[0]
    if is_loopback(host) or may_bind_publicly(secured):
        return
    raise ConfigurationError(
        f"will not listen on {address} without a secret: anybody who reaches this address could read and "
        f"write. Give all processes of the job the same {environment.SECRET} (or {environment.SECRET_FILE}; "
        f"`zmqgrad secret --write FILE` makes one), or use 127.0.0.1 if they are all on this host. On a "
        f"network where you trust every machine, {environment.ALLOW_INSECURE}=1 does without"
    )


_T = TypeVar("_T")


def bind_in_range(bind_to: Callable[[int], _T]) -> _T:
    """Calls ``bind_to`` with the ports of ``ZMQGRAD_PORT_RANGE`` until one is free; with 0 without a range.

    Raises:
        AddressInUseError: if none is free. ``bind_to`` raises this, or EADDRINUSE, for a port in use.
    """
    ports = environment.port_range()
    if ports is None:
        return bind_to(0)
    reserved = environment.read_launch().master_port  # rank 0 is about to serve its store there
    for port in ports:
        if port == reserved:
            continue
        try:
            return bind_to(port)
        except AddressInUseError:
            continue
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                raise
    raise AddressInUseError(
        f"all ports of {environment.PORT_RANGE}={ports[0]}-{ports[-1]} are in use: give three for each "
        f"worker of this host, and two for a store"
    )


def _bind(socket: zmq.Socket[bytes], address: str) -> str:
    # libzmq aborts a process that cannot list its interfaces
    check_can_open(BIND_DESCRIPTORS, f"cannot listen on {address}")
    try:
        socket.bind(address)
    except zmq.ZMQError as e:
        if e.errno == zmq.EADDRINUSE:
            raise AddressInUseError(
                f"cannot listen on {address}: another socket does (EADDRINUSE: address already in use). "
                f"Choose another port, or end the process that has this one"
            ) from e
        raise TransportError(f"cannot listen on {address}: {e}") from e
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def bind_tcp(socket: zmq.Socket[bytes], address: str, *, secured: bool, listen_fd: int | None = None) -> str:
    """Binds ``socket`` to ``address`` (``tcp://host:port``; port ``*`` lets the system choose one).

    Args:
        secured: whether peers must prove that they have the job's secret.
        listen_fd: file descriptor of a socket already bound to that port; ``socket`` takes ownership of it.

    Returns:
        The address with its port.

    Raises:
        AddressInUseError: if another socket listens there.
        TransportError: if it cannot be bound for another reason.
        ConfigurationError: if other hosts could connect and nothing protects the traffic, or if ``listen_fd``
            is not a tcp socket bound to that port; then the descriptor is left as it was.
    """
    socket.ipv6 = "[" in address or "*:" in address  # all addresses: of both versions, where there are both
    socket.backlog = ACCEPT_BACKLOG
    if listen_fd is None:
        check_bind_address(address, secured)
        if address.endswith(":*"):
            return bind_in_range(lambda port: _bind(socket, f"{address[:-1]}{port or '*'}"))
        return _bind(socket, address)
    address = _listen(listen_fd, address.rpartition(":")[2], secured=secured)
    socket.set(zmq.USE_FD, listen_fd)
    try:
        return _bind(socket, address)
    finally:
        socket.set(zmq.USE_FD, -1)  # later addresses of this socket get descriptors of their own


def _listen(number: int, port: str, *, secured: bool) -> str:
    """Listens on file descriptor ``number``, which stays the caller's. Returns its address."""
    try:
        bound = sockets.socket(fileno=number)
    except (OSError, OverflowError, TypeError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) else e
        raise ConfigurationError(f"file descriptor {number} is no socket to listen at: {why}") from e
    try:
        if bound.family not in (sockets.AF_INET, sockets.AF_INET6) or bound.type != sockets.SOCK_STREAM:
            raise ConfigurationError(f"file descriptor {number} is no tcp socket")
        host, own = bound.getsockname()[:2]
        if not own or port not in ("*", str(own)):
            raise ConfigurationError(f"file descriptor {number} is bound to port {own}, not {port}")
        address = tcp_address(host, own)
        check_bind_address(address, secured)
        # As libzmq: else connections that the server ended keep others from the port for a minute.
        bound.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        bound.listen(ACCEPT_BACKLOG)
        bound.setblocking(False)
        return address
    except OSError as e:
        raise TransportError(f"cannot listen at file descriptor {number}: {e}") from e
    finally:
        bound.detach()
