"""Deadlocks, waits that have not ended or have failed, calls without a reply. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from zmqgrad.trace.cycles import blocked_by, find_cycles
from zmqgrad.trace.findings.finding import SHOWN, Finding, Severity, counted, most_common
from zmqgrad.trace.kinds import PROGRAM_CALLS
from zmqgrad.trace.labels import actor_label, show_time, tidy
from zmqgrad.trace.model import Actor
from zmqgrad.trace.places import locate, target_label
from zmqgrad.trace.waits import MAX_STUCK, Wait, Waits

STUCK_NANOSECONDS = 5_000_000_000
"""A wait that has lasted for so long and not ended is a finding."""

ABOUT_WAITS = frozenset(("deadlock", "open wait", "failed wait", "unanswered calls"))
"""The kinds of findings about waits that have not ended or have failed."""


def deadlocks(waits: Waits) -> Iterator[Finding]:
    """Cycles of waits, each with what to do about it."""
    for cycle in find_cycles(waits):
        names = tuple(actor_label(wait.waiter) for wait in cycle)
        more = blocked_by(cycle, waits)
        lines = [_sentence(wait, waits) for wait in cycle]
        if more:
            lines.append(f"{counted(len(more), 'more wait')} of these workers cannot end before that.")
        lines.append(_advice(cycle, waits))
        yield Finding(
            "deadlock",
            Severity.PROBLEM,
            f"Deadlock: {' -> '.join([*names, names[0]])}",
            "\n".join(lines),
            names,
            max(wait.since for wait in cycle),
            {
                "seconds": min(wait.duration(waits.now) for wait in cycle) / 1e9,
                "waits": len(cycle) + len(more),
            },
            next((wait.call.request.key for wait in cycle if wait.call is not None), None),
        )


def _advice(cycle: Sequence[Wait], waits: Waits) -> str:
    """What to do about a deadlock."""
    if any(waits.stack_of(wait.waiter.process, wait.thread) for wait in cycle):
        where = "The stacks show the lines (zmqgrad trace waits)."
    else:
        where = "`zmqgrad trace waits` while the job runs, or ZMQGRAD_DEBUG=1, shows the lines."
    return "Is a lock held during a call, or do all threads of the pool wait? " + where


def _sentence(wait: Wait, waits: Waits) -> str:
    return (
        f"{actor_label(wait.waiter)} waits {show_time(wait.duration(waits.now))} for {wait.function} of "
        f"{target_label(wait)}: {locate(wait, waits)}"
    )


def long_waits(waits: Waits) -> Iterator[Finding]:
    """Waits of no cycle that last long, or that failed."""
    cyclic = {id(wait) for cycle in find_cycles(waits) for wait in [*cycle, *blocked_by(cycle, waits)]}
    rest = [w for w in waits.stuck() if id(w) not in cyclic and w.duration(waits.now) > STUCK_NANOSECONDS]
    for wait in sorted(rest, key=lambda w: -w.duration(waits.now))[:SHOWN]:
        yield Finding(
            "failed wait" if wait.failed else "open wait",
            Severity.PROBLEM if wait.is_blocking else Severity.WARNING,
            f"{actor_label(wait.waiter)} got no reply for {show_time(wait.duration(waits.now))}",
            _sentence(wait, waits),
            (actor_label(wait.waiter),),
            wait.since,
            {"seconds": wait.duration(waits.now) / 1e9},
            wait.call.request.key if wait.call is not None else None,
        )


def unanswered_calls(waits: Waits, *, is_live: bool) -> Iterator[Finding]:
    """While a job runs, calls are on their way at any time: then those that take long."""
    before = waits.now - (STUCK_NANOSECONDS if is_live else 0)
    cycles = find_cycles(waits)
    explained = {id(w.call) for cycle in cycles for w in [*cycle, *blocked_by(cycle, waits)]}
    calls = [
        call
        for call in waits.open_calls
        if call.request.kind in PROGRAM_CALLS and (call.request.sent or 0) <= before
    ]
    if calls:
        functions = Counter(tidy(call.function) or call.request.type for call in calls)
        count = sum(id(call) in explained for call in calls)
        yield Finding(
            "unanswered calls",
            Severity.WARNING,
            f"{counted(len(calls), 'call')} without a reply{', or more' if len(calls) == MAX_STUCK else ''}",
            f"No reply had arrived when the logs end: {most_common(functions)}."
            + (f" The deadlock explains {count} of them." if count else ""),
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
