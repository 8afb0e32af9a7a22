"""The results as a table in the terminal (rich, where it is installed) and as a JSON file."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from tools.bench.plan import Row
from tools.bench.results import LIMIT, Results
from tools.bench.sides import OURS, TORCH

UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
COLUMNS = ("", OURS, TORCH, "ratio", LIMIT, "x limit", "what")


def print_table(results: Results) -> None:
    """One line a row. A ratio below 1: zmqgrad takes less time than torch."""
    lines = [_cells(results, row) for row in results.rows]
    if not sys.stdout.isatty():
        _print_plain(lines)
        return
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        _print_plain(lines)
        return
    table = Table(box=None, header_style="bold", padding=(0, 1))
    widths = _widths(lines)
    table.add_column("", no_wrap=True, min_width=widths[0])
    for column, width in zip(COLUMNS[1:-1], widths[1:-1], strict=True):
        table.add_column(column, justify="right", no_wrap=True, min_width=width)
    table.add_column(COLUMNS[-1], no_wrap=True)  # the only one that is cut where the terminal is narrow
    for row, cells in zip(results.rows, lines, strict=True):
        ratio = results.ratio(row)
        colour = "" if ratio is None else "[green]" if ratio <= 1 else "[red]"
        table.add_row(*cells[:3], colour + cells[3], *cells[4:6], f"[dim]{cells[6]}")
    Console().print(table)


def _cells(results: Results, row: Row) -> tuple[str, ...]:
    return (
        row.name,
        duration(results.median(OURS, row.name)),
        duration(results.median(TORCH, row.name)),
        _number(results.ratio(row)),
        duration(results.median(LIMIT, row.limit)),
        _number(results.times_limit(row)),
        row.says,
    )


def _widths(lines: list[tuple[str, ...]]) -> list[int]:
    """Of each column, the characters."""
    return [max(len(line[n]) for line in [COLUMNS, *lines]) for n in range(len(COLUMNS))]


def _print_plain(lines: list[tuple[str, ...]]) -> None:
    widths = _widths(lines)
    for line in [COLUMNS, *lines]:
        cells = [line[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(line[1:6], widths[1:6], strict=True)]
        print("  ".join([*cells, line[6]]).rstrip())


def print_facts(facts: Mapping[str, str]) -> None:
    """The machine, or the settings: a name and a value a line."""
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:>{width}}: {value}")


def save_json(results: Results, facts: Mapping[str, Mapping[str, str]], path: Path) -> None:
    """Everything, the figure of each round included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {**facts, "rows": results.as_json(), "failures": results.failures}
    path.write_text(json.dumps(content, indent=1) + "\n")


def duration(seconds: float | None) -> str:
    """Three digits and a unit."""
    if seconds is None:
        return "-"
    factor, unit = next((fu for fu in UNITS if seconds >= fu[0]), UNITS[-1])
    number = seconds / factor
    return f"{number:.3g} {unit}" if number < 1000 else f"{number:.0f} {unit}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
