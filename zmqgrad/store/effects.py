"""What the state machine has its shell do: reply to who asked, and give notice to those who watch. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from zmqgrad.store.topics import Target
from zmqgrad.wire.frames import MAX_HEADER
from zmqgrad.wire.messages import (
    KeyCreated,
    KeyDeleted,
    KeyUpdated,
    Message,
    PrefixChanged,
    Refusal,
    StoreDone,
    StoreRefused,
)

MAX_TOGETHER = MAX_HEADER - (64 << 20)
"""Bytes of values in one message; the rest is room for their heads."""

DONE = StoreDone()
"""The answer to what has no other."""


class Reply(NamedTuple):
    """Send ``message`` to ``asker``."""

    asker: Any
    message: Message


class Notice(NamedTuple):
    """Tell whoever watches ``target``."""

    target: Target
    message: KeyCreated | KeyUpdated | KeyDeleted | PrefixChanged


Effect = Reply | Notice


def refuse(asker: Any, reason: Refusal, text: str) -> Reply:
    """Tell ``asker`` that it is not done, and why."""
    return Reply(asker, StoreRefused(reason, text))
