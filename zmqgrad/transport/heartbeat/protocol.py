"""The heartbeat protocol.

Each worker listens beside its mailbox: on one host at the ipc address with ``-heartbeat`` appended, between
hosts at the tcp port of its endpoint ``heartbeat://host:port/token``. A peer that connects first receives the
token, by which it recognizes another process at the same port, and then one byte for each byte that it sends.
"""

from __future__ import annotations

import logging
import socket as sockets
from collections.abc import Sequence

logger = logging.getLogger(__name__)

SUFFIX = "-heartbeat"
SCHEME = "heartbeat://"
TOKEN_SIZE = 16
PING = b"?"

PINGS_AT_ONCE = 256
"""How many bytes are read and returned at a time."""


def heartbeat_endpoint(endpoint: str, endpoints: Sequence[str]) -> str | None:
    """Returns the heartbeat endpoint of the peer whose mailbox is at ``endpoint``; None if it has none."""
    if endpoint.startswith("ipc://"):
        return endpoint + SUFFIX
    return next((e for e in endpoints if e.startswith(SCHEME)), None)


def write(socket: sockets.socket, data: bytes) -> None:
    """Sends ``data`` as far as possible without blocking. Errors show when it is read next."""
    try:
        socket.send(data)
    except OSError as e:
        logger.debug("a heartbeat was not sent: %s", e)
