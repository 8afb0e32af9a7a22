"""Runs a group of workers to completion: one thread with one loop over output, exits, signals and time.

Carries out what :mod:`zmqgrad.elastic.agent.supervision` decides. When :func:`launch` returns or raises, no
worker is left, nor any process that a worker has started in its session.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from zmqgrad.elastic.agent.listening import Listener, write_all
from zmqgrad.elastic.agent.output import Screen
from zmqgrad.elastic.agent.signals import SignalInbox
from zmqgrad.elastic.agent.supervision import (
    Event,
    Outcome,
    SignalReceived,
    SignalWorkers,
    Supervisor,
    TimePassed,
    WorkerExited,
)
from zmqgrad.elastic.agent.workers import Window, WorkerProcess
from zmqgrad.runtime.clock import MONOTONIC, Clock, Deadline

_ORPHAN_GRACE_SECONDS = 0.5
_ORPHAN_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Group:
    """The group to launch: one command, and an environment for each worker.

    Attributes:
        label: returns the label of a worker's lines, by rank and file descriptor.
        terminals: the terminals among descriptors 1 and 2, with their sizes; worker 0 may draw there.
        log_dir: directory for a copy of all output, one file per worker and stream.
    """

    command: Sequence[str]
    environments: Sequence[Mapping[str, str]]
    label: Callable[[int, int], bytes]
    terminals: Mapping[int, Window] = field(default_factory=dict)
    log_dir: Path | None = None


def launch(group: Group, clock: Clock = MONOTONIC) -> tuple[Outcome, Callable[[int], list[str]]]:
    """Run all workers of ``group``. Returns the result, and a function for the last stderr lines of a worker.

    Must be called on the main thread, because it handles the signals to this process until it returns.

    Raises:
        OSError: if a worker cannot be started.
    """
    with ExitStack() as cleanup:
        signals = cleanup.enter_context(SignalInbox())
        listener = Listener(Screen(write_all, group.terminals), signals)
        workers: list[WorkerProcess] = []
        cleanup.enter_context(closing(listener))
        for rank, environ in enumerate(group.environments):
            label = {fd: group.label(rank, fd) for fd in (1, 2)}
            windows = group.terminals if rank == 0 else {}
            worker = WorkerProcess(rank, group.command, environ, label, windows, group.log_dir)
            cleanup.callback(worker.close)
            workers.append(worker)
            listener.add(worker)
        outcome = _supervise(workers, listener, signals, clock)
        _end_orphans(workers, listener, clock)
        listener.drain()
        return outcome, lambda rank: list(workers[rank].tail)


def _supervise(
    workers: Sequence[WorkerProcess], listener: Listener, signals: SignalInbox, clock: Clock
) -> Outcome:
    supervisor = Supervisor(range(len(workers)))
    running = list(workers)
    while True:
        listener.wait(Deadline(supervisor.deadline, clock).timeout())
        events: list[Event] = [SignalReceived(signum) for signum in signals.take()]
        if listener.output_closed and supervisor.is_running:
            events.append(SignalReceived(signal.SIGPIPE))
        for worker in list(running):
            if (code := worker.poll()) is not None:
                running.remove(worker)
                events.append(WorkerExited(worker.rank, code))
        for event in (*events, TimePassed()):
            for effect in supervisor.handle(event, clock.now()):
                match effect:
                    case SignalWorkers(ranks, signum):
                        for rank in ranks:
                            workers[rank].signal(signum)
                    case Outcome():
                        return effect


def _end_orphans(workers: Sequence[WorkerProcess], listener: Listener, clock: Clock) -> None:
    """End orphan processes of workers: SIGTERM first, as some of them clean up (shared memory)."""
    orphans = [worker for worker in workers if worker.signal(signal.SIGTERM)]
    deadline = Deadline.after(_ORPHAN_GRACE_SECONDS, clock)
    while orphans and not deadline.passed():
        # The kernel does not signal when a process group becomes empty, so this one wait polls.
        listener.wait(_ORPHAN_POLL_SECONDS)
        orphans = [worker for worker in orphans if worker.signal(0)]
