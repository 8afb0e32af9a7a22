"""Whole example programs over zmqgrad and over torch: wall time and CPU time, from start to exit.

    python -m tools.bench.programs                              # all programs, 2 and 4 workers, 3 rounds
    python -m tools.bench.programs -k 'parameter*' -r 5 --workers 4

The backends take turns. A run starts one fresh process per worker, as a launcher does, and ends when the
last one has exited, so shutdown counts. Imports are reported apart: they last until the slowest worker has
imported the program, and depend on the machine more than on the backend. CPU time is user and system time of
all workers (wait4). Ratios are zmqgrad / torch, of the medians over the rounds.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.bench import machine
from tools.bench.sides import OURS, TORCH
from tools.ports import free_port

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("program_worker.py")
PROGRAMS = (
    "parameter_server",
    "batch_parameter_server",
    "rnn_parameter_server",
    "reinforcement_learning",
    "batch_reinforcement_learning",
    "resnet_pipeline",
    "ddp_beside_rpc",
)
LIMIT_SECONDS = 120.0
"""A run that takes longer has failed."""


class ProgramFailed(Exception):
    """A worker returned an error, or the run took too long. The message holds its output."""


@dataclass(frozen=True)
class Run:
    """Figures of one run, in seconds. ``wall`` and ``cpu`` begin when all imports are done."""

    import_wall: float
    import_cpu: float
    wall: float
    cpu: float

    @property
    def total_wall(self) -> float:
        """Wall time from the start of the processes to their end."""
        return self.import_wall + self.wall

    @property
    def total_cpu(self) -> float:
        """CPU time of the processes."""
        return self.import_cpu + self.cpu


def run_program(name: str, backend: str, workers: int) -> Run:
    """Run an example once and measure it.

    Raises:
        ProgramFailed: if a worker fails, or the run takes more than ``LIMIT_SECONDS``.
    """
    started = time.monotonic()
    environment = {
        **os.environ,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
        "PROGRAM_STARTED": repr(started),
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    example = ROOT / "examples" / f"{name}.py"
    with tempfile.TemporaryFile("w+") as output:
        arguments = [sys.executable, str(WORKER), str(example), backend]
        processes = [
            subprocess.Popen(
                [*arguments, str(rank), str(workers)],
                env=environment, stdout=subprocess.DEVNULL, stderr=output,
            )
            for rank in range(workers)
        ]  # fmt: skip
        cpu, failed = _wait(processes, started + LIMIT_SECONDS)
        total = time.monotonic() - started
        output.seek(0)
        lines = output.read()
    if failed:
        raise ProgramFailed(lines)
    imports = [json.loads(line) for line in lines.splitlines() if line.startswith('{"wall"')]
    import_wall = max(figures["wall"] for figures in imports)
    import_cpu = sum(figures["cpu"] for figures in imports)
    return Run(import_wall, import_cpu, total - import_wall, cpu - import_cpu)


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> tuple[float, bool]:
    """Return the CPU seconds of all processes, and whether one failed. Kills them at the deadline."""
    cpu, failed = 0.0, False
    for process in processes:
        descriptor = os.pidfd_open(process.pid)
        try:
            in_time = _wait_readable(descriptor, deadline) and not failed
        finally:
            os.close(descriptor)
        if not in_time:
            process.kill()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        failed |= process.returncode != 0
        cpu += usage.ru_utime + usage.ru_stime
    return cpu, failed


def _wait_readable(descriptor: int, deadline: float) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))


@dataclass(frozen=True)
class Row:
    """A program with a number of workers, and its runs by backend."""

    program: str
    workers: int
    runs: dict[str, list[Run]]

    def median(self, backend: str, figure: str) -> float:
        """Median of a figure (an attribute of :class:`Run`) over the rounds."""
        figures: list[float] = [getattr(run, figure) for run in self.runs[backend]]
        return statistics.median(figures)

    def ratio(self, figure: str) -> float:
        """Median with zmqgrad / median with torch."""
        return self.median(OURS, figure) / self.median(TORCH, figure)

    def is_complete(self) -> bool:
        """Return whether both backends have at least one run."""
        return all(self.runs[backend] for backend in (OURS, TORCH))


def geometric_mean(ratios: Iterable[float]) -> float:
    """Return the geometric mean of positive numbers."""
    return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))


FIGURES = ("wall", "cpu", "total_wall", "total_cpu")


def print_table(rows: Sequence[Row]) -> None:
    """Print seconds over zmqgrad / over torch and their ratio, for each figure."""
    print(f"{'':32}" + "".join(f"{title:>22}" for title in ("wall", "CPU", "wall+imports", "CPU+imports")))
    for row in rows:
        cells = [
            f"{row.median(OURS, f):6.2f} /{row.median(TORCH, f):6.2f} ={row.ratio(f):5.2f} " for f in FIGURES
        ]
        print(f"{row.program:29}{row.workers:3}" + "".join(f"{cell:>22}" for cell in cells))
    means = [f"{geometric_mean(row.ratio(f) for row in rows):5.2f} " for f in FIGURES]
    print(f"{'geometric mean of the ratios':32}" + "".join(f"{mean:>22}" for mean in means))


def save_json(rows: Sequence[Row], path: Path) -> None:
    """Write the figures of all runs, and the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "machine": machine.describe(),
        "load at the end": machine.load(),
        "rows": [asdict(row) | {"ratios": {f: row.ratio(f) for f in FIGURES}} for row in rows],
        "geometric means": {f: geometric_mean(row.ratio(f) for row in rows) for f in FIGURES},
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and save. Returns 1 if a run failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.programs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-k", dest="select", default="*", metavar="PATTERN", help="programs, as in '*server'")
    parser.add_argument("-r", "--rounds", type=int, default=3, help="runs of each program (default: 3)")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4], help="(default: 2 4)")
    parser.add_argument("--out", type=Path, default=Path("runs/programs.json"), help="figures of all runs")
    options = parser.parse_args(arguments)
    programs = [name for name in PROGRAMS if fnmatch.fnmatchcase(name, options.select)]
    if not programs:
        parser.error(f"-k {options.select} matches none of: {', '.join(PROGRAMS)}")
    rows = [Row(name, n, {OURS: [], TORCH: []}) for name in programs for n in options.workers]
    failures, began = [], time.monotonic()
    try:
        for number in range(options.rounds):
            backends = [OURS, TORCH] if number % 2 == 0 else [TORCH, OURS]
            for row in rows:
                for backend in backends:
                    step = f"round {number + 1}: {row.program}, {row.workers} workers, {backend}"
                    print(f"{time.monotonic() - began:6.0f} s  {step}", file=sys.stderr, flush=True)
                    try:
                        row.runs[backend].append(run_program(row.program, backend, row.workers))
                    except ProgramFailed as e:
                        failures.append(f"{step}\n{e}")
    except KeyboardInterrupt:
        print("interrupted; these are the runs so far", file=sys.stderr)
    complete = [row for row in rows if row.is_complete()]
    if complete:
        print_table(complete)
        save_json(complete, options.out)
        print(f"saved {options.out}; load {machine.load()} on {os.cpu_count()} cores")
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
