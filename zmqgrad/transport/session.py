"""Sessions: messages between two workers are delivered once and in order, even if connections break. Pure.

A session carries messages from one incarnation of a worker to one incarnation of another. Each message has a
sequence number, and every message in the other direction acknowledges all that have arrived (cumulative
acknowledgement). The sender keeps unacknowledged messages. When a connection breaks, or acknowledgements are
overdue, it opens another connection and resends them in order (go-back-N). The receiver delivers the number
that it expects. It drops duplicates, and messages after a gap, since the missing one is resent first.
Messages are resent in bursts, each when the last is acknowledged: otherwise a connection that breaks
repeatedly would carry the same messages every time.

The credit of :mod:`~zmqgrad.transport.flow_control` bounds what is kept, except for small messages.

As in RFC 6298, timeouts double. Unlike there, round trips are not measured: the receiver may delay an
acknowledgement, and resending too early costs bandwidth, not correctness.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import islice
from typing import Generic, TypeVar

M = TypeVar("M")

RESEND_SECONDS = 3.0
"""Initial timeout for an acknowledgement; then all is resent on another connection."""

RESEND_BYTES_PER_SECOND = 4 << 20
"""Assumed rate of a slow network: the timeout grows with the bytes in flight."""

MAX_RESEND_SECONDS = 30.0
"""Maximum that doubling the timeout reaches."""

BURST_MESSAGES = 256
BURST_BYTES = 32 << 20
"""Limits of what is unacknowledged while messages are resent."""

ACK_SECONDS = 0.02
"""How long an acknowledgement waits for a message that can carry it."""

ACK_MESSAGES = 512
ACK_BYTES = 8 << 20
"""After this much was delivered, it is acknowledged without waiting for a message."""


class Outgoing(Generic[M]):
    """The sending half. A message is any value from which the sender can send it again.

    What is read for every message is an attribute: a method call would take as long as the rest.
    """

    def __init__(self) -> None:
        self.acknowledged = 0
        """All numbers up to this were acknowledged."""
        self.due = math.inf
        """When to call :meth:`is_overdue`; infinite if nothing is unacknowledged."""
        self.size = 0
        """Bytes of all kept messages."""
        self.behind = False
        """Whether kept messages must still be sent on this connection, as :meth:`to_send` returns them."""
        self.next_sequence = 1
        """The number that :meth:`add` will return next."""
        self._kept: deque[tuple[int, int, M]] = deque()
        self._in_flight = 0  # how many of the first were sent on this connection
        self._timeout = RESEND_SECONDS

    def add(self, message: M, size: int, now: float) -> int:
        """Keeps ``message``; the caller sends it now unless ``behind``. Returns its sequence number."""
        sequence = self.next_sequence
        self.next_sequence = sequence + 1
        self._kept.append((sequence, size, message))
        self.size += size
        if not self.behind:
            self._in_flight += 1
        if self.due == math.inf:
            self.due = self._deadline(now)
        return sequence

    def _deadline(self, now: float) -> float:
        return now + self._timeout + self.size / RESEND_BYTES_PER_SECOND if self._kept else math.inf

    def acknowledge(self, sequence: int, now: float) -> bool:
        """Drops all messages up to ``sequence``. Returns whether any was unacknowledged before."""
        if not self.acknowledged < sequence < self.next_sequence:
            return False  # outdated, or of a message that was never sent
        self.acknowledged = sequence
        kept = self._kept
        while kept and kept[0][0] <= sequence:
            self.size -= kept.popleft()[1]
            self._in_flight -= 1
        self._in_flight = max(0, self._in_flight)
        self.behind = self._in_flight < len(kept)
        self._timeout = RESEND_SECONDS
        self.due = self._deadline(now)
        return True

    def reconnect(self, now: float) -> None:
        """Begins a new connection, on which nothing was sent yet."""
        self._in_flight = 0
        self.behind = bool(self._kept)
        self.due = self._deadline(now)

    def to_send(self) -> list[tuple[int, M]]:
        """Returns the next burst to send after a reconnect: (sequence number, message) in order."""
        kept, first = self._kept, self._in_flight
        burst, size = [], sum([each[1] for each in islice(kept, min(first, BURST_MESSAGES))])
        for sequence, bytes_of_it, message in islice(kept, first, BURST_MESSAGES):
            if size >= BURST_BYTES:
                break
            size += bytes_of_it
            burst.append((sequence, message))
        self._in_flight += len(burst)
        self.behind = self._in_flight < len(kept)
        return burst

    def is_overdue(self, now: float) -> bool:
        """Returns whether acknowledgements are overdue; if so, doubles the timeout."""
        if now < self.due:
            return False
        self._timeout = min(2 * self._timeout, MAX_RESEND_SECONDS)
        self.due = self._deadline(now)
        return True

    def __len__(self) -> int:
        return len(self._kept)


class Incoming:
    """The receiving half.

    One thread calls :meth:`receive` while others call :meth:`acknowledgement`, without a lock: the order of
    assignments causes one superfluous acknowledgement at worst.
    """

    def __init__(self) -> None:
        self.delivered = 0
        """The last number that was delivered, to be acknowledged."""
        self.due = math.inf
        """When to send an acknowledgement of its own; infinite for never."""
        self.duplicates = 0
        self.gaps = 0
        self._acknowledged = 0
        self._unacknowledged_bytes = 0

    def receive(self, sequence: int, size: int, now: float) -> bool:
        """Registers a received message of ``size`` bytes. Returns whether it is the next to deliver."""
        delivered = self.delivered
        if sequence != delivered + 1:
            if sequence > delivered:
                self.gaps += 1
            else:
                self.duplicates += 1
                self.due = now  # the acknowledgement was lost
            return False
        self.delivered = sequence
        self._unacknowledged_bytes += size
        if sequence - self._acknowledged >= ACK_MESSAGES or self._unacknowledged_bytes >= ACK_BYTES:
            self.due = now
        elif self.due == math.inf:
            self.due = now + ACK_SECONDS
        return True

    def acknowledgement(self) -> int:
        """Returns the number for the next message to the sender to acknowledge."""
        self.due = math.inf
        self._unacknowledged_bytes = 0
        self._acknowledged = self.delivered
        return self._acknowledged
