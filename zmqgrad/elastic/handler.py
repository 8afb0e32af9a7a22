"""The rendezvous of one node: joins rounds, keeps the node alive between them, and tells when to join again.

A handler has one lock, which guards its state holder, and one thread, which renews the node's heartbeat. The
thread holds the handler weakly: a handler that is dropped stops to renew, and other nodes remove it.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from zmqgrad.elastic import events
from zmqgrad.elastic.events import NodeState
from zmqgrad.elastic.executor import MAX_WAIT_SECONDS, OperatorExecutor
from zmqgrad.elastic.operators import (
    Action,
    Context,
    Operator,
    await_departure,
    close,
    exit_round,
    join,
    joining,
    keep_alive,
    retire,
    return_to_line,
    spares,
)
from zmqgrad.elastic.round_stores import RoundStores, SharedStore, await_address, is_intact
from zmqgrad.elastic.settings import RendezvousSettings
from zmqgrad.elastic.state import NodeDesc, RendezvousState, new_node
from zmqgrad.elastic.state_holder import RendezvousBackend, StateHolder
from zmqgrad.elastic.transitions import num_admissible
from zmqgrad.errors import RendezvousConnectionError, RendezvousError
from zmqgrad.runtime.arguments import check_instance
from zmqgrad.runtime.clock import MONOTONIC, Clock
from zmqgrad.store import Store
from zmqgrad.transport import tap

logger = logging.getLogger(__name__)

LATEST_SECONDS = 0.5
"""How long they wait for the backend while this node is in a round; then they use the last state."""

LEASE_MARGIN = 0.2
"""Fraction of the expiry by which a node gives up before others may remove it.

