"""Threads that are started while the interpreter ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import atexit
from zmqgrad.runtime.late_threads import start_thread

def at_exit():
    for number in range(3):
        start_thread(lambda: print(number, flush=True), f"late-{number}").join(10)

start_thread(lambda: None, "early").join()
atexit.register(at_exit)
"""


@pytest.mark.skipif(
    (3, 12, 0) <= sys.version_info < (3, 12, 2), reason="starts no thread once the main thread has ended"
)
def test_a_function_of_atexit_starts_threads() -> None:
    command = [sys.executable, "-c", PROGRAM]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "0\n1\n2\n", "")
