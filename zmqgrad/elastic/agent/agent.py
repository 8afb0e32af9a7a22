"""The agent of one node: one thread with one loop over output, exits, signals, other agents and time.

Carries out what :mod:`zmqgrad.elastic.agent.lifecycle` decides. When :func:`run_agent` returns or raises, no
worker is left, nor any process that a worker has started in its session.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

from zmqgrad.elastic.agent.coordination import Coordinator
from zmqgrad.elastic.agent.events import Ask, Confirm, Join, Leave, ReportExits, ReportFailure
from zmqgrad.elastic.agent.group import WorkerGroup
from zmqgrad.elastic.agent.lease_guard import LeaseGuard
from zmqgrad.elastic.agent.lifecycle import (
    Effect,
    Event,
    GroupEnded,
    Hold,
    HoldEnded,
    LeaseLost,
    Lifecycle,
    Result,
    Say,
    StartWorkers,
)
from zmqgrad.elastic.agent.listening import Listener, write_all
from zmqgrad.elastic.agent.output import Screen
from zmqgrad.elastic.agent.ranks import Placement
from zmqgrad.elastic.agent.report import last_traceback, quoted
from zmqgrad.elastic.agent.signals import SignalInbox
from zmqgrad.elastic.agent.streams import OutputConfig
from zmqgrad.elastic.agent.supervision import Outcome, SignalReceived, StopWorkers
from zmqgrad.elastic.agent.workers import Tail, Worker
from zmqgrad.runtime.clock import MONOTONIC, Clock, Deadline

Tails = Callable[[int], Tail]
"""Returns the last stderr lines of a worker of the last group, by its rank."""


@dataclass(frozen=True)
class AgentSpec:
    """What an agent runs.

    Attributes:
        coordinator: connects it with the other agents. Closed at the end.
        start: starts the worker with a local rank, at its place in a round.
        error_lines: the traceback that a failed worker has written to its error file, by round and rank.
        output: where the output of the workers goes.
        say: tells the user what happens.
        max_restarts: of the job, after failures of workers.
        is_distributed: whether there may be other nodes.
        verbose: also announce the rounds of a single node.
        awaited: what joining a round waits for, if it waits for anything.
        begin_round: called before the workers of a round start.
    """

    coordinator: Coordinator
    start: Callable[[Placement, int], Worker]
    error_lines: Callable[[int, int], Sequence[str]]
    output: OutputConfig
    say: Callable[[str], None]
    max_restarts: int = 0
    is_distributed: bool = False
    verbose: bool = False
    awaited: str = ""
    begin_round: Callable[[Placement], object] = lambda place: None


def run_agent(spec: AgentSpec, signals: SignalInbox, clock: Clock = MONOTONIC) -> tuple[Result, Tails]:
    """Run the workers of this node until the job ends. Returns how, and the last stderr lines of each worker.

    The calling thread must not end before: the workers end with it.

    Args:
        spec: what to run.
        signals: to this process; it has been entered.

    Raises:
        OSError: if a worker cannot be started.
    """
    with ExitStack() as cleanup:
        cleanup.enter_context(closing(spec.coordinator))
        screen = Screen(partial(write_all, hurry=signals.stopping.fd), spec.output.terminals)
        listener = cleanup.enter_context(closing(Listener(screen, signals, spec.coordinator.events)))
        agent = cleanup.enter_context(closing(_Agent(spec, signals, listener, clock)))
        return agent.run(), agent.tail


class _Agent:
    def __init__(self, spec: AgentSpec, signals: SignalInbox, listener: Listener, clock: Clock) -> None:
        self._spec = spec
        self._signals = signals
        self._listener = listener
        self._clock = clock
        self._lifecycle = Lifecycle(spec.max_restarts, spec.is_distributed, spec.verbose)
        self._group: WorkerGroup | None = None
        self._place: Placement | None = None
        self._hold_until = math.inf
        self._lease_lost = False
        self._guard: LeaseGuard | None = None
        self._tails: dict[int, Tail] = {}

    def run(self) -> Result:
        """Run until the job ends."""
        result = self._apply(self._lifecycle.begin())
        while result is None:
            ready = self._listener.ready(self._timeout())
            # The lease comes first: an agent that was frozen must not do anything for its old round.
            result = self._check_lease()
            self._listener.show(ready)
            # Again, since showing may have blocked: workers that the guard has killed did not fail.
            result = result or self._check_lease() or self._step() or self._check_hold()
        return result

    def tail(self, rank: int) -> Tail:
        """The last stderr lines of a worker of the last group."""
        return self._tails.get(rank, Tail([]))

    def _timeout(self) -> float | None:
        deadline = self._hold_until if self._group is None else self._group.deadline
        if self._needs_lease():
            deadline = min(deadline, self._clock.now() + max(0.0, self._spec.coordinator.lease_left()))
        return Deadline(deadline, self._clock).timeout()

    def _needs_lease(self) -> bool:
        return self._lifecycle.has_lease and not self._lease_lost

    def _check_hold(self) -> Result | None:
        if self._clock.now() < self._hold_until:
            return None
        self._hold_until = math.inf
        return self._handle(HoldEnded())

    def _check_lease(self) -> Result | None:
        killed = self._guard is not None and self._guard.has_killed
        if self._needs_lease() and (killed or self._spec.coordinator.lease_left() <= 0):
            self._lease_lost = True
            return self._handle(LeaseLost())
        return None

    def _step(self) -> Result | None:
        """Process everything that has happened."""
        signals = [SignalReceived(signum) for signum in self._signals.take()]
        closed = self._listener.output_closed and not signals
        if self._group is not None and closed and self._group.is_running:
            signals.append(SignalReceived(signal.SIGPIPE))
        # First: a node that leaves must not tell the others that it lives, once its workers end.
        result = self._handle_all(signals)
        return result or self._check_group(signals) or self._handle_all(self._spec.coordinator.events.take())

    def _check_group(self, events: Sequence[SignalReceived | StopWorkers]) -> Result | None:
        outcome = None if self._group is None else self._group.handle(events)
        return None if outcome is None else self._on_group_ended(outcome)

    def _on_group_ended(self, outcome: Outcome) -> Result | None:
        group, self._group = self._group, None
        assert group is not None
        if outcome.first_failure is not None:
            self._check_lease()  # before the guard ends: workers that it has killed since did not fail
        self._end_guard()
        assert self._place is not None
        if not self._lease_lost:
            group.end_orphans()
        group.close()
        self._tails = {rank: group.tail(rank) for rank in self._place.ranks}
        return self._handle(GroupEnded(outcome, tuple(self._failure_lines(outcome))))

    def _failure_lines(self, outcome: Outcome) -> list[str]:
        """The traceback of the first failure, from stderr or from the error file."""
        if outcome.first_failure is None:
            return []
        assert self._place is not None
        rank = outcome.first_failure.rank
        lines = self._tails[rank].lines
        more = () if last_traceback(lines) else self._spec.error_lines(self._place.round, rank)
        if more:
            self._tails[rank] = Tail([*lines, *more])
        return quoted(self._tails[rank].lines)

    def _handle_all(self, events: Sequence[Event]) -> Result | None:
        for event in events:
            if (result := self._handle(event)) is not None:
                return result
        return None

    def _handle(self, event: Event) -> Result | None:
        return self._apply(self._lifecycle.handle(event))

    def _apply(self, effects: Sequence[Effect]) -> Result | None:
        coordinator = self._spec.coordinator
        for effect in effects:
            match effect:
                case Join():
                    if self._spec.awaited:
                        self._say(self._spec.awaited)
                    coordinator.carry_out(effect)
                case ReportFailure() | ReportExits() | Ask() | Confirm() | Leave():
                    coordinator.carry_out(effect)
                case StartWorkers(place):
                    self._start(place)
                case StopWorkers():
                    if (result := self._check_group([effect])) is not None:
                        return result
                case Hold():
                    self._hold_until = self._clock.now() + coordinator.notice_seconds()
                case Say(text):
                    self._say(text)
                case Result():
                    return effect
        return None

    def _say(self, text: str) -> None:
        self._listener.end_line()
        self._spec.say(text)

    def _start(self, place: Placement) -> None:
        self._place = place
        self._hold_until = math.inf
        self._lease_lost = False
        self._spec.begin_round(place)

        def start(rank: int) -> Worker:
            return self._spec.start(place, rank - place.first_rank)

        def on_success(rank: int) -> None:
            self._spec.coordinator.carry_out(ReportExits([rank], True))

        self._group = WorkerGroup(place.ranks, start, self._listener, on_success, self._clock)
        if self._spec.is_distributed:
            self._guard = LeaseGuard(self._spec.coordinator.lease_left, self._group.kill)

    def _end_guard(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.close()

    def close(self) -> None:
        """Kill the workers, after an error."""
        self._end_guard()
        if self._group is not None:
            self._group.close()
            self._group = None
