"""The store as a pure machine: a query and the time go in, replies and notices come out.

No socket, thread or clock: the server and :class:`~zmqgrad.store.local.HashStore` drive the same machine.
What each query does stands in :mod:`~zmqgrad.store.actions`; here is who waits, for what, and how long. What
it promises:

(S1) Every query gets exactly one reply: at once, when what it waits for is there, or when its time is up.
(S2) ``get``, ``wait`` and ``multi_get`` answer at a moment at which *all* their keys exist. For ``wait``
     and ``check``, as with torch, a queue that is not empty exists, too.
(S3) Blocked pops of one queue are served in the order in which they came, each value to one of them.
(S4) Each change of a key raises the revision by one, and each change of a watched key makes one notice,
     which names the revision of the notice before it.

A waiting query stands under one key that it lacks, not under all: setting a key wakes only those who
need it next.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from zmqgrad.store.actions import ACTIONS, CHANGING
from zmqgrad.store.contents import Contents
from zmqgrad.store.effects import MAX_TOGETHER, Effect, Reply, refuse
from zmqgrad.store.parking import Parked, Parking
from zmqgrad.store.topics import Target
from zmqgrad.wire.messages import (
    Message,
    Refusal,
    StoreCompareSet,
    StoreDeleteKey,
    StoreDone,
    StoreGet,
    StoreMultiGet,
    StoreQueuePop,
    StoreQueuePush,
    StoreRefused,
    StoreSet,
    StoreValue,
    StoreValues,
    StoreWait,
)

_NO_QUEUES: dict[str, deque[bytes]] = {}


class State:
    """Keys, queues, and who waits for what. ``asker`` is whatever the shell needs to find the asker again.

    The attributes are for the actions; a shell leaves them alone.
    """

    def __init__(self) -> None:
        self.held = Contents()
        self.values = self.held.values
        self.queues = self.held.queues
        self.parking = Parking()

    @property
    def revision(self) -> int:
        """One higher at each change of a key."""
        return self.held.revision

    @revision.setter
    def revision(self, revision: int) -> None:
        self.held.revision = revision

    @property
    def changes(self) -> int:
        """How often a key or a queue was changed."""
        return self.held.changes

    # ---- what the shell calls ---------------------------------------------------------------------------

    def apply(self, query: Message, asker: Any, now: float) -> list[Effect]:
        """Do what ``query`` asks. The list is empty if it has to wait."""
        act = ACTIONS.get(type(query))
        if act is None:
            return [refuse(asker, Refusal.INVALID, f"a store does not understand {type(query).__name__}")]
        effects: list[Effect] = []
        act(self, query, asker, now, effects)
        return effects

    @staticmethod
    def may_change(query: Message) -> bool:
        """Is ``query`` of a kind that changes something?"""
        return type(query) in CHANGING

    def would_change(self, query: Message) -> bool:
        """Would ``query``, applied now, change something (or, at most, be refused)?"""
        match query:
            case StoreCompareSet(key=key, expected=expected, desired=desired):
                held = self.values.get(key)
                return (held or b"") == expected and held != desired
            case StoreDeleteKey(key=key):
                return key in self.values
            case StoreQueuePop(key=key):
                return key in self.queues
        return type(query) in CHANGING

    def expire(self, now: float) -> list[Effect]:
        """Refuse the queries whose time is up."""
        return [
            refuse(parked.asker, Refusal.TIMEOUT, self._what_is_missing(parked))
            for parked in self.parking.pop_expired(now)
        ]

    def next_deadline(self) -> float:
        """When :meth:`expire` has something to do; infinite if nobody waits. May be early, never late."""
        return self.parking.next_deadline()

    def close(self) -> list[Effect]:
        """Refuse all who wait: the store goes away."""
        everybody = self.parking.pop_expired(math.inf)
        return [refuse(parked.asker, Refusal.CLOSING, "the store is closing") for parked in everybody]

    def cancel(self, asker: Any) -> None:
        """Nobody waits for the answer to the query of ``asker`` any more, if that waits."""
        self.parking.cancel(asker)

    def unwatch(self, target: Target) -> None:
        """Nobody watches ``target`` any more: make no notices of it."""
        self.held.unwatch(target)

    def contents(self) -> Iterator[Message]:
        """Queries that make an empty state the same as this, less the revision and who waits or watches."""
        for key, value in self.values.items():
            yield StoreSet(key, value)
        for name, queue in self.queues.items():
            for value in queue:
                yield StoreQueuePush(name, value)

    def statistics(self) -> dict[str, int]:
        """How many keys, queues, parked queries and watched keys there are, and the revision."""
        return {
            "keys": len(self.values),
            "queues": len(self.queues),
            "parked": len(self.parking),
            "watched": self.held.watched,
            "revision": self.revision,
        }

    # ---- what the actions call --------------------------------------------------------------------------

    def put(self, key: str, value: bytes, effects: list[Effect]) -> None:
        """Set ``key``, and answer those for whom it was the last one missing."""
        self.held.put(key, value, effects)
        if key in self.parking:
            self.wake(key, effects)

    def wake(self, key: str, effects: list[Effect]) -> None:
        """``key`` exists now: answer those who lacked nothing else; others wait for what they lack next."""
        for parked in self.parking.line(key):
            missing = self._first_missing(parked)
            if missing is None:
                self.parking.release(parked)
                effects.append(Reply(parked.asker, self._give(parked.query)))
            else:
                self.parking.move(parked, missing)

    def answer_when_all_exist(
        self, query: Any, keys: Sequence[str], asker: Any, now: float, effects: list[Effect]
    ) -> None:
        """Answer ``query`` once all ``keys`` exist, maybe at once."""
        parked = Parked(query, asker, keys)
        missing = self._first_missing(parked)
        if missing is None:
            effects.append(Reply(asker, self._give(query)))
        else:
            self.parking.park(parked, missing, now + query.timeout)

    # ---- waiting ----------------------------------------------------------------------------------------

    def _first_missing(self, parked: Parked) -> str | None:
        values, keys = self.values, parked.keys
        queues = self.queues if type(parked.query) is StoreWait else _NO_QUEUES
        # Those before `next` were there when last looked at, but may have been deleted since (S2).
        for indices in (range(parked.next, len(keys)), range(parked.next)):
            for i in indices:
                if keys[i] not in values and keys[i] not in queues:
                    parked.next = i
                    return keys[i]
        return None

    def _give(self, query: Message) -> Message:
        """The reply to a query all of whose keys exist."""
        match query:
            case StoreMultiGet(keys=keys):
                values = tuple([self.values[key] for key in keys])
                size = sum(map(len, values))
                if size > MAX_TOGETHER:
                    return StoreRefused(Refusal.LIMIT, f"multi_get: {size} bytes, more than {MAX_TOGETHER}")
                return StoreValues(values)
            case StoreGet(key=key):
                return StoreValue(self.values[key], self.revision)
            case _:
                return StoreDone()

    def _what_is_missing(self, parked: Parked) -> str:
        if isinstance(parked.query, StoreQueuePop):
            return f"the queue {parked.query.key!r} stayed empty"
        missing = list(dict.fromkeys(key for key in parked.keys if key not in self.values))
        shown = ", ".join(repr(key) for key in missing[:5])
        return f"missing: {shown}" + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
