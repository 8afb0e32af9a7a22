"""A worker joins a group through a store, and leaves it in good order.

Leaving together (``shutdown(graceful=True)``) has three steps. All workers arrive. Then they wait until
nothing is under way anywhere: each posts how many requests it has sent and received, once it is quiet
itself; when the sums agree, twice running and unchanged, no message is in flight (Mattern's four counters).
Then they part, and the store's master goes last. While anybody is waited for, a log line names them.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
from collections.abc import Callable

import torch

from zmqgrad.errors import ClosedError, RpcError, RpcTimeoutError, StoreError, StoreTimeoutError
from zmqgrad.rpc.devices import check_group, published
from zmqgrad.rpc.dispatch import EXTENSIONS, install_extension
from zmqgrad.rpc.membership import LOOK_SECONDS, Membership, WorkerRecord, program_fingerprint
from zmqgrad.rpc.options import RpcBackendOptions
from zmqgrad.rpc.rref import install_rrefs
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.clock import MONOTONIC, Clock, Deadline
from zmqgrad.store import Store, TCPStore
from zmqgrad.transport.base import Mailbox
from zmqgrad.transport.liveness import answers

logger = logging.getLogger(__name__)

SAY_EVERY = 5.0
"""Seconds of waiting for others after which a log line names them, again and again."""

JOIN_SECONDS = 5.0
"""How long threads may take to end once told."""

HURRY_SECONDS = 1.0
"""The same where an error, Ctrl-C or the end of the program is waiting to get through."""

PART_SECONDS = 2.0
"""How long workers that have finished wait for each other's farewell before they look who lives."""

FAREWELL_SECONDS = 30.0
"""How long those who live, but are slow, are waited for then."""

GONE = "gone"
"""Posted for a worker that died."""


def make_worker(
    name: str,
    rank: int,
    world_size: int,
    mailbox: Mailbox,
    options: RpcBackendOptions,
    clock: Clock = MONOTONIC,
) -> Worker:
    """A worker with all its floors, not yet started."""
    own = WorkerRecord(
        name,
        rank,
        mailbox.incarnation,
        mailbox.endpoints,
        socket.gethostname(),
        os.getpid(),
        program_fingerprint(),
        published(options.device_maps),
        torch.cuda.device_count() if options.device_maps or options.devices else -1,
    )
    worker = Worker(Membership(own, world_size), mailbox, options, clock)
    install_rrefs(worker)
    for extension in EXTENSIONS:
        install_extension(extension, worker)
    return worker


STAY_SECONDS = 10.0
"""Whoever serves the store waits so long for workers that have joined to read it; one may have died."""


