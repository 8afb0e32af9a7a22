"""What each query does to a store: one function a query, and the table of them. Pure, as is the machine.

An action appends its effects, among them the reply to the asker; no reply if the query has to wait. All take
the same arguments, for the machine calls them without looking.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zmqgrad.store.effects import MAX_TOGETHER, Effect, Reply, refuse
from zmqgrad.store.parking import Parked
from zmqgrad.store.topics import HIDDEN, Prefix, is_beneath
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

_NUMBERS = (-(1 << 63), (1 << 63) - 1)


def _set(state: State, query: StoreSet, asker: Any, now: float, effects: list[Effect]) -> None:
    state.put(query.key, query.value, effects)
    effects.append(Reply(asker, StoreDone()))


def _multi_set(state: State, query: StoreMultiSet, asker: Any, now: float, effects: list[Effect]) -> None:
    if len(query.keys) != len(query.values):
        said = f"multi_set of {len(query.keys)} keys with {len(query.values)} values"
        effects.append(refuse(asker, Refusal.INVALID, said))
        return
    for key, value in zip(query.keys, query.values, strict=True):
        state.held.put(key, value, effects)
    for key in query.keys:
        state.wake(key, effects)
    effects.append(Reply(asker, StoreDone()))


def _compare_set(state: State, query: StoreCompareSet, asker: Any, now: float, effects: list[Effect]) -> None:
    current = state.values.get(query.key)
    result = query.expected if current is None else current
    if current == query.expected or (current is None and not query.expected):
        state.put(query.key, query.desired, effects)
        result = query.desired
    effects.append(Reply(asker, StoreValue(result, state.revision)))


def _add(state: State, query: StoreAdd, asker: Any, now: float, effects: list[Effect]) -> None:
    value = state.values.get(query.key, b"0")
    number = _number(value)
    if number is None:
        said = f"add: the value of {query.key!r} is no 64-bit number but {value[:40]!r}"
        effects.append(refuse(asker, Refusal.INVALID, said))
        return
    total = number + query.amount
    if not _NUMBERS[0] <= total <= _NUMBERS[1]:
        said = f"add: {number} + {query.amount} at {query.key!r} does not fit 64 bits"
        effects.append(refuse(asker, Refusal.LIMIT, said))
        return
    state.put(query.key, b"%d" % total, effects)
    effects.append(Reply(asker, StoreNumber(total)))


def _append(state: State, query: StoreAppend, asker: Any, now: float, effects: list[Effect]) -> None:
    value = state.values.get(query.key, b"") + query.value
    if len(value) > MAX_VALUE:
        said = f"append: {query.key!r} would hold {len(value)} bytes, more than {MAX_VALUE}"
        effects.append(refuse(asker, Refusal.LIMIT, said))
        return
    state.put(query.key, value, effects)
    effects.append(Reply(asker, StoreDone()))


def _delete_key(state: State, query: StoreDeleteKey, asker: Any, now: float, effects: list[Effect]) -> None:
    existed = state.held.delete(query.key, effects)
    effects.append(Reply(asker, StoreNumber(int(existed))))


def _get(state: State, query: StoreGet, asker: Any, now: float, effects: list[Effect]) -> None:
    value = state.values.get(query.key)
    if value is not None:
        effects.append(Reply(asker, StoreValue(value, state.revision)))
    else:
        state.answer_when_all_exist(query, (query.key,), asker, now, effects)


def _wait(
    state: State, query: StoreWait | StoreMultiGet, asker: Any, now: float, effects: list[Effect]
) -> None:
    state.answer_when_all_exist(query, query.keys, asker, now, effects)


def _check(state: State, query: StoreCheck, asker: Any, now: float, effects: list[Effect]) -> None:
    values, queues = state.values, state.queues
    there = all(key in values or key in queues for key in query.keys)
    effects.append(Reply(asker, StoreNumber(int(there))))


def _num_keys(state: State, query: StoreGetNumKeys, asker: Any, now: float, effects: list[Effect]) -> None:
    effects.append(Reply(asker, StoreNumber(state.held.shown)))


def _list_keys(state: State, query: StoreListKeys, asker: Any, now: float, effects: list[Effect]) -> None:
    prefix = query.prefix
    keys = sorted(k for k in state.values if k.startswith(prefix) and not k.startswith(HIDDEN))
    effects.append(Reply(asker, StoreKeys(tuple(keys))))


def _queue_push(state: State, query: StoreQueuePush, asker: Any, now: float, effects: list[Effect]) -> None:
    effects.append(Reply(asker, StoreDone()))
    first = state.parking.first(_line_of(query.key))
    if first is not None:
        state.parking.release(first)
        state.held.changes += 1
        effects.append(Reply(first.asker, StoreValue(query.value, state.revision)))
    else:
        state.held.push(query.key, query.value)
        if query.key in state.parking:
            state.wake(query.key, effects)


def _queue_pop(state: State, query: StoreQueuePop, asker: Any, now: float, effects: list[Effect]) -> None:
    if query.key in state.queues:
        effects.append(Reply(asker, StoreValue(state.held.pop(query.key), state.revision)))
    elif query.block:
        parked = Parked(query, asker, (query.key,))
        state.parking.park(parked, _line_of(query.key), now + query.timeout)
    else:
        effects.append(refuse(asker, Refusal.MISSING, f"the queue {query.key!r} is empty"))


def _queue_len(state: State, query: StoreQueueLen, asker: Any, now: float, effects: list[Effect]) -> None:
    effects.append(Reply(asker, StoreNumber(len(state.queues.get(query.key, ())))))


def _watch_key(state: State, query: StoreWatchKey, asker: Any, now: float, effects: list[Effect]) -> None:
    key = query.key
    state.held.watch(key)
    effects.append(Reply(asker, KeyCallbackRegistered(key, state.revision, state.values.get(key))))


def _watch_prefix(
    state: State, query: StoreWatchPrefix, asker: Any, now: float, effects: list[Effect]
) -> None:
    prefix = Prefix(query.prefix)
    there = {key: state.values[key] for key in sorted(state.values) if is_beneath(prefix.text, key)}
    size = sum(map(len, there.values()))
    if len(there) > MAX_KEYS or size > MAX_TOGETHER:
        said = f"{len(there)} keys with {size} bytes begin with {prefix.text!r}: too many to watch together"
        effects.append(refuse(asker, Refusal.LIMIT, said))
        return
    state.held.watch(prefix)
    found = PrefixCallbackRegistered(prefix.text, state.revision, tuple(there), tuple(there.values()))
    effects.append(Reply(asker, found))


def _unwatch(state: State, query: Message, asker: Any, now: float, effects: list[Effect]) -> None:
    # Others may watch it: the shell calls unwatch() when nobody does.
    effects.append(Reply(asker, StoreDone()))


def _line_of(queue: str) -> tuple[str, str]:
    """Where blocked pops of ``queue`` wait; a tuple, so that it is no key's place."""
    return ("queue", queue)


def _number(value: bytes) -> int | None:
    """The decimal 64-bit number that ``value`` is, or None. No blanks or underscores."""
    if not value.removeprefix(b"-").isdigit() or len(value) > 20:
        return None
    number = int(value)
    return number if _NUMBERS[0] <= number <= _NUMBERS[1] else None


ACTIONS: dict[type[Message], Callable[[State, Any, Any, float, list[Effect]], None]] = {
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
