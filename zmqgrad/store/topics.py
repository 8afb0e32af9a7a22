"""What can be watched, and the names of the topics at which notices of it are published.

Subscriptions match by prefix, so each topic ends in a zero byte.
"""

from __future__ import annotations

from typing import NamedTuple


class Prefix(NamedTuple):
    """All keys that begin with ``text``."""

    text: str


Target = str | Prefix
"""A key, or all that begin alike."""

HIDDEN = "\0"
"""Keys that begin so are the library's own: not counted, not listed, and beneath no other prefix."""

_SYNC = b"sync:"


def topic_of(target: Target) -> bytes:
    """Where changes of ``target`` are published."""
    if isinstance(target, Prefix):
        return b"prefix:%b\0" % target.text.encode()
    return b"key:%b\0" % target.encode()


def target_of(topic: bytes) -> Target | None:
    """What has this topic; None for any other topic."""
    kind, _, name = topic.partition(b":")
    if not topic.endswith(b"\0"):
        return None
    try:
        text = name[:-1].decode()
    except UnicodeDecodeError:  # a stranger's subscription
        return None
    if kind == b"prefix":
        return Prefix(text)
    return text if kind == b"key" else None


def is_beneath(prefix: str, key: str) -> bool:
    """Does one who watches ``prefix`` hear of ``key``?"""
    return key.startswith(prefix) and key.startswith(HIDDEN) == prefix.startswith(HIDDEN)


def sync_topic(nonce: str) -> bytes:
    """A topic to which nothing is published; seeing its subscription proves those before it."""
    return _SYNC + nonce.encode()
