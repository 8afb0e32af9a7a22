"""An agent and its rendezvous: what it learns of the other nodes, and of the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.waiting import eventually
from zmqgrad.elastic.agent.events import (
    CoordinatorEvent,
    Exited,
    Join,
    Joined,
    Leave,
    Left,
    MembershipChanged,
    Notice,
    RendezvousFailed,
    ReportExits,
)
from zmqgrad.elastic.agent.ranks import NodeInfo
from zmqgrad.elastic.agent.rendezvoused import RendezvousCoordinator
from zmqgrad.elastic.backends.store import StoreBackend
from zmqgrad.elastic.handler import RendezvousHandler
from zmqgrad.elastic.round_stores import RoundStores, ServedByRankZero
from zmqgrad.elastic.settings import RendezvousSettings, RendezvousTimeout
from zmqgrad.errors import RendezvousConnectionError, RendezvousTimeoutError, StoreError, StoreTimeoutError
from zmqgrad.runtime.clock import MONOTONIC
from zmqgrad.store import HashStore, Store, TCPStore
from zmqgrad.store.base import PrefixCallback

WAIT = 20.0


@pytest.mark.slow  # a store counts as lost after 5 s, and it is used twice
def test_a_report_that_finds_the_store_lost_is_no_reply_to_the_request_to_join() -> None:
    """It ends its round. Whoever finds the store lost when it joins, the user reads the same."""
    master = TCPStore("127.0.0.1", 0, is_master=True, timeout=WAIT)
    client, state = master.clone(), HashStore(WAIT)
    handler = RendezvousHandler(
        RendezvousSettings("job", 1, 1, RendezvousTimeout(join=1.0), keep_alive_interval=0.1),
        StoreBackend(state, "job"),
        client,
    )
    coordinator = RendezvousCoordinator(
        lambda: handler, lambda restarts, node: NodeInfo(node, "default", 1, restarts, "127.0.0.1", 1)
    )
    seen: list[CoordinatorEvent] = []

    def found(kind: type[CoordinatorEvent]) -> bool:
        seen.extend(coordinator.events.take())
        return any(isinstance(event, kind) for event in seen)

    coordinator.carry_out(Join(0))
    coordinator.carry_out(ReportExits([1], True))
    eventually(lambda: found(Exited))
    master.close()
    coordinator.carry_out(ReportExits([0], True))
    coordinator.carry_out(Join(0))
    eventually(lambda: found(RendezvousFailed))
    assert seen[2:-1] == [MembershipChanged(0, "the store of the round does not reply: restart")]
    [error] = [event.error for event in seen if isinstance(event, RendezvousFailed)]
    assert isinstance(error, RendezvousConnectionError)
    assert str(error).startswith("the store of the rendezvous cannot be used: ")
    coordinator.close()
    client.close()
    state.close()


def test_a_spare_has_the_whole_time_to_agree_once_it_has_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it has waited before; join_timeout is a second."""
    monkeypatch.setattr("zmqgrad.elastic.agent.rendezvoused.LOOK_SECONDS", 0.05)
    store = HashStore(WAIT)
    settings = RendezvousSettings("job", 2, 2, RendezvousTimeout(join=1.0), keep_alive_interval=0.5)
    member, other, spare = (RendezvousHandler(settings, StoreBackend(store, "job"), store) for _ in range(3))
    with ThreadPoolExecutor(2) as pool:
        [*pool.map(lambda handler: handler.next_rendezvous(), (member, other))]

    def describe(restarts: int, node: str) -> NodeInfo:
        return NodeInfo(node, "default", 1, restarts, "127.0.0.1", 1)

    coordinator = RendezvousCoordinator(lambda: spare, describe)
    seen: list[CoordinatorEvent] = []

    def found(kind: type[CoordinatorEvent]) -> bool:
        seen.extend(coordinator.events.take())
        return any(isinstance(event, kind) for event in seen)

    coordinator.carry_out(Join(0))
    eventually(lambda: found(Notice))
    began = MONOTONIC.now()
    eventually(lambda: MONOTONIC.now() - began > 1.5)
    other.leave()
    formed = member.next_rendezvous()
    began = MONOTONIC.now()
    eventually(lambda: MONOTONIC.now() - began > 0.5 or found(RendezvousFailed))  # several looks
    formed.store.set(f"agent/node/{formed.rank}", describe(0, str(member.node)).encode())
    eventually(lambda: found(Joined) or found(RendezvousFailed))
    assert found(Joined), seen
    coordinator.close()
    member.stop()
    other.stop()
    store.close()


