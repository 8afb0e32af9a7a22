"""Workers that one other worker has lost: whether the group goes on with them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.rpc.membership import test_dynamic
from tests.rpc.membership.test_dynamic import WAIT, Town, acting, ids_known_to, town, where
from tests.rpc.membership.test_group import all_at_once
from tests.support.waiting import eventually
from zmqgrad import rpc
from zmqgrad.errors import PeerLostError
from zmqgrad.rpc.membership import shutdown, suspicion
from zmqgrad.rpc.membership.dynamic import DynamicGroup
from zmqgrad.rpc.membership.fixed import FixedGroup
from zmqgrad.rpc.membership.group import make_worker
from zmqgrad.rpc.options import RpcBackendOptions
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import HashStore, PrefixStore
from zmqgrad.testing.mailbox import MemoryMailbox
from zmqgrad.testing.network import MemoryNetwork

__all__ = ["town"]

OPTIONS = RpcBackendOptions(rpc_timeout=WAIT, num_worker_threads=2, refused_timeout=1.0)


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No peer is of this host, where a process that has ended is known for certain."""
    monkeypatch.setattr(suspicion, "is_on_this_host", lambda endpoint: False)
    monkeypatch.setattr(shutdown, "is_on_this_host", lambda endpoint: False)
    monkeypatch.setattr(test_dynamic, "OPTIONS", OPTIONS)


def hold_on() -> str:
    """Outlasts the test of its caller."""
    released.wait(WAIT)
    return where()


released = threading.Event()


def test_a_worker_that_one_alone_has_lost_stays(town: Town, caplog: pytest.LogCaptureFixture) -> None:
    """As with a firewall that refuses the connections of one worker only."""
    a, b, c = (town.join(name) for name in "abc")
    released.clear()
    with acting(b):
        waiting = rpc.rpc_async("a", hold_on, timeout=0)
    town.dead.add(b.worker.membership.own.endpoints[0])  # so it seems to a
    with town.network.hold(source=0, target=1):  # b would accuse a, which then knows that b is alive
        a.worker.lose(1, "it refuses connections")
        eventually(lambda: town.store.check(["d/suspect/1/0"]))
    with pytest.raises(PeerLostError, match="a has declared worker 1 lost: it refuses connections"):
        waiting.wait()
    released.set()
    eventually(lambda: caplog.text, lambda text: "a has lost b (worker 1), but the group has not" in text)
    with acting(c):
        assert rpc.rpc_sync("b", where) == "b"
    with acting(b):
        assert rpc.rpc_sync("c", where) == "c"
    assert ids_known_to(c) == [0, 1, 2]
    assert ids_known_to(a) == [0, 2]


@pytest.mark.parametrize("joins_later", [False, True])
def test_a_worker_that_one_alone_has_lost_is_monitored_by_another(
    town: Town, monkeypatch: pytest.MonkeyPatch, joins_later: bool
) -> None:
    """Nobody would have told the group of its death."""
    monitored: set[tuple[int, int]] = set()

    def join(name: str) -> DynamicGroup:
        made = town.make(name)
        own = made.worker.id
        monkeypatch.setattr(
            made.worker.mailbox, "monitor", lambda peer: monitored.add((own, peer)), raising=False
        )
        made.join(Deadline.after(WAIT))
        made.worker.server.serve()
        return made

    a, b, c = (join(name) for name in "abc")
    d = None if joins_later else join("d")
    for each in (a, b, c):
        eventually(lambda: len(ids_known_to(each)) == 4 - joins_later)  # noqa: B023
    monitored.clear()
    b.worker.lose(2, "it refuses connections")
    eventually(lambda: (0, 2) in monitored)
    a.worker.lose(2, "it refuses connections")
    eventually(lambda: ids_known_to(c), lambda ids: not {0, 1} & set(ids))
    d = d or join("d")
    eventually(lambda: (3, 2) in monitored)
    for number in (0, 1):  # whichever of the two accuses the other first: that one is alive then
        settled = [[f"d/verdict/2/{number}"], [f"d/verdict/{number}/2"]]
        eventually(lambda: any(map(town.store.check, settled)))  # noqa: B023
    assert ids_known_to(d) == [0, 1, 2, 3]
    assert ids_known_to(c) == [2, 3]
    town.kill(b)
    monitored.clear()
    d.worker.lose(1, "it has ended")
    eventually(lambda: ids_known_to(a), lambda ids: ids == [0, 3])
    assert (1, 2) not in monitored


