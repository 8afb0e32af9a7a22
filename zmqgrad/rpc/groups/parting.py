"""How the workers of a group leave together (``shutdown(graceful=True)``), in three steps.

All workers arrive. Then they wait until nothing is under way anywhere: each posts how many requests it has
sent and received, once it is quiet itself; when the sums agree, twice running and unchanged, no message is in
flight (Mattern's four counters). What a broken connection has swallowed, or was dropped as malformed, is
never received: sums that differ, and have not changed for long, count as final. Then they part, and the
store's master goes last. While anybody is waited for, a log line names them.
"""

from __future__ import annotations

import itertools
import logging
import threading

from zmqgrad.errors import ClosedError, RpcTimeoutError, StoreError, StoreTimeoutError
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.backoff import Backoff
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import Store, TCPStore
from zmqgrad.transport.heartbeat.failure_detector import is_on_this_host, is_reachable

logger = logging.getLogger(__name__)

SAY_EVERY = 5.0
"""Seconds of waiting for others after which a log line names them, again and again."""

LOOK_SECONDS = 1.0
"""Who is waited for is looked up so often: nobody need have noticed that it died, if nobody has called it."""

PAUSES = 0.001, 0.5
"""From what to what the pauses between looks at sums that do not agree and do not change grow, in seconds."""

LOST_LOOKS = 24
"""After so many such looks, some 6 seconds, nothing is in flight any more. A number of looks, not a time: all
read the same sums, and so all stop at the same look."""

PART_SECONDS = 2.0
"""How long workers that have finished wait for each other's farewell before they look who lives."""

FAREWELL_SECONDS = 30.0
"""How long those who live, but are slow, are waited for then."""

GONE = "gone"
"""Posted for a worker that died."""


