"""Decisions of the launcher: when the group ends, which workers to signal, and the exit code.

Pure. An event and the time go in, a list of effects comes out; processes and signals are the business
of :mod:`zmqgrad.cli.launch`. The rules:

1. The group ends well when every worker has left with exit code 0.
2. The first worker that leaves otherwise decides the exit code, and the others are ended.
3. A signal to the launcher ends all workers; the exit code is then 128 + its number.
4. To end workers is to signal them, to kill after a grace period those that are left, and to give up,
   saying so, on those that even this does not move.
5. A second signal means "at once": the grace period is over.
"""

from __future__ import annotations

import enum
import math
import signal
from collections.abc import Collection
from dataclasses import dataclass

GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL, and between SIGKILL and giving up on a worker."""


@dataclass(frozen=True)
class WorkerExited:
    """Event: a worker has exited. ``code`` as ``subprocess`` has it: minus the signal that killed it."""

    rank: int
    code: int


@dataclass(frozen=True)
class SignalReceived:
    """Event: the launcher itself was told to stop."""

    signum: int


@dataclass(frozen=True)
class TimePassed:
    """Event: time has passed."""


Event = WorkerExited | SignalReceived | TimePassed


@dataclass(frozen=True)
class SignalWorkers:
    """Effect: send ``signum`` to these workers and their child processes."""

    ranks: tuple[int, ...]
    signum: int


@dataclass(frozen=True)
class Outcome:
    """The last effect: the result. ``ended`` were still running when the end began."""

    exit_code: int
    first_failure: WorkerExited | None = None
    interrupted_by: int | None = None
    ended: tuple[int, ...] = ()
    given_up: tuple[int, ...] = ()


Effect = SignalWorkers | Outcome


class Phase(enum.Enum):
    """Phases of a group, in order; some may be skipped."""

    RUNNING = "running"
    ENDING = "ending"
    KILLING = "killing"
    OVER = "over"


class Supervisor:
    """The state of one group of workers."""

    def __init__(self, ranks: Collection[int], grace: float = GRACE) -> None:
        self.phase = Phase.RUNNING
        self.deadline = math.inf
        """When to send TimePassed at the latest; infinite if not needed."""
        self._running = set(ranks)
        self._grace = grace
        self._first_failure: WorkerExited | None = None
        self._interrupted_by: int | None = None
        self._ended: tuple[int, ...] = ()

    @property
    def is_running(self) -> bool:
        """Whether the end has not begun yet."""
        return self.phase is Phase.RUNNING

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Process ``event`` at ``now`` (monotonic seconds) and return the effects."""
        if self.phase is Phase.OVER:
            return []
        match event:
            case WorkerExited():
                return self._exited(event, now)
            case SignalReceived(signum):
                return self._interrupted(signum, now)
            case TimePassed():
                return self._later(now)

    def _exited(self, event: WorkerExited, now: float) -> list[Effect]:
        self._running.discard(event.rank)
        failed = event.code != 0 and self.phase is Phase.RUNNING
        if failed:
            self._first_failure = event
        if not self._running:
            return [self._over()]
        return self._end(signal.SIGTERM, now) if failed else []

    def _interrupted(self, signum: int, now: float) -> list[Effect]:
        if self.phase is not Phase.RUNNING:
            return self._kill(now) if self.phase is Phase.ENDING else []
        self._interrupted_by = signum
        # What a terminal would have sent, so that a worker sees its KeyboardInterrupt; else plain SIGTERM.
        return self._end(signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM, now)

    def _later(self, now: float) -> list[Effect]:
        if now < self.deadline:
            return []
        return self._kill(now) if self.phase is Phase.ENDING else [self._over()]

    def _end(self, signum: int, now: float) -> list[Effect]:
        self.phase = Phase.ENDING
        self.deadline = now + self._grace
        self._ended = tuple(sorted(self._running))
        return [SignalWorkers(self._ended, signum)]

    def _kill(self, now: float) -> list[Effect]:
        self.phase = Phase.KILLING
        self.deadline = now + self._grace
        return [SignalWorkers(tuple(sorted(self._running)), signal.SIGKILL)]

    def _over(self) -> Outcome:
        self.phase = Phase.OVER
        self.deadline = math.inf
        return Outcome(
            exit_code=self._exit_code(),
            first_failure=self._first_failure,
            interrupted_by=self._interrupted_by,
            ended=self._ended,
            given_up=tuple(sorted(self._running)),
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
