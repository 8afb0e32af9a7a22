"""The waits of a job: those that have not ended, that failed, and the longest. Pure.

A thread waits for the reply to its request, or for the end of a backward pass. A call whose reply no thread
waits for counts as a wait that does not block."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from zmqgrad.trace.events import Interrupted, PassStarted, Role, StackDumped, WaitBegun, WaitEnded
from zmqgrad.trace.job import STALLED_NANOSECONDS, Job
from zmqgrad.trace.kinds import BACKWARD, ONE_WAY, REPEATED
from zmqgrad.trace.model import Actor, Call, Process, Stamped

LONGEST = 10
"""How many of the waits that ended well are kept."""

MAX_STUCK = 10_000
"""How many waits that failed, and calls without a reply, are kept: the latest."""

IN_FLIGHT_NANOSECONDS = 1_000_000_000
"""A reply that was sent this long before a log without an end stops may have arrived after it."""


class Wait(msgspec.Struct, eq=False):
    """A thread that waits for worker ``rank``, or a call that is open while no thread waits for its reply.

    Of a backward pass, ``context`` is not 0, ``message_id`` is the pass, and there is one for each request
    that is not finished, with its ``call``; a single one without a call if there is none.
    """

    waiter: Actor
    thread: int
    message_id: int
    rank: int
    since: int
    until: int | None = None
    """None: it has not ended."""
    failed: bool = False
    is_blocking: bool = True
    context: int = 0
    call: Call | None = None
    target: Actor | None = None

    @property
    def function(self) -> str:
        """What was requested."""
        if self.context:
            return "backward pass"
        if self.call is None:
            return "unknown request"
        return self.call.function or self.call.request.type

    def duration(self, now: int) -> int:
        """How long it took, or has taken until ``now``."""
        return (now if self.until is None else self.until) - self.since


class Waits(msgspec.Struct, eq=False):
    """The waits of a job at time ``now``: those that have not ended, that failed, and that ended well."""

    now: int
    open: list[Wait]
    failed: list[Wait]
    ended: list[Wait]
    open_calls: list[Call]
    """All calls without a reply."""
    stacks: dict[Process, list[StackDumped]]
    """Those that each process recorded last."""
    passes: dict[tuple[Actor, int], int]
    """The context of each backward pass that waits."""
    interrupted: int | None = None
    """When Ctrl-C ended the first wait."""

    def was_interrupted(self, wait: Wait) -> bool:
        """Whether ``wait`` lasted until the job was interrupted."""
        return self.interrupted is not None and wait.failed and (wait.until or 0) >= self.interrupted

    def until(self, wait: Wait) -> int:
        """The time at which ``wait`` is looked at: its end, but before an interrupt has changed anything."""
        end = self.now if wait.until is None else wait.until
        return end if self.interrupted is None else min(end, self.interrupted)

    def stuck(self) -> list[Wait]:
        """The waits that have not ended or have failed."""
        return [*self.open, *self.failed]

    def stack_of(self, process: Process, thread: int) -> str:
        """The last recorded stack of a thread; empty: none was."""
        declared = process.threads.get(thread)
        for each in self.stacks.get(process, ()):
            if declared is not None and each.native_id == declared.native_id:
                return each.stack
        return ""

    def queue_of(self, call: Call) -> tuple[int, int]:
        """How many requests its worker received before this one that wait for a thread, and how many run."""
        at = [c for c in self.open_calls if c.request.target is call.request.target and c.finished is None]
        received = call.request.received or 0
        queued = [c for c in at if c.started is None and (c.request.received or received) < received]
        return len(queued), sum(c.started is not None for c in at)


class Reader:
    """Gets what :func:`find_waits` reads: all events, then all waits of threads, then all calls."""

    def add_event(self, stamped: Stamped) -> None:
        """Takes an event."""

    def add_wait(self, wait: Wait) -> None:
        """Takes a wait, when it ends; last, those that have not ended."""

    def add_call(self, call: Call) -> None:
        """Takes a call."""


def find_waits(job: Job, now: int | None = None, reader: Reader | None = None) -> Waits:
    """Reads the waits of a job.

    Args:
        now: the time of the job at which open waits are measured; None: that of the last event, or up to
            which the logs of processes that still record are read.
        reader: gets what is read, which saves reading the logs once more.
    """
    reader = reader or Reader()
    found = _read_events(job, reader)
    if now is None and job.cut < math.inf:
        now = int(job.cut)
    if now is not None:
        found.now = max(found.now, now)
    waiting: defaultdict[tuple[Actor, int], list[Wait]] = defaultdict(list)  # threads may share a future
    for wait in found.stuck():
        waiting[wait.waiter, wait.message_id].append(wait)
    contexts = {found.passes[each] for each in waiting.keys() & found.passes.keys()}
    for wait in found.ended:
        waiting[wait.waiter, wait.message_id].append(wait)
    pending: deque[Call] = deque(maxlen=MAX_STUCK)
    backward: deque[Call] = deque(maxlen=MAX_STUCK)
    answered: set[int] = set()
    for call in job.calls():
        reader.add_call(call)
        request = call.request
        if request.kind in BACKWARD:
            if request.context in contexts and not _is_handled(call):
                backward.append(call)
            continue
        source = request.source
        waits = waiting.get((source, request.message_id), ()) if source is not None else ()
        for wait in waits:
            wait.call, wait.target = call, request.target
        if may_be_answered(call, job):
            answered.update(map(id, waits))
        elif all(wait.until is not None for wait in waits) and _may_miss_reply(call, job):
            continue
        elif not call.is_complete and request.sent is not None and request.kind not in ONE_WAY | REPEATED:
            if call.given_up is None:
                pending.append(call)
            if not waits and source is not None:
                wait = _open_call(source, call)
                (found.failed if wait.failed else found.open).append(wait)
    found.open_calls = [*pending, *backward]
    known = [w for w in found.open if id(w) not in answered and w.since <= found.now]
    found.open = list(_expand(known, backward, found.passes))
    found.failed = list(_expand(found.failed, backward, found.passes))
    for each in [*found.stuck(), *found.ended]:
        each.context = found.passes.get((each.waiter, each.message_id), 0)
        if each.target is None and each.waiter.role is Role.WORKER:
            each.target = job.worker(each.waiter.job, each.rank)
    for wait in found.open:
        if _has_died(wait.waiter.process, job, found.now):
            wait.until, wait.failed = int(job.known_until(wait.waiter.process)), True
    found.failed += [wait for wait in found.open if wait.failed]
    found.open = sorted((wait for wait in found.open if not wait.failed), key=lambda w: w.since)
    return found


def _read_events(job: Job, reader: Reader) -> Waits:
    """The waits as their threads recorded them, and the last stacks."""
    found = Waits(0, [], [], [], [], {}, {})
    begun: dict[tuple[Actor, int, int], Wait] = {}
    failed: deque[Wait] = deque(maxlen=MAX_STUCK)
    ended: list[tuple[int, int, Wait]] = []
    for number, stamped in enumerate(job.events()):
        time, process, actor, event = stamped
        reader.add_event(stamped)
        if not isinstance(event, StackDumped):  # asked for just now, when the logs may be read to before that
            found.now = max(found.now, time)
        else:
            stacks = found.stacks.setdefault(process, [])
            if stacks and stacks[0].time != event.time:
                stacks.clear()
            stacks.append(event)
        if isinstance(event, Interrupted) and found.interrupted is None:
            found.interrupted = time
        if actor is None:
            continue
        if isinstance(event, PassStarted):
            found.passes[actor, event.pass_id] = event.context
        elif isinstance(event, WaitBegun):
            key = actor, event.thread, event.message_id
            begun[key] = Wait(*key, event.peer, time)
        elif isinstance(event, WaitEnded) and (actor, event.thread, event.message_id) in begun:
            wait = begun.pop((actor, event.thread, event.message_id))
            wait.until, wait.failed = time, event.failed
            reader.add_wait(wait)
            if wait.failed:
                failed.append(wait)
            else:
                heapq.heappush(ended, (time - wait.since, number, wait))
                if len(ended) > LONGEST:
                    heapq.heappop(ended)
    for wait in begun.values():
        reader.add_wait(wait)
    found.open = [wait for wait in begun.values() if wait.waiter.stopped is None]
    found.failed = list(failed)
    found.ended = [wait for *_, wait in sorted(ended, reverse=True)]
    return found


def _is_of(call: Call, job: str) -> bool:
    """Whether ``call`` is one of the group ``job``: each group counts its contexts anew."""
    worker = call.request.source or call.request.target
    return worker is not None and worker.job == job


def _has_died(process: Process, job: Job, now: int) -> bool:
    """Whether ``process`` was killed long before ``now``: one that records writes samples of its clock."""
    is_silent = now - job.known_until(process) > STALLED_NANOSECONDS
    return is_silent and bool(process.samples) and not process.is_live


def _is_handled(call: Call) -> bool:
    """Whether a request of a backward pass is done; its coordinator serves some where it waits."""
    served = call.started is not None or call.request.received is None
    return call.finished is not None or not served


def may_be_answered(call: Call, job: Job) -> bool:
    """Whether the log of the requester, which has no end, stops at the time of the reply or before it."""
    source, reply = call.request.source, call.reply
    if source is None or reply is None or reply.sent is None or reply.received is not None:
        return False
    return job.known_until(source.process) - reply.sent < IN_FLIGHT_NANOSECONDS


def _may_miss_reply(call: Call, job: Job) -> bool:
    """Whether the recorder may have dropped the reply, or the request at its server."""
    request = call.request
    if call.is_complete or call.given_up is not None or request.sent is None:
        return False
    processes = (actor.process for actor in (request.source, request.target) if actor is not None)
    return any(p.dropped and request.sent <= job.time(p, p.dropped_until) for p in processes)


def _open_call(source: Actor, call: Call) -> Wait:
    request = call.request
    assert request.sent is not None
    wait = Wait(source, request.sender_thread, request.message_id, request.peer, request.sent)
    wait.is_blocking, wait.call, wait.target = False, call, request.target
    wait.until, wait.failed = call.given_up, call.given_up is not None
    return wait


def _expand(
    waits: Iterable[Wait], backward: Iterable[Call], passes: Mapping[tuple[Actor, int], int]
) -> Iterator[Wait]:
    """Replaces the wait for a backward pass by one for each of its requests that is not finished."""
    for wait in waits:
        context = passes.get((wait.waiter, wait.message_id), 0)
        needed = [
            c for c in backward if c.request.context == context and context and _is_of(c, wait.waiter.job)
        ]
        if not needed:
            yield wait
        for call in needed:
            yield msgspec.structs.replace(wait, call=call, rank=call.request.peer, target=call.request.target)
