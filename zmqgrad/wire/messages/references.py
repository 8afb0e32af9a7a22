"""References: the value of an RRef, and who holds it (DESIGN section 9, "RRef protocol").

Owner: the worker that has the value. User: one that holds a fork of it; its parent is who sent it that fork.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from zmqgrad.wire.messages.base import MAX_TENSORS, Id, Message, MessageType, Seconds
from zmqgrad.wire.messages.payloads import NONE_PAYLOAD, Payload


class RRefFetch(Message, frozen=True, tag=6):
    """User to owner: send me the value, once it is there."""

    TYPE: ClassVar[MessageType] = MessageType.RREF_FETCH
    rref_id: Id
    timeout: Seconds = 0.0


class RRefValue(Message, frozen=True, tag=7):
    """Owner to user: the value."""

    TYPE: ClassVar[MessageType] = MessageType.RREF_VALUE
    payload: Payload = NONE_PAYLOAD


class RRefForkRequest(Message, frozen=True):
    """New user to owner: I hold fork ``fork_id`` of ``rref_id``; count me."""

    TYPE: ClassVar[MessageType] = MessageType.RREF_FORK_REQUEST
    rref_id: Id
    fork_id: Id


class RRefChildAccept(Message, frozen=True):
    """New user (or the owner) to the parent: the owner knows of child ``fork_id``; let go if you like."""

    TYPE: ClassVar[MessageType] = MessageType.RREF_CHILD_ACCEPT
    rref_id: Id
    fork_id: Id


class RRefUserDelete(Message, frozen=True):
    """User to owner: these forks, as (rref id, fork id), are gone."""

    TYPE: ClassVar[MessageType] = MessageType.RREF_USER_DELETE
    forks: Annotated[tuple[tuple[Id, Id], ...], Meta(max_length=MAX_TENSORS)]


class RRefAck(Message, frozen=True):
    """Answer to the three above: heard. Hearing one twice is harmless."""

    TYPE: ClassVar[MessageType] = MessageType.RREF_ACK
