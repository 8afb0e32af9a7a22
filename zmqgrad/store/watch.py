"""Watching keys: from notices that may be late, early or lost, to callbacks in order that end with the truth.

A :class:`Follower` (pure) knows what its key held last and at which revision. Each notice names the
revision of the one before it, so a lost one shows as a gap; then, and after a lost connection, the follower
asks to *look again*, which registers anew, and turns what it finds into one change (P8).
:class:`WatchBook` keeps the followers of one store and runs the callbacks, in a pool of threads of its own.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from zmqgrad.errors import ClosedError, ZmqgradError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.engine_pool import EnginePool
from zmqgrad.runtime.timekeeper import Timekeeper
from zmqgrad.store.base import WatchCallback
from zmqgrad.wire.messages import KeyCallbackRegistered, KeyCreated, KeyDeleted, KeyUpdated

logger = logging.getLogger(__name__)

CallbackNotice = KeyCreated | KeyUpdated | KeyDeleted

Change = tuple[bytes | None, bytes | None]
"""Old and new value; None where the key did not, or does not, exist."""

MAX_EARLY = 10_000
"""How many notices are kept while looking again; if there are more, the oldest show as a gap."""

MAX_PENDING = 1000
"""How many changes wait for slow callbacks of one key; then the two newest are joined."""

RETRY_SECONDS = 1.0
"""The pause after a look that failed."""

CALLBACK_THREADS = 2
CLOSE_SECONDS = 5.0


class Follower:
    """What is known of one key. ``live`` is False from when it must look again until it has."""

    def __init__(self) -> None:
        self.live = False
        self.value: bytes | None = None
        self.revision = -1  # of the last notice or registration; -1 before the first
        self._early: deque[CallbackNotice] = deque(maxlen=MAX_EARLY)

    def registered(self, found: KeyCallbackRegistered) -> list[Change]:
        """The watch is in place, and this is what the key held then."""
        if self.live and found.revision <= self.revision:
            return []  # two looked at a time, and we know more by now
        changes: list[Change] = []
        if self.revision >= 0 and found.value != self.value:
            changes.append((self.value, found.value))
        self.value, self.revision, self.live = found.value, found.revision, True
        while self._early and self.live:
            changes += self.noticed(self._early.popleft())
        return changes

    def noticed(self, notice: CallbackNotice) -> list[Change]:
        """A notice came; gives what is new in it. May end ``live``: then look again."""
        if not self.live:
            self._early.append(notice)
            return []
        if notice.revision <= self.revision:
            return []  # published before the look that told us
        new = None if isinstance(notice, KeyDeleted) else notice.new
        left_out = new is None and not isinstance(notice, KeyDeleted)
        if notice.previous > self.revision or left_out:
            self.live = False
            return []
        change = (self.value, new)
        self.value, self.revision = new, notice.revision
        return [change]

    def lost(self) -> None:
        """The connection was: anything may have happened since."""
        self.live = False
        self._early.clear()


class _Watched:
    """One key: its follower, its callbacks, and the changes that they have not seen yet."""

    def __init__(self) -> None:
        self.follower = Follower()
        self.callbacks: list[WatchCallback] = []
        self.pending: deque[Change] = deque()
        self.delivering = False
        self.looking = False


class WatchBook:
    """The watched keys of one store.

    Args:
        name: for threads and log lines.
        look: registers the watch of a key at the store and gives what it holds; may block. It is called in
            a thread of the book's own, and by who asks for the watch.
    """

    def __init__(self, name: str, look: Callable[[str], KeyCallbackRegistered]) -> None:
        self._name = f"{name}-watch"
        self._look = look
        self._keys: dict[str, _Watched] = {}
        self._lock = threading.Lock()  # guards all that is above and below, never held while calling out
        self._closed = False
        self._connection = 0  # how often it broke; a look says nothing about a later one
        self._pool: EnginePool | None = None
        self._timekeeper: Timekeeper | None = None

    def add(self, key: str, callback: WatchCallback) -> None:
        """Call ``callback`` at each change of ``key`` from now on. Blocks until the watch is in place.

        Raises: what ``look`` raises; then nothing is watched that was not before.
        """
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self._name} is closed")
            self._start()
            watched = self._keys.setdefault(key, _Watched())
            watched.callbacks.append(callback)
            if watched.follower.live:
                return
            connection = self._connection
        try:
            found = self._look(key)
        except BaseException:
            self.remove(key, callback)
            raise
        with self._lock:
            self._found(key, watched, found, connection)

    def watches(self, key: str) -> bool:
        """Does anybody watch ``key``?"""
        with self._lock:
            return key in self._keys

    def remove(self, key: str, callback: WatchCallback | None) -> bool:
        """Do not call ``callback`` (None: any) for ``key``. Was that the last one that watched it?"""
        with self._lock:
            watched = self._keys.get(key)
            if watched is None:
                return False
            if callback is None:
                watched.callbacks.clear()
            elif callback in watched.callbacks:
                watched.callbacks.remove(callback)
            if watched.callbacks:
                return False
            del self._keys[key]
            watched.pending.clear()
            return True

    def noticed(self, notice: CallbackNotice) -> None:
        """Take in a notice; quick, for it runs in the thread that receives them."""
        with self._lock:
            watched = self._keys.get(notice.key)
            if watched is not None and not self._closed:
                self._deliver(notice.key, watched, watched.follower.noticed(notice))

    def broken(self) -> None:
        """The connection is: notices may be lost until each key has been looked at again."""
        with self._lock:
            self._connection += 1
            for key, watched in self._keys.items():
                watched.follower.lost()
                self._deliver(key, watched, [])

    def _found(self, key: str, watched: _Watched, found: KeyCallbackRegistered, connection: int) -> None:
        """A look, begun on the ``connection``-th connection, has ended. Called with the lock held."""
        changes = watched.follower.registered(found)
        if connection != self._connection:
            watched.follower.lost()
        self._deliver(key, watched, changes)

    def _deliver(self, key: str, watched: _Watched, changes: list[Change]) -> None:
        """Let the callbacks see ``changes``, and look again if need be. Called with the lock held."""
        if self._closed or self._pool is None:
            return
        for change in changes:
            if len(watched.pending) >= MAX_PENDING:
                watched.pending.append((watched.pending.pop()[0], change[1]))
            else:
                watched.pending.append(change)
        if watched.pending and not watched.delivering:
            watched.delivering = True
            self._pool.submit(lambda: self._run_callbacks(key, watched))
        if not watched.follower.live and watched.follower.revision >= 0 and not watched.looking:
            watched.looking = True
            self._pool.submit(lambda: self._look_again(key, watched))

    def _run_callbacks(self, key: str, watched: _Watched) -> None:
        while True:
            with self._lock:
                if not watched.pending or self._closed:
                    watched.delivering = False
                    return
                old, new = watched.pending.popleft()
                callbacks = list(watched.callbacks)
            for callback in callbacks:
                try:
                    callback(old, new)
                except Exception:
                    logger.exception("a callback that watches %r failed", key)

    def _look_again(self, key: str, watched: _Watched) -> None:
        with self._lock:
            connection = self._connection
        try:
            found = self._look(key)
        except ZmqgradError as e:
            with self._lock:
                if self._closed or self._timekeeper is None or self._keys.get(key) is not watched:
                    return
                logger.warning("%s: it is not known yet what became of %r: %s", self._name, key, e)
                self._timekeeper.call_later(RETRY_SECONDS, lambda: self._look_later(key, watched))
            return
        with self._lock:
            watched.looking = False
            self._found(key, watched, found, connection)

    def _look_later(self, key: str, watched: _Watched) -> None:
        with self._lock:
            watched.looking = False
            self._deliver(key, watched, [])

    def _start(self) -> None:
        if self._pool is None:
            self._timekeeper = Timekeeper(self._name)
            self._timekeeper.start()
            self._pool = EnginePool(self._name, CALLBACK_THREADS, self._timekeeper.call_later)

    def close(self) -> None:
        """Call no callback any more, and wait for those that run now. Idempotent."""
        with self._lock:
            already, self._closed = self._closed, True
            pool, timekeeper = self._pool, self._timekeeper
            self._keys.clear()
        if already or pool is None or timekeeper is None:
            return
        pool.close()
        timekeeper.close()
        deadline = Deadline.after(CLOSE_SECONDS)
        left = pool.join(deadline) + timekeeper.join(deadline)
        if left:
            logger.warning("%s: callbacks still run in %s", self._name, ", ".join(left))