def test_a_worker_that_does_not_refute_its_loss_is_evicted(town: Town) -> None:
    a, b, c = (town.join(name) for name in "abc")
    town.kill(b)
    a.worker.lose(1, "its host is out of reach")
    eventually(lambda: ids_known_to(c), lambda ids: ids == [0, 2], WAIT)


def test_an_evicted_worker_loses_all_others(town: Town) -> None:
    """As one that was stopped when it could have refuted its loss."""
    a, b, c = (town.join(name) for name in "abc")
    released.clear()
    with acting(b):
        waiting = [rpc.rpc_async(name, hold_on, timeout=0) for name in "ac"]
    town.store.set("d/verdict/1/0", suspicion.LOST)
    with town.network.hold(source=0, target=1):  # b would accuse a, which then knows that b is alive
        a.worker.lose(1, "its process has not replied")
        eventually(lambda: town.store.check(["d/suspect/1/0"]))
    for future in waiting:
        with pytest.raises(PeerLostError, match="its process has not replied"):
            future.wait()
    released.set()
    assert ids_known_to(b) == [1]
    eventually(lambda: ids_known_to(c), lambda ids: ids == [0, 2], WAIT)


def test_an_accusation_before_the_watch_is_refuted(town: Town) -> None:
    town.store.set("d/suspect/1/0", "it refuses connections")
    a, b = town.join("a"), town.join("b")
    assert town.store.get("d/verdict/1/0") == suspicion.REFUTED
    eventually(lambda: b.worker.lost.keys() == {a.worker.id})  # behind what has arrived from it


@pytest.fixture
def trio(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FixedGroup]]:
    """Three workers of a group of fixed size, each on a host of its own."""
    network = MemoryNetwork()
    with HashStore() as store:
        groups = []
        for n in range(3):
            monkeypatch.setattr(socket, "gethostname", f"host{n}".__str__)
            worker = make_worker(f"worker{n}", n, 3, MemoryMailbox(network, f"worker{n}", n), OPTIONS)
            groups.append(FixedGroup(worker, PrefixStore("g", store)))
        yield groups


def test_shutdown_waits_for_a_worker_that_one_alone_has_lost(
    trio: list[FixedGroup], caplog: pytest.LogCaptureFixture
) -> None:
    def leave(group: FixedGroup) -> Callable[[], None]:
        return lambda: group.leave(True, Deadline.after(WAIT))

    assert all_at_once([lambda g=g: g.join(Deadline.after(WAIT)) for g in trio]) == [None] * 3
    for group in trio:
        group.worker.server.serve()
        assert group.worker.pool.wait_idle(Deadline.after(WAIT))  # it watches for accusations
    released.clear()
    with acting(trio[1]):  # type: ignore[arg-type]
        waiting = rpc.rpc_async(0, hold_on, timeout=0)
    trio[0].worker.lose(1, "its host is out of reach")
    with pytest.raises(PeerLostError, match="worker0 has declared worker 1 lost: its host is out"):
        waiting.wait()
    released.set()
    raised: list[BaseException | None] = []
    leaving = threading.Thread(target=lambda: raised.extend(all_at_once([leave(trio[0]), leave(trio[2])])))
    leaving.start()
    eventually(lambda: caplog.text, lambda text: "worker0 has lost worker1 (worker 1), but" in text)
    with acting(trio[1]):  # type: ignore[arg-type]
        assert rpc.rpc_sync(2, where) == "worker2", "the others still serve it"
    assert leaving.is_alive()
    assert all_at_once([leave(trio[1])]) == [None]
    leaving.join(WAIT)
    assert raised == [None, None]
