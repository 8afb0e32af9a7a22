"""The store at an endpoint, and torchelastic's own agent over our rendezvous."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from torch.distributed.elastic.utils import store as torchelastic_store

from tests.support.etcd import EtcdCluster, needs_etcd
from tools.ports import free_port
from zmqgrad.elastic import LaunchConfig, create_handler
from zmqgrad.elastic.agent.addresses import master_address
from zmqgrad.elastic.agent.job import open_coordinator
from zmqgrad.elastic.endpoint import is_this_host, open_endpoint, parse_endpoint
from zmqgrad.errors import ConfigurationError, RendezvousConnectionError, StoreError
from zmqgrad.interop.torchrun import TorchrunHandler


@pytest.mark.parametrize(
    ("endpoint", "parsed"),
    [
        ("", ("localhost", 29400)),
        ("host", ("host", 29400)),
        ("host:1", ("host", 1)),
        ("[::1]:5", ("[::1]", 5)),
        ("[::1]", ("[::1]", 29400)),
        (" 10.0.0.1:7 ", ("10.0.0.1", 7)),
    ],
)
def test_endpoints(endpoint: str, parsed: tuple[str, int]) -> None:
    assert parse_endpoint(endpoint) == parsed


@pytest.mark.parametrize("endpoint", ["host:x", "host:65536", "host:-1"])
def test_malformed_endpoints(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match="must be host or host:port"):
        parse_endpoint(endpoint)


def test_the_first_process_on_the_host_serves_the_store() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    with open_endpoint(endpoint, 20.0) as first, open_endpoint(endpoint, 20.0) as second:
        assert (first.is_master, second.is_master) == (True, False)
        first.set("k", "1")
        assert second.get("k") == b"1"
        with pytest.raises(RendezvousConnectionError, match="cannot be used"):
            open_endpoint(endpoint, 20.0, is_host=True)


def test_a_job_whose_store_ends_with_another_job_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    endpoint = f"127.0.0.1:{free_port()}"

    def warned(job: str) -> bool:
        caplog.clear()
        handlers.callback(create_handler("zmqgrad", endpoint, job, 1, 2).close)
        return f"served by a process of another job, 'one': this job ({job!r}) fails when" in caplog.text

    with ExitStack() as handlers:
        assert [warned(job) for job in ("one", "one", "two")] == [False, False, True]
    with open_endpoint(endpoint, 20.0), ExitStack() as handlers:  # as `zmqgrad store serve` does
        assert not warned("two")


def test_an_endpoint_that_is_not_served() -> None:
    with pytest.raises(RendezvousConnectionError, match=r"127\.0\.0\.1:\d+ cannot be used"):
        open_endpoint(f"127.0.0.1:{free_port()}", 0.2, is_host=False)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(RendezvousConnectionError, match=r"a server that sends nothing, .* listens there"),
    ):
        open_endpoint(f"127.0.0.1:{silent.getsockname()[1]}", 0.2, is_host=False)
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as web, ThreadPoolExecutor() as pool:
        serving = pool.submit(web.serve_forever, 0.01)
        try:
            with pytest.raises(RendezvousConnectionError, match="a web server listens there"):
                open_endpoint(f"127.0.0.1:{web.server_port}", 0.2, is_host=False)
        finally:
            web.shutdown()
            serving.result(20)
    assert is_this_host("localhost")
    assert not is_this_host("192.0.2.1")


def test_the_name_of_this_host_before_it_is_in_the_dns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "digits-0.digits.invalid")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert is_this_host("digits-0.digits")
    assert is_this_host("digits-0.digits.invalid")
    assert not is_this_host("digits-1.digits")
    assert not is_this_host("digits-0.dig")


def unknown(*_: object, **__: object) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_a_name_that_is_known_later_may_be_that_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    known = iter([False, False, True])
    monkeypatch.setattr("zmqgrad.elastic.endpoint.is_this_host", lambda host: next(known))
    monkeypatch.setattr("zmqgrad.elastic.endpoint.why_unknown", lambda host: "; it is unknown")
    monkeypatch.setattr("zmqgrad.elastic.endpoint.LOOK_SECONDS", 0.05)
    with open_endpoint(f"127.0.0.1:{free_port()}", 20.0) as store:
        assert store.is_master


def test_an_agent_does_not_need_the_name_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pod may start before that which serves the rendezvous has a name."""
    monkeypatch.setenv("ZMQGRAD_ALLOW_INSECURE", "1")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    config = LaunchConfig(min_nodes=2, max_nodes=2, rdzv_endpoint="digits-0.digits")
    open_coordinator(config, []).close()
    with pytest.raises(RendezvousConnectionError, match="no route to the rendezvous endpoint digits-0"):
        master_address(config)


