"""Host and port to ZeroMQ addresses."""

from __future__ import annotations

import ipaddress
import socket

from zmqgrad import environment
from zmqgrad.errors import ArgumentTypeError, ConfigurationError
from zmqgrad.transport.bind_policy import is_loopback, tcp_address


def check_port(port: int) -> int:
    """Check that ``port`` is a port number, and return it.

    Raises:
        ArgumentTypeError, ConfigurationError: if it is not.
    """
    if not isinstance(port, int) or isinstance(port, bool):
        raise ArgumentTypeError(f"a port must be an int, not {type(port).__name__}")
    if not 0 <= port <= environment.MAX_PORT:
        raise ConfigurationError(f"the port {port} is not between 0 and {environment.MAX_PORT}")
    return port


def connecting_address(host: str, port: int) -> str:
    """The address to which clients of ``host`` connect.

    Raises:
        ConfigurationError: if ``host`` is malformed.
    """
    return tcp_address(_bare(host), port)


def _bare(host: str) -> str:
    if not environment.is_host(host):
        raise ConfigurationError(f"{host!r} is not a host name or address")
    return host.strip("[]")


def listening_address(host: str, port: int, keyed: bool = False) -> str:
    """The address on which the server at ``host`` listens.

    An IP address is used as it is, unless it is the advertised one, which a NAT may have. A name may resolve
    to several addresses, and to others on other hosts. So the server listens on all interfaces, unless the
    name resolves only to loopback.

    Args:
        port: 0: the system picks one.
        keyed: whether clients need a secret.

    Raises:
        ConfigurationError: if ``host`` is malformed; if it does not resolve, and clients need no secret.
    """
    shown = str(port) if port else "*"
    bare = _bare(host)
    if bare == "localhost":
        return f"tcp://127.0.0.1:{shown}"
    if bare == environment.advertise_address():
        return f"tcp://*:{shown}"
    try:
        ipaddress.ip_address(bare)
    except ValueError:
        if not keyed and not environment.allows_insecure():
            loopback = _loopback_of(bare)
            if loopback is not None:
                return connecting_address(loopback, 0)[:-1] + shown
            _check_resolves(bare)  # or the lack of a secret would be named as its fault
        return f"tcp://*:{shown}"
    return connecting_address(bare, 0)[:-1] + shown


def _loopback_of(name: str) -> str | None:
    """The loopback address to which ``name`` resolves here, or None if it also resolves to others."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)}
    except OSError:
        return None
    if not found or not all(is_loopback(str(address)) for address in found):
        return None
    return str(min(found))


def _check_resolves(name: str) -> None:
    try:
        socket.getaddrinfo(name, None)
    except OSError as e:
        raise ConfigurationError(f"the host name {name!r} does not resolve here: {e.strerror}") from None


def doctor_hint(host: str, port: int) -> str:
    """Suffix for an error message about a server on another host that does not reply; otherwise empty."""
    return "" if is_loopback(host) else f"; `zmqgrad doctor --peer {host}:{port}` tests the way to it"


def why_unknown(host: str) -> str:
    """Suffix for an error message if the name ``host`` cannot be resolved; otherwise empty."""
    try:
        socket.getaddrinfo(host.strip("[]"), None, 0, socket.SOCK_STREAM)
    except OSError as e:
        return f"; the name {host!r} cannot be resolved here ({e.strerror or e})"
    return ""
