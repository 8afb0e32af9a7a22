"""``zmqgrad trace show``: a call, an autograd context or a rendezvous round as a sequence diagram."""

from __future__ import annotations

import argparse
import shutil

from zmqgrad.cli.trace_output import (
    add_view_arguments,
    count,
    note,
    open_job,
    print_json,
    print_table,
    printable,
)
from zmqgrad.trace.contexts import Contexts
from zmqgrad.trace.drawing import as_mermaid, as_text
from zmqgrad.trace.job import Job
from zmqgrad.trace.labels import show_time
from zmqgrad.trace.sequence import Diagram, call_diagram, context_diagram, round_diagram
from zmqgrad.wire.ids import parse_id, show_id

_DEFAULT = -1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zmqgrad trace show``."""
    add_view_arguments(parser, window=True, last=True)
    what = parser.add_mutually_exclusive_group()
    for name, meaning in (
        ("--call", "a call, by the id of its request, as 0.7 (default: stuck longest, or else the slowest)"),
        ("--context", "a distributed autograd context (default: the last one with a backward pass)"),
    ):
        what.add_argument(name, type=_id, nargs="?", const=_DEFAULT, metavar="ID", help=meaning)
    what.add_argument("--round", type=int, metavar="N", help="a round of the elastic rendezvous")
    what.add_argument("--list", action="store_true", help="list the autograd contexts")
    parser.add_argument("--worker", metavar="NAME", help="the worker that made the call")
    parser.add_argument(
        "--limit", type=count, default=200, metavar="N", help="steps shown (default: %(default)s; 0: all)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--mermaid", action="store_true", help="print Mermaid text, which draws a picture")
    form.add_argument("--json", action="store_true", help="print JSON; times in nanoseconds")


def _id(text: str) -> int:
    try:
        return parse_id(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text} is no id such as 0.7; a directory comes first") from e


def execute(arguments: argparse.Namespace) -> int:
    """Print or write the diagram."""
    job = open_job(arguments)
    if arguments.list:
        _list(job, arguments.json)
        return 0
    diagram = _choose(job, arguments)
    left_out = len(diagram.steps) - arguments.limit if arguments.limit else 0
    if left_out > 0:
        del diagram.steps[arguments.limit :]
        note(f"the last {left_out} steps are left out: --limit 0 shows all")
    if arguments.json:
        print_json(diagram)
    elif arguments.mermaid:
        print(*map(printable, as_mermaid(diagram)), sep="\n")
    else:
        width = shutil.get_terminal_size((110, 0)).columns
        print(*map(printable, as_text(diagram, width)), sep="\n")
    return 0


def _choose(job: Job, arguments: argparse.Namespace) -> Diagram:
    if arguments.context is not None:
        return context_diagram(job, None if arguments.context == _DEFAULT else arguments.context)
    if arguments.round is not None:
        return round_diagram(job, arguments.round)
    return call_diagram(job, None if arguments.call == _DEFAULT else arguments.call, arguments.worker)


def _list(job: Job, as_json: bool) -> None:
    rows = [
        {
            "context": show_id(each.number),
            "workers": len(each.workers),
            "sends": len(each.sends),
            "unused": len(each.unused()),
            "passes": len(each.passes),
            "backward": sum(p.ended - p.began for p in each.passes.values() if p.ended is not None),
        }
        for each in Contexts(job.events()).all.values()
    ]
    if as_json:
        print_json(rows)
    elif rows:
        shown = [{**row, "backward": show_time(row["backward"])} for row in rows]  # type: ignore[arg-type]
        print_table(list(rows[0]), [list(map(str, row.values())) for row in shown])
    else:
        note(f"{job.directory} has no autograd contexts: the job used no autograd.context()")
