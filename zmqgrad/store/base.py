"""The store interface: the calls of ``torch.distributed.Store``, and watches.

:class:`Store` is the contract, checked by one test suite over all stores. It turns each call into a query
message; a subclass passes the query to its state machine.

Keys are ``str`` (or ``bytes``, see :mod:`~zmqgrad.store.arguments`), values ``bytes`` (``str`` is encoded as
UTF-8); results are ``bytes``. Timeouts are ``timedelta`` or seconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NoReturn, TypeVar

from zmqgrad.errors import (
    ClosedError,
    ConfigurationError,
    QueueEmptyError,
    StoreError,
    StoreTimeoutError,
)
from zmqgrad.runtime.arguments import as_integer, as_list, check_callable
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store.arguments import Timeout, as_key, as_keys, as_value, seconds_of
from zmqgrad.store.effects import MAX_BATCH_BYTES
from zmqgrad.store.events import (
    IGNORE_EVENTS,
    EventHandler,
    KeyCallbackAdapter,
    PrefixCallback,
    PrefixCallbackAdapter,
    WatchCallback,
)
from zmqgrad.store.watch import WatchRegistry
from zmqgrad.store.watch_iterator import EventQueue, Watch
from zmqgrad.store.watch_targets import Prefix, Target
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
    StoreItem,
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
    StoreValue,
    StoreValues,
    StoreWait,
)

M = TypeVar("M", bound=Message)
S = TypeVar("S", bound="Store")


class Store(ABC):
    """A key-value store shared by several processes, or threads.

    Every call may raise ``StoreError`` (the store cannot be reached, or refused), ``StoreTimeoutError``
    (no reply in time), ``ArgumentTypeError`` and ``ConfigurationError`` (invalid arguments).

    Example:
        >>> store: Store = HashStore()
        >>> store.set("step", "7")
        >>> store.get("step")
        b'7'
        >>> store.add("workers", 2)
        2
        >>> store.wait(["step", "workers"], timeout=30)
    """

    _request: Callable[[Message, float], Message]
    """``_request(query, seconds)`` returns the reply. Raises refusals and timeouts as errors."""
    _registry: WatchRegistry
    """The watches of this store."""

    def __init__(self, timeout: Timeout) -> None:
        self._timeout = seconds_of(timeout)

    # ---- keys and queues --------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Set ``key`` to ``value``."""
        self._request(StoreSet(as_key(key), as_value(value)), self._timeout)

    def get(self, key: str) -> bytes:
        """The value of ``key``; waits until it exists.

        Raises:
            StoreTimeoutError: if it does not within the store's timeout.
        """
        return self._ask(StoreGet(as_key(key), self._timeout), StoreValue).value

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the decimal number at ``key`` (0 if missing). Returns the sum.

        Raises:
            ArgumentTypeError, ConfigurationError: if ``amount`` is not an integer of 64 bits.
            StoreError: if the value is not a number, or the sum does not fit 64 bits.
        """
        if type(amount) is not int:
            amount = as_integer(amount, "add: the amount")
        if not -(1 << 63) <= amount < 1 << 63:
            raise ConfigurationError(f"add: the amount {amount} does not fit 64 bits")
        return self._ask(StoreAdd(as_key(key), amount), StoreNumber).number

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set ``key`` to ``desired_value`` if it holds ``expected_value``, or is missing and that is empty.

        Returns:
            The value of ``key`` afterwards; ``expected_value`` if the key is still missing.

        Raises:
            StoreError: if the store refuses the query or cannot be reached.
        """
        query = StoreCompareSet(as_key(key), as_value(expected_value), as_value(desired_value))
        return self._ask(query, StoreValue).value

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all ``keys`` exist. A queue that is not empty counts as a key, here and in :meth:`wait`."""
        return bool(self._number(StoreCheck(as_keys(keys))))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Wait until all ``keys`` exist (at one moment), in one round trip.

        Raises:
            StoreTimeoutError: if they do not within ``timeout`` (None: the store's own).
        """
        seconds = self._timeout if timeout is None else seconds_of(timeout)
        self._request(StoreWait(as_keys(keys), seconds), seconds)

    def delete_key(self, key: str) -> bool:
        """Delete ``key``. Returns whether it existed."""
        return bool(self._number(StoreDeleteKey(as_key(key))))

    def num_keys(self) -> int:
        """Number of keys; queues do not count."""
        return self._number(StoreGetNumKeys())

    def append(self, key: str, value: str | bytes) -> None:
        """Append ``value`` to the value of ``key``, which is created if missing."""
        self._request(StoreAppend(as_key(key), as_value(value)), self._timeout)

    def multi_get(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        """The values of all ``keys`` in their order, in one round trip; waits as :meth:`wait` does.

        Raises:
            StoreTimeoutError: if a key is still missing after ``timeout`` (None: the store's own).
        """
        seconds = self._timeout if timeout is None else seconds_of(timeout)
        reply = self._request(StoreMultiGet(as_keys(keys), seconds), seconds)
        return list(self._checked(reply, StoreValues).values)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set each of ``keys`` to its value, in one round trip and at one moment.

        Args:
            keys: may have repetitions; the last value counts.
            values: as many as ``keys``.

        Raises:
            ArgumentTypeError, ConfigurationError: if ``values`` is no list of that length, or is too large.
        """
        names = as_keys(keys)
        checked = tuple(map(as_value, as_list(values, "multi_set: expected a list of values")))
        if len(names) != len(checked):
            raise ConfigurationError(f"multi_set: {len(names)} keys, but {len(checked)} values")
        size = sum(map(len, checked))
        if size > MAX_BATCH_BYTES:
            raise ConfigurationError(
                f"multi_set: {size} bytes of values in one query (at most {MAX_BATCH_BYTES})"
            )
        self._request(StoreMultiSet(names, checked), self._timeout)

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Append ``value`` to the queue ``key``. Queues and keys have separate namespaces."""
        self._request(StoreQueuePush(as_key(key), as_value(value)), self._timeout)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove and return the first value of the queue ``key``; with ``block``, wait for one.

        Raises:
            QueueEmptyError: if the queue is empty, and not ``block``.
            StoreTimeoutError: if it stays empty for the store's timeout.
        """
        query = StoreQueuePop(as_key(key), bool(block), self._timeout)
        seconds, deadline = self._timeout, Deadline.after(self._timeout)
        while True:
            reply = self._request(query, seconds)
            if isinstance(reply, StoreValue | StoreItem):
                return reply.value
            self._checked(reply, StoreNumber)
            seconds = deadline.left()  # acknowledged too late: the item has returned to the queue

    def queue_len(self, key: str) -> int:
        """Number of values in the queue ``key``."""
        return self._number(StoreQueueLen(as_key(key)))

    def list_keys(self, prefix: str = "") -> list[str]:
        """The keys that begin with ``prefix``, sorted.

        Raises:
            StoreError: if the store refuses the query or cannot be reached.
        """
        return list(self._ask(StoreListKeys(as_key(prefix)), StoreKeys).keys)

    def _number(self, query: Message) -> int:
        return self._ask(query, StoreNumber).number

    def _ask(self, query: Message, kind: type[M]) -> M:
        """The reply to ``query``, checked to be a ``kind``."""
        return self._checked(self._request(query, self._timeout), kind)

    def _checked(self, reply: Message, kind: type[M]) -> M:
        if not isinstance(reply, kind):
            raise StoreError(f"{self!r} replied with {type(reply).__name__} instead of {kind.__name__}")
        return reply

    def _accepted(self, reply: Message, seconds: float) -> Message:
        """``reply`` to a query that was allowed ``seconds``. Raises a refusal as an error."""
        if type(reply) is not StoreRefused:
            return reply
        if reply.reason is Refusal.TIMEOUT:
            raise StoreTimeoutError(f"{self!r}: wait timeout after {seconds:g} s: {reply.text}")
        kind = QueueEmptyError if reply.reason is Refusal.MISSING else StoreError
        raise kind(f"{self!r}: {reply.text}")

    # ---- watches ----------------------------------------------------------------------------------------

    def _watch(self, target: Target, handler: EventHandler, present: bool = False) -> None:
        """Call ``handler`` for each change of ``target``; with ``present``, for existing keys first."""
        try:
            self._registry.add(target, handler, present=present)
        except ClosedError as e:
            raise StoreError(f"cannot watch {target!r}: {e}") from e

    def _unwatch(self, target: Target, handler: EventHandler | None) -> None:
        """Remove ``handler`` (None: all) from ``target``."""
        if self._registry.remove(target, handler):
            self._on_unwatched(target)

    def _on_unwatched(self, target: Target) -> None:  # noqa: B027  # in a file, nothing is to do
        """The last handler of ``target`` was removed."""

    def watch_key(self, key: str, callback: WatchCallback) -> None:
        """Call ``callback(old, new)`` at each change of ``key`` made after this returns.

        Callbacks run in the store's own threads, each with one event at a time and in order. A callback may
        miss values that were soon replaced, never the last one. Exceptions in it are logged.
        """
        check_callable(callback)
        self._watch(as_key(key), KeyCallbackAdapter(callback))

    def unwatch_key(self, key: str, callback: WatchCallback | None = None) -> None:
        """Stop calling ``callback`` (None: all) for ``key``. A call that has begun may end later."""
        self._unwatch(as_key(key), None if callback is None else KeyCallbackAdapter(callback))

    def watch_prefix(self, prefix: str, callback: PrefixCallback) -> None:
        """Call ``callback(key, old, new)`` at each change of a key that begins with ``prefix``.

        Otherwise as :meth:`watch_key`; events are in order over all these keys.
        """
        check_callable(callback)
        self._watch(Prefix(as_key(prefix)), PrefixCallbackAdapter(callback))

    def unwatch_prefix(self, prefix: str, callback: PrefixCallback | None = None) -> None:
        """Stop calling ``callback`` (None: all) for ``prefix``."""
        self._unwatch(Prefix(as_key(prefix)), None if callback is None else PrefixCallbackAdapter(callback))

    def watch(
        self,
        key: str | None = None,
        *,
        prefix: str | None = None,
        timeout: Timeout | None = None,
        present: bool = False,
    ) -> Watch:
        """Iterate over the changes of ``key``, or of all keys that begin with ``prefix``.

            for event in store.watch(prefix="workers/"):
                print(event.key, event.old, event.new, event.revision)

        Args:
            timeout: how long to wait for the next event; None: no limit.
            present: begin with the existing keys, as if they had just been created.

        Raises:
            StoreTimeoutError: in the loop, if the next event takes longer than ``timeout``.
        """
        if (key is None) == (prefix is None):
            raise ConfigurationError("watch: pass either a key or a prefix")
        target: Target = as_key(key) if key is not None else Prefix(as_key(prefix or ""))
        seconds, queue = None if timeout is None else seconds_of(timeout), EventQueue()
        self._watch(target, queue, present)
        return Watch(target, seconds, queue, lambda: self._unwatch(target, queue))

    def get_cached(self, key: str) -> bytes:
        """The cached value of ``key``, at the cost of a dict lookup.

        The first call watches the key (:meth:`unwatch_key` ends that). Recent writes, also by this store, may
        not be visible yet, but a value is never followed by an older one. Waits for a missing key, as
        :meth:`get`.
        """
        registry, key = self._registry, as_key(key)
        while (value := registry.cached_value(key)) is None:
            if registry.is_watched(key):
                # Its result could be newer than the next cached value, so take that from the cache itself.
                self.get(key)
                registry.refresh(key)
            else:  # this is the first call, or another thread has ended the watch
                self._watch(key, IGNORE_EVENTS)
        return value

    # ---- timeouts and lifetime --------------------------------------------------------------------------

    @abstractmethod
    def clone(self) -> Store:
        """Another store over the same keys, to be used in another thread and closed on its own.

        It starts with this store's timeout. Watches, and the server of a master, stay with this store.
        """

    @property
    def timeout(self) -> timedelta:
        """How long calls without a timeout of their own wait."""
        return timedelta(seconds=min(self._timeout, timedelta.max.total_seconds() - 1))

    def set_timeout(self, timeout: Timeout) -> None:
        """Set :attr:`timeout`.

        Args:
            timeout: seconds, or a timedelta.
        """
        self._timeout = seconds_of(timeout)

    @abstractmethod
    def close(self) -> None:
        """Release threads and sockets. Idempotent."""

    def has_extended_api(self) -> bool:
        """Whether ``append``, ``multi_get`` and ``multi_set`` are supported; always true."""
        return True

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Wait until this was called ``world_size`` times with ``key``. Reusable.

        After a timeout use another key, because the calls so far remain counted. Who serves the store must
        not close it right behind a barrier: others may not have heard yet that it is complete.

        Raises:
            StoreTimeoutError: if fewer did within ``timeout`` (None: the store's own).
        """
        if not isinstance(world_size, int) or world_size < 1:
            raise ConfigurationError(f"barrier: the world size is {world_size!r}; it must be at least 1")
        name = as_key(key)
        seconds = self.timeout.total_seconds() if timeout is None else seconds_of(timeout)
        arrived = self.add(f"{name}/num_members", 1)
        complete = f"{name}/last_member/{(arrived - 1) // world_size}"  # one for each use
        if arrived % world_size == 0:
            self.set(complete, "")
            return
        try:
            self.wait([complete], seconds)
        except StoreTimeoutError as e:
            present = (self.add(f"{name}/num_members", 0) - 1) % world_size + 1
            raise StoreTimeoutError(
                f"barrier timeout after {seconds:g} s, key {name!r}: {present} of {world_size} have arrived"
            ) from e

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"cannot pickle or copy {self!r}: open it again in the other process, or clone() it")

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