It covers differences between the rates of clocks, and the time that stopping the workers takes.
"""

NOTICE_SECONDS = 60.0
"""How often a node that tries to reach the backend again says so."""

LEAVE_SECONDS = 5.0
"""How long leaving the round may take when a handler is closed."""


class Rendezvous(NamedTuple):
    """A completed round, as one of its nodes sees it.

    Example:
        >>> current = handler.next_rendezvous()  # doctest: +SKIP
        >>> current.rank, current.world_size, current.round  # doctest: +SKIP
        (0, 2, 0)
    """

    store: Store
    """Shared by the nodes of this round only."""
    rank: int
    world_size: int
    round: int


class RendezvousHandler:
    """Takes part in a rendezvous. Thread-safe. At the end of a ``with`` block it is closed.

    Args:
        settings: equal on all nodes.
        backend: where the state is shared.
        store: what the nodes of a round are given, with a prefix of their own; or what opens their stores.
        node: this node; None: a new descriptor.
        clock: monotonic; for tests.

    Attributes:
        notify: called with text for the user: what joining a round waits for. Logs it, unless it is replaced.

    Example:
        >>> with create_handler("zmqgrad", "host0:29400", "job", 2, 4) as handler:  # doctest: +SKIP
        ...     current = handler.next_rendezvous()
    """

    def __init__(
        self,
        settings: RendezvousSettings,
        backend: RendezvousBackend,
        store: Store | RoundStores,
        node: NodeDesc | None = None,
        clock: Clock = MONOTONIC,
    ) -> None:
        check_instance("settings", settings, RendezvousSettings, "a RendezvousSettings")
        check_instance("backend", backend, RendezvousBackend, "a RendezvousBackend")
        check_instance("store", store, (Store, RoundStores), "a store of zmqgrad.store, or a RoundStores")
        self.node = new_node() if node is None else node
        self._settings = settings
        self._backend = backend
        self._stores = store if isinstance(store, RoundStores) else SharedStore(store)
        self._clock = clock
        self._lock = threading.Lock()  # guards changes of _holder
        self._holder = StateHolder(self.node, backend, settings, clock)
        self._executor = OperatorExecutor(self.node, self._holder, settings)
        self._heartbeats: _Heartbeats | None = None
        self._cancelled = math.inf  # when joining was cancelled
        self._closed = False
        self._shut_down = False
        self._has_joined = False
        self._noticed = -math.inf  # when the user was last told that the backend does not reply
        self._line: tuple[int, int] | None = None  # the place of this node among the spares
        self.notify: Callable[[str], None] = self._log
        self._record = partial(events.record, settings.run_id, self.node)

    def _log(self, text: str) -> None:
        logger.warning("%s: %s: %s", self._settings.run_id, self.node, text)

    def get_backend(self) -> str:
        """Name of the backend."""
        return self._backend.name

    def get_run_id(self) -> str:
        """The id of the job."""
        return self._settings.run_id

    @property
    def settings(self) -> RendezvousSettings:
        """As given."""
        return self._settings

    @property
    def is_host(self) -> bool:
        """Whether this process serves the state, or the store of the round, to the other nodes."""
        return self._backend.is_host or self._stores.serves_now

    def next_rendezvous(self) -> Rendezvous:
        """Leave the current round, and wait until this node takes part in a complete one.

        A node beyond ``max_nodes`` waits without limit, as a spare. A backend that does not reply any more is
        tried again for ``settings.timeout.join``.

        Returns:
            rank, world size, number and store of that round.

        Raises:
            RendezvousClosedError: if the rendezvous is closed.
            RendezvousGracefulExitError: if it was closed while this node waited for its first round.
            RendezvousTimeoutError: if no round completes within ``settings.timeout.join``.
            RendezvousConnectionError, RendezvousStateError: if the backend, or the store that rank 0 serves,
                cannot be used.
        """
        self._stop_heartbeats()
        self._record("next_rendezvous", "joins the rendezvous", NodeState.INIT)
        deadline = self._clock.now() + self._settings.timeout.join
        try:
            while (joined := self._join_round(deadline)) is None:
                pass  # rank 0 was lost before it served a store
        except RendezvousError as e:
            self._record("next_rendezvous", str(e), NodeState.FAILED, error_trace=traceback.format_exc())
            raise
        message = f"round {joined.round}: rank {joined.rank} of {joined.world_size}"
        self._has_joined = True
        self._record("next_rendezvous", message, rank=joined.rank)
        return joined

    def _join_round(self, deadline: float) -> Rendezvous | None:
        """Take part in one round. Returns None if it ended before all its nodes could use its store."""
        with self._lock:
            self._persist(return_to_line, deadline)
            self._persist(joining(self._join), deadline)
            state = self._holder.state
            # What the round agreed on when it completed: some of its nodes may have left since.
            number, rank, size = state.round, state.completed_ranks[self.node], len(state.completed_ranks)
            if self._stores.are_served and not self._publish_store(number, rank, deadline):
                return None
            address = self._holder.state.store_address
        self._heartbeats = _Heartbeats(self)
        try:
            store = self._stores.open(self.get_run_id(), number, address, self._settings.expiry_seconds)
        except BaseException as e:
            self._stop_heartbeats()
            if isinstance(e, RendezvousConnectionError) and not self._is_intact(number):
                return None
            raise
        return Rendezvous(store, rank, size, number)

    def _publish_store(self, number: int, rank: int, deadline: float) -> bool:
        """Publish the store of a round, or wait until rank 0 has. Returns whether the round goes on."""
        if rank == 0:
            self._retry(partial(self._write_address, number, self._stores.serve()))
        else:
            self._persist(self._cancellable(await_address(number)), deadline)
        return is_intact(self._holder.context(), number)

    def _write_address(self, number: int, address: str) -> None:
        self._holder.sync()  # an attempt before may have written it, or not
        while is_intact(self._holder.context(), number) and self._holder.state.store_address != address:
            self._holder.state.store_address = address
            self._holder.mark_dirty()
            self._holder.sync()

    def _is_intact(self, number: int) -> bool:
        with self._lock:
            self._retry(self._holder.sync)
            return is_intact(self._holder.context(), number)

    def _persist(self, operator: Operator, deadline: float) -> None:
        self._retry(partial(self._executor.run, operator, deadline))

    def _retry(self, request: Callable[[], object]) -> None:
        """Make ``request``; again while the backend does not reply, as long as joining may take."""
        while True:
            try:
                request()
                return
            except RendezvousConnectionError as e:
                now, replied = self._clock.now(), self._holder.synced
                if replied is None or self._backend.is_lost:
                    raise
                left = min(replied + self._settings.timeout.join, self._cancelled) - now
                if left <= 0:
                    raise
                if self._noticed < replied:
                    self.notify(f"{e}. Trying again, for up to {left:.0f} s (join_timeout)")
                elif now - self._noticed >= NOTICE_SECONDS:
                    self.notify(f"still no reply; trying again, for up to {left:.0f} s")
                else:
                    now = self._noticed
                self._noticed = now
                self._holder.wait_for_change(min(left, MAX_WAIT_SECONDS))

    def _join(self, context: Context, deadline: float) -> Action:
        """:func:`join`, which can be cancelled, and says so if this node is a spare."""
        waiting = spares(context.state, context.settings)
        line = (waiting.index(self.node) + 1, len(waiting)) if self.node in waiting else None
        if line is not None and line != self._line:
            self.notify(
                f"spare {line[0]} of {line[1]}: the job has all of its nodes ({self._settings.max_nodes}); "
                f"waiting until one is lost, or the job ends"
            )
        self._line = line
        return join(context, min(deadline, self._cancelled))

    def _cancellable(self, operator: Operator) -> Operator:
        def cancellable(context: Context, deadline: float) -> Action:
            return operator(context, min(deadline, self._cancelled))

        return cancellable

    def cancel(self) -> None:
        """Let :meth:`next_rendezvous`, also one that runs in another thread, end soon with a timeout."""
        self._cancelled = self._clock.now()

    def is_closed(self) -> bool:
        """Whether no further round begins. False if the backend cannot be reached."""
        return self._latest().closed

    def is_retired(self) -> bool:
        """Whether the process that served the state has left, as no node used it: connect again."""
        return self._holder.state.retired

    def num_nodes_waiting(self) -> int:
        """How many waiting nodes the next round would admit. If any, call :meth:`next_rendezvous`.

        0 before this node has joined a round. Spares do not count; see :meth:`spares`.
        """
        return num_admissible(self._latest(), self._settings) if self._has_joined else 0

    def spares(self) -> list[NodeDesc]:
        """The nodes that wait although the job has ``max_nodes``, the one that follows next first."""
        return spares(self._latest(), self._settings)

    def nodes(self) -> list[NodeDesc]:
        """The nodes that take part in the round now, sorted."""
        return sorted(self._latest().participants)

    def lost_nodes(self) -> list[NodeDesc]:
        """The nodes of the completed round that have left it or died, sorted."""
        state = self._latest()
        return sorted(state.completed_ranks.keys() - state.participants.keys()) if state.complete else []

    @property
    def serves_rounds(self) -> bool:
        """Whether rank 0 serves the store of each round. A lost store then ends a round, not the job."""
        return self._stores.are_served

    def has_lost_store(self) -> bool:
        """Whether the store of the round does not reply any more, because the node that served it is lost."""
        if not self.serves_rounds:
            return False
        state = self._latest()
        return state.complete and 0 not in state.participants.values()

    def wait_for_change(self, seconds: float) -> None:
        """Wait at most ``seconds`` until another node may have changed the state, and read it then."""
        if self._holder.wait_for_change(seconds):
            self._latest(cache_seconds=0.0)

    def leave(self) -> None:
        """Leave the current round, so that the other nodes need not wait for the heartbeat to expire.

        Raises:
            RendezvousError: if the backend cannot be used.
        """
        self._stop_heartbeats()
        with self._lock:
            self._executor.run(exit_round, self._clock.now() + self._settings.timeout.heartbeat)

    def _latest(self, cache_seconds: float | None = None) -> RendezvousState:
        cache_seconds = self._backend.cache_seconds if cache_seconds is None else cache_seconds
        heartbeats = self._heartbeats
        if heartbeats is not None:
            # Its thread reads: an agent must not miss the end of its lease if the backend does not reply.
            if not self._holder.is_fresh(cache_seconds):
                heartbeats.refresh(LATEST_SECONDS)
            return self._holder.state
        with self._lock:
            try:
                self._holder.sync(cache_seconds)
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

    def report_death(self, node: NodeDesc, number: int) -> None:
        """Remove another node before its heartbeat expires. Changes nothing if another round is under way.

        Args:
            node: its process, and all of its workers, have ended before it has left the round. You must be
                sure.
            number: of the round.

        Raises:
            RendezvousError: if the backend cannot be used.
        """
        with self._lock:
            self._holder.remove_ended(node, number)

    def next_look(self) -> float:
        """Seconds until this node should call :meth:`keep_alive`, so that it notices in time who is dead."""
        # Twice in each interval, so that no delay adds up; and not all nodes of a round at the same time, as
        # only one of them could write then.
        pause = self._settings.keep_alive_interval / 2 * random.uniform(1.0, 1.2)
        return min(pause, self._holder.next_expiry(), threading.TIMEOUT_MAX)

    def lease_left(self) -> float:
        """Seconds for which this node surely belongs to its round.

        When they are over, you must stop the workers of this node: other nodes may remove it soon, and form a
        new round without it. Not positive if the node was removed already. Never waits for the backend.
        """
        # Without the lock: the thread that renews the lease holds it while it waits for the backend.
        if self.node not in self._holder.state.participants:
            return 0.0
        expiry = self._settings.expiry_seconds * (1 - LEASE_MARGIN)
        return self._holder.renewed + expiry - self._clock.now()

    def shutdown(self) -> bool:
        """Stop, and close the rendezvous for all nodes. Returns whether it is closed. Can be repeated.

        A thread that joins gets an error soon.
        """
        self.cancel()  # otherwise this would wait for its lock until it has joined
        self.stop()
        if not self._shut_down:
            try:
                self.set_closed()
            except RendezvousError as e:
                self._log(f"cannot close the rendezvous: {e}")
                return False
            self._shut_down = True
        return True

    def stop(self) -> None:
        """Stop to renew the heartbeat: other nodes go on without this one. Idempotent."""
        self._stop_heartbeats()
        tap.unregister(self._executor)

    def close(self, leave: bool = True) -> None:
        """Leave the round, stop, and close the backend and the stores of rounds. Idempotent.

        Args:
            leave: False: this node has left already, or the backend does not reply.

        A node that serves the state, or the store of the round, waits until the others have left the round,
        or their heartbeats have expired. If some take part in the next one by then, its process goes on to
        serve the state. Otherwise it retires the state, which nodes that are about to join learn at once.
        A thread of this process that joins gets an error soon.
        """
        if self._closed:
            return
        with ExitStack() as steps:  # which go on after one that Ctrl-C has interrupted
            steps.callback(self._stop_heartbeats)  # if stop() is interrupted
            steps.callback(self._close_backend)
            steps.callback(self._stores.close)
            if leave:
                steps.callback(self._leave_for_good)
            self._closed = True
            self.cancel()  # as in shutdown()
            self.stop()

    def __enter__(self) -> RendezvousHandler:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _leave_for_good(self) -> None:
        deadline, number = self._clock.now() + LEAVE_SECONDS, self._holder.state.round
        try:
            with self._lock:
                self._executor.run(exit_round, deadline)
                if self.is_host:
                    self._executor.run(await_departure(number), deadline + self._settings.expiry_seconds)
        except RendezvousError as e:
            logger.info("%s: %s could not leave in order: %s", self.get_run_id(), self.node, e)

    def _close_backend(self) -> None:
        in_use = self._backend.is_host
        try:
            in_use = in_use and not self._retire()
        finally:
            self._backend.close(in_use=in_use)

    def _retire(self) -> bool:
        """Retire the state that this process serves, unless other nodes use it. Returns whether none does."""
        # A node that reads that it is retired would else connect again and again until the server is closed.
        self._backend.admit_newcomers(False)
        try:
            with self._lock:
                self._executor.run(retire, self._clock.now() + LEAVE_SECONDS)
        except RendezvousError as e:
            logger.warning("%s: %s could not retire the state: %s", self.get_run_id(), self.node, e)
        except BaseException:
            self._backend.admit_newcomers(True)  # for its server is left open
            raise
        state = self._holder.state
        is_unused = state.closed or not {*state.participants, *state.wait_list} - {self.node}
        self._backend.admit_newcomers(not is_unused)
        return is_unused

    def _stop_heartbeats(self) -> None:
        heartbeats = self._heartbeats
        if heartbeats is not None:
            heartbeats.stop()
            if self._heartbeats is heartbeats:  # only now: an interrupt would leave nobody to stop them
                self._heartbeats = None


class _Heartbeats:
    """The thread that renews the heartbeat of a handler, and notices which other nodes are dead."""

    def __init__(self, handler: RendezvousHandler) -> None:
        self._stopped, self._wanted, self._done = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(
            target=_renew,
            args=(weakref.ref(handler), self._stopped, self._wanted, self._done, handler.next_look()),
            name=f"zmqgrad-rendezvous-{handler.node}",
            daemon=True,
        )
        self._thread.start()

    def refresh(self, seconds: float) -> None:
        """Read the state now; wait for that, at most ``seconds``."""
        self._done.clear()
        self._wanted.set()
        self._done.wait(seconds)

    def stop(self) -> None:
        self._stopped.set()
        self._wanted.set()
        self._thread.join()


def _renew(
    handler: weakref.ref[RendezvousHandler],
    stopped: threading.Event,
    wanted: threading.Event,
    done: threading.Event,
    pause: float,
) -> None:
    while True:
        wanted.wait(pause)
        wanted.clear()
        alive = handler()
        if alive is None or stopped.is_set():
            return
        try:
            alive.keep_alive()
        except RendezvousError as e:
            logger.warning("%s: the heartbeat of %s was not renewed: %s", alive.get_run_id(), alive.node, e)
        done.set()
        pause = alive.next_look()
        del alive
