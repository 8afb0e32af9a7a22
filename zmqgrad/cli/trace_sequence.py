"""``zmqgrad trace sequence``: a call, an autograd context or a rendezvous round as a sequence diagram."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import msgspec

from zmqgrad.cli.trace_output import (
    add_job_arguments,
    add_part_arguments,
    count,
    duration,
    note,
    open_job,
    printable,
)
from zmqgrad.errors import TraceError
from zmqgrad.trace.drawing import as_mermaid, as_svg, as_text
from zmqgrad.trace.job import Job
from zmqgrad.trace.sequence import Diagram, call_diagram, context_diagram, round_diagram
from zmqgrad.wire.ids import parse_id


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zmqgrad trace sequence``."""
    add_job_arguments(parser)
    add_part_arguments(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--call",
        type=parse_id,
        metavar="ID",
        help="the call whose request has this id, as 0.7 (default: stuck longest, or else the slowest)",
    )
    what.add_argument("--context", type=parse_id, metavar="ID", help="a distributed autograd context")
    what.add_argument("--round", type=int, metavar="N", help="a round of the elastic rendezvous")
    parser.add_argument("--worker", metavar="NAME", help="the worker that made the call")
    parser.add_argument(
        "--limit", type=count, default=200, metavar="N", help="steps shown (default: %(default)s; 0: all)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--mermaid", action="store_true", help="print Mermaid text")
    form.add_argument("--svg", type=Path, metavar="FILE", help="write an SVG picture")
    form.add_argument("--json", action="store_true", help="print one JSON object; times in nanoseconds")


def execute(arguments: argparse.Namespace) -> int:
    """Print or write the diagram."""
    diagram = _choose(open_job(arguments), arguments)
    left_out = len(diagram.steps) - arguments.limit if arguments.limit else 0
    if left_out > 0:
        del diagram.steps[arguments.limit :]
        note(f"the last {left_out} steps are left out: --limit 0 shows all")
    if arguments.json:
        print(msgspec.json.encode(diagram).decode())
    elif arguments.svg is not None:
        _write(arguments.svg, "\n".join(as_svg(diagram, duration)))
    elif arguments.mermaid:
        print(*map(printable, as_mermaid(diagram, duration)), sep="\n")
    else:
        width = shutil.get_terminal_size((110, 0)).columns
        print(*map(printable, as_text(diagram, duration, width)), sep="\n")
    return 0


def _choose(job: Job, arguments: argparse.Namespace) -> Diagram:
    if arguments.context is not None:
        return context_diagram(job, arguments.context)
    if arguments.round is not None:
        return round_diagram(job, arguments.round)
    return call_diagram(job, arguments.call, arguments.worker)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as e:
        raise TraceError(f"cannot write {path}: {e.strerror or e}") from e