SCRIPT = """
import os, signal, sys
from zmqgrad import rpc

failed = sys.argv[0] + ".failed"
is_first_round = not os.path.exists(failed)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc(f"w{rank}", rank=rank, world_size=size)
line = f"{rank} of {size}: {rpc.rpc_sync(f'w{(rank + 1) % size}', max, args=(rank, 7))}\\n"
if is_first_round and rank == 1:
    open(failed, "w").close()
    os._exit(1)
if is_first_round:
    signal.pause()
os.write(1, line.encode())
rpc.shutdown()
"""
"""In the first round, worker 0 waits until its agent ends it: if it succeeded, as shutdown does without the
dead worker 1, torch's agent would wait for the other one in its exit barrier, and not join the next round."""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["zmqgrad.interop.torchrun", "torch.distributed.elastic.rendezvous"])
def test_torchelastic_knows_our_backends_whichever_is_imported_first(first: str) -> None:
    """It loads all entry points while it is imported, and only logs it if one of them fails."""
    program = (
        f"import {first}, zmqgrad.interop.torchrun\n"
        "from torch.distributed.elastic.rendezvous import rendezvous_handler_registry\n"
        "print(*sorted(name for name in rendezvous_handler_registry._registry if 'zmqgrad' in name))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("zmqgrad zmqgrad-etcd\n", "")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("backend", ["zmqgrad", pytest.param("zmqgrad-etcd", marks=needs_etcd)])
def test_torchrun_restarts_workers_over_our_rendezvous(tmp_path: Path, backend: str) -> None:
    """Two agents; a worker fails in the first round, and the second round succeeds."""
    with EtcdCluster(1) if backend == "zmqgrad-etcd" else nullcontext() as cluster:
        _run_two_agents(tmp_path, backend, cluster.endpoint if cluster else f"127.0.0.1:{free_port()}")


def _run_two_agents(tmp_path: Path, backend: str, endpoint: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(SCRIPT)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
        *(f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}", "--rdzv-id=job"),
        *("--max-restarts=1", "--local-addr=127.0.0.1", "--monitor-interval=0.1", str(script)),
    ]
    environ = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    outputs = [tmp_path / "agent0.txt", tmp_path / "agent1.txt"]
    agents = []
    for output in outputs:
        with output.open("w") as file:
            agents.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environ))
    deadline = time.monotonic() + 100
    for agent in agents:
        try:
            agent.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            agent.send_signal(signal.SIGABRT)  # prints the stacks
            agent.wait(10)
    said = [output.read_text() for output in outputs]
    assert [agent.returncode for agent in agents] == [0, 0], "\n\n".join(said)
    assert {"0 of 2: 7", "1 of 2: 7"} <= set("\n".join(said).splitlines()), said


def test_torchs_exit_barrier_ends_when_an_agent_is_lost() -> None:
    """It would wait for it for 300 s."""
    endpoint = f"127.0.0.1:{free_port()}"
    conf = {"keep_alive_interval": "0.2", "last_call_timeout": "1"}
    made = [create_handler("zmqgrad", endpoint, "job", 2, 2, **conf) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        adapted = [TorchrunHandler(handler, "zmqgrad", "127.0.0.1") for handler in made]
        assert [handler.num_nodes_waiting() for handler in adapted] == [0, 0], "neither has joined yet"
        joined, _ = pool.map(lambda handler: handler.next_rendezvous(), adapted)
    made[1].stop()  # its heartbeats end
    with pytest.raises(StoreError, match=r"may never be set: .* left or was lost"):
        torchelastic_store.barrier(joined.store, 2, "exit", barrier_timeout=300)
    made[1].close(leave=False)
    assert adapted[0].shutdown()
    assert adapted[0].shutdown(), "it can be repeated"


def test_the_documented_program_runs(tmp_path: Path) -> None:
    page = Path(__file__).parents[2].joinpath("docs/elastic.md").read_text()
    (program,) = (p for p in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "lease_left" in p)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    rank, lease = done.stdout.splitlines()
    assert rank == "0 1 0"
    assert lease.startswith("0 [] [] ")
