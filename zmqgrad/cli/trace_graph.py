"""``zmqgrad trace graph``: the distributed autograd graph of a context, as text or as a picture."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

import msgspec

from zmqgrad.cli.trace_output import add_job_arguments, add_part_arguments, note, open_job, printable
from zmqgrad.errors import ConfigurationError, TraceError
from zmqgrad.trace import graph
from zmqgrad.trace.graph_plot import plot
from zmqgrad.wire.ids import parse_id, show_id

DOT_SECONDS = 120
"""Limit for Graphviz, whose layout of large graphs takes long."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zmqgrad trace graph``."""
    add_job_arguments(parser)
    add_part_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON; times in nanoseconds")
    parser.add_argument("--list", action="store_true", help="list the contexts of the job")
    parser.add_argument(
        "--context",
        type=parse_id,
        metavar="ID",
        help="which context (default: the last one with a backward pass)",
    )
    parser.add_argument(
        "--number", type=int, metavar="N", help="which pass the picture shows, from 1 (default: the last)"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write a picture: .dot for Graphviz; .svg, .png, .pdf by Graphviz, or else by matplotlib",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Show the graph, and return the exit code."""
    job = open_job(arguments)
    if arguments.list:
        rows = graph.contexts(job)
        _list(rows, arguments.json)
        if not rows:
            note(f"{job.directory} has no autograd contexts: the job used no autograd.context()")
        return 0
    found = graph.graph(job, arguments.context)
    index = _index(found, arguments.number)
    if arguments.json:
        print(msgspec.json.encode(found).decode())
    else:
        print(printable_lines(found))
    if arguments.output is not None:
        draw(found, arguments.output, index)
    return 0


def printable_lines(found: graph.Graph) -> str:
    """The graph as text, fit for a terminal."""
    return "\n".join(map(printable, graph.text(found)))


def _list(rows: list[graph.ContextRow], as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(rows).decode())
        return
    print(f"{'context':>20}  workers  sends  unused  passes  backward")
    for row in rows:
        print(
            f"{show_id(row.context):>20}  {row.workers:>7}  {row.sends:>5}  {row.unused:>6}  "
            f"{row.passes:>6}  {row.nanoseconds / 1e6:.2f} ms"
        )


def _index(found: graph.Graph, number: int | None) -> int:
    if number is None:
        return -1
    if not 1 <= number <= len(found.passes):
        raise ConfigurationError(f"--number {number}: the context has {len(found.passes)} backward passes")
    return number - 1


def draw(found: graph.Graph, path: Path, number: int = -1) -> None:
    """Draws a pass to ``path``, by its suffix.

    Raises:
        TraceError: if it cannot be drawn or written.
    """
    program = shutil.which("dot")
    try:
        if path.suffix in (".dot", ".gv"):
            path.write_text(graph.dot(found, number), encoding="utf-8")
        elif program is None:
            plot(found, path, number)
        else:
            command = [program, f"-T{path.suffix[1:]}", "-o", str(path)]
            subprocess.run(
                command,
                input=graph.dot(found, number).encode(),
                check=True,
                capture_output=True,
                timeout=DOT_SECONDS,
            )
    except subprocess.CalledProcessError as e:
        raise TraceError(f"Graphviz cannot draw {path}: {e.stderr.decode(errors='replace').strip()}") from e
    except subprocess.TimeoutExpired as e:
        raise TraceError(f"Graphviz did not draw {path} within {DOT_SECONDS} s") from e
    except OSError as e:
        raise TraceError(f"cannot write {path}: {e.strerror or e}") from e
