"""The examples of docs/store.md run as written, apart from the port and the path."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2].joinpath("docs/store.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("program", PROGRAMS)
def test_an_example_runs(program: str, tmp_path: Path) -> None:
    program = program.replace("29500", _free_port()).replace("/tmp/", f"{tmp_path}/")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
