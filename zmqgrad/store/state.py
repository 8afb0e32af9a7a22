"""The store as a pure machine: a query and the time go in, replies and notices come out.

No socket, thread or clock: the server and :class:`~zmqgrad.store.local.HashStore` drive the same machine.
What it promises:

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from zmqgrad.store.contents import Contents, Notice
from zmqgrad.store.parking import Parked, Parking
from zmqgrad.store.topics import HIDDEN, Prefix, Target, is_beneath
from zmqgrad.wire.frames import MAX_HEADER
from zmqgrad.wire.messages import (
    MAX_KEYS,
    MAX_VALUE,
    KeyCallbackRegistered,
    Message,
    PrefixCallbackRegistered,
    Refusal,
    StoreAdd,
    StoreAppend,
    StoreCheck,
    StoreCompareSet,
    StoreDeleteKey,
    StoreDone,
    StoreGet,
    StoreGetNumKeys,
    StoreKeys,
    StoreListKeys,
    StoreMultiGet,
    StoreMultiSet,
    StoreNumber,
    StoreQueueLen,
    StoreQueuePop,
    StoreQueuePush,
    StoreRefused,
    StoreSet,
    StoreUnwatchKey,
    StoreUnwatchPrefix,
    StoreValue,
    StoreValues,
    StoreWait,
    StoreWatchKey,
    StoreWatchPrefix,
)

MAX_TOGETHER = MAX_HEADER - (64 << 20)
"""Bytes of values in one message; the rest is room for their heads."""

_NO_QUEUES: dict[str, deque[bytes]] = {}

_DONE = StoreDone()

_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


class Reply(NamedTuple):
    """Send ``message`` to ``asker``."""

    asker: Any
    message: Message


Effect = Reply | Notice

_new = tuple.__new__  # quicker than the class itself


class State:
    """Keys, queues, and who waits for what. ``asker`` is whatever the shell needs to find the asker again."""

    def __init__(self) -> None:
        self.contents = Contents()
        """To be looked at only."""
        self._values = self.contents.values
        self._queues = self.contents.queues
        self._parking = Parking()
        self._lacked = self._parking.places

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
        act = _ACTIONS.get(type(query))
        if act is None:
            return StoreRefused(Refusal.INVALID, f"a store does not understand {type(query).__name__}")
        return act(self, query, asker, now, others)

    @staticmethod
    def may_change(query: Message) -> bool:
        """Is ``query`` of a kind that changes something?"""
        return type(query) in CHANGING

    def would_change(self, query: Message) -> bool:
        """Would ``query``, applied now, change something (or, at most, be refused)?"""
        match query:
            case StoreCompareSet(key=key, expected=expected, desired=desired):
                held = self._values.get(key)
                return (held or b"") == expected and held != desired
            case StoreDeleteKey(key=key):
                return key in self._values
            case StoreQueuePop(key=key):
                return key in self._queues
        return type(query) in CHANGING

    def expire(self, now: float) -> list[Effect]:
        """Refuse the queries whose time is up."""
        return [
            _refuse(parked.asker, Refusal.TIMEOUT, self._what_is_missing(parked))
            for parked in self._parking.pop_expired(now)
        ]

    def next_deadline(self) -> float:
        """When :meth:`expire` has something to do; infinite if nobody waits. May be early, never late."""
        return self._parking.next_deadline()

    def close(self) -> list[Effect]:
        """Refuse all who wait: the store goes away."""
        everybody = self._parking.pop_expired(math.inf)
        return [_refuse(parked.asker, Refusal.CLOSING, "the store is closing") for parked in everybody]

    def cancel(self, asker: Any) -> None:
        """Nobody waits for the answer to the query of ``asker`` any more, if that waits."""
        self._parking.cancel(asker)

    def unwatch(self, target: Target) -> None:
        """Nobody watches ``target`` any more: make no notices of it."""
        self.contents.unwatch(target)

    def as_queries(self) -> Iterator[Message]:
        """Queries that make an empty state the same as this, less the revision and who waits or watches."""
        for key, value in self._values.items():
            yield StoreSet(key, value)
        for name, queue in self._queues.items():
            for value in queue:
                yield StoreQueuePush(name, value)

    def statistics(self) -> dict[str, int]:
        """How many keys, queues, parked queries and watched keys there are, and the revision."""
        return {
            "keys": len(self._values),
            "queues": len(self._queues),
            "parked": len(self._parking),
            "watched": self.contents.watched,
            "revision": self.revision,
        }

    # ---- changes ----------------------------------------------------------------------------------------

    def _put(self, key: str, value: bytes, others: list[Effect]) -> None:
        """Set ``key``, and answer those for whom it was the last one missing."""
        self.contents.put(key, value, others)
        if key in self._lacked:
            self._wake(key, others)

    def _wake(self, key: str, others: list[Effect]) -> None:
        for parked in self._parking.call(key):
            missing = self._first_missing(parked)
            if missing is None:
                self._parking.release(parked)
                query = parked.query
                answer = _DONE if type(query) is StoreWait else self._give(query)
                others.append(_new(Reply, (parked.asker, answer)))
            else:
                self._parking.move(parked, missing)

    # ---- waiting ----------------------------------------------------------------------------------------

    def _when_all_exist(self, query: Any, keys: Sequence[str], asker: Any, now: float) -> Message | None:
        parked = Parked(query, asker, keys)
        missing = self._first_missing(parked)
        if missing is None:
            return self._give(query)
        self._parking.park(parked, missing, now + query.timeout)
        return None

    def _first_missing(self, parked: Parked) -> str | None:
        values, keys = self._values, parked.keys
        if not parked.next and all(map(values.__contains__, keys)):  # as nearly always
            return None
        queues = self._queues if type(parked.query) is StoreWait else _NO_QUEUES
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
                values = tuple(map(self._values.__getitem__, keys))
                size = sum(map(len, values))
                if size > MAX_TOGETHER:
                    return StoreRefused(Refusal.LIMIT, f"multi_get: {size} bytes, more than {MAX_TOGETHER}")
                return StoreValues(values)
            case StoreGet(key=key):
                return StoreValue(self._values[key], self.revision)
            case _:
                return _DONE

    def _what_is_missing(self, parked: Parked) -> str:
        if isinstance(parked.query, StoreQueuePop):
            return f"the queue {parked.query.key!r} stayed empty"
        missing = list(dict.fromkeys(key for key in parked.keys if key not in self._values))
        shown = ", ".join(repr(key) for key in missing[:5])
        return f"missing: {shown}" + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")

    # ---- one method a query -----------------------------------------------------------------------------

    def _set(self, query: StoreSet, asker: Any, now: float, others: list[Effect]) -> Message:
        self._put(query.key, query.value, others)
        return _DONE

    def _multi_set(self, query: StoreMultiSet, asker: Any, now: float, others: list[Effect]) -> Message:
        if len(query.keys) != len(query.values):
            said = f"multi_set of {len(query.keys)} keys with {len(query.values)} values"
            return StoreRefused(Refusal.INVALID, said)
        for key, value in zip(query.keys, query.values, strict=True):
            self.contents.put(key, value, others)
        for key in query.keys:
            self._wake(key, others)
        return _DONE

    def _compare_set(self, query: StoreCompareSet, asker: Any, now: float, others: list[Effect]) -> Message:
        current = self._values.get(query.key)
        result = query.expected if current is None else current
        if current == query.expected or (current is None and not query.expected):
            self._put(query.key, query.desired, others)
            result = query.desired
        return StoreValue(result, self.revision)

    def _add(self, query: StoreAdd, asker: Any, now: float, others: list[Effect]) -> Message:
        value = self._values.get(query.key, b"0")
        number = int(value) if value.isdigit() and len(value) < 19 else _number(value)
        if number is None:
            said = f"add: the value of {query.key!r} is no 64-bit number but {value[:40]!r}"
            return StoreRefused(Refusal.INVALID, said)
        total = number + query.amount
        if not _LEAST <= total <= _MOST:
            said = f"add: {number} + {query.amount} at {query.key!r} does not fit 64 bits"
            return StoreRefused(Refusal.LIMIT, said)
        self._put(query.key, b"%d" % total, others)
        return StoreNumber(total)

    def _append(self, query: StoreAppend, asker: Any, now: float, others: list[Effect]) -> Message:
        value = self._values.get(query.key, b"") + query.value
        if len(value) > MAX_VALUE:
            said = f"append: {query.key!r} would hold {len(value)} bytes, more than {MAX_VALUE}"
            return StoreRefused(Refusal.LIMIT, said)
        self._put(query.key, value, others)
        return _DONE

    def _delete_key(self, query: StoreDeleteKey, asker: Any, now: float, others: list[Effect]) -> Message:
        existed = self.contents.delete(query.key, others)
        return StoreNumber(int(existed))

    def _get(self, query: StoreGet, asker: Any, now: float, others: list[Effect]) -> Message | None:
        value = self._values.get(query.key)
        if value is not None:
            return StoreValue(value, self.contents.revision)
        return self._when_all_exist(query, (query.key,), asker, now)

    def _wait(
        self, query: StoreWait | StoreMultiGet, asker: Any, now: float, others: list[Effect]
    ) -> Message | None:
        return self._when_all_exist(query, query.keys, asker, now)

    def _check(self, query: StoreCheck, asker: Any, now: float, others: list[Effect]) -> Message:
        values, queues = self._values, self._queues
        there = all(key in values or key in queues for key in query.keys)
        return StoreNumber(int(there))

    def _num_keys(self, query: StoreGetNumKeys, asker: Any, now: float, others: list[Effect]) -> Message:
        return StoreNumber(self.contents.shown)

    def _list_keys(self, query: StoreListKeys, asker: Any, now: float, others: list[Effect]) -> Message:
        prefix = query.prefix
        keys = sorted(k for k in self._values if k.startswith(prefix) and not k.startswith(HIDDEN))
        return StoreKeys(tuple(keys))

    def _queue_push(self, query: StoreQueuePush, asker: Any, now: float, others: list[Effect]) -> Message:
        first = self._parking.first(_line_of(query.key))
        if first is not None:
            self._parking.release(first)
            self.contents.changes += 1
            others.append(Reply(first.asker, StoreValue(query.value, self.revision)))
        else:
            self.contents.push(query.key, query.value)
            if query.key in self._lacked:
                self._wake(query.key, others)
        return _DONE

    def _queue_pop(
        self, query: StoreQueuePop, asker: Any, now: float, others: list[Effect]
    ) -> Message | None:
        if query.key in self._queues:
            return StoreValue(self.contents.pop(query.key), self.revision)
        if not query.block:
            return StoreRefused(Refusal.MISSING, f"the queue {query.key!r} is empty")
        parked = Parked(query, asker, (query.key,))
        self._parking.park(parked, _line_of(query.key), now + query.timeout)
        return None

    def _queue_len(self, query: StoreQueueLen, asker: Any, now: float, others: list[Effect]) -> Message:
        return StoreNumber(len(self._queues.get(query.key, ())))

    def _watch_key(self, query: StoreWatchKey, asker: Any, now: float, others: list[Effect]) -> Message:
        key = query.key
        self.contents.watch(key)
        return KeyCallbackRegistered(key, self.revision, self._values.get(key))

    def _watch_prefix(self, query: StoreWatchPrefix, asker: Any, now: float, others: list[Effect]) -> Message:
        prefix = Prefix(query.prefix)
        there = {key: self._values[key] for key in sorted(self._values) if is_beneath(prefix.text, key)}
        size = sum(map(len, there.values()))
        if len(there) > MAX_KEYS or size > MAX_TOGETHER:
            said = (
                f"{len(there)} keys with {size} bytes begin with {prefix.text!r}: too many to watch together"
            )
            return StoreRefused(Refusal.LIMIT, said)
        self.contents.watch(prefix)
        return PrefixCallbackRegistered(prefix.text, self.revision, tuple(there), tuple(there.values()))

    def _unwatch(self, query: Message, asker: Any, now: float, others: list[Effect]) -> Message:
        # Others may watch it: the shell calls unwatch() when nobody does.
        return _DONE


_ACTIONS: dict[type[Message], Callable[[State, Any, Any, float, list[Effect]], Message | None]] = {
    StoreSet: State._set,
    StoreMultiSet: State._multi_set,
    StoreCompareSet: State._compare_set,
    StoreAdd: State._add,
    StoreAppend: State._append,
    StoreDeleteKey: State._delete_key,
    StoreGet: State._get,
    StoreWait: State._wait,
    StoreMultiGet: State._wait,
    StoreCheck: State._check,
    StoreGetNumKeys: State._num_keys,
    StoreListKeys: State._list_keys,
    StoreQueuePush: State._queue_push,
    StoreQueuePop: State._queue_pop,
    StoreQueueLen: State._queue_len,
    StoreWatchKey: State._watch_key,
    StoreWatchPrefix: State._watch_prefix,
    StoreUnwatchKey: State._unwatch,
    StoreUnwatchPrefix: State._unwatch,
}

CHANGING: frozenset[type[Message]] = frozenset(
    {
        StoreSet,
        StoreMultiSet,
        StoreCompareSet,
        StoreAdd,
        StoreAppend,
        StoreDeleteKey,
        StoreQueuePush,
        StoreQueuePop,
    }
)
"""Queries that may change something."""


def _refuse(asker: Any, reason: Refusal, text: str) -> Reply:
    return Reply(asker, StoreRefused(reason, text))


def _line_of(queue: str) -> tuple[str, str]:
    """Where blocked pops of ``queue`` wait; a tuple, so that it is no key's place."""
    return ("queue", queue)


def _number(value: bytes) -> int | None:
    """The decimal 64-bit number that ``value`` is, or None. No blanks or underscores."""
    if not value.removeprefix(b"-").isdigit() or len(value) > 20:
        return None
    number = int(value)
    return number if _LEAST <= number <= _MOST else None
