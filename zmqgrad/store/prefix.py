"""``PrefixStore``: the same store, seen through names that begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from zmqgrad.store.arguments import Timeout, as_key, as_keys
from zmqgrad.store.base import Store
from zmqgrad.store.events import EventHandler, WatchEvent
from zmqgrad.store.watch_targets import Prefix, Target


class PrefixStore(Store):
    """``store`` with ``prefix/`` before every key and queue; views of views add up.

    As with torch's, :meth:`num_keys` counts all keys of the store beneath, and the timeout is its too.

    Args:
        owned: closing the view closes the store beneath. Otherwise it does not: others may use it.
    """

    def __init__(self, prefix: str, store: Store, *, owned: bool = False) -> None:
        if not isinstance(store, Store):
            raise TypeError(f"a PrefixStore needs a store of zmqgrad.store, not {type(store).__name__}")
        self._prefix = f"{as_key(prefix)}/"
        self._store = store
        self._owned = owned

    @property
    def underlying_store(self) -> Store:
        """The store beneath."""
        return self._store

    def _full(self, key: str) -> str:
        return self._prefix + as_key(key)

    def _all_full(self, keys: Sequence[str]) -> list[str]:
        return [self._prefix + key for key in as_keys(keys)]

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(self._full(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._full(key))

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._full(key), amount)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._store.compare_set(self._full(key), expected_value, desired_value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(self._all_full(keys))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        self._store.wait(self._all_full(keys), timeout)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(self._full(key))

    def num_keys(self) -> int:
        return self._store.num_keys()

    def append(self, key: str, value: str | bytes) -> None:
        self._store.append(self._full(key), value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get(self._all_full(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._store.multi_set(self._all_full(keys), values)

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._store.queue_push(self._full(key), value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self._store.queue_pop(self._full(key), block)

    def queue_len(self, key: str) -> int:
        return self._store.queue_len(self._full(key))

    def list_keys(self, prefix: str = "") -> list[str]:
        return [key[len(self._prefix) :] for key in self._store.list_keys(self._full(prefix))]

    def _watch(self, target: Target, handler: EventHandler, present: bool = False) -> None:
        self._store._watch(self._full_target(target), _Unprefixed(handler, len(self._prefix)), present)

    def _unwatch(self, target: Target, handler: EventHandler | None) -> None:
        whose = None if handler is None else _Unprefixed(handler, len(self._prefix))
        self._store._unwatch(self._full_target(target), whose)

    def _full_target(self, target: Target) -> Target:
        return Prefix(self._full(target.text)) if isinstance(target, Prefix) else self._full(target)

    def get_cached(self, key: str) -> bytes:
        return self._store.get_cached(self._full(key))

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout

    def set_timeout(self, timeout: Timeout) -> None:
        self._store.set_timeout(timeout)

    def clone(self) -> PrefixStore:
        return PrefixStore(self._prefix[:-1], self._store.clone(), owned=True)

    def close(self) -> None:
        """Close the store beneath, if this view owns it."""
        if self._owned:
            self._store.close()

    def __repr__(self) -> str:
        return f"<PrefixStore {self._prefix!r} of {self._store!r}>"


@dataclass(frozen=True)
class _Unprefixed:
    """Hands on events with the names that the view has for them."""

    handler: EventHandler
    length: int

    def __call__(self, event: WatchEvent) -> None:
        self.handler(event._replace(key=event.key[self.length :]))

    def end(self) -> None:
        self.handler.end()
