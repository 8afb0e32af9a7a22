"""Peers that are silent, and peers that are gone: nothing waits for those (P2)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from zmqgrad.errors import PeerLostError

if TYPE_CHECKING:
    from zmqgrad.rpc.worker.worker import Worker

logger = logging.getLogger(__name__)


class Losing:
    """Gives up what waits for peers that are gone, for all parts of ``worker``."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._membership = worker.membership
        self.lost: dict[int, str] = {}  # peers that are gone, and why that is believed
        self.silent: dict[int, float] = {}  # peers that do not answer heartbeats, and since when

    def suspect(self, peer: int, seconds: float) -> None:
        """``peer`` has been silent for so long; 0: it answers again. Nothing is given up for that."""
        own, name = self._worker.name, self._membership.name_of(peer)
        if seconds:
            self.silent[peer] = self._worker.clock.now() - seconds
            logger.warning(
                "%s: %s (worker %d) has not answered for %.1f s: stopped, or kept waiting by its machine",
                own,
                name,
                peer,
                seconds,
            )
        elif self.silent.pop(peer, None) is not None:
            logger.warning("%s: %s (worker %d) answers again", own, name, peer)

    def lose(self, peer: int, why: str) -> None:
        """The process of ``peer`` has ended: nothing waits for it any longer."""
        worker = self._worker
        if worker.closed:
            return
        if peer in self.lost:
            worker.mailbox.forget(peer)  # it was told so, at most
            return
        self.lost[peer] = why
        self.silent.pop(peer, None)
        logger.info("%s: %s (worker %d) is gone: %s", worker.name, self._membership.name_of(peer), peer, why)
        for call in worker.calls.lose(peer):
            call.outcome.set_exception(self.loss_of(peer, call.describe()))
        self._membership.depart(peer)
        worker.serving.lose(peer)
        worker.references.peer_lost(peer)
        worker.peer_terms.forget(peer)
        for told in worker.doors.peer_lost:
            told(peer, self.loss_of(peer, "a part of it"))
        worker.mailbox.forget(peer)  # else the socket would look for it for ever
        record = self._membership.find_former(peer)
        if record is not None:  # of who was never known to join, nobody hears that it is gone
            worker.events.lost(record.info, why)

    def loss_of(self, peer: int, what: str) -> PeerLostError:
        """The error for ``what`` was asked of a peer that is gone."""
        return PeerLostError(
            f"{self._membership.name_of(peer)} (worker {peer}) is gone: {self.lost[peer]}; "
            f"{what} will not be answered"
        )
