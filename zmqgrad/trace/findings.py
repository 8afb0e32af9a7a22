"""What a person should look at first in a trace: deadlocks, stragglers, hot workers, unused sends. Pure.

A finding names what it is about and shows its evidence in numbers; ``zmqgrad trace findings`` prints them,
and the report shows them first.
"""

from __future__ import annotations

import enum
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

from zmqgrad.trace.events import GroupExecuted, PassFinished, Role, SendRecorded
from zmqgrad.trace.job import Job
from zmqgrad.trace.model import Actor, Call
from zmqgrad.trace.waits import Wait, Waits, find_cycles, find_waits, locate, show
from zmqgrad.wire.messages import MessageType

PROGRAM_CALLS = frozenset(
    (
        MessageType.CALL,
        MessageType.REMOTE_CALL,
        MessageType.RREF_FETCH,
        MessageType.FORWARD_AUTOGRAD_REQ,
    )
)
"""Requests of the program, which it may wait for."""

MIN_CALLS = 5
STRAGGLER_FACTOR = 2.0
"""A worker on which a function takes this many times the median of the other workers is a straggler."""

STRAGGLER_NANOSECONDS = 100_000
"""Smaller differences do not matter."""

HOT_SHARE = 2.0
"""A hot worker serves this many times an equal share of the requests, and ..."""

HOT_REQUESTS = 1.5
"""... has this many there at a time on average, queued or running (Little's law)."""

QUEUE_NANOSECONDS = 10_000_000
"""Requests that wait for a thread for longer than this, at the 90th percentile, are a finding."""

STUCK_NANOSECONDS = 5_000_000_000
"""A wait that has lasted for so long and not ended is a finding."""

CLOCK_NANOSECONDS = 1_000_000
"""Times between processes that may be wrong by more are a finding."""

SHOWN = 5

ABOUT_WAITS = frozenset(("deadlock", "open wait", "failed wait"))
"""The kinds of findings about waits that have not ended or have failed."""


class Severity(enum.IntEnum):
    """How much a finding matters."""

    PROBLEM = 1
    WARNING = 2
    NOTE = 3


class Finding(msgspec.Struct, frozen=True):
    """One finding. ``evidence`` has its numbers, for scripts; ``time`` is where to look in the trace."""

    kind: str
    severity: Severity
    title: str
    detail: str
    workers: tuple[str, ...] = ()
    time: int | None = None
    evidence: dict[str, Any] = {}


class Load:
    """What the calls of a job ask of its workers: how long they run, by function, and wait for a thread."""

    def __init__(self) -> None:
        self.running: defaultdict[str, defaultdict[Actor, array[int]]] = defaultdict(
            lambda: defaultdict(lambda: array("q"))
        )
        self.queued: defaultdict[Actor, array[int]] = defaultdict(lambda: array("q"))
        self.span: dict[Actor, tuple[int, int]] = {}

    def add(self, call: Call) -> None:
        """Adds a call of the program."""
        request = call.request
        target, received = request.target, request.received
        if target is None or received is None or call.started is None or call.finished is None:
            return
        self.running[call.function][target].append(call.finished - call.started)
        self.queued[target].append(call.started - received)
        first, last = self.span.get(target, (received, call.finished))
        self.span[target] = min(first, received), max(last, call.finished)


def find(job: Job, waits: Waits | None = None) -> list[Finding]:
    """All findings, the most severe first.

    Args:
        waits: those of the job, if they are known already.
    """
    waits = waits or find_waits(job)
    load = Load()
    for call in job.calls():
        if call.request.kind in PROGRAM_CALLS:
            load.add(call)
    found = [
        *_deadlocks(waits),
        *_long_waits(waits),
        *_killed(job),
        *_unused_sends(job),
        *_stragglers(load),
        *_hot(load, job),
        *_queueing(load),
        *_gaps(job),
    ]
    return sorted(found, key=lambda each: each.severity)


# ---- hangs ----------------------------------------------------------------------------------------------


def _deadlocks(waits: Waits) -> Iterator[Finding]:
    for cycle in find_cycles(waits):
        names = tuple(name_of(wait.waiter) for wait in cycle)
        yield Finding(
            "deadlock",
            Severity.PROBLEM,
            f"Deadlock: {' -> '.join([*names, names[0]])}",
            "; ".join(_sentence(wait, waits) for wait in cycle),
            names,
            max(wait.since for wait in cycle),
            {"seconds": min(wait.duration(waits.now) for wait in cycle) / 1e9},
        )


