"""Names of the notice topics. Subscriptions match by prefix, so each key's topic ends in a zero byte."""

from __future__ import annotations

_KEY = b"key:"
_SYNC = b"sync:"


def topic_of(key: str) -> bytes:
    """Where changes of ``key`` are published."""
    return b"%b%b\0" % (_KEY, key.encode())


def key_of(topic: bytes) -> str | None:
    """The key whose topic this is; None for any other topic."""
    if not (topic.startswith(_KEY) and topic.endswith(b"\0")):
        return None
    try:
        return topic[len(_KEY) : -1].decode()
    except UnicodeDecodeError:  # a stranger's subscription
        return None


def sync_topic(nonce: str) -> bytes:
    """A topic to which nothing is published; seeing its subscription proves those before it."""
    return _SYNC + nonce.encode()
