"""Sessions: messages between two workers are delivered once and in order, whatever breaks. Pure.

A session is what one incarnation of a worker sends to one incarnation of another. Each message has a
sequence number, and every message in the other direction acknowledges all that has arrived (cumulative
acknowledgement). The sender keeps what is not acknowledged. When a connection breaks, or nothing is
acknowledged for too long, it opens another and sends all of that again, in order (go-back-N). The receiver
delivers the number that it expects, and drops what it has delivered before (a duplicate) and what comes
after a gap (the lost message will be sent again first). What is sent again goes in bursts, each when the one
before is acknowledged: a connection that breaks again and again would else carry the same messages each time.

A sender that gives a session up (its peer was lost, or has left) and later sends to the same incarnation
begins a new *epoch*: the upper bits of its sequence numbers. The receiver begins anew with it, too.

What is kept is bounded by the credit of :mod:`~zmqgrad.transport.flow_control`, which counts what the
receiver has not consumed; small messages come on top.

The timeouts follow RFC 6298 in one thing only, that they double: round trips are not measured, as the
receiver may take its time to acknowledge, and what is resent too early costs bandwidth, not correctness.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from itertools import islice
from typing import Generic, TypeVar

M = TypeVar("M")

EPOCH_BITS = 40
"""Of a sequence number, these count messages. Those above count epochs."""

_FIRST = 1
_COUNTER = (1 << EPOCH_BITS) - 1

RESEND_SECONDS = 3.0
"""Nothing acknowledged for this long while something should be: open another connection and send it again."""

RESEND_BYTES_PER_SECOND = 4 << 20
"""What a slow network carries: so much longer is waited where much is on its way."""

MAX_RESEND_SECONDS = 30.0
"""Each attempt that brings no acknowledgement doubles the time to the next, up to this."""

BURST_MESSAGES = 256
BURST_BYTES = 32 << 20
"""So much may be unacknowledged while messages are sent again."""

ACK_SECONDS = 0.02
"""How long an acknowledgement waits for a message that takes it along."""

ACK_MESSAGES = 512
ACK_BYTES = 8 << 20
"""So much that was delivered is acknowledged at once, if no message has taken that along before."""


class Outgoing(Generic[M]):
    """The sender's half. ``message`` is whatever the sender needs to send it again.

    What is looked at for every message is an attribute, not a method: a call takes as long as the rest.
    """

    def __init__(self, epoch: int = 0) -> None:
        self.acknowledged = epoch << EPOCH_BITS
        """Every number up to this has arrived."""
        self.due = math.inf
        """When :meth:`is_overdue` should be asked; infinite if nothing is unacknowledged."""
        self.size = 0
        """Bytes of all that is kept."""
        self.behind = False
        """Was something not yet sent on the present connection? Then :meth:`to_send` says what is next."""
        self._next = self.acknowledged + _FIRST
        self._kept: deque[tuple[int, int, M]] = deque()
        self._in_flight = 0  # so many of them, from the first, were sent on the present connection
        self._timeout = RESEND_SECONDS

    def add(self, message: M, size: int, now: float) -> int:
        """Keep ``message``, which is sent now unless this is ``behind``. Returns its sequence number."""
        sequence = self._next
        self._next = sequence + 1
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
        """The receiver has everything up to ``sequence``. Was any of it not acknowledged before?"""
        if not self.acknowledged < sequence < self._next:
            return False  # an old one, or of somebody who acknowledges what was never sent
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
        """A connection was opened: nothing has been sent on it yet."""
        self._in_flight = 0
        self.behind = bool(self._kept)
        self.due = self._deadline(now)

    def to_send(self) -> list[tuple[int, M]]:
        """What is to be sent now, in order, after a reconnect: a burst of (sequence number, message)."""
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
        """Whether acknowledgements have failed to come for too long. Each time, the next time is later."""
        if now < self.due:
            return False
        self._timeout = min(2 * self._timeout, MAX_RESEND_SECONDS)
        self.due = self._deadline(now)
        return True

    def __len__(self) -> int:
        return len(self._kept)


class Verdict(enum.Enum):
    """What becomes of a message that came."""

    DELIVER = enum.auto()
    DUPLICATE = enum.auto()
    GAP = enum.auto()


class Incoming:
    """The receiver's half.

    One thread calls :meth:`receive`, others :meth:`acknowledgement` meanwhile: each assigns in an order that
    costs an acknowledgement too many at worst.
    """

    def __init__(self) -> None:
        self.delivered = 0
        """The last number that was delivered: what to acknowledge."""
        self.due = math.inf
        """When an acknowledgement should go without a message that takes it along; infinite for never."""
        self.duplicates = 0
        self.gaps = 0
        self._acknowledged = 0
        self._unacknowledged_bytes = 0

    def receive(self, sequence: int, size: int, now: float) -> Verdict:
        """A message with this number came."""
        delivered = self.delivered
        if sequence != delivered + 1 and not (
            sequence & _COUNTER == _FIRST and sequence >> EPOCH_BITS > delivered >> EPOCH_BITS
        ):
            if sequence > delivered:
                self.gaps += 1
                return Verdict.GAP
            self.duplicates += 1
            self.due = now  # the sender has not heard of it, or would not send it again
            return Verdict.DUPLICATE
        self.delivered = sequence
        self._unacknowledged_bytes += size
        if sequence - self._acknowledged >= ACK_MESSAGES or self._unacknowledged_bytes >= ACK_BYTES:
            self.due = now
        elif self.due == math.inf:
            self.due = now + ACK_SECONDS
        return Verdict.DELIVER

    def acknowledgement(self) -> int:
        """What a message to the sender, which is about to go, acknowledges."""
        self.due = math.inf
        self._unacknowledged_bytes = 0
        self._acknowledged = self.delivered
        return self._acknowledged
