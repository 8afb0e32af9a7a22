"""The workers of one round: starts and ends them, and carries out what their supervisor decides.

See :mod:`zmqgrad.elastic.agent.supervision`. After :meth:`WorkerGroup.close` no worker is left, nor any
process that a worker has started in its session.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from contextlib import ExitStack

from zmqgrad.elastic.agent.death_signal import ProcessGroupGuard
from zmqgrad.elastic.agent.listening import Listener
from zmqgrad.elastic.agent.supervision import (
    Event,
    Outcome,
    SignalWorkers,
    Supervisor,
    TimePassed,
    WorkerExited,
)
from zmqgrad.elastic.agent.workers import Tail, Worker
from zmqgrad.runtime.clock import MONOTONIC, Clock, Deadline

_ORPHAN_GRACE_SECONDS = 0.5
_ORPHAN_POLL_SECONDS = 0.01


class WorkerGroup:
    """The workers ``ranks``, started on construction.

    Args:
        ranks: of the workers.
        start: starts the worker of a rank.
        listener: shows their output.
        on_success: called with the rank of each worker that ends with success by itself.
        clock: monotonic.

    Raises:
        OSError: if a worker cannot be started. The others are ended then.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        start: Callable[[int], Worker],
        listener: Listener,
        on_success: Callable[[int], None],
        clock: Clock = MONOTONIC,
    ) -> None:
        self._listener = listener
        self._on_success = on_success
        self._clock = clock
        self._workers: dict[int, Worker] = {}
        with ExitStack() as cleanup:
            for rank in ranks:
                worker = self._workers[rank] = start(rank)
                cleanup.callback(worker.close)
                listener.add(worker)
                cleanup.callback(listener.remove, worker)
            self._guard = ProcessGroupGuard(worker.pid for worker in self._workers.values())
            self._cleanup = cleanup.pop_all()
        self._supervisor = Supervisor(self._workers)
        self._running = set(self._workers)

    @property
    def deadline(self) -> float:
        """When to call :meth:`handle` at the latest; infinite if that is not needed."""
        return self._supervisor.deadline

    @property
    def is_running(self) -> bool:
        """Whether the group is not being ended."""
        return self._supervisor.is_running

    def tail(self, rank: int) -> Tail:
        """The last lines that a worker wrote to stderr."""
        return self._workers[rank].end_of_stderr()

    def handle(self, events: Iterable[Event] = ()) -> Outcome | None:
        """Process ``events``, exits and the time. Returns the outcome if the group has ended."""
        for event in (*events, *self._exits(), TimePassed()):
            if isinstance(event, WorkerExited) and event.code == 0 and self.is_running:
                self._on_success(event.rank)
            for effect in self._supervisor.handle(event, self._clock.now()):
                match effect:
                    case SignalWorkers(ranks, signum):
                        for rank in ranks:
                            self._workers[rank].signal(signum)
                    case Outcome():
                        return effect
        return None

    def kill(self) -> None:
        """Kill the workers that run. Safe in any thread; the next :meth:`handle` finds them dead."""
        for rank in tuple(self._running):
            self._workers[rank].signal(signal.SIGKILL)

    def _exits(self) -> list[WorkerExited]:
        exits = []
        for rank in sorted(self._running):
            if (code := self._workers[rank].poll()) is not None:
                self._running.discard(rank)
                if code:
                    self._listener.shown.failed.add(rank)
                self._listener.exited(self._workers[rank])
                exits.append(WorkerExited(rank, code))
        return exits

    def end_orphans(self) -> None:
        """End orphan processes of workers: SIGTERM first, as some of them clean up (shared memory)."""
        orphans = [worker for worker in self._workers.values() if worker.signal(signal.SIGTERM)]
        deadline = Deadline.after(_ORPHAN_GRACE_SECONDS, self._clock)
        while orphans and not deadline.passed():
            # The kernel does not signal when a process group becomes empty, so this one wait polls.
            self._listener.wait(_ORPHAN_POLL_SECONDS)
            orphans = [worker for worker in orphans if worker.signal(0)]

    def close(self) -> None:
        """Kill what is left, and show the rest of the output. Idempotent."""
        self._cleanup.close()
        self._guard.close()
