"""Who could connect: nothing but loopback is listened on without protection, unless told so in as many words.

The door for CURVE: once sockets can be keyed by the job's secret, a secret is protection enough, and the
check below asks for one of the two.
"""

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


def check_exposure(address: str) -> None:
    """Refuse to listen where others than this host could connect.

    Raises:
        ConfigurationError: naming the address, and what to do.
    """
    if not address.startswith("tcp://"):
        return
    host = address[len("tcp://") :].rpartition(":")[0]
    if is_loopback(host) or environment.allows_insecure():
        return
    raise ConfigurationError(
        f"will not listen on {address}: anybody who reaches this address could read and write, as traffic "
        f"is neither encrypted nor authenticated yet (not even where {environment.SECRET} is set). Use "
        f"127.0.0.1 if all workers are on this host; on a network where you trust every machine, set "
        f"{environment.ALLOW_INSECURE}=1"
    )
