"""Dynamic groups: ``init_rpc`` without a world size. Workers join, leave and rejoin at any time.

The store lists the members (:mod:`~zmqgrad.rpc.membership.registry`), and every worker watches their records:
a join costs each member a notification that carries the record, a loss also a query for the reason. The whole
list is read only when joining, and for workers that are unknown here. A worker that dies cannot announce it,
so each worker monitors the heartbeat of the one with the next higher id (and of the workers it talks to); the
first to find another one dead evicts it for all, unless it refutes that
(:mod:`~zmqgrad.rpc.membership.suspicion`). Then nobody monitors it any more, so it asks another one to.
"""

from __future__ import annotations

import logging
import threading
from functools import partial

from zmqgrad.errors import RpcError, RpcTimeoutError, StoreError, TransportError
from zmqgrad.rpc.current import current_worker
from zmqgrad.rpc.membership.descriptors import reserve_descriptors
from zmqgrad.rpc.membership.group import JOIN_TIMEOUT_SECONDS, Group
from zmqgrad.rpc.membership.lookup import Lookup
from zmqgrad.rpc.membership.membership import LEFT, LEFT_AT_ONCE
from zmqgrad.rpc.membership.registry import IsAlive, is_alive
from zmqgrad.rpc.membership.shutdown import LOG_INTERVAL_SECONDS, drain
from zmqgrad.rpc.membership.suspicion import Suspicions
from zmqgrad.rpc.membership.worker_info import WorkerRecord
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.blocking import Bell
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import Store, TCPStore
from zmqgrad.wire.ids import MAX_WORKER

logger = logging.getLogger(__name__)

STORE_TIMEOUT_SECONDS = 5.0
"""Timeout of the store's replies once this worker has joined."""

STORE_RETRY_SECONDS = 30.0
"""How long a store that did not reply is not queried for unknown workers: calls must not wait for it."""


