"""What can be watched."""

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
