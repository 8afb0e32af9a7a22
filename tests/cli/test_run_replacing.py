"""``zmqgrad run --replace-torch-rpc``: programs written for torch, with the processes that they spawn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from zmqgrad.cli.run import replacing_torch_rpc

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PROGRAM = """
import os, sys
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch.distributed.rpc import RRef

def implementation():
    return rpc.__name__, RRef.__module__, os.environ.get("SHADOWED")

def work(rank, url):
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2,
                 rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=url))
    if rank == 0:
        assert rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 1)).tolist() == [2, 2]
        assert isinstance(rpc.remote("worker1", torch.ones, (2,)), torch._C._distributed_rpc.PyRRef)
        names = {implementation(), rpc.rpc_sync("worker1", implementation)}
        print("in the workers:", names)
    rpc.shutdown()

if __name__ == "__main__":
    print("in the launched one:", implementation())
    mp.start_processes(work, (sys.argv[1],), nprocs=2, start_method=sys.argv[2])
"""


def run(args: Sequence[str], env: Mapping[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "zmqgrad", "run", *args],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "sitecustomize" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_workers_and_the_processes_that_they_spawn_use_this_library(
    tmp_path: Path, start_method: str
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import os\nos.environ['SHADOWED'] = 'ran'\n")
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    url = f"file://{tmp_path}/store"
    output = run(
        ["--replace-torch-rpc", str(tmp_path / "program.py"), url, start_method], {"PYTHONPATH": path}
    )
    ours = "('zmqgrad.rpc', 'zmqgrad.rpc.rref.api', 'ran')"
    assert f"in the launched one: {ours}" in output
    assert f"in the workers: {{{ours}}}" in output


def test_the_variable_alone_has_the_same_effect_on_the_launcher(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import json, sys, torch\nprint(json.dumps(torch.distributed.rpc.__name__))")
    output = run([str(script)], {"ZMQGRAD_REPLACE_TORCH_RPC": "1"})
    assert json.loads(output.partition("] ")[2]) == "zmqgrad.rpc"


def test_a_python_without_torch_starts_without_it(tmp_path: Path) -> None:
    code = "import sys; print('torch' in sys.modules, 'zmqgrad.rpc' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **replacing_torch_rpc(os.environ)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("False False\n", "")


def test_a_python_that_lacks_this_library_says_so(tmp_path: Path) -> None:
    """Another interpreter, which a worker starts, inherits the variables."""
    variables = replacing_torch_rpc({})
    code = "import sys; sys.path_importer_cache.clear(); print('runs')"
    done = subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            f"import sys; sys.path = sys.path[:1] + sys.path[2:]; import sitecustomize; {code}",
        ],
        env={"PYTHONPATH": os.pathsep.join([str(tmp_path), variables["PYTHONPATH"]])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "runs\n"
    assert "cannot import zmqgrad" in done.stderr
