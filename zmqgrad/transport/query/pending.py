"""The query under way on a channel: which message is its reply, and when to repeat it. Pure.

A channel numbers its queries and sends one at a time. A query is repeated until its reply arrives, so a
channel may receive further replies to earlier queries.
"""

from __future__ import annotations

import math
from itertools import chain, repeat

from zmqgrad.errors import ProtocolError
from zmqgrad.wire.messages import Message, StoreRefused

REPEAT_SECONDS = (1.0, 2.0, 5.0)
"""Intervals before the first, second and third repetition. Later ones use the last."""

PING_ID = 0
"""Message id of a channel's pings. Queries begin with 1."""


class PendingQuery:
    """One query, from its first transmission to its reply.

    Args:
        request_id: message id of the query.
        packet: its bytes.
        now: the time.
        deadline: when it fails.
        last_call_at: when the server is asked for the reply as it is then; infinite if it is never.
    """

    def __init__(
        self, request_id: int, packet: bytearray, now: float, deadline: float, last_call_at: float = math.inf
    ) -> None:
        self.request_id = request_id
        self.packet = packet
        self.deadline = deadline
        self.peer_responded = True
        """Whether anything was received since the last repetition."""
        self._intervals = chain(REPEAT_SECONDS, repeat(REPEAT_SECONDS[-1]))
        self._repeat_at = now + next(self._intervals)
        self._last_call_at = last_call_at
        self._wakes_at = now

    def seconds_to_wait(self, now: float) -> float:
        """Returns how long to wait for the reply before one of the following, or the deadline."""
        self._wakes_at = min(self.deadline, self._repeat_at, self._last_call_at)
        return self._wakes_at - now

    def is_over(self, now: float) -> bool:
        """Returns whether the deadline has passed, after a wait. Time that this was late does not count.

        It was, if this process was stopped meanwhile, which then has not looked for the reply.
        """
        if self._wakes_at < min(now, self.deadline):
            self.deadline += now - self._wakes_at
        return now >= self.deadline

    def must_repeat(self, now: float) -> bool:
        """Returns whether the query must be sent again now, and schedules the next repetition if so."""
        if now < self._repeat_at:
            return False
        self._repeat_at = now + next(self._intervals)
        return True

    def must_end(self, now: float) -> bool:
        """Returns whether the time that the query itself names has passed. True once."""
        if now < self._last_call_at:
            return False
        self._last_call_at = math.inf
        return True

    def receive(self, request_id: int, message: Message) -> bool:
        """Returns whether a received message is the reply, and not that to a ping, or to an earlier query.

        Args:
            request_id: the message id in its envelope.
            message: the message.

        Raises:
            ProtocolError: if it is the reply to a query that was never sent.
        """
        self.peer_responded = True
        if request_id == self.request_id:
            return True
        if request_id == PING_ID and type(message) is StoreRefused:
            return True  # the server has too many clients
        if request_id > self.request_id:
            raise ProtocolError(f"a reply to query {request_id}, not to {self.request_id}")
        return False
