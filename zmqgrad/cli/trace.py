"""``zmqgrad trace``: shows what the processes of a job recorded under ``ZMQGRAD_TRACE``.

Each view is a module ``zmqgrad.cli.trace_<name>`` with ``add_arguments`` and ``execute``, and a line of
``_VIEWS``, which has its exit codes as well.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from functools import partial
from typing import cast

from zmqgrad import environment
from zmqgrad.cli.limits import allow_many_files
from zmqgrad.cli.parser import EXIT_FAILED, Command, CommandParser, describe
from zmqgrad.errors import TraceError

_VIEWS = {
    "findings": (
        "Name what stands out: hangs, stragglers, hot workers, repeated sends, unused results (the default).",
        "zmqgrad trace runs/trace",
        "zmqgrad trace runs/trace --all --json",
    ),
    "report": (
        "Write one web page with findings, timeline, latencies, traffic, autograd and waits.",
        "zmqgrad trace report runs/trace",
    ),
    "tail": (
        "Print messages, one per line, also while the job runs.",
        "zmqgrad trace tail runs/trace --worker worker0 --type CALL",
    ),
    "top": (
        "Show rates, latencies, queues and threads of a running job in the terminal.",
        "zmqgrad trace top runs/trace --sort bytes",
        "zmqgrad trace top runs/trace --once --json",
    ),
    "stats": (
        "Count messages, bytes and latencies, by type, pair of workers and function.",
        "zmqgrad trace stats runs/trace --sort p99 --top 10",
    ),
    "show": (
        "Draw a call, an autograd context or a rendezvous round, step by step.",
        "zmqgrad trace show runs/trace --call 0.7",
        "zmqgrad trace show runs/trace --context --mermaid",
        "zmqgrad trace show runs/trace --round 1",
    ),
    "timeline": (
        "Write a timeline that Perfetto and chrome://tracing open.",
        "zmqgrad trace timeline runs/trace",
    ),
}
"""Views with their help texts and examples; ``zmqgrad.cli.trace_<name>`` is the module."""

_DEFAULT_VIEW = "findings"

_EXIT_CODES = {
    "1": "the trace cannot be read, or does not have what was asked for",
    "3": "findings: there is a problem, such as a deadlock",
    "130": "Ctrl-C",
    "141": "the output was closed, as by | head",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the views; their own arguments are declared when they are used."""
    assert isinstance(parser, CommandParser)
    parser.complete = _with_view
    views = parser.add_subparsers(dest="view", required=True, title="views", metavar="VIEW")
    for name, (purpose, *_) in _VIEWS.items():
        views.add_parser(name, help=purpose, description=purpose, declare=partial(_declare, name))
    examples = (
        "zmqgrad run --nproc-per-node 2 --trace runs/trace train.py",
        "zmqgrad trace runs/trace",
        "zmqgrad trace report runs/trace",
    )
    describe(parser, examples, _EXIT_CODES)


def execute(arguments: argparse.Namespace) -> int:
    """Show the view, and return the exit code."""
    allow_many_files()
    output = importlib.import_module("zmqgrad.cli.trace_output")
    try:
        if arguments.jobs:
            output.list_jobs(arguments)
            return 0
        return _view(arguments.view).execute(arguments)
    except TraceError as error:
        lines = map(output.printable, f"zmqgrad trace {arguments.view}: {error}".splitlines())
        print(*lines, sep="\n", file=sys.stderr)
        return EXIT_FAILED


def _with_view(words: list[str]) -> list[str]:
    """The words of a command line, with the default view where a directory stands in its place."""
    first = next((word for word in words if not word.startswith("-")), None)
    if first is None:
        has_directory = not words and environment.trace_directory() is not None
    else:
        has_directory = first not in _VIEWS and (os.path.isdir(first) or os.sep in first)
    return [_DEFAULT_VIEW, *words] if has_directory else words


def _declare(name: str, parser: argparse.ArgumentParser) -> None:
    _view(name).add_arguments(parser)
    describe(parser, _VIEWS[name][1:], _EXIT_CODES)


def _view(name: str) -> Command:
    return cast("Command", importlib.import_module(f"zmqgrad.cli.trace_{name}"))
