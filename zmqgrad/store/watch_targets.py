"""Watch targets (keys and prefixes), and their topics on the notification channel."""

from __future__ import annotations

from typing import NamedTuple


class Prefix(NamedTuple):
    """All keys that begin with ``text``."""

    text: str


Target = str | Prefix
"""A key, or all keys with a prefix."""

INTERNAL_PREFIX = "\0"
"""Keys with this prefix are the library's own: not counted, not listed, and matched by no other prefix."""


def prefix_matches(prefix: str, key: str) -> bool:
    """Whether a watch of ``prefix`` covers ``key``."""
    return key.startswith(prefix) and key.startswith(INTERNAL_PREFIX) == prefix.startswith(INTERNAL_PREFIX)


def topic_of(target: Target) -> bytes:
    """The topic of ``target``, with a terminator, as ZeroMQ matches topics by prefix. Sorts before nonces.

    A key that contains a zero byte can still match the topic of a shorter one, so subscribers also check the
    key in the message.
    """
    if isinstance(target, Prefix):
        return b"\x02" + target.text.encode() + b"\0"
    return b"\x01" + target.encode() + b"\0"