def test_a_node_that_is_lost_after_another_has_joined_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent whose workers have succeeded goes on in spite of those that join."""
    monkeypatch.setattr("zmqgrad.elastic.agent.rendezvoused.LOOK_SECONDS", 0.05)
    store = HashStore(WAIT)
    settings = RendezvousSettings("job", 2, 3, RendezvousTimeout(last_call=0.1))
    own, other, third = (RendezvousHandler(settings, StoreBackend(store, "job"), store) for _ in range(3))

    def describe(restarts: int, node: str) -> NodeInfo:
        return NodeInfo(node, "default", 1, restarts, "127.0.0.1", 1)

    coordinator = RendezvousCoordinator(lambda: own, describe)
    seen: list[CoordinatorEvent] = []

    def changes() -> list[tuple[bool, str]]:
        seen.extend(coordinator.events.take())
        return [(each.joined, each.lost) for each in seen if isinstance(each, MembershipChanged)]

    coordinator.carry_out(Join(0))
    formed = other.next_rendezvous()
    formed.store.set(f"agent/node/{formed.rank}", describe(0, str(other.node)).encode())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(third.next_rendezvous)
        eventually(changes, lambda found: (True, "") in found, WAIT)
        other.leave()
        eventually(changes, lambda found: not found[-1][0] and "which left or was lost" in found[-1][1], WAIT)
        third.cancel()
        with pytest.raises(RendezvousTimeoutError):
            waiting.result(WAIT)
    coordinator.close()
    other.stop()
    third.stop()
    store.close()


class _LostWithinRound(HashStore):
    """A store of a round, whose server ends when the agents have agreed."""

    def watch_prefix(self, prefix: str, callback: PrefixCallback) -> None:
        raise StoreTimeoutError("no store answered")


class _StoresOfRounds(RoundStores):
    are_served = True

    def __init__(self) -> None:
        self.stores: list[HashStore] = []

    def serve(self) -> str:
        return "127.0.0.1:1"

    def open(self, run_id: str, number: int, address: str, timeout: float) -> Store:
        self.stores.append(_LostWithinRound(WAIT) if number == 0 else HashStore(WAIT))
        return self.stores[-1]


def test_a_round_that_loses_its_store_as_it_begins_is_followed_by_another() -> None:
    """Joining it has succeeded, so its loss is no reply to the request to join the next one."""
    state, stores = HashStore(WAIT), _StoresOfRounds()
    handler = RendezvousHandler(RendezvousSettings("job", 1, 1), StoreBackend(state, "job"), stores)
    coordinator = RendezvousCoordinator(
        lambda: handler, lambda restarts, node: NodeInfo(node, "default", 1, restarts, "127.0.0.1", 1)
    )
    coordinator.carry_out(Join(0))
    coordinator.carry_out(Join(0))
    seen: list[CoordinatorEvent] = []

    def rounds() -> list[int]:
        seen.extend(coordinator.events.take())
        return [event.place.round for event in seen if isinstance(event, Joined)]

    eventually(rounds, lambda found: found == [0, 1], WAIT)
    coordinator.close()
    for store in (*stores.stores, state):
        store.close()
    assert [type(event) for event in seen] == [Joined, MembershipChanged, Joined]
    assert seen[1] == MembershipChanged(
        0, "the store of the round does not reply: restart", "node 0 at 127.0.0.1, which serves the store"
    )


def test_the_agent_that_serves_the_store_of_the_round_leaves_last() -> None:
    """The others read there how the job has ended."""
    state = HashStore(WAIT)
    settings = RendezvousSettings("job", 2, 2)
    handlers = [
        RendezvousHandler(settings, StoreBackend(state, "job"), ServedByRankZero("127.0.0.1", WAIT))
        for _ in range(2)
    ]

    def open_coordinator(handler: RendezvousHandler) -> RendezvousCoordinator:
        return RendezvousCoordinator(
            lambda: handler, lambda restarts, node: NodeInfo(node, "default", 1, restarts, "127.0.0.1", 1)
        )

    coordinators = [open_coordinator(handler) for handler in handlers]
    for coordinator in coordinators:
        coordinator.carry_out(Join(0))
    places: dict[int, RendezvousCoordinator] = {}
    for coordinator in coordinators:
        [joined] = eventually(coordinator.events.take)
        assert isinstance(joined, Joined)
        places[joined.place.node_rank] = coordinator
    places[0].carry_out(Leave(close=True))
    store = places[1].round_store
    assert store is not None
    store.wait(["agent/left/0"], WAIT)
    began = MONOTONIC.now()
    eventually(lambda: MONOTONIC.now() - began > 0.3)
    assert places[0].events.take() == []
    places[1].carry_out(Leave(close=True))
    for coordinator in coordinators:
        assert eventually(coordinator.events.take) == [Left()]
        coordinator.close()
    state.close()


def test_a_store_of_a_round_that_has_ended_is_lost_at_once() -> None:
    """Not after the time in which a server could be started again: all nodes would wait for that one."""
    rank_0, other = (ServedByRankZero("127.0.0.1", WAIT) for _ in range(2))
    address = rank_0.serve()
    rank_0.open("job", 0, address, WAIT).set("key", "value")
    store = other.open("job", 0, address, WAIT)
    assert store.get("key") == b"value"
    rank_0.close()
    began = MONOTONIC.now()
    with pytest.raises(StoreError):
        store.get("key")
    assert MONOTONIC.now() - began < WAIT / 2
    other.close()
