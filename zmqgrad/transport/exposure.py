"""Who could connect: without a secret only loopback is listened on, unless told so in as many words."""

from __future__ import annotations

import ipaddress
import socket

from zmqgrad import environment
from zmqgrad.errors import ConfigurationError


def is_loopback(host: str) -> bool:
    """Is ``host`` an address (or the name) of this machine that others cannot reach?"""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def facing_address(host: str, port: int) -> str:
    """The address of this machine by which one that reaches ``host`` is reached.

    Raises:
        OSError: if ``host`` has no address, or no route leads there.
    """
    if is_loopback(host):
        return "127.0.0.1"
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram socket: chooses a route, sends nothing
        facing: str = probe.getsockname()[0]
        return facing


def own_address() -> str:
    """The address of this machine by which most others would reach it; loopback if it has no route to any."""
    for elsewhere in _ELSEWHERE:
        try:
            return facing_address(elsewhere, 9)
        except OSError:
            continue  # no route
    return "127.0.0.1"


_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses of nobody's, set aside for documentation: the default route leads there. Nothing is sent."""


def may_be_exposed(keyed: bool) -> bool:
    """May sockets that are ``keyed``, or are not, be opened to other hosts?"""
    return keyed or environment.allows_insecure()


def check_exposure(address: str, keyed: bool) -> None:
    """Refuse to listen where others than this host could connect, unless that is ``keyed``.

    Raises:
        ConfigurationError: naming the address, and what to do.
    """
    if not address.startswith("tcp://"):
        return
    host = address[len("tcp://") :].rpartition(":")[0]
    if is_loopback(host) or may_be_exposed(keyed):
        return
    raise ConfigurationError(
        f"will not listen on {address} without a secret: anybody who reaches this address could read and "
        f"write. Give all processes of the job the same {environment.SECRET} (or {environment.SECRET_FILE}; "
        f"`openssl rand -hex 32` makes one), or use 127.0.0.1 if they are all on this host. On a network "
        f"where you trust every machine, {environment.ALLOW_INSECURE}=1 does without"
    )
