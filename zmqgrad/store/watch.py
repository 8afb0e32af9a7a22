"""Client side of watches: the registry of watched targets, and the threads that run callbacks.

:class:`WatchRegistry` holds a :mod:`cache <zmqgrad.store.watch_cache>` for each target of one store, and runs
the handlers of its events in a thread pool of its own.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial

from zmqgrad.errors import ClosedError, StoreError, ZmqgradError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.forks import in_forks
from zmqgrad.runtime.service_thread import ServiceThread
from zmqgrad.runtime.thread_pool import Source, Task, ThreadPool
from zmqgrad.store.events import EventBacklog, EventHandler, WatchEvent
from zmqgrad.store.watch_cache import ChangeNotification, Registration, WatchCache
from zmqgrad.store.watch_targets import Prefix, Target
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
"""Pause after a failed registration, or if no thread can be started."""

RENEW_SECONDS = 5.0
"""Interval at which a client renews its watches at the server."""

CALLBACK_THREADS = 2
CLOSE_SECONDS = 5.0


class _Subscription:
    """One handler and its queued events. Each has a queue, so a slow handler delays no other.

    One that first gets the ``present`` keys gets no event before.
    """

    def __init__(self, handler: EventHandler, present: bool) -> None:
        self.handler = handler
        self.present = present
        self.pending = EventBacklog()
        self.delivering = False


class _WatchEntry:
    """One target: its cache and subscriptions."""

    def __init__(self) -> None:
        self.cache = WatchCache()
        self.subscriptions: list[_Subscription] = []
        self.resyncing = False

    def end(self, handler: EventHandler | None) -> list[_Subscription]:
        """Remove the first subscription of ``handler`` (None: all). Returns those removed."""
        ended = [each for each in self.subscriptions if handler is None or each.handler == handler]
        if handler is not None:
            del ended[1:]
        for each in ended:
            self.subscriptions.remove(each)
            each.pending.clear()
        return ended


class WatchRegistry:
    """The watches of one store.

    Args:
        name: for threads and log lines.
        register: registers the watch of a target at the store and returns the current values; may block.
            Called in the thread that adds the watch, and in the registry's own threads.
        renew: called every RENEW_SECONDS in one of the registry's own threads; may block.
    """

    def __init__(
        self, name: str, register: Callable[[Target], Registration], renew: Callable[[], None] | None = None
    ) -> None:
        self._name = f"{name}-watch"
        self._register = register
        self._renew = renew
        self._targets: dict[Target, _WatchEntry] = {}
        self._lock = threading.Lock()  # guards all attributes; never held while calling out
        self._closed = False
        self._connection = 0  # number of disconnects; a registration is valid for one connection
        self._pool: ThreadPool | None = None
        self._timer: ServiceThread | None = None
        in_forks(self, WatchRegistry.forget)

    def forget(self) -> None:
        """In a forked child: drop the watches, which threads of the parent serve."""
        self._lock = threading.Lock()  # such a thread may have held it
        self._targets, self._pool, self._timer = {}, None, None

    def add(self, target: Target, handler: EventHandler, *, present: bool = False) -> None:
        """Call ``handler`` for each change of ``target`` from now on. Blocks until the watch is registered.

        With ``present``, it first gets the existing keys, with a lock held: it must be quick and not block.

        Raises: what ``register`` raises; the watch is not added then.
        """
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self._name} is closed")
            self._start()
            watched = self._targets.get(target)
            if watched is None:
                watched = self._targets[target] = _WatchEntry()
            subscription = _Subscription(handler, present)
            watched.subscriptions.append(subscription)
            if watched.cache.live:
                self._replay(watched, subscription)
                return
            connection = self._connection
        try:
            found = self._register(target)
        except BaseException:
            self.remove(target, handler)
            raise
        with self._lock:
            self._on_registered(target, watched, found, connection)
            self._replay(watched, subscription)

    def _replay(self, watched: _WatchEntry, subscription: _Subscription) -> None:
        """Tell a new subscription of the present keys, if it wants that. Called with the lock held."""
        if subscription.present:
            subscription.present = False
            for event in watched.cache.initial_events():
                subscription.handler(event)

    def is_watched(self, target: Target) -> bool:
        """Whether ``target`` has a subscription."""
        with self._lock:
            return target in self._targets

    def cached_value(self, key: str) -> bytes | None:
        """The cached value of ``key``; None if the key does not exist, or the cache is not live.

        Takes no lock, as it is called very often.
        """
        watched = self._targets.get(key)
        if watched is None or not watched.cache.live:
            return None
        return watched.cache.values.get(key)

    def live_targets(self) -> list[Target]:
        """Targets whose caches are live."""
        with self._lock:
            return [target for target, watched in self._targets.items() if watched.cache.live]

    def check(self, revisions: Mapping[Target, int]) -> None:
        """Register those targets again whose last notification, of the given revision, is missing.

        A negative revision means that the server did not know the watch.
        """
        with self._lock:
            for target, revision in revisions.items():
                watched = self._targets.get(target)
                if watched is None or not watched.cache.live:
                    continue
                if revision < 0:
                    watched.cache.invalidate()
                elif revision > watched.cache.revision:
                    watched.cache.live = False
                self._deliver(target, watched, [])

    def refresh(self, target: Target) -> None:
        """Register ``target`` again if it is watched. Blocks; raises what ``register`` raises."""
        with self._lock:
            watched, connection = self._targets.get(target), self._connection
        if watched is None:
            return
        found = self._register(target)
        with self._lock:
            self._on_registered(target, watched, found, connection)

    def remove(self, target: Target, handler: EventHandler | None) -> bool:
        """Remove ``handler`` (None: all) from ``target``. Returns whether no subscription is left."""
        with self._lock:
            watched = self._targets.get(target)
            if watched is None:
                return False
            ended = watched.end(handler)
            last = not watched.subscriptions
            if last:
                del self._targets[target]
        for each in ended:
            each.handler.end()
        return last

    def serve_from(self, source: Source) -> None:
        """Let the callback threads read ``source`` too. Only valid while a target is watched."""
        assert self._pool is not None
        self._pool.serve_from(source)

    def on_notification(
        self, notification: ChangeNotification, submit: Callable[[Task], object] | None = None
    ) -> None:
        """Apply a notification. Does not block, as it runs in the receiving thread.

        Args:
            submit: gets the tasks that run handlers; None: the registry's own threads run them.
        """
        with self._lock:
            target = (
                Prefix(notification.prefix) if isinstance(notification, PrefixChanged) else notification.key
            )
            watched = self._targets.get(target)
            if watched is not None and not self._closed:
                self._deliver(target, watched, watched.cache.on_notification(notification), submit)

    def on_disconnect(self) -> None:
        """Register all targets again, because notifications may have been lost."""
        with self._lock:
            self._connection += 1
            for target, watched in self._targets.items():
                watched.cache.invalidate()
                self._deliver(target, watched, [])

    def _on_registered(
        self, target: Target, watched: _WatchEntry, found: Registration, connection: int
    ) -> None:
        """Apply a registration that began on connection number ``connection``. Called with the lock held.

        One of an earlier connection is only better than nothing: a later one may have been applied already.
        """
        events = []
        if connection == self._connection or watched.cache.revision < 0:
            events = watched.cache.on_registered(found)
        if connection != self._connection:
            watched.cache.invalidate()
        self._deliver(target, watched, events)

    def _deliver(
        self,
        target: Target,
        watched: _WatchEntry,
        events: list[WatchEvent],
        submit: Callable[[Task], object] | None = None,
    ) -> None:
        """Queue ``events`` for the handlers, and register again if needed. Called with the lock held."""
        if self._closed or self._pool is None:
            return
        submit = submit or self._submit
        for each in watched.subscriptions if events else ():
            if each.present:
                continue
            for event in events:
                each.pending.add(event)
            if not each.delivering:
                each.delivering = True
                submit(partial(self._run_handler, target, each))
        if not watched.cache.live and watched.cache.revision >= 0 and not watched.resyncing:
            watched.resyncing = True
            submit(partial(self._resync, target, watched))

    def _submit(self, task: Task) -> None:
        """Run ``task`` in one of the registry's own threads: later, if the system refuses to start one."""
        assert self._pool is not None
        assert self._timer is not None
        try:
            self._pool.submit(task)
        except RuntimeError as e:  # also if it is closed, as the timer is next
            logger.warning("%s: a task has to wait: %s", self._name, e)
            self._timer.call_later(RETRY_SECONDS, partial(self._submit, task))

    def _run_handler(self, target: Target, subscription: _Subscription) -> None:
        while True:
            with self._lock:
                if not subscription.pending or self._closed:
                    subscription.delivering = False
                    return
                event = subscription.pending.pop()
            try:
                subscription.handler(event)
            except BaseException:  # SystemExit, too, which would let the watch wait for this run for ever
                logger.exception("a callback that watches %r failed", target)

    def _resync(self, target: Target, watched: _WatchEntry) -> None:
        with self._lock:
            connection = self._connection
        try:
            found = self._register(target)
        except ZmqgradError as e:
            with self._lock:
                if self._closed or self._timer is None or self._targets.get(target) is not watched:
                    return
                logger.warning("%s: cannot read the watched %r again yet: %s", self._name, target, e)
                self._timer.call_later(RETRY_SECONDS, lambda: self._retry_resync(target, watched))
            return
        with self._lock:
            watched.resyncing = False
            self._on_registered(target, watched, found, connection)

    def _retry_resync(self, target: Target, watched: _WatchEntry) -> None:
        with self._lock:
            watched.resyncing = False
            self._deliver(target, watched, [])

    def _start(self) -> None:
        if self._pool is None:
            self._timer = ServiceThread(self._name)
            self._timer.start()
            self._pool = ThreadPool(self._name, CALLBACK_THREADS)
            if self._renew is not None:
                self._timer.call_later(RENEW_SECONDS, self._schedule_renewal)

    def _schedule_renewal(self) -> None:
        with self._lock:
            if not self._closed and self._pool is not None:
                self._submit(self._run_renewal)

    def _run_renewal(self) -> None:
        assert self._renew is not None
        assert self._timer is not None
        try:
            if self._targets:
                self._renew()
        finally:
            if not self._closed:
                self._timer.call_later(RENEW_SECONDS, self._schedule_renewal)

    def close(self) -> list[Target]:
        """End all watches, and wait for running callbacks. Idempotent. Returns what was watched."""
        with self._lock:
            already, self._closed = self._closed, True
            pool, timer, targets = self._pool, self._timer, list(self._targets)
            ended = [each for watched in self._targets.values() for each in watched.end(None)]
            self._targets.clear()
        for each in ended:
            each.handler.end()
        if already or pool is None or timer is None:
            return targets
        pool.close()
        timer.close()
        deadline = Deadline.after(CLOSE_SECONDS)
        left = pool.join(deadline) + timer.join(deadline)
        if left:
            logger.warning("%s: callbacks still run in %s", self._name, ", ".join(left))
        return targets


def weak(register: Callable[[Target], Registration]) -> Callable[[Target], Registration]:
    """The bound method ``register`` without a reference to its store, which threads must not keep alive."""
    method = weakref.WeakMethod(register)

    def call(target: Target) -> Registration:
        alive = method()
        if alive is None:
            raise ClosedError("the store was collected")
        return alive(target)

    return call


def watch_query(target: Target, nonce: str = "", watcher: int = 0) -> StoreWatchKey | StoreWatchPrefix:
    """The query that begins a watch of ``target``."""
    if isinstance(target, Prefix):
        return StoreWatchPrefix(target.text, nonce, watcher)
    return StoreWatchKey(target, nonce, watcher)


def unwatch_query(target: Target, watcher: int) -> StoreUnwatchKey | StoreUnwatchPrefix:
    """The query that ends a watch of ``target``."""
    if isinstance(target, Prefix):
        return StoreUnwatchPrefix(target.text, watcher)
    return StoreUnwatchKey(target, watcher)


def as_registration(reply: Message) -> Registration:
    """``reply``, checked to be the reply to a watch query.

    Raises:
        StoreError: if it is another message.
    """
    if not isinstance(reply, Registration):
        raise StoreError(f"a store replied to a watch with {type(reply).__name__}")
    return reply
