"""RPC and process groups of torch at one address, as programs for torch's RPC use them: in every order."""

from __future__ import annotations

import http.server
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zmqgrad
from tests.support.namespaces import Hosts, enter, hosts
from tests.support.processes import run_processes
from tools.ports import free_port
from zmqgrad import rpc
from zmqgrad.errors import RendezvousError, RendezvousTimeoutError
from zmqgrad.runtime.clock import MONOTONIC
from zmqgrad.store import TCPStore

pytestmark = [pytest.mark.processes, pytest.mark.slow]

__all__ = ["hosts"]

RPC_TIMEOUT = 30.0

AT_ONCE = 10.0
"""Seconds: plenty for an error that waits for nothing, on any machine, and well below the timeout."""

ORDERS = [
    "group rpc, leave rpc group",
    "rpc group, leave rpc group",
    "rpc group, leave group rpc",
    "rpc, leave rpc, rpc, leave rpc",
    "group rpc, leave rpc, rpc, leave rpc group",
    "our_group rpc, leave rpc group",
    "rpc our_group, leave group, our_group, leave group rpc",
]


class Program:
    """One worker that joins and leaves RPC and process groups at ``url``."""

    def __init__(self, url: str, rank: int, size: int) -> None:
        self.where = {"init_method": url, "rank": rank, "world_size": size}
        self.rank, self.size = rank, size

    def run(self, order: str) -> None:
        for step in order.split(", "):
            words = step.removeprefix("leave ").split()
            for word in words:
                getattr(self, f"leave_{word}" if step.startswith("leave ") else word)()

    def group(self) -> None:
        dist.init_process_group("gloo", **self.where)  # type: ignore[arg-type]
        self._reduce()

    def our_group(self) -> None:
        zmqgrad.init_process_group("gloo", **self.where)
        self._reduce()

    def _reduce(self) -> None:
        ones = torch.ones(2)
        dist.all_reduce(ones)
        assert ones.tolist() == [self.size] * 2

    def rpc(self) -> None:
        options = rpc.RpcBackendOptions(
            init_method=str(self.where["init_method"]), rpc_timeout=RPC_TIMEOUT, num_worker_threads=4
        )
        rpc.init_rpc(f"w{self.rank}", rank=self.rank, world_size=self.size, rpc_backend_options=options)
        assert rpc.rpc_sync(f"w{(self.rank + 1) % self.size}", max, args=(self.rank, 7)) == 7

    def leave_group(self) -> None:
        dist.destroy_process_group()

    def leave_rpc(self) -> None:
        rpc.shutdown()


def in_every_order(rank: int, urls: list[str]) -> int:
    for url, order in zip(urls, ORDERS, strict=True):
        if url == "env://":  # each order has a port of its own, as each program has
            os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        Program(url, rank, 3).run(order)
    return len(urls)


def free_ports(count: int) -> int:
    """The port before ``count`` free ones in a row."""
    while True:
        first = free_port()
        with socket.socket() as s:
            if all(s.connect_ex(("127.0.0.1", first + n)) for n in range(count + 1)):
                return first


@pytest.mark.parametrize("scheme", ["env", "tcp", "file"])
def test_every_order(scheme: str, tmp_path: Path) -> None:
    first = free_ports(len(ORDERS))
    urls = {
        "env": ["env://"] * len(ORDERS),
        "tcp": [f"tcp://127.0.0.1:{first + 1 + n}" for n in range(len(ORDERS))],
        "file": [f"file://{tmp_path}/{n}" for n in range(len(ORDERS))],
    }[scheme]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(first)}
    assert run_processes(in_every_order, 3, args=(urls,), env=env) == [len(ORDERS)] * 3
    if scheme == "file":
        assert not list(tmp_path.glob("*.rpc")), "the files of RPC end with their groups"


def beside_a_worker_without_rpc(rank: int) -> None:
    if rank < 2:
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
    Program("env://", rank, 3).group()
    dist.destroy_process_group()
    if rank < 2:
        rpc.shutdown()


