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

HOLDERS = {
    "global": MADE,
    "owner": "rref = rpc.RRef(torch.ones(2)); rpc.rpc_sync('worker1', keep, args=(rref,))\n",
    "module": MADE
    + "holder = types.ModuleType('holder'); holder.rref = rref; sys.modules['holder'] = holder\n",
    "closure": MADE + "show = (lambda held: lambda: held)(rref); del rref\n",
    "cycle": MADE + "holder = Holder(); holder.self = holder; holder.rref = rref; del rref, holder\n",
    "class": MADE + "Holder.rref = rref\n",
    "torch": MADE + "torch.zmqgrad_test = rref; torch.zmqgrad_handle = rref.handle\n",
    "finalizer": MADE
    + "class Last:\n    def __del__(self):\n        self.rref = None\n"
    + "last = Last(); last.rref = rref; last.self = last; sys.zmqgrad_test = last\n",
    "remote_module": "model = RemoteModule('worker1/cpu', nn.Linear, args=(2, 2)); model(torch.ones(1, 2))\n",
    "waited": "future = rpc.rpc_async('worker1', torch.ones, args=(2,)); future.wait()\n" + MADE,
}


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


@pytest.mark.parametrize("holder", HOLDERS)
def test_nothing_is_printed_after_shutdown(tmp_path: Path, holder: str) -> None:
    code = "if RANK == 0:\n" + textwrap.indent(HOLDERS[holder], "    ") + "rpc.shutdown()\n"
    assert run_both(tmp_path, code) == [(0, "")] * 2


ENDS = {
    "without_shutdown": ("wait_for_worker0()\n", 0),
    "ungraceful": ("wait_for_worker0()\nrpc.shutdown(graceful=False)\n", 0),
    "unhandled_exception": ("if RANK == 0:\n    raise ValueError('mine')\nrpc.shutdown()\n", 1),
    "sys_exit": ("if RANK == 0:\n    sys.exit(3)\nrpc.shutdown()\n", 3),
    "shutdown_in_atexit": ("import atexit; atexit.register(rpc.shutdown)\n", 0),
    "shutdown_twice": (
        "rpc.shutdown()\nos.environ['MASTER_PORT'] = os.environ['NEXT_PORT']\n"
        "rpc.init_rpc(f'worker{RANK}', rank=RANK, world_size=2)\nother = rpc.remote(f'worker{1 - RANK}', keep,"
        " args=(1,)); other.to_here()\ntorch.other = other\nrpc.shutdown()\n",
        0,
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_nothing_of_ours_is_printed_however_a_program_ends(tmp_path: Path, end: str) -> None:
    code, expected = ENDS[end]
    held = HOLDERS["torch"] + "holder = Holder(); holder.self = holder; holder.rref = rref\n"
    (returned, text), _ = run_both(tmp_path, "if RANK == 0:\n" + textwrap.indent(held, "    ") + code)
    assert returned == expected
    own = "Traceback (most recent call last):" if end == "unhandled_exception" else ""
    assert text.startswith(own) and text.count("Traceback") == bool(own) and "ignored" not in text, text
    assert text == "" or text.endswith("ValueError: mine\n")
