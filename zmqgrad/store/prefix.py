"""``PrefixStore``: a view of a store that adds a prefix to all keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from zmqgrad.runtime.arguments import check_instance
from zmqgrad.store.arguments import as_key
from zmqgrad.store.base import Store
from zmqgrad.store.events import EventHandler, WatchEvent
from zmqgrad.store.watch_targets import Prefix, Target
from zmqgrad.wire.messages import Message, StoreKeys


class PrefixStore(Store):
    """A view of ``store`` with ``prefix/`` before the name of every key and queue. Views can be nested.

    As in torch, :meth:`num_keys` counts all keys of the underlying store, and the timeout is shared with it.

    Args:
        owned: closing the view also closes the underlying store.

    Example:
        >>> store = HashStore()
        >>> PrefixStore("job1", store).set("step", "7")
        >>> store.list_keys()
        ['job1/step']
    """

    def __init__(self, prefix: str, store: Store, *, owned: bool = False) -> None:
        check_instance("the store of a PrefixStore", store, Store, "a store of zmqgrad.store")
        self._prefix = f"{as_key(prefix)}/"
        self._store = store
        self._registry = store._registry
        self._owned = owned

    @property
    def underlying_store(self) -> Store:
        """The store that holds the keys."""
        return self._store

    def _full(self, key: str) -> str:
        return as_key(self._prefix + as_key(key))

    def _request(self, query: Message, seconds: float) -> Message:
        fields = query.__struct_fields__
        changed: dict[str, Any] = {}
        if "keys" in fields:
            changed["keys"] = tuple([self._full(key) for key in query.keys])  # type: ignore[attr-defined]
        for name in ("key", "prefix"):
            if name in fields:
                changed[name] = self._full(getattr(query, name))
        reply = self._store._request(replace(query, **changed) if changed else query, seconds)
        if type(reply) is StoreKeys:
            return StoreKeys(tuple([key[len(self._prefix) :] for key in reply.keys]))
        return reply

    @property
    def _timeout(self) -> float:
        return self._store._timeout

    @_timeout.setter
    def _timeout(self, seconds: float) -> None:
        self._store.set_timeout(seconds)

    def _watch(self, target: Target, handler: EventHandler, present: bool = False) -> None:
        self._store._watch(self._full_target(target), _Unprefixed(handler, len(self._prefix)), present)

    def _unwatch(self, target: Target, handler: EventHandler | None) -> None:
        unprefixed = None if handler is None else _Unprefixed(handler, len(self._prefix))
        self._store._unwatch(self._full_target(target), unprefixed)

    def _full_target(self, target: Target) -> Target:
        return Prefix(self._full(target.text)) if isinstance(target, Prefix) else self._full(target)

    def get_cached(self, key: str) -> bytes:
        return self._store.get_cached(self._full(key))

    def clone(self) -> PrefixStore:
        return PrefixStore(self._prefix[:-1], self._store.clone(), owned=True)

    def close(self) -> None:
        """Close the underlying store if this view owns it."""
        if self._owned:
            self._store.close()

    def __repr__(self) -> str:
        return f"<PrefixStore {self._prefix!r} of {self._store!r}>"


@dataclass(frozen=True)
class _Unprefixed(EventHandler):
    """Passes on events with the prefix removed from their keys."""

    handler: EventHandler
    length: int

    def __call__(self, event: WatchEvent) -> None:
        self.handler(event._replace(key=event.key[self.length :]))

    def end(self) -> None:
        self.handler.end()
