"""Workers that are declared lost while they are stopped, and then go on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.processes.test_dynamic_processes import WAIT, stop
from tests.support.processes import run_processes
from tests.support.waiting import eventually
from zmqgrad import rpc
from zmqgrad.errors import PeerLostError
from zmqgrad.rpc.current import current_worker
from zmqgrad.store import FileStore

pytestmark = [pytest.mark.processes, pytest.mark.slow]

OPTIONS = rpc.RpcBackendOptions(
    rpc_timeout=WAIT, num_worker_threads=4, liveness_timeout=0.3, frozen_timeout=1.0, refused_timeout=0.5
)


def wait_for(directory: str, key: str) -> None:
    """Served by worker 0 until worker 1 has learnt that it is lost."""
    with FileStore(f"{directory}/signs", timeout=WAIT) as signs:
        signs.wait([key])


def be_stopped(rank: int, directory: str, dynamic: bool) -> str:
    """Worker 0 stops worker 1 until it is lost for worker 0, and longer."""
    if dynamic:
        os.environ.pop("WORLD_SIZE", None)
    rpc.init_rpc(f"worker{rank}", rank=rank, rpc_backend_options=OPTIONS)
    rpc.wait_for_workers([f"worker{1 - rank}"])
    with FileStore(f"{directory}/signs", timeout=WAIT) as signs:
        if rank == 1:
            waiting = rpc.rpc_async("worker0", wait_for, args=(directory, "told"), timeout=0)
            signs.set("pid", str(os.getpid()))
            with pytest.raises(PeerLostError) as caught:
                waiting.wait()
            signs.set("told", str(caught.value))
            rpc.shutdown(graceful=False)
            return str(caught.value)
        pid = int(signs.get("pid"))
        rpc.rpc_sync("worker1", os.getpid)
        stop(pid)
        eventually(lambda: current_worker().lost, lambda lost: 1 in lost, WAIT)
        if dynamic:
            eventually(rpc.get_worker_infos, lambda infos: len(infos) == 1, WAIT)
        os.kill(pid, signal.SIGCONT)
        try:
            signs.wait(["told"], 10.0)
        finally:
            rpc.shutdown(graceful=False)
        return ""


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_worker_that_was_lost_while_it_was_stopped_is_told(tmp_path: Path, dynamic: bool) -> None:
    _, told = run_processes(be_stopped, 2, args=(str(tmp_path), dynamic))
    assert "must join again" in told
