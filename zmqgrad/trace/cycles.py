"""The cycles among the waits of a job: deadlocks. Pure.

A wait is an edge of the wait-for graph (Knapp, "Deadlock detection in distributed databases", 1987) from the
thread that waits to the one that serves its request. Which thread holds the lock that another one needs is
not recorded, so a thread that serves a request, and waits for no worker, may wait for any other of its
worker. A cycle of waits that overlap in time is a deadlock, unless a call in it still computes: then it ends.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

from zmqgrad.trace.model import Actor
from zmqgrad.trace.stacks import is_blocked
from zmqgrad.trace.waits import Wait, Waits

COLLECTIVES = "zmqgrad.rpc.membership."
"""Functions of this library by which workers wait for each other at a barrier, and when they shut down."""


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
    edges = _by_waiter(by_thread.values())
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
        edges = _by_waiter([*cycle, *found])
        more = [wait for wait in rest if any(_following(wait, edges, waits))]
        if not more:
            return found
        found += more
        rest = [wait for wait in rest if wait not in more]


def _by_waiter(waits: Iterable[Wait]) -> dict[Actor, list[Wait]]:
    edges: defaultdict[Actor, list[Wait]] = defaultdict(list)
    for wait in waits:
        edges[wait.waiter].append(wait)
    return edges


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
