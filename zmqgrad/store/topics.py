"""What can be watched, and the topics under which the server publishes it."""

from __future__ import annotations

from typing import NamedTuple


class Prefix(NamedTuple):
    """All keys that begin with ``text``."""

    text: str


Target = str | Prefix
"""A key, or all that begin alike."""

HIDDEN = "\0"
"""Keys that begin so are the library's own: not counted, not listed, and beneath no other prefix."""


def is_beneath(prefix: str, key: str) -> bool:
    """Does one who watches ``prefix`` hear of ``key``?"""
    return key.startswith(prefix) and key.startswith(HIDDEN) == prefix.startswith(HIDDEN)


def topic_of(target: Target) -> bytes:
    """The topic of ``target``. Subscriptions match by prefix: so it has an end, and sorts before all nonces.

    A key with a zero byte in it can still match the topic of a shorter one: a subscriber looks at the
    message.
    """
    if isinstance(target, Prefix):
        return b"\x02" + target.text.encode() + b"\0"
    return b"\x01" + target.encode() + b"\0"
