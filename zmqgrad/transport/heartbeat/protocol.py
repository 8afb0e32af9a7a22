"""The heartbeat protocol.

Each worker listens beside its mailbox: on one host at the ipc address with ``-heartbeat`` appended, between
hosts at the tcp port of its endpoint ``heartbeat://host:port/token``. A peer that connects first receives

    token        by which it recognizes another process at the same port
    challenge    random

and sends a nonce and the proof that it knows the key of the job. It receives the proof of the other end, and
from then on one byte for each byte that it sends. The proofs are HMACs (RFC 2104) of all three: another
process that has the name or the port of one that has ended does not pass for it. A worker that leaves ends
each connection by ``GOODBYE`` and the reason: a peer may have sent it nothing else.
"""

from __future__ import annotations

import hmac
import logging
import socket as sockets
from collections.abc import Sequence

logger = logging.getLogger(__name__)

SUFFIX = "-heartbeat"
SCHEME = "heartbeat://"
TOKEN_SIZE = CHALLENGE_SIZE = NONCE_SIZE = PROOF_SIZE = 16
PING = b"?"
GOODBYE = b"!"

OF_PEER, OF_LISTENER = b"peer", b"listener"
"""Whose proof it is."""

PINGS_AT_ONCE = 256
"""How many bytes are read and returned at a time."""


def heartbeat_endpoint(endpoint: str, endpoints: Sequence[str]) -> str | None:
    """Returns the heartbeat endpoint of the peer whose mailbox is at ``endpoint``; None if it has none."""
    if endpoint.startswith("ipc://"):
        return endpoint + SUFFIX
    return next((e for e in endpoints if e.startswith(SCHEME)), None)


def prove(key: bytes, whose: bytes, greeting: bytes, nonce: bytes) -> bytes:
    """Returns a proof for a connection; ``greeting``: token and challenge."""
    return hmac.digest(key, b"heartbeat " + whose + greeting + nonce, "sha256")[:PROOF_SIZE]


def write(socket: sockets.socket, data: bytes) -> None:
    """Sends ``data`` as far as possible without blocking. Errors show when it is read next."""
    try:
        socket.send(data)
    except OSError as e:
        logger.debug("a heartbeat was not sent: %s", e)
