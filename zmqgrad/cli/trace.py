"""``zmqgrad trace``: shows what the processes of a job recorded under ``ZMQGRAD_TRACE``.

Each view is a module ``zmqgrad.cli.trace_<name>`` with ``add_arguments`` and ``execute``, and a line of
``_VIEWS``. Exit codes: 0 success; 1 the trace cannot be read, or does not have what was asked for; 2 invalid
arguments; 130 Ctrl-C; 141 the output was closed, as by ``| head``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Protocol, cast

from zmqgrad.errors import TraceError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141
"""The exit codes that shells use for a program killed by SIGINT, or by SIGPIPE."""

_VIEWS = {
    "findings": "Name what stands out: deadlocks, stragglers, hot workers, unused sends.",
    "report": "Write one web page with findings, timeline, latencies, traffic, autograd and waits.",
    "waits": "Show who waits for whom, and where; name deadlocks.",
    "tail": "Print messages, one per line, also while the job runs.",
    "top": "Show rates, latencies, queues and threads of a running job in the terminal.",
    "stats": "Count messages, bytes and latencies, by type, pair of workers and function.",
    "sequence": "Draw a call, an autograd context or a rendezvous round as a sequence diagram.",
    "timeline": "Write a timeline that Perfetto and chrome://tracing open.",
    "graph": "Draw the distributed autograd graph of a context.",
}
"""Views with their help texts; ``zmqgrad.cli.trace_<name>`` is the module."""


class View(Protocol):
    """Interface of a module ``trace_<name>``."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def execute(self, arguments: argparse.Namespace) -> int: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the views and their arguments."""
    views = parser.add_subparsers(dest="view", required=True, title="views", metavar="VIEW")
    for name, purpose in _VIEWS.items():
        its_parser = views.add_parser(name, help=purpose, description=purpose, allow_abbrev=False)
        _view(name).add_arguments(its_parser)


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
        # Otherwise Python reports the broken pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _view(name: str) -> View:
    return cast("View", importlib.import_module(f"zmqgrad.cli.trace_{name}"))
