"""Workers that serve more than their share, or on which calls wait for a thread. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from statistics import median

from zmqgrad.trace.findings.finding import SHOWN, Finding, Severity, counted
from zmqgrad.trace.findings.load import Load
from zmqgrad.trace.job import Job
from zmqgrad.trace.labels import show_time

HOT_SHARE = 2.0
"""A hot worker serves this many times an equal share of the requests, and ..."""

HOT_REQUESTS = 1.5
"""... has this many there at a time on average, queued or running (Little's law)."""

QUEUE_NANOSECONDS = 10_000_000
"""Requests that wait for a thread for longer than this, at the 90th percentile, are a finding."""


def hot_workers(load: Load, job: Job) -> Iterator[Finding]:
    """Workers that serve much more than their share, and workers on which requests wait for a thread."""
    workers, total = len({w.name for w in job.workers()}), sum(map(len, load.queued.values()))
    for worker, queued in load.queued.items():
        first, last = load.span[worker]
        by_function = {name: time for (actor, name), time in load.busy.items() if actor is worker}
        busy, lost, share = sum(by_function.values()), sum(queued), len(queued) / total
        at_a_time = (busy + lost) / max(last - first, 1)
        high = sorted(queued)[math.ceil(len(queued) * 0.9) - 1]
        is_hot = workers >= 3 and len(queued) >= 20 and share >= HOT_SHARE / workers
        is_hot = is_hot and at_a_time >= HOT_REQUESTS
        limit = load.limits.get(worker, 0)
        # While a request waits for a thread, all are busy. Otherwise it waits for a processor.
        queues = high > QUEUE_NANOSECONDS and busy >= limit * high
        if not (is_hot or queues):
            continue
        pool = (
            f"{counted(limit, 'thread')} of its pool: busy {busy / (last - first) / limit:.0%}. "
            if limit
            else ""
        )
        functions = Counter(by_function).most_common(SHOWN)
        told = (
            f"Calls wait {show_time(median(queued))} for a thread, 1 of 10 {show_time(high)} or longer, "
            f"{show_time(lost)} in all. {pool}Its time goes to "
            + ", ".join(f"{name} ({time / max(busy, 1):.0%})" for name, time in functions)
            + ". "
        )
        advice = "Divide its work among several workers, make its calls shorter, or raise num_worker_threads."
        much = (
            f"It serves {share:.0%} of all calls ({len(queued)} of {total}; an equal share is "
            f"{1 / workers:.0%}), {at_a_time:.1f} at a time. "
        )
        yield Finding(
            "hot worker" if is_hot else "queueing",
            Severity.WARNING,
            f"Hot worker: {worker.name}" if is_hot else f"Calls wait for a thread of {worker.name}",
            (much if is_hot else "") + told + advice,
            (worker.name,),
            first,
            {"share": share, "calls": len(queued), "at_a_time": at_a_time, "p90": high, "lost": lost},
            load.longest_queued[worker][1].request.key,
        )
