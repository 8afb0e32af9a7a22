"""Groups of fixed size: ``init_rpc`` with a world size. Joining and leaving wait for all workers."""

from __future__ import annotations

import logging

from zmqgrad.errors import DuplicateWorkerError, StoreError, WorldSizeError
from zmqgrad.rpc.devices import check_group
from zmqgrad.rpc.membership.descriptors import reserve_descriptors
from zmqgrad.rpc.membership.group import JOIN_TIMEOUT_SECONDS, Group
from zmqgrad.rpc.membership.registry import POLL_SECONDS, check_no_dynamic_group
from zmqgrad.rpc.membership.shutdown import ShutdownBarrier
from zmqgrad.rpc.membership.suspicion import Suspicions
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import PrefixStore, TCPStore

logger = logging.getLogger(__name__)

SERVE_GRACE_SECONDS = 10.0
"""How long the worker that serves the store waits for the others to read it, if it ends at once."""


class FixedGroup(Group):
    """A worker's membership in a group of fixed size. Arguments as :class:`Group`."""

    _others_may_be_joining = False
    """Whether other workers may still need the store that is served here in order to join."""

    def __init__(self, worker: Worker, store: PrefixStore, served: TCPStore | None = None) -> None:
        super().__init__(worker, store, served)
        self._shared = store.underlying_store
        self._suspicions = Suspicions(worker, store)
        # On one host no worker watches for accusations: a process that ended is certain, and one that was
        # stopped is told by the worker that has lost it.
        self._settle = self._suspicions.contradict

    def join(self, deadline: Deadline) -> None:
        """Claim name and rank, wait for all workers, and start.

        Raises:
            DuplicateWorkerError: if another worker has this name or rank.
            WorldSizeError: if another worker passed another world size.
            RendezvousTimeoutError: naming the ranks that did not join.
            RendezvousError: if a worker passed no world size.
            ConfigurationError: if a device map of one of them is invalid.
        """
        membership = self.worker.membership
        reserve_descriptors(membership.world_size)
        try:
            self._registry.claim_name_and_rank()
            self._registry.check_world_size()
            self._registry.publish()
            records = self._registry.wait_for_records(
                membership.world_size, deadline, lambda: check_no_dynamic_group(self._shared)
            )
        except (DuplicateWorkerError, WorldSizeError):
            raise  # the claims stay, so that the others are refused, too
        except BaseException:
            self._withdraw()
            raise
        self.has_met = True
        for record in records:
            membership.learn(record)
        check_group(records)
        # Not earlier: peers that have all records may already send. Their messages wait in the socket.
        self.worker.start(serving=False)
        if len({record.host for record in records}) > 1:
            self._suspicions.watch_later()
            self._settle = self._suspicions.accuse
            self.worker.directory.is_lost = self._is_lost
        self.worker.hooks.peer_lost.append(lambda peer, _: self._on_lost(peer))
        if self._served is None:
            self._mark_joined()
        else:
            self._others_may_be_joining = True

    def _on_lost(self, peer: int) -> None:
        if 0 not in self.worker.lost:  # it may serve the store; the barrier notices if that does not reply
            self._settle(peer)

    def _is_lost(self, peer: int, deadline: Deadline) -> bool:
        return 0 in self.worker.lost or self._suspicions.is_upheld(peer, deadline)  # see above

    def _withdraw(self) -> None:
        """Undo what was written, so that this process can join again through the same store."""
        try:
            self.store.set_timeout(POLL_SECONDS)  # it may not reply any more
            self._registry.withdraw()
        except StoreError as e:
            logger.debug("%s: the claims end with the store: %s", self.worker.name, e)

    def _mark_joined(self) -> None:
        try:
            self._registry.mark_joined()
        except StoreError as e:  # its server did not wait; this worker has read what it needs
            logger.debug("%s: cannot note that it has joined: %s", self.worker.name, e)

    def close(self, timeout: float = JOIN_TIMEOUT_SECONDS) -> None:
        """As :meth:`Group.close`; first waits until all have joined, if they need the store served here."""
        if self._others_may_be_joining:
            self._others_may_be_joining = False
            self._serve_until_joined()
        super().close(timeout)

    def _serve_until_joined(self) -> None:
        others = {record.id for record in self.worker.membership.all()} - {self.worker.id}
        until = Deadline.after(SERVE_GRACE_SECONDS)
        while others and not until.passed():
            others = self._registry.wait_joined(others, min(until.left(), POLL_SECONDS)) - set(
                self.worker.lost
            )

    def _finish(self, deadline: Deadline) -> None:
        ShutdownBarrier(self.worker, self.store, self._registry, self._served, self._suspicions).run(deadline)
        self._others_may_be_joining = False  # all have called shutdown
