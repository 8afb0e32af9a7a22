"""What the figures were taken on: they mean nothing without it."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch
import zmq

import zmqgrad


def describe() -> dict[str, str]:
    """Processor, memory, system and versions; no name of the host."""
    return {
        "processor": _first(r"model name\s*:\s*(.+)", "/proc/cpuinfo") or platform.processor() or "?",
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "memory": _memory(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pyzmq": f"{zmq.pyzmq_version()} (libzmq {zmq.zmq_version()})",
        "zmqgrad": zmqgrad.__version__,
    }


def load() -> str:
    """How many processes wanted to run in the last minute: more than the cores, and figures are noise."""
    return f"{os.getloadavg()[0]:.1f}"


def _memory() -> str:
    kilobytes = _first(r"MemTotal:\s*(\d+)", "/proc/meminfo")
    return f"{int(kilobytes) / (1 << 20):.0f} GB" if kilobytes else "?"


def _first(pattern: str, path: str) -> str:
    try:
        found = re.search(pattern, Path(path).read_text())
    except OSError:  # not Linux
        return ""
    return found.group(1).strip() if found else ""