class Parting:
    """One worker's part in it.

    ``served``: the store beneath ``store``, if this worker serves it.
    """

    def __init__(self, worker: Worker, store: Store, served: TCPStore | None) -> None:
        self._worker = worker
        self._store = store
        self._served = served
        self._gone: set[int] = set()  # ranks that ended without a word
        self._step = ""  # where all others are waited for

    def run(self, deadline: Deadline) -> None:
        """Returns when all have arrived and are quiet, and this worker may go.

        Raises:
            RpcTimeoutError: if others do not arrive or finish by ``deadline``, naming them.
            StoreError: if the store is gone.
        """
        self._store.set_timeout(min(self._store.timeout.total_seconds(), deadline.left()))
        self._worker.doors.peer_lost.append(lambda rank, _: self._stand_in_later(rank))
        self._meet("arrived", "to call shutdown", deadline)
        before: list[int] | None = None
        looks, backoff = 0, Backoff(*PAUSES)
        for number in itertools.count():
            self._wait_until_quiet(deadline)
            sent, received = self._worker.counts()
            posted = self._meet(f"quiet/{number}", "to finish its work", deadline, f"{sent} {received}")
            if GONE in posted:
                break  # with the dead, what they sent and received is lost, too
            sums = [sum(int(each.split()[i]) for each in posted) for i in (0, 1)]
            if sums != before:
                before, looks = sums, 0
                backoff.reset()
                continue
            if sums[0] == sums[1]:
                break
            looks += 1
            if looks == LOST_LOOKS:
                logger.warning(
                    "%s: shutdown goes on, though %d requests were sent and %d received: others were lost on "
                    "their way, or dropped as malformed", self._worker.name, *sums
                )  # fmt: skip
                break
            threading.Event().wait(backoff.pause(deadline.left()))  # nothing tells of what may yet come
        self._step = ""
        self._part(deadline)

    def _meet(self, step: str, why: str, deadline: Deadline, value: str = "-") -> list[str]:
        """Post ``value`` under ``step`` and wait until all have; gives what all posted, by rank.

        For the dead others post :data:`GONE`. Only the first that is posted for a rank counts, so that all
        read the same and do the same next, whoever of them noticed a death when.
        """
        self._step = step
        self._store.compare_set(f"{step}/{self._worker.id}", "", value)
        for rank in self._gone.union(list(self._worker.lost)):
            self._stand_in(rank)
        keys = [f"{step}/{rank}" for rank in range(self._worker.membership.world_size)]
        self._wait_for(keys, why, deadline)
        posted = [raw.decode() for raw in self._store.multi_get(keys)]
        self._gone |= {rank for rank, said in enumerate(posted) if said == GONE}
        return posted

    def _wait_for(self, keys: list[str], why: str, deadline: Deadline) -> None:
        """Wait until all of ``keys``, one for each rank, are there, and see to those of the dead."""
        # That others still have work of their own is nothing to warn of.
        level = logging.INFO if self._step == "arrived" else logging.WARNING
        say = Deadline.after(SAY_EVERY)
        while True:
            try:
                self._store.wait(keys, min(deadline.left(), LOOK_SECONDS))
                return
            except StoreTimeoutError as e:
                there = set(self._store.list_keys(f"{self._step}/"))
                missing = [rank for rank, key in enumerate(keys) if key not in there]
                dead = [rank for rank in missing if self._is_gone(rank)]
                names = ", ".join(self._worker.membership.name_of(rank) for rank in missing)
                if dead:
                    logger.warning("%s: shutdown goes on without the dead among %s", self._worker.name, names)
                    for rank in dead:
                        self._stand_in(rank)
                    continue
                if deadline.passed():
                    raise RpcTimeoutError(
                        f"{self._worker.name}: shutdown gave up waiting for {names} {why}; "
                        f"shutdown(graceful=False) does not wait for others"
                    ) from e
                if say.passed():
                    logger.log(level, "%s: shutdown waits for %s %s", self._worker.name, names, why)
                    say = Deadline.after(SAY_EVERY)

    def _stand_in(self, rank: int) -> None:
        """Post for a worker that died, unless it has, or nobody is waited for any more."""
        step = self._step
        if step:
            self._store.compare_set(f"{step}/{rank}", "", GONE)

    def _stand_in_later(self, rank: int) -> None:
        """A worker was lost, in a thread that must not wait."""
        if not self._step:
            return

        def stand_in() -> None:
            try:
                self._stand_in(rank)
            except StoreError as e:
                logger.debug("%s: the store has no ear for the loss of %d: %s", self._worker.name, rank, e)

        try:
            self._worker.submit(stand_in)
        except ClosedError:
            logger.debug("%s has left before %d was lost", self._worker.name, rank)

    def _is_gone(self, rank: int) -> bool:
        """Has that worker ended without a word? (In good order, nobody ends before all have arrived.)"""
        if rank in self._worker.lost:
            return True
        endpoints = self._worker.membership.find(rank).endpoints
        if any(is_reachable(endpoint) for endpoint in endpoints):
            return False
        if all(is_on_this_host(endpoint) for endpoint in endpoints):
            return True
        self._worker.mailbox.monitor(rank)  # between hosts only time tells: it will be among the lost
        return False

    def _wait_until_quiet(self, deadline: Deadline) -> None:
        worker = self._worker
        while True:
            worker.references.sweep()
            worker.waiting.drain_channels()  # of a pass that failed, requests may come late
            pending = worker.calls.pending()
            if not pending and worker.pool.wait_idle(deadline.capped(SAY_EVERY)) and worker.quiet():
                return
            for call in pending:
                call.outcome.wait_done(min(deadline.left(), SAY_EVERY))
            still = [c for c in worker.calls.pending() if c in pending]
            if deadline.passed():
                said = ", ".join(f"{c.describe()} on {worker.membership.name_of(c.peer)}" for c in still)
                raise RpcTimeoutError(
                    f"{worker.name}: shutdown gave up waiting for {said or 'running calls'}"
                )
            if still:
                names = {worker.membership.name_of(c.peer) for c in still}
                logger.warning("%s: shutdown waits for answers of %s", worker.name, ", ".join(sorted(names)))

    def _part(self, deadline: Deadline) -> None:
        """All are quiet: leave, rank 0 last, which tells the others that the store takes no newcomers.

        Were they to go before, the next group at this address could meet the old store at its last moment.
        Were rank 0 to go before them, they would lose the store in the middle of a step.
        """
        try:
            if self._worker.id == 0:
                if self._served is not None:
                    self._served.refuse_newcomers()
                self._store.set("gone", "-")
                self._see_off(deadline.capped(FAREWELL_SECONDS))
                if self._served is None:  # a launcher's, which goes on
                    self._store.delete_key("worker/0")
            else:
                self._wait_for_first(deadline.capped(FAREWELL_SECONDS))
                self._store.set_timeout(PART_SECONDS)
                self._store.delete_key(f"worker/{self._worker.id}")
                self._store.set(f"left/{self._worker.id}", "-")
        except StoreError as e:
            logger.info("%s leaves without the others' farewell: %s", self._worker.name, e)

    def _wait_for_first(self, deadline: Deadline) -> None:
        """Wait until rank 0 says that this worker may go; not if it is dead, and the store is another's."""
        dead = 0 in self._gone or 0 in self._worker.lost
        while not dead:
            try:
                self._store.wait(["gone"], min(deadline.left(), LOOK_SECONDS))
                return
            except StoreTimeoutError:
                if deadline.passed():
                    raise
                dead = self._is_gone(0)

    def _see_off(self, deadline: Deadline) -> None:
        """Wait until all others that live have left."""
        self._step = "left"  # for those who die now, this worker says so
        others = set(range(1, self._worker.membership.world_size)) - self._gone.union(list(self._worker.lost))
        while others:
            try:
                self._store.wait(
                    [f"left/{rank}" for rank in sorted(others)], min(deadline.left(), PART_SECONDS)
                )
                return
            except StoreTimeoutError:
                if deadline.passed():
                    raise
                others = {rank for rank in others if not self._is_gone(rank)}
