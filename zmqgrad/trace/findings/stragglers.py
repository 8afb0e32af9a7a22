"""Workers on which a function takes much longer than on the others. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from zmqgrad.trace.findings.finding import Finding, Severity
from zmqgrad.trace.findings.load import Load
from zmqgrad.trace.labels import show_time
from zmqgrad.trace.model import Actor

MIN_CALLS = 5

STRAGGLER_FACTOR = 2.0
"""A worker on which a function takes this many times the median of the other workers is a straggler."""

STRAGGLER_SHARE = 0.02
"""If a smaller part of the time in which the worker served is lost, it does not matter."""

DRIFT_FACTOR = 1.5
"""Two halves of the calls of a straggler that differ by this are told."""


def stragglers(load: Load) -> Iterator[Finding]:
    """Workers on which a function takes much longer than on the others; the worst function of each."""
    worst: dict[Actor, tuple[float, str, float, float, int]] = {}
    for function, by_worker in load.running.items():
        medians = {w: float(median(times)) for w, times in by_worker.items() if len(times) >= MIN_CALLS}
        for worker, own in medians.items():
            others = [value for w, value in medians.items() if w is not worker]
            usual = median(others) if others else math.inf
            lost = (own - usual) * len(by_worker[worker]) if others else 0.0
            first, last = load.span[worker]
            if own >= STRAGGLER_FACTOR * usual and lost > STRAGGLER_SHARE * (last - first):
                worst[worker] = max(
                    worst.get(worker, (0.0, "", 0.0, 0.0, 0)),
                    (lost, function, own, usual, len(by_worker[worker])),
                )
    for worker, (lost, function, own, usual, count) in worst.items():
        yield Finding(
            "straggler",
            Severity.WARNING,
            f"Straggler: {worker.name}",
            f"{function} takes {show_time(own)} there (median of {count} calls), {show_time(usual)} on other "
            f"workers: {_factor(own, usual)} times as long, {show_time(lost)} lost in all."
            + _drift(load.running[function][worker]),
            (worker.name,),
            load.span[worker][0],
            {"function": function, "median": own, "others": usual, "calls": count, "lost": lost},
            load.longest_run[function, worker][1].request.key,
        )


def _drift(times: Sequence[int]) -> str:
    """Whether the second half of these took longer than the first, as when a worker heats up."""
    middle = len(times) // 2
    before, after = median(times[:middle]), median(times[middle:])
    if max(before, after) < DRIFT_FACTOR * min(before, after):
        return ""
    return (
        f" It changes: {show_time(before)} in the first half of the calls, {show_time(after)} in the second."
    )


def _factor(own: float, usual: float) -> str:
    return f"{own / max(usual, 1.0):.1f}"
