"""``zmqgrad trace``: shows what the processes of a job recorded under ``ZMQGRAD_TRACE``.

Each view is a module ``zmqgrad.cli.trace_<name>`` with ``add_arguments`` and ``execute``, and a line of
``_VIEWS``, which has its exit codes as well.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from functools import partial
from typing import cast

from zmqgrad.cli.parser import Command, describe, discard_output
from zmqgrad.errors import TraceError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141
"""The exit codes that shells use for a program killed by SIGINT, or by SIGPIPE."""

_VIEWS = {
    "findings": (
        "Name what stands out: deadlocks, stragglers, hot workers, unused sends.",
        "zmqgrad trace findings runs/trace",
        "zmqgrad trace findings runs/trace --all --json",
    ),
    "report": (
        "Write one web page with findings, timeline, latencies, traffic, autograd and waits.",
        "zmqgrad trace report runs/trace",
    ),
    "waits": (
        "Show who waits for whom, and where; name deadlocks.",
        "zmqgrad trace waits runs/trace",
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
    "sequence": (
        "Draw a call, an autograd context or a rendezvous round as a sequence diagram.",
        "zmqgrad trace sequence runs/trace --round 1",
        "zmqgrad trace sequence runs/trace --context 1 --svg context.svg",
    ),
    "timeline": (
        "Write a timeline that Perfetto and chrome://tracing open.",
        "zmqgrad trace timeline runs/trace",
    ),
    "graph": (
        "Draw the distributed autograd graph of a context.",
        "zmqgrad trace graph runs/trace --list",
    ),
}
"""Views with their help texts and examples; ``zmqgrad.cli.trace_<name>`` is the module."""

_EXIT_CODES = {
    "1": "the trace cannot be read, or does not have what was asked for",
    "130": "Ctrl-C",
    "141": "the output was closed, as by | head",
}
_MORE_EXIT_CODES = {
    "findings": {"3": "there is a problem, such as a deadlock"},
    "waits": {"3": "there is a deadlock"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the views; their own arguments are declared when they are used."""
    views = parser.add_subparsers(dest="view", required=True, title="views", metavar="VIEW")
    for name, (purpose, *_) in _VIEWS.items():
        views.add_parser(name, help=purpose, description=purpose, declare=partial(_declare, name))
    examples = (
        "zmqgrad run --nproc-per-node 2 --trace runs/trace train.py",
        "zmqgrad trace report runs/trace",
    )
    describe(parser, examples, _EXIT_CODES)


def execute(arguments: argparse.Namespace) -> int:
    """Show the view, and return the exit code."""
    try:
        code = _view(arguments.view).execute(arguments)
        sys.stdout.flush()
        return code
    except TraceError as error:
        print(f"zmqgrad trace {arguments.view}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:
        discard_output()
        return EXIT_PIPE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _declare(name: str, parser: argparse.ArgumentParser) -> None:
    _view(name).add_arguments(parser)
    describe(parser, _VIEWS[name][1:], _EXIT_CODES | _MORE_EXIT_CODES.get(name, {}))


def _view(name: str) -> Command:
    return cast("Command", importlib.import_module(f"zmqgrad.cli.trace_{name}"))
