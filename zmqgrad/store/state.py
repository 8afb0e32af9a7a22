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
from collections.abc import Callable, Sequence
from typing import Any

from zmqgrad.store.actions import ACTIONS, CHANGING, place_of_pops
from zmqgrad.store.contents import Contents, Item, Queues, Storage
from zmqgrad.store.effects import DONE, MAX_TOGETHER, Effect, Reply, refuse
from zmqgrad.store.parking import Parked, Parking
from zmqgrad.store.topics import Target
from zmqgrad.wire.messages import (
    Message,
    Refusal,
    StoreGet,
    StoreMultiGet,
    StoreQueuePop,
    StoreRefused,
    StoreValue,
    StoreValues,
    StoreWait,
)

_NO_QUEUES: Queues = {}

Deliver = Callable[[Any, str, Item], Message]

_new = tuple.__new__  # quicker than the class itself


class State:
    """Keys, queues, and who waits for what. ``asker`` is whatever the shell needs to find the asker again.

    The attributes are for the actions; to a shell they are to be looked at only.

    Args:
        contents: where it keeps keys and queues, by default in memory.
        deliver: called with who popped an item, the queue's name and the item: returns the reply, and sees to
            it that the item is marked as delivered, or restored. None: it is delivered at once.
    """

    def __init__(self, contents: Storage | None = None, deliver: Deliver | None = None) -> None:
        self.contents: Storage = Contents() if contents is None else contents
        self.deliver: Deliver = deliver or self._deliver_at_once
        self.values = self.contents.values
        self.queues = self.contents.queues
        self.parking = Parking()
        self.lacked = self.parking.places

    @property
    def revision(self) -> int:
        """One higher at each change of a key."""
        return self.contents.revision

    @revision.setter
    def revision(self, revision: int) -> None:
        self.contents.revision = revision

    # ---- what the shell calls ---------------------------------------------------------------------------

    def apply(self, query: Message, asker: Any, now: float) -> list[Effect]:
        """Do what ``query`` asks. The list is empty if it has to wait."""
        others: list[Effect] = []
        answer = self.answer(query, asker, now, others)
        return others if answer is None else [*others, Reply(asker, answer)]

    def answer(self, query: Message, asker: Any, now: float, others: list[Effect]) -> Message | None:
        """Do what ``query`` asks, and give the answer; None if it has to wait.

        What else follows is appended to ``others``: answers to those who waited for it, and notices.
        """
        act = ACTIONS.get(type(query))
        if act is None:
            return StoreRefused(Refusal.INVALID, f"a store does not understand {type(query).__name__}")
        return act(self, query, asker, now, others)

    @staticmethod
    def may_change(query: Message) -> bool:
        """Is ``query`` of a kind that changes something?"""
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
        self.contents.unwatch(target)

    def statistics(self) -> dict[str, int]:
        """How many keys, queues, parked queries and watched keys there are, and the revision."""
        return {
            "keys": len(self.values),
            "queues": len(self.queues),
            "parked": len(self.parking),
            "watched": self.contents.watched,
            "revision": self.revision,
        }

    # ---- what the actions call: changes -----------------------------------------------------------------

    def put(self, key: str, value: bytes, others: list[Effect]) -> None:
        """Set ``key``, and answer those for whom it was the last one missing."""
        self.contents.put(key, value, others)
        if key in self.lacked:
            self.wake(key, others)

    def wake(self, key: str, others: list[Effect]) -> None:
        """``key`` is there: answer those for whom it was the last one missing."""
        for parked in self.parking.call(key):
            missing = self._first_missing(parked)
            if missing is None:
                self.parking.release(parked)
                query = parked.query
                answer = DONE if type(query) is StoreWait else self._give(query)
                others.append(_new(Reply, (parked.asker, answer)))
            else:
                self.parking.move(parked, missing)

    def serve_pops(self, queue: str, others: list[Effect]) -> bool:
        """Hand the items of ``queue`` to the pops that wait for them, in order (S3). Was there one?"""
        served = False
        while queue in self.queues and (first := self.parking.first(place_of_pops(queue))) is not None:
            self.parking.release(first)
            item = self.contents.pop(queue)
            others.append(Reply(first.asker, self.deliver(first.asker, queue, item)))
            served = True
        return served

    def _deliver_at_once(self, asker: Any, queue: str, item: Item) -> Message:
        self.contents.delivered(item)
        return StoreValue(item.value, self.revision)

    def queue_grew(self, queue: str, others: list[Effect]) -> None:
        """``queue`` has got an item: hand it to a pop that waits, or wake those who wait for the queue."""
        if not self.serve_pops(queue, others) and queue in self.lacked:
            self.wake(queue, others)

    # ---- and waiting ------------------------------------------------------------------------------------

    def when_all_exist(self, query: Any, keys: Sequence[str], asker: Any, now: float) -> Message | None:
        """The answer to ``query`` if all ``keys`` are there; otherwise it waits for them, and it is None."""
        parked = Parked(query, asker, keys)
        missing = self._first_missing(parked)
        if missing is None:
            return self._give(query)
        self.parking.park(parked, missing, now + query.timeout)
        return None

    def _first_missing(self, parked: Parked) -> str | None:
        values, keys = self.values, parked.keys
        if not parked.next and all(map(values.__contains__, keys)):  # as nearly always
            return None
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
                values = tuple(map(self.values.__getitem__, keys))
                size = sum(map(len, values))
                if size > MAX_TOGETHER:
                    return StoreRefused(Refusal.LIMIT, f"multi_get: {size} bytes, more than {MAX_TOGETHER}")
                return StoreValues(values)
            case StoreGet(key=key):
                return StoreValue(self.values[key], self.revision)
            case _:
                return DONE

    def _what_is_missing(self, parked: Parked) -> str:
        if isinstance(parked.query, StoreQueuePop):
            return f"the queue {parked.query.key!r} stayed empty"
        missing = list(dict.fromkeys(key for key in parked.keys if key not in self.values))
        shown = ", ".join(repr(key) for key in missing[:5])
        return f"missing: {shown}" + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
