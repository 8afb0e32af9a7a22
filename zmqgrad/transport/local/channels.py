"""Reply channels: the thread that waits for a reply reads it itself.

A reply that the receiver reads must still wake the requesting thread, which costs as much as the transfer
between the processes. So a thread that is about to wait acquires a channel, a :class:`LocalListener` of its
own, names it in the envelope of its request, and blocks in a system call until the reply arrives. There are
few channels, and only peers of this host can use them. A thread without a channel gets its reply through the
receiver, as does one whose reply is not one small packet.

Other events that end the wait (a reply at the receiver, a lost peer, a shutdown) wake the channel.

A channel is a path of the links of those that have replied to it (:mod:`zmqgrad.transport.endpoint`). While
its owner waits, only the owner reads it; when a link ends meanwhile, the owner finds the end of its
connection behind the last reply. While the owner does something else, the reader reads in its place.

Note [One list or the other]: Ctrl-C can end the owner between any two function calls. A channel moves from
the list of free ones to that of its owner, and back, in one call of C. So it is in one of them whenever that
comes, and the port that has the list of the owner releases what is left in it.
"""

from __future__ import annotations

import logging
import select
import threading
from collections import deque
from collections.abc import Callable, Sized
from itertools import cycle
from typing import Any

from zmqgrad.runtime.polling import SPENT, Wakeup, to_milliseconds
from zmqgrad.runtime.spinning import SpinBudget, Spinner
from zmqgrad.transport import base
from zmqgrad.transport.base import Inbound
from zmqgrad.transport.local.connection import LocalConnection, check_is_of_system
from zmqgrad.transport.local.listener import Arrival, LocalListener

logger = logging.getLogger(__name__)

MAX_CHANNELS = 8
"""How many threads of a worker can use channels at a time."""

MAX_NUMBER = 255
"""What an envelope has room for. The number of a channel that was abandoned is used again after all others:
a late reply then reaches the thread that has the number, which hands it on."""

Decode = Callable[[bytes, LocalConnection], "Inbound | None"]
"""Decodes a packet; returns None if it is malformed, which is counted."""

Listen = Callable[..., LocalListener]
"""(endpoint, poll) -> a listener there."""


def channel_endpoint(endpoint: str, number: int = 0) -> str:
    """Returns the endpoint of channel ``number`` of the worker at ``endpoint`` (ipc); 0: of its receiver."""
    return f"{endpoint}-{number}"


class ReplyChannel:
    """One channel, used by one thread at a time, its owner.

    Raises:
        OSError: if it cannot listen.
    """

    def __init__(self, number: int, channels: ReplyChannels) -> None:
        self.number = number
        self._channels = channels
        self.in_hand = False
        """Whether the owner handles a message that it has received."""
        self._over = False  # a wake-up was read, or the time was over, which the owner is still to be told
        self.spins = True
        self._spinner = Spinner(channels.spin_budget)
        self.abandoned = False
        """Whether its owner is done with it, and no other thread may use it."""
        # Held while the owner waits, and while the reader reads in its place.
        self._reading = threading.Lock()
        self._arrived: deque[Arrival] = deque()
        self._registry = select.poll()
        self._poll = self._registry.poll
        self._wakeup = Wakeup()
        self._listener = channels.listen(channel_endpoint(channels.endpoint, number), self._registry)
        self._listener.on_resumed = self._on_resumed
        self._registry.register(self._wakeup.fd, select.POLLIN)

    def _on_resumed(self) -> None:
        """A descriptor is polled again, which a poll under way does not notice. From any thread."""
        self.wake()
        self._channels.settle(self)

    def receive(self, seconds: float | None) -> Inbound | None:
        """As :class:`~zmqgrad.transport.base.ReplyChannel`."""
        with self._reading:
            self.in_hand = False
            while self._wait(seconds):
                packet, connection = self._arrived.popleft()
                if packet:
                    self.in_hand = True
                    return self._channels.decode(packet, connection)
                self._channels.on_path_closed(connection)
        # A link may have begun to end meanwhile, whose end is still to be read here.
        self._channels.settle(self)
        return None

    def _wait(self, seconds: float | None) -> bool:
        """Waits until something has arrived. Returns False after ``seconds``, or a wake-up without."""
        while not self._arrived:
            if self._over:
                self._over = False
                return False
            ready = (self.spins and self._spinner.spin(self._poll)) or self._poll(to_milliseconds(seconds))
            self._over = not ready
            for fd, _ in ready:
                if fd == self._wakeup.fd:
                    self._wakeup.clear()
                    self._over = True
                else:
                    self._arrived.extend(self._listener.read(fd))
        return True

    def settle(self) -> None:
        """As :class:`~zmqgrad.transport.base.ReplyChannel`."""
        self.in_hand = False
        self._channels.settle(self)

    def take_arrived(self) -> list[Arrival]:
        """Returns all that has arrived, to be handled by the calling thread.

        Nothing while the owner waits, or handles a message that has arrived before.
        """
        if not self._reading.acquire(blocking=False):
            return []
        try:
            if self.in_hand or not self._listener.is_open:
                return []
            self._listener.accept_pending()
            # Without what comes to the listener from now on: strangers could connect without end.
            while fds := [fd for fd, _ in self._poll(0) if fd in self._listener.connections]:
                for fd in fds:
                    self._arrived.extend(self._listener.read(fd))
            arrived = list(self._arrived)
            self._arrived.clear()
            return arrived
        finally:
            self._reading.release()

    def release(self, held: list[base.ReplyChannel]) -> None:
        """As :class:`~zmqgrad.transport.base.ReplyChannel`."""
        if self.abandoned:
            self.abandon(held, _ignore)
        else:
            self._channels.take_back(self, held)

    def abandon(self, held: list[base.ReplyChannel], handle: Callable[[Inbound], None]) -> None:
        """As :class:`~zmqgrad.transport.base.ReplyChannel`."""
        self.abandoned = True
        with self._reading:
            self.in_hand = False
            self._listener.stop()  # nothing more arrives
            while fds := list(self._listener.connections):  # again: one may continue another
                for fd in fds:
                    self._arrived.extend(self._listener.read(fd))
        while self._arrived:
            packet, connection = self._arrived.popleft()
            if not packet:
                self._channels.on_path_closed(connection)
            elif (inbound := self._channels.decode(packet, connection)) is not None:
                handle(inbound)
        self._channels.take_back(self, held)

    def wake(self) -> None:
        """As :class:`~zmqgrad.transport.base.ReplyChannel`."""
        self._wakeup.set()

    def close(self) -> None:
        """Called by :class:`ReplyChannels` for a channel that no thread uses."""
        with self._reading:
            self._listener.close()
        self._wakeup = SPENT


