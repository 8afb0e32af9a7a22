"""What calls ask of their workers: how long they run there, and wait for a thread. Pure."""

from __future__ import annotations

import bisect
import math
from array import array
from collections import Counter, defaultdict
from typing import TypeVar

from zmqgrad.errors import RpcTimeoutError
from zmqgrad.trace.model import Actor, Call
from zmqgrad.trace.waits import Wait

_K = TypeVar("_K")


class NestedWaits:
    """How long each thread waited for replies, between any two times.

    Waits of one thread overlap: those of a group call, and those of what the thread does while it waits.
    """

    def __init__(self) -> None:
        self._ends: defaultdict[tuple[Actor, int], array[int]] = defaultdict(lambda: array("q"))
        self._sums: defaultdict[tuple[Actor, int], array[int]] = defaultdict(lambda: array("q", [0]))

    def add(self, wait: Wait) -> None:
        """Adds ``wait``, in the order of their ends."""
        if wait.until is not None:
            key = wait.waiter, wait.thread
            ends, sums = self._ends[key], self._sums[key]
            before = sums[bisect.bisect_right(ends, wait.since)]
            further = wait.until - max(wait.since, ends[-1] if ends else 0)
            ends.append(wait.until)
            sums.append(max(sums[-1] + max(further, 0), before + wait.until - wait.since))

    def between(self, actor: Actor, thread: int, begin: int, end: int) -> int:
        """The nanoseconds of the waits of this thread that ended between these times."""
        ends, sums = self._ends.get((actor, thread)), self._sums[actor, thread]
        if ends is None:
            return 0
        return sums[bisect.bisect_right(ends, end)] - sums[bisect.bisect_left(ends, begin)]


class Load:
    """What the calls of a job ask of its workers: how long they run, by function, and wait for a thread.

    Args:
        nested: the waits of all threads; what a call waits for its own calls is no work of its worker.
    """

    def __init__(self, nested: NestedWaits) -> None:
        self._nested = nested
        self.until = math.inf
        """Failures after this time are no fault: the job was interrupted."""
        self.limits: dict[Actor, int] = {}
        """How many threads of the pool may work, as the worker recorded."""
        self.busy: defaultdict[tuple[Actor, str], int] = defaultdict(int)
        """For how long threads served requests, by function."""
        self.running: defaultdict[str, defaultdict[Actor, array[int]]] = defaultdict(
            lambda: defaultdict(lambda: array("q"))
        )
        self.queued: defaultdict[Actor, array[int]] = defaultdict(lambda: array("q"))
        self.span: dict[Actor, tuple[int, int]] = {}
        self.longest_run: dict[tuple[str, Actor], tuple[int, Call]] = {}
        self.longest_queued: dict[Actor, tuple[int, Call]] = {}
        self.slowest: dict[str, tuple[int, Call]] = {}
        """By function, from the request to the reply."""
        self.calls: Counter[str] = Counter()
        self.failed: defaultdict[str, list[Call]] = defaultdict(list)
        """By function, as are the calls that are counted."""

    def add(self, call: Call) -> None:
        """Adds ``call``, a call of the program."""
        request = call.request
        function = call.function or request.type
        target, received = request.target, request.received
        self.calls[function] += 1
        # Without a reply, the caller gave it up; what was lost with a worker is a finding of its own.
        has_raised = call.has_raised and call.reply is not None and call.given_up is None
        failed = has_raised or call.error == RpcTimeoutError.__name__
        if failed and (call.given_up or call.finished or 0) < self.until:
            self.failed[function].append(call)
        if call.duration is not None:
            _keep_longest(self.slowest, function, call.duration, call)
        ran = call.running
        if target is None or received is None or call.started is None or call.finished is None or ran is None:
            return
        queued = call.started - received
        waited = self._nested.between(target, call.thread, call.started, call.started + ran)
        self.busy[target, function] += call.finished - call.started
        if call.function:  # what fetches of different values take cannot be compared
            self.running[function][target].append(max(ran - waited, 0))
        self.queued[target].append(queued)
        first, last = self.span.get(target, (received, call.finished))
        self.span[target] = min(first, received), max(last, call.finished)
        _keep_longest(self.longest_run, (function, target), ran, call)
        _keep_longest(self.longest_queued, target, queued, call)


def _keep_longest(calls: dict[_K, tuple[int, Call]], key: _K, nanoseconds: int, call: Call) -> None:
    if key not in calls or nanoseconds > calls[key][0]:
        calls[key] = nanoseconds, call
