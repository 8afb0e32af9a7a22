"""What the logs do not tell: they were cut, their workers killed, events dropped, clocks uncertain. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from zmqgrad.trace.events import MessageEvent, Role
from zmqgrad.trace.findings.finding import SHOWN, Finding, Severity, counted
from zmqgrad.trace.findings.hangs import STUCK_NANOSECONDS
from zmqgrad.trace.job import Job
from zmqgrad.trace.labels import show_time
from zmqgrad.trace.model import Stamped

CLOCK_NANOSECONDS = 1_000_000
"""Times between processes that may be wrong by more are a finding."""

FLUSHED_NANOSECONDS = 100_000_000
"""What a process may lose that is killed: a log that misses more was cut, or its worker recorded no more."""


class Missed:
    """Counts the messages of others that logs without an end miss, by worker."""

    def __init__(self, job: Job) -> None:
        # Of a rank that joined again, the last one counts.
        workers = {(worker.job, worker.rank): worker for worker in job.workers()}
        self.until = {
            key: job.known_until(w.process)
            for key, w in workers.items()
            if not w.process.has_end and not w.process.is_live
        }
        self._all: Counter[tuple[str, int]] = Counter()
        self._late: set[tuple[str, int]] = set()

    @property
    def counts(self) -> Counter[tuple[str, int]]:
        """By the job and the rank of the worker, if it misses more than what a kill loses."""
        return Counter({key: self._all[key] for key in self._late})

    def add(self, stamped: Stamped) -> None:
        """Adds the event ``stamped``."""
        actor, event = stamped.actor, stamped.event
        if not self.until or actor is None or not isinstance(event, MessageEvent):
            return
        key = actor.job, event.peer
        until = self.until.get(key, math.inf)
        if actor.role is Role.WORKER and stamped.time > until:
            self._all[key] += 1
            if stamped.time > until + FLUSHED_NANOSECONDS:
                self._late.add(key)


def cut_logs(job: Job, missed: Missed) -> Iterator[Finding]:
    """Logs without an end that miss messages of others: what happened after that cannot be judged."""
    counts = missed.counts
    names = {(worker.job, worker.rank): worker.name for worker in job.workers()}
    begin, _ = job.span()
    if counts:
        listed = ", ".join(names[key] for key in counts)
        yield Finding(
            "cut log",
            Severity.WARNING,
            f"{counted(len(counts), 'log')} without an end: {listed}",
            "Cut, or the process was killed. "
            + "; ".join(
                f"{names[key]}: until {(missed.until[key] - begin) / 1e9:.2f} s of the job, and "
                f"{counted(count, 'message')} of others with it are later"
                for key, count in counts.most_common(SHOWN)
            )
            + ". What happened there after that is not known.",
            tuple(names[key] for key in counts),
            int(min(missed.until[key] for key in counts)),
            {"messages": {names[key]: count for key, count in counts.items()}},
        )


def lost_workers(job: Job, missed: Missed) -> Iterator[Finding]:
    """Workers that ended long before the others without being closed: they were killed."""
    last = max(job.time(process, process.last) for process in job.processes)
    counts = missed.counts
    for worker in job.workers():
        end = job.time(worker.process, worker.process.last)
        is_cut = (worker.job, worker.rank) in counts
        if worker.stopped is None and last - end > STUCK_NANOSECONDS and not is_cut:
            yield Finding(
                "lost worker",
                Severity.WARNING,
                f"{worker.name} records nothing any more",
                f"The log of process {worker.process.info.pid} on {worker.process.info.host} ends "
                f"{show_time(last - end)} before the last one, without a shutdown: killed, stopped, or idle.",
                (worker.name,),
                end,
            )


def still_running(job: Job) -> Iterator[Finding]:
    """Workers without a shutdown in their logs."""
    names = tuple(worker.name for worker in job.workers() if worker.stopped is None)
    if names:
        yield Finding(
            "not shut down",
            Severity.NOTE,
            f"{counted(len(names), 'worker')} did not shut down",
            f"Still running, or killed, when their logs end: {', '.join(names)}.",
            names,
        )


def gaps(job: Job) -> Iterator[Finding]:
    """Logs left out or damaged, events dropped, clocks whose offset is uncertain."""
    if job.unreadable:
        yield Finding(
            "unreadable log",
            Severity.WARNING,
            f"{counted(len(job.unreadable), 'log')} left out",
            "The messages of their processes are shown with one end only: "
            + "; ".join(job.unreadable[:SHOWN]),
            evidence={"logs": len(job.unreadable)},
        )
    for process in job.processes:
        names = tuple(a.name for a in process.actors.values() if a.role is Role.WORKER)
        who = ", ".join(names) or f"process {process.info.pid}"
        bound = job.bound(process, process.last)
        if process.dropped:
            yield Finding(
                "dropped events",
                Severity.WARNING,
                f"{who} dropped {process.dropped} events",
                "They came faster than they could be written: the job did more than is shown here.",
                names,
                evidence={"dropped": process.dropped},
            )
        if process.damage:
            yield Finding(
                "damaged log", Severity.WARNING, f"The log of {who} is damaged", process.damage, names
            )
        if process.jumps:
            title = f"The wall clock of {process.info.host} was set {len(process.jumps)} times"
            yield Finding("clock", Severity.NOTE, title, "No time of the trace follows it.", names)
        if bound > CLOCK_NANOSECONDS:
            yield Finding(
                "clock",
                Severity.NOTE,
                f"The clock of {who} is uncertain",
                f"Its times may be wrong by {show_time(bound)}."
                if math.isfinite(bound)
                else "No messages in both directions show its offset; the wall clocks decide.",
                names,
                evidence={"bound": bound},
            )
