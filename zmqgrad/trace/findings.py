"""What a person should look at first in a trace: deadlocks, stragglers, hot workers, unused sends. Pure.

A finding names what it is about and shows its evidence in numbers. ``zmqgrad trace findings`` prints them,
the report shows them first, and ``stats`` and ``waits`` mention them.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

from zmqgrad.trace.events import (
    Role,
    SendRecorded,
    Usage,
)
from zmqgrad.trace.evidence import Load, Missed, NestedWaits, Sends
from zmqgrad.trace.job import Job
from zmqgrad.trace.labels import actor_label, ends, size, tidy
from zmqgrad.trace.model import Actor, Call, Message, Stamped
from zmqgrad.trace.waits import (
    MAX_STUCK,
    Wait,
    Waits,
    blocked_by,
    find_cycles,
    find_waits,
    locate,
    show,
    target_label,
)
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

STRAGGLER_SHARE = 0.02
"""If a smaller part of the time in which the worker served is lost, it does not matter."""

HOT_SHARE = 2.0
"""A hot worker serves this many times an equal share of the requests, and ..."""

HOT_REQUESTS = 1.5
"""... has this many there at a time on average, queued or running (Little's law)."""

DRIFT_FACTOR = 1.5
"""Two halves of the calls of a straggler that differ by this are told."""

QUEUE_NANOSECONDS = 10_000_000
"""Requests that wait for a thread for longer than this, at the 90th percentile, are a finding."""

STUCK_NANOSECONDS = 5_000_000_000
"""A wait that has lasted for so long and not ended is a finding."""

FAILING_CALLS, FAILING_SHARE = 3, 0.1
"""A function that fails so many times, and in such a share of its calls, is a finding."""

CLOCK_NANOSECONDS = 1_000_000
"""Times between processes that may be wrong by more are a finding."""

SHOWN = 5
"""How many calls, waits and functions are named."""

ABOUT_WAITS = frozenset(("deadlock", "open wait", "failed wait", "unanswered calls"))
"""The kinds of findings about waits that have not ended or have failed."""


class Severity(str, enum.Enum):
    """How much a finding matters; the most severe first."""

    PROBLEM = "problem"
    WARNING = "warning"
    NOTE = "note"


class Finding(msgspec.Struct, frozen=True):
    """One finding.

    ``evidence`` has its numbers, for scripts; ``time`` is where to look in the trace, and ``message`` the
    requester and the message id of a request that shows it.
    """

    kind: str
    severity: Severity
    title: str
    detail: str
    workers: tuple[str, ...] = ()
    time: int | None = None
    evidence: dict[str, Any] = {}
    message: tuple[int, int] | None = None


class Survey:
    """What the findings of a job are computed from, read in one go.

    Args:
        now: as in :func:`~zmqgrad.trace.waits.find_waits`.
    """

    def __init__(self, job: Job, now: int | None = None) -> None:
        self._nested = NestedWaits()
        self._job, self._load, self._sends, self._missed = job, Load(self._nested), Sends(job), Missed(job)
        self.waits = find_waits(job, now, on_event=self._add_event, on_call=self._add)

    def _add_event(self, stamped: Stamped) -> None:
        self._sends.add(stamped)
        self._missed.add(stamped)
        self._nested.add(stamped)
        if isinstance(stamped.event, Usage) and stamped.actor is not None:
            self._load.limits[stamped.actor] = stamped.event.working_limit

    def _add(self, call: Call) -> None:
        if call.request.kind in PROGRAM_CALLS:
            self._load.add(call)

    def findings(self, *, notes: bool = False) -> list[Finding]:
        """All findings, the most severe first.

        Args:
            notes: also what is no fault: the slowest calls, the longest waits, workers that still run.
        """
        job, waits, load = self._job, self.waits, self._load
        found = [
            *_deadlocks(waits),
            *_long_waits(waits),
            *_unanswered(waits, is_live=job.cut < math.inf),
            *_failing(load),
            *_cut(job, self._missed),
            *_killed(job, self._missed),
            *_unused_sends(job, self._sends),
            *_stragglers(load),
            *_hot(load, job),
            *_gaps(job),
        ]
        if notes:
            found += [*_running(job), *_longest_waits(waits), *_slow_calls(load)]
        return sorted(found, key=lambda each: list(Severity).index(each.severity))


def find(job: Job, *, notes: bool = False) -> list[Finding]:
    """All findings of ``job``, the most severe first; ``notes`` as in :meth:`Survey.findings`."""
    return Survey(job).findings(notes=notes)


# ---- hangs ----------------------------------------------------------------------------------------------


def _deadlocks(waits: Waits) -> Iterator[Finding]:
    for cycle in find_cycles(waits):
        names = tuple(actor_label(wait.waiter) for wait in cycle)
        more = blocked_by(cycle, waits)
        lines = [_sentence(wait, waits) for wait in cycle]
        if more:
            lines.append(f"{_count(len(more), 'more wait')} of these workers cannot end before that.")
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
            next((_key(wait.call) for wait in cycle if wait.call is not None), None),
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
        f"{actor_label(wait.waiter)} waits {show(wait.duration(waits.now))} for {wait.function} of "
        f"{target_label(wait)}: {locate(wait, waits)}"
    )


