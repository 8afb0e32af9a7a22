"""Functions that fail, and the slowest calls. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from zmqgrad.trace.findings.finding import SHOWN, Finding, Severity, counted, most_common
from zmqgrad.trace.findings.load import Load
from zmqgrad.trace.labels import ends, show_time
from zmqgrad.trace.model import Call

FAILING_CALLS, FAILING_SHARE = 3, 0.1
"""A function that fails so many times, and in such a share of its calls, is a finding."""


def failing_calls(load: Load) -> Iterator[Finding]:
    """Functions that fail always or often; most failures first."""
    for function, failed in sorted(load.failed.items(), key=lambda item: -len(item[1])):
        count = load.calls[function]
        if len(failed) < FAILING_CALLS or len(failed) < count * FAILING_SHARE:
            continue
        places = Counter(ends(call.request)[1] for call in failed)
        raised = sum(call.given_up is None for call in failed)
        parts = [f"{raised} raised an exception, whose text the caller has"] if raised else []
        stages = Counter(_stage(call) for call in failed if call.given_up is not None)
        if stages:
            parts.append(
                f"{stages.total()} timed out: {', '.join(f'{n} {s}' for s, n in stages.most_common())}"
            )
        yield Finding(
            "failing calls",
            Severity.WARNING,
            f"{function} failed in {len(failed)} of {counted(count, 'call')}",
            f"{'; '.join(parts)}. At {most_common(places)}.",
            tuple(places),
            failed[0].request.sent,
            {"function": function, "failed": len(failed), "calls": count},
            failed[0].request.key,
        )


def _stage(call: Call) -> str:
    """Where a call was when its caller gave it up."""
    assert call.given_up is not None
    if call.started is not None and call.started <= call.given_up:
        if call.finished is None or call.finished > call.given_up:
            return "while running"
        return "before the reply arrived"
    if call.request.received is not None and call.request.received <= call.given_up:
        return "while waiting for a thread"
    return "before arriving"


def slow_calls(load: Load) -> Iterator[Finding]:
    """The slowest call of each of the slowest functions."""
    slowest = sorted(load.slowest.items(), key=lambda item: -item[1][0])
    for function, (nanoseconds, call) in slowest[:SHOWN]:
        source, target = ends(call.request)
        yield Finding(
            "slow call",
            Severity.NOTE,
            f"Slow call: {function}, {show_time(nanoseconds)}",
            f"{source} -> {target}: {', '.join(_parts(call))}.",
            (source, target),
            call.request.sent,
            {"seconds": nanoseconds / 1e9},
            call.request.key,
        )


def _parts(call: Call) -> Iterator[str]:
    """Where the time of a call went."""
    for took, what in (
        (call.sending or None, "to serialize and copy"),
        (call.request.transfer, "to arrive"),
        (call.queued, "in the queue"),
        (call.running, "running"),
        (call.reply.transfer if call.reply is not None else None, "for the reply"),
    ):
        if took is not None:
            yield f"{show_time(took)} {what}"
