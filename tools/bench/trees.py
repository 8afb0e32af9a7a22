"""What a change costs: the same work through this working tree and through another one, in turn.

    git worktree add --detach ../before v1.0.0
    python -m tools.bench.trees ../before -k call,flood,autograd_pair

Many small changes can each cost less than a measurement can tell, so compare with a revision that stays the
same for a long time, not with yesterday's. The benchmarks of this tree measure both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.bench.report import duration
from tools.bench.sides import OURS

ROOT = Path(__file__).parents[2]
PATIENCE = 600.0
"""Seconds for the rows of one round."""

Figures = dict[str, list[float]]
"""Seconds by row, one for each round."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit code for the shell: 1 if a row could not be measured, 2 if a tree has no zmqgrad."""
    options = _parser().parse_args(arguments)
    trees: dict[str, Path] = {"this": ROOT, "other": options.tree.resolve()}
    if not (trees["other"] / OURS / "__init__.py").exists():
        print(f"{options.tree} has no package {OURS}: it must be the root of a working tree", file=sys.stderr)
        return 2
    found: dict[str, Figures] = {name: {} for name in trees}
    complete = True
    for number in range(options.rounds):
        # Every other round the other way about: whoever comes first may find a cooler processor.
        for name in sorted(trees, reverse=number % 2 == 0):
            print(f"round {number + 1} of {options.rounds}: {name} tree", file=sys.stderr, flush=True)
            complete &= _measure(trees[name], options.select, options.seconds, found[name])
    _print(found)
    return 0 if complete else 1


def _measure(tree: Path, select: str, seconds: float, found: Figures) -> bool:
    """Add one round of ``tree`` to ``found``. Returns whether all rows could be measured."""
    with tempfile.TemporaryDirectory() as folder:  # with the package of one tree and the tools of another
        Path(folder, OURS).symlink_to(tree / OURS)
        Path(folder, "tools").symlink_to(ROOT / "tools")
        command = [sys.executable, "-m", "tools.bench", "--no-torch", "-r", "1", "--out", folder]
        ran = subprocess.run(
            [*command, "-k", select, "--seconds", str(seconds)],
            cwd=folder, env={**os.environ, "PYTHONPATH": folder},
            capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        if ran.returncode:
            print(ran.stderr, file=sys.stderr)
        results = Path(folder, "results.json")
        rows = json.loads(results.read_text())["rows"] if results.exists() else []
    for row in rows:
        found.setdefault(row["name"], []).extend(row["seconds"][OURS])
    return ran.returncode == 0


def _print(found: Mapping[str, Figures]) -> None:
    """A line a row: of each tree the median and the range of its rounds, and the ratio of the medians."""
    rows = dict.fromkeys(row for figures in found.values() for row in figures)
    heads = [f"{name} tree" for name in found]
    print(" " * 16 + "".join(f"{head:>30}" for head in heads) + "   ratio")
    for row in rows:
        rounds = [figures.get(row) for figures in found.values()]
        medians = [statistics.median(each) if each else None for each in rounds]
        line = f"{row:16}"
        for median, each in zip(medians, rounds, strict=True):
            between = f"({duration(min(each))} - {duration(max(each))})" if each else ""
            line += f"{duration(median):>9} {between:<20}"
        this, other = medians
        print(f"{line}   {f'{this / other:.2f}' if this and other else '-':>5}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.trees",
        description="The same work through this working tree and through another one, in turn.",
    )
    parser.add_argument("tree", type=Path, help="the root of the other working tree")
    add = parser.add_argument
    add("-k", dest="select", default="call,flood,send_64KB,autograd_pair,autograd_chain", metavar="NAMES",
        help="rows: names or patterns (default: %(default)s)")  # fmt: skip
    add("-r", "--rounds", type=int, default=5, metavar="N", help="how many rounds (default: %(default)s)")
    add("--seconds", type=float, default=0.5, metavar="S",
        help="for each figure of a round (default: %(default)s)")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
