"""``zmqgrad trace waits``: who waits for whom, for how long and where; names the cycles.

Of a running job, it first asks each process of this host for the stacks of its threads. Exit codes as those
of ``zmqgrad trace``; 3: there is a cycle.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from zmqgrad.cli.trace_output import (
    add_job_arguments,
    add_part_arguments,
    note,
    open_job,
    printable,
    read_job,
)
from zmqgrad.runtime.clock import MonotonicClock, monotonic_ns
from zmqgrad.trace.cycles import blocked_by, find_cycles
from zmqgrad.trace.findings import ABOUT_WAITS, Survey
from zmqgrad.trace.job import STALLED_NANOSECONDS
from zmqgrad.trace.labels import actor_label, show_time
from zmqgrad.trace.live import ask_for_stacks, running
from zmqgrad.trace.places import locate, target_label, thread_label
from zmqgrad.trace.stacks import innermost
from zmqgrad.trace.waits import Wait, Waits

EXIT_CYCLE = 3
MAX_SHOWN = 30
LEAST_NANOSECONDS = 1_000_000_000
"""Shorter open waits are only counted: requests are always on their way in a job that runs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_job_arguments(parser)
    add_part_arguments(parser, last_only=True)
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument(
        "--no-stacks", action="store_true", help="do not ask a running job for the stacks of its threads"
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="how long to wait for the stacks (default: 2)"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Show the waits."""
    job = open_job(arguments)
    alive = running(job)
    if alive and not arguments.no_stacks:
        silent = ask_for_stacks(job.directory, alive, arguments.seconds, MonotonicClock())
        for process in silent:
            note(
                f"{process} did not send its stacks in {arguments.seconds:g} s: "
                f"it is stopped, or native code keeps the GIL"
            )
        job = read_job(arguments)
    now = job.time(alive[0], monotonic_ns()) if alive else None
    if now is not None and now - job.cut < STALLED_NANOSECONDS:
        now = None  # what was recorded after the cut is not read, so nothing may be measured by it
    survey = Survey(job, now)
    waits = survey.waits
    cycles = find_cycles(waits)
    if arguments.json:
        json.dump(_as_json(waits, cycles), sys.stdout, indent=2)
        print()
    else:
        for line in _lines(waits, cycles, bool(alive)):
            print(printable(line))
        for finding in survey.findings():
            if finding.kind not in ABOUT_WAITS:
                print(printable(f"{finding.severity.name}: {finding.title}: {finding.detail}"))
    return EXIT_CYCLE if cycles else 0


def _lines(waits: Waits, cycles: Sequence[Sequence[Wait]], is_running: bool) -> Iterator[str]:
    for cycle in cycles:
        names = [actor_label(wait.waiter) for wait in cycle]
        yield f"DEADLOCK: {' -> '.join([*names, names[0]])}: each waits for the next"
        for wait in cycle:
            yield from _describe(wait, waits)
        for wait in blocked_by(cycle, waits):
            yield f"{_headline(wait, waits)}, which cannot end before that"
        yield ""
    shown = {id(wait) for cycle in cycles for wait in [*cycle, *blocked_by(cycle, waits)]}
    state = "" if is_running else " when their logs end"
    for kind, remark, found in (
        ("open", state, waits.open),
        ("failed", " (timeout, loss, Ctrl-C)", waits.failed),
        ("ended", ", the longest", waits.ended),
    ):
        rest = [wait for wait in found if id(wait) not in shown]
        count = len(rest)
        rest = [w for w in rest if w.until is not None or w.duration(waits.now) >= LEAST_NANOSECONDS]
        rest.sort(key=lambda w: -w.duration(waits.now))
        if rest or (found is waits.open and not cycles):
            more = f", and {count - len(rest)} shorter than 1 s" if count > len(rest) else ""
            yield f"{len(rest)} {kind} {'wait' if len(rest) == 1 else 'waits'}{remark}{more}" + (
                ":" if rest else ""
            )
        for wait in rest[:MAX_SHOWN]:
            yield from _describe(wait, waits) if found is not waits.ended else [_headline(wait, waits)]
        if len(rest) > MAX_SHOWN:
            yield f"  ... and {len(rest) - MAX_SHOWN} more"


def _headline(wait: Wait, waits: Waits) -> str:
    duration = show_time(wait.duration(waits.now))
    peer = target_label(wait)
    verb = "waits" if wait.until is None else "waited"
    if wait.context and wait.call is None:
        return f"  {actor_label(wait.waiter)} ({thread_label(wait)}) {verb} {duration} for a backward pass"
    if not wait.is_blocking:
        return f"  {actor_label(wait.waiter)} has no reply for {duration} from {peer}: {wait.function}"
    return (
        f"  {actor_label(wait.waiter)} ({thread_label(wait)}) {verb} {duration} for {peer}: {wait.function}"
    )


def _describe(wait: Wait, waits: Waits) -> Iterator[str]:
    yield _headline(wait, waits)
    yield f"      {locate(wait, waits)}"
    own = waits.stack_of(wait.waiter.process, wait.thread) if wait.is_blocking else ""
    call, target = wait.call, wait.target
    there = waits.stack_of(target.process, call.thread) if call is not None and target is not None else ""
    for where, stack in (("waits at", own), ("runs", there)):
        for i, frame in enumerate(innermost(stack, 2)):
            yield f"      {'called from' if i else where} {frame}"


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
