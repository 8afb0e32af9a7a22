"""What ``__main__`` defines travels: by name to the same program, by value to another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import free_port

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PROGRAM = """
import sys
from zmqgrad import rpc

rank, STATE = int(sys.argv[1]), sys.argv[2]

class Point:
    def __init__(self, x):
        self.x = x

def state_and(point):
    return STATE, type(point) is Point, point.x

if __name__ == "__main__":
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        print(rpc.rpc_sync("worker1", state_and, args=(Point(3),)))
        print(rpc.rpc_sync("worker1", lambda: STATE + STATE))
    rpc.shutdown()
"""

OTHER = """
from zmqgrad import rpc

rpc.init_rpc("worker1", rank=1, world_size=2)
rpc.shutdown()
"""


def run(tmp_path: Path, other: str) -> str:
    """What rank 0 prints."""
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    programs = []
    for rank, (text, state) in enumerate(((PROGRAM, "caller"), (other, "callee"))):
        (tmp_path / f"{rank}.py").write_text(text)
        programs.append([sys.executable, str(tmp_path / f"{rank}.py"), str(rank), state])
    callee = subprocess.Popen(programs[1], env=env)
    try:
        caller = subprocess.run(programs[0], env=env, check=True, capture_output=True, text=True, timeout=80)
        assert callee.wait(30) == 0
    finally:
        callee.kill()
        callee.wait()
    return caller.stdout


def test_the_same_program_uses_its_own_globals(tmp_path: Path) -> None:
    assert run(tmp_path, PROGRAM) == "('callee', True, 3)\ncallercaller\n"


def test_another_program_gets_the_code(tmp_path: Path) -> None:
    assert run(tmp_path, OTHER) == "('caller', True, 3)\ncallercaller\n"
