"""The rendezvous of one node: joins rounds, keeps the node alive between them, and tells when to join again.

A handler has one lock, which guards its state holder, and one thread, which renews the node's heartbeat. The
thread holds the handler weakly: a handler that is dropped stops to renew, and other nodes remove it.
"""

from __future__ import annotations

import logging
import threading
import traceback
import weakref
from typing import NamedTuple

from zmqgrad.elastic import events
from zmqgrad.elastic.events import NodeState
from zmqgrad.elastic.executor import OperatorExecutor
from zmqgrad.elastic.operators import close, exit_round, join, keep_alive
from zmqgrad.elastic.settings import RendezvousSettings
from zmqgrad.elastic.state import NodeDesc, NodeDescGenerator, RendezvousState
from zmqgrad.elastic.state_holder import RendezvousBackend, StateHolder
from zmqgrad.elastic.transitions import num_admissible
from zmqgrad.errors import RendezvousError
from zmqgrad.runtime.clock import MONOTONIC, Clock
from zmqgrad.store import PrefixStore, Store
from zmqgrad.transport import tap

logger = logging.getLogger(__name__)

CACHE_SECONDS = 1.0
"""How long the state is not read again for :meth:`RendezvousHandler.num_nodes_waiting` and ``is_closed``."""

LEASE_MARGIN = 0.2
"""Fraction of the expiry by which a node gives up before others may remove it.

It covers differences between the rates of clocks, and the time that stopping the workers takes.
"""

_nodes = NodeDescGenerator()


class Rendezvous(NamedTuple):
    """A completed round, as one of its nodes sees it."""

    store: Store
    """Shared by the nodes of this round only."""
    rank: int
    world_size: int
    round: int


