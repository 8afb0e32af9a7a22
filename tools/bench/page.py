"""The tables of docs/benchmarks.md in Markdown, and its picture, from figures that were saved before.

    python -m tools.bench.page [DIR ...] [--picture FILE]

Reads ``results.json``, ``hosts.json``, ``cores.json``, ``memory.json`` and ``programs.json``, as far as they
are there, in each DIR (default: runs/bench). Rounds of one row in several files count together, so a long
measurement can be made in parts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.bench import cores, memory
from tools.bench.picture import Curves, save_curves
from tools.bench.report import duration
from tools.bench.sides import OURS, TORCH
from tools.bench.workloads import MB, SIZES, size_name

Figures = dict[str, dict[str, list[float]]]
"""Seconds of the rounds, by side and row."""

LIMIT = "limit"
HOST_SIDES = {
    "torch": "torch",
    "open": "without a secret",
    "secret": "with a secret",
    "grpc": "gRPC",
    "zmq": "bare ZeroMQ",
    "tcp": "bare TCP",
}
P99 = {"call_p99", "call_beside"}
"""Shown as times: their ratio says little."""


def read(directories: Sequence[Path], name: str) -> list[dict[str, Any]]:
    """The contents of each such file."""
    return [json.loads(path.read_text()) for d in directories if (path := d / name).exists()]


def one_host(files: Sequence[dict[str, Any]]) -> Figures:
    """The seconds of ``python -m tools.bench``, by side; that of a row's limit is under the row's name."""
    found: Figures = {OURS: {}, TORCH: {}, LIMIT: {}}
    for row in [row for content in files for row in content["rows"]]:
        sides = {**row["seconds"], LIMIT: [s for rounds in row["limit"].values() for s in rounds]}
        for side, rounds in sides.items():
            found[side].setdefault(row["name"], []).extend(rounds)
    return found


def two_hosts(files: Sequence[dict[str, Any]]) -> Figures:
    """The seconds of ``python -m tools.bench.hosts``, by side."""
    found: Figures = {}
    for content in files:
        for side, rows in content["seconds"].items():
            for row, rounds in rows.items():
                found.setdefault(side, {}).setdefault(row, []).extend(rounds)
    return {side: found[side] for side in HOST_SIDES if side in found}


def median(figures: Figures, side: str, row: str) -> float | None:
    """Of the rounds; None if there are none."""
    rounds = figures.get(side, {}).get(row)
    return statistics.median(rounds) if rounds else None


def _ratio(a: float | None, b: float | None) -> str:
    return f"{a / b:.2f}" if a and b else "-"


def table_of_one(figures: Figures) -> Iterator[str]:
    """The lines of the table of one host."""
    yield from ("| row | zmqgrad | torch | ratio | limit |", "|---|---|---|---|---|")
    for row in figures[OURS]:
        ours, torchs, limit = (median(figures, side, row) for side in (OURS, TORCH, LIMIT))
        cells = (f"`{row}`", duration(ours), duration(torchs), _ratio(ours, torchs), duration(limit))
        yield f"| {' | '.join(cells)} |"


def table_of_two(figures: Figures) -> Iterator[str]:
    """The lines of the table of two hosts: the time of torch, and ratios to it."""
    yield "| |" + "".join(f" {HOST_SIDES[side]} |" for side in figures)
    yield "|---|" + "---|" * len(figures)
    for row in dict.fromkeys(row for rows in figures.values() for row in rows):
        torchs, line = median(figures, "torch", row), f"| `{row}` |"
        for side in figures:
            seconds = median(figures, side, row)
            as_time = side == "torch" or row in P99
            line += f" {duration(seconds) if as_time else _ratio(seconds, torchs)} |"
        yield line


def table_of_programs(content: dict[str, Any]) -> Iterator[str]:
    """The lines of the table of whole programs: ratios."""
    yield from ("| program | workers | wall | CPU |", "|---|---|---|---|")
    for row in content["rows"]:
        ratios = row["ratios"]
        yield f"| {row['program']} | {row['workers']} | {ratios['wall']:.2f} | {ratios['cpu']:.2f} |"
    means = content["geometric means"]
    yield f"| geometric mean | | {means['wall']:.2f} | {means['cpu']:.2f} |"


def curves(one: Figures, two: Figures) -> dict[str, Curves]:
    """Milliseconds over the size of a tensor, for one host and for two."""

    def points(figures: Figures, side: str) -> dict[int, float]:
        found = {size: median(figures, side, f"send_{size_name(size)}") for size in SIZES}
        return {size: 1000 * seconds for size, seconds in found.items() if seconds}

    copies = {size: time for size, time in points(one, LIMIT).items() if size >= MB}
    hosts = {
        "zmqgrad": "open",
        "torch": "torch",
        "the limit: bare TCP": "tcp",
        "zmqgrad, encrypted": "secret",
    }
    return {
        "One host": {
            "zmqgrad": points(one, OURS),
            "torch": points(one, TORCH),
            "the limit: a copy": copies,
        },
        "Two hosts": {label: points(two, side) for label, side in hosts.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; 1 if there are no figures at all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directories", nargs="*", type=Path, default=[Path("runs/bench")], metavar="DIR")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write it: docs/images/benchmarks.png")
    options = parser.parse_args(arguments)
    files = {
        name: read(options.directories, f"{name}.json")
        for name in ("results", "hosts", "cores", "memory", "programs")
    }
    one, two = one_host(files["results"]), two_hosts(files["hosts"])
    tables: dict[str, Iterator[str]] = {}
    if files["results"]:
        tables["One host"] = table_of_one(one)
    if files["hosts"]:
        tables["Between hosts"] = table_of_two(two)
    for content in files["programs"]:
        tables["Whole programs"] = table_of_programs(content)
    for content in files["cores"]:
        tables["Cores"] = iter(cores.table(content["per second"]))
    for content in files["memory"]:
        tables["Memory"] = iter(memory.table(content["private MiB"]))
    if not tables:
        print(f"no figures in {', '.join(map(str, options.directories))}", file=sys.stderr)
        return 1
    for title, lines in tables.items():
        print(f"## {title}\n", *lines, "", sep="\n")
    if options.picture is not None:
        save_curves(curves(one, two), options.picture, "size of the tensor", "milliseconds", sizes=True)
        print(f"saved {options.picture}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
