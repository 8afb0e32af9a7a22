"""What is noted of the garbage collector."""

from __future__ import annotations

import subprocess
import sys

import pytest

INTERRUPTED_IN_A_COLLECTION = """
import _thread, gc, sys
from collections import defaultdict
from functools import partial

from zmqgrad.runtime.blocking import may_wait_for_others

class Interrupt:
    start = stop = None

setattr(Interrupt, sys.argv[1], property(defaultdict(_thread.interrupt_main).__missing__))
gc.callbacks.insert(0, partial(getattr, Interrupt()))
try:
    gc.collect()
    print("lost")
except KeyboardInterrupt:
    print("raised; may wait:", may_wait_for_others())
"""


@pytest.mark.parametrize("phase", ["start", "stop"])
def test_ctrl_c_that_arrives_in_a_collection_is_raised_behind_it(phase: str) -> None:
    program = [sys.executable, "-c", INTERRUPTED_IN_A_COLLECTION, phase]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("raised; may wait: True\n", "")
