"""What each query does to a store: one function a query, and the table of them. Pure, as is the machine.

An action gives the answer to the asker, or None if the query has to wait, and appends to ``others`` what else
follows. All take the same arguments, for the machine calls them without looking.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zmqgrad.store.effects import DONE, MAX_TOGETHER, Effect
from zmqgrad.store.parking import Parked
from zmqgrad.store.topics import HIDDEN, Prefix
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
    StoreWait,
    StoreWatchKey,
    StoreWatchPrefix,
)

if TYPE_CHECKING:
    from zmqgrad.store.state import State

_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


def _set(state: State, query: StoreSet, asker: Any, now: float, others: list[Effect]) -> Message:
    state.put(query.key, query.value, others)
    return DONE


def _multi_set(state: State, query: StoreMultiSet, asker: Any, now: float, others: list[Effect]) -> Message:
    if len(query.keys) != len(query.values):
        said = f"multi_set of {len(query.keys)} keys with {len(query.values)} values"
        return StoreRefused(Refusal.INVALID, said)
    for key, value in zip(query.keys, query.values, strict=True):
        state.contents.put(key, value, others)
    for key in query.keys:
        state.wake(key, others)
    return DONE


def _compare_set(
    state: State, query: StoreCompareSet, asker: Any, now: float, others: list[Effect]
) -> Message:
    current = state.values.get(query.key)
    result = query.expected if current is None else current
    if current == query.expected or (current is None and not query.expected):
        state.put(query.key, query.desired, others)
        result = query.desired
    return StoreValue(result, state.revision)


def _add(state: State, query: StoreAdd, asker: Any, now: float, others: list[Effect]) -> Message:
    value = state.values.get(query.key, b"0")
    number = int(value) if value.isdigit() and len(value) < 19 else _number(value)
    if number is None:
        said = f"add: the value of {query.key!r} is no 64-bit number but {value[:40]!r}"
        return StoreRefused(Refusal.INVALID, said)
    total = number + query.amount
    if not _LEAST <= total <= _MOST:
        said = f"add: {number} + {query.amount} at {query.key!r} does not fit 64 bits"
        return StoreRefused(Refusal.LIMIT, said)
    state.put(query.key, b"%d" % total, others)
    return StoreNumber(total)


def _append(state: State, query: StoreAppend, asker: Any, now: float, others: list[Effect]) -> Message:
    value = state.values.get(query.key, b"") + query.value
    if len(value) > MAX_VALUE:
        said = f"append: {query.key!r} would hold {len(value)} bytes, more than {MAX_VALUE}"
        return StoreRefused(Refusal.LIMIT, said)
    state.put(query.key, value, others)
    return DONE


def _delete_key(state: State, query: StoreDeleteKey, asker: Any, now: float, others: list[Effect]) -> Message:
    existed = state.contents.delete(query.key, others)
    return StoreNumber(int(existed))


def _get(state: State, query: StoreGet, asker: Any, now: float, others: list[Effect]) -> Message | None:
    value = state.values.get(query.key)
    if value is not None:
        return StoreValue(value, state.contents.revision)
    return state.when_all_exist(query, (query.key,), asker, now)


def _wait(
    state: State, query: StoreWait | StoreMultiGet, asker: Any, now: float, others: list[Effect]
) -> Message | None:
    return state.when_all_exist(query, query.keys, asker, now)


def _check(state: State, query: StoreCheck, asker: Any, now: float, others: list[Effect]) -> Message:
    values, queues = state.values, state.queues
    there = all(key in values or key in queues for key in query.keys)
    return StoreNumber(int(there))


def _num_keys(state: State, query: StoreGetNumKeys, asker: Any, now: float, others: list[Effect]) -> Message:
    return StoreNumber(state.contents.shown)


def _list_keys(state: State, query: StoreListKeys, asker: Any, now: float, others: list[Effect]) -> Message:
    return StoreKeys(() if query.prefix.startswith(HIDDEN) else tuple(state.contents.keys(query.prefix)))


def _queue_push(state: State, query: StoreQueuePush, asker: Any, now: float, others: list[Effect]) -> Message:
    state.contents.push(query.key, query.value)
    state.queue_grew(query.key, others)
    return DONE


def _queue_pop(
    state: State, query: StoreQueuePop, asker: Any, now: float, others: list[Effect]
) -> Message | None:
    if query.key in state.queues:
        return state.deliver(asker, query.key, state.contents.pop(query.key))
    if not query.block:
        return StoreRefused(Refusal.MISSING, f"the queue {query.key!r} is empty")
    parked = Parked(query, asker, (query.key,))
    state.parking.park(parked, place_of_pops(query.key), now + query.timeout)
    return None


def _queue_len(state: State, query: StoreQueueLen, asker: Any, now: float, others: list[Effect]) -> Message:
    return StoreNumber(len(state.queues.get(query.key, ())))


def _watch_key(state: State, query: StoreWatchKey, asker: Any, now: float, others: list[Effect]) -> Message:
    key = query.key
    state.contents.watch(key)
    return KeyCallbackRegistered(key, state.revision, state.values.get(key))


def _watch_prefix(
    state: State, query: StoreWatchPrefix, asker: Any, now: float, others: list[Effect]
) -> Message:
    prefix = Prefix(query.prefix)
    there = {key: state.values[key] for key in state.contents.keys(prefix.text)}
    size = sum(map(len, there.values()))
    if len(there) > MAX_KEYS or size > MAX_TOGETHER:
        said = f"{len(there)} keys with {size} bytes begin with {prefix.text!r}: too many to watch together"
        return StoreRefused(Refusal.LIMIT, said)
    state.contents.watch(prefix)
    return PrefixCallbackRegistered(prefix.text, state.revision, tuple(there), tuple(there.values()))


def _unwatch(state: State, query: Message, asker: Any, now: float, others: list[Effect]) -> Message:
    # Others may watch it: the shell calls unwatch() when nobody does.
    return DONE


def place_of_pops(queue: str) -> tuple[str, str]:
    """Where blocked pops of ``queue`` wait; a tuple, so that it is no key's place."""
    return ("queue", queue)


def _number(value: bytes) -> int | None:
    """The decimal 64-bit number that ``value`` is, or None. No blanks or underscores."""
    if not value.removeprefix(b"-").isdigit() or len(value) > 20:
        return None
    number = int(value)
    return number if _LEAST <= number <= _MOST else None


ACTIONS: dict[type[Message], Callable[[State, Any, Any, float, list[Effect]], Message | None]] = {
    StoreSet: _set,
    StoreMultiSet: _multi_set,
    StoreCompareSet: _compare_set,
    StoreAdd: _add,
    StoreAppend: _append,
    StoreDeleteKey: _delete_key,
    StoreGet: _get,
    StoreWait: _wait,
    StoreMultiGet: _wait,
    StoreCheck: _check,
    StoreGetNumKeys: _num_keys,
    StoreListKeys: _list_keys,
    StoreQueuePush: _queue_push,
    StoreQueuePop: _queue_pop,
    StoreQueueLen: _queue_len,
    StoreWatchKey: _watch_key,
    StoreWatchPrefix: _watch_prefix,
    StoreUnwatchKey: _unwatch,
    StoreUnwatchPrefix: _unwatch,
}
"""By the kind of query."""

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
