"""Groups that workers join, leave and rejoin as they like: ``init_rpc`` without a world size.

What the store holds, all under one prefix:

    id/<id>        who was given the id. Ids are never given twice: a restarted worker is another one
    name/<name>    the record of the worker that has the name; empty once it has left
    worker/<id>    the records of those that take part
    gone/<id>      why a worker no longer does
    changes        counts joins and losses; every worker watches this key

A worker that dies says nothing, so each also feels the pulse of the next one in the order of ids (and of
those it talks to); whoever finds one dead strikes it off for all. A name is taken over from a worker that is
certainly dead, and refused while it lives or cannot be told.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import msgspec

from zmqgrad.errors import (
    ConfigurationError,
    DuplicateWorkerError,
    RendezvousError,
    RpcTimeoutError,
    StoreError,
    StoreTimeoutError,
)
from zmqgrad.rpc.group import JOIN_SECONDS, Group
from zmqgrad.rpc.look_up import LookUp
from zmqgrad.rpc.membership import WorkerRecord, read_all
from zmqgrad.rpc.parting import SAY_EVERY
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import Store, TCPStore
from zmqgrad.transport.liveness import answers
from zmqgrad.wire.ids import MAX_WORKER

logger = logging.getLogger(__name__)

PREFIX = "rpc/dynamic"

ASK_SECONDS = 5.0
"""How long the store may take to answer once this worker has joined."""

SILENT_SECONDS = 30.0
"""A store that did not answer is not asked for unknown workers for so long: calls must not wait for it."""

LAST_WORDS_SECONDS = 0.2
"""Calls to a worker that has left in good order are given up so long after."""

LEFT = "it has left the group"


def allot_id(store: Store, name: str, rank: int | None) -> int:
    """An id that no worker of the group has, or had: ``rank`` if it is free, or the next.

    Raises:
        ConfigurationError: if ``rank`` can be none. RendezvousError: if all ids have been used up.
    """
    if rank is not None:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank <= MAX_WORKER:
            raise ConfigurationError(f"rank must be 0 to {MAX_WORKER}, not {rank!r}")
        if _take_id(store, rank, name):
            return rank
        logger.info("%s: rank %d was another worker's before, so this one gets a new id", name, rank)
    while True:
        number = store.add("next_id", 1) - 1
        if number > MAX_WORKER:
            raise RendezvousError(
                f"{name}: all {MAX_WORKER + 1} worker ids have been used: start a new group"
            )
        if _take_id(store, number, name):
            return number


def _take_id(store: Store, number: int, name: str) -> bool:
    # What is written is unlike what anybody else would write only by chance, so only the first set counts.
    return store.add(f"id/{number}", 1) == 1


def lives(record: WorkerRecord) -> bool:
    """Does that worker live, or can that not be told?"""
    return any(answers(endpoint) for endpoint in record.endpoints)


class DynamicGroup(Group):
    """A worker's place in a group whose size nobody knows.

    Args:
        is_alive: tells whether the worker of a record lives; for tests.
    """

    def __init__(
        self,
        worker: Worker,
        store: Store,
        served: TCPStore | None = None,
        is_alive: Callable[[WorkerRecord], bool] = lives,
    ) -> None:
        super().__init__(worker, store, served)
        self._is_alive = is_alive
        self._claim = msgspec.json.encode(worker.membership.own)
        self._refreshing = threading.Lock()  # held while asking the store who takes part
        self._leaving = False
        self._joined = False
        self._store_is_silent = Deadline.after(0.0)
        self._look = LookUp(f"zmqgrad-{worker.name}-look-up", self._refresh_if_answered)

    # ---- joining ----------------------------------------------------------------------------------------

    def join(self, deadline: Deadline) -> None:
        """Take the name, learn who takes part, start, and let the others know. Waits for nobody.

        Raises:
            DuplicateWorkerError: if a worker that lives, or may, has this name.
        """
        own = self.worker.membership.own
        self._take_name(own)
        try:
            self.store.set_timeout(min(ASK_SECONDS, max(1.0, deadline.left())))
            self.worker.doors.peer_lost.append(lambda peer, _: self._strike_off_later(peer))
            self.worker.membership.look_up = self._look_up
            self.worker.start()  # nobody knows where we are yet
            self.store.watch_key("changes", self._changed)
            self._refresh()
            self.store.set(f"worker/{own.id}", self._claim)
            self._joined = True
            self.store.add("changes", 1)
            self._refresh()
        except BaseException:
            self._withdraw(LEFT)
            raise

    def _take_name(self, own: WorkerRecord) -> None:
        key, expected = f"name/{own.name}", b""
        while True:
            holder = self.store.compare_set(key, expected, self._claim)
            if holder == self._claim:
                return
            if holder == b"":  # it left at this very moment
                expected = b""
                continue
            other = msgspec.json.decode(holder, type=WorkerRecord)
            if self._is_alive(other):
                raise DuplicateWorkerError(
                    f"name {own.name!r} is not unique: worker {other.id} (process {other.pid} of "
                    f"{other.host}) has it and has not left; give each worker a name of its own"
                )
            logger.warning("%s takes the place of worker %d, which has died", own.name, other.id)
            self._publish_loss(other.id, "its process has ended, and another took its name")
            expected = holder

    # ---- who takes part ---------------------------------------------------------------------------------

    def _changed(self, old: bytes | None, new: bytes | None) -> None:
        """Somebody joined, left or was struck off. In a thread of the store's."""
        if self._leaving:
            return
        try:
            self._refresh()
        except StoreError as e:
            logger.warning("%s: cannot learn who takes part: %s", self.worker.name, e)

    def _look_up(self, seconds: float | None) -> bool:
        """Somebody asks for a worker that is not known, or gone: ask the store, if it answers at all."""
        return not self._store_is_silent.passed() or self._look.wait(seconds)

    def _refresh_if_answered(self) -> None:
        try:
            self._refresh()
        except StoreError as e:
            self._store_is_silent = Deadline.after(SILENT_SECONDS)
            logger.warning("%s: cannot learn who takes part: %s", self.worker.name, e)

    def _refresh(self) -> None:
        """Ask the store who takes part, and take in what has changed."""
        worker, membership = self.worker, self.worker.membership
        with self._refreshing:
            there, records = self._read_members()
            gone = [r for r in membership.all() if r.id not in there and r.id != worker.id]
            if self._joined and worker.id not in there and not self._leaving:
                logger.error("%s was struck off the group by others: it must join anew", worker.name)
            for record in records:
                if membership.learn(record) and self._joined:
                    worker.events.joined(record.info)
            for record in gone:
                self._take_leave(record.id, self._reason(record.id))
            self._feel_next_pulse()

    def _take_leave(self, worker_id: int, reason: str) -> None:
        worker = self.worker
        if reason == LEFT and any(call.peer == worker_id for call in worker.calls.pending()):
            # It has answered all that it was asked; what it said last may not have been read here yet.
            worker.timekeeper.call_later(LAST_WORDS_SECONDS, lambda: worker.lose(worker_id, reason))
        else:
            worker.lose(worker_id, reason)

    def _read_members(self) -> tuple[set[int], list[WorkerRecord]]:
        """The ids of all that take part, and the records of those not known here yet."""
        while True:
            there = {int(key.partition("/")[2]) for key in self.store.list_keys("worker/")}
            unknown = sorted(there - self.worker.membership.known())
            if not unknown:
                return there, []
            try:
                found = read_all(self.store, [f"worker/{n}" for n in unknown], ASK_SECONDS / 10)
            except StoreTimeoutError:
                continue  # one of them has left between the two queries
            return there, [msgspec.json.decode(raw, type=WorkerRecord) for raw in found]

    def _reason(self, worker_id: int) -> str:
        key = f"gone/{worker_id}"
        return self.store.get(key).decode() if self.store.check([key]) else "it takes part no more"

    def _feel_next_pulse(self) -> None:
        """Watch the next worker in the order of ids, so that each is watched by somebody."""
        own = self.worker.id
        others = sorted(r.id for r in self.worker.membership.all() if r.id != own)
        if others:
            self.worker.mailbox.follow(next((n for n in others if n > own), others[0]))

    def _strike_off_later(self, peer: int) -> None:
        """A peer was lost here, in a thread that must not wait."""
        if not self._leaving:
            self.worker.submit(lambda: self._strike_off(peer))

    def _strike_off(self, peer: int) -> None:
        """If ``peer`` is certainly dead, it is so for all."""
        record = self.worker.membership.find_former(peer)
        if record is None or self._is_alive(record):
            return  # it left in good order, or is out of this worker's reach alone
        try:
            if self.store.check([f"worker/{peer}"]):
                self._publish_loss(peer, self.worker.lost.get(peer, "its process has ended"))
                self.store.compare_set(f"name/{record.name}", msgspec.json.encode(record), b"")
            self._refresh()
        except StoreError as e:
            logger.warning("%s: cannot strike off worker %d: %s", self.worker.name, peer, e)

    def _publish_loss(self, worker_id: int, why: str) -> None:
        self.store.set(f"gone/{worker_id}", why)
        self.store.delete_key(f"worker/{worker_id}")
        try:
            self.store.add("changes", 1)
        except StoreError as e:
            if worker_id != self.worker.id:
                raise
            logger.debug("%s was the last that the store waited for: %s", self.worker.name, e)

    # ---- leaving ----------------------------------------------------------------------------------------

    def _leave_together(self, deadline: Deadline) -> None:
        """Finish what is under way here, and let the others know. The master of the store goes last."""
        self._finish(deadline)
        self._withdraw(LEFT)
        if self._served is not None:
            self._wait_for_all_to_leave(deadline)

    def _finish(self, deadline: Deadline) -> None:
        """Wait for the answers to this worker's calls, and until those that it serves now are answered."""
        worker = self.worker
        worker.references.sweep()
        served = worker.serving.all()
        while True:
            pending = worker.calls.pending()
            for call in pending:
                call.outcome.wait_done(min(deadline.left(), SAY_EVERY))
            done = worker.serving.wait_ended(served, deadline.sooner(SAY_EVERY))
            still = [c for c in worker.calls.pending() if c in pending]
            if done and not still:
                return
            names = {worker.membership.name_of(call.peer) for call in still} or {"running calls"}
            said = f"{worker.name}: shutdown {{}} {', '.join(sorted(names))} to finish"
            if deadline.passed():
                raise RpcTimeoutError(said.format("gave up waiting for"))
            logger.warning("%s", said.format("waits for"))

    def _withdraw(self, why: str) -> None:
        self._leaving = True
        own = self.worker.membership.own
        self.store.compare_set(f"name/{own.name}", self._claim, b"")
        self.store.unwatch_key("changes", self._changed)
        if self._joined:
            self._joined = False
            self._publish_loss(own.id, why)  # last: whoever serves the store may go then

    def _wait_for_all_to_leave(self, deadline: Deadline) -> None:
        """They need the store, which ends with this worker."""
        assert self._served is not None
        changed = threading.Event()
        self.store.watch_key("changes", lambda old, new: changed.set())  # goes with the store
        while True:
            changed.clear()
            there = [int(key.partition("/")[2]) for key in self.store.list_keys("worker/")]
            dead = [n for n in there if self._has_died(n)]
            if len(dead) == len(there):
                self._served.refuse_newcomers()
                return
            names = ", ".join(self.worker.membership.name_of(n) for n in there if n not in dead)
            if deadline.passed():
                raise RpcTimeoutError(
                    f"{self.worker.name}, which serves the store, gave up waiting for {names} to leave; "
                    f"shutdown(graceful=False) does not wait for others"
                )
            if not changed.wait(min(deadline.left(), SAY_EVERY)):
                logger.warning("%s: shutdown waits for %s to leave", self.worker.name, names)

    def _has_died(self, worker_id: int) -> bool:
        record = self.worker.membership.find_former(worker_id)
        return record is not None and not self._is_alive(record)

    def leave(self, graceful: bool, deadline: Deadline) -> None:
        """End the worker; with ``graceful``, after its calls and those that it serves have been answered.

        Raises: as :meth:`Group.leave`.
        """
        if not graceful:
            try:
                self.store.set_timeout(min(1.0, deadline.left()))
                self._withdraw("it has left the group in a hurry")
            except StoreError as e:
                logger.debug("%s leaves without a word: %s", self.worker.name, e)
        super().leave(graceful, deadline)

    def close(self, patience: float = JOIN_SECONDS) -> None:
        """As :meth:`Group.close`."""
        self._leaving = True
        try:
            super().close(patience)
        finally:
            self._look.join(Deadline.after(patience))  # the store that it asks is closed
