"""The elastic example: training goes on although a worker and a host are killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic_digits.py"


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(460)
def test_training_goes_on_without_a_host_and_with_it_again(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(EXAMPLE),
        "--demo",
        "--agents",
        "2",
        "--epochs",
        "36",
        "--out",
        str(tmp_path),
    ]
    # An agent that is killed leaves its temporary directory.
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=450, check=False, env=environ)
    output = "".join(path.read_text() for path in tmp_path.glob("*/output.txt"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{output}"
    assert "world sizes: 2 1" in done.stdout
    accuracy = re.search(r"held out: ([\d.]+)% right after 36 epochs", done.stdout)
    assert accuracy is not None, done.stdout
    assert float(accuracy[1]) >= 95
    assert (tmp_path / "elastic.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    (log,) = tmp_path.glob("*/log.jsonl")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    epochs = [event["epoch"] for event in events if event["event"] == "epoch"]
    assert sorted(set(epochs)) == list(range(36))
    starts = {event["epoch"] for event in events if event["event"] == "round"}
    assert len(starts) >= 4, "a round did not continue with the last checkpoint"
