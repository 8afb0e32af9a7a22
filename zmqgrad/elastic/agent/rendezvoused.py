"""Agrees with the agents of other nodes through a rendezvous, and the store of each of its rounds.

Keys in the store of a round: ``agent/node/<rank>``: what each agent publishes (NodeInfo); ``agent/failure``:
the first failure that counts; ``agent/exit/<rank of a worker>``: whether it succeeded (see Exited);
``agent/asked``: the first node that had a failure, and ``agent/alive/<rank>``: each agent's reply to it;
``agent/left/<rank>``, at the end of the job.

One thread carries out the calls in order, because each may wait for other nodes. A second one, for each
round, waits for changes of the rendezvous; the store's own threads call back for keys of the round.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from zmqgrad.elastic.agent.coordination import Coordinator
from zmqgrad.elastic.agent.death_watch import DeathWatch
from zmqgrad.elastic.agent.events import (
    Ask,
    Asked,
    Confirm,
    Confirmed,
    CoordinatorRequest,
    Exited,
    Failure,
    Join,
    Joined,
    Leave,
    Left,
    MembershipChanged,
    Notice,
    RemoteFailure,
    RendezvousFailed,
    ReportExits,
    ReportFailure,
)
from zmqgrad.elastic.agent.opening import reply_seconds
from zmqgrad.elastic.agent.ranks import NodeInfo, Placement, in_order, place
from zmqgrad.elastic.backends.store import store_is_lost
from zmqgrad.elastic.handler import Rendezvous, RendezvousHandler
from zmqgrad.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
    StoreError,
    StoreTimeoutError,
)
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import Store

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""How long one wait for other nodes takes at most: a node that died changes nothing by itself."""

LEAVE_SECONDS = 10.0
"""How long the agent that serves the store waits at the end for the others, which still read it."""

CLOSE_SECONDS = 5.0
"""How long the threads may take to end."""

_FAILURE = "agent/failure"
_NODE = "agent/node/"
_EXIT = "agent/exit/"
_ASKED = "agent/asked"
_ALIVE = "agent/alive/"
_SUCCESS = b"succeeded"
_LEFT = "agent/left/"


