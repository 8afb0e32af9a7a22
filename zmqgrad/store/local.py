"""``HashStore``: a store in this process, shared by its threads."""

from __future__ import annotations

import threading
from functools import partial

from zmqgrad.errors import StoreError
from zmqgrad.runtime.clock import MONOTONIC, Deadline
from zmqgrad.runtime.forks import in_forks
from zmqgrad.runtime.future import Promise
from zmqgrad.store.arguments import DEFAULT_TIMEOUT, Timeout
from zmqgrad.store.base import Store
from zmqgrad.store.effects import Effect, Notification
from zmqgrad.store.finalizer import Finalizer
from zmqgrad.store.state import State
from zmqgrad.store.watch import WatchRegistry, as_registration, watch_query, weak
from zmqgrad.store.watch_cache import Registration
from zmqgrad.store.watch_targets import Target
from zmqgrad.wire.messages import Message, Refusal, StoreRefused


class Table:
    """A state machine, shared by stores that are clones of each other."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # guards all of this
        self.state = State()
        self.registries: dict[WatchRegistry, None] = {}
        """Watch registries of the open stores."""
        in_forks(self, Table.begin_anew)

    def begin_anew(self) -> None:
        """In a forked child: drop the lock and the blocked calls of threads of the parent."""
        self.lock = threading.RLock()
        self.state = State(self.state.contents)

    def carry_out(self, effects: list[Effect]) -> None:
        """Deliver replies and notifications. Called with the lock held."""
        for effect in effects:
            if isinstance(effect, Notification):
                for registry in self.registries:
                    registry.on_notification(effect.message)
            else:
                effect.requester.set_result(effect.message)

    def leave(self, registry: WatchRegistry, waiting: dict[Promise[Message], None]) -> None:
        """The store of ``registry`` closes: refuse its blocked calls, and end its watches."""
        with self.lock:
            self.registries.pop(registry, None)
            for promise in waiting:
                self.state.cancel(promise)  # otherwise it would take the next item from the clones
                promise.set_result(StoreRefused(Refusal.CLOSING, "the store is closing"))
        self.forget_unwatched(*registry.close())

    def forget_unwatched(self, *targets: Target) -> None:
        """Make no more notifications of those ``targets`` that no store watches any more."""
        with self.lock:
            for target in targets:
                if not any(registry.is_watched(target) for registry in self.registries):
                    self.state.unwatch(target)


class HashStore(Store):
    """A store for the threads of one process.

    Args:
        timeout: how long blocking calls wait.
        table: the table of the store that this one is a clone of; None: a new one.

    Example:
        >>> store = HashStore()
        >>> store.set("step", "7")
        >>> store.compare_set("step", "7", "8")
        b'8'
    """

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT, *, table: Table | None = None) -> None:
        super().__init__(timeout)
        self._table = Table() if table is None else table
        self._waiting: dict[Promise[Message], None] = {}  # guarded by the table's lock
        self._registry = WatchRegistry("hash-store", weak(self._register))
        with self._table.lock:
            self._table.registries[self._registry] = None
        self._finalizer = Finalizer(self, partial(self._table.leave, self._registry, self._waiting))

    def _request(self, query: Message, seconds: float) -> Message:
        table = self._table
        if table.lock._is_owned():  # type: ignore[attr-defined]
            raise StoreError(
                "the store is in the middle of a call of this thread, which a signal handler or a finalizer "
                "has interrupted: call it in another thread there"
            )
        promise: Promise[Message] = Promise()
        with table.lock:
            if self._registry not in table.registries:
                promise.set_result(StoreRefused(Refusal.CLOSING, "the store is closed"))
            else:
                table.carry_out(table.state.apply(query, promise, MONOTONIC.now()))
                if not promise.done():
                    self._waiting[promise] = None
        if not promise.done():
            self._wait_for(promise, Deadline.after(seconds))
        return self._accepted(promise.result(), seconds)

    def _wait_for(self, promise: Promise[Message], deadline: Deadline) -> None:
        table = self._table
        try:
            while not promise.wait_done(deadline.timeout()):
                with table.lock:
                    table.carry_out(table.state.expire(MONOTONIC.now()))
        except BaseException as e:  # such as Ctrl-C: it must not take the next item of a queue
            with table.lock:
                table.state.cancel(promise)
                promise.set_exception(e)
            raise
        finally:
            with table.lock:
                self._waiting.pop(promise, None)

    def _register(self, target: Target) -> Registration:
        return as_registration(self._request(watch_query(target), self._timeout))

    def _on_unwatched(self, target: Target) -> None:
        self._table.forget_unwatched(target)

    def statistics(self) -> dict[str, int]:
        """Number of keys, queues, blocked calls (``parked``) and watched keys, and the revision."""
        with self._table.lock:
            return self._table.state.statistics()

    def clone(self) -> HashStore:
        return HashStore(self._timeout, table=self._table)

    def close(self) -> None:
        """Refuse blocked and later calls; clones stay open. Idempotent."""
        self._finalizer.close()

    def __repr__(self) -> str:
        statistics = self._table.state.statistics()
        closed = "" if self._registry in self._table.registries else ", closed"
        return f"<HashStore of {statistics['keys']} keys{closed}>"
