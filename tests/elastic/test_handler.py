"""Rendezvous over real stores: several handlers in threads, each with a client of its own."""

from __future__ import annotations

import gc
import json
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from tests.elastic.simulation import DriftingClock, Fault, SimulatedBackend
from tests.support.waiting import eventually
from tools.ports import free_port
from zmqgrad.elastic import (
    NodeDesc,
    Rendezvous,
    RendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
    StoreBackend,
)
from zmqgrad.elastic.endpoint import open_endpoint
from zmqgrad.elastic.events import NodeState, RdzvEvent
from zmqgrad.elastic.executor import OperatorExecutor
from zmqgrad.elastic.handler import LEASE_MARGIN
from zmqgrad.elastic.operators import join
from zmqgrad.elastic.round_stores import RoundStores
from zmqgrad.elastic.state import decode
from zmqgrad.elastic.state_holder import StateHolder, Token
from zmqgrad.errors import (
    ArgumentTypeError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
    StoreTimeoutError,
)
from zmqgrad.store import HashStore, Store, TCPStore
from zmqgrad.transport.tap import Tracer

WAIT = 20.0
INTERVAL = 0.2

Join = Callable[..., "Future[Rendezvous]"]


class Town:
    """Handlers of one job, and threads in which they join."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.pool = ThreadPoolExecutor(8)
        self.handlers: list[RendezvousHandler] = []
        self.backends: list[StoreBackend] = []
        self.clients: list[Store] = []

    def handler(
        self,
        low: int = 2,
        high: int = 4,
        last_call: float = 0.2,
        expiry: float = 3 * INTERVAL,
        **timeouts: float,
    ) -> RendezvousHandler:
        settings = RendezvousSettings(
            "job",
            low,
            high,
            RendezvousTimeout(**{"join": WAIT, "last_call": last_call, **timeouts}),
            expiry / 3,
            3,
        )
        client = self.store.clone()
        backend = StoreBackend(client, "job")
        made = RendezvousHandler(settings, backend, client, NodeDesc("host", 1, len(self.handlers)))
        self.handlers.append(made)
        self.backends.append(backend)
        self.clients.append(client)
        return made

    def join(self, *handlers: RendezvousHandler) -> list[Future[Rendezvous]]:
        return [self.pool.submit(handler.next_rendezvous) for handler in handlers]

    def close(self) -> None:
        for handler in self.handlers:
            handler.stop()
        for backend, client in zip(self.backends, self.clients, strict=True):
            backend.close()
            client.close()
        self.pool.shutdown()


@pytest.fixture(params=["memory", "tcp"])
def town(request: pytest.FixtureRequest) -> Iterator[Town]:
    if request.param == "memory":
        store: Store = HashStore(WAIT)
    else:
        store = TCPStore("127.0.0.1", 0, is_master=True, timeout=WAIT)
    made = Town(store)
    yield made
    made.close()
    store.close()


def results(futures: list[Future[Rendezvous]]) -> list[Rendezvous]:
    return [future.result(WAIT) for future in futures]


def test_a_round_is_complete_at_once_with_the_maximum_of_nodes(town: Town) -> None:
    made = [town.handler(2, 3, last_call=WAIT) for _ in range(3)]
    formed = results(town.join(*made))
    assert sorted(r.rank for r in formed) == [0, 1, 2]
    assert {(r.world_size, r.round) for r in formed} == {(3, 0)}
    formed[0].store.set("k", "1")
    assert formed[2].store.get("k") == b"1"
    assert made[0].lost_nodes() == []
    assert (made[0].get_run_id(), made[0].get_backend()) == ("job", "zmqgrad")


def test_a_round_is_complete_after_the_last_call_with_fewer(town: Town) -> None:
    formed = results(town.join(*[town.handler(2, 4) for _ in range(2)]))
    assert {r.world_size for r in formed} == {2}


def test_a_node_that_comes_later_waits_for_the_next_round_where_all_keep_their_ranks(town: Town) -> None:
    first = [town.handler() for _ in range(2)]
    ranks = {h.node: r.rank for h, r in zip(first, results(town.join(*first)), strict=True)}
    late = town.handler()
    waiting = town.join(late)
    eventually(lambda: [h.num_nodes_waiting() for h in first], lambda n: n == [1, 1])
    formed = results(waiting + town.join(*first))
    assert {(r.world_size, r.round) for r in formed} == {(3, 1)}
    assert formed[0].rank == 2
    assert {h.node: r.rank for h, r in zip(first, formed[1:], strict=True)} == ranks
    formed[0].store.set("k", "1")
    assert formed[1].store.check(["k"])


def test_a_node_that_dies_is_removed_and_the_next_round_forms_without_it(town: Town) -> None:
    made = [town.handler(2, 3) for _ in range(3)]
    results(town.join(*made))
    made[2].stop()  # its heartbeat is not renewed any more
    eventually(lambda: made[0].lost_nodes(), lambda lost: lost == [made[2].node])
    assert made[1].lease_left() > 0
    formed = results(town.join(*made[:2]))
    assert {(r.world_size, r.round) for r in formed} == {(2, 1)}
    assert made[2].lease_left() <= 0, "it knows that it has to stop its workers"


def test_a_node_whose_process_has_ended_is_removed_at_once(town: Town) -> None:
    made = [town.handler(2, 3, expiry=1000.0) for _ in range(3)]
    results(town.join(*made))
    assert made[0].nodes() == [handler.node for handler in made]
    made[2].stop()
    made[0].report_death(made[2].node, 0)
    eventually(made[1].lost_nodes, lambda lost: lost == [made[2].node])
    formed = results(town.join(*made[:2]))
    assert {(r.world_size, r.round) for r in formed} == {(2, 1)}
    made[0].report_death(made[1].node, 0)  # it has left round 0 meanwhile: that was no death
    assert made[1].lease_left() > 0
    assert made[0].lost_nodes() == []


def test_a_node_renews_its_lease_while_it_lives(town: Town) -> None:
    made = [town.handler(1, 1)]
    results(town.join(*made))
    most = 3 * INTERVAL * (1 - LEASE_MARGIN)
    assert 0 < made[0].lease_left() <= most
    renewed = threading.Event()
    town.store.watch_key("zmqgrad/rendezvous/job", lambda old, new: renewed.set())
    for _ in range(3):
        assert renewed.wait(WAIT)
        renewed.clear()
    assert made[0].lease_left() > 0


def test_nodes_whose_heartbeats_are_never_due_follow_the_state(town: Town) -> None:
    made = [town.handler(2, 2, expiry=math.inf) for _ in range(2)]
    results(town.join(*made))
    assert made[0].lease_left() == math.inf
    made[1].leave()
    eventually(made[0].lost_nodes, lambda lost: lost == [made[1].node])


def test_heartbeats_wake_nobody(town: Town) -> None:
    made = [town.handler(2, 3) for _ in range(2)]
    results(town.join(*made))
    renewed = threading.Semaphore(0)
    town.store.watch_key("zmqgrad/rendezvous/job", lambda old, new: renewed.release())
    assert renewed.acquire(timeout=WAIT)
    made[0].num_nodes_waiting()  # by now it has been notified of the complete round, and has read it
    waiting = town.pool.submit(town.backends[0].wait_for_change, None, WAIT)
    for _ in range(4):
        assert renewed.acquire(timeout=WAIT)
    assert not waiting.done()
    late = town.handler(2, 3)
    joining = town.join(late)
    assert waiting.result(WAIT), "a node that joins does"
    late.cancel()
    with pytest.raises(RendezvousTimeoutError):
        joining[0].result(WAIT)


def test_a_closed_rendezvous_refuses_and_wakes_those_that_wait(town: Town) -> None:
    made = [town.handler(2, 3) for _ in range(2)]
    waiting = town.join(made[0])
    eventually(lambda: town.store.check(["zmqgrad/rendezvous/job"]))
    assert made[1].shutdown()
    with pytest.raises(RendezvousClosedError, match=r"'job' is closed, .* another id"):
        waiting[0].result(WAIT)
    with pytest.raises(RendezvousClosedError):
        made[1].next_rendezvous()
    assert made[0].is_closed()
    assert made[0].shutdown(), "closing it again is no error"


def test_too_few_nodes_in_time(town: Town) -> None:
    alone = town.handler(2, 3, join=0.3)
    with pytest.raises(
        RendezvousTimeoutError, match="did not complete in time: round 0 has 0 of 2 to 3 nodes"
    ):
        alone.next_rendezvous()
    formed = results(town.join(*[town.handler(2, 2) for _ in range(2)]))
    assert {r.world_size for r in formed} == {2}, "the node that gave up has left nothing"


def test_a_handler_that_is_dropped_stops_to_renew() -> None:
    store = HashStore(WAIT)
    settings = RendezvousSettings("job", 1, 1, keep_alive_interval=0.02)
    backend = StoreBackend(store, "job")
    handler = RendezvousHandler(settings, backend, store)
    handler.next_rendezvous()
    gone, before = weakref.ref(handler), threading.active_count()
    del handler
    gc.collect()
    assert gone() is None
    eventually(threading.active_count, lambda n: n < before)
    backend.close()
    store.close()


def test_a_node_that_joins_at_the_last_moment_keeps_the_server() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=WAIT)
    settings, client = RendezvousSettings("job", 1, 1), store.clone()
    late = RendezvousHandler(settings, StoreBackend(client, "job"), client)
    server = RendezvousHandler(settings, RacingBackend(store, late.next_rendezvous), store)
    server.next_rendezvous()
    server.close()
    assert late.next_rendezvous().round == 2, "it was in round 1, and joins again over the same store"
    store.clone().close()  # others can join, too
    late.close()
    client.close()
    open_endpoint(f"127.0.0.1:{store.port}", WAIT).close()


def test_who_reads_that_the_state_is_retired_is_not_admitted_again() -> None:
    """Else it would connect, read that and connect again for as long as the server takes to close."""
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=WAIT)
    server = RendezvousHandler(
        RendezvousSettings("job", 1, 1), RetiringBackend(store, "job", owned=True), store
    )
    server.next_rendezvous()
    server.close()
    assert RetiringBackend.admitted == [False]


class RetiringBackend(StoreBackend):
    """Notes whether a new client is admitted once the state is retired."""

    admitted: ClassVar[list[bool]] = []

    def set_state(
        self, state: bytes, token: Token = None, announce: bool = True
    ) -> tuple[bytes, Token, bool] | None:
        found = super().set_state(state, token, announce)
        if decode(state).retired:
            try:
                TCPStore("127.0.0.1", self._store.port, timeout=0.3).close()  # type: ignore[attr-defined]
                self.admitted.append(True)
            except StoreTimeoutError:
                self.admitted.append(False)
        return found


class RacingBackend(StoreBackend):
    """Lets another node join between the look of its own node at a state without nodes, and what follows."""

    def __init__(self, store: TCPStore, join: Callable[[], object]) -> None:
        super().__init__(store, "job", owned=True)
        self._joins = iter([join])
        self._is_empty = False

    def get_state(self) -> tuple[bytes, Token] | None:
        found = super().get_state()
        self._is_empty = found is not None and not decode(found[0]).participants
        return found

    def _race(self) -> None:
        if self._is_empty:
            for join in self._joins:
                join()

    def set_state(
        self, state: bytes, token: Token = None, announce: bool = True
    ) -> tuple[bytes, Token, bool] | None:
        self._race()
        return super().set_state(state, token, announce)

    def close(self, in_use: bool = False) -> None:
        self._race()
        super().close(in_use)


# ---- spares ------------------------------------------------------------------------------------------------


def test_a_spare_is_listed_and_takes_the_rank_of_a_lost_node(town: Town) -> None:
    made = [town.handler(2, 2) for _ in range(2)]
    ranks = [formed.rank for formed in results(town.join(*made))]
    late = [town.handler(2, 2), town.handler(2, 2, join=0.3)]
    said: list[str] = []
    late[0].notify = said.append
    waiting = town.join(late[0])
    eventually(made[0].spares, lambda nodes: nodes == [late[0].node])
    waiting += town.join(late[1])
    eventually(made[0].spares, lambda nodes: nodes == [late[0].node, late[1].node])
    assert [h.num_nodes_waiting() for h in made] == [0, 0], "they would exclude others"
    eventually(lambda: said[-1:], lambda last: last and last[0].startswith("spare 1 of 2: "))
    made[1].stop()  # dies
    eventually(made[0].num_nodes_waiting, lambda n: n == 1)
    formed = results([waiting[0], *town.join(made[0])])
    assert [r.rank for r in formed] == [ranks[1], ranks[0]]
    assert {(r.world_size, r.round) for r in formed} == {(2, 1)}
    eventually(made[0].spares, lambda nodes: nodes == [late[1].node])
    assert not waiting[1].done(), "without limit, whatever join_timeout is"
    made[0].shutdown()
    with pytest.raises(RendezvousGracefulExitError, match="was not needed"):
        waiting[1].result(WAIT)


def test_a_spare_that_is_cancelled_leaves_the_list(town: Town) -> None:
    member, spare = town.handler(1, 1), town.handler(1, 1)
    results(town.join(member))
    waiting = town.join(spare)
    eventually(member.spares)
    spare.cancel()
    with pytest.raises(RendezvousTimeoutError):
        waiting[0].result(WAIT)
    eventually(member.spares, lambda nodes: nodes == [])


def test_a_node_that_has_not_joined_knows_of_no_waiting_nodes(town: Town) -> None:
    member = town.handler(1, 2)
    results(town.join(member))
    joining = town.join(town.handler(1, 2))
    eventually(member.num_nodes_waiting, lambda n: n == 1)
    assert town.handler(1, 2).num_nodes_waiting() == 0
    results([*joining, *town.join(member)])


def test_shutdown_can_be_repeated(town: Town) -> None:
    handler = town.handler(1, 1)
    handler.next_rendezvous()
    assert handler.shutdown()
    handler.close()
    assert handler.shutdown()


@pytest.mark.parametrize("end", [RendezvousHandler.shutdown, RendezvousHandler.close])
def test_a_handler_that_is_ended_while_a_thread_joins(
    town: Town, end: Callable[[RendezvousHandler], object]
) -> None:
    """Also if another node would have to come, and ``join_timeout`` is far away."""
    handler, observer = town.handler(2, 2, join=3 * WAIT), town.handler(2, 2, join=3 * WAIT)
    joining = town.join(handler)
    eventually(observer.nodes, lambda nodes: nodes == [handler.node])
    town.pool.submit(end, handler).result(WAIT)
    with pytest.raises(RendezvousError):
        joining[0].result(WAIT)
    eventually(observer.nodes, lambda nodes: nodes == [])


def test_the_end_of_a_with_block_leaves_the_round(town: Town) -> None:
    with town.handler(1, 1, expiry=3 * WAIT) as handler:
        handler.next_rendezvous()
    (second,) = results(town.join(town.handler(1, 1, expiry=3 * WAIT)))  # no spare: the first has left
    assert second.round == 1


# ---- faults -----------------------------------------------------------------------------------------------


def test_a_state_that_was_lost_is_an_error_and_not_a_new_group(town: Town) -> None:
    made = [town.handler(1, 2) for _ in range(2)]
    results(town.join(*made))
    assert town.store.delete_key("zmqgrad/rendezvous/job")
    with pytest.raises(RendezvousStateError, match="has lost the state of the rendezvous 'job'"):
        made[0].next_rendezvous()
    with pytest.raises(RendezvousStateError, match="has lost the state"):
        made[1].set_closed()
    assert not made[0].shutdown()


def test_nodes_of_a_state_that_was_lost_take_no_part_in_the_group_that_others_have_formed(town: Town) -> None:
    """Its rounds begin with 0 again. A node that came in time saw that; later ones took it for their own."""
    made = [town.handler(1, 2) for _ in range(2)]
    results(town.join(*made))
    assert town.store.delete_key("zmqgrad/rendezvous/job")
    new = town.handler(1, 2)
    (joined,) = results(town.join(new))
    assert joined.round == 0
    with pytest.raises(
        RendezvousStateError, match=f"has lost the state .*, and {new.node} has begun another"
    ):
        made[0].next_rendezvous()
    assert made[0].lease_left() <= 0
    assert not made[1].shutdown()
    assert not new.is_closed()
    assert new.num_nodes_waiting() == 0


def test_what_another_program_wrote_is_an_error(town: Town) -> None:
    town.store.set("zmqgrad/rendezvous/job", b"\x80pickle")
    with pytest.raises(RendezvousStateError, match="malformed"):
        town.handler().next_rendezvous()
    with pytest.raises(RendezvousStateError, match="token of another backend"):
        town.backends[0].set_state(b"", 7)


def test_a_store_that_is_gone_is_an_error() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=WAIT)
    client = store.clone()
    backend = StoreBackend(client, "job")
    handler = RendezvousHandler(RendezvousSettings("job", 1, 1), backend, client)
    handler.next_rendezvous()
    client.set_timeout(1.5)
    store.close()
    with pytest.raises(RendezvousConnectionError, match="the process that served it has ended"):
        handler.next_rendezvous()
    assert not handler.shutdown()
    client.close()


def test_a_token_of_an_older_state_changes_nothing(town: Town) -> None:
    town.handler()
    backend = town.backends[0]
    assert backend.get_state() is None
    assert backend.set_state(b"1") == (b"1", b"1", True)
    assert backend.set_state(b"2") == (b"1", b"1", False)
    assert backend.set_state(b"2", b"1") == (b"2", b"2", True)
    assert backend.set_state(b"3", b"1") == (b"2", b"2", False)
    assert backend.get_state() == (b"2", b"2")
    town.store.delete_key("zmqgrad/rendezvous/job")
    assert backend.set_state(b"3", b"2") is None


def test_two_jobs_with_one_id_are_refused_while_nodes_live(town: Town) -> None:
    made = town.handler(1, 2)
    made.next_rendezvous()
    other = town.handler(1, 3)
    with pytest.raises(RendezvousStateError, match=r"'job' is in use with other settings: .*max_nodes=2.*=3"):
        other.next_rendezvous()
    with pytest.raises(RendezvousStateError, match="in use with other settings"):
        other.set_closed()
    assert made.lease_left() > 0
    assert not made.is_closed(), "the other job has changed nothing"
    made.close()
    assert other.next_rendezvous().world_size == 1, "settings may change between runs"


@pytest.mark.parametrize("journal", [True, False])
def test_a_store_that_restarts_in_a_round(tmp_path: Path, journal: bool) -> None:
    port, path = free_port(), tmp_path / "journal" if journal else None

    def serve() -> TCPStore:
        return TCPStore("127.0.0.1", port, is_master=True, timeout=WAIT, journal=path)

    store = serve()
    town = Town(store)
    made = [town.handler(2, 2) for _ in range(2)]
    results(town.join(*made))
    waiting = town.join(made[0])  # in the middle of the next round
    eventually(lambda: made[1].lost_nodes())
    store.close()
    store = serve()
    if journal:
        formed = results(waiting + town.join(made[1]))
        assert {(r.world_size, r.round) for r in formed} == {(2, 1)}
    else:
        for future in waiting + town.join(made[1]):
            with pytest.raises((RendezvousStateError, RendezvousConnectionError)):
                future.result(WAIT)
        assert [handler.lease_left() <= 0 for handler in made] == [True, True]
    town.close()
    store.close()


def test_an_agent_that_looks_at_its_round_does_not_wait_for_the_backend() -> None:
    backend = HangingBackend()
    settings = RendezvousSettings("job", 1, 1, keep_alive_interval=0.1)
    handler = RendezvousHandler(settings, backend, HashStore(WAIT))
    handler.next_rendezvous()
    backend.hang.clear()
    assert backend.hangs.wait(WAIT)
    eventually(lambda: not handler._holder.is_fresh(backend.cache_seconds))
    assert (handler.num_nodes_waiting(), handler.is_closed(), handler.lost_nodes()) == (0, False, [])
    eventually(handler.lease_left, lambda left: left <= 0)
    backend.hang.set()
    handler.stop()


class CutOffBackend(SimulatedBackend):
    """Does not reply while ``is_cut``; each request takes 15 s of ``clock`` then."""

    def __init__(self, clock: DriftingClock) -> None:
        super().__init__()
        self.clock, self.until = clock, -math.inf

    @contextmanager
    def _request(self) -> Iterator[None]:
        if self.clock.now() < self.until:
            self.clock.advance(15.0)
            raise RendezvousConnectionError("no store answered")
        yield

    def wait_for_change(self, token: Token, seconds: float) -> bool:
        self.clock.advance(seconds)
        return True


@pytest.mark.parametrize(("seconds", "notices"), [(60.0, 1), (500.0, 8)])
def test_a_node_that_is_cut_off_joins_again_once_the_path_is_back(seconds: float, notices: int) -> None:
    clock = DriftingClock(0.0, 1.0)
    backend = CutOffBackend(clock)
    settings = RendezvousSettings("job", 1, 2, RendezvousTimeout(join=600.0, last_call=1.0))
    handler = RendezvousHandler(settings, backend, HashStore(WAIT), clock=clock)
    said: list[str] = []
    handler.notify = said.append
    assert handler.next_rendezvous().round == 0
    backend.until = seconds
    assert handler.next_rendezvous().round == 1
    assert said[0] == "no store answered. Trying again, for up to 585 s (join_timeout)"
    assert len(said) == notices, "once, and then every minute"
    assert all(text.startswith("still no reply; trying again, for up to ") for text in said[1:])
    handler.stop()


def test_a_node_that_is_cut_off_gives_up_after_join_timeout() -> None:
    clock = DriftingClock(0.0, 1.0)
    backend = CutOffBackend(clock)
    handler = RendezvousHandler(RendezvousSettings("job", 1, 2), backend, HashStore(WAIT), clock=clock)
    handler.notify = lambda text: None
    backend.until = math.inf
    with pytest.raises(RendezvousConnectionError):
        handler.next_rendezvous()
    assert clock.now() == 15.0, "a backend that has never replied is an error at once"
    backend.until = 0.0
    handler.next_rendezvous()
    began, backend.until = clock.now(), math.inf
    with pytest.raises(RendezvousConnectionError):
        handler.next_rendezvous()
    assert 600.0 <= clock.now() - began <= 616.0
    handler.stop()


class LosingBackend(SimulatedBackend):
    """Loses single requests, or replies."""

    def wait_for_change(self, token: Token, seconds: float) -> bool:
        return True


class _ServedHere(RoundStores):
    are_served = True

    def serve(self) -> str:
        return "127.0.0.1:1"

    def open(self, run_id: str, number: int, address: str, timeout: float) -> HashStore:
        assert address == "127.0.0.1:1", "the others would wait for it in vain"
        return HashStore(WAIT)


@pytest.mark.parametrize("fault", Fault)
def test_no_request_that_is_lost_while_a_round_begins_ends_the_job(fault: Fault) -> None:
    """Rank 0 also publishes where it serves the store of the round."""
    number, last = 1, math.inf  # a backend that has never replied is an error
    while number < last:
        backend = LosingBackend()
        handler = RendezvousHandler(RendezvousSettings("job", 1, 1), backend, _ServedHere())
        handler.notify = lambda text: None
        backend.faults = {number: fault}
        assert handler.next_rendezvous().round == 0
        handler.stop()
        number, last = number + 1, backend.requests
    assert number > 3


class HangingBackend(SimulatedBackend):
    """Replies only while ``hang`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.hang, self.hangs = threading.Event(), threading.Event()
        self.hang.set()

    def get_state(self) -> tuple[bytes, Token] | None:
        if not self.hang.is_set():
            self.hangs.set()
        assert self.hang.wait(WAIT)
        return super().get_state()


def test_events_are_json_on_the_logger(town: Town, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zmqgrad.elastic.events")
    handler = town.handler(1, 1)
    handler.next_rendezvous()
    handler.shutdown()
    with pytest.raises(RendezvousClosedError):
        handler.next_rendezvous()
    logged = [r.getMessage() for r in caplog.records if r.name == "zmqgrad.elastic.events"]
    found = [msgspec.json.decode(line, type=RdzvEvent) for line in logged]
    assert [e.node_state for e in found] == [
        NodeState.INIT,
        NodeState.RUNNING,
        NodeState.SUCCEEDED,
        NodeState.INIT,
        NodeState.FAILED,
    ]
    assert {(e.run_id, e.hostname, e.pid, e.local_id) for e in found} == {("job", "host", 1, 0)}
    assert found[1].rank == 0
    assert "RendezvousClosedError" in found[-1].error_trace
    assert json.loads(logged[0])["node_state"] == "INIT"


class _Steps(Tracer):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def rendezvous_step(self, round_number: int, action: str, participants: int, waiting: int) -> None:
        self.seen.append((action, participants))


def test_a_step_is_traced_once_it_is_written() -> None:
    """Two nodes join at the same time: only one of them is the first of two participants."""
    store, settings = HashStore(WAIT), RendezvousSettings("job", 2, 2)
    tracer, executors = _Steps(), []
    for i in range(2):
        node = NodeDesc("host", 1, i)
        holder = StateHolder(node, StoreBackend(store, "job"), settings)
        executors.append(OperatorExecutor(node, holder, settings))
        executors[i].tracer = tracer
    first, second = executors
    for executor in (first, second, second, first, first):
        executor.step(join, math.inf)
    assert tracer.seen == [("ADD_TO_PARTICIPANTS", 1), ("ADD_TO_PARTICIPANTS", 2)]
    store.close()


def test_arguments_of_other_types() -> None:
    store, settings = HashStore(WAIT), RendezvousSettings("job", 1, 1)
    backend = StoreBackend(store, "job")
    with pytest.raises(ArgumentTypeError, match=r"^store must be a store of zmqgrad\.store, not NoneType$"):
        StoreBackend(None, "job")  # type: ignore[arg-type]
    for arguments, name in (((None, backend, store), "settings"), ((settings, store, store), "backend")):
        with pytest.raises(ArgumentTypeError, match=f"^{name} must be a Rendezvous"):
            RendezvousHandler(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=r"or a RoundStores, not int$"):
        RendezvousHandler(settings, backend, 5)  # type: ignore[arg-type]
    store.close()
