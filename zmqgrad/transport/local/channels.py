"""Reply channels: the thread that waits for a reply reads it itself.

A reply that the receiver reads must still wake the requesting thread, which costs as much as the transfer
between the processes. So a thread that is about to wait acquires a channel, a :class:`LocalListener` of its
own, names it in the envelope of its request, and blocks in a system call until the reply arrives. There are
few channels, and only peers of this host can use them. A thread without a channel gets its reply through the
receiver, as does one whose reply is not one small packet.

Other events that end the wait (a reply at the receiver, a lost peer, a shutdown) wake the channel.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from zmqgrad.runtime.spinning import SpinBudget, Spinner
from zmqgrad.transport.base import Inbound
from zmqgrad.transport.local.listener import LocalListener
from zmqgrad.transport.polling import to_milliseconds

logger = logging.getLogger(__name__)

MAX_CHANNELS = 8
"""How many threads of a worker can use channels at a time."""

Decode = Callable[[bytes], "Inbound | None"]
"""Decodes a packet; returns None if it is malformed, which is counted."""


def channel_endpoint(endpoint: str, number: int = 0) -> str:
    """Returns the endpoint of channel ``number`` of the worker at ``endpoint`` (ipc); 0: of its receiver."""
    return f"{endpoint}-{number}"


class ReplyChannel:
    """One channel, used by one thread at a time.

    Raises:
        OSError: if it cannot listen.
    """

    def __init__(
        self,
        number: int,
        listen: Callable[[str, select.poll], LocalListener],
        endpoint: str,
        decode: Decode,
        free: Callable[[ReplyChannel], None],
        budget: SpinBudget,
    ) -> None:
        self.number = number
        self._spinner = Spinner(budget)
        self._decode = decode
        self.release: Callable[[], None] = partial(free, self)
        """As :class:`~zmqgrad.transport.base.ReplyChannel`."""
        self._arrived: deque[bytes] = deque()
        self._poll = select.poll()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._listener = listen(channel_endpoint(endpoint, number), self._poll)
        except OSError:
            os.close(self._wakeup)
            raise
        self._poll.register(self._wakeup, select.POLLIN)

    def receive(self, seconds: float | None) -> Inbound | None:
        """As :class:`~zmqgrad.transport.base.ReplyChannel`."""
        while not self._arrived:
            ready = self._spinner.spin(self._poll.poll) or self._poll.poll(to_milliseconds(seconds))
            over = not ready
            for fd, _ in ready:
                if fd == self._wakeup:
                    os.eventfd_read(fd)
                    over = True
                else:
                    self._arrived.extend(self._listener.read(fd))
            if over and not self._arrived:
                return None
        return self._decode(self._arrived.popleft())

    def wake(self) -> None:
        """As :class:`~zmqgrad.transport.base.ReplyChannel`."""
        os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Called by :class:`ReplyChannels` for a channel that no thread uses."""
        self._listener.close()
        self.release = _nothing  # breaks a reference cycle that would delay __del__

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # Not in close(): another thread may be about to wake this, and the number could be reused.
        # `close` is bound as a default: while the interpreter ends, globals of modules become None.
        if hasattr(self, "_listener"):
            try:
                close(self._wakeup)
            except OSError:
                return  # the program has closed all file descriptors


def _nothing() -> None:
    """The channel is closed."""


class ReplyChannels:
    """The channels of one mailbox, created as they are needed.

    Args:
        endpoint: the mailbox's ipc address, from which those of the channels are derived.
        listen: creates a listener at an endpoint, for a poll.
        budget: how long the threads of this mailbox spin.
    """

    def __init__(
        self,
        endpoint: str,
        listen: Callable[[str, select.poll], LocalListener],
        decode: Decode,
        budget: SpinBudget,
    ) -> None:
        self._endpoint = endpoint
        self._listen = listen
        self._decode = decode
        self._spin_budget = budget
        self._lock = threading.Lock()  # guards all below
        self._free: list[ReplyChannel] = []
        self._made = 0
        self._open = 0
        self._closed = False
        self._all_closed = threading.Condition(self._lock)

    def acquire(self) -> ReplyChannel | None:
        """Returns a channel for the calling thread, which must release it; None if none is free."""
        with self._lock:
            if self._free:
                self._spin_budget.waiting += 1
                return self._free.pop()
            if self._closed or self._made >= MAX_CHANNELS:
                return None
            self._made += 1
            try:
                channel = ReplyChannel(
                    self._made, self._listen, self._endpoint, self._decode, self._take_back, self._spin_budget
                )
            except OSError as e:
                self._made = MAX_CHANNELS  # it would fail again
                logger.debug("no more reply channels: %s", e)
                return None
            self._open += 1
            self._spin_budget.waiting += 1
            return channel

    def acquire_idle(self) -> list[ReplyChannel]:
        """Acquires all idle channels for the calling thread, which must release them."""
        with self._lock:
            idle, self._free = self._free, []
            self._spin_budget.waiting += len(idle)
            return idle

    def _take_back(self, channel: ReplyChannel) -> None:
        with self._lock:
            self._spin_budget.waiting -= 1
            if self._closed:
                self._shut(channel)
            else:
                self._free.append(channel)

    def _shut(self, channel: ReplyChannel) -> None:
        channel.close()
        self._open -= 1
        self._all_closed.notify_all()

    def close(self) -> None:
        """Closes idle channels now, and the others when they are released. Idempotent."""
        with self._lock:
            self._closed = True
            while self._free:
                self._shut(self._free.pop())

    def join(self, seconds: float | None) -> bool:
        """Waits until all are closed. Returns whether that happened within ``seconds``."""
        with self._lock:
            return self._all_closed.wait_for(lambda: self._open == 0, seconds)
