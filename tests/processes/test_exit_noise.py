"""What programs print when the interpreter ends while they still hold RRefs: nothing of ours."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.interpreter import Ended, run_forks
from tools.ports import free_port

pytestmark = [pytest.mark.processes, pytest.mark.slow]

IMPORTS = """
import os, sys, types
import torch
from torch import nn
from zmqgrad import rpc
from zmqgrad.nn import RemoteModule

class Holder:
    pass

def keep(rref):
    Holder.kept = rref
"""

HEAD = """
RANK = int(os.environ["RANK"])
held = os.open(os.environ["FIFO"], os.O_RDONLY if RANK == 1 else os.O_WRONLY)

def wait_for_worker0():
    if RANK == 1:
        os.read(held, 1)  # its end comes with the end of worker 0

rpc.init_rpc(f"worker{RANK}", rank=RANK, world_size=2)
"""

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

ENDS = {
    "shutdown": ("rpc.shutdown()\n", 0),
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


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Ended, Ended]]:
    """How both workers of each program have ended."""
    directory = tmp_path_factory.mktemp("ends")
    programs = []
    for end, (code, _) in ENDS.items():
        os.mkfifo(fifo := directory / end)
        ports = {"MASTER_PORT": str(free_port()), "NEXT_PORT": str(free_port())}
        environ = {"MASTER_ADDR": "127.0.0.1", "FIFO": str(fifo), **ports}
        makes = "if RANK == 0:\n" + textwrap.indent(REFERENCES, "    ")
        programs += [(HEAD + makes + code, {**environ, "RANK": str(rank)}) for rank in range(2)]
    found = run_forks(directory, IMPORTS, programs)
    return dict(zip(ENDS, zip(found[::2], found[1::2], strict=True), strict=True))


@pytest.mark.parametrize("end", ENDS)
def test_nothing_of_ours_is_printed_however_a_program_ends(
    ended: dict[str, tuple[Ended, Ended]], end: str
) -> None:
    (returned, _, text), other = ended[end]
    assert returned == ENDS[end][1]
    if end == "unhandled_exception":
        assert text.startswith("Traceback (most recent call last):")
        assert text.endswith("ValueError: mine\n")
        assert text.count("Traceback") == 1
    else:
        assert text == ""
    if end == "shutdown":
        assert other == (0, "", "")


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
