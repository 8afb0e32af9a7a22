"""The store as a pure state machine: a query and the time go in, replies and notifications come out.

It has no socket, thread or clock: the server and :class:`~zmqgrad.store.local.HashStore` drive the same
machine, one thread at a time. :mod:`~zmqgrad.store.actions` defines what each query does; this module blocks
and wakes queries. Guarantees:

(S1) Every query gets exactly one reply: immediately, when its condition holds, or at its deadline.
(S2) ``get``, ``wait`` and ``multi_get`` return at a moment at which *all* their keys exist. For ``wait``
     and ``check``, as with torch, a queue that is not empty exists, too.
(S3) Blocked pops of one queue are served in order of arrival, and each value goes to one of them.
(S4) Each change of a key raises the revision by one, and each change of a watched key makes one notification,
     which names the revision of the notification before it.

A blocked query waits for one missing key at a time, so setting a key wakes only the queries that need it
next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Sized
from typing import Any

from zmqgrad.store.actions import CHANGES, READS, queue_condition
from zmqgrad.store.arguments import show_key
from zmqgrad.store.contents import ByName, Contents, Item, Storage
from zmqgrad.store.effects import DONE, MAX_BATCH_BYTES, Effect, Reply, refuse
from zmqgrad.store.wait_queue import BlockedQuery, WaitQueue
from zmqgrad.store.watch_targets import Target
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

_NO_QUEUES: ByName[Sized] = {}

Deliver = Callable[[Any, str, Item], Message]

_new = tuple.__new__  # faster than the class itself


class State:
    """Keys, queues and blocked queries.

    ``requester`` identifies the sender of a query to the driver; it is opaque here. The attributes are for
    the actions; drivers may only read them.

    Args:
        contents: storage of keys and queues; by default in memory.
        deliver: called with the requester that popped an item, the name of the queue and the item. Returns
            the reply, and must mark the item as delivered or restore it later. None: items are delivered at
            once.
    """

    def __init__(self, contents: Storage | None = None, deliver: Deliver | None = None) -> None:
        self.contents: Storage = Contents() if contents is None else contents
        self.deliver: Deliver = deliver or self._deliver_at_once
        self.values = self.contents.values
        self.queues = self.contents.queues
        self.wait_queue = WaitQueue()
        self.awaited = self.wait_queue.by_condition

    @property
    def revision(self) -> int:
        """One higher at each change of a key."""
        return self.contents.revision

    # ---- called by the driver ---------------------------------------------------------------------------

    def apply(self, query: Message, requester: Any, now: float) -> list[Effect]:
        """Execute ``query``. The list is empty if it blocks."""
        effects: list[Effect] = []
        reply = self.execute(query, requester, now, effects)
        return effects if reply is None else [*effects, Reply(requester, reply)]

    def execute(self, query: Message, requester: Any, now: float, effects: list[Effect]) -> Message | None:
        """Execute ``query``. Returns the reply, or None if it blocks.

        Replies to queries that it unblocks, and notifications, are appended to ``effects``.
        """
        change = CHANGES.get(type(query))
        if change is not None:
            return change(self, query, effects)
        read = READS.get(type(query))
        if read is None:
            return StoreRefused(Refusal.INVALID, f"a store does not understand {type(query).__name__}")
        return read(self, query, requester, now)

    def answer(self, query: Message, *, expired: bool) -> Message | None:
        """The reply to ``query``, for a driver without blocked queries; None if it blocks.

        Args:
            expired: its deadline has passed, so that it is refused instead.
        """
        reply = self.execute(query, None, 0.0, [])
        return self.expire(math.inf)[0].message if reply is None and expired else reply

    @staticmethod
    def may_change(query: Message) -> bool:
        """Whether queries of this type may change the store."""
        return type(query) in CHANGES or type(query) is StoreQueuePop

    def expire(self, now: float) -> list[Effect]:
        """Refuse the blocked queries whose deadline has passed."""
        return [
            refuse(blocked.requester, Refusal.TIMEOUT, self._describe_missing(blocked))
            for blocked in self.wait_queue.pop_expired(now)
        ]

    def next_deadline(self) -> float:
        """When to call :meth:`expire` next; infinite if no query is blocked. May be early, never late."""
        return self.wait_queue.next_deadline()

    def close(self) -> list[Effect]:
        """Refuse all blocked queries, because the store closes."""
        pending = self.wait_queue.pop_expired(math.inf)
        return [refuse(blocked.requester, Refusal.CLOSING, "the store is closing") for blocked in pending]

    def cancel(self, requester: Any) -> None:
        """Forget the query of ``requester`` if it is blocked; it gets no reply."""
        self.wait_queue.cancel(requester)

    def repeat(self, query: Any, requester: Any, now: float) -> None:
        """Note that ``requester`` has repeated its blocked query: its timeout may end earlier."""
        self.wait_queue.shorten(requester, now + getattr(query, "timeout", math.inf))

    def unwatch(self, target: Target) -> None:
        """Make no more notifications of ``target``."""
        self.contents.unwatch(target)

    def statistics(self) -> dict[str, int]:
        """Number of keys, queues, blocked queries (``parked``) and watched targets, and the revision."""
        return {**self.contents.statistics(), "parked": len(self.wait_queue)}

    # ---- called by the actions: changes -----------------------------------------------------------------

    def put(self, key: str, value: bytes, effects: list[Effect]) -> None:
        """Set ``key``, and reply to the queries for which it was the last missing key."""
        self.contents.put(key, value, effects)
        if key in self.awaited:
            self.wake(key, effects)

    def wake(self, key: str, effects: list[Effect]) -> None:
        """Reply to the queries for which ``key``, which exists now, was the last missing key."""
        for blocked in self.wait_queue.detach_all(key):
            missing = self._first_missing(blocked)
            if missing is None:
                self.wait_queue.remove(blocked)
                query = blocked.query
                reply = DONE if type(query) is StoreWait else self._result(query)
                effects.append(_new(Reply, (blocked.requester, reply)))
            else:
                self.wait_queue.move(blocked, missing)

    def serve_pops(self, queue: str, effects: list[Effect]) -> bool:
        """Hand items of ``queue`` to blocked pops in order (S3). Returns whether there was one."""
        served = False
        while queue in self.queues and (first := self.wait_queue.oldest(queue_condition(queue))) is not None:
            self.wait_queue.remove(first)
            item = self.contents.pop(queue)
            effects.append(Reply(first.requester, self.deliver(first.requester, queue, item)))
            served = True
        return served

    def _deliver_at_once(self, requester: Any, queue: str, item: Item) -> Message:
        self.contents.delivered(item)
        return StoreValue(item.value, self.revision)

    def after_push(self, queue: str, effects: list[Effect]) -> None:
        """Hand the new item of ``queue`` to a blocked pop, or wake the queries that wait for the queue."""
        if not self.serve_pops(queue, effects) and queue in self.awaited:
            self.wake(queue, effects)

    # ---- called by the actions: blocking ----------------------------------------------------------------

    def when_all_exist(self, query: Any, keys: Sequence[str], requester: Any, now: float) -> Message | None:
        """The reply to ``query`` if all ``keys`` exist. Otherwise blocks it, and returns None."""
        blocked = BlockedQuery(query, requester, keys)
        missing = self._first_missing(blocked)
        if missing is None:
            return self._result(query)
        self.wait_queue.add(blocked, missing, now + query.timeout)
        return None

    def _first_missing(self, blocked: BlockedQuery) -> str | None:
        values, keys = self.values, blocked.keys
        if not blocked.next and all(map(values.__contains__, keys)):  # as nearly always
            return None
        queues = self._queues_for(blocked.query)
        # Keys before `next` existed at the last check, but may have been deleted since (S2).
        for indices in (range(blocked.next, len(keys)), range(blocked.next)):
            for i in indices:
                if keys[i] not in values and keys[i] not in queues:
                    blocked.next = i
                    return keys[i]
        return None

    def _queues_for(self, query: Message) -> ByName[Sized]:
        """The queues that exist for ``query`` as keys do."""
        return self.queues if type(query) is StoreWait else _NO_QUEUES

    def _result(self, query: Message) -> Message:
        """The reply to a query all of whose keys exist."""
        match query:
            case StoreMultiGet(keys=keys):
                values = tuple(map(self.values.__getitem__, keys))
                size = sum(map(len, values))
                if size > MAX_BATCH_BYTES:
                    return StoreRefused(
                        Refusal.LIMIT, f"multi_get: {size} bytes, more than {MAX_BATCH_BYTES}"
                    )
                return StoreValues(values)
            case StoreGet(key=key):
                return StoreValue(self.values[key], self.revision)
            case _:
                return DONE

    def _describe_missing(self, blocked: BlockedQuery) -> str:
        if isinstance(blocked.query, StoreQueuePop):
            return f"the queue {show_key(blocked.query.key)} stayed empty"
        values, queues = self.values, self._queues_for(blocked.query)
        missing = [key for key in dict.fromkeys(blocked.keys) if key not in values and key not in queues]
        shown = ", ".join(map(show_key, missing[:5]))
        return f"missing: {shown}" + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
