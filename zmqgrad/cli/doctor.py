"""``zmqgrad doctor``: checks whether this host can run workers, and which transports would be used.

Prints a table, or JSON. The exit code is 0 if workers can run here, otherwise 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from zmqgrad.cli.checks import Check, Status, all_checks
from zmqgrad.cli.colours import GREEN, RED, YELLOW, paint
from zmqgrad.cli.parser import describe

EXIT_UNFIT = 1

_MARKS = {Status.OK: "ok", Status.NOTE: "--", Status.WARNING: "WARN", Status.BAD: "BAD"}
_COLOURS = {Status.OK: GREEN, Status.WARNING: YELLOW, Status.BAD: RED}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zmqgrad doctor``."""
    parser.add_argument(
        "--no-self-test", action="store_true", help="start no workers (the self-test takes a few seconds)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    examples = (
        "zmqgrad doctor",
        "MASTER_ADDR=host0 MASTER_PORT=29500 zmqgrad doctor",
        "zmqgrad doctor --json",
    )
    describe(parser, examples, {"1": "workers cannot run here, see the checks marked BAD"})


def execute(arguments: argparse.Namespace) -> int:
    """Run the checks, print the report, and return the exit code."""
    checks = all_checks(self_test=not arguments.no_self_test)
    bad = [check.name for check in checks if check.status is Status.BAD]
    if arguments.json:
        found = [{**check._asdict(), "status": check.status.name} for check in checks]
        print(json.dumps({"fit": not bad, "checks": found}))
        return EXIT_UNFIT if bad else 0
    sys.stdout.write(table(checks))
    if bad:
        print(f"\nworkers cannot run well here: see {', '.join(bad)}")
        return EXIT_UNFIT
    print("\nworkers can run here")
    return 0


def table(checks: Sequence[Check]) -> str:
    """One line for each check: status, name, findings; below it, the remedy."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        mark = paint(f"{_MARKS[check.status]:>4}", _COLOURS.get(check.status))
        lines.append(f"{mark}  {check.name:<{width}}  {check.found}\n")
        if check.advice:
            lines.append(f"{'':>4}  {'':<{width}}  -> {check.advice}\n")
    return "".join(lines)
