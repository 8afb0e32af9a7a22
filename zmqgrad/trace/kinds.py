"""Types of messages as the readers of a trace group them."""

from __future__ import annotations

from zmqgrad.wire.messages import MessageType

PROGRAM_CALLS = frozenset(
    (MessageType.CALL, MessageType.REMOTE_CALL, MessageType.RREF_FETCH, MessageType.FORWARD_AUTOGRAD_REQ)
)
"""Requests of the program, which it may wait for."""

SERVED = PROGRAM_CALLS | {MessageType.CLEANUP_AUTOGRAD_CONTEXT_REQ, MessageType.DISCOVER_AUTOGRAD_REQ}
"""Requests that wait for a thread of the pool. The receiver handles others itself, or adds them to a pass."""

BACKWARD = frozenset((MessageType.BACKWARD_AUTOGRAD_REQ, MessageType.DROP_AUTOGRAD_REQ))
"""Requests of a backward pass. Reports to its coordinator take the place of replies."""

ONE_WAY = BACKWARD | {MessageType.CANCEL}
"""Requests that have no reply of their own."""

REPEATED = frozenset((MessageType.BACKWARD_AUTOGRAD_RESP,))
"""Replies whose message id is that of the pass: several have the same."""

_NAMES = {int(kind): kind.name for kind in MessageType}


def type_name(kind: int) -> str:
    """The name of a message type; its number if this release does not know it."""
    return _NAMES.get(kind) or str(kind)


def is_store(kind: int) -> bool:
    """Whether this is a query of a store, its reply, or a notification."""
    return 0x40 <= kind & 0xFF < 0x70
