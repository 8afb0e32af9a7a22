"""The calls of a store, as queries to a state machine, in this process or in another."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta

from zmqgrad.errors import ClosedError, ConfigurationError, StoreError
from zmqgrad.runtime.clock import MONOTONIC, Clock, Deadline
from zmqgrad.store.arguments import Timeout, as_key, as_keys, as_value, seconds_of
from zmqgrad.store.base import Store
from zmqgrad.store.effects import MAX_BATCH_BYTES
from zmqgrad.store.events import NULL_HANDLER, EventHandler
from zmqgrad.store.watch import WatchRegistry
from zmqgrad.store.watch_targets import Target
from zmqgrad.wire.messages import (
    Message,
    StoreAdd,
    StoreAppend,
    StoreCheck,
    StoreCompareSet,
    StoreDeleteKey,
    StoreGet,
    StoreGetNumKeys,
    StoreItem,
    StoreKeys,
    StoreListKeys,
    StoreMultiGet,
    StoreMultiSet,
    StoreNumber,
    StoreQueueAck,
    StoreQueueLen,
    StoreQueuePop,
    StoreQueuePush,
    StoreSet,
    StoreValue,
    StoreValues,
    StoreWait,
)


class QueryStore(Store):
    """A store that can put a query to a state machine: the calls, as queries."""

    _ask: Callable[[Message, float], Message]
    """The answer to a query, which may take so many seconds. Refusals and silence are raised as errors."""

    def __init__(self, timeout: Timeout, clock: Clock = MONOTONIC) -> None:
        self._clock = clock
        self._timeout = seconds_of(timeout)

    @property
    @abstractmethod
    def _registry(self) -> WatchRegistry:
        """What is watched."""

    def _watch(self, target: Target, handler: EventHandler, present: bool = False) -> None:
        try:
            self._registry.add(target, handler, present=present)
        except ClosedError as e:
            raise StoreError(f"cannot watch {target!r}: {e}") from e

    def get_cached(self, key: str) -> bytes:
        registry, key = self._registry, as_key(key)
        value = registry.cached_value(key)
        if value is None and not registry.is_watched(key):
            self._watch(key, NULL_HANDLER)
            value = registry.cached_value(key)
        while value is None:
            # What get() would find could be newer than what is told next: see it through the book's eyes.
            self.wait([key])
            registry.refresh(key)
            value = registry.cached_value(key)
        return value

    def _expect(self, kind: type[Message], answer: Message) -> StoreError:
        return StoreError(f"{self!r} answered with {type(answer).__name__} instead of {kind.__name__}")

    def _number(self, query: Message) -> int:
        answer = self._ask(query, self._timeout)
        if type(answer) is not StoreNumber:
            raise self._expect(StoreNumber, answer)
        return answer.number

    def _value(self, query: Message) -> bytes:
        answer = self._ask(query, self._timeout)
        if type(answer) is not StoreValue:
            raise self._expect(StoreValue, answer)
        return answer.value

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(StoreSet(as_key(key), as_value(value)), self._timeout)

    def get(self, key: str) -> bytes:
        reply = self._ask(StoreGet(as_key(key), self._timeout), self._timeout)
        if type(reply) is not StoreValue:
            raise self._expect(StoreValue, reply)
        return reply.value

    def add(self, key: str, amount: int) -> int:
        if type(amount) is not int:
            try:
                amount = int(operator.index(amount))  # a bool or a numpy integer becomes an int
            except TypeError:
                raise TypeError(f"add: the amount must be an int, not {type(amount).__name__}") from None
        if not -(1 << 63) <= amount < 1 << 63:
            raise ConfigurationError(f"add: the amount {amount} does not fit 64 bits")
        reply = self._ask(StoreAdd(as_key(key), amount), self._timeout)
        if type(reply) is not StoreNumber:
            raise self._expect(StoreNumber, reply)
        return reply.number

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._value(StoreCompareSet(as_key(key), as_value(expected_value), as_value(desired_value)))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._number(StoreCheck(as_keys(keys))))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        seconds = self._timeout if timeout is None else seconds_of(timeout)
        self._ask(StoreWait(as_keys(keys), seconds), seconds)

    def delete_key(self, key: str) -> bool:
        return bool(self._number(StoreDeleteKey(as_key(key))))

    def num_keys(self) -> int:
        return self._number(StoreGetNumKeys())

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(StoreAppend(as_key(key), as_value(value)), self._timeout)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        answer = self._ask(StoreMultiGet(as_keys(keys), self._timeout), self._timeout)
        if type(answer) is not StoreValues:
            raise self._expect(StoreValues, answer)
        return list(answer.values)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        if isinstance(values, (str, bytes)):
            raise TypeError(f"multi_set: expected a list of values, not the {type(values).__name__}")
        named, valued = as_keys(keys), tuple([as_value(value) for value in values])
        if len(named) != len(valued):
            raise ConfigurationError(f"multi_set: {len(named)} keys, but {len(valued)} values")
        size = sum(map(len, valued))
        if size > MAX_BATCH_BYTES:
            raise ConfigurationError(
                f"multi_set: {size} bytes of values in one query (at most {MAX_BATCH_BYTES})"
            )
        self._ask(StoreMultiSet(named, valued), self._timeout)

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._ask(StoreQueuePush(as_key(key), as_value(value)), self._timeout)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        query, deadline = (
            StoreQueuePop(as_key(key), bool(block), self._timeout),
            Deadline.after(self._timeout),
        )
        while True:
            reply = self._ask(query, deadline.left())
            if type(reply) is StoreValue:
                return reply.value
            if type(reply) is not StoreItem:
                raise self._expect(StoreItem, reply)
            if self._number(StoreQueueAck(reply.item)):
                return reply.value
            # It took so long that the item has returned to the queue.

    def queue_len(self, key: str) -> int:
        return self._number(StoreQueueLen(as_key(key)))

    def list_keys(self, prefix: str = "") -> list[str]:
        answer = self._ask(StoreListKeys(as_key(prefix)), self._timeout)
        if type(answer) is not StoreKeys:
            raise self._expect(StoreKeys, answer)
        return list(answer.keys)

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=min(self._timeout, timedelta.max.total_seconds() - 1))

    def set_timeout(self, timeout: Timeout) -> None:
        self._timeout = seconds_of(timeout)
