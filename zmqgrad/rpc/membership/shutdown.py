"""Graceful shutdown: draining a worker, and the barrier at the end of a group of fixed size.

The barrier has three steps:

1. All workers arrive.
2. They wait until no message is in flight anywhere. Each worker, once idle, posts how many requests it has
   sent and received. The group is quiet when the two sums agree and have not changed since the round before
   (Mattern's four-counter termination detection). If Ctrl-C came while requests were sent, so many may never
   be received. Nor are requests that were lost with a connection or dropped as malformed, so sums that
   differ also count as final if they do not change for long.
3. The workers leave; the one that serves the store leaves last.

A log line names the workers that are being waited for.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from zmqgrad.errors import RpcTimeoutError, StoreError, StoreTimeoutError
from zmqgrad.rpc.membership.registry import Registry
from zmqgrad.rpc.membership.suspicion import Suspicions
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.backoff import Backoff
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import Store, TCPStore
from zmqgrad.transport.heartbeat.failure_detector import is_on_this_host, is_reachable

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOG_INTERVAL_SECONDS = 5.0
"""Interval of the log lines that name the workers being waited for."""

POLL_SECONDS = 1.0
"""Interval at which missing workers are checked: a death may go unnoticed if no worker has called them."""

PROBES_AT_ONCE = 16
"""How many of the missing workers are checked at a time. If all were, each of n workers would connect to all
others once a second, for as long as the last one is busy."""

LEAVE_POLL_SECONDS = 2.0
"""The same in the last step; also the timeout of the store's replies to a worker that leaves."""

LOST_STORE_SECONDS = 5.0
"""When a query of the store has had no reply for this long, check whether worker 0, which may serve it, has
died, before the query is repeated."""

ROUND_BACKOFF_SECONDS = 0.001, 0.5
"""First and longest pause between rounds whose sums do not agree and do not change."""

LOST_ROUNDS = 24
"""After this many such rounds, some 6 seconds, nothing counts as in flight any more. This is a number of
rounds, not a time: all workers read the same sums, and so all stop in the same round."""

LEAVE_GRACE_SECONDS = 30.0
"""How long slow workers are waited for in the last step."""

DEAD = "dead"
"""Posted on behalf of a worker that died."""


def drain(worker: Worker, is_idle: Callable[[Deadline], bool], deadline: Deadline) -> None:
    """Wait for the replies to the calls that ``worker`` has made and their callbacks, and until it is idle.

    Args:
        worker: the worker that shuts down.
        is_idle: waits until the worker has served what it must serve; False if it has not by a deadline.
        deadline: of the shutdown.

    Raises:
        RpcTimeoutError: if that takes longer than ``deadline``, naming the workers waited for.
        NotInitializedError: if ``worker`` was closed meanwhile.
    """
    while True:
        if worker.closed:  # somebody was in a hurry
            raise worker.closed_error()
        worker.references.flush_releases()
        pending, until = worker.client.pending.all(), deadline.capped(LOG_INTERVAL_SECONDS)
        for call in pending:
            call.promise.wait_done(until.left())
        worker.replies.queue.wait_completed(until)  # their callbacks may make calls, waited for as well
        idle = is_idle(until)
        still = [call for call in worker.client.pending.all() if call in pending]
        if idle and not still:
            return
        names = ", ".join(sorted({worker.membership.name_of(call.peer) for call in still}))
        if deadline.passed():
            calls = ", ".join(
                f"{call.describe()} on {worker.membership.name_of(call.peer)}" for call in still
            )
            raise RpcTimeoutError(
                f"{worker.name}: shutdown gave up waiting for {names or 'running calls'} to finish"
                + (f" ({calls})" if calls else "")
            )
        if still:
            logger.warning("%s: shutdown waits for %s to finish", worker.name, names)


