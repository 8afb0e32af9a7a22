"""``python -m tools.operators``: some of torch's operators, which are exact across calls."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_some_operators_are_exact_on_both_sides_of_a_call() -> None:
    """In a process of its own: the import of torch's list changes settings of hypothesis and torch."""
    command = [sys.executable, "-m", "tools.operators", "--every", "9", "--samples", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" operators exact, 0 not\n")
