"""Reports of what waits, for errors, and for stderr while it waits (ZMQGRAD_DEBUG=1)."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from zmqgrad.rpc.calls import PendingCall, PendingCalls
from zmqgrad.runtime.service_thread import Alarm, TimerHandle
from zmqgrad.transport.tap import Tracer

if TYPE_CHECKING:
    from zmqgrad.rpc.core import WorkerCore

UNLIMITED_SECONDS = 60.0
"""The timeout that is assumed, for reports, of calls without one."""

MAX_SHOWN = 20


def locate(tracer: Tracer | None, call: PendingCall) -> str:
    """Where the request of ``call`` is, if the trace tells."""
    return "" if tracer is None else tracer.locate(call.peer, call.message_id)


class _Waiting(NamedTuple):
    """A call that may be reported at ``due``, and the thread that made it."""

    call: PendingCall
    began: float
    due: float
    thread: int


class WaitReporter:
    """Reports each pending call on stderr once half of its timeout has passed.

    Args:
        worker: that made the calls.
        pending: its calls.
    """

    def __init__(self, worker: WorkerCore, pending: PendingCalls) -> None:
        self._worker = worker
        self._pending = pending
        self._lock = threading.Lock()  # guards the rest
        self._waits: dict[int, _Waiting] = {}  # by message id
        self._alarm = Alarm(self._look, worker.timer)

    def add(self, call: PendingCall) -> None:
        """Adds a call, in the thread that made it."""
        now = self._worker.clock.now()
        due = now + (call.timeout or UNLIMITED_SECONDS) / 2
        with self._lock:
            self._waits[call.message_id] = _Waiting(call, now, due, threading.get_ident())
        self._alarm.set(due)

    def _look(self) -> None:
        now, pending = self._worker.clock.now(), {call.message_id for call in self._pending.all()}
        with self._lock:
            waits = [wait for message_id, wait in self._waits.items() if message_id in pending]
            self._waits = {wait.call.message_id: wait for wait in waits if wait.due > now}
            following = min((wait.due for wait in self._waits.values()), default=math.inf)
        self._alarm.set(following)
        if due := [wait for wait in waits if wait.due <= now]:
            self._report(due, now)

    def _report(self, due: list[_Waiting], now: float) -> None:
        worker = self._worker
        if worker.hooks.tracer is not None:
            worker.hooks.tracer.request_stacks()  # so that a trace of this hang tells where it hangs
        lines = []
        for call, began, _, thread in due[:MAX_SHOWN]:
            left = f"{call.deadline - now:.1f} s left" if call.deadline < math.inf else "no timeout"
            place = locate(worker.hooks.tracer, call)
            lines.append(
                f"zmqgrad: {worker.name} has waited {now - began:.1f} s ({left}) for {call.describe()} on "
                f"{worker.membership.name_of(call.peer)}" + (f": {place}" if place else "")
            )
            lines += [f"    called from {frame}" for frame in _frames(thread)]
        if len(due) > MAX_SHOWN:
            lines.append(f"zmqgrad: {worker.name}: ... and {len(due) - MAX_SHOWN} more calls")
        print("\n".join(lines), file=sys.stderr, flush=True)

    def watch(self, describe: Callable[[], str]) -> TimerHandle:
        """Reports a wait of the calling thread, which is not for a call, unless it ends in time.

        Args:
            describe: what is waited for, when it is reported.

        Returns:
            What to cancel when the wait ends.
        """
        worker, thread, began = self._worker, threading.get_ident(), self._worker.clock.now()

        def report() -> None:
            if worker.hooks.tracer is not None:
                worker.hooks.tracer.request_stacks()
            lines = [f"zmqgrad: {worker.name} has waited {worker.clock.now() - began:.1f} s for {describe()}"]
            lines += [f"    called from {frame}" for frame in _frames(thread)]
            print("\n".join(lines), file=sys.stderr, flush=True)

        return worker.timer.call_later((worker.default_timeout or UNLIMITED_SECONDS) / 2, report)


def _frames(ident: int) -> list[str]:
    """What a thread is doing: the frames of the program."""
    from zmqgrad.trace.stacks import innermost, show_stack  # only now: it is seldom needed

    return innermost(show_stack(ident), 2)
