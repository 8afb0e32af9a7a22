"""Deadlocks, waits that have not ended or have failed, calls without a reply. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from zmqgrad.trace.cycles import blocked_by, find_cycles
from zmqgrad.trace.findings.finding import SHOWN, Finding, Severity, counted, most_common
from zmqgrad.trace.kinds import PROGRAM_CALLS
from zmqgrad.trace.labels import actor_label, show_time, tidy
from zmqgrad.trace.model import Actor
from zmqgrad.trace.places import describe, headline, target_label
from zmqgrad.trace.waits import MAX_STUCK, Wait, Waits

STUCK_NANOSECONDS = 5_000_000_000
"""A wait that has lasted for so long and not ended is a finding."""

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
            {
                "seconds": min(wait.duration(waits.now) for wait in cycle) / 1e9,
                "waits": len(cycle) + len(more),
            },
            next((wait.call.request.key for wait in cycle if wait.call is not None), None),
        )


def explained(waits: Waits) -> list[Wait]:
    """The waits that deadlocks explain."""
    return [wait for cycle in find_cycles(waits) for wait in [*cycle, *blocked_by(cycle, waits)]]


def long_waits(waits: Waits) -> Iterator[Finding]:
    """Waits of no cycle that last long, or that failed."""
    cyclic = {id(wait) for wait in explained(waits)}
    rest = [w for w in waits.stuck() if id(w) not in cyclic and w.duration(waits.now) > STUCK_NANOSECONDS]
    for wait in sorted(rest, key=lambda w: -w.duration(waits.now))[:SHOWN]:
        yield Finding(
            "failed wait" if wait.failed else "open wait",
            Severity.PROBLEM if wait.is_blocking else Severity.WARNING,
            f"{actor_label(wait.waiter)} got no reply for {show_time(wait.duration(waits.now))}",
            "\n".join(describe(wait, waits)),
            (actor_label(wait.waiter),),
            wait.since,
            {"seconds": wait.duration(waits.now) / 1e9},
            wait.call.request.key if wait.call is not None else None,
        )


def unanswered_calls(waits: Waits, told: Collection[Finding], *, is_live: bool) -> Iterator[Finding]:
    """Calls without a reply. While a job runs, some are on their way at any time: then those that take long.

    Args:
        told: the findings about waits; calls that they explain are not told again.
    """
    before = waits.now - (STUCK_NANOSECONDS if is_live else 0)
    known = {id(wait.call) for wait in explained(waits)}
    calls = [
        call
        for call in waits.open_calls
        if call.request.kind in PROGRAM_CALLS
        and (call.request.sent or 0) <= before
        and id(call) not in known
        and not call.function.startswith(OWN_FUNCTIONS)
    ]
    told_keys = {finding.message for finding in told}
    calls = [call for call in calls if call.request.key not in told_keys]
    if calls:
        functions = Counter(tidy(call.function) or call.request.type for call in calls)
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


def longest_waits(waits: Waits) -> Iterator[Finding]:
    """The longest waits that ended well, one for each worker and function."""
    longest: dict[tuple[Actor, int, str], Wait] = {}
    for wait in waits.ended:
        longest.setdefault((wait.waiter, wait.rank, wait.function), wait)
    for wait in list(longest.values())[:SHOWN]:
        yield Finding(
            "long wait",
            Severity.NOTE,
            f"{actor_label(wait.waiter)} waited {show_time(wait.duration(waits.now))}",
            f"For {wait.function} of {target_label(wait)}.",
            (actor_label(wait.waiter),),
            wait.since,
            {"seconds": wait.duration(waits.now) / 1e9},
            wait.call.request.key if wait.call is not None else None,
        )
