"""Calls: run this function, and what came of it.

Caller and callee are any two workers. Every request of these families may be answered by EXCEPTION instead.
"""

from __future__ import annotations

from typing import ClassVar

from zmqgrad.wire.messages.base import Id, Message, MessageType, Name, Seconds, Text
from zmqgrad.wire.messages.payloads import NONE_PAYLOAD, Payload


class Call(Message, frozen=True, tag=1):
    """Caller to callee: run ``function`` (``module:qualified.name``) on the payload (args, kwargs).

    An empty ``function`` means that the payload is (function, args, kwargs). ``timeout`` is the time
    left of the caller's deadline, 0 for none.
    """

    TYPE: ClassVar[MessageType] = MessageType.CALL
    function: Text
    payload: Payload
    timeout: Seconds = 0.0


class RemoteCall(Message, frozen=True, tag=2):
    """Caller to owner: as CALL, and keep the result as ``rref_id``, of which I am fork ``fork_id``."""

    TYPE: ClassVar[MessageType] = MessageType.REMOTE_CALL
    function: Text
    payload: Payload
    rref_id: Id
    fork_id: Id
    timeout: Seconds = 0.0


class Result(Message, frozen=True, tag=3):
    """Callee to caller: what the function returned."""

    TYPE: ClassVar[MessageType] = MessageType.RESULT
    payload: Payload = NONE_PAYLOAD


class RemoteResult(Message, frozen=True, tag=4):
    """Owner to caller: the function has run (or failed; a fetch will tell); your fork is known."""

    TYPE: ClassVar[MessageType] = MessageType.REMOTE_RESULT
    rref_id: Id
    fork_id: Id


class ExceptionReply(Message, frozen=True, tag=5):
    """Callee to caller: instead of an answer, this exception.

    ``pickled`` rebuilds it; where that is empty or fails, ``kind`` (qualified name of its type) and
    ``text`` speak. ``worker`` names where it happened.
    """

    TYPE: ClassVar[MessageType] = MessageType.EXCEPTION
    worker: Name
    kind: Text
    text: str
    traceback: str
    pickled: bytes = b""


class Cancel(Message, frozen=True):
    """Caller to callee: I have given up waiting for ``call`` (a message id). Not answered."""

    TYPE: ClassVar[MessageType] = MessageType.CANCEL
    call: Id
