"""How throughput grows with the cores that a job may use, for zmqgrad and torch.

    python -m tools.bench.cores [--cores 1,2,4] [--rounds 3] [--seconds 1] [--no-torch] [--out DIR]

Run it on a large machine: by default it takes 1, 2, 4, .. cores, up to all. The affinity of the whole job is
limited to the first of them. Rows, all per second, higher is better:

    call       empty calls, by as many pairs of workers as half the cores (at least one), in total
    flood      the same with 1000 calls under way in each pair
    fan_out    backward passes through 64 concurrent calls to one worker
    branches   heavy branches on one worker, in a backward pass of as many as the machine has cores

Rounds are taken in turn; a figure is the median of the rounds. Prints a table in Markdown, and saves
``cores.json`` and ``cores.png``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tools.bench import machine
from tools.bench.picture import save_curves
from tools.bench.plan import meet_at_a_free_port
from tools.bench.processes import PieceFailed, Place, run_together
from tools.bench.sides import OURS, TORCH, take
from tools.bench.timing import Budget
from tools.bench.workloads import FLOOD, branches, fan_out, nothing

ROWS = {"call": "calls", "flood": "calls", "fan_out": "passes", "branches": "branches"}
"""What is counted, per second."""
LIMIT_SECONDS = 170.0

Found = dict[str, dict[str, dict[str, list[float]]]]
"""Figures of the rounds by side, row, and number of cores."""


def run_worker(
    place: Place, side_name: str, cores: Sequence[int], seconds: float, heavy: int
) -> dict[str, float]:
    """In each worker: what even ones do per second, the next one serving. All pairs call at the same time."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    side = take(side_name)
    rpc, other = side.rpc, f"worker{place.rank + 1}"
    rpc.init_rpc(f"worker{place.rank}", rank=place.rank, world_size=place.count)

    def call() -> int:
        rpc.rpc_sync(other, nothing)
        return 1

    def flood() -> int:
        for future in [rpc.rpc_async(other, nothing) for _ in range(FLOOD)]:
            future.wait()
        return FLOOD

    found = {}
    for name, work in (("call", call), ("flood", flood)):
        place.together()
        if place.rank % 2 == 0:
            done, began = work() * 0, time.perf_counter()
            while (elapsed := time.perf_counter() - began) < seconds:
                done += work()
            found[name] = done / elapsed
    place.together()
    if place.rank == 0:
        budget = Budget(seconds, at_least=3)
        found["fan_out"] = 1 / budget.median(fan_out(side))
        found["branches"] = heavy / budget.median(branches(heavy)(side))
    rpc.shutdown()
    return found


def measure(
    sides: Sequence[str], counts: Sequence[int], rounds: int, seconds: float
) -> tuple[Found, list[str]]:
    """The figures, and what failed."""
    found: Found = {side: {row: {} for row in ROWS} for side in sides}
    failures, usable = [], sorted(os.sched_getaffinity(0))
    for number in range(rounds):
        for count in counts if number % 2 == 0 else reversed(counts):
            for side in sides:
                print(f"round {number + 1} of {rounds}: {count} cores, {side}", file=sys.stderr, flush=True)
                meet_at_a_free_port()
                try:
                    workers = run_together(
                        run_worker, 2 * max(1, count // 2), LIMIT_SECONDS, _ignore,
                        side, usable[:count], seconds, len(usable),
                    )  # fmt: skip
                except PieceFailed as e:
                    failures.append(f"{side}, {count} cores, round {number + 1}: {e}")
                    continue
                for row in ROWS:
                    total = sum(worker.get(row, 0.0) for worker in workers)
                    found[side][row].setdefault(str(count), []).append(total)
    return found, failures


def _ignore(text: str) -> None:
    pass


def medians(found: Found) -> dict[str, dict[str, dict[int, float]]]:
    """Of the rounds, by what is counted, side, and number of cores."""
    return {
        f"{row}: {unit} per second": {
            side: {int(count): statistics.median(rounds) for count, rounds in rows[row].items()}
            for side, rows in found.items()
        }
        for row, unit in ROWS.items()
    }


def table(found: Found) -> list[str]:
    """The lines of the table: medians, and in brackets how many times that of the fewest cores."""
    counts = sorted({int(count) for rows in found.values() for row in rows.values() for count in row})
    lines = ["| |" + "".join(f" {count} |" for count in counts), "|---|" + "---|" * len(counts)]
    for title, sides in medians(found).items():
        for side, figures in sides.items():
            first = figures.get(counts[0], math.nan)
            cells = [
                f" {figures[n]:.4g} ({figures[n] / first:.2f}) |" if n in figures else " - |" for n in counts
            ]
            lines.append(f"| {title}, {side} |" + "".join(cells))
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and saves; 1 if something could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    there = len(os.sched_getaffinity(0))
    doubled = [1 << n for n in range(there.bit_length())]
    parser.add_argument("--cores", default=",".join(map(str, sorted({*doubled, there}))), metavar="N,N")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure in a round")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), metavar="DIR")
    options = parser.parse_args(arguments)
    counts = [int(count) for count in options.cores.split(",")]
    if not 1 <= min(counts) <= max(counts) <= there:
        parser.error(f"this process may use 1 to {there} cores")
    sides = [OURS] if options.no_torch else [OURS, TORCH]
    facts = {**machine.describe(), "load": machine.load()}
    found, failures = measure(sides, counts, options.rounds, options.seconds)
    options.out.mkdir(parents=True, exist_ok=True)
    content = {"machine": facts, "per second": found, "failures": failures}
    (options.out / "cores.json").write_text(json.dumps(content, indent=1) + "\n")
    print("\n".join(table(found)))
    try:
        save_curves(medians(found), options.out / "cores.png", "cores", "per second")
    except ImportError:
        print("no picture: matplotlib is not installed (extra 'examples')", file=sys.stderr)
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