class Group:
    """A worker's place among the others. Closes ``store`` at the end.

    ``served``: the store beneath ``store``, if this worker serves it.
    """

    def __init__(self, worker: Worker, store: Store, served: TCPStore | None = None) -> None:
        self.worker = worker
        self.store = store
        self._served = served
        self._gone: set[int] = set()  # ranks that ended without a word
        self._step = ""  # of leaving together: where others are waited for

    def join(self, deadline: Deadline) -> None:
        """Claim name and rank, wait for all others, and start.

        Raises:
            DuplicateWorkerError: if another worker has this name or rank.
            RendezvousTimeoutError: naming the ranks that did not come.
            ConfigurationError: if a device map of one of them cannot be right.
        """
        membership = self.worker.membership
        membership.claim(self.store)
        membership.meet(self.store, deadline)
        check_group(membership.all())
        # Not before: whoever calls us has met all, and may be ahead; its messages wait in the socket.
        self.worker.start()
        if self._served is None:
            self._say_met()
        else:
            self._stay_for_others(deadline)

    def _say_met(self) -> None:
        try:
            self.store.set(f"met/{self.worker.id}", b"")
        except StoreError as e:  # who serves it has gone on without us; we have read what we need
            logger.debug("%s: nobody to tell that all have been met: %s", self.worker.name, e)

    def _stay_for_others(self, deadline: Deadline) -> None:
        """Let all read the store that is served here: the program may end as soon as it has joined."""
        others = {record.id for record in self.worker.membership.all()} - {self.worker.id}
        until = Deadline.after(min(deadline.left(), STAY_SECONDS))
        while others and not until.passed():
            try:
                self.store.wait([f"met/{i}" for i in others], min(until.left(), LOOK_SECONDS))
                return
            except StoreTimeoutError:
                others = {i for i in others - set(self.worker.lost) if not self.store.check([f"met/{i}"])}

    def leave(self, graceful: bool, deadline: Deadline) -> None:
        """End the worker; with ``graceful``, after all workers have called this and finished their work.

        Whatever happens, threads and sockets of this worker are gone afterwards.

        Raises:
            RpcTimeoutError: if others did not arrive or finish by ``deadline``, naming them; if the store is
                gone.
            RpcError: if threads are left because user code in them does not end.
        """
        self.worker.events.stop()
        try:
            if graceful:
                self._leave_together(deadline)
        except StoreError as e:
            close_quietly(self, logger.warning)
            raise RpcTimeoutError(
                f"{self.worker.name}: shutdown gave up: the store no longer answers; "
                f"{self.worker.membership.name_of(0)}, or the launcher that serves it, seems to be gone"
            ) from e
        except BaseException:
            close_quietly(self, logger.warning)  # the first error is the one to tell
            raise
        self.close()

    def _leave_together(self, deadline: Deadline) -> None:
        self.store.set_timeout(min(self.store.timeout.total_seconds(), deadline.left()))
        self.worker.doors.peer_lost.append(lambda rank, _: self._stand_in_later(rank))
        self._meet("arrived", "to call shutdown", deadline)
        before: list[int] | None = None
        for number in itertools.count():
            self._wait_until_quiet(deadline)
            sent, received = self.worker.counts()
            posted = self._meet(f"quiet/{number}", "to finish its work", deadline, f"{sent} {received}")
            if GONE in posted:
                break  # with the dead, what they sent and received is lost, too
            sums = [sum(int(each.split()[i]) for each in posted) for i in (0, 1)]
            if sums[0] == sums[1] and sums == before:
                break
            before = sums
        self._part(deadline)

    def _meet(self, step: str, why: str, deadline: Deadline, value: str = "-") -> list[str]:
        """Post ``value`` under ``step`` and wait until all have; gives what all posted, by rank.

        For the dead others post :data:`GONE`. Only the first that is posted for a rank counts, so that all
        read the same and do the same next, whoever of them noticed a death when.
        """
        self._step = step
        self.store.compare_set(f"{step}/{self.worker.id}", "", value)
        for rank in self._gone.union(list(self.worker.lost)):
            self._stand_in(rank)
        keys = [f"{step}/{rank}" for rank in range(self.worker.membership.world_size)]
        self._wait_for(keys, why, deadline)
        posted = [raw.decode() for raw in self.store.multi_get(keys)]
        self._gone |= {rank for rank, said in enumerate(posted) if said == GONE}
        return posted

    def _wait_for(self, keys: list[str], why: str, deadline: Deadline) -> None:
        """Wait until all of ``keys``, one for each rank, are there, and see to those of the dead."""
        # That others still have work of their own is nothing to warn of.
        level = logging.INFO if self._step == "arrived" else logging.WARNING
        while True:
            try:
                self.store.wait(keys, min(deadline.left(), SAY_EVERY))
                return
            except StoreTimeoutError as e:
                there = set(self.store.list_keys(f"{self._step}/"))
                missing = [rank for rank, key in enumerate(keys) if key not in there]
                dead = [rank for rank in missing if self._is_gone(rank)]
                names = ", ".join(self.worker.membership.name_of(rank) for rank in missing)
                if dead:
                    logger.warning("%s: shutdown goes on without the dead among %s", self.worker.name, names)
                    for rank in dead:
                        self._stand_in(rank)
                    continue
                if deadline.passed():
                    raise RpcTimeoutError(
                        f"{self.worker.name}: shutdown gave up waiting for {names} {why}; "
                        f"shutdown(graceful=False) does not wait for others"
                    ) from e
                logger.log(level, "%s: shutdown waits for %s %s", self.worker.name, names, why)

    def _stand_in(self, rank: int) -> None:
        """Post for a worker that died, unless it has."""
        self.store.compare_set(f"{self._step}/{rank}", "", GONE)

    def _stand_in_later(self, rank: int) -> None:
        """A worker was lost, in a thread that must not wait."""

        def stand_in() -> None:
            try:
                self._stand_in(rank)
            except StoreError as e:
                logger.debug("%s: the store has no ear for the loss of %d: %s", self.worker.name, rank, e)

        try:
            self.worker.submit(stand_in)
        except ClosedError:
            logger.debug("%s has left before %d was lost", self.worker.name, rank)

    def _is_gone(self, rank: int) -> bool:
        """Has that worker ended without a word? (In good order, nobody ends before all have arrived.)"""
        if rank in self.worker.lost:
            return True
        return not any(answers(endpoint) for endpoint in self.worker.membership.find(rank).endpoints)

    def _wait_until_quiet(self, deadline: Deadline) -> None:
        worker = self.worker
        while True:
            worker.references.sweep()
            pending = worker.calls.pending()
            if not pending and worker.pool.wait_idle(deadline.sooner(SAY_EVERY)) and worker.quiet():
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
            if self.worker.id == 0:
                if self._served is not None:
                    self._served.refuse_newcomers()
                self.store.set("gone", "-")
                self._see_off(deadline.sooner(FAREWELL_SECONDS))
                if self._served is None:  # a launcher's, which goes on
                    self.store.delete_key("worker/0")
            else:
                self.store.wait(["gone"], min(deadline.left(), FAREWELL_SECONDS))
                self.store.set_timeout(PART_SECONDS)
                self.store.delete_key(f"worker/{self.worker.id}")
                self.store.set(f"left/{self.worker.id}", "-")
        except StoreError as e:
            logger.info("%s leaves without the others' farewell: %s", self.worker.name, e)

    def _see_off(self, deadline: Deadline) -> None:
        """Wait until all others that live have left."""
        others = set(range(1, self.worker.membership.world_size)) - self._gone
        while others:
            try:
                self.store.wait(
                    [f"left/{rank}" for rank in sorted(others)], min(deadline.left(), PART_SECONDS)
                )
                return
            except StoreTimeoutError:
                if deadline.passed():
                    raise
                others = {rank for rank in others if not self._is_gone(rank)}

    def close(self, patience: float = JOIN_SECONDS) -> None:
        """End at once; threads have ``patience`` seconds to end. Idempotent.

        Raises:
            RpcError: if threads are left because user code in them does not end.
        """
        self.worker.close()
        self.store.close()  # a thread that asks it for something ends with that
        left = self.worker.join(Deadline.after(patience))
        if left:
            raise RpcError(
                f"worker {self.worker.name} was shut down, but user code still runs in {', '.join(left)}; "
                f"it ends with the process"
            )


def close_quietly(group: Group, log: Callable[..., None] = logger.debug) -> None:
    """:meth:`Group.close` where there is nobody to tell of an error (at exit, or behind another error)."""
    try:
        group.close(HURRY_SECONDS)
    except (RpcError, StoreError) as e:
        log("%s", e)
