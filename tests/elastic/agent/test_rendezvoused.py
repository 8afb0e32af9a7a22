"""An agent and its rendezvous: what it learns of the other nodes, and of the store."""

from __future__ import annotations

import pytest

from tests.support.waiting import eventually
from zmqgrad.elastic.agent.events import CoordinatorEvent, Joined, RendezvousFailed
from zmqgrad.elastic.agent.ranks import NodeInfo
from zmqgrad.elastic.agent.rendezvoused import RendezvousCoordinator
from zmqgrad.elastic.backends.store import StoreBackend
from zmqgrad.elastic.handler import RendezvousHandler
from zmqgrad.elastic.settings import RendezvousSettings
from zmqgrad.errors import RendezvousConnectionError
from zmqgrad.store import HashStore, TCPStore

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

    coordinator.join(0)
    eventually(lambda: found(Joined))
    master.close()
    coordinator.report_exits([0], True)
    eventually(lambda: found(RendezvousFailed))
    [error] = [event.error for event in seen if isinstance(event, RendezvousFailed)]
    assert isinstance(error, RendezvousConnectionError)
    assert str(error).startswith("the store of the rendezvous cannot be used: ")
    coordinator.close()
    client.close()
    state.close()
