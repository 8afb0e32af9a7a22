"""What a store is: the calls of ``torch.distributed.Store``, and ``watch_key``, over one way to ask.

:class:`Store` is the contract, checked by one suite over all stores. :class:`QueryStore` fulfils it for
whoever can put a query to a state machine, in this process or in another.

Keys are ``str`` (``bytes`` are taken as UTF-8), values ``bytes`` (``str`` is encoded as UTF-8); what comes
back is ``bytes``. Timeouts are ``timedelta`` or seconds.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta

from zmqgrad.errors import ClosedError, ConfigurationError, StoreError, StoreTimeoutError
from zmqgrad.runtime.clock import MONOTONIC, Clock
from zmqgrad.store.state import MAX_TOGETHER
from zmqgrad.store.takers import NOBODY, KeyOldNew, OldNew, PrefixCallback, Taker, WatchCallback
from zmqgrad.store.topics import Prefix, Target
from zmqgrad.store.watch import WatchBook
from zmqgrad.store.watching import Inbox, Watch
from zmqgrad.wire.messages import (
    MAX_KEY,
    MAX_KEYS,
    MAX_VALUE,
    Message,
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
    StoreSet,
    StoreValue,
    StoreValues,
    StoreWait,
)

Timeout = timedelta | float

DEFAULT_TIMEOUT = timedelta(seconds=300)


class Store(ABC):
    """A key-value store that several processes, or threads, share.

    Every call may raise ``StoreError`` (the store cannot be reached, or refused), ``StoreTimeoutError``
    (it did not answer in time), ``TypeError`` and ``ConfigurationError`` (the arguments cannot be right).
    """

    @abstractmethod
    def set(self, key: str, value: str | bytes) -> None:
        """Set ``key`` to ``value``."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """The value of ``key``; waits until it exists.

        Raises:
            StoreTimeoutError: if it does not within the store's timeout.
        """

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to the decimal number at ``key`` (0 if missing) and give the sum."""

    @abstractmethod
    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set ``key`` to ``desired_value`` if it holds ``expected_value``, or is missing and that is empty.

        Gives the value that ``key`` has now; ``expected_value`` if it is missing still.
        """

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Do all ``keys`` exist? A queue that is not empty counts as one, here and in :meth:`wait`."""

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Wait until all ``keys`` exist (at one moment), in one round trip.

        Raises:
            StoreTimeoutError: if they do not within ``timeout``, or the store's own where that is None.
        """

    @abstractmethod
    def delete_key(self, key: str) -> bool:
        """Delete ``key``. Did it exist?"""

    @abstractmethod
    def num_keys(self) -> int:
        """How many keys there are; queues do not count."""

    @abstractmethod
    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of ``key``, which is created if missing."""

    @abstractmethod
    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all ``keys`` in their order, in one round trip; waits as :meth:`wait` does."""

    @abstractmethod
    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set each of ``keys`` to its value, in one round trip and at one moment."""

    @abstractmethod
    def queue_push(self, key: str, value: str | bytes) -> None:
        """Push ``value`` to the end of the queue ``key``; a key of that name is another thing."""

    @abstractmethod
    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of the queue ``key``; with ``block``, wait until there is one.

        Raises:
            QueueEmptyError: if the queue is empty, and not ``block``.
            StoreTimeoutError: if it stays empty for the store's timeout.
        """

    @abstractmethod
    def queue_len(self, key: str) -> int:
        """How many values are in the queue ``key``."""

    @abstractmethod
    def list_keys(self, prefix: str = "") -> list[str]:
        """The keys that begin with ``prefix``, sorted."""

    @abstractmethod
    def _watch(self, target: Target, taker: Taker, present: bool = False) -> None:
        """Let ``taker`` have the changes of ``target`` from now on; with ``present``, what is there first."""

    @abstractmethod
    def _unwatch(self, target: Target, taker: Taker | None) -> None:
        """Let ``taker`` (None: any) have them no more."""

    def watch_key(self, key: str, callback: WatchCallback) -> None:
        """Call ``callback(old, new)`` at each change of ``key`` made after this returns.

        Callbacks run in threads of the store's own, one at a time and in order for each key. One may miss
        values that were soon replaced, never the last one. An exception in one is logged.
        """
        self._watch(as_key(key), OldNew(callback))

    def unwatch_key(self, key: str, callback: WatchCallback | None = None) -> None:
        """Call ``callback`` (None: any) no more for ``key``; one that runs now may still be running after."""
        self._unwatch(as_key(key), None if callback is None else OldNew(callback))

    def watch_prefix(self, prefix: str, callback: PrefixCallback) -> None:
        """Call ``callback(key, old, new)`` at each change of a key that begins with ``prefix``.

        As :meth:`watch_key` otherwise, in order over all those keys.
        """
        self._watch(Prefix(as_key(prefix)), KeyOldNew(callback))

    def unwatch_prefix(self, prefix: str, callback: PrefixCallback | None = None) -> None:
        """Call ``callback`` (None: any) no more for ``prefix``."""
        self._unwatch(Prefix(as_key(prefix)), None if callback is None else KeyOldNew(callback))

    def watch(
        self,
        key: str | None = None,
        *,
        prefix: str | None = None,
        timeout: Timeout | None = None,
        present: bool = False,
    ) -> Watch:
        """The changes of ``key``, or of all keys that begin with ``prefix``, to loop over.

            for event in store.watch(prefix="workers/"):
                print(event.key, event.old, event.new, event.revision)

        Args:
            timeout: how long the next event may take to come; None: for ever.
            present: begin with what is there already, as if it had just come to be.

        Raises:
            StoreTimeoutError: in the loop, if the next event takes longer than ``timeout``.
        """
        if (key is None) == (prefix is None):
            raise ConfigurationError("watch: say which key, or which prefix")
        target: Target = as_key(key) if key is not None else Prefix(as_key(prefix or ""))
        inbox = Inbox()
        self._watch(target, inbox, present)
        seconds = None if timeout is None else seconds_of(timeout)
        return Watch(target, seconds, inbox, lambda: self._unwatch(target, inbox))

    @abstractmethod
    def get_cached(self, key: str) -> bytes:
        """The value of ``key`` as it was a moment ago, at the cost of a look into a dict.

        The first call watches the key (:meth:`unwatch_key` ends that). What others, and other calls of this
        store, have just written may not show yet; what showed once is never followed by something older.
        It waits for a key that does not exist, as :meth:`get` does.
        """

    @abstractmethod
    def clone(self) -> Store:
        """Another store over the same keys, to be used in another thread and closed by itself.

        Its timeout is this one's, to begin with. Watches and the serving of a master stay here.
        """

    @property
    @abstractmethod
    def timeout(self) -> timedelta:
        """How long calls wait that are given no timeout of their own."""

    @abstractmethod
    def set_timeout(self, timeout: Timeout) -> None:
        """Set :attr:`timeout`."""

    @abstractmethod
    def close(self) -> None:
        """Let go of threads and sockets. Idempotent."""

    def has_extended_api(self) -> bool:
        """Are ``append``, ``multi_get`` and ``multi_set`` there? Always, here."""
        return True

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Wait until this was called ``world_size`` times with ``key``; it can be used again and again.

        After one that timed out use another key: those who came are counted already.

        Raises:
            StoreTimeoutError: if not all came within ``timeout``, or the store's own where that is None.
        """
        if not isinstance(world_size, int) or world_size < 1:
            raise ConfigurationError(f"barrier: the world size is {world_size!r}; it must be at least 1")
        name = as_key(key)
        seconds = self.timeout.total_seconds() if timeout is None else seconds_of(timeout)
        come = self.add(f"{name}/num_members", 1)
        complete = f"{name}/last_member/{(come - 1) // world_size}"  # each time of use has its own
        if come % world_size == 0:
            self.set(complete, "")
            return
        try:
            self.wait([complete], seconds)
        except StoreTimeoutError as e:
            there = (self.add(f"{name}/num_members", 0) - 1) % world_size + 1
            raise StoreTimeoutError(
                f"barrier({name!r}): {there} of {world_size} came within {seconds:g} s"
            ) from e

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class QueryStore(Store):
    """A store that can put a query to a state machine: the calls, as queries."""

    def __init__(self, timeout: Timeout, clock: Clock = MONOTONIC) -> None:
        self._clock = clock
        self._timeout = seconds_of(timeout)

    @abstractmethod
    def _ask(self, query: Message, seconds: float) -> Message:
        """The answer to ``query``, which may take so long. Refusals and silence are raised as errors."""

    @property
    @abstractmethod
    def _book(self) -> WatchBook:
        """What is watched."""

    def _watch(self, target: Target, taker: Taker, present: bool = False) -> None:
        try:
            self._book.add(target, taker, present=present)
        except ClosedError as e:
            raise StoreError(f"cannot watch {target!r}: {e}") from e

    def get_cached(self, key: str) -> bytes:
        book, key = self._book, as_key(key)
        value = book.last_known(key)
        if value is None and not book.watches(key):
            self._watch(key, NOBODY)
            value = book.last_known(key)
        while value is None:
            # What get() would find could be newer than what is told next: see it through the book's eyes.
            self.wait([key])
            book.refresh(key)
            value = book.last_known(key)
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
        return self._value(StoreGet(as_key(key), self._timeout))

    def add(self, key: str, amount: int) -> int:
        try:
            amount = int(operator.index(amount))  # a bool or a numpy integer becomes an int
        except TypeError:
            raise TypeError(f"add: the amount must be an int, not {type(amount).__name__}") from None
        if not -(1 << 63) <= amount < 1 << 63:
            raise ConfigurationError(f"add: the amount {amount} does not fit 64 bits")
        return self._number(StoreAdd(as_key(key), amount))

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
        if size > MAX_TOGETHER:
            raise ConfigurationError(
                f"multi_set: {size} bytes of values in one query (at most {MAX_TOGETHER})"
            )
        self._ask(StoreMultiSet(named, valued), self._timeout)

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._ask(StoreQueuePush(as_key(key), as_value(value)), self._timeout)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self._value(StoreQueuePop(as_key(key), bool(block), self._timeout))

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


