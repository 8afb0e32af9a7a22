"""What an agent is notified of by the other agents of its job, and what it reports to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zmqgrad.elastic.agent.ranks import Placement, Published


@dataclass(frozen=True)
class Failure(Published):
    """The failure of a worker.

    Args:
        rank: of the worker.
        node_rank: of its node.
        code: its exit code, or minus the signal that killed it.
        final: whether the job ends, because no restart is left.
        lines: its traceback, or the end of its stderr.
        host: address of its node.
    """

    rank: int
    node_rank: int
    code: int
    final: bool
    lines: tuple[str, ...] = ()
    host: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lines", tuple(self.lines))  # JSON has lists

    @property
    def exit_code(self) -> int:
        """The exit code of the launcher: 128 + the signal, as in a shell."""
        return self.code if self.code > 0 else 128 - self.code


@dataclass(frozen=True)
class Joined:
    """Event: the round is complete, and this is the place of this node."""

    place: Placement


@dataclass(frozen=True)
class MembershipChanged:
    """Event: nodes joined or left, so another round must begin.

    Args:
        round: that is over.
        text: what happened.
        lost: the nodes that left or were lost; empty: none.
        joined: whether nodes have only joined. It may be posted again, or be followed by a loss.
    """

    round: int
    text: str
    lost: str = ""
    joined: bool = False


@dataclass(frozen=True)
class RemoteFailure:
    """Event: a worker of another node has failed."""

    round: int
    failure: Failure


@dataclass(frozen=True)
class Exited:
    """Event: a worker of any node has ended by itself. A failure that is the first is a RemoteFailure, too.

    Args:
        round: in which it ran.
        rank: of the worker.
        succeeded: otherwise, it or a worker of its node failed because it lost a peer or the store.
    """

    round: int
    rank: int
    succeeded: bool


@dataclass(frozen=True)
class Asked:
    """Event: a worker of node ``node_rank`` has failed, which asks all nodes whether they live."""

    round: int
    node_rank: int


@dataclass(frozen=True)
class Confirmed:
    """Event: node ``node_rank`` has replied to the question. So it was alive after the failure."""

    round: int
    node_rank: int


@dataclass(frozen=True)
class Notice:
    """Event: what joining waits for, as text for the user."""

    text: str


@dataclass(frozen=True)
class RendezvousFailed:
    """Event: the other agents cannot be reached, or refuse this one."""

    error: Exception


@dataclass(frozen=True)
class Left:
    """Event: this agent has left the job, and no other agent needs it."""


CoordinatorEvent = (
    Joined | MembershipChanged | RemoteFailure | Exited | Asked | Confirmed | Notice | RendezvousFailed | Left
)


@dataclass(frozen=True)
class Join:
    """Join the next round. Posts Joined or RendezvousFailed. ``restarts``: of the job so far."""

    restarts: int


@dataclass(frozen=True)
class ReportFailure:
    """Tell the other agents of the round about a failure on this node."""

    failure: Failure


@dataclass(frozen=True)
class ReportExits:
    """Tell all agents of the round how workers of this node ended. Posts :class:`Exited` for all workers.

    What was reported of a worker before stays.
    """

    ranks: Sequence[int]
    succeeded: bool


@dataclass(frozen=True)
class Ask:
    """Ask all agents of the round whether they live, unless one has. Posts :class:`Asked` at each agent."""

    node_rank: int


@dataclass(frozen=True)
class Confirm:
    """Reply that this agent, of node ``node_rank``, lives. Posts :class:`Confirmed` at each."""

    node_rank: int


@dataclass(frozen=True)
class Leave:
    """Leave the job. ``close``: it is over for all nodes. Posts :class:`Left`."""

    close: bool


CoordinatorRequest = Join | ReportFailure | ReportExits | Ask | Confirm | Leave
"""What an agent has its coordinator do."""
