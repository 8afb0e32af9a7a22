"""Queries that wait until their condition holds or their deadline passes. Pure, as the state machine is.

A blocked query waits for one condition at a time: that a key exists, or that a queue has an item for it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any

from zmqgrad.wire.messages import Message


class BlockedQuery:
    """A query that waits for ``keys``; those before ``next`` existed at the last check.

    Each has a ``requester`` of its own, which identifies it.
    """

    __slots__ = ("condition", "deadline", "keys", "next", "query", "requester")

    def __init__(self, query: Message, requester: Any, keys: Sequence[str]) -> None:
        self.query = query
        self.requester = requester
        self.keys = keys
        self.next = 0
        self.condition: Hashable = None  # None while it does not wait
        self.deadline = math.inf


class WaitQueue:
    """Blocked queries, by condition and by deadline."""

    def __init__(self) -> None:
        self.by_condition: dict[Hashable, dict[BlockedQuery, None]] = {}
        """Blocked queries of each condition in the order of arrival. Read-only for others."""
        self._deadlines: list[tuple[float, int, BlockedQuery]] = []
        self._by_requester: dict[Any, BlockedQuery] = {}
        self._sequence = itertools.count()

    def __len__(self) -> int:
        return len(self._by_requester)

    def add(self, blocked: BlockedQuery, condition: Hashable, deadline: float) -> None:
        """Let ``blocked`` wait for ``condition`` until ``deadline``."""
        self._by_requester[blocked.requester] = blocked
        self.move(blocked, condition)
        self._end_by(blocked, deadline)

    def _end_by(self, blocked: BlockedQuery, deadline: float) -> None:
        blocked.deadline = deadline
        heapq.heappush(self._deadlines, (deadline, next(self._sequence), blocked))
        if len(self._deadlines) > 64 + 2 * len(self):  # mostly of queries that no longer wait
            self._deadlines = [
                entry
                for entry in self._deadlines
                if entry[2].condition is not None and entry[0] == entry[2].deadline
            ]
            heapq.heapify(self._deadlines)

    def shorten(self, requester: Any, deadline: float) -> None:
        """Let ``requester``'s query, if it waits, do so no longer than until ``deadline``."""
        blocked = self._by_requester.get(requester)
        if blocked is not None and deadline < blocked.deadline:
            self._end_by(blocked, deadline)

    def move(self, blocked: BlockedQuery, condition: Hashable) -> None:
        """Let ``blocked`` wait for ``condition`` instead, behind those that wait for it already."""
        self._detach(blocked)
        blocked.condition = condition
        self.by_condition.setdefault(condition, {})[blocked] = None

    def remove(self, blocked: BlockedQuery) -> None:
        """End the wait of ``blocked``."""
        if blocked.condition is not None:
            self._detach(blocked)
            blocked.condition = None
        del self._by_requester[blocked.requester]

    def detach_all(self, condition: Hashable) -> list[BlockedQuery]:
        """Detach the queries that wait for ``condition``, oldest first; move or remove each of them next."""
        detached = list(self.by_condition.pop(condition, ()))
        for blocked in detached:
            blocked.condition = None
        return detached

    def cancel(self, requester: Any) -> None:
        """End the wait of ``requester``'s query, if it waits."""
        blocked = self._by_requester.get(requester)
        if blocked is not None:
            self.remove(blocked)

    def _detach(self, blocked: BlockedQuery) -> None:
        condition = blocked.condition
        if condition is not None:
            waiting = self.by_condition[condition]
            del waiting[blocked]
            if not waiting:
                del self.by_condition[condition]

    def oldest(self, condition: Hashable) -> BlockedQuery | None:
        """The query that has waited longest for ``condition``."""
        return next(iter(self.by_condition.get(condition, ())), None)

    def next_deadline(self) -> float:
        """The earliest deadline; infinite without blocked queries. May be early, never late."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def pop_expired(self, now: float) -> list[BlockedQuery]:
        """Remove the queries whose deadline has passed, and return them."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            blocked = heapq.heappop(self._deadlines)[2]
            if blocked.condition is not None:
                self.remove(blocked)
                expired.append(blocked)
        return expired
