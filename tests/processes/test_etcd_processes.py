"""Workers that meet in etcd: rank 0 is one as any other, and so is each member of the cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from tests.support.etcd import EtcdCluster, needs_etcd
from tests.support.processes import run_processes
from tests.support.waiting import eventually
from zmqgrad import rpc
from zmqgrad.errors import PeerLostError
from zmqgrad.interop import init_process_group
from zmqgrad.store import EtcdStore

pytestmark = [pytest.mark.processes, pytest.mark.slow, needs_etcd]

WAIT = 25.0
LATE = 3


@pytest.fixture
def cluster() -> Iterator[EtcdCluster]:
    with EtcdCluster(3) as made:
        yield made


def options(url: str) -> rpc.RpcBackendOptions:
    return rpc.RpcBackendOptions(rpc_timeout=WAIT, init_method=url, liveness_timeout=0.3)


def negative(x: int) -> int:
    return -x


def member(rank: int, url: str) -> dict[str, Any] | None:
    """Rank 0 is killed. The calls between 1 and 2 go on, and the last joins afterwards."""
    os.environ.pop("WORLD_SIZE", None)
    store = EtcdStore(url.removeprefix("etcd://").partition("/")[0], "test", WAIT)
    if rank == LATE:
        store.wait(["killed"])
    rpc.init_rpc(f"w{rank}", rank=None, rpc_backend_options=options(url))
    if rank == 0:
        store.set("pid", str(os.getpid()))
        threading.Event().wait(WAIT)  # to be killed
        return None
    others = [f"w{other}" for other in (1, 2) if other != rank]
    rpc.wait_for_workers(others)
    calls = 0
    if rank == 1:
        rpc.wait_for_workers(["w0"])
        os.kill(int(store.get("pid")), signal.SIGKILL)
        store.set("killed", "1")
    while not store.check(["late"]):
        for other in others:
            assert rpc.rpc_sync(other, negative, (calls,)) == -calls
            calls += 1
        if rank == LATE:
            store.set("late", "1")
    if rank == 1:  # it knows rank 0
        with pytest.raises(PeerLostError):
            rpc.rpc_sync("w0", negative, (1,))
    store.barrier("end", LATE)
    rpc.shutdown()
    store.close()
    return {"calls": calls}


def test_rank_0_of_a_dynamic_group_is_killed(cluster: EtcdCluster) -> None:
    found = run_processes(member, 4, [f"etcd://{cluster.endpoint}/job"], may_die=[0])
    assert all(each["calls"] for each in found[1:])


def fixed_member(rank: int, url: str, world_size: int) -> list[int]:
    results = []
    for _ in range(2):  # a second group at the same address
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=world_size, rpc_backend_options=options(url))
        results.append(rpc.rpc_sync(f"w{(rank + 1) % world_size}", negative, (rank,)))
        rpc.shutdown()
    init_process_group("gloo", url, world_size=world_size, rank=rank)
    total = torch.tensor(rank + 1)
    distributed.all_reduce(total)
    distributed.destroy_process_group()
    return [*results, int(total)]


def test_groups_of_fixed_size(cluster: EtcdCluster) -> None:
    found = run_processes(fixed_member, 2, [f"etcd://{cluster.endpoint}/job", 2])
    assert found == [[0, 0, 3], [-1, -1, 3]]


PROGRAM = """
import json, os, sys
from zmqgrad import rpc
from zmqgrad.rendezvous import rendezvous

rank = int(os.environ["RANK"])
rpc.init_rpc(f"w{rank}")
value = rpc.rpc_sync("w1", abs, (-3,))
rpc.shutdown()
store, _, world_size = next(rendezvous("env://"))
store.set(str(rank), "here")
store.wait([str(each) for each in range(world_size)])
with open(f"{sys.argv[1]}/{rank}", "w") as file:
    json.dump({"store": repr(store), "value": value, "url": os.environ["ZMQGRAD_STORE"]}, file)
store.close()
"""


def test_the_launcher_puts_the_store_of_a_round_into_etcd(cluster: EtcdCluster, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    agents = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "zmqgrad", "run", "--nnodes", "2", "--nproc-per-node", "1"),
                *("--rdzv-backend", "etcd", "--rdzv-endpoint", cluster.endpoint, "--rdzv-id", "job/17"),
                *("--rdzv-conf", "last_call_timeout=0.3", "--local-addr", "127.0.0.1"),
                *(str(program), str(tmp_path)),
            ]
        )
        for _ in range(2)
    ]
    try:
        assert [agent.wait(60) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert {each["value"] for each in found} == {3}
    assert {each["store"] for each in found} == {"<EtcdStore 'job/17/0'>"}
    assert found[0]["url"] == f"etcd://{cluster.endpoint}/job%2F17/0"
    eventually(lambda: all(agent.poll() == 0 for agent in agents))
