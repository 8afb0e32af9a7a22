"""``zmqgrad trace findings``: what a person should look at first in a trace.

Exit codes as those of ``zmqgrad trace``; 3: there is a problem, such as a deadlock.
"""

from __future__ import annotations

import argparse
import sys
import textwrap

import msgspec

from zmqgrad.cli.colours import RED, YELLOW, paint
from zmqgrad.cli.trace_output import add_job_arguments, add_part_arguments, open_job, printable
from zmqgrad.trace.findings import Severity, find

EXIT_PROBLEM = 3

_COLOURS = {Severity.PROBLEM: RED, Severity.WARNING: YELLOW}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_job_arguments(parser)
    add_part_arguments(parser, last_only=True)
    parser.add_argument(
        "--all",
        action="store_true",
        help="also what is no fault: the slowest calls, the longest waits, workers that still run",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def execute(arguments: argparse.Namespace) -> int:
    """Print the findings."""
    findings = find(open_job(arguments), notes=arguments.all)
    if arguments.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(findings)).decode() + "\n")
    elif not findings:
        print("nothing stands out")
    for each in () if arguments.json else findings:
        severity = paint(each.severity.name, _COLOURS.get(each.severity))
        print(f"{severity}: {printable(each.title)}")
        for line in each.detail.splitlines():
            print(textwrap.indent(textwrap.fill(printable(line), 100), "    "))
    return EXIT_PROBLEM if any(each.severity is Severity.PROBLEM for each in findings) else 0