def test_a_process_group_may_have_workers_without_rpc() -> None:
    """They seek torch's store, maybe before rank 0 needs one."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    run_processes(beside_a_worker_without_rpc, 3, env=env)


def with_a_store_of_torch(rank: int) -> str:
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
    store, _, _ = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    store.set(f"from {rank}", str(rank))
    found: bytes = store.get(f"from {1 - rank}")
    rpc.shutdown()
    return found.decode()


def test_a_program_may_use_the_store_of_torch_itself() -> None:
    """As the page for programs of torch's RPC says."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    assert run_processes(with_a_store_of_torch, 2, env=env) == ["1", "0"]


def as_slurm_starts_it(rank: int) -> None:
    for name, value in {
        "STEP_ID": 0,
        "PROCID": rank,
        "STEP_NUM_TASKS": 2,
        "STEP_NODELIST": "localhost",
    }.items():
        os.environ[f"SLURM_{name}"] = str(value)
    del os.environ["RANK"]
    del os.environ["WORLD_SIZE"]
    rpc.init_rpc(f"w{rank}")
    zmqgrad.init_process_group("gloo")
    Program("env://", rank, 2)._reduce()
    dist.destroy_process_group()
    rpc.shutdown()


def test_under_slurm() -> None:
    run_processes(as_slurm_starts_it, 2, env={"SLURM_JOB_ID": "7", "MASTER_PORT": str(free_port())})


def beside_a_dynamic_group(rank: int) -> list[str]:
    if rank == 0:
        rpc.init_rpc("w0", rank=0)
        Program("env://", 0, 2).group()
        rpc.wait_for_workers(["w1"], RPC_TIMEOUT)
    else:
        Program("env://", 1, 2).group()
        rpc.init_rpc("w1", rank=1)
    names = [info.name for info in rpc.get_worker_infos()]
    dist.barrier()
    dist.destroy_process_group()
    rpc.shutdown()
    return names


def test_beside_a_dynamic_group() -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": ""}
    assert run_processes(beside_a_dynamic_group, 2, env=env) == [["w0", "w1"]] * 2


released = threading.Event()


def release() -> None:
    released.set()


def of_both_kinds(rank: int, url: str, sized: int) -> tuple[str, float]:
    """Only rank ``sized`` passes a world size; the error of this one, and its seconds."""
    options = rpc.RpcBackendOptions(init_method=url, rpc_timeout=RPC_TIMEOUT)
    began = MONOTONIC.now()
    world_size = 2 if rank == sized else None
    try:
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    except RendezvousError as e:
        error = f"{type(e).__name__}: {e}", MONOTONIC.now() - began
        if "is in a group of no fixed size" in str(e):  # as it says, with no world size it can join
            rpc.init_rpc("late", rank=rank, rpc_backend_options=options)
            rpc.rpc_sync(f"w{1 - rank}", release)
            rpc.shutdown()
        return error
    assert released.wait(RPC_TIMEOUT)
    rpc.shutdown()
    return "", 0.0


MIXED = r"RendezvousError: .*RPC group mixes statically and dynamically initialized members"


@pytest.mark.parametrize("scheme", ["env", "tcp", "file"])
@pytest.mark.parametrize("sized", [0, 1])
def test_groups_of_both_kinds_are_recognized_at_once(scheme: str, sized: int, tmp_path: Path) -> None:
    """On all ranks but a first one without a world size, which waits for no others."""
    port = free_port()
    url = {"env": "env://", "tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{tmp_path}/meet"}[scheme]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": ""}
    found = run_processes(of_both_kinds, 2, args=(url, sized), env=env)
    may_be_first = scheme == "file" or sized == 1
    for rank, (error, seconds) in enumerate(found):
        assert re.match(MIXED, error) or (may_be_first and not error and rank != sized)
        assert seconds < AT_ONCE


served = threading.Event()


def serve(rank: int) -> int:
    served.set()
    return rank


