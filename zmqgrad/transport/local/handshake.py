"""The handshake of a local connection: each end proves that it knows the key of its job.

The connecting end sends its :class:`Hello` behind a proof, the accepting end replies with a proof of its own,
or closes; nothing else is read before. The kernel tells the user of a process, but not more: a container on
the network of its host reaches abstract names, and may use the same user number.

Proofs are HMACs (RFC 2104) with SHA-256. That of the hello includes the endpoint, which has only one listener
at a time, so nobody has a use for a recorded one: its reader listens there himself.
"""

from __future__ import annotations

import hmac

import msgspec

PROTOCOL = "zmqgrad-local-4"

PROOF_BYTES = 32

ANY = 0
"""The target of a client that does not know its store yet."""


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the connecting end tells: the incarnation to be reached, and the sender.

    ``source`` is the worker id of the sender; -1: it is a client of a store. ``number`` counts the
    connections of which each continues the one before.
    """

    protocol: str
    target: int
    source: int = -1
    incarnation: int = 0
    number: int = 0


def proven(key: bytes, endpoint: str, hello: Hello) -> bytes:
    """Returns the first packet of a connection to ``endpoint``."""
    packet = msgspec.msgpack.encode(hello)
    return _proof(key, b"hello", endpoint.encode(), packet) + packet


def read_hello(key: bytes, endpoint: str, packet: bytes) -> Hello | None:
    """Returns the hello of a connection to ``endpoint``; None if its sender does not know ``key``.

    Raises:
        msgspec.MsgspecError, UnicodeDecodeError: if it knows the key, and sends something else.
    """
    proof, content = packet[:PROOF_BYTES], packet[PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"hello", endpoint.encode(), content)):
        return None
    return msgspec.msgpack.decode(content, type=Hello)


def welcome(key: bytes, first: bytes) -> bytes:
    """Returns the reply to the connection that has begun with the packet ``first``."""
    return _proof(key, b"welcome", first)


def _proof(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join([len(part).to_bytes(4, "big") + part for part in parts]), "sha256")
