"""What programs print when the interpreter ends while they still hold RRefs: nothing of ours."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.processes import free_port

pytestmark = [pytest.mark.processes, pytest.mark.slow]

HEAD = """
import os, sys, types
import torch
from torch import nn
from zmqgrad import rpc
from zmqgrad.nn import RemoteModule

class Holder:
    pass

def keep(rref):
    Holder.kept = rref

def wait_for_worker0():
    if RANK == 1:
        sys.stdin.read()  # its end comes with the end of worker 0

RANK = int(os.environ["RANK"])
rpc.init_rpc(f"worker{RANK}", rank=RANK, world_size=2)
"""

MADE = "rref = rpc.remote('worker1', torch.ones, args=(2,))\nrref.to_here()\n"

REFERENCES = """
def make():
    rref = rpc.remote("worker1", torch.ones, args=(2,))
    rref.to_here()
    return rref

in_global = make()
owned = rpc.RRef(torch.ones(2)); rpc.rpc_sync("worker1", keep, args=(owned,))
made = types.ModuleType("made"); made.rref = make(); sys.modules["made"] = made
show = (lambda held: lambda: held)(make())
cycle = Holder(); cycle.self = cycle; cycle.rref = make(); del cycle
Holder.rref = make()
model = RemoteModule("worker1/cpu", nn.Linear, args=(2, 2)); model(torch.ones(1, 2))
future = rpc.rpc_async("worker1", torch.ones, args=(2,)); future.wait()
torch.held_rref = make(); torch.held_handle = make().handle  # finalized when few modules are left
"""


def run_both(tmp_path: Path, code: str) -> list[tuple[int, str]]:
    """Run ``code`` as both workers. Returns the exit code and stderr of each."""
    script = tmp_path / "program.py"
    script.write_text(HEAD + textwrap.dedent(code))
    environ = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "NEXT_PORT": str(free_port()),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    running = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**environ, "RANK": str(rank)},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    written = [process.communicate(timeout=60)[1] for process in running]
    return [(process.returncode, text) for process, text in zip(running, written, strict=True)]


def test_nothing_is_printed_after_shutdown(tmp_path: Path) -> None:
    code = "if RANK == 0:\n" + textwrap.indent(REFERENCES, "    ") + "rpc.shutdown()\n"
    assert run_both(tmp_path, code) == [(0, "")] * 2


def test_nothing_is_printed_by_spawned_processes(tmp_path: Path) -> None:
    script = tmp_path / "spawning.py"
    script.write_text(
        "import os\n"
        "import torch, torch.multiprocessing as mp\n"
        "from zmqgrad import rpc\n"
        "def main(rank):\n"
        "    rpc.init_rpc(f'worker{rank}', rank=rank, world_size=2)\n"
        "    torch.held_rref = rpc.remote(f'worker{1 - rank}', torch.ones, args=(2,))\n"
        "    torch.held_rref.to_here()\n"
        "    rpc.shutdown()\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(main, nprocs=2)\n"
    )
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=90, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


ENDS = {
    "without_shutdown": ("wait_for_worker0()\n", 0),
    "ungraceful": ("wait_for_worker0()\nrpc.shutdown(graceful=False)\n", 0),
    "unhandled_exception": ("if RANK == 0:\n    raise ValueError('mine')\nrpc.shutdown()\n", 1),
    "sys_exit": ("if RANK == 0:\n    sys.exit(3)\nrpc.shutdown()\n", 3),
    "shutdown_in_atexit": ("import atexit; atexit.register(rpc.shutdown)\n", 0),
    "shutdown_twice": (
        "rpc.shutdown()\n"
        "os.environ['MASTER_PORT'] = os.environ['NEXT_PORT']\n"
        "rpc.init_rpc(f'worker{RANK}', rank=RANK, world_size=2)\n"
        "torch.other = rpc.remote(f'worker{1 - RANK}', keep, args=(1,))\n"
        "torch.other.to_here()\n"
        "rpc.shutdown()\n",
        0,
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_nothing_of_ours_is_printed_however_a_program_ends(tmp_path: Path, end: str) -> None:
    code, expected = ENDS[end]
    code = "if RANK == 0:\n" + textwrap.indent(REFERENCES, "    ") + code
    (returned, text), _ = run_both(tmp_path, code)
    assert returned == expected
    if end == "unhandled_exception":
        assert text.startswith("Traceback (most recent call last):")
        assert text.endswith("ValueError: mine\n")
        assert text.count("Traceback") == 1
    else:
        assert text == ""
