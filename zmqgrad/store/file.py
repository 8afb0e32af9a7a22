"""``FileStore``: a store that is a file, for processes that share a file system and nothing else."""

from __future__ import annotations

import itertools
import logging
import operator
import os
import weakref
from functools import partial

from zmqgrad.errors import ClosedError, ConfigurationError, QueueEmptyError, StoreError, StoreTimeoutError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store.arguments import DEFAULT_TIMEOUT, Timeout
from zmqgrad.store.ending import Ending
from zmqgrad.store.followers import Registered
from zmqgrad.store.queries import QueryStore
from zmqgrad.store.replica import Replica
from zmqgrad.store.shared_log import LogRemovedError, SharedLog
from zmqgrad.store.takers import Taker
from zmqgrad.store.topics import HIDDEN, Target
from zmqgrad.store.watch import WatchBook, as_registered, watch_query
from zmqgrad.wire.messages import (
    Message,
    Refusal,
    StoreAdd,
    StoreRefused,
)

logger = logging.getLogger(__name__)

OPEN_SECONDS = 10.0
CLOSE_SECONDS = 5.0
"""How long opening and closing try for the lock on the file."""

_CLOSED = f"{HIDDEN}stores/closed"

_numbers = itertools.count()


class FileStore(QueryStore):
    """A store in the file ``file_name``, which all processes must see; made if it is not there.

    Every process reads the file, and holds all its keys. What one has written others see when they next
    ask; who waits looks again every 25 ms at the latest. Processes may be killed at any moment: others go
    on without what was not written to its end. Blocked pops are served in no particular order.

    Args:
        file_name: the path. A file that an earlier job left holds that job's keys: give each its own.
        world_size: the file is removed once so many stores on it were closed; -1: nobody removes it.
        timeout: how long ``get`` and its like wait.

    Raises:
        StoreError: if the file cannot be opened or is none of ours.
    """

    def __init__(self, file_name: str, world_size: int = -1, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        super().__init__(timeout)
        self._path = _as_path(file_name)
        self._world_size = operator.index(world_size)
        name = f"file-store-{next(_numbers)}"
        log = _open(self._path)
        self._watches = WatchBook(name, partial(_register, weakref.ref(self)))
        self._replica = Replica(name, log, self._watches, self._clock)
        self._ending = Ending(self, partial(_close, self._replica, self._watches, self._world_size))
        try:
            self._replica.look(Deadline.after(OPEN_SECONDS))
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> str:
        """The file, as given."""
        return self._path

    def _ask(self, query: Message, seconds: float) -> Message:
        try:
            answer = self._replica.ask(query, Deadline.after(seconds, self._clock))
        except StoreTimeoutError as e:
            raise StoreTimeoutError(f"{self!r} after {seconds:g} s: {e}") from e
        if type(answer) is not StoreRefused:
            return answer
        if answer.reason is Refusal.TIMEOUT:
            raise StoreTimeoutError(f"{self!r} after {seconds:g} s: {answer.text}")
        kind = QueueEmptyError if answer.reason is Refusal.MISSING else StoreError
        raise kind(f"{self!r}: {answer.text}")

    def _register(self, target: Target) -> Registered:
        found = as_registered(self._ask(watch_query(target), self._timeout))
        self._replica.keep_looking()
        return found

    @property
    def _book(self) -> WatchBook:
        return self._watches

    def _unwatch(self, target: Target, taker: Taker | None) -> None:
        if self._watches.remove(target, taker):
            self._replica.unwatch(target)

    def clone(self) -> FileStore:
        return FileStore(self._path, timeout=self._timeout)

    def close(self) -> None:
        """Close the file, and remove it if this is the last of ``world_size`` stores. Idempotent."""
        self._ending.now()

    def __repr__(self) -> str:
        return f"<FileStore {self._path!r} of {self._replica.statistics()['keys']} keys>"


def _as_path(name: str | os.PathLike[str]) -> str:
    if not isinstance(name, (str, os.PathLike)):
        raise TypeError(f"the file name must be a str, not {type(name).__name__}")
    path = os.fspath(name)
    if not path or "\0" in path:
        raise ConfigurationError(f"{path!r} is no name of a file")
    return path


def _open(path: str) -> SharedLog:
    """The file that is at ``path`` now, and not one that somebody is just about to remove."""
    deadline = Deadline.after(OPEN_SECONDS)
    while True:
        log = SharedLog(path)
        try:
            with log.locked(deadline, alone=False):
                return log
        except LogRemovedError:
            log.close()
        except BaseException:
            log.close()
            raise


def _close(replica: Replica, book: WatchBook, world_size: int) -> None:
    farewell = StoreAdd(_CLOSED, 1) if world_size >= 0 else None
    try:
        replica.close(farewell, world_size, Deadline.after(CLOSE_SECONDS))
    finally:
        book.close()


def _register(store: weakref.ref[FileStore], target: Target) -> Registered:
    """Without keeping the store alive: callbacks run in threads that do."""
    alive = store()
    if alive is None:
        raise ClosedError("the store is gone")
    return alive._register(target)
