"""Effects of the state machine, carried out by its driver: replies and notifications. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from zmqgrad.store.watch_targets import Target
from zmqgrad.wire.frames import MAX_HEADER_BYTES
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

MAX_BATCH_BYTES = MAX_HEADER_BYTES - (64 << 20)
"""Limit of the values in one message; the rest of the frame is left for keys and headers."""

DONE = StoreDone()
"""The reply to a query without a result."""


class Reply(NamedTuple):
    """Send ``message`` to ``requester``."""

    requester: Any
    message: Message


class Notification(NamedTuple):
    """Publish ``message`` to the watchers of ``target``."""

    target: Target
    message: KeyCreated | KeyUpdated | KeyDeleted | PrefixChanged


Effect = Reply | Notification


def refuse(requester: Any, reason: Refusal, text: str) -> Reply:
    """A reply that refuses the query of ``requester``."""
    return Reply(requester, StoreRefused(reason, text))
