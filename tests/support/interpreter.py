"""A fresh Python, for what can be seen only at its start: what an import loads, what it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


def run_python(code: str, *args: str, timeout: float = 90.0, env: Mapping[str, str] | None = None) -> str:
    """What ``python -c code args`` prints, with warnings as errors; ``env`` comes on top of ours.

    Raises:
        AssertionError: if it fails; the message holds what it wrote to stderr.
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *args],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"python exited with {done.returncode}:\n{done.stderr}"
    return done.stdout


class Ended(NamedTuple):
    """How a program has ended, and what it printed."""

    code: int
    stdout: str
    stderr: str


def run_forks(
    directory: Path, prelude: str, programs: Sequence[tuple[str, Mapping[str, str]]], timeout: float = 150.0
) -> list[Ended]:
    """Run programs at the same time, each a text and its environment, in forks of one fresh Python.

    That has run ``prelude``, which does the imports once for all. A fork ends as any Python does.
    """
    script, orders = directory / "program.py", directory / "orders.json"
    script.write_text(FORKING.replace("PRELUDE", prelude))
    orders.write_text(json.dumps(programs))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), str(orders)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"python exited with {done.returncode}:\n{done.stderr}"
    outputs = [
        [(directory / f"{number}.{fd}").read_text() for fd in (1, 2)] for number in range(len(programs))
    ]
    return [Ended(code, *said) for code, said in zip(json.loads(done.stdout), outputs, strict=True)]


FORKING = """
PRELUDE
import json, os, sys
children = []
with open(sys.argv[1]) as orders:
    programs = json.load(orders)
for number, (code, environ) in enumerate(programs):
    child = os.fork()
    if not child:
        for fd in (1, 2):
            os.dup2(os.open(f"{number}.{fd}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
        os.environ.update(environ)
        break
    children.append(child)
else:
    code = "print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])"
exec(code)
"""
