"""``rpc.shutdown`` among the functions that a program registers to run at its exit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.interpreter import run_forks
from tools.ports import free_port

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PROGRAM = """
import atexit, os, sys
import torch, torch.multiprocessing as mp
import multiprocessing.util
from zmqgrad import rpc

def main(rank, when):
    if when == "before":
        atexit.register(rpc.shutdown)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if when == "after":
        atexit.register(rpc.shutdown)
    if when == "finalizer":
        multiprocessing.util.Finalize(None, rpc.shutdown, exitpriority=0)
    if rank == 0:  # it serves the store, and ends while worker1 still calls it
        tell = lambda: open("exiting", "w").close()
        if multiprocessing.parent_process() is None or sys.version_info >= (3, 13):  # which ends all alike
            atexit.register(tell)
        else:
            multiprocessing.util.Finalize(None, tell, exitpriority=1)
    else:
        open("exiting").close()
        if when == "never":
            return
        print(rpc.rpc_sync("worker0", len, args=("abc",)), flush=True)
"""

STARTS = """
if __name__ == "__main__":
    os.mkfifo("exiting")
    method, when = sys.argv[1:]
    mp.start_processes(main, args=(when,), nprocs=2, start_method=method)
"""


def run(directory: Path, method: str, when: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a program that starts both workers."""
    script = directory / "program.py"
    script.write_text(PROGRAM + STARTS)
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, str(script), method, when],
        env=environ, cwd=directory, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(
    (3, 12, 0) <= sys.version_info < (3, 12, 2), reason="starts no thread once the main thread has ended"
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_shutdown_may_be_an_exit_function(tmp_path: Path, when: str) -> None:
    os.mkfifo(tmp_path / "exiting")
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    programs = [(f"main({rank}, {when!r})", environ) for rank in range(2)]
    assert run_forks(tmp_path, PROGRAM, programs) == [(0, "", ""), (0, "3\n", "")]


def test_shutdown_may_be_an_exit_function_of_a_spawned_process(tmp_path: Path) -> None:
    assert run(tmp_path, "spawn", "before") == (0, "3\n", "")


def test_shutdown_may_be_a_finalizer_of_a_forked_child(tmp_path: Path) -> None:
    assert run(tmp_path, "fork", "finalizer") == (0, "3\n", "")


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_child_that_never_calls_shutdown_ends_quietly(tmp_path: Path, method: str) -> None:
    assert run(tmp_path, method, "never") == (0, "", "")
