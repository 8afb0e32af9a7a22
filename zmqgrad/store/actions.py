"""One function for each type of query, and the tables of them. Pure, as the state machine is.

An action returns the reply. Actions that change the store append replies to unblocked queries, and
notifications, to ``effects``. The others return None if the query blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zmqgrad.store.effects import DONE, MAX_BATCH_BYTES, Effect
from zmqgrad.store.wait_queue import BlockedQuery
from zmqgrad.store.watch_targets import INTERNAL_PREFIX, Prefix
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

_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1


def _set(state: State, query: StoreSet, effects: list[Effect]) -> Message:
    state.put(query.key, query.value, effects)
    return DONE


def _multi_set(state: State, query: StoreMultiSet, effects: list[Effect]) -> Message:
    if len(query.keys) != len(query.values):
        text = f"multi_set of {len(query.keys)} keys with {len(query.values)} values"
        return StoreRefused(Refusal.INVALID, text)
    for key, value in zip(query.keys, query.values, strict=True):
        state.contents.put(key, value, effects)
    for key in query.keys:
        state.wake(key, effects)
    return DONE


def _compare_set(state: State, query: StoreCompareSet, effects: list[Effect]) -> Message:
    current = state.values.get(query.key)
    result = query.expected if current is None else current
    if current == query.expected or (current is None and not query.expected):
        state.put(query.key, query.desired, effects)
        result = query.desired
    return StoreValue(result, state.revision)


def _add(state: State, query: StoreAdd, effects: list[Effect]) -> Message:
    value = state.values.get(query.key)
    if value is None:
        value = b"0"
    number = int(value) if value.isdigit() and len(value) < 19 else _number(value)
    if number is None:
        text = f"add: the value of {query.key!r} is no 64-bit number but {value[:40]!r}"
        return StoreRefused(Refusal.INVALID, text)
    total = number + query.amount
    if not _INT64_MIN <= total <= _INT64_MAX:
        text = f"add: {number} + {query.amount} at {query.key!r} does not fit 64 bits"
        return StoreRefused(Refusal.LIMIT, text)
    state.put(query.key, b"%d" % total, effects)
    return StoreNumber(total)


def _append(state: State, query: StoreAppend, effects: list[Effect]) -> Message:
    value = (state.values.get(query.key) or b"") + query.value
    if len(value) > MAX_VALUE:
        text = f"append: {query.key!r} would hold {len(value)} bytes, more than {MAX_VALUE}"
        return StoreRefused(Refusal.LIMIT, text)
    state.put(query.key, value, effects)
    return DONE


def _delete_key(state: State, query: StoreDeleteKey, effects: list[Effect]) -> Message:
    existed = state.contents.delete(query.key, effects)
    return StoreNumber(int(existed))


def _get(state: State, query: StoreGet, requester: Any, now: float) -> Message | None:
    value = state.values.get(query.key)
    if value is not None:
        return StoreValue(value, state.contents.revision)
    return state.when_all_exist(query, (query.key,), requester, now)


def _wait(state: State, query: StoreWait | StoreMultiGet, requester: Any, now: float) -> Message | None:
    return state.when_all_exist(query, query.keys, requester, now)


def _check(state: State, query: StoreCheck, requester: Any, now: float) -> Message:
    values, queues = state.values, state.queues
    exist = all(key in values or key in queues for key in query.keys)
    return StoreNumber(int(exist))


def _num_keys(state: State, query: StoreGetNumKeys, requester: Any, now: float) -> Message:
    return StoreNumber(state.contents.num_keys)


def _list_keys(state: State, query: StoreListKeys, requester: Any, now: float) -> Message:
    return StoreKeys(
        () if query.prefix.startswith(INTERNAL_PREFIX) else tuple(state.contents.keys(query.prefix))
    )


def _queue_push(state: State, query: StoreQueuePush, effects: list[Effect]) -> Message:
    state.contents.push(query.key, query.value)
    state.after_push(query.key, effects)
    return DONE


def _queue_pop(state: State, query: StoreQueuePop, requester: Any, now: float) -> Message | None:
    if query.key in state.queues:
        return state.deliver(requester, query.key, state.contents.pop(query.key))
    if not query.block:
        return StoreRefused(Refusal.MISSING, f"queue is empty: {query.key!r}")
    blocked = BlockedQuery(query, requester, (query.key,))
    state.wait_queue.add(blocked, queue_condition(query.key), now + query.timeout)
    return None


def _queue_len(state: State, query: StoreQueueLen, requester: Any, now: float) -> Message:
    return StoreNumber(len(state.queues.get(query.key) or ()))


def _watch_key(state: State, query: StoreWatchKey, requester: Any, now: float) -> Message:
    key = query.key
    state.contents.watch(key)
    return KeyCallbackRegistered(key, state.revision, state.values.get(key))


def _watch_prefix(state: State, query: StoreWatchPrefix, requester: Any, now: float) -> Message:
    prefix = Prefix(query.prefix)
    values = {key: state.values[key] for key in state.contents.keys(prefix.text)}
    size = sum(map(len, values.values()))
    if len(values) > MAX_KEYS or size > MAX_BATCH_BYTES:
        text = f"{len(values)} keys with {size} bytes begin with {prefix.text!r}: too many for one watch"
        return StoreRefused(Refusal.LIMIT, text)
    state.contents.watch(prefix)
    return PrefixCallbackRegistered(prefix.text, state.revision, tuple(values), tuple(values.values()))


def _unwatch(state: State, query: Message, requester: Any, now: float) -> Message:
    # Other clients may watch the target: the driver calls State.unwatch() after the last one.
    return DONE


def queue_condition(queue: str) -> tuple[str, str]:
    """The condition that blocked pops of ``queue`` wait for. A tuple, as strings are keys."""
    return ("queue", queue)


def _number(value: bytes) -> int | None:
    """``value`` as a decimal 64-bit number, or None. Blanks and underscores are not accepted."""
    if not value.removeprefix(b"-").isdigit() or len(value) > 20:
        return None
    number = int(value)
    return number if _INT64_MIN <= number <= _INT64_MAX else None


CHANGES: dict[type[Message], Callable[[State, Any, list[Effect]], Message]] = {
    StoreSet: _set,
    StoreMultiSet: _multi_set,
    StoreCompareSet: _compare_set,
    StoreAdd: _add,
    StoreAppend: _append,
    StoreDeleteKey: _delete_key,
    StoreQueuePush: _queue_push,
}
"""Actions that may change the store, and never block, by type of query."""

READS: dict[type[Message], Callable[[State, Any, Any, float], Message | None]] = {
    StoreGet: _get,
    StoreWait: _wait,
    StoreMultiGet: _wait,
    StoreCheck: _check,
    StoreGetNumKeys: _num_keys,
    StoreListKeys: _list_keys,
    StoreQueuePop: _queue_pop,  # the only one that changes the store
    StoreQueueLen: _queue_len,
    StoreWatchKey: _watch_key,
    StoreWatchPrefix: _watch_prefix,
    StoreUnwatchKey: _unwatch,
    StoreUnwatchPrefix: _unwatch,
}
"""Actions that may block, and have no effect on other requesters, by type of query."""
