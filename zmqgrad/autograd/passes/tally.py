"""What of a backward pass is under way anywhere, as its root knows it. Pure bookkeeping, with a lock.

Every request of a pass is known by the autograd id of its send, which gets gradients once. Each worker
tells the root, for each request that it has handled, which requests that set off. Reports may overtake
one another, so the root keeps two sets: told of but not handled, and handled but not told of. When both are
empty, everything that was set off has been handled, and nothing is in flight.

(The alternative, each request answered when all that it set off has finished, makes the answers of a chain
come back one after the other: ten hops cost ten more message times.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from zmqgrad.runtime.future import Promise
from zmqgrad.wire.messages import Waiting

ROOTS = 0
"""Stands for the roots where an autograd id is asked for."""


class Tally:
    """One pass, at its root. ``finished`` is set when nothing is under way."""

    def __init__(self, root: int, new_outcome: Callable[[], Promise[None]] = Promise) -> None:
        self._lock = threading.Lock()  # guards all below
        self._under_way: dict[int, int] = {ROOTS: root}  # and the worker that it was sent to
        self._early: set[int] = set()
        self._handled: set[int] = set()
        self._reports: dict[int, Waiting] = {}
        self._error: BaseException | None = None
        self._lost: dict[int, BaseException] = {}
        self.steps = 0
        self._new_outcome = new_outcome
        self.finished = new_outcome()

    def handled(
        self,
        requests: Sequence[int],
        sent: Sequence[tuple[int, Sequence[int]]],
        waiting: Waiting,
        error: BaseException | None = None,
    ) -> None:
        """Requests have been handled, and set off those in ``sent``. Of several errors the first counts."""
        with self._lock:
            before = len(self._handled)
            for request in requests:
                if request not in self._handled:
                    self._handled.add(request)
                    if self._under_way.pop(request, None) is None:
                        self._early.add(request)
            if len(self._handled) == before:
                return  # a repetition
            self.steps += 1
            self._error = self._error or error
            known = self._reports.get(waiting.worker)
            if known is None or known.tick <= waiting.tick:
                self._reports[waiting.worker] = waiting
            for worker, others in sent:
                for request in others:
                    if request in self._early:
                        self._early.discard(request)
                    else:
                        self._under_way[request] = worker
            done = not (self._under_way or self._early) or (bool(self._lost) and self._waits_for_lost())
        if done:
            self.finished.set_result(None)

    def expect(self, requests: dict[int, int]) -> None:
        """More is about to be set off, by the root itself: these requests, of those workers."""
        with self._lock:
            if self._error is not None:
                return
            self._under_way.update(requests)
            if self.finished.done():
                self.finished = self._new_outcome()

    def lose(self, worker: int, error: BaseException) -> None:
        """``worker`` is gone. If anything is under way there, now or as others yet tell, that is the end."""
        with self._lock:
            self._lost[worker] = error
            over = self._waits_for_lost()
        if over:
            self.finished.set_result(None)

    def end(self, error: BaseException) -> None:
        """Nothing of it will be heard any more."""
        with self._lock:
            self._error = self._error or error
            finished = self.finished
        finished.set_result(None)

    def _waits_for_lost(self) -> bool:
        """Is anything under way at a worker that is gone? Called with the lock held."""
        for worker in self._under_way.values() if self._lost else ():
            if worker in self._lost:
                self._error = self._error or self._lost[worker]
                return True
        return False

    def error(self) -> BaseException | None:
        """The first error, if there was any."""
        with self._lock:
            return self._error

    def under_way(self) -> dict[int, int]:
        """Requests that have not been handled as far as is known, and the workers that they went to."""
        with self._lock:
            return dict(self._under_way)

    def waiting(self) -> set[int]:
        """Workers where something that was reached waits for a gradient, as they last said."""
        with self._lock:
            return {worker for worker, report in self._reports.items() if report.waits}
