"""Sessions: messages between two workers are delivered once and in order, whatever breaks. Pure.

A session is what one incarnation of a worker sends to one incarnation of another. Each message has a
sequence number, and every message between the two, either way, acknowledges all that has arrived
(cumulative acknowledgement). The sender keeps what is not acknowledged. When a connection breaks, or
nothing is acknowledged for too long, it opens another and sends all of that again, in order (go-back-N).
The receiver delivers the number that it expects, and drops what it has delivered before (a duplicate) and
what comes after a gap (a lost message will be sent again first).

What is kept is bounded by the credit of :mod:`~zmqgrad.transport.dataplane.credit`, which counts what the
receiver has not consumed; small messages come on top.

The timeouts follow RFC 6298 in one thing only, that they double: round trips are not measured, as the
receiver may take its time to acknowledge, and what is resent too early costs bandwidth, not correctness.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

M = TypeVar("M")

RESEND_SECONDS = 3.0
"""Nothing acknowledged for this long while something should be: open another connection and send it again."""

MAX_RESEND_SECONDS = 30.0
"""Each attempt that brings no acknowledgement doubles the time to the next, up to this."""

ACK_SECONDS = 0.02
"""How long an acknowledgement waits for a message that takes it along."""

ACK_MESSAGES = 64
ACK_BYTES = 8 << 20
"""So much that was delivered and not acknowledged is acknowledged at once."""


class Unacknowledged(NamedTuple, Generic[M]):
    """A message that may have to be sent again."""

    sequence: int
    size: int
    message: M


class Outgoing(Generic[M]):
    """The sender's half. ``message`` is whatever the sender needs to send it again."""

    def __init__(self) -> None:
        self.acknowledged = 0
        """Every number up to this has arrived."""
        self.resends = 0
        """How many messages were sent more than once."""
        self._next = 1
        self._kept: deque[Unacknowledged[M]] = deque()
        self._bytes = 0
        self._due = math.inf
        self._timeout = RESEND_SECONDS

    def add(self, message: M, size: int, now: float) -> int:
        """Keep ``message``, which is about to be sent. Returns its sequence number."""
        sequence = self._next
        self._next = sequence + 1
        self._kept.append(Unacknowledged(sequence, size, message))
        self._bytes += size
        if self._due == math.inf:
            self._due = now + self._timeout
        return sequence

    def acknowledge(self, sequence: int, now: float) -> bool:
        """The receiver has everything up to ``sequence``. Was any of it not acknowledged before?"""
        if not self.acknowledged < sequence < self._next:
            return False  # an old one, or of somebody who acknowledges what was never sent
        self.acknowledged = sequence
        kept = self._kept
        while kept and kept[0].sequence <= sequence:
            self._bytes -= kept.popleft().size
        self._timeout = RESEND_SECONDS
        self._due = now + self._timeout if kept else math.inf
        return True

    def resend(self, now: float) -> Iterator[Unacknowledged[M]]:
        """All that must be sent again, in order, on a connection that was just opened."""
        self._due = now + self._timeout if self._kept else math.inf
        self.resends += len(self._kept)
        return iter(list(self._kept))

    def is_overdue(self, now: float) -> bool:
        """Whether acknowledgements have failed to come for too long. Each time, the next time is later."""
        if now < self._due:
            return False
        self._timeout = min(2 * self._timeout, MAX_RESEND_SECONDS)
        self._due = now + self._timeout
        return True

    def next_due(self) -> float:
        """When :meth:`is_overdue` should be asked; infinite if nothing is unacknowledged."""
        return self._due

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size(self) -> int:
        """Bytes of all that is kept."""
        return self._bytes


class Verdict(enum.Enum):
    """What becomes of a message that came."""

    DELIVER = enum.auto()
    DUPLICATE = enum.auto()
    GAP = enum.auto()


class Incoming:
    """The receiver's half."""

    def __init__(self) -> None:
        self.delivered = 0
        """The last number that was delivered: what to acknowledge."""
        self.duplicates = 0
        self.gaps = 0
        self._told = 0
        self._untold_bytes = 0
        self._due = math.inf

    def receive(self, sequence: int, size: int, now: float) -> Verdict:
        """A message with this number came."""
        if sequence == self.delivered + 1:
            self.delivered = sequence
            self._untold_bytes += size
            if self._due == math.inf:
                self._due = now + ACK_SECONDS
            if sequence - self._told >= ACK_MESSAGES or self._untold_bytes >= ACK_BYTES:
                self._due = now
            return Verdict.DELIVER
        if sequence <= self.delivered:
            self.duplicates += 1
            self._due = now  # the sender has not heard of it, or would not send it again
            return Verdict.DUPLICATE
        self.gaps += 1
        return Verdict.GAP

    def acknowledgement(self) -> int:
        """What a message to the sender, which is about to go, acknowledges."""
        self._told = self.delivered
        self._untold_bytes = 0
        self._due = math.inf
        return self._told

    def is_due(self, now: float) -> bool:
        """Whether an acknowledgement should go without a message that takes it along."""
        return now >= self._due

    def next_due(self) -> float:
        """When that will be; infinite if all was acknowledged."""
        return self._due
