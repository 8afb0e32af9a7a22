"""What a store is: the calls of ``torch.distributed.Store``, and ``watch_key``.

:class:`Store` is the contract, checked by one suite over all stores.

Keys are ``str`` (or ``bytes``, see :mod:`~zmqgrad.store.arguments`), values ``bytes`` (``str`` is encoded as
UTF-8); what comes back is ``bytes``. Timeouts are ``timedelta`` or seconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta

from zmqgrad.errors import ConfigurationError, StoreTimeoutError
from zmqgrad.store.arguments import Timeout, as_key, seconds_of
from zmqgrad.store.events import (
    EventHandler,
    KeyCallbackAdapter,
    PrefixCallback,
    PrefixCallbackAdapter,
    WatchCallback,
)
from zmqgrad.store.watch_iterator import EventQueue, Watch
from zmqgrad.store.watch_targets import Prefix, Target


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
    def _watch(self, target: Target, handler: EventHandler, present: bool = False) -> None:
        """Call ``handler`` for each change of ``target``; with ``present``, for existing keys first."""

    @abstractmethod
    def _unwatch(self, target: Target, handler: EventHandler | None) -> None:
        """Remove ``handler`` (None: all) from ``target``."""

    def watch_key(self, key: str, callback: WatchCallback) -> None:
        """Call ``callback(old, new)`` at each change of ``key`` made after this returns.

        Callbacks run in threads of the store's own, each with one event at a time and in order. One may miss
        values that were soon replaced, never the last one. An exception in one is logged.
        """
        self._watch(as_key(key), KeyCallbackAdapter(callback))

    def unwatch_key(self, key: str, callback: WatchCallback | None = None) -> None:
        """Call ``callback`` (None: any) no more for ``key``; one that runs now may still be running after."""
        self._unwatch(as_key(key), None if callback is None else KeyCallbackAdapter(callback))

    def watch_prefix(self, prefix: str, callback: PrefixCallback) -> None:
        """Call ``callback(key, old, new)`` at each change of a key that begins with ``prefix``.

        As :meth:`watch_key` otherwise, in order over all those keys.
        """
        self._watch(Prefix(as_key(prefix)), PrefixCallbackAdapter(callback))

    def unwatch_prefix(self, prefix: str, callback: PrefixCallback | None = None) -> None:
        """Call ``callback`` (None: any) no more for ``prefix``."""
        self._unwatch(Prefix(as_key(prefix)), None if callback is None else PrefixCallbackAdapter(callback))

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
        queue = EventQueue()
        self._watch(target, queue, present)
        seconds = None if timeout is None else seconds_of(timeout)
        return Watch(target, seconds, queue, lambda: self._unwatch(target, queue))

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
