"""How many workers a host gets where their number is given as ``gpu``, ``xpu``, ``cpu`` or ``auto``."""

from __future__ import annotations

import os
import subprocess
import sys

from zmqgrad.errors import ConfigurationError

COUNT_SECONDS = 120.0
"""Time limit for counting devices, which imports torch."""

_COUNTS = {
    "gpu": "torch.cuda.device_count()",
    "xpu": "torch.xpu.device_count()",
    # Before torch 2.6, only CUDA and ROCm devices can be counted without knowing their kind.
    "auto": "getattr(torch, 'accelerator', torch.cuda).device_count()",
}


def count_workers(workers: int | str) -> int:
    """``workers`` if it is a number, otherwise one for each processor or device that it names.

    Raises:
        ConfigurationError: if there is no such device, or torch cannot count them.
    """
    if isinstance(workers, int):
        return workers
    devices = 0 if workers == "cpu" else _count_devices(workers)
    if not devices and workers in ("gpu", "xpu"):
        raise ConfigurationError(
            f"--nproc-per-node {workers}: torch finds no such device on this host; give a number, or 'auto'"
            " for one worker per processor where there is no device"
        )
    return devices or _count_processors()


def _count_processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _count_devices(kind: str) -> int:
    """Ask torch in a process of its own: it knows what workers will see, and is too large for a launcher."""
    command = [sys.executable, "-c", f"import torch; print({_COUNTS[kind]})"]
    try:
        counted = subprocess.run(command, capture_output=True, text=True, timeout=COUNT_SECONDS)
    except subprocess.TimeoutExpired:
        raise ConfigurationError(
            f"--nproc-per-node {kind}: torch did not count the devices within {COUNT_SECONDS:.0f} s; give a"
            " number"
        ) from None
    if counted.returncode:
        last = "".join(counted.stderr.strip().splitlines()[-1:])
        raise ConfigurationError(
            f"--nproc-per-node {kind}: torch cannot count the devices ({last}); give a number, or mend torch"
        )
    return int(counted.stdout.split()[-1])
