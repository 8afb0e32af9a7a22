"""``zmqgrad trace DIRECTORY``: what a person should look at first in a trace.

Of a running job, it first asks each process of this host for the stacks of its threads. Exit codes as those
of ``zmqgrad trace``; 3: there is a problem, such as a deadlock.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable

from zmqgrad.cli.colours import RED, YELLOW, paint
from zmqgrad.cli.trace_output import (
    add_view_arguments,
    note,
    open_job,
    print_json,
    printable,
    read_job,
    terminal_width,
)
from zmqgrad.runtime.clock import MonotonicClock, monotonic_ns
from zmqgrad.trace.findings import Finding, Severity, Survey
from zmqgrad.trace.job import STALLED_NANOSECONDS
from zmqgrad.trace.live import ask_for_stacks, running

EXIT_PROBLEM = 3

_COLOURS = {Severity.PROBLEM: RED, Severity.WARNING: YELLOW}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_view_arguments(parser, last=True, json=True)
    parser.add_argument(
        "--seconds",
        type=float,
        default=2.0,
        help="how long to wait for the stacks of a running job (default: 2; 0: do not ask)",
    )
    parser.add_argument(
        "--all", action="store_true", help="also what is no fault: slow calls, all waits, running workers"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Print the findings."""
    findings = _survey(arguments).findings(notes=arguments.all)
    if arguments.json:
        print_json(findings, indent=2)
    elif not findings:
        print("nothing stands out")
    else:
        _print(findings)
    return EXIT_PROBLEM if any(each.severity is Severity.PROBLEM for each in findings) else 0


def _survey(arguments: argparse.Namespace) -> Survey:
    """What stands out in the job; if it runs, with the stacks of its threads and waits up to now."""
    job = open_job(arguments)
    alive = running(job)
    if not alive:
        return Survey(job)
    if arguments.seconds:
        for process in ask_for_stacks(job.directory, alive, arguments.seconds, MonotonicClock()):
            note(
                f"{process} did not send its stacks in {arguments.seconds:g} s: "
                f"it is stopped, or native code keeps the GIL"
            )
        job = read_job(arguments)
    now = job.time(alive[0], monotonic_ns())
    # What was recorded after the cut is not read, so nothing may be measured by it.
    return Survey(job, None if now - job.cut < STALLED_NANOSECONDS else now)


def _print(findings: Iterable[Finding]) -> None:
    """Prints each finding with its evidence; lines of code are not wrapped."""
    width = min(100, terminal_width())
    for each in findings:
        print(f"{paint(each.severity.name, _COLOURS.get(each.severity))}: {printable(each.title)}")
        for line in map(printable, each.detail.splitlines()):
            is_code = line.startswith(" ")
            print(textwrap.indent(line if is_code else textwrap.fill(line, int(width) - 4), "    "))
