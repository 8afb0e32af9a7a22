"""``FileStore``: a store that is an SQLite file, for processes that share a file system and nothing else."""

from __future__ import annotations

import itertools
import logging
import operator
import os
import threading
from pathlib import Path

from msgspec.structs import replace

from zmqgrad.errors import ConfigurationError, StoreError, StoreTimeoutError
from zmqgrad.runtime.blocking import blocking_section
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store.arguments import DEFAULT_TIMEOUT, Timeout
from zmqgrad.store.base import Store
from zmqgrad.store.effects import Reply
from zmqgrad.store.events import EventHandler
from zmqgrad.store.finalizer import Finalizer
from zmqgrad.store.shared_file import SharedFile, files
from zmqgrad.store.sqlite import check_file_system
from zmqgrad.store.state import State
from zmqgrad.store.watch import WatchRegistry, as_registration, watch_query, weak
from zmqgrad.store.watch_cache import Registration
from zmqgrad.store.watch_targets import Target
from zmqgrad.wire.messages import Message, Refusal, StoreQueuePop, StoreRefused

logger = logging.getLogger(__name__)

OPEN_SECONDS = 10.0
CLOSE_SECONDS = 5.0
"""Time limits of opening and closing, which wait for the lock on the file."""

WATCH_SECONDS = 30.0
"""How long the watching thread waits for the lock before it logs a warning."""

_numbers = itertools.count()


class FileStore(Store):
    """A store in the SQLite file ``file_name``, created if missing, which all processes must see.

    Each call is one transaction, whose writes survive SIGKILL of any process. Waiting clients poll every
    0.5-50 ms. Blocked pops are served in no particular order. A watch compares snapshots, so it may miss
    values that were soon replaced.

    Args:
        file_name: the path. Give each job its own path, because a leftover file holds the keys of its job.
        world_size: the file is removed once this many stores on it were closed; -1: never.
        timeout: how long blocking calls wait for keys, and all calls for the lock on the file.
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
        self._watches = WatchRegistry(self._session.name, weak(self._register))
        self._session.registry = self._watches
        self._finalizer = Finalizer(self, self._session.close)

    @property
    def path(self) -> str:
        """The file, as given."""
        return self._path

    def _request(self, query: Message, seconds: float) -> Message:
        try:
            reply = self._session.ask(query, Deadline.after(seconds, self._clock))
        except StoreTimeoutError as e:
            raise StoreTimeoutError(f"{self!r} after {seconds:g} s: {e}") from e
        if type(reply) is StoreRefused:
            raise self._refused(reply, seconds)
        return reply

    def _register(self, target: Target) -> Registration:
        found = as_registration(self._request(watch_query(target), self._timeout))
        self._session.keep_watching()
        return found

    @property
    def _registry(self) -> WatchRegistry:
        return self._watches

    def _unwatch(self, target: Target, handler: EventHandler | None) -> None:
        self._watches.remove(target, handler)

    def statistics(self) -> dict[str, int]:
        """Number of blocked calls of this store (``parked``)."""
        return {"parked": self._session.waiting}

    def clone(self) -> FileStore:
        return FileStore(self._path, timeout=self._timeout, allow_network_file_system=self._allow_network)

    def close(self) -> None:
        """Close the file, and remove it if this is the last of ``world_size`` stores. Idempotent."""
        self._finalizer.close()

    def __repr__(self) -> str:
        return f"<FileStore {self._path!r}>"


class _Session:
    """Resources of a store: the file, and the watching thread. Holds no reference to the store."""

    registry: WatchRegistry

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
        """The reply to ``query``, perhaps a refusal. Blocks as the query asks, until ``deadline``.

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
            seen = self._file.version()  # read before the query, so that no change is missed
            reply = self._apply(at_once, deadline)
            if reply is not None and not _is_empty(reply):
                return reply
            if deadline.passed():
                return self._timed_out(query, deadline)
            self._file.wait_changed(seen, deadline)

    def _apply(self, query: Message, deadline: Deadline) -> Message | None:
        """Apply ``query`` in one transaction; None if it would block."""
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
        """Start the thread that watches the file for changes, unless it runs."""
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
                    self.registry.on_disconnect()  # registers all watches again
            except StoreTimeoutError as e:
                logger.warning("%s: watches wait: %s", self.name, e)
            except StoreError as e:
                if not self._closing:
                    logger.warning("%s: watches end: %s", self.name, e)
                return

    # ---- the end ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Refuse blocked calls, and release the file. Idempotent."""
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
            self.registry.close()
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
