"""Concurrent histories of stores: random programs of several clients, what they saw, and the verdict.

The sequential specification is the dict of test_state, so what may happen next to what is all that is new.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from tests.store.test_state import KEYS, SOME_KEYS, VALUES, Model
from zmqgrad.errors import QueueEmptyError, StoreError, StoreTimeoutError
from zmqgrad.store import Store
from zmqgrad.testing.simulation.linearizability import Operation, explain
from zmqgrad.wire.messages import (
    Message,
    Refusal,
    StoreAdd,
    StoreAppend,
    StoreCheck,
    StoreCompareSet,
    StoreDeleteKey,
    StoreGet,
    StoreGetNumKeys,
    StoreListKeys,
    StoreMultiGet,
    StoreMultiSet,
    StoreQueueLen,
    StoreQueuePop,
    StoreQueuePush,
    StoreSet,
    StoreWait,
)

PATIENCE = 30.0
BLOCK_SECONDS = 0.02
"""How long a call waits for a key that may never come."""

CALLS: dict[type[Message], Callable[[Store, Any], Any]] = {
    StoreSet: lambda store, q: store.set(q.key, q.value),
    StoreGet: lambda store, q: store.get(q.key),
    StoreAdd: lambda store, q: store.add(q.key, q.amount),
    StoreAppend: lambda store, q: store.append(q.key, q.value),
    StoreCompareSet: lambda store, q: store.compare_set(q.key, q.expected, q.desired),
    StoreDeleteKey: lambda store, q: store.delete_key(q.key),
    StoreCheck: lambda store, q: store.check(q.keys),
    StoreWait: lambda store, q: store.wait(q.keys),
    StoreMultiGet: lambda store, q: store.multi_get(q.keys),
    StoreMultiSet: lambda store, q: store.multi_set(q.keys, q.values),
    StoreGetNumKeys: lambda store, q: store.num_keys(),
    StoreListKeys: lambda store, q: store.list_keys(q.prefix),
    StoreQueuePush: lambda store, q: store.queue_push(q.key, q.value),
    StoreQueuePop: lambda store, q: store.queue_pop(q.key, q.block),
    StoreQueueLen: lambda store, q: store.queue_len(q.key),
}
BLOCKING = (StoreGet, StoreWait, StoreMultiGet, StoreQueuePop)
NUMBERS = st.integers(-3, 3)

KEY_QUERIES: st.SearchStrategy[Any] = st.one_of(
    st.builds(StoreSet, KEYS, VALUES),
    st.lists(st.tuples(KEYS, VALUES), max_size=3).map(
        lambda pairs: StoreMultiSet(tuple(k for k, _ in pairs), tuple(v for _, v in pairs))
    ),
    st.builds(StoreCompareSet, KEYS, VALUES, VALUES),
    st.builds(StoreAdd, KEYS, NUMBERS),
    st.builds(StoreAppend, KEYS, VALUES),
    st.builds(StoreDeleteKey, KEYS),
    st.builds(StoreGet, KEYS, st.just(BLOCK_SECONDS)),
    st.builds(StoreWait, SOME_KEYS, st.just(BLOCK_SECONDS)),
    st.builds(StoreMultiGet, SOME_KEYS, st.just(BLOCK_SECONDS)),
    st.builds(StoreCheck, SOME_KEYS),
    st.builds(StoreGetNumKeys),
    st.builds(StoreListKeys, st.sampled_from(["", "a"])),
)


def pushes(queues: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """Queries that fill one of ``queues``."""
    return st.builds(StoreQueuePush, queues, VALUES)


def pops(queues: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """Queries that see what is in one of ``queues``."""
    popped = st.builds(StoreQueuePop, queues, st.booleans(), st.just(BLOCK_SECONDS))
    return popped | st.builds(StoreQueueLen, queues)


State = tuple[tuple[tuple[str, bytes], ...], tuple[tuple[str, tuple[bytes, ...]], ...]]
EMPTY: State = ((), ())


def step(state: State, query: Message) -> tuple[State, Any]:
    """The sequential specification. The result of what would wait is None."""
    model = Model(dict(state[0]), {key: list(items) for key, items in state[1]})
    result = model.answer(query)
    queues = {key: tuple(items) for key, items in model.queues.items() if items}
    return (tuple(sorted(model.values.items())), tuple(sorted(queues.items()))), result


def perform(store: Store, query: Message) -> Any:
    """The result of ``query`` in the words of the model."""
    if isinstance(query, BLOCKING):
        store.set_timeout(BLOCK_SECONDS)
    try:
        result = CALLS[type(query)](store, query)
    except StoreTimeoutError:
        if not isinstance(query, BLOCKING):
            raise
        return None
    except QueueEmptyError:
        return Refusal.MISSING
    except StoreError as e:
        if "64-bit number" not in str(e):
            raise
        return Refusal.INVALID
    finally:
        store.set_timeout(PATIENCE)
    if isinstance(result, bool):
        return int(result)
    return "done" if result is None else result


def run_program(store: Store, client: int, program: Sequence[Any]) -> list[Operation]:
    """What ``client`` sees. What is no message in ``program`` is called: faults."""
    history = []
    for query in program:
        if not isinstance(query, Message):
            query()
            continue
        began = time.monotonic()
        result = perform(store, query)
        history.append(Operation(client, query, result, began, time.monotonic()))
    return history


def run_programs(stores: Sequence[Store], programs: Sequence[Sequence[Any]]) -> list[Operation]:
    """Run a program a store, all at once, each in a thread."""
    history: list[Operation] = []
    failures: list[BaseException] = []
    start = threading.Barrier(len(programs))

    def work(client: int) -> None:
        try:
            start.wait(PATIENCE)
            history.extend(run_program(stores[client], client, programs[client]))
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(n,), name=f"client {n}") for n in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a client hangs"
    if failures:
        raise failures[0]
    return history


def check(history: Sequence[Operation], initial: State = EMPTY) -> None:
    """Fail unless ``history`` is linearizable."""
    report = explain(history, initial, step)
    assert not report, report
