"""Suspicion with refutation: whether a worker that one member has lost is lost for the whole group.

One member alone may be wrong: a firewall may block its way only, or it was stopped itself. So it accuses the
worker in the store, and the group goes on without the worker only if that does not refute in time (SWIM: Das,
Gupta and Motivala, 2002). A process of this host that has certainly ended is not waited for.

    suspect/<id>/<accuser>   why the accuser has lost the worker. Between these two the loss is final
    verdict/<id>/<accuser>   "refuted" by the accused, or "lost" by the accuser when the time is over; what is
                             written first counts

An accused worker learns by the first key that the accuser has lost it, for example while it was stopped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from zmqgrad.errors import ClosedError, RpcTimeoutError, StoreError
from zmqgrad.rpc.membership.membership import LEFT, LEFT_AT_ONCE
from zmqgrad.rpc.membership.registry import IsAlive, is_alive
from zmqgrad.rpc.membership.worker_info import WorkerRecord
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import Store
from zmqgrad.transport.base import text_of_loss
from zmqgrad.transport.heartbeat.failure_detector import is_on_this_host

logger = logging.getLogger(__name__)

REFUTED, LOST = b"refuted", b"lost"


class Suspicions:
    """The accusations by and of one worker.

    Args:
        worker: accuses others, and refutes.
        store: the keys of the group.
        on_confirmed: called with a worker that is lost for the group and the reason, in an engine thread.
        is_alive: returns whether the worker of a record is or may be alive; for tests.
    """

    def __init__(
        self,
        worker: Worker,
        store: Store,
        on_confirmed: Callable[[int, str], None] = lambda peer, reason: None,
        is_alive: IsAlive = is_alive,
    ) -> None:
        self._worker = worker
        self._store = store
        self.on_confirmed = on_confirmed
        self._is_alive = is_alive
        self._accused: set[int] = set()
        self.confirmed: set[int] = set()
        """The workers that are lost for the group by an accusation of this one."""

    def watch(self) -> None:
        """Refute all accusations of this worker, past and to come.

        Raises:
            StoreError: if the store does not reply.
        """
        prefix = f"suspect/{self._worker.id}/"
        self._store.watch_prefix(prefix, self._on_accused)
        for key in self._store.list_keys(prefix):
            self._on_accused(key, None, self._store.get(key))

    def watch_later(self) -> None:
        """:meth:`watch` in an engine thread; a store that does not reply is logged."""
        self._submit(self.watch)

    def unwatch(self) -> None:
        """Undo :meth:`watch`.

        Raises:
            StoreError: if the store does not reply.
        """
        self._store.unwatch_prefix(f"suspect/{self._worker.id}/", self._on_accused)

    def accuse(self, peer: int) -> None:
        """Accuse a worker that is lost here, in an engine thread. Only the first call for a worker acts."""
        if peer not in self._accused:
            self._accused.add(peer)
            self._submit(partial(self._accuse, peer))

    def _accuse(self, peer: int) -> None:
        record = self._worker.membership.find_known(peer)
        if record is None:  # it is accused when it becomes known, to the thread that reads the store
            self._accused.discard(peer)
            record = self._worker.membership.find_known(peer)
            if record is None:
                return
            self._accused.add(peer)
        reason = self._worker.lost[peer]
        if self._has_ended(record):
            self._confirm(peer, reason)
            return
        try:
            self._store.set(f"suspect/{peer}/{self._worker.id}", reason)
        except StoreError:
            self._accused.discard(peer)  # a later call may try again
            raise
        self._worker.timer.call_later(
            self._worker.options.limits.refused,
            lambda: self._submit(partial(self._judge, peer, reason)),
        )

    def _has_ended(self, record: WorkerRecord) -> bool:
        """Whether it was certainly the process that ended, not a connection: known on this host only."""
        return all(is_on_this_host(e) for e in record.endpoints) and not self._is_alive(record)

    def _judge(self, peer: int, reason: str) -> None:
        if self._decide(peer, self._worker.id, LOST) == LOST:
            self._confirm(peer, reason)
        else:
            name = self._worker.membership.name_of(peer)
            logger.warning(
                "%s has lost %s (worker %d), but the group has not: %s", self._worker.name, name, peer, reason
            )

    def _confirm(self, peer: int, reason: str) -> None:
        self.confirmed.add(peer)
        self.on_confirmed(peer, reason)

    def _decide(self, accused: int, accuser: int, verdict: bytes) -> bytes:
        """Write ``verdict`` unless there is one. Returns the one that counts."""
        return self._store.compare_set(f"verdict/{accused}/{accuser}", b"", verdict)

    def is_upheld(self, peer: int, deadline: Deadline) -> bool:
        """Whether a worker that is lost here is lost for the group. Waits for the verdict.

        Raises:
            RpcTimeoutError: if there is none by ``deadline``.
            StoreError: if the store does not reply.
        """
        worker, directory = self._worker, self._worker.directory
        record = worker.membership.find_known(peer)
        if record is None:
            return False
        if worker.lost.get(peer) in (LEFT, LEFT_AT_ONCE) or self._has_ended(record):
            return True

        def find() -> bytes | None:
            verdicts = dict(directory.list(f"verdict/{peer}/"))
            return LOST if LOST in verdicts.values() else verdicts.get(str(worker.id))

        verdict = directory.wait_for(f"verdict/{peer}/{worker.id}", find, deadline)
        if verdict is None:
            raise RpcTimeoutError(
                f"{worker.name}: the group has not decided in time if {record.name} is lost"
            )
        return verdict == LOST

    def _on_accused(self, key: str, old: bytes | None, new: bytes | None) -> None:
        """Called in a thread of the store when another worker has lost this one."""
        if new is not None and not self._worker.closed:
            accuser = int(key.rpartition("/")[2])
            self._accused.add(accuser)  # no need to: it is alive
            name = self._worker.membership.name_of(accuser)
            self._worker.lose(accuser, text_of_loss(name, self._worker.id, new.decode()))
            self._decide(accuser, self._worker.id, REFUTED)  # on its behalf: nothing else settles it
            self.refute(accuser)

    def contradict(self, peer: int) -> None:
        """Refute in advance what a lost worker may accuse this one of, unless its process has ended."""
        self._submit(partial(self._contradict, peer))

    def _contradict(self, peer: int) -> None:
        record = self._worker.membership.find_known(peer)
        if record is not None and not self._has_ended(record):
            self.refute(peer)

    def refute(self, accuser: int) -> None:
        """Contradict the accusation by ``accuser``, past or to come.

        Raises:
            StoreError: if the store does not reply.
        """
        if self._decide(self._worker.id, accuser, REFUTED) == LOST:
            name = self._worker.membership.name_of(accuser)
            logger.error(
                "%s was declared lost by %s and did not refute it in time: it must join again",
                self._worker.name,
                name,
            )

    def _submit(self, query: Callable[[], None]) -> None:
        def run() -> None:
            try:
                query()
            except StoreError as e:
                logger.info("%s: cannot settle which workers are lost: %s", self._worker.name, e)

        try:
            self._worker.submit(run)
        except ClosedError:
            logger.debug("%s left before a loss was settled", self._worker.name)
