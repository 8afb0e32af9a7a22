"""``zmqgrad trace waits``: who waits for whom, for how long and where; names the cycles.

Stacks and exit codes as those of ``zmqgrad trace findings``; 3: there is a cycle.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from zmqgrad.cli.trace_findings import EXIT_PROBLEM, add_survey_arguments, print_findings, survey
from zmqgrad.cli.trace_output import printable
from zmqgrad.trace.cycles import find_cycles
from zmqgrad.trace.findings.hangs import explained
from zmqgrad.trace.labels import actor_label
from zmqgrad.trace.places import describe, headline, locate, thread_label
from zmqgrad.trace.waits import Wait, Waits

MAX_SHOWN = 30
LEAST_NANOSECONDS = 1_000_000_000
"""Shorter open waits are only counted: requests are always on their way in a job that runs."""

add_arguments = add_survey_arguments


def execute(arguments: argparse.Namespace) -> int:
    """Show the waits."""
    found = survey(arguments)
    waits = found.waits
    cycles = find_cycles(waits)
    if arguments.json:
        json.dump(_as_json(waits, cycles), sys.stdout, indent=2)
        print()
    else:
        print_findings(each for each in found.findings() if each.kind == "deadlock")
        _print_others(waits)
    return EXIT_PROBLEM if cycles else 0


def _print_others(waits: Waits) -> None:
    """The waits that no deadlock explains."""
    known = {id(wait) for wait in explained(waits)}
    for kind, found in (("open", waits.open), ("failed", waits.failed), ("longest ended", waits.ended)):
        rest = [wait for wait in found if id(wait) not in known]
        shown = [w for w in rest if w.until is not None or w.duration(waits.now) >= LEAST_NANOSECONDS]
        shown.sort(key=lambda w: -w.duration(waits.now))
        short = f", and {len(rest) - len(shown)} shorter than 1 s" if len(rest) > len(shown) else ""
        if shown or kind == "open":
            print(f"{len(shown)} {kind} wait{'s' * (len(shown) != 1)}{short}{':' * bool(shown)}")
        for wait in shown[:MAX_SHOWN]:
            lines = [headline(wait, waits)] if kind == "longest ended" else describe(wait, waits)
            print(*(f"  {printable(line)}" for line in lines), sep="\n")
        if len(shown) > MAX_SHOWN:
            print(f"  ... and {len(shown) - MAX_SHOWN} more")


def _as_json(waits: Waits, cycles: Sequence[Sequence[Wait]]) -> dict[str, Any]:
    return {
        "cycles": [[actor_label(wait.waiter) for wait in cycle] for cycle in cycles],
        "waits": [_wait_as_json(wait, waits) for wait in [*waits.open, *waits.failed, *waits.ended]],
        "stacks": [
            {"process": process.info.pid, "thread": s.name, "native_id": s.native_id, "stack": s.stack}
            for process, stacks in waits.stacks.items()
            for s in stacks
        ],
    }


def _wait_as_json(wait: Wait, waits: Waits) -> dict[str, Any]:
    return {
        "waiter": actor_label(wait.waiter),
        "pid": wait.waiter.process.info.pid,
        "thread": thread_label(wait),
        "blocking": wait.is_blocking,
        "for": actor_label(wait.target) if wait.target is not None else None,
        "rank": wait.rank,
        "function": wait.function,
        "state": "open" if wait.until is None else "failed" if wait.failed else "ended",
        "seconds": wait.duration(waits.now) / 1e9,
        "where": locate(wait, waits),
        "stack": waits.stack_of(wait.waiter.process, wait.thread) if wait.is_blocking else "",
    }
