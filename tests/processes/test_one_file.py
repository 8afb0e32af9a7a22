"""Two jobs that are given one file to meet by: the second one fails, and says why; the first one goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.processes import run_processes
from tests.support.waiting import eventually
from zmqgrad import rpc
from zmqgrad.errors import DuplicateWorkerError

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def program(rank: int, directory: str) -> Any:
    """Ranks 0 and 1 are a job; rank 2 belongs to another one, and comes when that has begun."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{directory}/store", rpc_timeout=30)
    if rank == 2:
        eventually(Path(directory, "begun").exists)
        with pytest.raises(DuplicateWorkerError, match=r"meet by the file '.*/store.*give each job") as e:
            rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=options)
        Path(directory, "refused").touch()
        return str(e.value)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    Path(directory, "begun").touch()
    while not Path(directory, "refused").exists():
        assert rpc.rpc_sync(1 - rank, torch.add, args=(1, 1)) == 2
    rpc.shutdown()
    return "done"


def test_the_second_job_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    first, second, refused = run_processes(program, 3, args=(str(tmp_path),))
    assert first == second == "done"
    assert "name 'worker0' is not unique" in refused
