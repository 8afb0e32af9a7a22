"""The requests that a worker is serving, and what the served function knows: time left, and cancellation.

A deadline travels as the time left and is measured by the callee's clock from the arrival of the request, so
that time in the queue counts. Calls made by the served function get at most what is left. A caller that stops
waiting (timeout, Ctrl-C) sends CANCEL; the requests of a lost peer are cancelled as well.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token

from zmqgrad.runtime.clock import Clock, Deadline
from zmqgrad.wire.frames import Envelope
from zmqgrad.wire.messages import Message, RemoteCall


class InFlightRequest:
    """One request of a peer, from its arrival to its reply."""

    cancelled = False
    ended = False
    """Whether it has its reply. Callbacks that its function has added may still run."""
    is_deferred = False
    """Whether the function has returned a future, by which the reply is sent later."""

    def __init__(
        self, source: int, message_id: int, deadline: float, clock: Clock, makes_value: bool = False
    ) -> None:
        self.source = source
        self.message_id = message_id
        self.deadline = deadline
        self.clock = clock
        self.makes_value = makes_value
        """Whether its function makes the value of an RRef, which others than its caller may wait for."""

    def is_over(self) -> bool:
        """Whether the caller has stopped waiting."""
        return self.cancelled or self.deadline <= self.clock.now()

    def left(self) -> float:
        """Seconds until the caller stops waiting: 0 once it has, infinite if there is no limit."""
        if self.cancelled:
            return 0.0
        if self.deadline == math.inf:
            return math.inf
        return max(0.0, self.deadline - self.clock.now())

    def __repr__(self) -> str:
        return f"<InFlightRequest of worker {self.source}: {self.left():g} s left>"


class InFlightRequests:
    """The requests that have arrived and have no reply yet, by their sender and its message id."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Each access is one dictionary operation or iterates over a copy: no lock needed.
        self._requests: dict[tuple[int, int], InFlightRequest] = {}
        self._lock = threading.RLock()
        self._ended = threading.Condition(self._lock)
        self.waiters = 0
        """Threads in :meth:`wait_ended`."""

    def __len__(self) -> int:
        return len(self._requests)

    def begin(self, envelope: Envelope, message: Message) -> InFlightRequest | None:
        """Register an incoming request, ``message``, or what another message wraps.

        Returns:
            None if this type cannot be cancelled.
        """
        seconds: float | None = getattr(message, "timeout", None)
        if seconds is None:
            return None
        deadline = self._clock.now() + seconds if seconds else math.inf
        makes_value = isinstance(message, RemoteCall)
        request = InFlightRequest(envelope.source, envelope.message_id, deadline, self._clock, makes_value)
        self._requests[envelope.source, envelope.message_id] = request
        return request

    def end(self, request: InFlightRequest) -> None:
        """Remove a request that has been replied to."""
        request.ended = True
        self._requests.pop((request.source, request.message_id), None)
        if self.waiters:
            self._notify()

    def _notify(self) -> None:
        with self._lock:
            self._ended.notify_all()

    def wait_ended(self, requests: Sequence[InFlightRequest], deadline: Deadline) -> bool:
        """Wait until all of ``requests`` have ended. Returns False if ``deadline`` passes first.

        The future of one whose caller has stopped waiting is not waited for.
        """
        with self._lock:
            self.waiters += 1
            try:
                return self._ended.wait_for(
                    lambda: (
                        not any(
                            self._requests.get((r.source, r.message_id)) is r
                            and not (r.is_deferred and r.cancelled)
                            for r in requests
                        )
                    ),
                    deadline.timeout(),
                )
            finally:
                self.waiters -= 1

    def cancel(self, source: int, message_id: int) -> None:
        """Cancel a request of ``source``, whose caller no longer waits."""
        request = self._requests.get((source, message_id))
        if request is not None:
            request.cancelled = True
            self._notify()

    def lose(self, peer: int) -> None:
        """Cancel the requests of a lost peer."""
        for request in list(self._requests.values()):
            if request.source == peer:
                request.cancelled = True
        self._notify()

    def all(self) -> list[InFlightRequest]:
        """A list of all requests in flight."""
        return list(self._requests.values())


_serving: ContextVar[InFlightRequest | None] = ContextVar("zmqgrad_serving", default=None)


start_serving: Callable[[InFlightRequest | None], Token[InFlightRequest | None]] = _serving.set
"""Makes the request the one that the calling thread serves, until :func:`end_serving` gets the token."""

end_serving: Callable[[Token[InFlightRequest | None]], None] = _serving.reset
"""Restores the request that the calling thread served before."""


def served() -> InFlightRequest | None:
    """The request that the calling thread serves."""
    request = _serving.get()
    return None if request is None or request.ended else request


def time_left() -> float:
    """Seconds left of the call that the calling thread serves.

    Returns:
        0 once its caller has stopped waiting (timeout, cancellation, loss); infinite if the call has no time
        limit, and outside of calls.

    Example:
        >>> rpc.rpc_sync("worker1", rpc.time_left, timeout=30) <= 30
        True
    """
    request = served()
    return math.inf if request is None else request.left()


def time_left_for_calls() -> float:
    """Seconds that calls of the calling thread may take: what is left of the call that it serves.

    Infinite if that makes the value of an RRef: others may wait for it, or nobody, as with a function that
    ``remote`` starts and that trains for hours.
    """
    request = _serving.get()  # as served() does, which would be a call more for each call
    return math.inf if request is None or request.ended or request.makes_value else request.left()


def is_serving() -> bool:
    """Whether the calling thread serves a call."""
    return served() is not None


def cancelled() -> bool:
    """Whether the caller of the call that the calling thread serves has stopped waiting.

    A long function may check this from time to time and stop.

    Returns:
        True once the time of the call is over, or its caller stopped waiting or died. False outside of calls.

    Example:
        >>> def count():
        ...     n = 0
        ...     while n < 1000 and not rpc.cancelled():  # nobody needs the rest
        ...         n += 1
        ...     return n
        >>> rpc.rpc_sync("worker1", count)
        1000
    """
    request = _serving.get()  # as above
    return request is not None and not request.ended and request.is_over()
