"""A fresh Python, for what can be seen only at its start: what an import loads, what it prints."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping


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
