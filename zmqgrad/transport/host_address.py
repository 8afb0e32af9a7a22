"""The address at which a process listens for other hosts, and the one at which those reach it.

By default both are the address of this host on the route to the host of the store. The variables
``ZMQGRAD_SOCKET_IFNAME`` and ``ZMQGRAD_ADVERTISE_ADDRESS`` change them.
"""

from __future__ import annotations

import ipaddress
import logging
import socket as sockets
from typing import NamedTuple

from zmqgrad import environment
from zmqgrad.errors import ConfigurationError
from zmqgrad.transport.bind_policy import check_bind_address, is_loopback, may_bind_publicly, tcp_address
from zmqgrad.transport.interfaces import InterfaceAddress, InterfaceFilter, interface_addresses, select

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

_UNASSIGNED_ADDRESSES = ("192.0.2.1", "2001:db8::1")
"""Reserved for documentation, so the default route leads there. Nothing is sent to them."""


class HostAddress(NamedTuple):
    """Numeric addresses: the one to listen at, the one for peers, and why it was chosen."""

    listen: str
    advertise: str
    reason: str

    def __str__(self) -> str:
        nat = "" if self.listen == self.advertise else f", reached at {self.advertise}"
        return f"{self.listen}{nat} ({self.reason})"


def facing_address(host: str, port: int) -> str:
    """Returns the address of this host on the route to ``host``.

    Raises:
        OSError: if ``host`` has no address, or there is no route to it.
    """
    if is_loopback(host):
        return LOOPBACK
    unreachable = OSError(f"{host} has no address")
    for family, kind, _, _, address in sockets.getaddrinfo(host.strip("[]"), port, type=sockets.SOCK_DGRAM):
        try:
            with sockets.socket(family, kind) as probe:
                probe.connect(address)  # a datagram socket chooses a route and sends nothing
                facing: str = probe.getsockname()[0]
                return facing
        except OSError as e:  # no route, or this host lacks that version of IP
            unreachable = e
    raise unreachable


def _own_address() -> tuple[str, str]:
    """An address of this host, and which: on the default route, or of the first interface without one."""
    for unassigned in _UNASSIGNED_ADDRESSES:
        try:
            return facing_address(unassigned, 9), "default route"
        except OSError:
            continue  # no route
    for interface, address in interface_addresses():
        if not is_loopback(address):
            return address, f"{interface}, without a default route"
    return LOOPBACK, "no network"


def choose_address(host: str | None, port: int = 0, *, secured: bool) -> HostAddress:
    """Chooses the address for a process whose store is served by ``host``.

    Args:
        host: name or address; None: unknown, because the store is a file. Then this is the address of the
            default route, or of the first interface, if listening there is allowed, and loopback otherwise.
        port: of the store.
        secured: whether peers must prove that they have the job's secret.

    Raises:
        OSError: if ``host`` has no address, or there is no route to it.
        ConfigurationError: if listening there is not allowed, or the environment names an address that does
            not resolve, or interfaces that this host lacks or that other hosts cannot reach.
    """
    advertised = _advertised()
    facing, reason = _facing(host, port, secured, advertised is not None)
    if not is_loopback(facing):
        facing, reason = _on_chosen_interface(facing, reason, host, advertised)
        check_bind_address(tcp_address(facing, 0), secured)
    return HostAddress(facing, advertised or facing, reason)


def _facing(host: str | None, port: int, secured: bool, advertised: bool) -> tuple[str, str]:
    public = may_bind_publicly(secured)
    if host is None:
        return _own_address() if public else (LOOPBACK, "no secret: this host only")
    if is_loopback(host) and not advertised:
        return LOOPBACK, f"the store is at {host}"
    facing = facing_address(host, port)
    # Many systems resolve their own name to 127.0.1.1, where other hosts would find themselves.
    if is_loopback(facing) and public and (advertised or not is_loopback(host)):
        own, which = _own_address()
        return own, f"{which}, as {host} is this host"
    return facing, f"faces {host}"


def _on_chosen_interface(
    facing: str, reason: str, host: str | None, advertised: str | None
) -> tuple[str, str]:
    """Applies ``ZMQGRAD_SOCKET_IFNAME``, or the variables of Gloo, TensorPipe and NCCL if they select one."""
    wanted = environment.socket_interfaces()
    if wanted is None:
        return facing, reason
    present = interface_addresses()
    chosen = select(present, InterfaceFilter(wanted.interfaces), facing)
    setting = f"{wanted.variable}={wanted.text}"
    if chosen is not None and (host is None or not is_loopback(advertised or chosen.address)):
        return chosen.address, f"{chosen.interface}, by {setting}"
    if wanted.variable != environment.SOCKET_IFNAME:
        return facing, f"{reason}; no interface has {setting}"
    if chosen is not None:  # peers would connect to their own hosts, and meet nothing or another program
        others = _listed([each for each in present if not is_loopback(each.address)])
        raise ConfigurationError(
            f"{setting} selects {advertised or chosen.address}, which other hosts cannot reach, but workers "
            f"meet at {host}: select another of {others}; a job of one host can meet at 127.0.0.1"
        )
    version = "IPv6" if ":" in facing else "IPv4"
    raise ConfigurationError(
        f"{setting} selects no interface with an {version} address; those of this host are {_listed(present)}"
    )


def _listed(present: list[InterfaceAddress]) -> str:
    return ", ".join(f"{name} {address}" for name, address in present) or "unknown on this system"


def _advertised() -> str | None:
    """The address in ``ZMQGRAD_ADVERTISE_ADDRESS``; a name is resolved, as peers may not know it."""
    host = environment.advertise_address()
    if host is None:
        return None
    setting = f"{environment.ADVERTISE_ADDRESS}={host}"
    remedy = "give the numeric address at which other hosts reach this one"
    try:
        address = str(sockets.getaddrinfo(host.strip("[]"), None, type=sockets.SOCK_STREAM)[0][4][0])
    except OSError as e:
        raise ConfigurationError(f"{setting} cannot be resolved here ({e.strerror or e}): {remedy}") from e
    if ipaddress.ip_address(address).is_unspecified:  # each host would reach itself
        raise ConfigurationError(f"{setting} is any address of a host, which others cannot reach: {remedy}")
    return address
