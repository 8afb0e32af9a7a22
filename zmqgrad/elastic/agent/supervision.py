"""Decisions about one group of workers: when the group ends, which workers to signal, and the exit code.

Pure: an event and the time go in, a list of effects comes out, which :mod:`zmqgrad.elastic.agent.group`
carries out. The rules:

1. The group succeeds when every worker has exited with code 0.
2. The first worker that fails determines the exit code, and the others are ended.
3. A signal to the launcher ends all workers; the exit code is then 128 + its number.
4. To end workers, the launcher signals them, kills the remaining ones after a grace period, and after
   another grace period abandons those that still run, and reports them.
5. A second signal ends the grace period immediately.
6. A request to stop ends all workers as well, and is neither a success nor a failure.
"""

from __future__ import annotations

import enum
import math
import signal
from collections.abc import Collection
from dataclasses import dataclass

GRACE_SECONDS = 1.0
"""Seconds between SIGTERM and SIGKILL, and between SIGKILL and abandoning a worker."""

_EXIT_AFTER_SIGTERM = 128 + signal.SIGTERM
"""Exit code of a shell, and of many programs, that SIGTERM has ended."""


@dataclass(frozen=True)
class WorkerExited:
    """Event: a worker has exited. ``code`` as ``subprocess`` has it: minus the signal that killed it."""

    rank: int
    code: int


@dataclass(frozen=True)
class SignalReceived:
    """Event: the launcher itself received a signal to stop. GroupEnded follows, if it has workers."""

    signum: int


@dataclass(frozen=True)
class StopWorkers:
    """Event: the group must end, because its round does. ``signum``: SIGTERM, or SIGKILL without grace.

    An effect of :mod:`~zmqgrad.elastic.agent.lifecycle`.
    """

    signum: int = signal.SIGTERM


@dataclass(frozen=True)
class TimePassed:
    """Event: time has passed."""


Event = WorkerExited | SignalReceived | StopWorkers | TimePassed


@dataclass(frozen=True)
class SignalWorkers:
    """Effect: send ``signum`` to these workers and their child processes."""

    ranks: tuple[int, ...]
    signum: int


@dataclass(frozen=True)
class Outcome:
    """The last effect: the result.

    Attributes:
        ended: workers that still ran when the launcher began to end the group.
        given_up: workers that survived SIGKILL.
        stopped: whether the group was requested to stop before it ended by itself.
        failed_later: workers among ``ended`` that failed by themselves before a signal ended them.
        succeeded: workers that exited with 0 before the first failure.
    """

    exit_code: int
    first_failure: WorkerExited | None = None
    interrupted_by: int | None = None
    ended: tuple[int, ...] = ()
    given_up: tuple[int, ...] = ()
    stopped: bool = False
    failed_later: tuple[WorkerExited, ...] = ()
    succeeded: tuple[int, ...] = ()


Effect = SignalWorkers | Outcome


class Phase(enum.Enum):
    """Phases of a group, in order; some may be skipped."""

    RUNNING = "running"
    ENDING = "ending"
    KILLING = "killing"
    OVER = "over"


class Supervisor:
    """The state of one group of workers.

    Args:
        ranks: of its workers.
        grace: see :data:`GRACE_SECONDS`.
    """

    def __init__(self, ranks: Collection[int], grace: float = GRACE_SECONDS) -> None:
        self.phase = Phase.RUNNING
        self.deadline = math.inf
        """When to send TimePassed at the latest; infinite if not needed."""
        self._running = set(ranks)
        self._grace = grace
        self._first_failure: WorkerExited | None = None
        self._interrupted_by: int | None = None
        self._ended: tuple[int, ...] = ()
        self._failed_later: list[WorkerExited] = []
        self._succeeded: list[int] = []
        self._stopped = False

    @property
    def is_running(self) -> bool:
        """Whether the launcher has not begun to end the group."""
        return self.phase is Phase.RUNNING

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Process ``event`` at ``now`` (monotonic seconds) and return the effects."""
        if self.phase is Phase.OVER:
            return []
        match event:
            case WorkerExited():
                return self._on_exit(event, now)
            case SignalReceived(signum):
                return self._on_signal(signum, now)
            case StopWorkers(signum):
                return self._on_stop(signum, now)
            case TimePassed():
                return self._on_time(now)

    def _on_exit(self, event: WorkerExited, now: float) -> list[Effect]:
        self._running.discard(event.rank)
        failed = event.code != 0 and self.phase is Phase.RUNNING
        if failed:
            self._first_failure = event
        elif event.code > 0 and event.code != _EXIT_AFTER_SIGTERM and self._first_failure is not None:
            self._failed_later.append(event)
        elif event.code == 0 and self.phase is Phase.RUNNING:
            self._succeeded.append(event.rank)
        if not self._running:
            return [self._finish()]
        return self._terminate(signal.SIGTERM, now) if failed else []

    def _on_signal(self, signum: int, now: float) -> list[Effect]:
        if self._stopped and self._interrupted_by is None:
            self._interrupted_by = signum  # the group ends already, but no other may follow it
            return []
        if self.phase is not Phase.RUNNING:
            return self._kill(now) if self.phase is Phase.ENDING else []
        self._interrupted_by = signum
        # SIGINT as from a terminal, so that workers see their KeyboardInterrupt; otherwise SIGTERM.
        return self._terminate(signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM, now)

    def _on_stop(self, signum: int, now: float) -> list[Effect]:
        if self.phase is Phase.RUNNING:
            self._stopped = True
            self._ended = tuple(sorted(self._running))
            return self._kill(now) if signum == signal.SIGKILL else self._terminate(signum, now)
        return self._kill(now) if signum == signal.SIGKILL and self.phase is Phase.ENDING else []

    def _on_time(self, now: float) -> list[Effect]:
        if now < self.deadline:
            return []
        return self._kill(now) if self.phase is Phase.ENDING else [self._finish()]

    def _terminate(self, signum: int, now: float) -> list[Effect]:
        self.phase = Phase.ENDING
        self.deadline = now + self._grace
        self._ended = tuple(sorted(self._running))
        return [SignalWorkers(self._ended, signum)]

    def _kill(self, now: float) -> list[Effect]:
        self.phase = Phase.KILLING
        self.deadline = now + self._grace
        return [SignalWorkers(tuple(sorted(self._running)), signal.SIGKILL)]

    def _finish(self) -> Outcome:
        self.phase = Phase.OVER
        self.deadline = math.inf
        return Outcome(
            exit_code=self._exit_code(),
            first_failure=self._first_failure,
            interrupted_by=self._interrupted_by,
            ended=self._ended,
            given_up=tuple(sorted(self._running)),
            stopped=self._stopped,
            failed_later=tuple(self._failed_later),
            succeeded=tuple(self._succeeded),
        )

    def _exit_code(self) -> int:
        if self._interrupted_by is not None:
            return 128 + self._interrupted_by
        if self._first_failure is None:
            return 0
        code = self._first_failure.code
        return code if code > 0 else 128 - code

    def __repr__(self) -> str:
        return f"<Supervisor {self.phase.value}, running {sorted(self._running)}>"
