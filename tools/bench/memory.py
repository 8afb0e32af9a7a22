"""Memory that large messages leave behind: a tensor is sent once, and both processes drop it.

    python -m tools.bench.memory [--mb 1024] [--sides NAMES] [--wait 65] [--out FILE]

Sides: ``torch`` and ``zmqgrad`` on one host; ``torch-hosts``, ``open`` and ``secret`` between two, as of
:mod:`tools.bench.hosts` (root and iproute2). Prints the private memory of each worker in MiB: before the
tensor is made, a second after it was sent and dropped, and ``--wait`` seconds later. (What a worker takes
besides, and what each peer adds, ``python -m tools.bench.scale`` measures.)
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.support.namespaces import Hosts
from tools.bench import machine, sides
from tools.bench.hosts import consume, environment_of, join
from tools.bench.plan import meet_at_a_free_port
from tools.bench.processes import PieceFailed, Place, run_together
from tools.bench.scale_workers import usage

ONE_HOST = (sides.TORCH, sides.OURS)
SIDES = (*ONE_HOST, "torch-hosts", "open", "secret")
COLUMNS = ("before", "after", "later")
SETTLE_SECONDS = 1.0
LIMIT_SECONDS = 170.0


def run_worker(place: Place, side: str, mb: int, wait: float) -> dict[str, float]:
    """In each of two workers: its private memory at each moment."""
    torch.set_num_threads(1)
    if side in ONE_HOST:
        rpc = sides.take(side).rpc
        rpc.init_rpc(f"w{place.rank}", rank=place.rank, world_size=place.count)
    else:
        rpc = join(place, side.removesuffix("-hosts"))
    found: dict[str, float] = {}

    def note(moment: str) -> None:
        place.together()
        gc.collect()
        found[moment] = usage()["private"]
        place.together()

    if place.rank == 0:
        rpc.rpc_sync("w1", consume, args=(torch.ones(1 << 18),))
    note("before")
    if place.rank == 0:
        rpc.rpc_sync("w1", consume, args=(torch.ones(mb << 18),))
    threading.Event().wait(
        SETTLE_SECONDS
    )  # a window of time, not an event: what was sent is acknowledged in it
    note("after")
    threading.Event().wait(wait)
    note("later")
    rpc.shutdown()
    return found


def measure(side: str, mb: int, wait: float) -> list[dict[str, float]]:
    """The figures of the sender and of the receiver.

    Raises:
        PieceFailed: as :func:`run_together`.
        FileNotFoundError, subprocess.CalledProcessError: no network namespaces can be made.
    """

    def work() -> list[dict[str, float]]:
        return run_together(run_worker, 2, LIMIT_SECONDS, lambda text: None, side, mb, wait)

    if side in ONE_HOST:
        meet_at_a_free_port()
        return work()
    hosts = Hosts(os.getpid())
    try:
        hosts.open()
        with environment_of(side, hosts):
            return work()
    finally:
        hosts.close()


def table(found: dict[str, list[dict[str, float]]]) -> list[str]:
    """The lines of the table, in Markdown."""
    lines = [
        "| private MiB |" + "".join(f" {column} |" for column in COLUMNS),
        "|---|" + "---|" * len(COLUMNS),
    ]
    for side, workers in found.items():
        for role, figures in zip(("sender", "receiver"), workers, strict=True):
            lines.append(f"| {side}, {role} |" + "".join(f" {figures[column]:.0f} |" for column in COLUMNS))
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each worker, and saves the figures; 1 if a side could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mb", type=int, default=1024)
    parser.add_argument("--sides", default=",".join(SIDES), help="names, with commas")
    parser.add_argument("--wait", type=float, default=65.0, metavar="S")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/memory.json"))
    options = parser.parse_args(arguments)
    names = options.sides.split(",")
    if unknown := set(names) - set(SIDES):
        parser.error(f"unknown sides: {', '.join(sorted(unknown))}")
    found: dict[str, list[dict[str, float]]] = {}
    failed = 0
    for side in names:
        try:
            found[side] = measure(side, options.mb, options.wait)
        except (PieceFailed, FileNotFoundError, subprocess.CalledProcessError) as e:
            failed = 1
            print(f"{side}: {e}", file=sys.stderr)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine.describe(), "MB": options.mb, "private MiB": found}
    options.out.write_text(json.dumps(content, indent=1) + "\n")
    print("\n".join(table(found)))
    return failed


if __name__ == "__main__":
    sys.exit(main())