def _sentence(wait: Wait, waits: Waits) -> str:
    peer = name_of(wait.target) if wait.target is not None else f"worker {wait.rank}"
    return (
        f"{name_of(wait.waiter)} waits {show(wait.duration(waits.now))} for {wait.function} of {peer}: "
        f"{locate(wait, waits)}"
    )


def _long_waits(waits: Waits) -> Iterator[Finding]:
    cyclic = {id(wait) for cycle in find_cycles(waits) for wait in cycle}
    rest = [w for w in waits.stuck() if id(w) not in cyclic and w.duration(waits.now) > STUCK_NANOSECONDS]
    for wait in sorted(rest, key=lambda w: -w.duration(waits.now))[:SHOWN]:
        yield Finding(
            "failed wait" if wait.failed else "open wait",
            Severity.PROBLEM if wait.is_blocking else Severity.WARNING,
            f"{name_of(wait.waiter)} got no reply for {show(wait.duration(waits.now))}",
            _sentence(wait, waits),
            (name_of(wait.waiter),),
            wait.since,
            {"seconds": wait.duration(waits.now) / 1e9},
        )


def _killed(job: Job) -> Iterator[Finding]:
    """Workers that ended long before the others without being closed: they were killed."""
    last = max(job.time(process, process.last) for process in job.processes)
    for worker in job.workers():
        end = job.time(worker.process, worker.process.last)
        if worker.stopped is None and last - end > STUCK_NANOSECONDS:
            yield Finding(
                "lost worker",
                Severity.WARNING,
                f"{worker.name} records nothing any more",
                f"The log of process {worker.process.info.pid} on {worker.process.info.host} ends "
                f"{show(last - end)} before the last one, without a shutdown: killed, stopped, or idle.",
                (worker.name,),
                end,
            )


# ---- autograd -------------------------------------------------------------------------------------------


def _unused_sends(job: Job) -> Iterator[Finding]:
    """Sends that got no gradient in a context in which a backward pass has ended."""
    sends: dict[tuple[Actor, int], SendRecorded] = {}
    ended: dict[int, PassFinished] = {}
    for _, _, actor, event in job.events():
        if actor is None:
            continue
        if isinstance(event, SendRecorded):
            sends[actor, event.autograd_id] = event
        elif isinstance(event, GroupExecuted):
            for send in event.sends:
                sends.pop((actor, send), None)
        elif isinstance(event, PassFinished):
            ended[event.context] = event
    unused = [(actor, send) for (actor, _), send in sends.items() if send.context in ended]
    if not unused:
        return
    names = _functions_of(job, unused)
    pairs = Counter(
        f"{names.get(_call_key(actor, send), 'a call')} "
        + ("(its result)" if send.is_reply else "(its arguments)")
        + f" from {actor.name} to worker {send.peer}"
        for actor, send in unused
    )
    contexts = {send.context for _, send in unused}
    failed = sum(ended[context].failed for context in contexts)
    yield Finding(
        "unused sends",
        Severity.PROBLEM if failed else Severity.WARNING,
        f"{_count(len(unused), 'send')} got no gradient",
        f"Tensors that require grad were sent in {_count(len(contexts), 'context')} whose pass did not "
        f"reach them" + (f", {failed} of which failed" if failed else "") + ". Detach them, or do not send "
        "them: " + _most_common(pairs),
        tuple(sorted({actor.name for actor, _ in unused})),
        evidence={"sends": len(unused), "contexts": len(contexts), "failed": failed},
    )


def _functions_of(job: Job, sends: Sequence[tuple[Actor, SendRecorded]]) -> dict[tuple[int, int, int], str]:
    """The functions of the calls that the sends belong to, by :func:`_call_key`."""
    wanted = {_call_key(actor, send) for actor, send in sends}
    found: dict[tuple[int, int, int], str] = {}
    for call in job.calls():
        request = call.request
        if request.context and request.source is not None:
            key = (request.context, request.message_id, request.source.rank)
            if key in wanted:
                found[key] = call.function
    return found


def _call_key(actor: Actor, send: SendRecorded) -> tuple[int, int, int]:
    """The context, the request and the caller of the call whose arguments or result were sent."""
    return send.context, send.message_id, send.peer if send.is_reply else actor.rank