class RendezvousHandler:
    """Takes part in a rendezvous. Thread-safe.

    Args:
        settings: equal on all nodes.
        backend: where the state is shared.
        store: what the nodes of a round are given, with a prefix of their own.
        node: this node; None: a new descriptor.
        clock: monotonic; for tests.
    """

    def __init__(
        self,
        settings: RendezvousSettings,
        backend: RendezvousBackend,
        store: Store,
        node: NodeDesc | None = None,
        clock: Clock = MONOTONIC,
    ) -> None:
        self.node = _nodes.generate() if node is None else node
        self._settings = settings
        self._backend = backend
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()  # guards _holder
        self._holder = StateHolder(self.node, backend, settings, clock)
        self._executor = OperatorExecutor(self.node, self._holder, settings)
        self._heartbeats: _Heartbeats | None = None

    def get_backend(self) -> str:
        """Name of the backend."""
        return self._backend.name

    def get_run_id(self) -> str:
        """Identifies the job."""
        return self._settings.run_id

    def next_rendezvous(self) -> Rendezvous:
        """Leave the current round, and wait until this node takes part in a complete one.

        Raises:
            RendezvousClosedError: if the rendezvous is closed.
            RendezvousTimeoutError: if no round completes within ``settings.timeout.join``.
            RendezvousConnectionError, RendezvousStateError: if the backend cannot be used.
        """
        self._stop_heartbeats()
        self._record("next_rendezvous", "joins the rendezvous", NodeState.INIT)
        deadline = self._clock.now() + self._settings.timeout.join
        try:
            with self._lock:
                self._executor.run(exit_round, deadline)
                self._executor.run(join, deadline)
                state = self._holder.state
        except RendezvousError as e:
            self._record("next_rendezvous", str(e), NodeState.FAILED, trace=traceback.format_exc())
            raise
        self._heartbeats = _Heartbeats(self, self._settings.keep_alive_interval)
        return self._result(state)

    def _result(self, state: RendezvousState) -> Rendezvous:
        # What the round agreed on when it completed: some of its nodes may have left since.
        rank, size = state.completed_ranks[self.node], len(state.completed_ranks)
        self._record("next_rendezvous", f"round {state.round}: rank {rank} of {size}", rank=rank)
        store = PrefixStore(f"zmqgrad/rendezvous/{self._settings.run_id}/{state.round}", self._store)
        return Rendezvous(store, rank, size, state.round)

    def is_closed(self) -> bool:
        """Whether no further round begins. False if the backend cannot be reached."""
        return self._latest().closed

    def num_nodes_waiting(self) -> int:
        """How many waiting nodes the next round would admit. If any, call :meth:`next_rendezvous`."""
        return num_admissible(self._latest(), self._settings)

    def lost_nodes(self) -> list[NodeDesc]:
        """The nodes of the completed round that have left it or died, sorted."""
        state = self._latest()
        return sorted(state.completed_ranks.keys() - state.participants.keys()) if state.complete else []

    def _latest(self) -> RendezvousState:
        with self._lock:
            try:
                self._holder.sync(CACHE_SECONDS)
            except RendezvousError as e:
                logger.warning("%s: %s: %s", self._settings.run_id, self.node, e)
            return self._holder.state

    def set_closed(self) -> None:
        """Close the rendezvous for all nodes.

        Raises:
            RendezvousTimeoutError: if that takes longer than ``settings.timeout.close``.
            RendezvousConnectionError, RendezvousStateError: if the backend cannot be used.
        """
        with self._lock:
            self._executor.run(close, self._clock.now() + self._settings.timeout.close)
        self._record("set_closed", "closed the rendezvous", NodeState.SUCCEEDED)

    def keep_alive(self) -> None:
        """Renew the heartbeat of this node, if that is due. Called by a thread of the handler.

        Raises:
            RendezvousError: if the heartbeat cannot be renewed now.
        """
        with self._lock:
            self._executor.run(keep_alive, self._clock.now() + self._settings.timeout.heartbeat)

    def lease_left(self) -> float:
        """Seconds for which this node surely belongs to its round.

        When they are over, you must stop the workers of this node: other nodes may remove it soon, and form a
        new round without it. Not positive if the node was removed already.
        """
        with self._lock:
            if self.node not in self._holder.state.participants:
                return 0.0
            expiry = self._settings.expiry_seconds * (1 - LEASE_MARGIN)
            return self._holder.renewed + expiry - self._clock.now()

    def shutdown(self) -> bool:
        """Stop, and close the rendezvous for all nodes. Returns whether it was closed."""
        self.stop()
        try:
            self.set_closed()
        except RendezvousError as e:
            logger.warning("%s: %s cannot close the rendezvous: %s", self._settings.run_id, self.node, e)
            return False
        return True

    def stop(self) -> None:
        """Stop to renew the heartbeat: other nodes go on without this one. Idempotent."""
        self._stop_heartbeats()
        tap.unregister(self._executor)

    def _stop_heartbeats(self) -> None:
        heartbeats, self._heartbeats = self._heartbeats, None
        if heartbeats is not None:
            heartbeats.stop()

    def _record(
        self,
        name: str,
        message: str,
        node_state: NodeState = NodeState.RUNNING,
        rank: int | None = None,
        trace: str = "",
    ) -> None:
        events.record(name, self._settings.run_id, self.node, message, node_state, rank, trace)


class _Heartbeats:
    """The thread that renews the heartbeat of a handler, twice in each interval so that no delay adds up."""

    def __init__(self, handler: RendezvousHandler, interval: float) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=_renew,
            args=(weakref.ref(handler), self._stopped, interval / 2),
            name=f"zmqgrad-rendezvous-{handler.node}",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


def _renew(handler: weakref.ref[RendezvousHandler], stopped: threading.Event, pause: float) -> None:
    while not stopped.wait(pause):
        alive = handler()
        if alive is None:
            return
        try:
            alive.keep_alive()
        except RendezvousError as e:
            logger.warning("%s: the heartbeat of %s was not renewed: %s", alive.get_run_id(), alive.node, e)
        del alive
