"""``FileStore``: a store that is an SQLite file, for processes that share a file system and nothing else."""

from __future__ import annotations

import itertools
import logging
import operator
import os
import threading
import weakref
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from zmqgrad.errors import ClosedError, ConfigurationError, QueueEmptyError, StoreError, StoreTimeoutError
from zmqgrad.runtime.blocking import blocking_section
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store.arguments import DEFAULT_TIMEOUT, Timeout
from zmqgrad.store.effects import Reply
from zmqgrad.store.ending import Ending
from zmqgrad.store.followers import Registered
from zmqgrad.store.queries import QueryStore
from zmqgrad.store.shared_file import SharedFile, files
from zmqgrad.store.sqlite import check_file_system
from zmqgrad.store.state import State
from zmqgrad.store.takers import Taker
from zmqgrad.store.topics import Target
from zmqgrad.store.watch import WatchBook, as_registered, watch_query
from zmqgrad.wire.messages import Message, Refusal, StoreQueuePop, StoreRefused

logger = logging.getLogger(__name__)

OPEN_SECONDS = 10.0
CLOSE_SECONDS = 5.0
"""How long opening and closing try for the lock on the file."""

WATCH_SECONDS = 30.0
"""How long one look of the watching thread tries for the lock before it warns."""

_numbers = itertools.count()


class FileStore(QueryStore):
    """A store in the SQLite file ``file_name``, created if missing, which all processes must see.

    Each call is one transaction: what it wrote survives SIGKILL, of this process and any other. Waiting
    clients poll every 0.5-50 ms. Blocked pops are served in no particular order. A watch compares what is
    there with what was there before, so it may miss values that were soon replaced.

    Args:
        file_name: the path. A file that an earlier job left holds that job's keys: give each job its own
            path.
        world_size: the file is removed once this many stores on it were closed; -1: nobody removes it.
        timeout: how long ``get`` and its like wait, and calls wait for the lock on the file.
        allow_network_file_system: accept a path on NFS, SMB or the like, if its locks can be trusted.

    Raises:
        StoreError: if the file cannot be opened or is another kind of file.
        ConfigurationError: if it lies on a network file system, and that was not allowed.
    """

    def __init__(
        self,
        file_name: str,
        world_size: int = -1,
        timeout: Timeout = DEFAULT_TIMEOUT,
        *,
        allow_network_file_system: bool = False,
    ) -> None:
        super().__init__(timeout)
        self._path = _as_path(file_name)
        self._world_size = operator.index(world_size)
        check_file_system(Path(self._path), allow_network_file_system)
        self._allow_network = allow_network_file_system
        self._session = _Session(f"file-store-{next(_numbers)}", self._path, self._world_size)
        self._watches = WatchBook(self._session.name, partial(_register, weakref.ref(self)))
        self._session.book = self._watches
        self._ending = Ending(self, self._session.close)

    @property
    def path(self) -> str:
        """The file, as given."""
        return self._path

    def _ask(self, query: Message, seconds: float) -> Message:
        try:
            answer = self._session.ask(query, Deadline.after(seconds, self._clock))
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
        self._session.keep_watching()
        return found

    @property
    def _book(self) -> WatchBook:
        return self._watches

    def _unwatch(self, target: Target, taker: Taker | None) -> None:
        self._watches.remove(target, taker)

    def statistics(self) -> dict[str, int]:
        """How many calls of this store wait (``parked``)."""
        return {"parked": self._session.waiting}

    def clone(self) -> FileStore:
        return FileStore(self._path, timeout=self._timeout, allow_network_file_system=self._allow_network)

    def close(self) -> None:
        """Close the file, and remove it if this is the last of ``world_size`` stores. Idempotent."""
        self._ending.now()

    def __repr__(self) -> str:
        return f"<FileStore {self._path!r}>"


