"""The examples, run as their readers run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import free_port

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits_pipeline.py"
SIMPLE = ROOT / "examples" / "dist_autograd_simple.py"
BESIDE = ROOT / "examples" / "ddp_beside_rpc.py"


def run(*command: object, seconds: float) -> str:
    """What a Python command prints; its stderr is shown if it fails."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def digits(out: Path, *options: object, workers: int = 3, seconds: float = 90) -> str:
    launcher = ("-m", "zmqgrad", "run", "--nproc-per-node", workers)
    return run(*launcher, DIGITS, "--out", out, *options, seconds=seconds)


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, f"no {pattern!r} in:\n{text}"
    return float(found.group(1))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_digits_are_learned(tmp_path: Path) -> None:
    """The promise of the README: 97% of the held-out digits. (Within a minute, where the cores are ours.)"""
    said = digits(tmp_path / "out", seconds=180)
    assert number(r"held out: ([\d.]+)% right", said) >= 97
    assert number(r"zmqgrad: (\d+) epochs in [\d.]+ s, \d+ images/s", said) == 20
    table = re.findall(r"^\[worker 0\] │ +(\d) │(.*)│ +[\d.]+% │$", said, re.MULTILINE)
    assert [digit for digit, _ in table] == list("0123456789")
    assert sum(int(count) for _, row in table for count in re.findall(r"\d+", row)) == 1797 // 5
    picture = (tmp_path / "out" / "training.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(picture) > 20_000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_same_training_in_other_ways(tmp_path: Path) -> None:
    """However many workers hold the layers, and over torch's own RPC: the same losses, up to rounding."""
    loss = r"last loss ([\d.]+)"
    once = number(loss, digits(tmp_path, "--epochs", 1))
    assert number(loss, digits(tmp_path, "--epochs", 1, workers=2)) == once
    assert number(loss, digits(tmp_path, "--epochs", 1, "--backend", "torch")) == pytest.approx(
        once, abs=1e-3
    )


@pytest.mark.slow
def test_the_small_program() -> None:
    """Each tensor has nine elements, each with gradient 1: SGD takes 2 x 9 x 0.05 off their sum."""
    said = run(SIMPLE, seconds=90)
    sums = re.findall(r"^worker(\d): the sum went from ([\d.]+) to ([\d.]+)$", said, re.MULTILINE)
    assert sorted(rank for rank, _, _ in sums) == ["0", "1"]
    for _, before, after in sums:
        assert float(before) - float(after) == pytest.approx(0.9, abs=2e-4)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_data_parallel_training_beside_rpc() -> None:
    """It compares itself with one process; the last batches are mostly understood."""
    said = run(BESIDE, seconds=280)
    steps = re.findall(r"^step +\d+: loss ([\d.]+), by one process ([\d.]+)$", said, re.MULTILINE)
    assert len(steps) == 3
    assert float(steps[-1][0]) < float(steps[0][0]) - 0.8
    gaps = re.search(r"largest difference: (\S+) in a loss, (\S+) in a parameter", said)
    assert gaps is not None, said
    assert all(float(gap) < 1e-4 for gap in gaps.groups())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({}, "RANK and WORLD_SIZE are not set. Start this script with\n    zmqgrad run"),
        ({"RANK": "0", "WORLD_SIZE": "6"}, "1 to 4 to hold the layers, not 6 in all"),
        ({"RANK": "0", "WORLD_SIZE": "3"}, "sklearn missing. Install the extra 'examples':\n    pip install"),
    ],
    ids=["no launcher", "too many workers", "no scikit-learn"],
)
def test_digits_names_what_is_missing(place: dict[str, str], message: str) -> None:
    code = """
import os, runpy, sys
for name in ("RANK", "WORLD_SIZE"):
    os.environ.pop(name, None)
os.environ.update(eval(sys.argv.pop(1)))
sys.modules["sklearn"] = None
sys.path.insert(0, os.path.dirname(sys.argv[1]))
sys.argv = [sys.argv[1], "--backend", "torch"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    print(end.code)
"""
    assert message in run("-c", code, repr(place), DIGITS, seconds=90)