def _ignore(_: Inbound) -> None:
    """An interrupt has come while its owner abandoned the channel."""


_LAST = (-1,)
"""``target.extend(map(source.pop, _LAST))`` moves the last item: see Note [One list or the other]."""


class ReplyChannels:
    """The channels of one mailbox, created as they are needed.

    Args:
        endpoint: the mailbox's ipc address, from which those of the channels are derived.
        listen: creates a listener at an endpoint, for a poll.
        on_path_closed: called with a connection that has ended, behind its last packet.
        on_settled: called with a channel whose owner has left, or does something else than to receive, while
            links end.
        ending: the links that are about to end, whose last messages may be at a channel.
        budget: how long the threads of this mailbox spin.
    """

    def __init__(
        self,
        endpoint: str,
        listen: Listen,
        decode: Decode,
        on_path_closed: Callable[[LocalConnection], None],
        on_settled: Callable[[ReplyChannel], None],
        ending: Sized,
        budget: SpinBudget,
    ) -> None:
        self.endpoint = endpoint
        self.listen = listen
        self.decode = decode
        self.on_path_closed = on_path_closed
        self.on_settled = on_settled
        self.ending = ending
        self.spin_budget = budget
        self._all: list[ReplyChannel] = []
        # Guards all below. Reentrant, as a finalizer of a port that was forgotten releases its channel.
        self._lock = threading.RLock()
        self._free: list[Any] = []  # see Note [One list or the other]
        self._numbers = cycle(range(1, MAX_NUMBER + 1))
        self._closed = False
        self._all_closed = threading.Condition(self._lock)

    def acquire(self, held: list[base.ReplyChannel]) -> bool:
        """Puts a channel into ``held`` for the calling thread, which must release it; False: none is free."""
        with self._lock:
            if self._closed or not (self._free or self._add()):
                return False
            held.extend(map(self._free.pop, _LAST))
            self.spin_budget.waits = True
            return True

    def _add(self) -> bool:
        """Adds a free channel. Returns whether that is possible."""
        if len(self._all) >= MAX_CHANNELS:
            return False
        used = {channel.number for channel in self._all}
        try:
            channel = ReplyChannel(next(n for n in self._numbers if n not in used), self)
        except OSError as e:
            check_is_of_system(e)
            logger.debug("no more reply channels: %s", e)
            return False
        deque(map(list.append, (self._all, self._free), (channel, channel)), maxlen=0)  # in one call
        return True

    def all(self) -> list[ReplyChannel]:
        """Returns all channels, idle or not."""
        return self._all.copy()

    def settle(self, channel: ReplyChannel) -> None:
        """What arrives at ``channel``, which its owner does not read now, may belong to a link that ends."""
        if self.ending:
            self.on_settled(channel)

    def take_back(self, channel: ReplyChannel, held: list[base.ReplyChannel]) -> None:
        """Makes ``channel``, whose owner has left, available to others, or closes it if it was abandoned."""
        channel.in_hand = False  # before another thread can own it
        if self.ending:
            self.on_settled(channel)
        channel.spins = True
        with self._lock:
            if self._closed or channel.abandoned:
                self._shut(channel)
                held.clear()
            elif held:
                self._free.extend(map(held.pop, _LAST))
            self.spin_budget.waits = len(self._free) < len(self._all)

    def _shut(self, channel: ReplyChannel) -> None:
        channel.close()
        if channel in self._all:
            self._all.remove(channel)
        self._all_closed.notify_all()

    def close(self) -> None:
        """Closes idle channels now, and the others when they are released. Idempotent."""
        with self._lock:
            self._closed = True
            for channel in self._free:
                self._shut(channel)
            self._free.clear()
            self.spin_budget.waits = bool(self._all)

    def join(self, seconds: float | None) -> bool:
        """Waits until all are closed. Returns whether that happened within ``seconds``."""
        with self._lock:
            return self._all_closed.wait_for(lambda: not self._all, seconds)
