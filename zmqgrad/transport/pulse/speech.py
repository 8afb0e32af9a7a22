"""What is said about who lives, and where.

Each worker listens beside its mailbox: on one host at the ipc address with ``-pulse`` appended, between hosts
at a tcp port that its endpoint ``pulse://host:port/token`` names. Who connects is told the token (so that
another process at the same port is known as another), and gets a byte back for each that it sends.
"""

from __future__ import annotations

import logging
import socket as sockets
from collections.abc import Sequence

logger = logging.getLogger(__name__)

SUFFIX = "-pulse"
SCHEME = "pulse://"
TOKEN_SIZE = 16
PING = b"?"

PINGS_AT_ONCE = 256
"""Bytes that are read and answered at a time."""


def pulse_of(endpoint: str, endpoints: Sequence[str]) -> str | None:
    """Where the pulse of the peer is felt whose mailbox is sent to at ``endpoint``; None if nowhere."""
    if endpoint.startswith("ipc://"):
        return endpoint + SUFFIX
    return next((e for e in endpoints if e.startswith(SCHEME)), None)


def read(socket: sockets.socket) -> bytes | None:
    """What has come; empty at the end; None if nothing has."""
    try:
        return socket.recv(PINGS_AT_ONCE)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def write(socket: sockets.socket, data: bytes) -> None:
    """Send what can be sent at once. That the other end is gone shows when it is read."""
    try:
        socket.send(data)
    except OSError as e:
        logger.debug("a heartbeat was not sent: %s", e)