def _key(call: Call) -> tuple[int, int]:
    """By which the request of ``call`` is found among messages."""
    return call.request.requester, call.request.message_id


def _long_waits(waits: Waits) -> Iterator[Finding]:
    cyclic = {id(wait) for cycle in find_cycles(waits) for wait in [*cycle, *blocked_by(cycle, waits)]}
    rest = [w for w in waits.stuck() if id(w) not in cyclic and w.duration(waits.now) > STUCK_NANOSECONDS]
    for wait in sorted(rest, key=lambda w: -w.duration(waits.now))[:SHOWN]:
        yield Finding(
            "failed wait" if wait.failed else "open wait",
            Severity.PROBLEM if wait.is_blocking else Severity.WARNING,
            f"{actor_label(wait.waiter)} got no reply for {show(wait.duration(waits.now))}",
            _sentence(wait, waits),
            (actor_label(wait.waiter),),
            wait.since,
            {"seconds": wait.duration(waits.now) / 1e9},
            _key(wait.call) if wait.call is not None else None,
        )


def _unanswered(waits: Waits, *, is_live: bool) -> Iterator[Finding]:
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
            f"{_count(len(calls), 'call')} without a reply{', or more' if len(calls) == MAX_STUCK else ''}",
            f"No reply had arrived when the logs end: {_most_common(functions)}."
            + (f" The deadlock explains {count} of them." if count else ""),
            time=calls[0].request.sent,
            evidence={"calls": len(calls)},
            message=_key(calls[0]),
        )


def _failing(load: Load) -> Iterator[Finding]:
    """Functions that fail always or often; most failures first."""
    for function, failed in sorted(load.failed.items(), key=lambda item: -len(item[1])):
        count = load.calls[function]
        if len(failed) < FAILING_CALLS or len(failed) < count * FAILING_SHARE:
            continue
        places = Counter(ends(call.request)[1] for call in failed)
        yield Finding(
            "failing calls",
            Severity.WARNING,
            f"{function or failed[0].request.type} failed in {len(failed)} of {_count(count, 'call')}",
            f"It raised an exception at {_most_common(places)}. The caller has its text.",
            tuple(places),
            failed[0].request.sent,
            {"function": function, "failed": len(failed), "calls": count},
            _key(failed[0]),
        )


def _cut(job: Job, missed: Missed) -> Iterator[Finding]:
    """Logs without an end that miss messages of others: what happened after that cannot be judged."""
    counts = missed.counts
    names = {(worker.job, worker.rank): worker.name for worker in job.workers()}
    begin, _ = job.span()
    if counts:
        listed = ", ".join(names[key] for key in counts)
        yield Finding(
            "cut log",
            Severity.WARNING,
            f"{_count(len(counts), 'log')} without an end: {listed}",
            "Cut, or the process was killed. "
            + "; ".join(
                f"{names[key]}: until {(missed.until[key] - begin) / 1e9:.2f} s of the job, and "
                f"{_count(count, 'message')} of others with it are later"
                for key, count in counts.most_common(SHOWN)
            )
            + ". What happened there after that is not known.",
            tuple(names[key] for key in counts),
            int(min(missed.until[key] for key in counts)),
            {"messages": {names[key]: count for key, count in counts.items()}},
        )


def _killed(job: Job, missed: Missed) -> Iterator[Finding]:
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
                f"{show(last - end)} before the last one, without a shutdown: killed, stopped, or idle.",
                (worker.name,),
                end,
            )


# ---- autograd -------------------------------------------------------------------------------------------


def _unused_sends(job: Job, sends: Sends) -> Iterator[Finding]:
    unused, ended = sends.unused(), sends.ended
    if not unused:
        return
    calls = _calls_of(job, unused)
    names = {key: tidy(call.function) for key, call in calls.items()}
    pairs = Counter(
        f"{names.get(_call_key(actor, send)) or 'a call'} "
        + ("(its result)" if send.is_reply else "(its arguments)")
        + f" from {actor.name} to worker {send.peer}"
        for actor, send in unused
    )
    contexts = {send.context for _, send in unused}
    sent = [
        message
        for actor, send in unused
        if (call := calls.get(_call_key(actor, send))) is not None
        and (message := call.reply if send.is_reply else call.request) is not None
    ]
    bytes_sent = sum(message.size for message in sent)
    transfer = sum(m.received - m.sent for m in sent if m.received is not None and m.sent is not None)
    failed = sum(ended[context][1].failed for context in contexts)
    yield Finding(
        "unused sends",
        Severity.PROBLEM if failed else Severity.WARNING,
        f"{_count(len(unused), 'send')} got no gradient",
        f"Tensors that require grad were sent in {_count(len(contexts), 'context')} whose pass did not "
        f"reach them"
        + (f", {failed} of which failed" if failed else "")
        + f": messages of {size(bytes_sent)}, {show(transfer)} in transfer. "
        "Detach them, or do not send them: " + _most_common(pairs),
        tuple(sorted({actor.name for actor, _ in unused})),
        evidence={"sends": len(unused), "contexts": len(contexts), "failed": failed},
        message=next((_key(calls[key]) for each in unused if (key := _call_key(*each)) in calls), None),
    )


