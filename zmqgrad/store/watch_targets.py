"""Watch targets (keys and prefixes), and their topics on the notification channel."""

from __future__ import annotations

import hashlib
from typing import NamedTuple


class Prefix(NamedTuple):
    """All keys that begin with ``text``."""

    text: str


Target = str | Prefix
"""A key, or all keys with a prefix."""

INTERNAL_PREFIX = "\0zmqgrad/"
"""Keys with this prefix are the library's own: not counted, not listed, and matched by no other prefix."""


MAX_PLAIN_BYTES = 256
"""A longer key or prefix has its hash as a topic. libzmq keeps topics in a tree with a node for each byte,
and frees that by recursion, which overflows the stack."""


def prefix_matches(prefix: str, key: str) -> bool:
    """Whether a watch of ``prefix`` covers ``key``."""
    return key.startswith(prefix) and key.startswith(INTERNAL_PREFIX) == prefix.startswith(INTERNAL_PREFIX)


def topic_of(target: Target) -> bytes:
    """The topic of ``target``, with a terminator, as ZeroMQ matches topics by prefix. Sorts before nonces.

    A key that contains a zero byte can still match the topic of a shorter one, so subscribers also check the
    key in the message.
    """
    is_prefix = isinstance(target, Prefix)
    name = (target.text if isinstance(target, Prefix) else target).encode()
    if len(name) <= MAX_PLAIN_BYTES:
        return (b"\x02" if is_prefix else b"\x01") + name + b"\0"
    return (b"\x04" if is_prefix else b"\x03") + hashlib.sha256(name).digest()