class DynamicGroup(Group):
    """A worker's membership in a dynamic group.

    Args:
        worker, store, served: as for :class:`Group`.
        is_alive: returns whether the worker of a record is alive; for tests.
    """

    def __init__(
        self, worker: Worker, store: Store, served: TCPStore | None = None, is_alive: IsAlive = is_alive
    ) -> None:
        super().__init__(worker, store, served)
        self._is_alive = is_alive
        self._refreshing = threading.Lock()  # held while the known members are updated; guards _next
        self._next: int | None = None  # the worker that is monitored on behalf of all
        self._removed: set[int] = set()  # workers that the store has no more, which need no eviction
        self._leaving = False
        self._joined = False
        self._retry_store = Deadline.after(0.0)
        self._suspicions = Suspicions(worker, store, self._evict, is_alive)
        worker.directory.is_lost = self._is_lost
        self._lookup = Lookup(f"zmqgrad-{worker.name}-lookup", self._refresh_for_lookup)

    # ---- joining ----------------------------------------------------------------------------------------

    def join(self, deadline: Deadline) -> None:
        """Claim the name, read the members, start, and notify the others. Waits for no other worker.

        Raises:
            DuplicateWorkerError: if a worker that is or may be alive has this name.
        """
        self._registry.claim_name(self._is_alive)
        try:
            self.store.set_timeout(max(1.0, deadline.left()))  # also if this process is stopped meanwhile
            self.worker.hooks.peer_lost.append(lambda peer, _: self._on_lost(peer))
            self.worker.membership.update_from_store = self._update_from_store
            self.worker.membership.is_current = lambda: self._retry_store.passed()
            self.worker.start(serving=False)  # before it is published, so that no call is refused
            self._registry.watch(self._on_change)
            self._suspicions.watch()
            self._refresh()
            self._registry.publish()
            self._joined = True
            self._refresh()
            self.store.set_timeout(STORE_TIMEOUT_SECONDS)
        except BaseException:
            self._finish_at_once(Deadline.after(1.0))  # the store may not reply any more
            raise

    # ---- following joins and losses ---------------------------------------------------------------------

    def _is_lost(self, worker_id: int, deadline: Deadline) -> bool:
        return worker_id not in self._registry.ids() or self._suspicions.is_upheld(worker_id, deadline)

    def _on_change(self, worker_id: int, record: WorkerRecord | None) -> None:
        """Called in a thread of the store after a join or, without ``record``, a loss."""
        if self._leaving:
            return
        try:
            with self._refreshing:
                if record is None:
                    self._on_left(worker_id)
                else:
                    self._on_joined(record)
        except StoreError as e:
            logger.warning("%s: cannot read the members of the group: %s", self.worker.name, e)

    def _on_joined(self, record: WorkerRecord) -> None:
        membership = self.worker.membership
        if membership.find_known(record.id) is not None:
            return
        if membership.find_here(record.name) is not None:
            # The name has a holder here. A lookup overtook this event, which may be outdated; or it was lost.
            self._read_members()
            return
        self._learn(record)
        reserve_descriptors(len(membership.all()))
        if membership.find_here(record.id) is None:
            return  # it was lost before
        if self._next is None or self._distance(record.id) < self._distance(self._next):
            self._monitor(record.id)

    def _on_left(self, worker_id: int) -> None:
        if worker_id == self.worker.id:
            self._on_evicted()
        elif self.worker.membership.find_here(worker_id) is not None:
            self._mark_left(worker_id, self._registry.reason(worker_id))
        if self._next is None or self.worker.membership.find_here(self._next) is None:
            self._monitor_next()

    def _learn(self, record: WorkerRecord) -> None:
        """Add a worker, unless it is known. Called with the lock held."""
        worker, membership = self.worker, self.worker.membership
        if membership.find_known(record.id) is not None:
            return
        former = membership.last_holder(record.name)
        if self._joined:
            worker.events.joining(record.id)
        membership.learn(record)
        if self._joined:
            worker.events.joined(record.info, former)
        if worker.lost:  # perhaps all that it might have asked before
            self._seek_monitor(record.id)
        if record.id in worker.lost:  # before it was known here, so it could not be accused
            self._evict_later(record.id)

    def _on_evicted(self) -> None:
        """All others have declared this worker lost, so they are lost here. Called with the lock held."""
        worker = self.worker
        if not self._joined or self._leaving:
            return
        reason = self._registry.reason(worker.id)
        if reason == LEFT:
            return
        logger.error("%s was evicted from the group (%s): it must join again", worker.name, reason)
        for other in worker.membership.all():
            if other.id != worker.id:
                self._removed.add(other.id)
                worker.lose(other.id, f"the group has evicted {worker.name}: {reason}; it must join again")

    def _update_from_store(self, seconds: float | None) -> bool:
        """Query the store for a worker that is unknown or has left, unless the store did not reply lately."""
        return not self._retry_store.passed() or self._lookup.wait(seconds)

    def _refresh_for_lookup(self) -> None:
        if not self._try_refresh():
            self._retry_store = Deadline.after(STORE_RETRY_SECONDS)

    def _try_refresh(self) -> bool:
        try:
            self._refresh()
        except StoreError as e:
            logger.warning("%s: cannot read the members of the group: %s", self.worker.name, e)
            return False
        return True

    def _refresh(self) -> None:
        with self._refreshing:
            self._read_members()

    def _read_members(self) -> None:
        """Read all members from the store, and apply what has changed. Called with the lock held."""
        worker, membership = self.worker, self.worker.membership
        present, new = self._registry.read(membership.known())
        former = [r for r in membership.all() if r.id not in present and r.id != worker.id]
        if worker.id not in present:
            self._on_evicted()
        reserve_descriptors(len(present))
        for record in new:
            self._learn(record)
        for record in former:
            self._mark_left(record.id, self._registry.reason(record.id))
        self._monitor_next()

    def _mark_left(self, worker_id: int, reason: str) -> None:
        self._removed.add(worker_id)
        self.worker.membership.mark_left(worker_id)  # its name is free
        self.worker.lose(worker_id, reason)

    def _monitor_next(self) -> None:
        """Monitor the heartbeat of the next worker in the order of ids, so that each worker is monitored."""
        others = [r.id for r in self.worker.membership.all() if r.id != self.worker.id]
        if others:
            self._monitor(min(others, key=self._distance))

    def _distance(self, worker_id: int) -> int:
        return (worker_id - self.worker.id) % (MAX_WORKER + 1)

    def _monitor(self, worker_id: int) -> None:
        before, self._next = self._next, worker_id
        self.worker.mailbox.monitor(worker_id)
        if before is not None and before != worker_id:
            self.worker.mailbox.unmonitor(before)  # or all would monitor worker 0, the next of the newest

    def _on_lost(self, peer: int) -> None:
        self._evict_later(peer)
        self._seek_monitor()

    def _seek_monitor(self, joined: int | None = None) -> None:
        """Ask the worker before this one to monitor it, if others between them are lost here only.

        Args:
            joined: nobody else has to be asked; None: whoever it is.
        """
        membership, distance = self.worker.membership, self._distance
        others = [r.id for r in membership.all() if r.id != self.worker.id]
        if not others or self._leaving:
            return
        before = max(others, key=distance)
        if joined not in (None, before):
            return
        between = [n for n in list(self.worker.lost) if distance(n) > distance(before)]
        if not self._removed.issuperset(between):
            self.worker.submit_if_open(partial(self._ask_to_monitor, before))

    def _ask_to_monitor(self, peer: int) -> None:
        """Have ``peer`` monitor this worker: those between the two are dead, or have lost it."""
        try:
            self.worker.call(peer, _monitor, (self.worker.id,), timeout=0)
        except (RpcError, TransportError) as e:  # it is lost, too: then another one is asked
            logger.debug("%s cannot ask worker %d to monitor it: %s", self.worker.name, peer, e)

    def _evict_later(self, peer: int) -> None:
        """Evict a lost peer, unless it refutes that: only this worker may have lost it."""
        if not self._leaving and peer not in self._removed:
            self._suspicions.accuse(peer)

    def _evict(self, peer: int, reason: str) -> None:
        """Remove ``peer`` from the group for all workers."""
        record = self.worker.membership.find_known(peer)
        if record is not None:
            self._registry.evict(record, reason)
            self._refresh()

    # ---- leaving ----------------------------------------------------------------------------------------

    def _finish_at_once(self, deadline: Deadline) -> None:
        """Notify the others, if the store replies."""
        try:
            self.store.set_timeout(min(1.0, deadline.left()))
            self._withdraw(LEFT_AT_ONCE)
        except StoreError as e:
            logger.debug("%s leaves without notifying the others: %s", self.worker.name, e)

    def _finish(self, deadline: Deadline) -> None:
        """Complete this worker's calls, with those of their callbacks, and those that it serves now."""
        serving, futures = self.worker.server.in_flight, self.worker.replies.queue
        served = serving.all()  # the others may go on calling

        def is_idle(until: Deadline) -> bool:
            return serving.wait_ended(served, until) and not any(f.is_own for f in futures.unfinished())

        drain(self.worker, is_idle, deadline)
        self.worker.mailbox.flush(deadline)  # the store tells others that this worker has left: no earlier
        self._withdraw(LEFT)
        if self._served is not None:
            self._wait_for_others_to_leave(self._served, deadline)

    def _withdraw(self, reason: str) -> None:
        self._leaving = True
        self._registry.release_name()
        self._registry.unwatch(self._on_change)
        self._suspicions.unwatch()
        if self._joined:
            self._joined = False
            self._registry.remove(self.worker.id, reason)  # last: the store may close after this

    def _wait_for_others_to_leave(self, served: TCPStore, deadline: Deadline) -> None:
        """Wait until no other worker needs the store, which closes with this worker."""
        changed = Bell()
        self._registry.watch(changed.ring)  # ends with the store
        membership = self.worker.membership
        while True:
            present, new = self._registry.read(membership.known())
            for record in new:  # whoever has joined since nobody tells this worker any more
                membership.learn(record)
            alive = [n for n in sorted(present) if not self._has_died(n)]
            if not alive:
                served.refuse_newcomers()
                return
            names = ", ".join(membership.name_of(n) for n in alive)
            if deadline.passed():
                raise RpcTimeoutError(
                    f"{self.worker.name}, which serves the store, gave up waiting for {names} to leave; "
                    f"shutdown(graceful=False) does not wait for others"
                )
            if not changed.wait(min(deadline.left(), LOG_INTERVAL_SECONDS)):
                logger.warning("%s: shutdown waits for %s to leave", self.worker.name, names)

    def _has_died(self, worker_id: int) -> bool:
        record = self.worker.membership.find_known(worker_id)
        return record is not None and not self._is_alive(record)

    def close(self, timeout: float = JOIN_TIMEOUT_SECONDS) -> None:
        """As :meth:`Group.close`."""
        self._leaving = True
        try:
            super().close(timeout)
        finally:
            self._lookup.join(Deadline.after(timeout))  # the store that it queries is closed


def _monitor(peer: int) -> None:
    """Runs on the worker that is to monitor ``peer``."""
    current_worker().mailbox.monitor(peer)
