"""Where queries wait until what they want is there, or their time is up. Pure, as the state machine is.

A parked query stands in one place at a time: under a key that it lacks, or in the line of a queue.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any

from zmqgrad.wire.messages import Message


class Parked:
    """A query that waits: for ``keys``, of which those before ``next`` were there when last looked at.

    Each has an ``asker`` of its own, by which it can be found again.
    """

    __slots__ = ("asker", "keys", "next", "place", "query")

    def __init__(self, query: Message, asker: Any, keys: Sequence[str]) -> None:
        self.query = query
        self.asker = asker
        self.keys = keys
        self.next = 0
        self.place: Hashable = None  # None: does not wait (any more)


class Parking:
    """Parked queries, by place and by deadline."""

    def __init__(self) -> None:
        self.places: dict[Hashable, dict[Parked, None]] = {}
        """Who waits where, in the order in which they came; to be looked at only."""
        self._deadlines: list[tuple[float, int, Parked]] = []
        self._by_asker: dict[Any, Parked] = {}
        self._numbers = itertools.count()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def park(self, parked: Parked, place: Hashable, deadline: float) -> None:
        """``parked`` waits at ``place`` until ``deadline``."""
        self._count += 1
        self._by_asker[parked.asker] = parked
        self.move(parked, place)
        heapq.heappush(self._deadlines, (deadline, next(self._numbers), parked))
        if len(self._deadlines) > 64 + 2 * self._count:  # mostly of queries answered long before
            self._deadlines = [entry for entry in self._deadlines if entry[2].place is not None]
            heapq.heapify(self._deadlines)

    def move(self, parked: Parked, place: Hashable) -> None:
        """``parked`` goes on waiting, at ``place``, last in the line."""
        self._leave(parked)
        parked.place = place
        self.places.setdefault(place, {})[parked] = None

    def release(self, parked: Parked) -> None:
        """``parked`` waits no more."""
        if parked.place is not None:
            self._leave(parked)
            parked.place = None
        self._by_asker.pop(parked.asker, None)
        self._count -= 1

    def call(self, place: Hashable) -> list[Parked]:
        """Who waits at ``place``, in the order in which they came: each is to be moved or released."""
        called = list(self.places.pop(place, ()))
        for parked in called:
            parked.place = None
        return called

    def cancel(self, asker: Any) -> None:
        """The query of ``asker``, if it waits, waits no more."""
        parked = self._by_asker.get(asker)
        if parked is not None:
            self.release(parked)

    def _leave(self, parked: Parked) -> None:
        place = parked.place
        if place is not None:
            line = self.places[place]
            del line[parked]
            if not line:
                del self.places[place]

    def first(self, place: Hashable) -> Parked | None:
        """Who waits longest at ``place``."""
        return next(iter(self.places.get(place, ())), None)

    def next_deadline(self) -> float:
        """When the next one's time is up. May be early (of one answered before), never late."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def pop_expired(self, now: float) -> list[Parked]:
        """Those whose time is up; they wait no more."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            parked = heapq.heappop(self._deadlines)[2]
            if parked.place is not None:
                self.release(parked)
                expired.append(parked)
        return expired
