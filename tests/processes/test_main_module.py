"""What ``__main__`` defines travels by name, and by value to another program that lacks the name."""

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

SERVER = """
import threading
from zmqgrad import rpc

LOCK, STATE = threading.Lock(), "callee's own"

class Point:
    def __init__(self, x):
        self.x = x

class Counter:
    def __init__(self):
        self.count = 100

    def add(self, n):
        self.count += n
        return self.count

def state_and(point):
    with LOCK:
        return STATE, type(point) is Point, point.x

def make():
    return Point(7)

rpc.init_rpc("worker1", rank=1, world_size=2)
rpc.shutdown()
"""

CLIENT = """
import threading
from zmqgrad import rpc

LOCK, STATE = threading.Lock(), "caller's"

class Point:
    def __init__(self, x):
        self.x = x

class Counter:
    pass

def state_and(point):  # a copy, whose lock cannot be sent
    with LOCK:
        return STATE, type(point) is Point, point.x

def make():  # a stub
    pass

def twice(point):  # calls what the callee has
    return state_and(point), point, only_here()

def only_here():
    return Point(8).x

rpc.init_rpc("worker0", rank=0, world_size=2)
counter = rpc.remote("worker1", Counter)
print(counter.rpc_sync().add(1), counter.rpc_sync().add(1))
print(rpc.rpc_sync("worker1", state_and, args=(Point(3),)))
made = rpc.rpc_sync("worker1", make)
print(type(made) is Point, made.x)
del LOCK
state, point, eight = rpc.rpc_sync("worker1", twice, args=(Point(4),))
print(state, type(point) is Point, eight)
rpc.shutdown()
"""

STARTS = """
import os, runpy, sys

rank = os.environ["RANK"]
runpy.run_path(f"{os.path.dirname(sys.argv[0])}/{rank}.py", run_name="__main__")
"""


def run(tmp_path: Path, other: str, program: str = PROGRAM) -> str:
    """What rank 0 prints."""
    for name, text in (("0", program), ("1", other), ("starts", STARTS)):
        (tmp_path / f"{name}.py").write_text(text)
    return run_script(tmp_path / "starts.py", workers=2)


def test_the_same_program_uses_its_own_globals(tmp_path: Path) -> None:
    assert run(tmp_path, PROGRAM) == "('callee', True, 3)\ncallercaller\n"


def test_another_program_gets_the_code(tmp_path: Path) -> None:
    assert run(tmp_path, OTHER) == "('caller', True, 3)\ncallercaller\n"


def test_another_program_uses_what_it_defines_under_the_same_name_as_with_torch(tmp_path: Path) -> None:
    assert run(tmp_path, SERVER, CLIENT) == (
        '101 102\n("callee\'s own", True, 3)\nTrue 7\n("callee\'s own", True, 4) True 8\n'
    )
