"""``elastic://`` URLs: bad ones, and groups of real processes."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.etcd import EtcdCluster, needs_etcd
from tests.support.processes import run_processes
from tests.support.waiting import eventually
from tools.ports import free_port
from zmqgrad import rpc
from zmqgrad.elastic import RendezvousHandler, create_handler, register_backend
from zmqgrad.errors import ConfigurationError, RendezvousConnectionError, RendezvousError, StoreTimeoutError
from zmqgrad.rendezvous import rendezvous
from zmqgrad.store import TCPStore


@pytest.mark.parametrize(
    ("query", "what"),
    [
        ("min_nodes=1&max_nodes=1", "lacks a run_id"),
        ("run_id=job", "must have either min_nodes and max_nodes, or a world size"),
        ("run_id=job&min_nodes=1", "must have either min_nodes and max_nodes"),
        ("run_id=job&min_nodes=1&max_nodes=2&world_size=2", "must have either min_nodes and max_nodes"),
        ("run_id=job&min_nodes=1&max_nodes=x", "min_nodes and max_nodes must be whole numbers"),
        ("run_id=job&min_nodes=2&max_nodes=1", "max_nodes is 1; it must be an integer, at least 2"),
        ("run_id=job&world_size=0", "min_nodes is 0"),
        ("run_id=job&world_size=1&rank=0", "assigns the ranks; pass no rank"),
        ("run_id=job&world_size=1&backend=zookeeper", "no rendezvous backend 'zookeeper'; .* etcd, zmqgrad"),
        ("run_id=job&world_size=1&joint_timeout=5", "has no setting 'joint_timeout'; it has .*join_timeout"),
        ("run_id=job&world_size=1&join_timeout=soon", "'join_timeout' .* is 'soon'"),
        ("run_id=job&world_size=1&is_host=maybe", "'is_host' .* is 'maybe': it must be true or false"),
        ("run_id=job&world_size=1&backend=etcd&protocol=ftp", "'ftp'; it must be http or https"),
        ("run_id=job&world_size=1&backend=etcd&password_file=/nowhere", "password_file' cannot be read"),
        ("run_id", "cannot be read"),
    ],
)
def test_bad_urls(query: str, what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        next(rendezvous(f"elastic://127.0.0.1:29400?{query}", timeout=1.0))


def test_arguments_are_settings() -> None:
    url = f"elastic://127.0.0.1:{free_port()}?run_id=job&join_timeout=soon"
    with pytest.raises(ConfigurationError, match="has no setting 'joint_timeout'"):
        next(rendezvous(url, world_size=1, timeout=20.0, joint_timeout=5))
    store, rank, world_size = next(rendezvous(url, world_size=1, timeout=20.0, join_timeout=5))
    assert (rank, world_size) == (0, 1)
    store.close()


def test_an_endpoint_that_nobody_serves() -> None:
    url = f"elastic://127.0.0.1:{free_port()}?run_id=job&is_host=false"
    with pytest.raises(RendezvousConnectionError, match=r"the rendezvous endpoint .* cannot be used"):
        next(rendezvous(url, world_size=1, timeout=0.3))


def test_one_process_alone_leaves_and_joins_again() -> None:
    url = f"elastic://127.0.0.1:{free_port()}?run_id=job"
    for _ in range(2):
        found = rendezvous(url, world_size=1, timeout=20.0)
        store, rank, world_size = next(found)
        assert (rank, world_size) == (0, 1)
        store.set("k", "1")
        assert store.get("k") == b"1"
        with pytest.raises(RendezvousError, match="does not support re-rendezvous"):
            next(found)
        store.close()
        store.close()


def test_a_node_that_is_interrupted_as_it_leaves_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It served the state on, and had not left: the next node waited until its heartbeat expired."""
    url = f"elastic://127.0.0.1:{free_port()}?run_id=job"
    store, *_ = next(rendezvous(url, world_size=1, timeout=20.0))
    join = threading.Thread.join

    def interrupted_join(thread: threading.Thread, timeout: float | None = None) -> None:
        join(thread, timeout)
        if thread.name.startswith("zmqgrad-rendezvous"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupted_join)
        with pytest.raises(KeyboardInterrupt):
            store.close()
    store, *_ = next(rendezvous(url, world_size=1, timeout=5.0))
    store.close()


def test_a_node_that_comes_as_the_server_closes_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    url = f"elastic://127.0.0.1:{port}?run_id=job"
    first, _, _ = next(rendezvous(url, world_size=1, timeout=20.0))
    closing = threading.Thread(target=first.close)

    def accepts_nobody() -> bool:
        try:
            TCPStore("127.0.0.1", port, timeout=0.1).close()
        except StoreTimeoutError:
            return True
        return False

    def create(*args: Any, **conf: Any) -> RendezvousHandler:
        handler = create_handler(*args, **conf)
        if closing.ident is None:  # the late node is connected, and has not read the state
            closing.start()
            eventually(accepts_nobody)
        return handler

    monkeypatch.setattr("zmqgrad.elastic.url.create_handler", create)
    late, rank, world_size = next(rendezvous(url, world_size=1, timeout=20.0))
    assert (rank, world_size) == (0, 1)
    closing.join()
    late.close()


def test_a_backend_has_one_owner_of_its_name() -> None:
    with pytest.raises(ConfigurationError, match="backend 'etcd' already"):
        register_backend("etcd", lambda parameters: NotImplemented)
    with pytest.raises(ConfigurationError, match="no rendezvous backend 'c10d'; the names are etcd, zmqgrad"):
        create_handler("c10d", "", "job", 1, 1)


# ---- real processes ---------------------------------------------------------------------------------------


