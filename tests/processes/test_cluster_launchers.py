"""Groups that form by the environment of a cluster's launcher alone: real mpirun, others as recorded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.ports import free_port

TIMEOUT_SECONDS = 100.0

JOINS = """
from zmqgrad.rendezvous import rendezvous

store, rank, world_size = next(rendezvous("env://", timeout=60))
store.set(f"arrived/{rank}", "")
if rank == 0:  # it serves the store
    store.wait([f"arrived/{other}" for other in range(world_size)], 60)
store.close()
print(rank, world_size)
"""

CALLS = """
import json, pathlib, sys, torch
import zmqgrad.rpc as rpc
from zmqgrad.environment import read_launch

rank = read_launch().rank
rpc.init_rpc(f"worker{rank}")
result = rpc.rpc_sync(f"worker{1 - rank}", torch.add, (torch.ones(2), rank))
rpc.shutdown()
pathlib.Path(sys.argv[1], str(rank)).write_text(json.dumps(result.tolist()))
"""

OURS = (
    "MASTER_",
    "SLURM_",
    "OMPI_",
    "PMI",
    "MPI_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "JOB_",
    "TORCHELASTIC_",
)


def clean() -> dict[str, str]:
    """The environment without what launchers set."""
    return {name: value for name, value in os.environ.items() if not name.startswith(OURS)}


def srun(rank: int, port: int) -> dict[str, str]:
    step = {"SLURM_JOB_ID": str(port), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    return {**step, "SLURM_STEP_NODELIST": "127.0.0.[1-2]", "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"}


def mpiexec(rank: int, port: int) -> dict[str, str]:
    hydra = {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": str(rank), "PMI_RANK": str(rank), "PMI_SIZE": "2"}
    return {**hydra, "MASTER_PORT": str(port)}


def pod(rank: int, port: int) -> dict[str, str]:
    manifest = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**manifest, "JOB_COMPLETION_INDEX": str(rank), "HOSTNAME": f"digits-{rank}"}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("launcher", [srun, mpiexec, pod])
def test_workers_find_each_other(launcher: Callable[[int, int], dict[str, str]]) -> None:
    port = free_port()
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", JOINS],
            env={**clean(), **launcher(rank, port)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [worker.communicate(timeout=TIMEOUT_SECONDS)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert printed == ["0 2\n", "1 2\n"]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("mpirun"), reason="needs mpirun (Debian: openmpi-bin)")
@pytest.mark.parametrize("agents", [False, True])
def test_calls_between_workers_of_mpirun(tmp_path: Path, agents: bool) -> None:
    """``agents``: mpirun starts one agent for each worker, as on two hosts."""
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    program = [sys.executable, "-c", CALLS, str(tmp_path)]
    if agents:
        meet = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        program = [sys.executable, "-m", "zmqgrad", "run", *meet, "--no-python", *program]
    command = ["mpirun", "--oversubscribe", "-n", "2", *program]
    done = subprocess.run(
        command, env={**clean(), **as_root}, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert results == [[1.0, 1.0], [2.0, 2.0]]
