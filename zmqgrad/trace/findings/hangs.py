"""Deadlocks, waits that have not ended or have failed, calls without a reply. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

from zmqgrad.trace.cycles import blocked_by, find_cycles
from zmqgrad.trace.findings.finding import SHOWN, Finding, Severity, counted, most_common
from zmqgrad.trace.kinds import PROGRAM_CALLS
from zmqgrad.trace.labels import actor_label, show_time
from zmqgrad.trace.model import Actor
from zmqgrad.trace.places import describe, headline, locate, target_label, thread_label
from zmqgrad.trace.waits import MAX_STUCK, Wait, Waits

STUCK_NANOSECONDS = 5_000_000_000
"""A wait that has lasted for so long and not ended is a finding."""

NOTED_NANOSECONDS = 1_000_000_000
"""Shorter waits are not even noted: requests are always on their way in a job that runs."""

MAX_NOTED = 30

OWN_FUNCTIONS = "zmqgrad."
"""What this library calls for itself, such as to release contexts: the program does not wait for it."""


def deadlocks(waits: Waits) -> Iterator[Finding]:
    """Cycles of waits, each with the code at both ends and what to do about it."""
    for cycle in find_cycles(waits):
        names = tuple(actor_label(wait.waiter) for wait in cycle)
        more = blocked_by(cycle, waits)
        lines = [line for wait in cycle for line in describe(wait, waits)]
        lines += [f"{headline(wait, waits)}, which cannot end before that" for wait in more]
        lines.append("Is a lock held during a call, or do all threads of the pool wait?")
        if not any(waits.stack_of(wait.waiter.process, wait.thread) for wait in cycle):
            lines[-1] += " The same command shows the lines of code while the job hangs."
        yield Finding(
            "deadlock",
            Severity.PROBLEM,
            f"Deadlock: {' -> '.join([*names, names[0]])}: each waits for the next",
            "\n".join(lines),
            names,
            max(wait.since for wait in cycle),
            {"waits": [_evidence(wait, waits) for wait in [*cycle, *more]]},
            next((wait.call.request.key for wait in cycle if wait.call is not None), None),
        )


def explained(waits: Waits) -> list[Wait]:
    """The waits that deadlocks explain."""
    return [wait for cycle in find_cycles(waits) for wait in [*cycle, *blocked_by(cycle, waits)]]


def _others(waits: Waits) -> list[Wait]:
    """The waits that no deadlock explains, longest first."""
    cyclic = {id(wait) for wait in explained(waits)}
    rest = [w for w in waits.stuck() if id(w) not in cyclic and w.duration(waits.now) >= NOTED_NANOSECONDS]
    return sorted(rest, key=lambda w: -w.duration(waits.now))


def _are_long(others: Collection[Wait], waits: Waits) -> list[Wait]:
    return [wait for wait in others if wait.duration(waits.now) > STUCK_NANOSECONDS][:SHOWN]


def long_waits(waits: Waits) -> Iterator[Finding]:
    """Waits of no cycle that last long, or that failed."""
    for wait in _are_long(_others(waits), waits):
        yield _finding(wait, waits, Severity.PROBLEM if wait.is_blocking else Severity.WARNING)


def other_waits(waits: Waits) -> Iterator[Finding]:
    """Shorter waits that have not ended or have failed; the longest that ended, by worker and function."""
    others = _others(waits)
    for wait in others[len(_are_long(others, waits)) :][:MAX_NOTED]:
        yield _finding(wait, waits, Severity.NOTE)
    longest: dict[tuple[Actor, int, str], Wait] = {}
    for wait in waits.ended:
        longest.setdefault((wait.waiter, wait.rank, wait.function), wait)
    for wait in list(longest.values())[:SHOWN]:
        yield _finding(wait, waits, Severity.NOTE)


def _finding(wait: Wait, waits: Waits, severity: Severity) -> Finding:
    who, took = actor_label(wait.waiter), show_time(wait.duration(waits.now))
    is_stuck = wait.until is None or wait.failed
    return Finding(
        "failed wait" if wait.failed else "open wait" if is_stuck else "long wait",
        severity,
        f"{who} got no reply for {took}" if is_stuck else f"{who} waited {took}",
        "\n".join(describe(wait, waits)) if is_stuck else f"For {wait.function} of {target_label(wait)}.",
        (who,),
        wait.since,
        _evidence(wait, waits),
        wait.call.request.key if wait.call is not None else None,
    )


def _evidence(wait: Wait, waits: Waits) -> dict[str, Any]:
    """A wait for scripts; ``serving`` is the stack of the thread that runs the call."""
    waiter, call, target = wait.waiter, wait.call, wait.target
    return {
        "seconds": wait.duration(waits.now) / 1e9,
        "waiter": actor_label(waiter),
        "pid": waiter.process.info.pid,
        "thread": thread_label(wait),
        "blocking": wait.is_blocking,
        "for": target_label(wait),
        "function": wait.function,
        "where": locate(wait, waits),
        "stack": waits.stack_of(waiter.process, wait.thread) if wait.is_blocking else "",
        "serving": waits.stack_of(target.process, call.thread) if call is not None and target else "",
    }


def unanswered_calls(waits: Waits, told: Collection[Finding], *, is_live: bool) -> Iterator[Finding]:
    """Calls without a reply. While a job runs, some are on their way at any time: then those that take long.

    Args:
        told: the findings about waits; calls that they explain are not told again.
    """
    before = waits.now - (STUCK_NANOSECONDS if is_live else 0)
    known = {wait.call.request.key for wait in explained(waits) if wait.call is not None}
    known |= {finding.message for finding in told if finding.message is not None}
    calls = [
        call
        for call in waits.open_calls
        if call.request.kind in PROGRAM_CALLS
        and (call.request.sent or 0) <= before
        and call.request.key not in known
        and not call.function.startswith(OWN_FUNCTIONS)
    ]
    if calls:
        functions = Counter(call.function or call.request.type for call in calls)
        more = "more " if told else ""
        yield Finding(
            "unanswered calls",
            Severity.WARNING,
            f"{counted(len(calls), f'{more}call')} without a reply"
            + (", or more" if len(calls) == MAX_STUCK else ""),
            f"No reply had arrived when the logs end: {most_common(functions)}.",
            time=calls[0].request.sent,
            evidence={"calls": len(calls)},
            message=calls[0].request.key,
        )