class RendezvousCoordinator(Coordinator):
    """Takes part in a rendezvous with the agents of other nodes.

    Args:
        open_rendezvous: opens the rendezvous; called once, in the thread of this coordinator.
        describe: returns what this node publishes, given the number of restarts. The node is filled in.
    """

    def __init__(
        self, open_rendezvous: Callable[[], RendezvousHandler], describe: Callable[[int, str], NodeInfo]
    ) -> None:
        super().__init__()
        self._open = open_rendezvous
        self._describe = describe
        self._opened: RendezvousHandler | None = None
        self._round: _Round | None = None
        self._is_lost = False  # the store does not reply
        self._closing = threading.Event()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="zmqgrad-agent-rendezvous", daemon=True)
        self._thread.start()

    @property
    def round_store(self) -> Store | None:
        round = self._round
        return None if round is None else round.store

    def carry_out(self, request: CoordinatorRequest) -> None:
        match request:
            case Join(restarts):
                self._commands.put(lambda: self._join(restarts))
            case ReportFailure(failure):
                self._report_first(_FAILURE, failure.encode())
            case ReportExits(ranks, succeeded):
                for rank in ranks:
                    self._report_first(f"{_EXIT}{rank}", _SUCCESS if succeeded else b"failed")
            case Ask(node_rank):
                self._report_first(_ASKED, str(node_rank))
            case Confirm(node_rank):
                self._report_first(f"{_ALIVE}{node_rank}", "alive")
            case Leave(close):
                self._begin_leaving(close)

    def _begin_leaving(self, close: bool) -> None:
        self._closing.set()
        if self._opened is None:  # still connecting: nobody knows this node
            self.events.post(Left())
            return
        self._opened.cancel()
        self._commands.put(lambda: self._leave(close))

    def lease_left(self) -> float:
        return 0.0 if self._opened is None else self._opened.lease_left()

    def notice_seconds(self) -> float:
        return 0.0 if self._opened is None else self._opened.settings.expiry_seconds + 2 * LOOK_SECONDS

    def close(self) -> None:
        self._closing.set()
        self._commands.put(None)
        if self._opened is not None:
            self._opened.cancel()
            self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive() and self._opened is not None:
            logger.warning("the rendezvous does not reply; its thread is left behind")
        self.events.close()

    # ---- in the thread ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (command := self._commands.get()) is not None:
            try:
                command()
            except Exception as error:
                if isinstance(error, StoreError) and self._opened and not self._opened.serves_rounds:
                    error = store_is_lost(error)  # the rounds share the store of the rendezvous
                # Then there is nothing to leave, or nobody who could be told.
                self._is_lost |= isinstance(error, RendezvousConnectionError | RendezvousClosedError)
                self.events.post(RendezvousFailed(error))
        self._end_round()
        if self._opened is not None:
            with suppress(RendezvousError, StoreError):  # the store may be gone by now
                self._opened.close(leave=False)

    def _join(self, restarts: int) -> None:
        self._end_round()
        if self._opened is None:
            self._opened = self._open()
            self._opened.notify = lambda text: self.events.post(Notice(text))
        handler = self._opened
        deadline: Deadline | None = None
        while not self._closing.is_set():
            formed = handler.next_rendezvous()
            # From here on, as this node may have been a spare for any time.
            deadline = deadline or Deadline.after(handler.settings.timeout.join)
            self._is_lost = False
            formed.store.set_timeout(reply_seconds(handler.settings.expiry_seconds))
            try:
                found = self._agree(formed, restarts, deadline)
            except StoreError as error:
                if deadline.passed():
                    raise
                logger.info("round %d has lost its store: %s", formed.round, error)
                continue
            if found is not None:
                infos, placement = found
                self._round = _Round(handler, formed.store, placement, infos, self.events.post)
                self.events.post(Joined(placement))
                self._round.start()
                return

    def _agree(
        self, formed: Rendezvous, restarts: int, deadline: Deadline
    ) -> tuple[list[NodeInfo], Placement] | None:
        """Exchange information with the agents of the round; None if one of them was lost meanwhile."""
        assert self._opened is not None
        handler = self._opened
        formed.store.set(f"{_NODE}{formed.rank}", self._describe(restarts, str(handler.node)).encode())
        keys = [f"{_NODE}{rank}" for rank in range(formed.world_size)]
        while not self._closing.is_set():
            try:
                formed.store.wait(keys, LOOK_SECONDS)
            except StoreTimeoutError:
                if handler.lost_nodes() or handler.lease_left() <= 0:
                    return None
                if deadline.passed():
                    raise RendezvousTimeoutError(
                        f"round {formed.round}: not all of its {formed.world_size} agents published their "
                        "number of workers in time"
                    ) from None
            else:
                published = [NodeInfo.decode(data) for data in formed.store.multi_get(keys)]
                infos = in_order(published)
                return infos, place(infos, infos.index(published[formed.rank]), formed.round)
        return None

    def _report_first(self, key: str, value: str | bytes) -> None:
        """Set ``key`` in the store of the round, unless it is set."""
        self._commands.put(lambda: self._report(key, value))

    def _report(self, key: str, value: str | bytes) -> None:
        if self._round is None:
            return
        try:
            self._round.store.compare_set(key, "", value)
        except StoreError as error:  # as in _Round.start: no request to join has failed
            self._round.on_lost_store(error)

    def _leave(self, close: bool) -> None:
        try:
            if self._opened is not None and not self._is_lost:
                self._leave_job(self._opened, close)
        except (RendezvousError, StoreError) as error:
            logger.info("left without notice: %s", error)
        finally:
            self._end_round()
            self.events.post(Left())

    def _leave_job(self, opened: RendezvousHandler, close: bool) -> None:
        round = self._round
        if round is not None:
            round.end()  # before the state changes, which wakes its thread
        if not close:
            opened.leave()
        else:
            opened.set_closed()
            if round is not None:
                round.leave(wait_for_others=opened.is_host)
        if round is not None:
            round.join()

    def _end_round(self) -> None:
        round, self._round = self._round, None
        if round is not None:
            round.end()


