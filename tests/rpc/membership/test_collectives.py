"""Workers that wait for each other."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from tests.support.waiting import eventually
from zmqgrad import rpc
from zmqgrad.errors import ArgumentTypeError, PeerLostError, RpcTimeoutError, UnknownWorkerError
from zmqgrad.rpc import api
from zmqgrad.rpc.current import current_worker
from zmqgrad.rpc.in_flight import InFlightRequest
from zmqgrad.testing import Cluster, cluster


@pytest.fixture
def trio() -> Iterator[Cluster]:
    with cluster(3) as c:
        yield c


def on_each(c: Cluster, ranks: list[int], step: Callable[[int], Any]) -> list[Any]:
    """Run ``step(rank)`` as each of ``ranks`` at once; what they return or raise."""
    results: list[Any] = [None] * len(ranks)

    def run(place: int, rank: int) -> None:
        with c.acting(rank):
            try:
                results[place] = step(rank)
            except Exception as e:
                results[place] = e

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(ranks)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    return results


def test_all_gather_returns_all_values_everywhere(trio: Cluster) -> None:
    for n in range(3):
        results = on_each(trio, [0, 1, 2], lambda rank, n=n: rpc.all_gather((rank, n)))
        assert results == [{f"worker{rank}": (rank, n) for rank in range(3)}] * 3
    values = on_each(trio, [0, 1, 2], lambda rank: rpc.all_gather(torch.full((2,), float(rank))))
    assert all(v["worker2"].tolist() == [2.0, 2.0] for v in values)


@pytest.mark.parametrize("workers", ["worker0", 0, [0], [None], [["worker0"]]])
def test_what_is_no_list_of_names_is_refused_at_once(trio: Cluster, workers: Any) -> None:
    """Also by those that would wait for such workers until their timeout."""
    for call in rpc.barrier, rpc.wait_for_workers, lambda names: rpc.all_gather(1, names):
        with pytest.raises(ArgumentTypeError, match="must be a list of names of workers, not"):
            call(workers)
    with pytest.raises(ArgumentTypeError, match="must be a list of names of workers, not"):
        rpc.wait_for_workers(rpc.get_worker_infos())  # type: ignore[arg-type]


def test_a_subset_of_workers(trio: Cluster) -> None:
    results = on_each(trio, [1, 2], lambda rank: rpc.all_gather(rank, ["worker2", "worker1"]))
    assert results == [{"worker1": 1, "worker2": 2}] * 2
    assert rpc.all_gather(5, ["worker0"]) == {"worker0": 5}
    with pytest.raises(UnknownWorkerError, match="worker0 is not one of the participants"):
        rpc.barrier(["worker1"])
    with pytest.raises(UnknownWorkerError):
        rpc.barrier(["worker0", "worker9"])


def test_a_barrier_blocks_until_all_have_arrived(trio: Cluster) -> None:
    passed: list[int] = []
    come = threading.Event()

    def step(rank: int) -> None:
        if rank == 2:
            come.wait(10)
            assert passed == []
        rpc.barrier()
        passed.append(rank)

    done = threading.Thread(target=lambda: on_each(trio, [0, 1, 2], step))
    done.start()
    come.set()
    done.join(30)
    assert sorted(passed) == [0, 1, 2]


def test_many_threads_of_each(trio: Cluster) -> None:
    assert on_each(trio, [0, 1, 2] * 4, lambda rank: rpc.barrier()) == [None] * 12


def test_a_missing_participant_is_a_timeout(trio: Cluster) -> None:
    (error,) = on_each(trio, [1], lambda rank: rpc.all_gather(rank, timeout=0.05))
    assert isinstance(error, RpcTimeoutError)
    assert "timed out in _all_gather after 0.05 seconds" in str(error)
    assert "waiting for all of worker0, worker1, worker2: " in str(error)
    assert on_each(trio, [0, 1], lambda rank: rpc.barrier(["worker0", "worker1"])) == [None] * 2


def test_the_root_names_the_missing_participants(trio: Cluster) -> None:
    error, _ = on_each(trio, [0, 1], lambda rank: rpc.barrier(timeout=0.5))
    assert "waiting for all of worker0, worker1, worker2 (worker2 did not call it): " in str(error)
    assert on_each(trio, [2], lambda rank: rpc.barrier()) == [None]  # the last one ends it


def test_collectives_that_the_root_gave_up_leave_nothing(trio: Cluster) -> None:
    names = ["worker0", "worker1"]
    for rank, timeout in ((0, 0.02), (1, 30)):
        with trio.acting(rank):
            for _ in range(3):
                with suppress(RpcTimeoutError):
                    rpc.barrier(names, timeout=timeout)

    def requests() -> list[object]:
        gc.collect()
        return [found for found in gc.get_objects() if type(found) is InFlightRequest]

    eventually(requests, lambda left: len(left) < 2)  # a thread may have the last one still


@pytest.mark.parametrize("names", [["worker0", "worker1", "worker2"], None], ids=["named", "all"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_lost_participant_fails_the_collective_at_once(
    trio: Cluster, before: bool, names: list[str] | None
) -> None:
    """Also where all workers are meant, and one of two survivors has not learned of the loss yet."""
    if before:
        trio.workers[0].lose(2, "unplugged")
    results: list[Any] = []
    done = threading.Thread(
        target=lambda: results.extend(on_each(trio, [0, 1], lambda _: rpc.barrier(names)))
    )
    done.start()
    if not before:
        trio.workers[0].lose(2, "unplugged")
    done.join(30)
    assert [type(each) for each in results] == [PeerLostError] * 2
    assert all("worker2 (worker 2) is gone: unplugged" in str(each) for each in results)
    assert on_each(trio, [0, 1], lambda rank: rpc.barrier(["worker0", "worker1"])) == [None] * 2


def test_who_learns_of_a_loss_in_between_counts_on(trio: Cluster) -> None:
    """Its next collective got the number of its first one, and the one after that the value of another."""
    with trio.acting(2):
        for n in range(3):
            with suppress(RpcTimeoutError):
                rpc.all_gather((2, n), timeout=0.02)
    told = threading.Event()

    def gather_and_learn(rank: int) -> list[Any]:
        found: list[Any] = []
        for n in range(3):
            found.append(rpc.all_gather((rank, n), timeout=5))
            if rank == 1 and not n:
                trio.workers[1].hooks.peer_lost.append(lambda *_: told.set())
                trio.workers[1].lose(2, "unplugged")
                assert told.wait(10)
        return found

    expected = [{f"worker{rank}": (rank, n) for rank in range(3)} for n in range(3)]
    assert on_each(trio, [0, 1], gather_and_learn) == [expected] * 2


def test_a_loss_while_the_first_collective_begins_fails_it(trio: Cluster) -> None:
    """Another thread has found what keeps collectives, of which the worker does not know yet."""
    first: list[Any] = []
    told = threading.Event()

    class Extensions(dict[str, Any]):
        def setdefault(self, name: str, made: Any = None) -> Any:
            found = super().setdefault(name, made)
            if name == "collectives" and not first:
                first.append(
                    threading.Thread(target=lambda: first.append(on_each(trio, [1], lambda _: rpc.barrier())))
                )
                first[0].start()
                eventually(lambda: any(each.is_deferred for each in trio.workers[0].server.in_flight.all()))
                trio.workers[0].hooks.peer_lost.append(lambda *_: told.set())
                trio.workers[0].lose(2, "unplugged")
                assert told.wait(10)
            return found

    trio.workers[0].hooks.extensions = Extensions(trio.workers[0].hooks.extensions)
    with pytest.raises(PeerLostError, match="unplugged"):
        rpc.barrier(timeout=5)
    first[0].join(30)
    assert [type(error) for error in first[1]] == [PeerLostError]


def where() -> str:
    """Who runs this?"""
    return current_worker().name


def fail() -> None:
    """Raise."""
    raise ValueError("inside")


def test_wait_all_context_manager_of_torch(trio: Cluster) -> None:
    with api._wait_all():
        futures = [rpc.rpc_async(n, where) for n in range(3)]
    assert all(f.done() for f in futures)
    with pytest.raises(ValueError, match="inside"), api._wait_all():
        rpc.rpc_async(1, fail)
    with pytest.raises(KeyError, match="of the block"), api._wait_all():
        raise KeyError("of the block")
    assert not hasattr(api._thread_local_var, "future_list")
