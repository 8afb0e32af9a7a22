"""``rpc.shutdown`` among the functions that a program registers to run at its exit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import free_port

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
        if multiprocessing.parent_process() is None:
            atexit.register(tell)
        else:
            multiprocessing.util.Finalize(None, tell, exitpriority=1)
    else:
        open("exiting").close()
        if when == "never":
            return
        print(rpc.rpc_sync("worker0", len, args=("abc",)), flush=True)

if __name__ == "__main__":
    method, when = sys.argv[1:3]
    if method == "main":
        main(int(sys.argv[3]), when)
    else:
        os.mkfifo("exiting")
        mp.start_processes(main, args=(when,), nprocs=2, start_method=method)
"""


def run(directory: Path, method: str, when: str) -> list[tuple[int, str, str]]:
    """Run both workers; exit code, stdout and stderr of each process that was started here."""
    script = directory / "program.py"
    script.write_text(PROGRAM)
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    ranks = [["0"], ["1"]] if method == "main" else [[]]
    if method == "main":
        os.mkfifo(directory / "exiting")
    running = [
        subprocess.Popen(
            [sys.executable, str(script), method, when, *rank],
            env=environ, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in ranks
    ]  # fmt: skip
    try:
        written = [process.communicate(timeout=90) for process in running]
    finally:
        for process in running:
            process.kill()
    return [(p.returncode, *texts) for p, texts in zip(running, written, strict=True)]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("method", ["main", "spawn"])
def test_shutdown_may_be_an_exit_function(tmp_path: Path, method: str, when: str) -> None:
    ended = run(tmp_path, method, when)
    assert [(code, text) for code, _, text in ended] == [(0, "")] * len(ended)
    assert "".join(text for _, text, _ in ended) == "3\n"


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_shutdown_may_be_a_finalizer_of_a_forked_child(tmp_path: Path, method: str) -> None:
    assert run(tmp_path, method, "finalizer") == [(0, "3\n", "")]


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_child_that_never_calls_shutdown_ends_quietly(tmp_path: Path, method: str) -> None:
    assert run(tmp_path, method, "never") == [(0, "", "")]
