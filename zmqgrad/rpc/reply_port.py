"""Reply ports: where a thread waits for its replies.

A :class:`ReplyPort` hides whether the waiting thread reads replies itself, at a reply channel of the
transport (same host), or is woken by the receiver. The envelope of a request has the number of the port.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from zmqgrad.runtime.blocking import blocking_section
from zmqgrad.runtime.clock import Clock
from zmqgrad.runtime.future import Promise
from zmqgrad.runtime.spinning import CORES
from zmqgrad.transport.base import Inbound, Mailbox, ReplyChannel

T = TypeVar("T")


class _WakingPromise(Promise[T]):
    """A promise that wakes the thread at the reply channel when another thread sets it.

    The thread that is going to wait must create it.
    """

    __slots__ = ("_channel", "_waiter")

    def __init__(self, channel: ReplyChannel) -> None:
        Promise.__init__(self)  # super() takes longer than all else here
        self._channel = channel
        self._waiter = threading.get_ident()

    def set_result(self, value: T, error: BaseException | None = None) -> bool:
        first = Promise.set_result(self, value, error)
        if first and threading.get_ident() != self._waiter:
            self._channel.wake()
        return first


class ReplyPort:
    """The place where one thread waits for replies; :class:`ReplyPorts` makes them.

    ``number`` goes into the envelope of the request; 0 is the receiver.
    """

    __slots__ = ("_clock", "held", "number")

    def __init__(self, clock: Clock) -> None:
        self.held: list[ReplyChannel] = []
        """The channel of this port, if it has one."""
        self._clock = clock
        self.number = 0

    def promise(self) -> Promise[Any]:
        """A new promise that :meth:`receive` can wait for, in the calling thread."""
        return _WakingPromise(self.held[0]) if self.held else Promise()

    def receive(self, promise: Promise[Any], deadline: float) -> Inbound | None:
        """Wait until a message arrives at this port, ``promise`` is set, or ``deadline`` passes.

        Args:
            promise: made by :meth:`promise` of this port.
            deadline: by the worker's clock; infinite for none.

        Returns:
            The message, which the caller must handle; None if ``promise`` is set or the deadline has passed.
        """
        now, held = self._clock.now, self.held
        if not held:
            promise.wait_done(None if deadline == math.inf else max(0.0, deadline - now()))
            return None
        channel = held[0]
        with blocking_section():
            while not promise.done():
                left = None if deadline == math.inf else max(0.0, deadline - now())
                inbound = channel.receive(left)
                if inbound is not None:
                    return inbound
                if left == 0.0:
                    break
        channel.settle()  # the caller waits for something else next, which may be the end of a peer
        return None

    def settle(self) -> None:
        """As :class:`~zmqgrad.transport.base.ReplyChannel`."""
        if self.held:
            self.held[0].settle()

    def release(self) -> None:
        """Gives the port back. Idempotent."""
        if held := self.held:
            held[0].release(held)

    def abandon(self, handle: Callable[[Inbound], None]) -> None:
        """Gives the port back, although a message may still arrive, and lets ``handle`` have those that have.

        Idempotent.
        """
        if self.held:
            self.held[0].abandon(self.held, handle)

    def __del__(self) -> None:
        if self.held:  # an interrupt came before its call was known, or while it was released
            self.release()


class ReplyPorts:
    """The reply ports of one worker.

    Args:
        mailbox: provides the reply channels.
        clock: by which deadlines are measured.
    """

    def __init__(self, mailbox: Mailbox, clock: Clock) -> None:
        self._acquire_channel = mailbox.acquire_channel
        self._clock = clock
        self.at_receiver = ReplyPort(clock)
        """The port of all threads that have no reply channel."""
        self.on_unexpected: Callable[[Inbound], None] = _ignore
        """Handles messages that the thread at a port did not wait for. Set by the server."""

    def acquire(self, peer: int) -> ReplyPort:
        """A port for replies of ``peer``. The calling thread must release it."""
        port = ReplyPort(self._clock)  # first: it has the channel from the very beginning
        held = port.held
        if not self._acquire_channel(peer, held):
            return self.at_receiver
        port.number = held[0].number
        return port

    def acquire_any(self, peers: Collection[int]) -> ReplyPort:
        """A port for messages of several peers. The calling thread must release it.

        If they can keep all cores busy, it does not spin.
        """
        for peer in peers:
            port = self.acquire(peer)
            if port is not self.at_receiver:
                port.held[0].spins = len(peers) < CORES
                return port
        return self.at_receiver


def _ignore(_: Inbound) -> None:
    """No server is connected yet."""
