"""Groups that workers join, leave and rejoin as they like: ``init_rpc`` without a world size.

Who takes part stands in the store (:mod:`~zmqgrad.rpc.groups.roster`), which every worker watches. A worker
that dies says nothing, so each also feels the pulse of the next one in the order of ids (and of those it
talks to); whoever finds one dead strikes it off for all.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from zmqgrad.errors import RpcTimeoutError, StoreError
from zmqgrad.rpc.groups.group import JOIN_SECONDS, Group
from zmqgrad.rpc.groups.identity import WorkerRecord
from zmqgrad.rpc.groups.look_up import LookUp
from zmqgrad.rpc.groups.parting import SAY_EVERY
from zmqgrad.rpc.groups.roster import Roster, lives
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import Store, TCPStore

logger = logging.getLogger(__name__)

ASK_SECONDS = 5.0
"""How long the store may take to answer once this worker has joined."""

SILENT_SECONDS = 30.0
"""A store that did not answer is not asked for unknown workers for so long: calls must not wait for it."""

LAST_WORDS_SECONDS = 0.2
"""Calls to a worker that has left in good order are given up so long after."""

LEFT = "it has left the group"


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
        self._roster = Roster(store, worker.membership.own)
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
        self._roster.take_name(self._is_alive)
        try:
            self.store.set_timeout(min(ASK_SECONDS, max(1.0, deadline.left())))
            self.worker.doors.peer_lost.append(lambda peer, _: self._strike_off_later(peer))
            self.worker.membership.look_up = self._look_up
            self.worker.start()  # nobody knows where we are yet
            self._roster.watch(self._changed)
            self._refresh()
            self._roster.enter()
            self._joined = True
            self._roster.say_changed()
            self._refresh()
        except BaseException:
            self._withdraw(LEFT)
            raise

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
            there, records = self._roster.read(membership.known())
            gone = [r for r in membership.all() if r.id not in there and r.id != worker.id]
            if self._joined and worker.id not in there and not self._leaving:
                logger.error("%s was struck off the group by others: it must join anew", worker.name)
            for record in records:
                if membership.learn(record) and self._joined:
                    worker.events.joined(record.info)
            for record in gone:
                self._take_leave(record.id, self._roster.reason(record.id))
            self._feel_next_pulse()

    def _take_leave(self, worker_id: int, reason: str) -> None:
        worker = self.worker
        if reason == LEFT and any(call.peer == worker_id for call in worker.calls.pending()):
            # It has answered all that it was asked; what it said last may not have been read here yet. But
            # its name may have another holder by now.
            worker.membership.depart(worker_id)
            worker.timekeeper.call_later(LAST_WORDS_SECONDS, lambda: worker.lose(worker_id, reason))
        else:
            worker.lose(worker_id, reason)

    def _feel_next_pulse(self) -> None:
        """Watch the next worker in the order of ids, so that each is watched by somebody."""
        own = self.worker.id
        others = sorted(r.id for r in self.worker.membership.all() if r.id != own)
        if others:
            self.worker.mailbox.monitor(next((n for n in others if n > own), others[0]))

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
            self._roster.strike_off(record, self.worker.lost.get(peer, "its process has ended"))
            self._refresh()
        except StoreError as e:
            logger.warning("%s: cannot strike off worker %d: %s", self.worker.name, peer, e)

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
            done = worker.serving.wait_ended(served, deadline.capped(SAY_EVERY))
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
        self._roster.give_name_back()
        self._roster.unwatch(self._changed)
        if self._joined:
            self._joined = False
            self._roster.leave(why)  # last: whoever serves the store may go then

    def _wait_for_all_to_leave(self, deadline: Deadline) -> None:
        """They need the store, which ends with this worker."""
        assert self._served is not None
        changed = threading.Event()
        self._roster.watch(lambda old, new: changed.set())  # goes with the store
        while True:
            changed.clear()
            there = self._roster.ids()
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