class _Session:
    """What a store has open: its share of the file, and the thread that watches. Does not know the store."""

    book: WatchBook

    def __init__(self, name: str, path: str, world_size: int) -> None:
        self.name = name
        self._world_size = world_size
        self._file: SharedFile = files.open(Path(path), Deadline.after(OPEN_SECONDS))
        self._lock = threading.Lock()  # guards all that follows
        self.waiting = 0
        self._closing = False
        self._closed = False
        self._watcher: threading.Thread | None = None

    def ask(self, query: Message, deadline: Deadline) -> Message:
        """The reply to ``query``, perhaps a refusal; waits as the query asks, until ``deadline``.

        Raises:
            StoreError: if the file cannot be used (any more).
            StoreTimeoutError: if others hold its lock until ``deadline``.
        """
        at_once = replace(query, block=False) if type(query) is StoreQueuePop else query
        waits = at_once is not query and query.block  # type: ignore[attr-defined]
        reply = self._apply(at_once, deadline)
        if reply is not None and not (waits and _is_empty(reply)):
            return reply
        with self._lock:
            self.waiting += 1
        try:
            with blocking_section():
                return self._wait(query, at_once, deadline)
        finally:
            with self._lock:
                self.waiting -= 1

    def _wait(self, query: Message, at_once: Message, deadline: Deadline) -> Message:
        while True:
            seen = self._file.version()  # before the look, so that no change falls between
            reply = self._apply(at_once, deadline)
            if reply is not None and not _is_empty(reply):
                return reply
            if deadline.passed():
                return self._timed_out(query, deadline)
            self._file.wait_changed(seen, deadline)

    def _apply(self, query: Message, deadline: Deadline) -> Message | None:
        """Put ``query`` to the state machine, in one transaction; None if it would have to wait."""
        if self._closing and not self._closed:
            return StoreRefused(Refusal.CLOSING, "the store is closing")
        if self._closed:
            return StoreRefused(Refusal.CLOSING, "the store is closed")
        with self._file.transaction(deadline, write=State.may_change(query)) as contents:
            effects = State(contents).apply(query, None, 0.0)
        return next((e.message for e in effects if type(e) is Reply), None)

    def _timed_out(self, query: Message, deadline: Deadline) -> Message:
        """The refusal of ``query``, naming what is missing."""
        with self._file.transaction(Deadline.after(OPEN_SECONDS), write=False) as contents:
            state = State(contents)
            effects = state.apply(replace(query, timeout=0.0), None, 0.0) or state.expire(0.0)
        return next(e.message for e in effects if type(e) is Reply)

    # ---- watching ---------------------------------------------------------------------------------------

    def keep_watching(self) -> None:
        """From now on, let a thread look at the file and tell the book of changes."""
        with self._lock:
            if self._watcher is None and not self._closing:
                self._watcher = threading.Thread(target=self._watch, name=f"{self.name}-watch", daemon=True)
                self._watcher.start()

    def _watch(self) -> None:
        seen = (-1, -1)
        while not self._closing:
            try:
                self._file.wait_changed(seen, Deadline.after(WATCH_SECONDS))
                now = self._file.version()
                if now != seen:
                    seen = now
                    self.book.broken()  # look at all that is watched again
            except StoreTimeoutError as e:
                logger.warning("%s: watches wait: %s", self.name, e)
            except StoreError as e:
                if not self._closing:
                    logger.warning("%s: watches end: %s", self.name, e)
                return

    # ---- the end ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Refuse all who wait, and leave the file. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        try:
            if self._world_size >= 0:
                self._file.leave(self._world_size, Deadline.after(CLOSE_SECONDS))
        except StoreError as e:
            logger.warning("%s: closed, but not counted as such: %s", self.name, e)
        finally:
            self._closed = True
            self._file.wake()
            self.book.close()
            if self._watcher is not None:
                self._watcher.join(CLOSE_SECONDS)
            files.release(self._file)


def _is_empty(reply: Message) -> bool:
    """Whether ``reply`` refuses a pop because the queue is empty."""
    return type(reply) is StoreRefused and reply.reason is Refusal.MISSING


def _as_path(name: str | os.PathLike[str]) -> str:
    if not isinstance(name, (str, os.PathLike)):
        raise TypeError(f"the file name must be a str, not {type(name).__name__}")
    path = os.fspath(name)
    if not path or "\0" in path:
        raise ConfigurationError(f"{path!r} is no name of a file")
    return path


def _register(store: weakref.ref[FileStore], target: Target) -> Registered:
    """Without keeping the store alive: callbacks run in threads that do."""
    alive = store()
    if alive is None:
        raise ClosedError("the store is gone")
    return alive._register(target)
