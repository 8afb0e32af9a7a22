"""Named objects: found by all, refused twice, kept by the name, and gone with their owner."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from tests.support.waiting import eventually
from zmqgrad import rpc
from zmqgrad.errors import (
    ArgumentTypeError,
    DuplicateNameError,
    NotInitializedError,
    PeerLostError,
    RpcTimeoutError,
)
from zmqgrad.rpc import RpcBackendOptions
from zmqgrad.runtime.clock import ManualClock
from zmqgrad.testing import Cluster, cluster
from zmqgrad.wire.messages import MessageType

WAIT = 20.0


@pytest.fixture
def trio() -> Iterator[Cluster]:
    with cluster(3) as c:
        yield c


class Replay:
    """Counts those that were made, and knows those that are alive."""

    made = 0
    alive: weakref.WeakSet[Replay] = weakref.WeakSet()

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.alive.add(self)
        Replay.made += 1

    def get_size(self) -> int:
        """What it was made with."""
        return self.size


gate, begun = threading.Event(), threading.Event()


def made_late() -> Replay:
    """Waits to be let on."""
    begun.set()
    assert gate.wait(WAIT)
    return Replay(9)


def never_made() -> Replay:
    """Fails."""
    raise KeyError("not made")


def in_thread(run: Callable[[], Any], c: Cluster, rank: int) -> SimpleQueue[Any]:
    """Runs in a thread of its own, on a worker of ``c``; what comes of it is in the queue."""
    results: SimpleQueue[Any] = SimpleQueue()

    def body() -> None:
        with c.acting(rank):
            try:
                results.put(run())
            except Exception as e:
                results.put(e)

    threading.Thread(target=body, daemon=True).start()
    return results


@pytest.mark.parametrize("owner", [0, 1])
def test_all_workers_find_it(trio: Cluster, owner: int) -> None:
    rref = rpc.remote(owner, Replay, args=(7,), name="replay")
    for rank in range(3):
        with trio.acting(rank):
            found = rpc.get_ref("replay")
            assert found.owner().id == owner
            assert found.rpc_sync().get_size() == 7
    assert rref.rpc_sync().get_size() == 7


def test_a_name_keeps_the_value_until_it_is_taken_back(trio: Cluster) -> None:
    rpc.remote(1, Replay, args=(333,), name="replay").to_here()
    rpc.rpc_sync(1, int)
    assert rpc.get_ref("replay").rpc_sync().get_size() == 333
    assert rpc.remove_ref("replay")
    assert not rpc.remove_ref("replay")
    eventually(lambda: [each for each in Replay.alive if each.size == 333], lambda found: not found)
    with pytest.raises(RpcTimeoutError, match="no object named 'replay'"):
        rpc.get_ref("replay", timeout=0.05)


def test_a_reference_outlives_the_name(trio: Cluster) -> None:
    found = rpc.remote(1, Replay, args=(4,), name="replay")
    rpc.get_ref("replay")
    rpc.remove_ref("replay")
    assert found.rpc_sync().get_size() == 4


def test_of_two_of_one_name_the_second_is_never_made(trio: Cluster) -> None:
    rpc.remote(1, Replay, name="replay")
    rpc.get_ref("replay")
    before = Replay.made
    with (
        trio.acting(2),
        pytest.raises(DuplicateNameError, match=r"'replay' is taken: worker1 .*get_ref.*remove_ref"),
    ):
        rpc.remote(2, Replay, name="replay")
    assert Replay.made == before


def test_a_name_is_taken_while_its_object_is_being_made(trio: Cluster) -> None:
    gate.clear()
    rpc.remote(1, made_late, name="replay")
    with trio.acting(2), pytest.raises(DuplicateNameError):
        rpc.remote(2, Replay, name="replay")
    waiting = in_thread(lambda: rpc.get_ref("replay").rpc_sync().get_size(), trio, 2)
    with pytest.raises(RpcTimeoutError):
        rpc.get_ref("replay", timeout=0.05)
    gate.set()
    assert waiting.get(timeout=WAIT) == 9


@pytest.mark.parametrize("seconds", [1e-9, 0.05])
def test_a_timeout_is_also_that_of_an_owner_who_does_not_reply(seconds: float) -> None:
    with cluster(3, rpc.RpcBackendOptions(rpc_timeout=0)) as c:
        rpc.remote(1, Replay, name="replay")
        rpc.get_ref("replay")
        with c.network.hold(MessageType.CALL, 2, source=2, target=1):
            asks = in_thread(lambda: rpc.get_ref("replay", timeout=seconds), c, 2)
            claims = in_thread(lambda: rpc.remote(2, Replay, timeout=seconds, name="replay"), c, 2)
            assert isinstance(asks.get(timeout=WAIT), RpcTimeoutError)
            assert isinstance(claims.get(timeout=WAIT), RpcTimeoutError)


def test_one_of_many_that_ask_at_once_gets_the_name(trio: Cluster) -> None:
    results = [in_thread(lambda n=n: rpc.remote(n, Replay, name="one"), trio, n) for n in (0, 1, 2)]
    refused = [isinstance(each.get(timeout=WAIT), DuplicateNameError) for each in results]
    assert sorted(refused) == [False, True, True]


def test_what_could_not_be_made_has_no_name(trio: Cluster) -> None:
    rref = rpc.remote(1, never_made, name="replay")
    with pytest.raises(KeyError):
        rref.to_here()
    eventually(lambda: try_to_make(2), lambda made: made)
    with trio.acting(1):
        assert rpc.get_ref("replay").owner().id == 2


def try_to_make(owner: int) -> bool:
    """The name is given back by the owner, a moment after its object could not be made."""
    try:
        rpc.remote(owner, Replay, name="replay")
    except DuplicateNameError:
        return False
    return True


def test_what_cannot_be_sent_has_no_name(trio: Cluster) -> None:
    with pytest.raises(TypeError):
        rpc.remote(1, Replay, args=(threading.Lock(),), name="replay")
    rpc.remote(1, Replay, name="replay")
    rpc.get_ref("replay")


def test_waits_for_an_object_that_comes_later(trio: Cluster) -> None:
    waiting = in_thread(lambda: rpc.get_ref("replay").owner_name(), trio, 2)
    rpc.remote(1, Replay, name="replay")
    assert waiting.get(timeout=WAIT) == "worker1"


def test_a_timeout_names_what_there_is(trio: Cluster) -> None:
    with pytest.raises(RpcTimeoutError, match="no object has a name"):
        rpc.get_ref("replay", timeout=0.01)
    for name in ("b", "a"):
        rpc.remote(1, Replay, name=name)
        rpc.get_ref(name)
    with pytest.raises(RpcTimeoutError, match="the names are a, b"):
        rpc.get_ref("replay", timeout=0.01)


def make_late(name: str) -> None:
    """Runs on worker 1, and returns at once."""
    rpc.remote(2, made_late, name=name)


def test_an_object_may_be_made_after_the_call_that_asked_for_it(clock: ManualClock) -> None:
    gate.clear()
    begun.clear()
    with cluster(3, RpcBackendOptions(num_worker_threads=1), clock):
        rpc.rpc_sync(1, make_late, args=("replay",), timeout=5)
        assert begun.wait(WAIT)  # it has the only thread
        clock.advance(6)
        gate.set()
        assert rpc.get_ref("replay").rpc_sync().get_size() == 9


def test_a_busy_owner_drops_later_what_has_no_name_any_more(trio: Cluster) -> None:
    rpc.remote(1, Replay, args=(77,), name="replay")
    rpc.get_ref("replay")
    rpc.set_rpc_timeout(0.1)
    with trio.network.hold(MessageType.CALL, source=0, target=1):
        assert rpc.remove_ref("replay")
    eventually(lambda: [each for each in Replay.alive if each.size == 77], lambda found: not found)


@pytest.mark.parametrize("name", ["", 3, b"replay"])
def test_a_name_is_a_string(trio: Cluster, name: Any) -> None:
    for use in (rpc.get_ref, rpc.remove_ref, lambda n: rpc.remote(1, Replay, name=n)):
        with pytest.raises(ArgumentTypeError, match="a name is a string"):
            use(name)


def test_a_name_dies_with_its_owner(trio: Cluster) -> None:
    rref = rpc.remote(1, Replay, name="replay")
    rpc.get_ref("replay")
    lose(trio, 1)
    with pytest.raises(RpcTimeoutError, match="no object has a name"):
        rpc.get_ref("replay", timeout=0.05)
    rpc.remote(2, Replay, args=(8,), name="replay")
    assert rpc.get_ref("replay").rpc_sync().get_size() == 8
    with pytest.raises(PeerLostError):
        rref.to_here()


def lose(c: Cluster, rank: int) -> None:
    """All others lose a worker, which is closed."""
    c.workers[rank].close()
    for worker in c.workers:
        if worker.id != rank:
            worker.lose(rank, "it was closed")
            eventually(lambda worker=worker: rank in worker.lost)


def test_a_claim_is_void_once_its_claimer_is_dead_and_the_owner_never_heard(trio: Cluster) -> None:
    with trio.network.drop(MessageType.REMOTE_CALL), trio.network.drop(MessageType.CALL), trio.acting(1):
        rpc.remote(2, Replay, name="replay")
    lose(trio, 1)
    rpc.remote(2, Replay, args=(5,), name="replay")
    assert rpc.get_ref("replay").rpc_sync().get_size() == 5


def test_a_claimer_that_has_lost_the_owner_takes_its_claim_back(trio: Cluster) -> None:
    """Both live on for others, to whom the claim looked valid; but nobody was going to declare it ready."""
    with trio.network.drop(MessageType.REMOTE_CALL), trio.network.drop(MessageType.CALL), trio.acting(1):
        rpc.remote(2, Replay, name="replay")
        trio.workers[1].lose(2, "unplugged")
    eventually(lambda: not trio.workers[0].directory.read("names/replay"))
    rpc.remote(2, Replay, args=(5,), name="replay")
    assert rpc.get_ref("replay").rpc_sync().get_size() == 5


def test_watchers_hear_what_comes_and_goes(trio: Cluster) -> None:
    heard: SimpleQueue[Any] = SimpleQueue()
    with trio.acting(2):
        watch = rpc.watch_ref("replay", heard.put)
    rpc.remote(1, Replay, args=(1,), name="replay")
    assert heard.get(timeout=WAIT).rpc_sync().get_size() == 1
    rpc.remove_ref("replay")
    assert heard.get(timeout=WAIT) is None
    rpc.remote(1, Replay, args=(2,), name="replay")
    assert heard.get(timeout=WAIT).rpc_sync().get_size() == 2
    lose(trio, 1)
    assert heard.get(timeout=WAIT) is None
    rpc.remote(2, Replay, args=(3,), name="replay")
    assert heard.get(timeout=WAIT).rpc_sync().get_size() == 3
    watch.close()
    rpc.remove_ref("replay")
    assert heard.empty()


def test_a_watch_begins_with_what_is_there(trio: Cluster) -> None:
    rpc.remote(1, Replay, args=(1,), name="replay")
    rpc.get_ref("replay")
    heard: SimpleQueue[Any] = SimpleQueue()
    rpc.watch_ref("replay", heard.put)
    assert heard.get(timeout=WAIT).rpc_sync().get_size() == 1


def test_a_watcher_whose_callback_fails_hears_of_the_next_object_all_the_same(trio: Cluster) -> None:
    heard: list[Any] = []
    began = threading.Event()
    gate.clear()

    def note(rref: Any) -> None:
        heard.append(rref)
        if len(heard) == 1:
            began.set()
            assert gate.wait(WAIT)
        if rref is None:
            raise ValueError("of the program")

    rpc.remote(1, Replay, args=(1,), name="replay")
    rpc.watch_ref("replay", note)
    assert began.wait(WAIT)
    rpc.remove_ref("replay")
    rpc.remote(1, Replay, args=(2,), name="replay")
    rpc.get_ref("replay")
    gate.set()
    eventually(lambda: len(heard), lambda n: n == 3)
    assert heard[1] is None
    assert heard[2].rpc_sync().get_size() == 2


def test_a_watcher_waits_for_an_owner_that_is_busy(trio: Cluster) -> None:
    heard: SimpleQueue[Any] = SimpleQueue()
    rpc.remote(1, Replay, args=(1,), name="replay")
    rpc.get_ref("replay")
    with trio.acting(2):
        rpc.set_rpc_timeout(0.1)
        with trio.network.hold(MessageType.CALL, source=2) as held:
            rpc.watch_ref("replay", heard.put)
            held.wait()
            with pytest.raises(RpcTimeoutError):  # a call would have timed out
                rpc.rpc_sync(1, len, args=((),))
    assert heard.get(timeout=WAIT).owner_name() == "worker1"


def test_shutdown_ends_a_wait() -> None:
    with cluster(2) as c:
        began = threading.Event()
        waiting = in_thread(lambda: (began.set(), rpc.get_ref("never", timeout=0)), c, 1)
        assert began.wait(WAIT)
    error = waiting.get(timeout=WAIT)
    assert isinstance(error, NotInitializedError), error
    assert "shut down" in str(error)
