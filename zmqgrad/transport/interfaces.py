"""The addresses of this host's network interfaces, and the choice among interfaces by name."""

from __future__ import annotations

import fcntl
import ipaddress
import socket as sockets
import struct
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40
"""Size of ``struct ifreq`` on 64-bit systems: name (16), family and port (4), address (4), padding."""

_MAX_ADDRESSES = 1024
_INET6_TABLE = Path("/proc/net/if_inet6")


class InterfaceAddress(NamedTuple):
    """An address of an interface."""

    interface: str
    address: str


class InterfaceFilter:
    """Selects interfaces by name, in the syntax of ``NCCL_SOCKET_IFNAME``.

    Args:
        text: prefixes of names, separated by commas. ``^`` before a prefix excludes, ``=`` requires the whole
            name; before the first one, they apply to all.
    """

    def __init__(self, text: str) -> None:
        items = [item.strip() for item in text.split(",") if item.strip()]
        flags = items[0][: len(items[0]) - len(items[0].lstrip("^="))] if items else ""
        self.included: list[str] = []
        self._excluded: list[str] = []
        for item in items:
            own = flags + item[: len(item) - len(item.lstrip("^="))]
            name = item.lstrip("^=") + ("\0" if "=" in own else "")
            (self._excluded if "^" in own else self.included).append(name)

    def rank(self, interface: str) -> int | None:
        """The position of the prefix that selects ``interface``; None if it is not selected."""
        whole = interface + "\0"  # a prefix that ends with this is the whole name
        if any(whole.startswith(prefix) for prefix in self._excluded):
            return None
        if not self.included:
            return 0
        return next((i for i, prefix in enumerate(self.included) if whole.startswith(prefix)), None)


def select(
    addresses: Sequence[InterfaceAddress], wanted: InterfaceFilter, facing: str
) -> InterfaceAddress | None:
    """Chooses the address of an interface that ``wanted`` selects; loopback only if it is named.

    Args:
        facing: the address on the route to the other hosts: preferred, and the other one has its IP version.

    Returns:
        The address; None if there is none.
    """
    version = ipaddress.ip_address(facing).version
    ranked = [
        (each.address != facing, rank, i, each)
        for i, each in enumerate(addresses)
        if (rank := wanted.rank(each.interface)) is not None
        and (own := ipaddress.ip_address(each.address)).version == version
        and (wanted.included or not own.is_loopback)
    ]
    return min(ranked)[-1] if ranked else None


def interface_addresses() -> list[InterfaceAddress]:
    """The addresses of all interfaces, IPv4 first, without link-local ones. Empty unless this is Linux."""
    if sys.platform != "linux":
        return []
    return [*_ipv4_addresses(), *_ipv6_addresses()]


def _ipv4_addresses() -> list[InterfaceAddress]:
    buffer = array("B", bytes(_MAX_ADDRESSES * _IFREQ_BYTES))
    request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
    with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as any_socket:
        used = struct.unpack("iL", fcntl.ioctl(any_socket, _SIOCGIFCONF, request))[0]
    data = buffer.tobytes()
    return [
        InterfaceAddress(
            data[at : at + 16].split(b"\0", 1)[0].decode(), sockets.inet_ntoa(data[at + 20 : at + 24])
        )
        for at in range(0, used, _IFREQ_BYTES)
    ]


def _ipv6_addresses() -> list[InterfaceAddress]:
    try:
        lines = _INET6_TABLE.read_text().splitlines()
    except FileNotFoundError:  # a kernel without IPv6
        return []
    found = []
    for line in sorted(lines, key=lambda line: int(line.split()[1], 16)):  # by the index of the interface
        digits, *_, name = line.split()
        address = ipaddress.ip_address(int(digits, 16).to_bytes(16, "big"))
        if not address.is_link_local:  # such an address is of use only with the interface of its peer
            found.append(InterfaceAddress(name, str(address)))
    return found
