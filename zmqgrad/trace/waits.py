"""Who waits for whom: the waits of a job that have not ended or have failed, and the cycles among them. Pure.

A wait is an edge of the wait-for graph (Knapp, "Deadlock detection in distributed databases", 1987) from the
thread that waits to the one that serves its request. Which thread holds the lock that another one needs is
not recorded, so a thread that serves a request, and waits for no worker, may wait for any other of its
worker. A cycle of waits that overlap in time is a deadlock, unless a call in it still computes: then it ends.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from zmqgrad.trace.events import Event, PassStarted, Role, StackDumped, WaitBegun, WaitEnded
from zmqgrad.trace.job import Job
from zmqgrad.trace.labels import actor_label
from zmqgrad.trace.model import Actor, Call, Process, Stamped
from zmqgrad.trace.pairing import REPEATED
from zmqgrad.trace.stacks import is_blocked
from zmqgrad.wire.messages import MessageType

LONGEST = 10
"""How many of the waits that ended well are kept."""

MAX_STUCK = 10_000
"""How many waits that failed, and calls without a reply, are kept: the latest."""

BACKWARD = frozenset((MessageType.BACKWARD_AUTOGRAD_REQ, MessageType.DROP_AUTOGRAD_REQ))
"""Requests of a backward pass. Reports to its coordinator take the place of replies."""

IN_FLIGHT_NANOSECONDS = 1_000_000_000
"""A reply that was sent this long before a log without an end stops may have arrived after it."""

ONE_WAY = BACKWARD | {MessageType.CANCEL}

COLLECTIVES = "zmqgrad.rpc.membership."
"""Functions of this library by which workers wait for each other at a barrier, and when they shut down."""

_Key = tuple[Actor, int, int]
"""The actor, the thread and the message id of a wait."""


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


class WaitPairs:
    """Pairs the begins of waits with their ends."""

    def __init__(self) -> None:
        self._open: dict[_Key, Wait] = {}

    def add(self, time: int, actor: Actor, event: Event) -> Wait | None:
        """Adds an event. Returns the wait that it ends, if it does."""
        if isinstance(event, WaitBegun):
            key = actor, event.thread, event.message_id
            self._open[key] = Wait(actor, event.thread, event.message_id, event.peer, time)
        elif isinstance(event, WaitEnded):
            wait = self._open.pop((actor, event.thread, event.message_id), None)
            if wait is not None:
                wait.until, wait.failed = time, event.failed
            return wait
        return None

    def rest(self) -> Iterable[Wait]:
        """The waits that have not ended."""
        return self._open.values()


def find_waits(
    job: Job,
    now: int | None = None,
    *,
    on_event: Callable[[Stamped], None] | None = None,
    on_call: Callable[[Call], None] | None = None,
) -> Waits:
    """Reads the waits of a job.

    Args:
        now: the time of the job at which open waits are measured; None: that of the last event, or up to
            which the logs of processes that still record are read.
        on_event, on_call: receive all events and calls, which saves reading the logs once more.
    """
    found = _read_events(job, on_event)
    if now is None and job.cut < math.inf:
        now = int(job.cut)
    if now is not None:
        found.now = max(found.now, now)
    waiting = {(w.waiter, w.message_id): w for w in found.stuck()}
    ended = {(w.waiter, w.message_id): w for w in found.ended}
    contexts = {found.passes[each] for each in waiting.keys() & found.passes.keys()}
    pending: deque[Call] = deque(maxlen=MAX_STUCK)
    backward: deque[Call] = deque(maxlen=MAX_STUCK)
    answered: set[int] = set()
    for call in job.calls():
        if on_call is not None:
            on_call(call)
        request = call.request
        if request.kind in BACKWARD:
            if request.context in contexts and not _is_handled(call):
                backward.append(call)
            continue
        source = request.source
        wait = None
        if source is not None:
            key = (source, request.message_id)
            wait = waiting.get(key) or ended.get(key)
            if wait is not None:
                wait.call, wait.target = call, request.target
        if may_be_answered(call, job):
            answered.add(id(wait))
        elif not call.is_complete and request.sent is not None and request.kind not in ONE_WAY | REPEATED:
            pending.append(call)
            if wait is None and source is not None:
                found.open.append(_open_call(source, call))
    found.open_calls = [*pending, *backward]
    known = [w for w in found.open if id(w) not in answered and w.since <= found.now]
    found.open = list(_expand(known, backward, found.passes))
    found.failed = list(_expand(found.failed, backward, found.passes))
    workers = {worker.rank: worker for worker in job.workers()}
    for each in [*found.stuck(), *found.ended]:
        each.context = found.passes.get((each.waiter, each.message_id), 0)
        if each.target is None and each.waiter.role is Role.WORKER:
            each.target = workers.get(each.rank)
    found.open.sort(key=lambda w: w.since)
    return found


def _read_events(job: Job, on_event: Callable[[Stamped], None] | None) -> Waits:
    """The waits as their threads recorded them, and the last stacks."""
    found = Waits(0, [], [], [], [], {}, {})
    pairs = WaitPairs()
    failed: deque[Wait] = deque(maxlen=MAX_STUCK)
    ended: list[tuple[int, int, Wait]] = []
    for number, stamped in enumerate(job.events()):
        time, process, actor, event = stamped
        if on_event is not None:
            on_event(stamped)
        if not isinstance(event, StackDumped):  # asked for just now, when the logs may be read to before that
            found.now = max(found.now, time)
        else:
            stacks = found.stacks.setdefault(process, [])
            if stacks and stacks[0].time != event.time:
                stacks.clear()
            stacks.append(event)
        if actor is None:
            continue
        if isinstance(event, PassStarted):
            found.passes[actor, event.pass_id] = event.context
        elif (wait := pairs.add(time, actor, event)) is not None:
            if wait.failed:
                failed.append(wait)
            else:
                heapq.heappush(ended, (time - wait.since, number, wait))
                if len(ended) > LONGEST:
                    heapq.heappop(ended)
    found.open = [wait for wait in pairs.rest() if wait.waiter.stopped is None]
    found.failed = list(failed)
    found.ended = [wait for *_, wait in sorted(ended, reverse=True)]
    return found


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


def _open_call(source: Actor, call: Call) -> Wait:
    request = call.request
    assert request.sent is not None
    return Wait(
        source,
        request.sender_thread,
        request.message_id,
        request.peer,
        request.sent,
        is_blocking=False,
        call=call,
        target=request.target,
    )


def _expand(
    waits: Iterable[Wait], backward: Iterable[Call], passes: Mapping[tuple[Actor, int], int]
) -> Iterator[Wait]:
    """Replaces the wait for a backward pass by one for each of its requests that is not finished."""
    for wait in waits:
        context = passes.get((wait.waiter, wait.message_id), 0)
        needed = [c for c in backward if c.request.context == context and context]
        if not needed:
            yield wait
        for call in needed:
            yield msgspec.structs.replace(wait, call=call, rank=call.request.peer, target=call.request.target)


def find_cycles(waits: Waits, at_least: int = 1_000_000_000) -> list[list[Wait]]:
    """The cycles of waits that overlap for ``at_least`` nanoseconds: the shortest one of each worker.

    When a wait of a cycle times out, the others may still get their replies; so it is enough that one is
    open or has failed.

    Returns:
        Cycles with no worker in common with an earlier one; each wait's target is the next one's waiter.
    """
    # Of several waits of a thread, the last here counts: the one that is open longest, or has failed last.
    by_thread: dict[tuple[Actor, int, Actor], Wait] = {}
    for wait in [*waits.ended, *sorted(waits.failed, key=lambda w: w.since), *reversed(waits.open)]:
        if (
            wait.target is not None
            and wait.target is not wait.waiter
            and wait.duration(waits.now) >= at_least
            and not _is_replied(wait)
        ):
            by_thread[wait.waiter, wait.thread, wait.target] = wait
    edges: dict[Actor, list[Wait]] = {}
    for wait in by_thread.values():
        edges.setdefault(wait.waiter, []).append(wait)
    found: list[list[Wait]] = []
    seen: set[Actor] = set()
    for start in sorted(by_thread.values(), key=lambda w: (w.waiter.rank, w.since)):
        if start.waiter in seen:
            continue
        cycle = _shortest_cycle(start, edges, waits)
        is_stuck = any(wait.until is None or wait.failed for wait in cycle)
        if is_stuck and _overlap(cycle, waits.now) >= at_least:
            found.append(cycle)
            seen.update(wait.waiter for wait in cycle)
    return found


def blocked_by(cycle: Sequence[Wait], waits: Waits) -> list[Wait]:
    """The other waits of the workers of ``cycle`` that cannot end before it does."""
    inside, waiters = {id(wait) for wait in cycle}, {wait.waiter for wait in cycle}
    rest = [wait for wait in waits.stuck() if wait.waiter in waiters and id(wait) not in inside]
    found: list[Wait] = []
    while True:
        edges: dict[Actor, list[Wait]] = {}
        for wait in [*cycle, *found]:
            edges.setdefault(wait.waiter, []).append(wait)
        more = [wait for wait in rest if any(_following(wait, edges, waits))]
        if not more:
            return found
        found += more
        rest = [wait for wait in rest if wait not in more]


def _is_replied(wait: Wait) -> bool:
    """Whether an open wait has its reply on the way: then it does not wait for the threads of its target."""
    reply = wait.call.reply if wait.call is not None else None
    return wait.until is None and reply is not None and reply.sent is not None


def _shortest_cycle(start: Wait, edges: Mapping[Actor, Sequence[Wait]], waits: Waits) -> list[Wait]:
    """Breadth-first search from ``start`` back to it; empty: there is none."""
    paths: dict[int, list[Wait]] = {id(start): [start]}
    queue = deque([start])
    while queue:
        wait = queue.popleft()
        for following in _following(wait, edges, waits):
            if following is start:
                return paths[id(wait)]
            if id(following) not in paths:
                paths[id(following)] = [*paths[id(wait)], following]
                queue.append(following)
    return []


def _following(wait: Wait, edges: Mapping[Actor, Sequence[Wait]], waits: Waits) -> Iterable[Wait]:
    """The waits that must end before ``wait`` can.

    If a thread serves its request, those of that thread. If that thread waits for no worker, it computes or
    waits for a lock. Then any thread of its worker may hold the lock, unless the stack shows a computation.
    """
    call, target = wait.call, wait.target
    at_target = edges.get(target, ()) if target is not None else ()
    if call is not None and target is not None and call.started is not None:
        own = [w for w in at_target if w.thread == call.thread and w.since >= call.started]
        stack = waits.stack_of(target.process, call.thread)
        if own or (stack and not is_blocked(stack)):
            return own
    return [w for w in at_target if _may_hold_lock(w, waits)]


def _may_hold_lock(wait: Wait, waits: Waits) -> bool:
    """Whether others may wait for the thread of ``wait``: not if it is only about to shut down, say."""
    if wait.function.startswith(COLLECTIVES):
        return False
    return wait.is_blocking or is_blocked(waits.stack_of(wait.waiter.process, wait.thread))


def _overlap(cycle: Sequence[Wait], now: int) -> int:
    """For how long all of them waited at once."""
    return min(now if w.until is None else w.until for w in cycle) - max(w.since for w in cycle)


def target_label(wait: Wait) -> str:
    """The name of the worker that ``wait`` waits for; its rank if it left no log."""
    return actor_label(wait.target) if wait.target is not None else f"worker {wait.rank}"


def thread_label(wait: Wait) -> str:
    """The name of the thread that waits."""
    declared = wait.waiter.process.threads.get(wait.thread)
    return declared.name if declared is not None else f"thread {wait.thread}"


def locate(wait: Wait, waits: Waits) -> str:
    """Where the request is that ``wait`` waits for, in words."""
    now, call, target = waits.now if wait.until is None else wait.until, wait.call, wait.target
    if call is None:
        return "no request of it is under way" if wait.context else "its request was not recorded"
    name = target_label(wait)
    declared = target.process.threads.get(call.thread) if target is not None else None
    thread = declared.name if declared is not None else f"thread {call.thread}"
    text = place(call, now, name, thread, waits.queue_of(call))
    if call.reply is None:
        text += _why_not(target) if call.request.received is None else _end_of(target)
    return text


def place(call: Call, now: int, name: str, thread: str, queue: tuple[int, int]) -> str:
    """Where the request of ``call`` is (or was) at time ``now``, in words.

    Args:
        name: of the worker that it was sent to.
        thread: the name of ``call.thread``.
        queue: how many requests are queued before it there, and how many run.
    """
    reply, received = call.reply, _until(now, call.request.received)
    replied = _until(now, reply.sent) if reply is not None else None
    started, finished = _until(now, call.started), _until(now, call.finished)
    if reply is not None and _until(now, reply.received) is not None:
        return "its reply has arrived"
    if replied is not None:
        return f"{name} replied {show(now - replied)} before; the reply has not arrived"
    late = f"; its reply came {show(reply.sent - now)} too late" if reply is not None and reply.sent else ""
    if received is None:
        return f"{name} has not received it" + late
    if finished is not None:
        return f"{name} has run it for {show(finished - (started or finished))}, and has not replied" + late
    if started is not None:
        return f"{name} has run it for {show(now - started)}, in thread {thread}" + late
    return (
        f"{name} received it {show(now - received)} before, and has not begun it: "
        f"{queue[0]} are queued before it, {queue[1]} run" + late
    )


def _until(now: int, time: int | None) -> int | None:
    """``time`` if it has come."""
    return time if time is not None and time <= now else None


def _why_not(target: Actor | None) -> str:
    if target is None:
        return ", or has no log here"
    return _end_of(target) or ", as far as its log shows"


def _end_of(target: Actor | None) -> str:
    return ", and has ended since" if target is not None and target.stopped is not None else ""


def show(nanoseconds: float) -> str:
    """A duration as text."""
    for unit, factor in (("s", 1e9), ("ms", 1e6)):
        if nanoseconds >= factor:
            return f"{nanoseconds / factor:.1f} {unit}"
    return f"{nanoseconds / 1e3:.0f} us"