def _calls_of(job: Job, sends: Iterable[tuple[Actor, SendRecorded]]) -> dict[tuple[int, int, int], Call]:
    """The calls that the sends belong to, by :func:`_call_key`."""
    wanted = {_call_key(actor, send) for actor, send in sends}
    found: dict[tuple[int, int, int], Call] = {}
    for call in job.calls():
        request = call.request
        if request.context and request.source is not None:
            key = (request.context, request.message_id, request.source.rank)
            if key in wanted:
                found[key] = call
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
            f"{function} takes {show(own)} there (median of {count} calls), {show(usual)} on other workers: "
            f"{_factor(own, usual)} times as long, {show(lost)} lost in all."
            + _drift(load.running[function][worker]),
            (worker.name,),
            load.span[worker][0],
            {"function": function, "median": own, "others": usual, "calls": count, "lost": lost},
            _key(load.longest_run[function, worker][1]),
        )


def _drift(times: Sequence[int]) -> str:
    """Whether the second half of these took longer than the first, as when a worker heats up."""
    middle = len(times) // 2
    before, after = median(times[:middle]), median(times[middle:])
    if max(before, after) < DRIFT_FACTOR * min(before, after):
        return ""
    return f" It changes: {show(before)} in the first half of the calls, {show(after)} in the second."


def _factor(own: float, usual: float) -> str:
    return f"{own / max(usual, 1.0):.1f}"


def _hot(load: Load, job: Job) -> Iterator[Finding]:
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
        if not is_hot and high <= QUEUE_NANOSECONDS:
            continue
        limit = load.limits.get(worker, 0)
        pool = (
            f"{_count(limit, 'thread')} of its pool: busy {busy / (last - first) / limit:.0%}. "
            if limit
            else ""
        )
        functions = Counter(by_function).most_common(SHOWN)
        told = (
            f"Calls wait {show(median(queued))} for a thread, 1 of 10 {show(high)} or longer, "
            f"{show(lost)} in all. {pool}Its time goes to "
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
            _key(load.longest_queued[worker][1]),
        )


# ---- notes ----------------------------------------------------------------------------------------------


def _running(job: Job) -> Iterator[Finding]:
    names = tuple(worker.name for worker in job.workers() if worker.stopped is None)
    if names:
        yield Finding(
            "not shut down",
            Severity.NOTE,
            f"{_count(len(names), 'worker')} did not shut down",
            f"Still running, or killed, when their logs end: {', '.join(names)}.",
            names,
        )


def _longest_waits(waits: Waits) -> Iterator[Finding]:
    longest: dict[tuple[Actor, int, str], Wait] = {}
    for wait in waits.ended:
        longest.setdefault((wait.waiter, wait.rank, wait.function), wait)
    for wait in list(longest.values())[:SHOWN]:
        yield Finding(
            "long wait",
            Severity.NOTE,
            f"{actor_label(wait.waiter)} waited {show(wait.duration(waits.now))}",
            f"For {wait.function} of {target_label(wait)}.",
            (actor_label(wait.waiter),),
            wait.since,
            {"seconds": wait.duration(waits.now) / 1e9},
            _key(wait.call) if wait.call is not None else None,
        )


def _slow_calls(load: Load) -> Iterator[Finding]:
    slowest = sorted(load.slowest.items(), key=lambda item: -item[1][0])
    for function, (nanoseconds, call) in slowest[:SHOWN]:
        source, target = ends(call.request)
        yield Finding(
            "slow call",
            Severity.NOTE,
            f"Slow call: {function}, {show(nanoseconds)}",
            f"{source} -> {target}: {', '.join(_parts(call))}.",
            (source, target),
            call.request.sent,
            {"seconds": nanoseconds / 1e9},
            _key(call),
        )


def _parts(call: Call) -> Iterator[str]:
    """Where the time of a call went."""
    request, reply = call.request, call.reply or Message(0, 0)
    for begin, end, what in (
        (request.sent, request.received, "to arrive"),
        (request.received, call.started, "in the queue"),
        (call.started, None if call.running is None else (call.started or 0) + call.running, "running"),
        (reply.sent, reply.received, "for the reply"),
    ):
        if begin is not None and end is not None:
            yield f"{show(end - begin)} {what}"


# ---- the trace itself -----------------------------------------------------------------------------------


def _gaps(job: Job) -> Iterator[Finding]:
    if job.unreadable:
        yield Finding(
            "unreadable log",
            Severity.WARNING,
            f"{_count(len(job.unreadable), 'log')} left out",
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
