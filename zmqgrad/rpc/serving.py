"""What a callee knows of the call that it serves: how much time is left, and whether anybody still waits.

A deadline travels as time left and is counted on the callee's own clock from the moment the call arrived, so
that queueing counts. Calls that the served function makes in turn get no more than what is left. A caller
that gives up (over time, Ctrl-C) says so by CANCEL; one that dies has given up as well.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token

from zmqgrad.runtime.clock import Clock, Deadline
from zmqgrad.transport.base import Inbound


class ServedCall:
    """One call of a peer, from its arrival to its answer."""

    __slots__ = ("clock", "deadline", "given_up", "message_id", "source")

    def __init__(self, source: int, message_id: int, deadline: float, clock: Clock) -> None:
        self.source = source
        self.message_id = message_id
        self.deadline = deadline
        self.clock = clock
        self.given_up = False

    def is_over(self) -> bool:
        """Does nobody wait any more?"""
        return self.given_up or self.deadline <= self.clock.now()

    def left(self) -> float:
        """Seconds until nobody waits any more: 0 once that is so, infinite if there is no limit."""
        if self.given_up:
            return 0.0
        if self.deadline == math.inf:
            return math.inf
        return max(0.0, self.deadline - self.clock.now())

    def __repr__(self) -> str:
        return f"<ServedCall of worker {self.source}: {self.left():g} s left>"


class ServingTable:
    """The calls that have come and are not answered yet, by message id (which names the caller, too)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # One dictionary operation at a time, or a walk over a copy: no lock needed.
        self._calls: dict[int, ServedCall] = {}
        self._ended = threading.Condition()
        self._awaited = False

    def __len__(self) -> int:
        return len(self._calls)

    def begin(self, inbound: Inbound) -> ServedCall | None:
        """A request has come; None if it is none that could be given up."""
        message = inbound.message
        message = getattr(message, "wrapped", message)
        seconds: float | None = getattr(message, "timeout", None)
        if seconds is None:
            return None
        envelope = inbound.envelope
        deadline = self._clock.now() + seconds if seconds else math.inf
        served = ServedCall(envelope.source, envelope.message_id, deadline, self._clock)
        self._calls[envelope.message_id] = served
        return served

    def end(self, served: ServedCall) -> None:
        """It has been answered, or will be by others."""
        self._calls.pop(served.message_id, None)
        if self._awaited:
            with self._ended:
                self._ended.notify_all()

    def wait_ended(self, calls: Sequence[ServedCall], deadline: Deadline) -> bool:
        """Wait until all of ``calls`` have been answered; False if that does not come by ``deadline``."""
        self._awaited = True
        with self._ended:
            return self._ended.wait_for(
                lambda: not any(self._calls.get(c.message_id) is c for c in calls), deadline.timeout()
            )

    def cancel(self, source: int, message_id: int) -> None:
        """Its caller waits no longer."""
        served = self._calls.get(message_id)
        if served is not None and served.source == source:
            served.given_up = True

    def lose(self, peer: int) -> None:
        """``peer`` is gone, and waits for nothing."""
        for served in list(self._calls.values()):
            if served.source == peer:
                served.given_up = True

    def all(self) -> list[ServedCall]:
        """All of them."""
        return list(self._calls.values())


_serving: ContextVar[ServedCall | None] = ContextVar("zmqgrad_serving", default=None)


serve: Callable[[ServedCall | None], Token[ServedCall | None]] = _serving.set
"""The calling thread serves that call until :func:`serve_no_more` is given the token."""

serve_no_more: Callable[[Token[ServedCall | None]], None] = _serving.reset
"""Back to what the thread served before."""


def time_left() -> float:
    """Seconds left of the call that the calling thread serves; infinite if it has no limit, or there is none.

    0 once its caller waits no longer: because the time is over, or the caller gave up or died.
    """
    served = _serving.get()
    return math.inf if served is None else served.left()


def is_serving() -> bool:
    """Does the calling thread serve a call?"""
    return _serving.get() is not None


def cancelled() -> bool:
    """Does nobody wait any more for the call that the calling thread serves?

    True once its time is over, or its caller gave up or died: a long function may ask from time to time
    and stop. False outside of calls.
    """
    served = _serving.get()
    return served is not None and served.is_over()
