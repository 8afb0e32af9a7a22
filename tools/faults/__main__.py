"""Command line of the fault table.

    python -m tools.faults                          # every fault at the main moment of each role
    python -m tools.faults --all-moments            # every fault at every moment: hours
    python -m tools.faults -k 'callee | SIGKILL*'   # some cells
    python -m tools.faults --quick                  # what CI runs
    python -m tools.faults --table                  # docs/fault-table.md from the results, nothing is run

Results are in runs/faults/results.json; cells that have one are not run again unless --again is given.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tools.faults import report
from tools.faults.model import Cell
from tools.faults.plan import all_cells, choose, quick_cells
from tools.faults.results import Results
from tools.faults.running import preload, run_cell


def main() -> int:
    """Returns 1 if a promise was broken in this run."""
    options = _parser().parse_args()
    results = Results(options.out / "results.json")
    broken, done = 0, set[str]()
    if not options.table:
        preload()
        # The runs of a role without a fault find its moments, so there are more cells after them.
        while wanted := [c for c in _wanted(options, results) if c.key not in done]:
            broken += _run(wanted, results, options.jobs)
            done.update(cell.key for cell in wanted)
        if not done:
            print("no cell to run: --again repeats cells")
    if options.table or not (options.quick or options.select):
        report.write(Path("docs/fault-table.md"), results)
    return 1 if broken else 0


def _wanted(options: argparse.Namespace, results: Results) -> list[Cell]:
    cells = quick_cells() if options.quick else all_cells(results.moments, every=options.all_moments)
    return [c for c in choose(cells, options.select) if options.again or c.key not in results]


def _run(wanted: list[Cell], results: Results, jobs: int) -> int:
    began, broken = time.monotonic(), 0
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(run_cell, cell): cell for cell in wanted}
        for number, future in enumerate(as_completed(running), 1):
            cell = running[future]
            verdict, history = future.result()
            results.add(cell, verdict, history)
            broken += bool(verdict.broken)
            seconds = time.monotonic() - began
            progress = f"{seconds:6.0f} s  {number}/{len(wanted)}"
            print(f"{progress}  {cell.key}: {verdict.word} ({verdict.seen})", flush=True)
            for line in verdict.broken:
                print(f"          {line[:1500]}", flush=True)
    return broken


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.faults", description="The fault table.")
    parser.add_argument(
        "-k", dest="select", default="", metavar="PATTERNS", help="cells: patterns, comma between"
    )
    parser.add_argument(
        "--quick", action="store_true", help="the part that fits a minute or two on two cores"
    )
    parser.add_argument("--all-moments", action="store_true", help="every fault at every moment of each role")
    parser.add_argument("--again", action="store_true", help="also run cells that have a result")
    parser.add_argument("--table", action="store_true", help="only write docs/fault-table.md")
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("runs/faults"), metavar="DIR")
    return parser


if __name__ == "__main__":
    sys.exit(main())
