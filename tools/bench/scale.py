"""What a worker costs in groups of different sizes: start, memory, descriptors, threads, idle traffic.

    python -m tools.bench.scale                       # 2, 8, 24 and 64 workers of this host; torch up to 24
    python -m tools.bench.scale --workers 2,8 --no-torch
    python -m tools.bench.scale --simulate 10,100,1000   # members of a dynamic group, in one process

Three stages are measured: joined (nothing was sent yet), ring (each has called its successor), all (each has
called each). At each of them the workers then idle. Memory, descriptors and threads are means over the
workers, less what the process had before; time is that of the slowest. docs/scale.md explains the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tools.bench import machine
from tools.bench.plan import meet_at_a_free_port
from tools.bench.processes import PieceFailed, run_together
from tools.bench.scale_picture import save_picture
from tools.bench.scale_simulation import Simulation
from tools.bench.scale_workers import STAGES, run_worker
from tools.bench.sides import OURS, TORCH

LIMIT_SECONDS = 300.0
"""For one group of workers."""

COLUMNS = (
    "seconds", "private", "pss", "descriptors", "threads", "rpc messages/s", "heartbeat messages/s",
    "heartbeat bytes/s", "store messages/s", "store bytes/s", "wake-ups/s", "cpu ms/s",
)  # fmt: skip
"""Of each stage. MiB for memory."""

Found = dict[str, dict[str, dict[str, float]]]
"""By side (or the simulation), size of the group, and name of the figure."""


def main(arguments: list[str] | None = None) -> int:
    """Measure; 1 if a group of zmqgrad's could not be measured."""
    options = _parser().parse_args(arguments)
    path, found, failures = options.out / "scale.json", Found(), []
    if path.exists():
        found = json.loads(path.read_text())["found"]
    options.out.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        path.write_text(json.dumps({"machine": machine.describe(), "found": found}, indent=1))

    if options.simulate:
        _simulate(options.simulate, options.idle, found, save)
    else:
        failures = _measure(options, found, save)
    print(f"saved {path}")
    try:
        save_picture(found, options.out / "scale.png")
    except ImportError:
        print("no picture: matplotlib is not installed (extra 'examples')", file=sys.stderr)
    return int(OURS in failures)


def _measure(options: argparse.Namespace, found: Found, save: Callable[[], None]) -> list[str]:
    failures = []
    print(f"load {machine.load()}; seconds of the slowest worker, MiB, all else a mean over the workers")
    print(f"{'':18}" + "".join(f"{column:>22}" for column in COLUMNS))
    for size in options.workers:
        for side in [OURS] if options.no_torch or size > options.torch_up_to else [OURS, TORCH]:
            try:
                workers = _group(side, size, options.idle, _progress(f"{size} workers, {side}"))
            except PieceFailed as e:
                failures.append(side)
                print(f"{side:8}{size:4}  failed: {str(e).strip().splitlines()[-1]}", flush=True)
                continue
            figures = found.setdefault(side, {})[str(size)] = summary(workers)
            save()
            for stage in STAGES:
                values = [figures.get(f"{stage} {column}", 0.0) for column in COLUMNS]
                print(f"{side:8}{size:4} {stage:6}" + "".join(f"{v:22.2f}" for v in values), flush=True)
    return failures


def _group(side: str, size: int, idle: float, tell: Callable[[str], None]) -> list[dict[str, float]]:
    meet_at_a_free_port()
    return run_together(run_worker, size, LIMIT_SECONDS, tell, side, idle)


def summary(workers: list[dict[str, float]]) -> dict[str, float]:
    """Of each figure the mean over the workers, and of seconds the largest."""
    names = dict.fromkeys(name for worker in workers for name in worker)
    return {
        name: (max if name.endswith("seconds") else statistics.fmean)([w.get(name, 0.0) for w in workers])
        for name in names
    }


def _simulate(sizes: list[int], idle: float, found: Found, save: Callable[[], None]) -> None:
    for size in sizes:
        steps = Simulation(size, _progress(f"{size} simulated workers")).run(idle)
        print(f"{size} workers")
        for step, counts in steps.items():
            print(f"  {step:15}" + ", ".join(f"{name} {value:,.6g}" for name, value in counts.items()))
            named = {f"{step}: {name}": value for name, value in counts.items()}
            found.setdefault("simulation", {}).setdefault(str(size), {}).update(named)
        save()


def _progress(what: str) -> Callable[[str], None]:
    """Prints where a measurement is: over the same line on a terminal, elsewhere nothing but its begin."""
    began = time.monotonic()

    def tell(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[2K{time.monotonic() - began:6.0f} s  {what}: {text}", end="\r", file=sys.stderr)

    if not sys.stderr.isatty():
        print(what, file=sys.stderr, flush=True)
    return tell


def _sizes(text: str) -> list[int]:
    sizes = [int(part) for part in text.split(",")]
    if min(sizes) < 2:
        raise argparse.ArgumentTypeError(f"a group has at least 2 workers, not {min(sizes)}")
    return sizes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workers", type=_sizes, default=[2, 8, 24, 64], metavar="N,N")
    parser.add_argument("--idle", type=float, default=6.0, metavar="S", help="seconds for idle traffic")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument(
        "--torch-up-to", type=int, default=24, metavar="N", help="workers (default: 24, 10 GB of memory)"
    )
    parser.add_argument("--simulate", type=_sizes, metavar="N,N", help="simulate groups of these sizes")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), metavar="DIR")
    return parser


if __name__ == "__main__":
    sys.exit(main())
