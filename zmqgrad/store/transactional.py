"""Stores whose clients run the state machine themselves: each query is one transaction on what they share.

That is a file (:mod:`~zmqgrad.store.file`) or an etcd cluster (:mod:`~zmqgrad.store.etcd`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from zmqgrad.errors import StoreTimeoutError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store.arguments import Timeout
from zmqgrad.store.base import Store
from zmqgrad.store.contents import Item
from zmqgrad.store.finalizer import Finalizer
from zmqgrad.store.watch import WatchRegistry, as_registration, watch_query, weak
from zmqgrad.store.watch_cache import Registration
from zmqgrad.store.watch_targets import Target
from zmqgrad.wire.messages import Message

T = TypeVar("T")


class Connection(Protocol):
    """The connection of one store to what it shares with others.

    Attributes:
        name: for threads and log lines.
        blocked: number of blocked queries.
        watches: of the store, which sets it.
    """

    name: str
    blocked: int
    watches: WatchRegistry

    def request(self, query: Message, deadline: Deadline) -> Message:
        """The reply to ``query``, perhaps a refusal. Blocks as the query requires, until ``deadline``."""

    def close(self) -> None:
        """Refuse blocked queries, and disconnect. Idempotent."""


class TransactionalStore(Store):
    """A store that executes each query by ``connection``."""

    def __init__(self, connection: Connection, timeout: Timeout) -> None:
        super().__init__(timeout)
        self._transactions = connection
        self._registry = connection.watches = WatchRegistry(connection.name, weak(self._register))
        self._finalizer = Finalizer(self, connection.close)

    def _request(self, query: Message, seconds: float) -> Message:
        try:
            reply = self._transactions.request(query, Deadline.after(seconds))
        except StoreTimeoutError as e:
            raise StoreTimeoutError(f"{self!r}: wait timeout after {seconds:g} s: {e}") from e
        return self._accepted(reply, seconds)

    def _register(self, target: Target) -> Registration:
        return as_registration(self._request(watch_query(target), self._timeout))

    def statistics(self) -> dict[str, int]:
        """Number of blocked calls of this store (``parked``)."""
        return {"parked": self._transactions.blocked}

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._finalizer.close()


class Lookup(Generic[T]):
    """Keys or queues by name, as the state machine reads them.

    Args:
        find: returns what has a name, or None.
        exists: whether there is something, which may be large.
    """

    def __init__(self, find: Callable[[str], T | None], exists: Callable[[str], bool]) -> None:
        self.get = find
        self._exists = exists

    def __getitem__(self, name: str) -> T:
        found = self.get(name)
        if found is None:
            raise KeyError(name)
        return found

    def __contains__(self, name: object) -> bool:
        assert isinstance(name, str)
        return self._exists(name)


class StoredContents(ABC):
    """Storage of the state machine, as a transaction sees it (:class:`~zmqgrad.store.contents.Storage`).

    It makes no notifications: the connection finds out what others have changed.
    """

    def __init__(self) -> None:
        self.values = Lookup(self.value, self.has)
        self.queues = Lookup(self.queue, self.has_items)

    @abstractmethod
    def value(self, key: str) -> bytes | None:
        """The value of ``key``; None if it does not exist."""

    @abstractmethod
    def has(self, key: str) -> bool:
        """Whether ``key`` exists."""

    @abstractmethod
    def queue(self, name: str) -> range:
        """A range as long as the queue ``name``."""

    @abstractmethod
    def has_items(self, name: str) -> bool:
        """Whether the queue ``name`` is not empty."""

    def statistics(self) -> dict[str, int]:
        """None: they would have to be read."""
        return {}

    def delivered(self, item: Item) -> None:  # noqa: B027
        """Does nothing: the item leaves with the transaction that pops it."""

    def watch(self, target: Target) -> None:  # noqa: B027
        """Does nothing: there are no notifications."""

    def unwatch(self, target: Target) -> None:  # noqa: B027
        """Does nothing: there are no notifications."""
