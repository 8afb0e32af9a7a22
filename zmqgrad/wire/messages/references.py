"""References: fetching the value of an RRef, and its reference counts. See :mod:`zmqgrad.rpc.rref.protocol`.

Owner: the worker that holds the value. User: a worker that holds a fork; its parent sent it that fork.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from zmqgrad.wire.messages.base import MAX_TENSORS, Id, Message, MessageType, Seconds
from zmqgrad.wire.messages.payloads import NONE_PAYLOAD, Payload


class RRefFetch(Message, frozen=True, tag=6):
    """User to owner: send the value as soon as it exists."""

    TYPE: ClassVar[MessageType] = MessageType.RREF_FETCH
    rref_id: Id
    timeout: Seconds = 0.0


class RRefValue(Message, frozen=True, tag=7):
    """Owner to user: the value."""

    TYPE: ClassVar[MessageType] = MessageType.RREF_VALUE
    payload: Payload = NONE_PAYLOAD


class RRefForkRequest(Message, frozen=True):
    """New user to owner: register fork ``fork_id`` of ``rref_id``."""

    TYPE: ClassVar[MessageType] = MessageType.RREF_FORK_REQUEST
    rref_id: Id
    fork_id: Id


class RRefChildAccept(Message, frozen=True):
    """New user (or the owner) to the parent: the owner has registered child ``fork_id``."""

    TYPE: ClassVar[MessageType] = MessageType.RREF_CHILD_ACCEPT
    rref_id: Id
    fork_id: Id


class RRefUserDelete(Message, frozen=True):
    """User to owner: these forks, as (rref id, fork id), were deleted."""

    TYPE: ClassVar[MessageType] = MessageType.RREF_USER_DELETE
    forks: Annotated[tuple[tuple[Id, Id], ...], Meta(max_length=MAX_TENSORS)]


class RRefAck(Message, frozen=True):
    """Reply to the three above, which are idempotent: received."""

    TYPE: ClassVar[MessageType] = MessageType.RREF_ACK
