"""What the workers of a group announce to each other in the store: one key each, which others wait for.

A key belongs to the worker that its value names. Nobody deletes the keys of a worker that has died: its
readers judge a value by whether that worker is alive, for which its id is enough, as ids are never reused.
One that is lost here only is alive.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from zmqgrad.errors import (
    ArgumentTypeError,
    ClosedError,
    NotInitializedError,
    PeerLostError,
    RpcError,
    StoreError,
    UnknownWorkerError,
)
from zmqgrad.rpc.current import reset_current_worker, set_current_worker
from zmqgrad.runtime.blocking import Bell
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import Store

if TYPE_CHECKING:
    from zmqgrad.rpc.worker import Worker

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ABSENT = b"\0"
"""No value of a key."""


class Directory:
    """The announcements of one group, as ``worker`` reads and writes them. Thread-safe.

    Attributes:
        store: the keys of the group; None: it has none. Set by the group.
        is_lost: whether a worker that this one has lost is lost for the group; waits until that is settled,
            and raises RpcTimeoutError if it is not. Set by the group.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lock = threading.Lock()  # guards all below
        self._followers: list[Follower] = []
        self._closed = False
        self.store: Store | None = None
        self.is_lost: Callable[[int, Deadline], bool] = lambda worker_id, deadline: True
        worker.hooks.peer_lost.append(lambda peer, error: self._on_lost())
        worker.hooks.closing.append(self._close)

    def shared(self) -> Store:
        """The store of the group.

        Raises:
            RpcError: if it has none: its backend is not the built-in one.
        """
        if self.store is None:
            raise RpcError(f"worker {self._worker.name} has no store, which names and published tensors need")
        return self.store

    # ---- reading ----------------------------------------------------------------------------------------

    def read(self, key: str) -> bytes:
        """The value of ``key``; empty if it does not exist. Does not wait for it."""
        found = self.shared().compare_set(key, _ABSENT, _ABSENT)  # one query, which never waits
        return b"" if found == _ABSENT else found

    def list(self, prefix: str) -> Sequence[tuple[str, bytes]]:
        """The keys below ``prefix``, without it, and their values."""
        store = self.shared()
        keys = store.list_keys(prefix)  # none of them is ever deleted
        return [(k[len(prefix) :], v) for k, v in zip(keys, store.multi_get(keys), strict=True)]

    def is_alive(self, worker_id: int, deadline: Deadline) -> bool:
        """Whether a worker is alive. It is asked; if it is lost here, the group decides.

        Raises:
            RpcTimeoutError: if it does not reply, or the group has not decided, by ``deadline``.
        """
        worker = self._worker
        if worker_id == worker.id:
            return True
        try:
            worker.ask(worker_id, _reply, (), deadline.call_timeout())
        except (PeerLostError, UnknownWorkerError):
            return not self.is_lost(worker_id, deadline)
        return True

    # ---- waiting ----------------------------------------------------------------------------------------

    def wait_for(self, key: str, find: Callable[[], T | None], deadline: Deadline) -> T | None:
        """Call ``find`` now and after each change of ``key``, until it returns something.

        Returns:
            what it returned; None after ``deadline``.

        Raises:
            NotInitializedError: if this worker is shut down meanwhile.
        """
        changed = Bell()
        try:
            found = find()
            if found is not None:
                return found
            follower = self.follow(key, changed.ring, changed.ring)
            try:
                while not follower.closed:
                    found = find()
                    if found is not None:
                        return found
                    if not changed.wait(deadline.timeout()):
                        return None
            finally:
                follower.close()
        except (StoreError, ClosedError):
            if not self._closed:
                raise
        raise NotInitializedError(f"worker {self._worker.name} was shut down while it waited for {key}")

    def follow(
        self, key: str, step: Callable[[bytes], None], on_close: Callable[[], None] = lambda: None
    ) -> Follower:
        """Run ``step`` with the value of ``key`` in an engine thread: now, after each change, and each loss.

        One at a time; values that were soon replaced may be left out. What it raises is logged. ``on_close``
        is called when the follower is closed, or this worker is.
        """
        store = self.shared()

        def end() -> None:
            on_close()
            with self._lock:
                if self._closed:  # the watches end with the store, which may not reply any more
                    return
                self._followers.remove(follower)
            store.unwatch_key(key, follower.on_change)

        follower = Follower(self._worker, step, end)
        with self._lock:
            if self._closed:
                raise ClosedError(f"worker {self._worker.name} is closed")
            self._followers.append(follower)
        try:
            follower.begin(self.read(key))  # runs while the watch is registered
            store.watch_key(key, follower.on_change)
            follower.begin(self.read(key))
        except BaseException:
            follower.close()
            raise
        return follower

    def _on_lost(self) -> None:
        with self._lock:
            followers = list(self._followers)
        for follower in followers:
            follower.schedule()

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            followers, self._followers = self._followers, []
        for follower in followers:
            follower.close()


class Follower:
    """Runs ``step`` with the newest value of a key. Made by :meth:`Directory.follow`."""

    def __init__(self, worker: Worker, step: Callable[[bytes], None], end: Callable[[], None]) -> None:
        self._worker = worker
        self._step = step
        self._end = end
        self._lock = threading.Lock()  # guards all below
        self._value: bytes | None = None
        self._has_changed = False  # since the watch began
        self._scheduled = self._again = False
        self.closed = False

    def on_change(self, old: bytes | None, new: bytes | None) -> None:
        """The key has changed."""
        with self._lock:
            self._value, self._has_changed = new or b"", True
        self.schedule()

    def begin(self, value: bytes) -> None:
        """Run with ``value``, which was read, unless it is the last one, or the watch has seen a change."""
        with self._lock:
            if self._has_changed or value == self._value:
                return
            self._value = value
        self.schedule()

    def schedule(self) -> None:
        """Run ``step`` soon, and once more if it runs just now."""
        with self._lock:
            self._again = True
            if self._scheduled or self.closed or self._value is None:
                return
            self._scheduled = True
        try:
            self._worker.submit(self._run)
        except ClosedError:
            logger.debug("%s is closing: nothing is followed any more", self._worker.name)

    def _run(self) -> None:
        token = set_current_worker(self._worker)
        try:
            while True:
                with self._lock:
                    if self.closed or not self._again:
                        self._scheduled = False
                        return
                    self._again = False
                    value = self._value or b""
                try:
                    self._step(value)
                except BaseException as e:  # the store, or user code, which may raise SystemExit, too
                    if self._worker.closed:
                        logger.debug("%s is closing: %s", self._worker.name, e)
                    else:
                        logger.exception("%s cannot follow what others announce", self._worker.name)
        finally:
            reset_current_worker(token)

    def close(self) -> None:
        """Run ``step`` no more; a run that has begun may end later. Idempotent."""
        with self._lock:
            self.closed = True
            end, self._end = self._end, _nothing
            self._step = _nothing  # what it belongs to is garbage at once, not with the next cycle
        end()


def key_of(prefix: str, name: object) -> str:
    """The key of ``name`` below ``prefix``.

    Raises:
        ArgumentTypeError: if it is not a string with a character.
    """
    if not isinstance(name, str) or not name:
        raise ArgumentTypeError(f"a name is a string of at least one character, not {name!r}")
    return prefix + name


def _nothing(*_: object) -> None:
    """What a closed follower runs."""


def _reply() -> bool:
    """Runs on a worker that is asked whether it is alive."""
    return True
