"""An agent and its rendezvous: what it learns of the other nodes, and of the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.waiting import eventually
from zmqgrad.elastic.agent.events import (
    CoordinatorEvent,
    Join,
    Joined,
    MembershipChanged,
    Notice,
    RendezvousFailed,
    ReportExits,
)
from zmqgrad.elastic.agent.ranks import NodeInfo
from zmqgrad.elastic.agent.rendezvoused import RendezvousCoordinator
from zmqgrad.elastic.backends.store import StoreBackend
from zmqgrad.elastic.handler import RendezvousHandler
from zmqgrad.elastic.round_stores import RoundStores
from zmqgrad.elastic.settings import RendezvousSettings, RendezvousTimeout
from zmqgrad.errors import RendezvousConnectionError, StoreTimeoutError
from zmqgrad.runtime.clock import MONOTONIC
from zmqgrad.store import HashStore, Store, TCPStore
from zmqgrad.store.base import PrefixCallback

WAIT = 20.0


@pytest.mark.slow  # a store counts as lost after 5 s, and it is used twice
def test_a_store_that_a_round_finds_lost_before_the_heartbeat_does_is_named() -> None:
    """Whoever of the two is the first, the user reads the same."""
    master = TCPStore("127.0.0.1", 0, is_master=True, timeout=WAIT)
    client, state = master.clone(), HashStore(WAIT)
    handler = RendezvousHandler(
        RendezvousSettings("job", 1, 1, keep_alive_interval=0.1), StoreBackend(state, "job"), client
    )
    coordinator = RendezvousCoordinator(
        lambda: handler, lambda restarts, node: NodeInfo(node, "default", 1, restarts, "127.0.0.1", 1)
    )
    seen: list[CoordinatorEvent] = []

    def found(kind: type[CoordinatorEvent]) -> bool:
        seen.extend(coordinator.events.take())
        return any(isinstance(event, kind) for event in seen)

    coordinator.carry_out(Join(0))
    eventually(lambda: found(Joined))
    master.close()
    coordinator.carry_out(ReportExits([0], True))
    eventually(lambda: found(RendezvousFailed))
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
