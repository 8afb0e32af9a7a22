"""Termination detection for a backward pass, at its coordinator. Pure bookkeeping, with a lock.

A request is identified by the autograd id of its send, which receives gradients once. Each worker reports,
with the requests that it has handled, the requests that these set off. Reports may overtake one another, so
the detector keeps two sets: *outstanding* requests, announced but not handled; and requests *reported early*,
handled but not announced. When both are empty, every request has been handled and no message is in flight.
(Message counting, as in Mattern 1987, with ids in place of counts, so that repetitions do no harm.)

The alternative, to reply to a request when everything that it set off has finished (Dijkstra and Scholten
1980), would send the replies of a chain one after the other: ten hops cost ten more message times.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from zmqgrad.runtime.future import Promise
from zmqgrad.wire.messages import StallReport

ROOTS = 0
"""The autograd id that denotes the roots of a pass."""


class TerminationDetector:
    """Detects the end of one pass; then it sets ``finished``.

    Args:
        root: the id of the coordinator's worker.
        new_promise: creates ``finished``.
        on_failed: called at errors, before ``finished`` is set; by any thread, perhaps twice.
    """

    def __init__(
        self,
        root: int,
        new_promise: Callable[[], Promise[None]] = Promise,
        on_failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._lock = threading.Lock()  # guards all below
        self._root = root
        self._outstanding: dict[int, tuple[int, int]] = {ROOTS: (root, root)}  # receiver and sender of each
        self._reported_early: set[int] = set()
        self._handled: set[int] = set()
        self._arrived: set[int] = set()  # of those for the coordinator's worker
        self._reports: dict[int, StallReport] = {}
        self._with_callbacks: set[int] = set()
        self._error: BaseException | None = None
        self._lost: dict[int, BaseException] = {}
        self._lost_requests: dict[int, BaseException] = {}
        self.steps = 0
        """How many reports have been counted."""
        self._new_promise = new_promise
        self._on_failed = on_failed
        self.finished = new_promise()

    def handled(
        self,
        requests: Sequence[int],
        sent: Sequence[tuple[int, Sequence[int]]],
        waiting: StallReport,
        error: BaseException | None = None,
    ) -> None:
        """Count a report; a repetition is ignored.

        Args:
            requests: the requests that a worker has handled.
            sent: the requests that they set off, by worker.
            waiting: whether groups on the reporting worker wait.
            error: what went wrong; the pass ends with the first error, whatever is outstanding.
        """
        outstanding, reported_early, reporter = self._outstanding, self._reported_early, waiting.worker
        with self._lock:
            is_new = error is not None and not requests  # what was taken, nobody knows: a signal came
            for request in requests:
                if request not in self._handled:
                    is_new = True
                    self._handled.add(request)
                    if outstanding.pop(request, None) is None:
                        reported_early.add(request)
            if not is_new:
                return  # a repetition
            self.steps += 1
            if waiting.has_callbacks:  # whatever older reports say that arrive later
                self._with_callbacks.add(reporter)
            self._error = self._error or error
            known = self._reports.get(reporter)
            if known is None or known.step <= waiting.step:
                self._reports[reporter] = waiting
            for receiver, others in sent:
                for request in others:
                    if request in reported_early:
                        reported_early.discard(request)
                    else:
                        outstanding[request] = receiver, reporter
            if self._lost or self._lost_requests:
                self._fail_if_lost()
            failed = self._error is not None
            done = failed or not (outstanding or reported_early)
        if done:
            self._finish(failed)

    def arrived(self, requests: Iterable[int]) -> None:
        """Note requests that have arrived at the coordinator's worker: it handles them whoever is lost."""
        with self._lock:
            self._arrived.update(requests)

    def expect(self, requests: dict[int, int]) -> None:
        """Announce requests that the coordinator is about to send, each with its worker."""
        with self._lock:
            if self._error is not None:
                return
            self._outstanding.update((n, (worker, self._root)) for n, worker in requests.items())
            if self.finished.done():
                self.finished = self._new_promise()

    def lose(self, worker: int, error: BaseException) -> None:
        """Fail the pass if a request is or will be reported as outstanding at, or from, a lost worker.

        What a worker sent just before it was lost may not have arrived: its report came another way. Nobody
        knows that of what it sent to others. What it sent to the coordinator has arrived by now, or never
        will.
        """
        with self._lock:
            self._lost[worker] = error
            self._fail_if_lost()
            failed = self._error is not None
        if failed:
            self._finish(failed)

    def lose_requests(self, requests: Sequence[int], error: BaseException) -> None:
        """Fail if one of ``requests`` is or will be outstanding: their sender has lost their receiver."""
        with self._lock:
            self._lost_requests.update(dict.fromkeys(requests, error))
            self._fail_if_lost()
            failed = self._error is not None
        if failed:
            self._finish(failed)

    def abort(self, error: BaseException) -> None:
        """End the pass with ``error``."""
        with self._lock:
            self._error = self._error or error
        self._finish(True)

    def _finish(self, failed: bool) -> None:
        if failed and not self.finished.done():
            self._on_failed()
        self.finished.set_result(None)

    def _fail_if_lost(self) -> None:
        """Fail if an outstanding request is lost, or its receiver or sender. The caller holds the lock."""
        for request, (receiver, sender) in self._outstanding.items():
            lost = self._lost.get(receiver) or self._lost_requests.get(request)
            if request not in self._arrived:
                lost = lost or self._lost.get(sender)
            if lost is not None:
                self._error = self._error or lost
                return

    def error(self) -> BaseException | None:
        """Return the first error, if any."""
        with self._lock:
            return self._error

    def outstanding(self) -> dict[int, int]:
        """Return the requests that were announced and not handled, each with its worker."""
        with self._lock:
            return {request: receiver for request, (receiver, _) in self._outstanding.items()}

    def with_callbacks(self) -> set[int]:
        """Return the workers that have callbacks to call at the end of the pass."""
        with self._lock:
            return set(self._with_callbacks)

    def waiting(self) -> set[int]:
        """Return the workers where groups wait for a gradient, by their latest reports."""
        with self._lock:
            return {worker for worker, report in self._reports.items() if report.waits}
