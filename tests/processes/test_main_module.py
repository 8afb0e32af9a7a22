"""What ``__main__`` defines travels: by name to the same program, by value to another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripts import run_script

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PROGRAM = """
import os
from zmqgrad import rpc

rank = int(os.environ["RANK"])
STATE = ("caller", "callee")[rank]

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


STARTS = """
import os, runpy, sys

rank = os.environ["RANK"]
runpy.run_path(f"{os.path.dirname(sys.argv[0])}/{rank}.py", run_name="__main__")
"""


def run(tmp_path: Path, other: str) -> str:
    """What rank 0 prints."""
    for name, text in (("0", PROGRAM), ("1", other), ("starts", STARTS)):
        (tmp_path / f"{name}.py").write_text(text)
    return run_script(tmp_path / "starts.py", workers=2)


def test_the_same_program_uses_its_own_globals(tmp_path: Path) -> None:
    assert run(tmp_path, PROGRAM) == "('callee', True, 3)\ncallercaller\n"


def test_another_program_gets_the_code(tmp_path: Path) -> None:
    assert run(tmp_path, OTHER) == "('caller', True, 3)\ncallercaller\n"
