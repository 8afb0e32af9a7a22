"""Reads a job once for all findings. Pure."""

from __future__ import annotations

import math

from zmqgrad.trace.events import Interrupted, Usage
from zmqgrad.trace.findings.calls import failing_calls, slow_calls
from zmqgrad.trace.findings.finding import Finding, Severity
from zmqgrad.trace.findings.hangs import deadlocks, long_waits, other_waits, unanswered_calls
from zmqgrad.trace.findings.hot_workers import hot_workers
from zmqgrad.trace.findings.load import Load, NestedWaits
from zmqgrad.trace.findings.logs import Missed, cut_logs, gaps, lost_workers, still_running
from zmqgrad.trace.findings.repeated_sends import RepeatedSends
from zmqgrad.trace.findings.stragglers import stragglers
from zmqgrad.trace.findings.unused_sends import Sends, unused_sends
from zmqgrad.trace.job import Job
from zmqgrad.trace.kinds import PROGRAM_CALLS
from zmqgrad.trace.model import Call, Stamped
from zmqgrad.trace.waits import Reader, Wait, find_waits


class Survey(Reader):
    """What the findings of a job are computed from, read in one go.

    Args:
        now: as in :func:`~zmqgrad.trace.waits.find_waits`.
        also: another reader, which saves reading the logs once more.
    """

    def __init__(self, job: Job, now: int | None = None, also: Reader | None = None) -> None:
        self._job, self._also = job, also or Reader()
        self._nested, self._repeated = NestedWaits(), RepeatedSends()
        self._load, self._sends, self._missed = Load(self._nested), Sends(job), Missed(job)
        self.waits = find_waits(job, now, self)

    def add_event(self, stamped: Stamped) -> None:
        """Adds the event ``stamped``."""
        self._also.add_event(stamped)
        self._sends.add(stamped)
        self._missed.add(stamped)
        if isinstance(stamped.event, Usage) and stamped.actor is not None:
            self._load.limits[stamped.actor] = stamped.event.working_limit
        elif isinstance(stamped.event, Interrupted):
            self._load.until = min(self._load.until, stamped.time)

    def add_wait(self, wait: Wait) -> None:
        """Adds ``wait``."""
        self._also.add_wait(wait)
        self._nested.add(wait)

    def add_call(self, call: Call) -> None:
        """Adds ``call``."""
        self._also.add_call(call)
        if call.request.kind in PROGRAM_CALLS:
            self._load.add(call)
            self._repeated.add(call)

    def findings(self, *, notes: bool = False) -> list[Finding]:
        """All findings, the most severe first.

        Args:
            notes: also what is no fault: the slowest calls, other waits, workers that still run.
        """
        job, waits, load = self._job, self.waits, self._load
        hangs = [*deadlocks(waits), *long_waits(waits)]
        found = [
            *hangs,
            *unanswered_calls(waits, hangs, is_live=job.cut < math.inf),
            *failing_calls(load),
            *cut_logs(job, self._missed),
            *lost_workers(job, self._missed),
            *unused_sends(job, self._sends),
            *self._repeated.findings(),
            *stragglers(load),
            *hot_workers(load, job),
            *gaps(job),
        ]
        if notes:
            found += [*still_running(job), *other_waits(waits), *slow_calls(load)]
        return sorted(found, key=lambda each: list(Severity).index(each.severity))


def find(job: Job, *, notes: bool = False) -> list[Finding]:
    """All findings of ``job``, the most severe first; ``notes`` as in :meth:`Survey.findings`."""
    return Survey(job).findings(notes=notes)
