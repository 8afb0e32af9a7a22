"""A shorter way between a request server and clients of its own host and user: a unix socket beside tcp.

Loopback tcp costs a small request and its answer a third of their time. So a server that speaks in the clear
also listens at a name that it makes up, and tells it to whoever connects by tcp; a client tries that name
before it says who it is, and stays on tcp if nobody is there. Whether server and client share a host is thus
found out by trying: on another host, in another container, at the server's second life, the name leads
nowhere, for it has 128 random bits.

What this must not make worse: both ends ask the kernel who is at the other, and talk only to their own user.
A name means one among those that begin as ours do, so no server can send a client elsewhere. With the name
goes the address that the server sees, and a client stays if that is not its own: who has a tunnel or a proxy
between the two wants it to be used. Who comes this way counts as those who come by tcp do. With a secret
there is no such way: all is encrypted, by tcp.
"""

from __future__ import annotations

import logging
import secrets
import select
import socket
import string
import sys
from collections.abc import Callable

from zmqgrad.transport.door import is_of_this_user
from zmqgrad.transport.tcp import BACKLOG

logger = logging.getLogger(__name__)

BUFFER = 1 << 20
"""Bytes that wait for a reader (the system may allow fewer), so that a large answer takes few turns."""

_HEX = frozenset(string.hexdigits.encode())
_SIZE = 32


class Nearby:
    """Listens for those nearby, without blocking.

    Raises:
        OSError: if the system has no such thing.
    """

    def __init__(self) -> None:
        # Elsewhere a name is a file, which a process that is killed leaves behind.
        if sys.platform != "linux":
            raise OSError("there are no names for sockets but in the file system")
        self._name = secrets.token_hex(_SIZE // 2).encode()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.listener.setblocking(False)
            self.listener.bind(_address(self._name))
            self.listener.listen(BACKLOG)
        except OSError:
            self.listener.close()
            raise

    def invitation(self, address: str) -> bytes:
        """What to tell whoever has come by tcp from ``address``."""
        return self._name + address.encode()


def dial_nearby(invitation: bytes, connection: socket.socket) -> socket.socket | None:
    """A connection to the server that said ``invitation`` on ``connection``.

    None: it is not of this host and user, or not without somebody between, or does not take one at once.
    """
    name, address = invitation[:_SIZE], invitation[_SIZE:]
    if len(name) < _SIZE or not _HEX.issuperset(name) or address != shown(connection.getsockname()).encode():
        return None
    try:
        nearby = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:
        return None
    try:
        nearby.setblocking(False)
        nearby.connect(_address(name))
        if is_of_this_user(nearby):
            nearby.setblocking(True)
            return set_up_nearby(nearby)
    except OSError as e:  # nobody is there, or too many at once: tcp will do
        logger.debug("no way but tcp to the server at %s: %s", address.decode(), e)
    nearby.close()
    return None


def set_up_nearby(connection: socket.socket) -> socket.socket:
    """What every such connection gets at birth."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    return connection


def wait_for(connection: socket.socket) -> Callable[[float | None], object]:
    """What waits, so many ms or without end, until there is something to read: true if there is.

    To be called before each ``recv``, which would otherwise wake up for nothing when the other end has read
    what was sent, as there is room again: a second change of threads for each request.
    """
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return poll.poll


def shown(address: tuple[str | int, ...]) -> str:
    """Host and port of a socket's address."""
    return f"{address[0]}:{address[1]}"


def _address(name: bytes) -> bytes:
    return b"\0zmqgrad-nearby-" + name