class ShutdownBarrier:
    """The part of one worker in the shutdown of a group of fixed size.

    Keys of the store: ``<step>/<rank>``, what a worker posts at a step; ``closing``, posted by rank 0 when
    the others may leave; ``left/<rank>``, posted by a worker that has left.

    Args:
        worker: the worker that shuts down.
        store: the keys of the group.
        registry: the members of the group.
        suspicions: which of the workers that are lost here are lost for the group.
        served: the store beneath ``store``, if this worker serves it.
    """

    def __init__(
        self,
        worker: Worker,
        store: Store,
        registry: Registry,
        served: TCPStore | None,
        suspicions: Suspicions,
    ) -> None:
        self._suspicions = suspicions
        self._worker = worker
        self._store = store
        self._registry = registry
        self._served = served
        self._dead: set[int] = set()  # ranks of workers that died
        self._step = ""  # the step at which all others are waited for
        self._patience = store.timeout.total_seconds()  # how long a store that may be alive is waited for

    def run(self, deadline: Deadline) -> None:
        """Return when all workers have arrived and are quiet, and this one may leave.

        Raises:
            RpcTimeoutError: if others do not arrive or finish by ``deadline``, naming them.
            StoreError: if the store does not reply.
        """
        self._store.set_timeout(min(self._patience, LOST_STORE_SECONDS, deadline.left()))
        self._suspicions.on_confirmed = self._post_on_behalf
        self._worker.hooks.peer_lost.append(lambda rank, _: self._accuse(rank))
        self._step = "arrived"
        for rank in list(self._worker.lost):
            self._accuse(rank)
        self._meet("arrived", "to call shutdown", deadline)
        self._wait_until_quiet(deadline)
        self._step = ""
        self._leave(deadline)

    # ---- steps 1 and 2 ----------------------------------------------------------------------------------

    def _wait_until_quiet(self, deadline: Deadline) -> None:
        worker = self._worker
        before: list[int] | None = None
        rounds, backoff = 0, Backoff(*ROUND_BACKOFF_SECONDS)
        for number in itertools.count():
            drain(worker, lambda until: worker.pool.wait_idle(until) and worker.is_idle(), deadline)
            counts = " ".join(map(str, worker.counts()))
            posted = self._meet(f"quiet/{number}", "to finish its work", deadline, counts)
            if DEAD in posted:
                return  # the counts of the dead are lost
            sums = [sum(int(each.split()[i]) for each in posted) for i in range(3)]
            if sums != before:
                before, rounds = sums, 0
                backoff.reset()
                continue
            if 0 <= sums[0] - sums[1] <= sums[2]:
                return
            rounds += 1
            if rounds == LOST_ROUNDS:
                logger.warning(
                    "%s: shutdown goes on, though %d requests were sent and %d received: others were lost on "
                    "their way, or dropped as malformed", worker.name, *sums[:2]
                )  # fmt: skip
                return
            threading.Event().wait(backoff.pause(deadline.left()))  # no event announces the next message

    def _meet(self, step: str, why: str, deadline: Deadline, value: str = "-") -> list[str]:
        """Post ``value`` at ``step`` and wait until all workers have; returns the values posted, by rank.

        For dead workers others post :data:`DEAD`. Only the first value of a rank counts, so that all workers
        read the same values and take the same next step, whenever they notice a death.
        """
        self._step = step
        self._ask(lambda: self._store.compare_set(f"{step}/{self._worker.id}", "", value), deadline)
        for rank in self._dead.union(list(self._suspicions.confirmed)):
            self._ask(partial(self._post_on_behalf, rank), deadline)
        keys = [f"{step}/{rank}" for rank in range(self._worker.membership.world_size)]
        self._wait_for(keys, why, deadline)
        posted = [raw.decode() for raw in self._ask(lambda: self._store.multi_get(keys), deadline)]
        self._dead |= {rank for rank, value in enumerate(posted) if value == DEAD}
        return posted

    def _wait_for(self, keys: list[str], why: str, deadline: Deadline) -> None:
        """Wait until all of ``keys``, one for each rank, exist; posts those of dead workers."""
        # Workers that still have work of their own are no reason for a warning.
        level = logging.INFO if self._step == "arrived" else logging.WARNING
        next_log = Deadline.after(LOG_INTERVAL_SECONDS)
        missing = list(range(len(keys)))
        first_probe = self._worker.id  # so that different workers check different ones
        while True:
            try:
                self._store.wait([keys[rank] for rank in missing], min(deadline.left(), POLL_SECONDS))
                return
            except StoreTimeoutError:
                present = set(self._ask(lambda: self._store.list_keys(f"{self._step}/"), deadline))
                missing = [rank for rank, key in enumerate(keys) if key not in present]
                if not missing:
                    return
                probed = sorted(missing, key=lambda rank: (rank - first_probe) % len(keys))[:PROBES_AT_ONCE]
                first_probe = probed[-1] + 1
                dead = [rank for rank in probed if self._is_dead(rank)]
                names = ", ".join(self._worker.membership.name_of(rank) for rank in missing)
                if dead:
                    logger.warning("%s: shutdown goes on without the dead among %s", self._worker.name, names)
                    for rank in dead:
                        self._ask(partial(self._post_on_behalf, rank), deadline)
                    continue
                if deadline.passed():
                    raise RpcTimeoutError(
                        f"{self._worker.name}: shutdown gave up waiting for {names} {why}; "
                        f"shutdown(graceful=False) does not wait for others"
                    ) from None
                if next_log.passed():
                    logger.log(level, "%s: shutdown waits for %s %s", self._worker.name, names, why)
                    next_log = Deadline.after(LOG_INTERVAL_SECONDS)

    def _ask(self, query: Callable[[], T], deadline: Deadline) -> T:
        """Return what ``query`` returns, which may be repeated until the store replies.

        Raises:
            StoreTimeoutError: if it does not reply in time, or worker 0 has died.
        """
        patience = Deadline.after(min(self._patience, deadline.left()))
        while True:
            try:
                return query()
            except StoreTimeoutError:
                if patience.passed() or self._is_out_of_reach(0):
                    raise

    def _post_on_behalf(self, rank: int, _: str = "") -> None:
        """Post for a dead worker, unless it has posted, or no worker is being waited for."""
        step = self._step
        if step:
            self._store.compare_set(f"{step}/{rank}", "", DEAD)

    def _accuse(self, rank: int) -> None:
        """Have the group decide on a worker that is lost here, while workers are waited for."""
        if self._step:
            self._suspicions.accuse(rank)

    def _is_out_of_reach(self, rank: int) -> bool:
        """Whether this worker can wait for nothing from that one, whatever the group decides."""
        return rank in self._worker.lost or self._is_dead(rank)

    def _is_dead(self, rank: int) -> bool:
        """Whether that worker's process has ended: before all have arrived, no worker leaves in order."""
        if rank in self._suspicions.confirmed:
            return True
        endpoints = self._worker.membership.find(rank).endpoints
        if any(is_reachable(endpoint) for endpoint in endpoints):
            return False
        if all(is_on_this_host(endpoint) for endpoint in endpoints):
            return True
        if rank not in self._worker.lost:  # otherwise the group decides
            self._worker.mailbox.monitor(rank)  # between hosts the failure detector decides: see worker.lost
        return False

    # ---- step 3 -----------------------------------------------------------------------------------------

    def _leave(self, deadline: Deadline) -> None:
        """Leave in an order that keeps the store usable for those that need it.

        Rank 0 leaves last, or the others would lose the store within a step. They leave only once it refuses
        new clients, or the next group at this address could join through the store that is about to close.
        """
        grace = deadline.capped(LEAVE_GRACE_SECONDS)
        try:
            if self._worker.id == 0:
                if self._served is not None:
                    self._served.refuse_newcomers()
                self._store.set("closing", "-")
                self._step = "left"  # so that this worker posts on behalf of those that die now
                others = range(1, self._worker.membership.world_size)
                self._wait_unless_dead({rank: f"left/{rank}" for rank in others}, grace)
                if self._served is None:  # the store is a launcher's, and lives on
                    self._registry.unpublish()
            else:
                self._wait_unless_dead({0: "closing"}, grace)
                self._store.set_timeout(LEAVE_POLL_SECONDS)
                self._registry.unpublish()
                self._store.set(f"left/{self._worker.id}", "-")
        except StoreError as e:
            logger.info("%s leaves without waiting for the others: %s", self._worker.name, e)

    def _wait_unless_dead(self, keys: dict[int, str], deadline: Deadline) -> None:
        """Wait until ``keys``, by the ranks that post them, exist, except those of dead workers."""
        waiting = keys.keys() - self._dead.union(list(self._worker.lost))
        while waiting:
            try:
                self._store.wait([keys[rank] for rank in waiting], min(deadline.left(), LEAVE_POLL_SECONDS))
                return
            except StoreTimeoutError:
                if deadline.passed():
                    raise
                waiting = {rank for rank in waiting if not self._is_out_of_reach(rank)}