# ---- load -----------------------------------------------------------------------------------------------


def _stragglers(load: Load) -> Iterator[Finding]:
    """Workers on which a function takes much longer than on the others; the worst function of each."""
    worst: dict[Actor, tuple[float, str, float, float, int]] = {}
    for function, by_worker in load.running.items():
        medians = {w: float(median(times)) for w, times in by_worker.items() if len(times) >= MIN_CALLS}
        for worker, own in medians.items():
            others = [value for w, value in medians.items() if w is not worker]
            usual = median(others) if others else math.inf
            if own >= STRAGGLER_FACTOR * usual and own - usual > STRAGGLER_NANOSECONDS:
                lost = (own - usual) * len(by_worker[worker])
                worst[worker] = max(
                    worst.get(worker, (0.0, "", 0.0, 0.0, 0)),
                    (lost, function, own, usual, len(by_worker[worker])),
                )
    for worker, (lost, function, own, usual, count) in worst.items():
        yield Finding(
            "straggler",
            Severity.WARNING,
            f"Straggler: {worker.name}",
            f"{function} takes {show(own)} there (median of {count} calls), {show(usual)} on other workers: "
            f"{_factor(own, usual)} times as long, {show(lost)} in all.",
            (worker.name,),
            load.span[worker][0],
            {"function": function, "median": own, "others": usual, "calls": count, "lost": lost},
        )


def _factor(own: float, usual: float) -> str:
    return f"{own / max(usual, 1.0):.1f}"


def _hot(load: Load, job: Job) -> Iterator[Finding]:
    """Workers that serve much more than their share, and have requests waiting for each other."""
    workers, total = len({w.name for w in job.workers()}), sum(map(len, load.queued.values()))
    busy: defaultdict[Actor, int] = defaultdict(int)
    for by_worker in load.running.values():
        for worker, times in by_worker.items():
            busy[worker] += sum(times)
    for worker, queued in load.queued.items():
        first, last = load.span[worker]
        at_a_time = (busy[worker] + sum(queued)) / max(last - first, 1)
        share = len(queued) / total
        if workers < 3 or len(queued) < 20 or share < HOT_SHARE / workers or at_a_time < HOT_REQUESTS:
            continue
        yield Finding(
            "hot worker",
            Severity.WARNING,
            f"Hot worker: {worker.name}",
            f"It serves {share:.0%} of all calls ({len(queued)} of {total}; an equal share is "
            f"{1 / workers:.0%}), and has {at_a_time:.1f} of them at a time; they wait "
            f"{show(median(queued))} for a thread and run {show(busy[worker] / len(queued))}. Others wait "
            "for it: divide its work among several workers, or make its calls shorter.",
            (worker.name,),
            first,
            {"share": share, "calls": len(queued), "at_a_time": at_a_time},
        )


def _queueing(load: Load) -> Iterator[Finding]:
    for worker, queued in load.queued.items():
        high = sorted(queued)[len(queued) * 9 // 10]
        if high > QUEUE_NANOSECONDS:
            yield Finding(
                "queueing",
                Severity.WARNING,
                f"Calls wait for a thread of {worker.name}",
                f"1 of 10 waits {show(high)} or longer in its queue: raise num_worker_threads, or do not "
                "block in its calls.",
                (worker.name,),
                load.span[worker][0],
                {"p90": high},
            )


# ---- the trace itself -----------------------------------------------------------------------------------


def _gaps(job: Job) -> Iterator[Finding]:
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
        if bound > CLOCK_NANOSECONDS:
            yield Finding(
                "clock",
                Severity.NOTE,
                f"The clock of {who} is uncertain",
                f"Its times may be wrong by {show(bound)}."
                if math.isfinite(bound)
                else "No messages in both directions show its offset; the wall clocks decide.",
                names,
                evidence={"bound": bound},
            )


def _most_common(counts: Mapping[str, int]) -> str:
    most = Counter(counts).most_common(SHOWN)
    rest = len(counts) - len(most)
    return ", ".join(f"{name} ({count})" for name, count in most) + (f", and {rest} more" if rest else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def name_of(actor: Actor) -> str:
    """An actor as people know it."""
    return actor.name or actor.address or f"process {actor.process.info.pid}"