class _Round:
    """Watches one round, and posts what happens."""

    def __init__(
        self,
        handler: RendezvousHandler,
        store: Store,
        placement: Placement,
        infos: list[NodeInfo],
        post: Callable[..., None],
    ) -> None:
        self.store = store
        self.place = placement
        self._handler = handler
        self._next = infos[(placement.node_rank + 1) % len(infos)]  # each node watches the next one
        self._death_watch: DeathWatch | None = None
        self._rank_of = {info.node: rank for rank, info in enumerate(infos)}
        self._addresses = [info.address for info in infos]
        self._workers = [place(infos, rank, placement.round).ranks for rank in range(len(infos))]
        self._post = post
        self._succeeded: set[int] = set()  # workers
        self._failed = False
        self._ended = threading.Event()
        self._lock = threading.Lock()  # guards _succeeded and _failed
        name = f"zmqgrad-agent-round-{placement.round}"
        self._thread = threading.Thread(target=self._monitor, name=name, daemon=True)

    def start(self) -> None:
        """Begin to watch: the nodes first, as the store may be lost already."""
        self._thread.start()
        if self._next.watch_port and self.place.num_nodes > 1:
            self._death_watch = DeathWatch(self._next.address, self._next.watch_port, self._on_death)
        try:
            self.store.watch_prefix("agent/", self._on_key)
            for key in self.store.list_keys("agent/"):  # written before the watch
                self._on_key(key, None, self.store.get(key))
        except StoreError as error:  # the agent may have begun to join the next round, so none of that failed
            self.on_lost_store(error)

    def on_lost_store(self, error: StoreError) -> None:
        """End the round, as its nodes learn no more of each other."""
        logger.info("round %d has lost its store: %s", self.place.round, error)
        served = (
            f"node 0 at {self._addresses[0]}, which serves the store" if self._handler.serves_rounds else ""
        )
        text = "the store of the round does not reply: restart"
        self._post(MembershipChanged(self.place.round, text, served))

    def end(self) -> None:
        """Stop watching. Does not wait for the thread, which ends at its next look. Idempotent."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._death_watch is not None:
            self._death_watch.close()
        if self._handler.has_lost_store():
            return
        with suppress(StoreError):  # the store may be gone
            self.store.unwatch_prefix("agent/", self._on_key)

    def join(self) -> None:
        """Wait for the threads of an ended round, which use the store."""
        self._thread.join(2 * LOOK_SECONDS)
        if self._death_watch is not None:
            self._death_watch.join()

    def leave(self, wait_for_others: bool) -> None:
        """Tell the others that this agent reads the store no more; wait until they do not, either."""
        self.store.set(f"{_LEFT}{self.place.node_rank}", "")
        deadline = Deadline.after(LEAVE_SECONDS)
        while wait_for_others and not deadline.passed():
            lost = {self._rank_of.get(str(node)) for node in self._handler.lost_nodes()}
            left = [f"{_LEFT}{rank}" for rank in range(self.place.num_nodes) if rank not in lost]
            try:
                self.store.wait(left, min(LOOK_SECONDS, deadline.left()))
            except StoreTimeoutError:
                continue
            return

    def _on_death(self) -> None:
        nodes = [node for node in self._handler.nodes() if str(node) == self._next.node]
        try:
            for node in nodes:
                self._handler.report_death(node, self.place.round)
        except RendezvousError as error:
            logger.info("%s has ended, and is removed later: %s", self._next.node, error)

    def _on_key(self, key: str, old: bytes | None, new: bytes | None) -> None:
        if self._ended.is_set() or new is None:
            return
        if key == _FAILURE:
            self._on_failure(new)
        elif key.startswith(_EXIT):
            rank, succeeded = int(key[len(_EXIT) :]), new == _SUCCESS
            if succeeded:
                with self._lock:
                    self._succeeded.add(rank)
            self._post(Exited(self.place.round, rank, succeeded))
        elif key == _ASKED:
            self._post(Asked(self.place.round, int(new)))
        elif key.startswith(_ALIVE):
            self._post(Confirmed(self.place.round, int(key[len(_ALIVE) :])))

    def _on_failure(self, data: bytes) -> None:
        with self._lock:
            if self._failed:
                return
            self._failed = True
        failure = Failure.decode(data)
        if failure.node_rank != self.place.node_rank:
            self._post(RemoteFailure(self.place.round, failure))

    def _monitor(self) -> None:
        while not self._ended.is_set():
            change = self._change()
            if change is not None and not self._ended.is_set():
                self._post(change)
                if not change.joined:
                    return
            self._handler.wait_for_change(LOOK_SECONDS)

    def _change(self) -> MembershipChanged | None:
        """What has changed about the nodes, unless a failure is the reason."""
        with self._lock:
            succeeded = {n for n, ranks in enumerate(self._workers) if self._succeeded.issuperset(ranks)}
        lost = [
            rank
            for node in self._handler.lost_nodes()
            if (rank := self._rank_of.get(str(node))) != self.place.node_rank and rank not in succeeded
        ]
        joined = self._handler.num_nodes_waiting()
        if lost and not self._reads_failure():
            ranks = sorted(rank for rank in lost if rank is not None)
            nodes = ", ".join(f"node {rank}" for rank in ranks)
            named = ", ".join(f"node {rank} at {self._addresses[rank]}" for rank in ranks)
            remaining = self._count(joined - len(lost))
            text = f"{nodes} of {self.place.num_nodes} left or was lost: restart as {remaining}"
            return MembershipChanged(self.place.round, text, f"{named}, which left or was lost")
        if joined and not lost and not succeeded:
            arrived = "a node" if joined == 1 else f"{joined} nodes"
            text = f"{arrived} joined: restart as {self._count(joined)}"
            return MembershipChanged(self.place.round, text, joined=True)
        return None

    def _reads_failure(self) -> bool:
        """Whether a failure was reported: then the nodes left because of it, and its event says more."""
        if self._handler.has_lost_store():
            return False
        try:
            if self.store.check([_FAILURE]):
                self._on_failure(self.store.get(_FAILURE))
                return True
        except StoreError as error:
            logger.debug("%s", error)
        return False

    def _count(self, change: int) -> str:
        number = self.place.num_nodes + change
        return f"{number} node" if number == 1 else f"{number} nodes"