# ---- arguments --------------------------------------------------------------------------------------------


def as_key(key: str | bytes) -> str:
    """``key``, checked.

    Raises:
        TypeError, ConfigurationError: if it cannot be a key.
    """
    if type(key) is not str:
        if isinstance(key, bytes):
            try:
                key = key.decode()
            except UnicodeDecodeError as e:
                raise ConfigurationError(f"the key {key[:40]!r} is not UTF-8") from e
        elif not isinstance(key, str):
            raise TypeError(f"a key must be a str, not {type(key).__name__}")
    if len(key) > MAX_KEY:
        raise ConfigurationError(f"a key of {len(key)} characters (at most {MAX_KEY}): {key[:40]!r}...")
    return key


def as_keys(keys: Sequence[str]) -> tuple[str, ...]:
    """``keys``, checked.

    Raises:
        TypeError, ConfigurationError: if they cannot be keys; one string is not taken for a list of letters.
    """
    if isinstance(keys, (str, bytes)):
        raise TypeError(f"expected a list of keys, not the {type(keys).__name__} {keys[:40]!r}")
    checked = tuple([as_key(key) for key in keys])
    if len(checked) > MAX_KEYS:
        raise ConfigurationError(f"{len(checked)} keys in one query (at most {MAX_KEYS})")
    return checked


def as_value(value: object) -> bytes:
    """``value``, checked.

    Raises:
        TypeError, ConfigurationError: if it cannot be a value.
    """
    if not isinstance(value, bytes):
        if isinstance(value, str):
            value = value.encode()
        elif isinstance(value, (bytearray, memoryview)):
            value = bytes(value)
        else:
            raise TypeError(f"a value must be bytes or str, not {type(value).__name__}")
    if len(value) > MAX_VALUE:
        raise ConfigurationError(f"a value of {len(value)} bytes (at most {MAX_VALUE})")
    return value


def seconds_of(timeout: Timeout) -> float:
    """``timeout`` in seconds, checked.

    Raises:
        TypeError, ConfigurationError: if it is no time, or negative.
    """
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    elif isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        seconds = float(timeout)
    else:
        raise TypeError(f"a timeout must be a timedelta or seconds, not {type(timeout).__name__}")
    if not seconds >= 0:
        raise ConfigurationError(f"a timeout cannot be negative, or no number: {timeout}")
    return seconds
