"""Watching: what to call when something changes, and the threads that call it.

:class:`WatchBook` keeps the followers of one store (:mod:`~zmqgrad.store.followers` knows what has changed)
and hands events to takers, in a pool of threads of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial

from zmqgrad.errors import ClosedError, StoreError, ZmqgradError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.thread_pool import Source, Task, ThreadPool
from zmqgrad.runtime.timer import TimerThread
from zmqgrad.store.followers import (
    Backlog,
    CallbackNotice,
    Follower,
    KeyFollower,
    PrefixFollower,
    Registered,
    WatchEvent,
)
from zmqgrad.store.takers import Taker
from zmqgrad.store.topics import Prefix, Target
from zmqgrad.wire.messages import (
    Message,
    PrefixChanged,
    StoreUnwatchKey,
    StoreUnwatchPrefix,
    StoreWatchKey,
    StoreWatchPrefix,
)

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""The pause after a look that failed."""

RENEW_SECONDS = 5.0
"""How often a client tells the server that it still watches."""

CALLBACK_THREADS = 2
CLOSE_SECONDS = 5.0


class _Subscription:
    """One taker, and the events that it has not seen yet: whoever is slow is in nobody else's way."""

    def __init__(self, taker: Taker) -> None:
        self.taker = taker
        self.pending = Backlog()
        self.delivering = False


class _Watched:
    """One target: its follower, and who takes what that finds."""

    def __init__(self, target: Target) -> None:
        self.follower: Follower = PrefixFollower() if isinstance(target, Prefix) else KeyFollower(target)
        self.subscriptions: list[_Subscription] = []
        self.looking = False

    def end(self, taker: Taker | None) -> list[_Subscription]:
        """The first of ``taker`` (None: all) is none any more, and is given."""
        ended = [each for each in self.subscriptions if taker is None or each.taker == taker]
        if taker is not None:
            del ended[1:]
        for each in ended:
            self.subscriptions.remove(each)
            each.pending.clear()
        return ended


