"""Decisions of an agent over all rounds of its job. Pure: an event goes in, a list of effects comes out.

The rules:

1. When the round is complete, the agent starts its workers.
2. A worker that fails on any node ends the round. While restarts are left, all agents join the next round;
   otherwise the job fails. Failures of several nodes in one round cost one restart.
3. Nodes that join or are lost end the round, too. That costs no restart, nor does what fails from then on.
   Those that join end it for no node whose workers have succeeded: it may be that all have.
4. An agent without a lease kills its workers at once: the others may have begun a round without it.
5. When the workers of this node have succeeded, the agent waits for those of the other nodes. If these fail,
   or it loses its lease, it runs its workers again.
6. An agent that received a signal leaves the job; the others go on without it.
7. A failure counts only if no node was lost, whatever error the worker had: it is held, and all agents are
   asked whether they live. Each replies at once, unless it has received a signal. The first agent that asks
   decides for the others: when all have replied, the failure counts; otherwise, a lost node follows.
8. A worker that fails because it lost a peer or the store is most likely not the first to fail: its agent
   asks nobody, and the failure counts if the lost peer ended with success, or if all workers have ended and
   none failed for another reason. Otherwise another failure or a lost node follows.
9. The loss of an agent is noticed by time: after that time, a failure that is held counts.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass, replace

from zmqgrad.elastic.agent.consequences import lost_peer
from zmqgrad.elastic.agent.events import (
    Ask,
    Asked,
    Confirm,
    Confirmed,
    CoordinatorEvent,
    CoordinatorRequest,
    Exited,
    Failure,
    Join,
    Joined,
    Leave,
    Left,
    MembershipChanged,
    Notice,
    RemoteFailure,
    RendezvousFailed,
    ReportExits,
    ReportFailure,
)
from zmqgrad.elastic.agent.ranks import Placement
from zmqgrad.elastic.agent.supervision import Outcome, SignalReceived, StopWorkers
from zmqgrad.errors import RendezvousGracefulExitError, RendezvousTimeoutError

EXIT_FAILED = 1


@dataclass(frozen=True)
class GroupEnded:
    """Event: no worker of this node is left. ``lines``: the traceback of the first failure."""

    outcome: Outcome
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class HoldEnded:
    """Event: the time of the last :class:`Hold` is over."""


@dataclass(frozen=True)
class LeaseLost:
    """Event: this node may not belong to its round any more."""


Event = CoordinatorEvent | GroupEnded | HoldEnded | LeaseLost | SignalReceived


@dataclass(frozen=True)
class StartWorkers:
    """Effect: start the workers."""

    place: Placement


@dataclass(frozen=True)
class Hold:
    """Effect: wait until a lost node would have been noticed, then send HoldEnded."""


@dataclass(frozen=True)
class Say:
    """Effect: tell the user."""

    text: str


@dataclass(frozen=True)
class Result:
    """The last effect: how the job ended for this node.

    Attributes:
        outcome: of the last group of workers; None: no group has run.
        failure: of the worker that failed first, on any node.
        error: why the job cannot go on, if no worker failed.
        at_fault: the node, or the worker, whose fault came first; empty: unknown, or nothing went wrong.
        tried: what was done about it.
    """

    exit_code: int
    outcome: Outcome | None = None
    failure: Failure | None = None
    error: Exception | None = None
    interrupted_by: int | None = None
    at_fault: str = ""
    tried: str = ""


Effect = CoordinatorRequest | StartWorkers | StopWorkers | Hold | Say | Result


class Phase(enum.Enum):
    """What the agent does."""

    JOINING = "joining"
    RUNNING = "running"
    STOPPING = "stopping"
    HOLDING = "holding"
    SUCCEEDED = "succeeded"
    LEAVING = "leaving"
    OVER = "over"


class Lifecycle:
    """The state of one agent.

    Args:
        max_restarts: of the job, after failures of workers.
        is_distributed: whether there may be other nodes.
        verbose: also announce the rounds of a single node.
    """

    def __init__(self, max_restarts: int, is_distributed: bool, verbose: bool = False) -> None:
        self.phase = Phase.JOINING
        self._max_restarts = max_restarts
        self._is_distributed = is_distributed
        self._verbose = verbose
        self._place: Placement | None = None
        self._restarts = 0
        self._failure: Failure | None = None
        self._held: GroupEnded | None = None
        self._exits: dict[int, bool] = {}  # whether each worker of the round that ended has succeeded
        self._asker: int | None = None  # the node that has asked first in this round
        self._alive: set[int] = set()  # the nodes that have replied
        self._has_signal = False
        self._has_succeeded = False  # the workers of this node have; whether the others did is unknown
        self._at_fault = ""  # what went wrong first since the last round began
        self._outcome: Outcome | None = None
        self._result: Result | None = None

    def begin(self) -> list[Effect]:
        """The first effects."""
        return [Join(0)]

    @property
    def has_lease(self) -> bool:
        """Whether workers run, or the agent waits for what happens in this round. Both need a lease."""
        return self.phase in _IN_ROUND

    def handle(self, event: Event) -> list[Effect]:
        """Process ``event`` and return the effects."""
        if self.phase is Phase.OVER:
            return []
        match event:
            case Joined(place):
                return self._on_joined(place)
            case MembershipChanged(round):
                return self._on_membership(event) if self._is_current(round) else []
            case RemoteFailure(round, failure):
                return self._on_remote_failure(failure) if self._is_current(round) else []
            case Exited(round, rank, succeeded):
                return self._on_exited(rank, succeeded) if self._is_current(round) else []
            case Asked(round, node_rank):
                return self._on_asked(node_rank) if self._is_current(round) else []
            case Confirmed(round, node_rank):
                return self._on_confirmed(node_rank) if self._is_current(round) else []
            case Notice(text):
                return [Say(text)] if self.phase is Phase.JOINING else []
            case RendezvousFailed(error):
                return self._on_rendezvous_failed(error)
            case GroupEnded():
                return self._on_group_ended(event)
            case HoldEnded():
                return self._on_hold_ended()
            case LeaseLost():
                return self._on_lease_lost()
            case SignalReceived(signum):
                return self._on_signal(signum)
            case Left():
                return self._finish() if self.phase is Phase.LEAVING else []

    def _is_current(self, round: int) -> bool:
        return self.phase in _IN_ROUND and self._place is not None and self._place.round == round

    def _on_joined(self, place: Placement) -> list[Effect]:
        if self.phase is not Phase.JOINING:
            return []
        self.phase = Phase.RUNNING
        self._place = place
        self._restarts = place.restarts
        self._failure = None
        self._exits = {}
        self._asker, self._alive = None, set()
        self._has_succeeded = False
        self._at_fault = ""
        said: list[Effect] = []
        if self._is_distributed:
            said = [Say(describe(place))]
        elif self._verbose:
            said = [Say(f"{place.world_size} workers meet at {place.master_addr}:{place.master_port}")]
        return [*said, StartWorkers(place)]

    def _on_membership(self, change: MembershipChanged) -> list[Effect]:
        self._at_fault = self._at_fault or change.lost
        if self.phase is Phase.STOPPING or (change.joined and self.phase is Phase.SUCCEEDED):
            return []
        if self.phase in (Phase.HOLDING, Phase.SUCCEEDED):
            return [Say(change.text), *self._join()]
        self.phase = Phase.STOPPING
        return [Say(change.text), StopWorkers()]

    def _on_remote_failure(self, failure: Failure) -> list[Effect]:
        if self._failure is not None:
            return []
        self._failure = failure
        self._at_fault = self._at_fault or _describe(failure)
        said: list[Effect] = [] if self._is_final(failure) else [Say(self._describe_restart(failure))]
        if self.phase in (Phase.HOLDING, Phase.SUCCEEDED):
            return [*said, *self._after_failure()]
        if self.phase is Phase.STOPPING:
            return said
        self.phase = Phase.STOPPING
        return [*said, StopWorkers()]

    def _on_exited(self, rank: int, succeeded: bool) -> list[Effect]:
        self._exits[rank] = succeeded
        return self._check_exits()

    def _check_exits(self) -> list[Effect]:
        """End the job or the hold, if the workers of all nodes that have ended allow it."""
        assert self._place is not None
        all_ended = len(self._exits) == self._place.world_size
        if self.phase is Phase.SUCCEEDED and all_ended and all(self._exits.values()):
            return self._leave(Result(0, self._outcome), close=True)
        if self.phase is Phase.HOLDING and self._held is not None:
            # All agents see the exits in the same order: the node that failed first reports, the others wait.
            first = next((rank for rank, succeeded in self._exits.items() if not succeeded), None)
            peer = lost_peer(self._held.lines)
            if (all_ended and first in self._place.ranks) or (peer is not None and self._exits.get(peer)):
                return self._on_hold_ended()
        return []

    def _on_asked(self, node_rank: int) -> list[Effect]:
        self._asker = node_rank
        if self._has_signal or self.phase is Phase.STOPPING or self._place is None:
            return []
        return [Confirm(self._place.node_rank)]

    def _on_confirmed(self, node_rank: int) -> list[Effect]:
        assert self._place is not None
        self._alive.add(node_rank)
        is_decided = len(self._alive) == self._place.num_nodes and self._asker == self._place.node_rank
        return self._on_hold_ended() if is_decided else []

    def _on_rendezvous_failed(self, error: Exception) -> list[Effect]:
        if self.phase is not Phase.JOINING:
            return []  # in a round the lease decides; while leaving, Left follows
        if isinstance(error, RendezvousGracefulExitError):
            said = Say("the job has ended, and did not need this node")
        elif self._has_succeeded and not isinstance(error, RendezvousTimeoutError):
            # The agent that served the store leaves last, so it has most likely seen all succeed.
            said = Say(f"the workers of this node have succeeded; the other nodes are unknown: {error}")
        else:
            return self._leave(Result(EXIT_FAILED, error=error), close=False)
        return [said, *self._leave(Result(0, self._outcome), close=False)]

    def _on_lease_lost(self) -> list[Effect]:
        if not self.has_lease:
            return []
        self._at_fault = self._at_fault or "this node, which did not reach the others in time"
        if self.phase in (Phase.HOLDING, Phase.SUCCEEDED):
            self._has_succeeded = self.phase is Phase.SUCCEEDED
            return [
                Say("the other nodes were not reached in time and may go on without this one"),
                *self._join(),
            ]
        said = self.phase is Phase.STOPPING
        self.phase = Phase.STOPPING
        text = (
            "the other nodes were not reached in time and may go on without this node: its workers are killed"
        )
        return [*([] if said else [Say(text)]), StopWorkers(signal.SIGKILL)]

    def _on_signal(self, signum: int) -> list[Effect]:
        self._has_signal = True
        if self.phase in (Phase.RUNNING, Phase.STOPPING):
            return []
        if self.phase is Phase.LEAVING:
            return self._finish() if self._result is not None else []
        if self.phase is Phase.HOLDING and self._held is not None:
            return self._leave_after_failure(self._held)
        return self._leave(Result(128 + signum, self._outcome, interrupted_by=signum), close=False)

    def _leave_after_failure(self, event: GroupEnded) -> list[Effect]:
        """Leave because of a signal that came when a worker had failed, which is what is told."""
        result = Result(event.outcome.exit_code, event.outcome, self._fail(event, final=True))
        return self._leave(result, close=False)

    def _on_group_ended(self, event: GroupEnded) -> list[Effect]:
        outcome = self._outcome = event.outcome
        if outcome.interrupted_by is not None:
            result = Result(outcome.exit_code, outcome, interrupted_by=outcome.interrupted_by)
            return self._leave(result, close=False)
        if self._has_signal:
            return self._leave_after_failure(event)
        if self._failure is not None:
            return self._after_failure()
        if self.phase is Phase.STOPPING:  # the round is over: what failed meanwhile does not count
            return self._join()
        if outcome.first_failure is not None:
            return self._hold(event)
        if not self._is_distributed:
            return self._leave(Result(0, outcome), close=True)
        self.phase = Phase.SUCCEEDED
        return self._check_exits()

    def _hold(self, event: GroupEnded) -> list[Effect]:
        """Find out whether a failure is the consequence of a lost node, or of another failure."""
        failed, place = event.outcome.first_failure, self._place
        assert failed is not None
        assert place is not None
        self.phase, self._held = Phase.HOLDING, event
        if place.num_nodes == 1:
            return self._on_hold_ended()
        if lost_peer(event.lines) is None:
            return [Hold(), Ask(place.node_rank)]
        text = (
            f"worker {failed.rank} failed because it lost a peer or the store: waiting for news of its node"
        )
        return [Say(text), Hold(), ReportExits(place.ranks, succeeded=False), *self._check_exits()]

    def _on_hold_ended(self) -> list[Effect]:
        if self.phase is not Phase.HOLDING or self._held is None:
            return []
        return self._on_local_failure(self._held)

    def _on_local_failure(self, event: GroupEnded) -> list[Effect]:
        failure = self._fail(event, self._restarts >= self._max_restarts)
        said: list[Effect] = [] if failure.final else [Say(self._describe_restart(failure))]
        report: list[Effect] = [ReportFailure(failure)] if self._is_distributed else []
        return [*said, *report, *self._after_failure()]

    def _fail(self, event: GroupEnded, final: bool) -> Failure:
        """Note that a failure on this node counts."""
        failed, place = event.outcome.first_failure, self._place
        assert failed is not None
        assert place is not None
        self._failure = Failure(failed.rank, place.node_rank, failed.code, final, event.lines, place.address)
        self._at_fault = self._at_fault or _describe(self._failure)
        return self._failure

    def _after_failure(self) -> list[Effect]:
        """Join the next round after a failure, or end the job."""
        failure = self._failure
        assert failure is not None
        if self._is_final(failure):
            return self._leave(Result(failure.exit_code, self._outcome, failure), close=True)
        self._restarts += 1
        return self._join()

    def _is_final(self, failure: Failure) -> bool:
        """Whether the job ends. If nodes allow different numbers of restarts, the smallest counts."""
        return failure.final or self._restarts >= self._max_restarts

    def _join(self) -> list[Effect]:
        self.phase = Phase.JOINING
        return [Join(self._restarts)]

    def _leave(self, result: Result, close: bool) -> list[Effect]:
        self.phase = Phase.LEAVING
        if self._is_distributed and self._at_fault and (result.failure or result.error):
            tried = f"{self._restarts} of {self._max_restarts} restarts"
            if result.error is not None:
                tried = f"to join the next round, after {tried}"
            result = replace(result, at_fault=self._at_fault, tried=tried)
        self._result = result
        return [Leave(close)]

    def _finish(self) -> list[Effect]:
        self.phase = Phase.OVER
        assert self._result is not None
        return [self._result]

    def _describe_restart(self, failure: Failure) -> str:
        where = f" of node {failure.node_rank}" if self._is_distributed else ""
        how = describe_code(failure.code)
        restart = f"restart {self._restarts + 1} of {self._max_restarts}"
        return f"worker {failure.rank}{where} failed ({how}), {restart}"

    def __repr__(self) -> str:
        return f"<Lifecycle {self.phase.value}, {self._restarts} of {self._max_restarts} restarts>"


_IN_ROUND = (Phase.RUNNING, Phase.STOPPING, Phase.HOLDING, Phase.SUCCEEDED)


def _describe(failure: Failure) -> str:
    where = f"node {failure.node_rank}{' at ' if failure.host else ''}{failure.host}"
    return f"worker {failure.rank} of {where} ({describe_code(failure.code)})"


def describe_code(code: int) -> str:
    """An exit code in words; minus a signal: that killed the worker."""
    return f"exit code {code}" if code > 0 else f"killed by {signal_name(-code)}"


def describe(place: Placement) -> str:
    """One line about the place of a node."""
    first, last = place.ranks[0], place.ranks[-1]
    workers = f"worker {first}" if first == last else f"workers {first} to {last}"
    node = f"round {place.round}: node {place.node_rank} of {place.num_nodes}"
    return (
        f"{node} has {workers} of {place.world_size}, which meet at {place.master_addr}:{place.master_port}"
    )


def signal_name(signum: int) -> str:
    """The name of a signal (SIGTERM for 15), or its number if it has none."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
