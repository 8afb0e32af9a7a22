"""A job with a secret, in real processes, over tcp; processes without the secret get an error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zmqgrad.autograd as dist_autograd
import zmqgrad.rpc as rpc
from tests.support.namespaces import Hosts, enter, hosts
from tests.support.processes import run_processes
from tools.ports import free_port
from zmqgrad.errors import ConfigurationError, PeerLostError, RendezvousError
from zmqgrad.store import FileStore, TCPStore

SECRET = "the secret of this job, of 33 bytes"


__all__ = ["hosts"]


def between_hosts(rank: int, path: str) -> tuple[str, list[float]]:
    enter(rank)
    gate = FileStore(path)
    if rank == 2:
        os.environ["ZMQGRAD_SECRET"] = "another secret, of 26 bytes"
        with pytest.raises(RendezvousError, match="the other end has another secret"):
            rpc.init_rpc("stranger", rank=1, world_size=2)
        del os.environ["ZMQGRAD_SECRET"]
        with pytest.raises(ConfigurationError, match=r"will not listen on .* without a secret"):
            rpc.init_rpc("stranger", rank=1, world_size=2)
        gate.set("refused", "")
        return "refused", []
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
    with dist_autograd.context() as context:
        a = torch.full((300,), 2.0, requires_grad=True)
        loss = rpc.rpc_sync(f"w{1 - rank}", torch.mul, (a, a)).sum()
        dist_autograd.backward(context, [loss])
        gradient = dist_autograd.get_gradients(context)[a]
    gate.wait(["refused"], 30)
    rpc.shutdown()
    return f"w{rank}", [float(gradient.min()), float(gradient.max())]


@pytest.mark.processes
@pytest.mark.slow
def test_calls_over_curve_and_processes_without_the_secret(hosts: Hosts, tmp_path: Path) -> None:
    env = {**hosts.environment(), "WORLD_SIZE": "2"}
    *ours, (stranger, _) = run_processes(between_hosts, 3, args=(str(tmp_path / "gate"),), env=env)
    assert ours == [("w0", [4.0, 4.0]), ("w1", [4.0, 4.0])]
    assert stranger == "refused"


def kill_the_receiver(rank: int) -> dict[str, int] | None:
    enter(rank)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
    if rank == 1:
        rpc.shutdown(timeout=60)
        return None
    pid, sent = rpc.rpc_sync("w1", os.getpid), torch.ones(4 << 20)
    assert rpc.rpc_sync("w1", torch.neg, args=(sent,)).equal(-sent)
    sealed = rpc.get_stats()["sealed"]
    calls = [rpc.rpc_async("w1", torch.neg, args=(sent,)) for _ in range(8)]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(PeerLostError):
        calls[-1].wait()
    rpc.shutdown(graceful=False)
    return sealed  # type: ignore[no-any-return]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(90)
def test_the_receiver_of_sealed_tensors_is_killed(hosts: Hosts) -> None:
    """Its caller gets an error, and ends cleanly though records are not acknowledged."""
    pytest.importorskip("cryptography")
    sealed, _ = run_processes(kill_the_receiver, 2, timeout=60, env=hosts.environment(), may_die=[1])
    assert sealed["channels"] == 1
    assert sealed["refused"] == 0


@pytest.mark.processes
@pytest.mark.slow
def test_a_store_served_from_a_terminal(tmp_path: Path) -> None:
    """``store serve --secret-file``: only clients that have the file are served, at any address."""
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_text(f"{SECRET}\n")
    port = free_port()
    command = [sys.executable, "-m", "zmqgrad", "store"]
    served = ["serve", "--host", "0.0.0.0", "--port", f"{port}", "--secret-file", f"{file}"]
    with subprocess.Popen([*command, *served], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as server:
        try:
            with TCPStore("127.0.0.1", port, timeout=30, secret=SECRET) as store:
                store.set("key", "value")
                get = [*command, "get", "key", "--endpoint", f"127.0.0.1:{port}"]
                has = subprocess.run([*get, "--secret-file", f"{file}"], capture_output=True, check=False)
                has_not = subprocess.run(get, capture_output=True, check=False)
                assert (has.returncode, has.stdout) == (0, b"value\n")
                assert (has_not.returncode, has_not.stdout) == (1, b"")
                assert b"wants a secret, and there is none here" in has_not.stderr
        finally:
            server.terminate()
            assert server.stderr is not None
            assert server.stderr.read().count(b"dropped a malformed query") == 1
        assert server.wait(30) == 0