class WatchBook:
    """What is watched of one store.

    Args:
        name: for threads and log lines.
        look: registers the watch of a target at the store and gives what is there; may block. It is called
            in a thread of the book's own, and by who asks for the watch.
        renew: called every RENEW_SECONDS in a thread of the book's own; may block.
    """

    def __init__(
        self,
        name: str,
        look: Callable[[Target], Registered],
        renew: Callable[[], None] | None = None,
    ) -> None:
        self._name = f"{name}-watch"
        self._look = look
        self._renew = renew
        self._targets: dict[Target, _Watched] = {}
        self._lock = threading.Lock()  # guards all that is above and below, never held while calling out
        self._closed = False
        self._connection = 0  # how often it broke; a look says nothing about a later one
        self._pool: ThreadPool | None = None
        self._timekeeper: TimerThread | None = None

    def add(self, target: Target, taker: Taker, *, present: bool = False) -> None:
        """Let ``taker`` have each change of ``target`` from now on. Blocks until the watch is in place.

        With ``present``, it gets what is there first, with a lock held: it must only note that.

        Raises: what ``look`` raises; then nothing is watched that was not before.
        """
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self._name} is closed")
            self._start()
            watched = self._targets.get(target)
            if watched is None:
                watched = self._targets[target] = _Watched(target)
            watched.subscriptions.append(_Subscription(taker))
            if watched.follower.live:
                self._present(watched, taker, present)
                return
            connection = self._connection
        try:
            found = self._look(target)
        except BaseException:
            self.remove(target, taker)
            raise
        with self._lock:
            self._found(target, watched, found, connection)
            self._present(watched, taker, present)

    def _present(self, watched: _Watched, taker: Taker, wanted: bool) -> None:
        for event in watched.follower.present() if wanted else ():
            taker(event)

    def watches(self, target: Target) -> bool:
        """Does anybody watch ``target``?"""
        with self._lock:
            return target in self._targets

    def last_known(self, key: str) -> bytes | None:
        """What ``key`` held when last heard of; None if it did not exist, or is not followed just now.

        Takes no lock: it is asked again and again.
        """
        watched = self._targets.get(key)
        if watched is None or not watched.follower.live:
            return None
        assert isinstance(watched.follower, KeyFollower)
        return watched.follower.value

    def live_targets(self) -> list[Target]:
        """Those that are watched, and not about to be looked at again."""
        with self._lock:
            return [target for target, watched in self._targets.items() if watched.follower.live]

    def check(self, revisions: Mapping[Target, int]) -> None:
        """Look again at targets whose last notice, of a revision in ``revisions``, did not come.

        A negative revision means that the store did not know of the watch.
        """
        with self._lock:
            for target, revision in revisions.items():
                watched = self._targets.get(target)
                if watched is None or not watched.follower.live:
                    continue
                if revision < 0 or revision > watched.follower.revision:
                    watched.follower.lost()
                    self._deliver(target, watched, [])

    def refresh(self, target: Target) -> None:
        """Look at ``target`` now, if it is watched. Blocks; raises what ``look`` raises."""
        with self._lock:
            watched, connection = self._targets.get(target), self._connection
        if watched is None:
            return
        found = self._look(target)
        with self._lock:
            self._found(target, watched, found, connection)

    def remove(self, target: Target, taker: Taker | None) -> bool:
        """Let ``taker`` (None: any) have no more of ``target``. Was that the last one that watched it?"""
        with self._lock:
            watched = self._targets.get(target)
            if watched is None:
                return False
            ended = watched.end(taker)
            last = not watched.subscriptions
            if last:
                del self._targets[target]
        for each in ended:
            each.taker.end()
        return last

    def serve_from(self, source: Source) -> None:
        """Let the threads that call callbacks read ``source`` as well; something is watched."""
        assert self._pool is not None
        self._pool.serve_from(source)

    def noticed(self, notice: CallbackNotice, submit: Callable[[Task], object] | None = None) -> None:
        """Take in a notice; quick, for it runs in the thread that receives them.

        What is to be called is handed to ``submit``; None: to threads of the book.
        """
        with self._lock:
            target = Prefix(notice.prefix) if isinstance(notice, PrefixChanged) else notice.key
            watched = self._targets.get(target)
            if watched is not None and not self._closed:
                self._deliver(target, watched, watched.follower.noticed(notice), submit)

    def broken(self) -> None:
        """The connection is: notices may be lost until each target has been looked at again."""
        with self._lock:
            self._connection += 1
            for target, watched in self._targets.items():
                watched.follower.lost()
                self._deliver(target, watched, [])

    def _found(self, target: Target, watched: _Watched, found: Registered, connection: int) -> None:
        """A look, begun on the ``connection``-th connection, has ended. Called with the lock held."""
        events = watched.follower.registered(found)
        if connection != self._connection:
            watched.follower.lost()
        self._deliver(target, watched, events)

    def _deliver(
        self,
        target: Target,
        watched: _Watched,
        events: list[WatchEvent],
        submit: Callable[[Task], object] | None = None,
    ) -> None:
        """Let the takers have ``events``, and look again if need be. Called with the lock held."""
        if self._closed or self._pool is None:
            return
        submit = submit or self._pool.submit
        for each in watched.subscriptions if events else ():
            for event in events:
                each.pending.add(event)
            if not each.delivering:
                each.delivering = True
                submit(partial(self._hand_out, target, each))
        if not watched.follower.live and watched.follower.revision >= 0 and not watched.looking:
            watched.looking = True
            submit(partial(self._look_again, target, watched))

    def _hand_out(self, target: Target, subscription: _Subscription) -> None:
        while True:
            with self._lock:
                if not subscription.pending or self._closed:
                    subscription.delivering = False
                    return
                event = subscription.pending.pop()
            try:
                subscription.taker(event)
            except Exception:
                logger.exception("a callback that watches %r failed", target)

    def _look_again(self, target: Target, watched: _Watched) -> None:
        with self._lock:
            connection = self._connection
        try:
            found = self._look(target)
        except ZmqgradError as e:
            with self._lock:
                if self._closed or self._timekeeper is None or self._targets.get(target) is not watched:
                    return
                logger.warning("%s: it is not known yet what became of %r: %s", self._name, target, e)
                self._timekeeper.call_later(RETRY_SECONDS, lambda: self._look_later(target, watched))
            return
        with self._lock:
            watched.looking = False
            self._found(target, watched, found, connection)

    def _look_later(self, target: Target, watched: _Watched) -> None:
        with self._lock:
            watched.looking = False
            self._deliver(target, watched, [])

    def _start(self) -> None:
        if self._pool is None:
            self._timekeeper = TimerThread(self._name)
            self._timekeeper.start()
            self._pool = ThreadPool(self._name, CALLBACK_THREADS)
            if self._renew is not None:
                self._timekeeper.call_later(RENEW_SECONDS, self._renew_later)

    def _renew_later(self) -> None:
        with self._lock:
            if not self._closed and self._pool is not None:
                self._pool.submit(self._renew_now)

    def _renew_now(self) -> None:
        assert self._renew is not None
        assert self._timekeeper is not None
        try:
            if self._targets:
                self._renew()
        finally:
            if not self._closed:
                self._timekeeper.call_later(RENEW_SECONDS, self._renew_later)

    def close(self) -> None:
        """Call no callback any more, and wait for those that run now. Idempotent."""
        with self._lock:
            already, self._closed = self._closed, True
            pool, timekeeper = self._pool, self._timekeeper
            ended = [each for watched in self._targets.values() for each in watched.end(None)]
            self._targets.clear()
        for each in ended:
            each.taker.end()
        if already or pool is None or timekeeper is None:
            return
        pool.close()
        timekeeper.close()
        deadline = Deadline.after(CLOSE_SECONDS)
        left = pool.join(deadline) + timekeeper.join(deadline)
        if left:
            logger.warning("%s: callbacks still run in %s", self._name, ", ".join(left))


def watch_query(target: Target, nonce: str = "", watcher: int = 0) -> StoreWatchKey | StoreWatchPrefix:
    """What to ask a store for to have notices of ``target``."""
    if isinstance(target, Prefix):
        return StoreWatchPrefix(target.text, nonce, watcher)
    return StoreWatchKey(target, nonce, watcher)


def unwatch_query(target: Target, watcher: int) -> StoreUnwatchKey | StoreUnwatchPrefix:
    """What to ask a store for to have no more notices of ``target``."""
    if isinstance(target, Prefix):
        return StoreUnwatchPrefix(target.text, watcher)
    return StoreUnwatchKey(target, watcher)


def as_registered(answer: Message) -> Registered:
    """The answer to that.

    Raises:
        StoreError: if it is none.
    """
    if not isinstance(answer, Registered):
        raise StoreError(f"a store answered a watch with {type(answer).__name__}")
    return answer