def one_after_the_other(rank: int) -> int:
    for world_size in (None, 2, None, 2, 2):
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=world_size)
        if world_size is None:
            rpc.wait_for_workers([f"w{1 - rank}"], RPC_TIMEOUT)
        assert rpc.rpc_sync(f"w{1 - rank}", serve, args=(rank,)) == rank
        assert served.wait(
            RPC_TIMEOUT
        )  # a member of a dynamic group may leave before the other has called it
        served.clear()
        rpc.shutdown()
    return rank


def test_groups_of_both_kinds_one_after_the_other() -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": ""}
    assert run_processes(one_after_the_other, 2, env=env) == [0, 1]


def between_hosts(rank: int, order: str) -> None:
    enter(rank)
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name != "lo")
    Program("env://", rank, 2).run(order)


@pytest.mark.parametrize("order", ORDERS[:2])
def test_between_hosts_with_a_secret(hosts: Hosts, order: str) -> None:
    run_processes(between_hosts, 2, args=(order,), env={**hosts.environment(), "WORLD_SIZE": "2"})


def refused_without_a_secret(rank: int) -> str:
    enter(rank)
    with pytest.raises(Exception) as raised:  # noqa: PT011  its type and text are compared below
        Program("env://", rank, 2).rpc()
    return f"{raised.type.__name__}: {raised.value}"


def test_between_hosts_without_one(hosts: Hosts) -> None:
    """The refusal stands; torch's store, which would let in anybody, is not served either."""
    env = {**hosts.environment(), "WORLD_SIZE": "2"}
    del env["ZMQGRAD_SECRET"]
    (said,) = run_processes(refused_without_a_secret, 1, env=env)
    assert "ConfigurationError" in said
    assert "ZMQGRAD_SECRET" in said


SCRIPT = """
import os
import torch
import torch.distributed as dist
from zmqgrad import rpc

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc(f"w{rank}", rank=rank, world_size=size)
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
os.write(1, f"{rpc.rpc_sync(f'w{1 - rank}', max, args=(rank, 7))} {ones.item()}\\n".encode())
dist.destroy_process_group()
rpc.shutdown()
"""


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "launcher",
    [["zmqgrad", "run"], ["torch.distributed.run", "--standalone"], ["torch.distributed.run"]],
    ids=" ".join,
)
def test_by_a_launcher(launcher: list[str], tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(SCRIPT)
    port = [] if "--standalone" in launcher else ["--master-port", str(free_port())]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "--nproc-per-node=2", *port, str(script)],
        env={**os.environ, "PYTHONPATH": str(Path(zmqgrad.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line[-5:] for line in done.stdout.splitlines() if line) == ["7 2.0", "7 2.0"], done.stdout


# ---- foreign servers -------------------------------------------------------------------------------------


@contextmanager
def web_server() -> Iterator[int]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@contextmanager
def old_store() -> Iterator[int]:
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        yield store.port


@contextmanager
def silent_server() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def refused(rank: int, timeout: float) -> tuple[str, float]:
    began = MONOTONIC.now()
    options = rpc.RpcBackendOptions(join_timeout=timeout)
    with pytest.raises(RendezvousError) as raised:
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    return f"{raised.type.__name__}: {raised.value}", MONOTONIC.now() - began


@pytest.mark.parametrize(
    ("server", "what"),
    [(web_server, "a web server"), (old_store, "ZeroMQ socket")],
    ids=["a web server", "a store of another job"],
)
def test_a_foreign_server_is_recognised_on_all_ranks(server: type, what: str) -> None:
    with server() as port:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for said, seconds in run_processes(refused, 2, args=(RPC_TIMEOUT,), env=env):
            assert what in said, said
            assert f"127.0.0.1:{port}" in said
            assert seconds < AT_ONCE


def test_a_silent_server_is_named_when_the_time_is_up() -> None:
    with silent_server() as port:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        (zero, _), (one, seconds) = run_processes(refused, 2, args=(4.0,), env=env)
    assert "the port is in use by another process" in zero, zero
    assert RendezvousTimeoutError.__name__ in one, one
    assert f"127.0.0.1:{port}" in one
    assert seconds < AT_ONCE