def join_and_call(rank: int, url: str) -> tuple[int, int, list[int]]:
    options = rpc.RpcBackendOptions(init_method=url, rpc_timeout=30)
    rpc.init_rpc(f"w{os.getpid()}", rpc_backend_options=options)
    own = rpc.get_worker_info().id
    gathered = rpc.all_gather(own)
    results = [rpc.rpc_sync(name, os.getpid) for name in sorted(gathered)]
    assert sorted(f"w{pid}" for pid in results) == sorted(gathered)
    rpc.shutdown()
    return own, len(gathered), sorted(gathered.values())


@pytest.mark.processes
@pytest.mark.slow
def test_three_workers_call_each_other_by_rpc() -> None:
    url = f"elastic://127.0.0.1:{free_port()}?run_id=job&min_nodes=3&max_nodes=3"
    results = run_processes(join_and_call, 3, (url,))
    assert sorted(own for own, _, _ in results) == [0, 1, 2]
    assert [others for _, _, others in results] == [[0, 1, 2]] * 3


@pytest.mark.processes
@pytest.mark.slow
def test_the_last_call_determines_the_world_size() -> None:
    url = f"elastic://127.0.0.1:{free_port()}?run_id=job&min_nodes=1&max_nodes=8&last_call_timeout=3"
    assert sorted(run_processes(join_and_call, 3, (url,))) == [(n, 3, [0, 1, 2]) for n in range(3)]


@pytest.mark.processes
@pytest.mark.slow
@needs_etcd
def test_workers_find_each_other_through_etcd() -> None:
    with EtcdCluster(3) as cluster:
        url = f"elastic://{cluster.endpoint}?backend=etcd&run_id=job&min_nodes=3&max_nodes=3"
        results = run_processes(join_and_call, 3, (url,))
    assert sorted(own for own, _, _ in results) == [0, 1, 2]


def join_process_group(rank: int, url: str) -> tuple[int, float]:
    import torch
    import torch.distributed as dist

    import zmqgrad

    zmqgrad.init_process_group("gloo", init_method=url)
    value = torch.ones(1)
    dist.all_reduce(value)
    own = dist.get_rank()
    dist.destroy_process_group()
    return own, float(value)


@pytest.mark.processes
@pytest.mark.slow
def test_a_process_group_of_torch() -> None:
    url = f"elastic://127.0.0.1:{free_port()}?run_id=job&min_nodes=2&max_nodes=2"
    assert sorted(run_processes(join_process_group, 2, (url,))) == [(0, 2.0), (1, 2.0)]


def join_many_times(rank: int, url: str) -> list[int]:
    sizes = []
    for n in range(5):
        store, own, size = next(rendezvous(url, timeout=30.0))
        sizes.append(size)
        store.set(f"{n}/{own}", "-")
        store.wait([f"{n}/{other}" for other in range(size)])
        store.set(f"left/{own}", "-")
        if own == 0:
            store.wait([f"left/{other}" for other in range(size)])
        store.close()
    return sizes


@pytest.mark.processes
@pytest.mark.slow
def test_processes_that_leave_at_once_join_again() -> None:
    """Also those that are faster than the process that serves the state."""
    url = f"elastic://127.0.0.1:{free_port()}?run_id=job&min_nodes=3&max_nodes=3"
    assert run_processes(join_many_times, 3, (url,)) == [[3] * 5] * 3


def meet(name: str, url: str, **place: int) -> list[str]:
    rpc.init_rpc(name, rpc_backend_options=rpc.RpcBackendOptions(init_method=url, join_timeout=30), **place)
    names = [info.name for info in rpc.get_worker_infos()]
    rpc.shutdown()
    return sorted(names)


def meet_a_new_process(rank: int, first: str, second: str, left: str) -> list[str]:
    """Process 0 has been in a group before; the other one is new."""
    places: list[dict[str, int]] = [{}, {}]
    if not second.startswith("elastic"):
        places = [{"rank": 0, "world_size": 1}, {"rank": rank, "world_size": 2}]
    if rank == 0:
        assert meet("alone", first, **places[0]) == ["alone"]
        Path(left).touch()
    else:
        eventually(Path(left).exists)
    return meet(f"worker{rank}", second, **places[1])


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["elastic", "tcp"])
def test_a_process_that_has_left_a_group_meets_a_new_one(kind: str, tmp_path: Path) -> None:
    first, second = (f"{kind}://127.0.0.1:{free_port()}" for _ in range(2))
    if kind == "elastic":
        first, second = (f"{first}?run_id=job&world_size={size}" for size in (1, 2))
    found = run_processes(meet_a_new_process, 2, (first, second, str(tmp_path / "left")))
    assert found == [["worker0", "worker1"]] * 2


def join_until_one_has_died(rank: int, url: str) -> int:
    """Join rounds until one follows a round of all three, in which process 1 dies. Return its size."""
    sizes: list[int] = []  # of the first one, too: a last call may end before all three have come
    while 3 not in sizes[:-1]:
        store, own, size = next(rendezvous(f"{url}&is_host={rank == 0}", timeout=30.0))
        sizes.append(size)
        store.set(f"{own}", "-")
        if size == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        store.wait([f"{other}" for other in range(size)])  # no round ends before all have begun it
        store.close()
    return sizes[-1]


@pytest.mark.processes
@pytest.mark.slow
def test_a_process_that_dies_is_not_waited_for() -> None:
    conf = "last_call_timeout=1&keep_alive_interval=0.5"
    url = f"elastic://127.0.0.1:{free_port()}?run_id=job&min_nodes=2&max_nodes=3&{conf}"
    assert run_processes(join_until_one_has_died, 3, (url,), may_die=[1]) == [2, None, 2]
