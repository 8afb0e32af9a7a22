"""The calls that wait for an answer. Pure bookkeeping: events and the time go in, calls come out.

Every method is one dictionary operation or a walk over a copy, so threads may call them at once; what a
method takes out, only its caller has, hence each call is settled by exactly one of answer, deadline, loss
and shutdown (P3).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from zmqgrad.runtime.future import Promise
from zmqgrad.transport.base import Inbound, ReplyChannel
from zmqgrad.wire.messages import MessageType

if TYPE_CHECKING:
    from zmqgrad.rpc.futures import RpcFuture

T = TypeVar("T")


What = str | Callable[..., Any]
"""What is asked for, for people: in words, or the function itself."""


def describe(what: What) -> str:
    """The words for it."""
    return what if isinstance(what, str) else getattr(what, "__qualname__", None) or repr(what)


class ChannelOutcome(Promise[T]):
    """The outcome of what a thread waits for at a channel, where it must be told of what other threads set.

    Made by the thread that is going to wait.
    """

    __slots__ = ("_channel", "_waiter")

    def __init__(self, channel: ReplyChannel) -> None:
        super().__init__()
        self._channel = channel
        self._waiter = threading.get_ident()

    def _settle(self, value: T, error: BaseException | None) -> bool:
        first = super()._settle(value, error)
        if first and threading.get_ident() != self._waiter:
            self._channel.wake()
        return first


@dataclass(slots=True, eq=False)
class PendingCall:
    """One request on its way.

    ``what`` says what was asked for, for people; ``keep`` stays alive as long; ``kind`` is its MessageType.
    ``channel``: where the calling thread waits for the answer; ``future``: what it has instead.
    """

    message_id: int
    peer: int
    deadline: float
    timeout: float
    what: What
    keep: Any = None
    kind: int = 0
    outcome: Promise[Inbound] = field(default_factory=Promise)
    channel: ReplyChannel | None = None
    future: RpcFuture[Any] | None = None

    @property
    def makes_value(self) -> bool:
        """Is it a ``remote``?"""
        return self.kind == MessageType.REMOTE_CALL

    def describe(self) -> str:
        """What was asked for."""
        return describe(self.what)


class CallTable:
    """Pending calls by message id."""

    def __init__(self) -> None:
        self._calls: dict[int, PendingCall] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: PendingCall) -> None:
        """``call`` is about to be sent."""
        self._calls[call.message_id] = call

    def take(self, message_id: int) -> PendingCall | None:
        """The call that this answers, no longer pending; None if nobody waits any more."""
        return self._calls.pop(message_id, None)

    def expire(self, now: float) -> list[PendingCall]:
        """Those whose deadline has passed, no longer pending."""
        return self._take_all([c for c in list(self._calls.values()) if c.deadline <= now])

    def lose(self, peer: int) -> list[PendingCall]:
        """Those that wait for ``peer``, no longer pending."""
        return self._take_all([c for c in list(self._calls.values()) if c.peer == peer])

    def drain(self) -> list[PendingCall]:
        """All, no longer pending."""
        return self._take_all(list(self._calls.values()))

    def pending(self) -> list[PendingCall]:
        """All, still pending."""
        return list(self._calls.values())

    def next_deadline(self) -> float:
        """The earliest deadline; infinite if there is none."""
        return min((c.deadline for c in list(self._calls.values())), default=math.inf)

    def _take_all(self, calls: list[PendingCall]) -> list[PendingCall]:
        return [c for c in calls if self._calls.pop(c.message_id, None) is not None]
