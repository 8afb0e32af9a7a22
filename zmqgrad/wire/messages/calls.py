"""Calls and their results.

Caller and callee are any two workers. The reply to any request of this family, of references and of autograd
may be EXCEPTION instead.
"""

from __future__ import annotations

from typing import ClassVar

from zmqgrad.wire.messages.base import Id, Message, MessageType, Name, Seconds, Text, Traceparent
from zmqgrad.wire.messages.payloads import NONE_PAYLOAD, Payload


class Call(Message, frozen=True, tag=1):
    """Caller to callee: run ``function`` (``module:qualified.name``) with the arguments in the payload.

    If ``function`` is empty, the payload contains the function as well. ``timeout`` is what is left of the
    caller's deadline in seconds, 0 for none. ``traceparent`` (W3C Trace Context) is the span of the caller;
    empty: it has none.
    """

    TYPE: ClassVar[MessageType] = MessageType.CALL
    function: Text
    payload: Payload
    timeout: Seconds = 0.0
    traceparent: Traceparent = ""


class RemoteCall(Message, frozen=True, tag=2):
    """Caller to owner: as CALL, but keep the result as ``rref_id``; the caller holds fork ``fork_id``."""

    TYPE: ClassVar[MessageType] = MessageType.REMOTE_CALL
    function: Text
    payload: Payload
    rref_id: Id
    fork_id: Id
    timeout: Seconds = 0.0
    traceparent: Traceparent = ""


class Result(Message, frozen=True, tag=3):
    """Callee to caller: the return value of the function."""

    TYPE: ClassVar[MessageType] = MessageType.RESULT
    payload: Payload = NONE_PAYLOAD


class RemoteResult(Message, frozen=True, tag=4):
    """Owner to caller: the function has finished and the fork is registered. A fetch reports a failure."""

    TYPE: ClassVar[MessageType] = MessageType.REMOTE_RESULT
    rref_id: Id
    fork_id: Id


class ExceptionReply(Message, frozen=True, tag=5):
    """Callee to caller: the request raised this exception.

    ``pickled`` is the exception. If it is empty or cannot be read, the caller raises an error with ``kind``
    (qualified name of the type) and ``text``. ``worker`` is where it was raised.
    """

    TYPE: ClassVar[MessageType] = MessageType.EXCEPTION
    worker: Name
    kind: Text
    text: str
    traceback: str
    pickled: bytes = b""


class Cancel(Message, frozen=True):
    """Caller to callee: no longer waiting for ``call`` (a message id). Has no reply."""

    TYPE: ClassVar[MessageType] = MessageType.CANCEL
    call: Id
