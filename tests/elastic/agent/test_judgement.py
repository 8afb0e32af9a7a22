"""Several agents judge failures together: whatever the order of events, a lost node costs no restart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.elastic.agent.events import (
    Ask,
    Asked,
    Confirm,
    Confirmed,
    CoordinatorEvent,
    Exited,
    Join,
    Joined,
    Leave,
    MembershipChanged,
    RemoteFailure,
    ReportExits,
    ReportFailure,
)
from zmqgrad.elastic.agent.lifecycle import Effect, Event, GroupEnded, Lifecycle, Phase
from zmqgrad.elastic.agent.ranks import NodeInfo, place
from zmqgrad.elastic.agent.supervision import Outcome, StopWorkers, WorkerExited

ERRORS = (("ValueError: no answer",), ("zmqgrad.errors.PeerLostError: w0 is gone",))


class Nodes:
    """Agents with one worker each, and the store of their round, which all see in the same order."""

    def __init__(self, count: int, max_restarts: int) -> None:
        infos = [NodeInfo(f"node{n}", "role", 1, 0, "10.0.0.1", 1) for n in range(count)]
        self.lifecycles = [Lifecycle(max_restarts, is_distributed=True) for _ in infos]
        self.store: list[CoordinatorEvent] = []
        self.seen = [0] * count
        self.dead: set[int] = set()
        self.ending: dict[int, tuple[str, ...]] = {}
        """The errors of the nodes whose other workers have not ended yet."""
        self.told: set[int] = set()
        self.ends: dict[int, list[Effect]] = {n: [] for n in range(count)}
        """How each node has left the round."""
        for n, lifecycle in enumerate(self.lifecycles):
            lifecycle.begin()
            lifecycle.handle(Joined(place(infos, n, 0)))

    def handle(self, n: int, event: Event) -> None:
        """Let a node handle ``event``, unless it is dead or has left the round."""
        if n in self.dead or self.ends[n]:
            return
        for effect in self.lifecycles[n].handle(event):
            match effect:
                case Ask(node_rank):
                    self._write_first(Asked(0, node_rank))
                case Confirm(node_rank):
                    self._write_first(Confirmed(0, node_rank))
                case ReportExits(ranks, succeeded):
                    self.store += [Exited(0, rank, succeeded) for rank in ranks]
                case ReportFailure(failure):
                    self._write_first(RemoteFailure(0, failure))
                case StopWorkers() if n not in self.ending:
                    self.handle(n, GroupEnded(Outcome(0, ended=(n,), stopped=True)))
                case Join() | Leave():
                    self.ends[n].append(effect)

    def _write_first(self, event: CoordinatorEvent) -> None:
        is_known = event in self.store if isinstance(event, Confirmed) else None
        if is_known or any(type(each) is type(event) and is_known is None for each in self.store):
            return
        self.store.append(event)

    def fail(self, n: int, error: tuple[str, ...]) -> None:
        """The worker of node ``n`` fails, if it runs. Others, which are not modelled, are ended then."""
        if self.lifecycles[n].phase is Phase.RUNNING:
            self.ending.setdefault(n, error)

    def end(self, n: int) -> None:
        """The last worker of a node on which one has failed ends."""
        if (error := self.ending.pop(n, None)) is not None:
            self.handle(n, GroupEnded(Outcome(1, WorkerExited(n, 1)), error))

    def lose(self, n: int) -> None:
        """Let a node find out that others are dead, if any are. It is told once in a round."""
        if self.dead and n not in self.told:
            self.told.add(n)
            self.handle(n, MembershipChanged(0, "a node was lost", "node"))

    def deliver(self, n: int) -> bool:
        """Let a node see the next change of the store. Returns whether there was one."""
        if n in self.dead or self.seen[n] == len(self.store):
            return False
        event = self.store[self.seen[n]]
        self.seen[n] += 1
        if not (isinstance(event, RemoteFailure) and event.failure.node_rank == n):
            self.handle(n, event)
        return True

    def settle(self) -> None:
        """Let all nodes see everything, and those that are dead be found lost."""
        for n in range(len(self.lifecycles)):
            self.end(n)
        while any([self.deliver(n) for n in range(len(self.lifecycles))]):
            pass
        for n in range(len(self.lifecycles)):
            self.lose(n)


STEPS = ["fail", "end", "deliver", "lose"]
steps = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(STEPS), st.sampled_from(ERRORS)))


def run(nodes: Nodes, plan: list[tuple[int, str, tuple[str, ...]]]) -> None:
    for number, what, error in plan:
        n = number % len(nodes.lifecycles)
        match what:
            case "fail":
                nodes.fail(n, error)
            case "end":
                nodes.end(n)
            case "deliver":
                nodes.deliver(n)
            case "lose":
                nodes.lose(n)


@given(count=st.integers(2, 4), victim=st.integers(0, 3), plan=steps)
def test_a_lost_node_costs_no_restart_whatever_it_causes(
    count: int, victim: int, plan: list[tuple[int, str, tuple[str, ...]]]
) -> None:
    nodes = Nodes(count, max_restarts=0)
    nodes.dead.add(victim % count)
    run(nodes, plan)
    nodes.settle()
    assert not any(isinstance(event, RemoteFailure) for event in nodes.store)
    for n in set(range(count)) - nodes.dead:
        assert nodes.ends[n] == [Join(0)]


@given(count=st.integers(2, 4), plan=steps)
def test_a_failure_counts_once_all_have_replied(
    count: int, plan: list[tuple[int, str, tuple[str, ...]]]
) -> None:
    """Without waiting for the time in which a node would be found lost."""
    nodes = Nodes(count, max_restarts=1)
    run(nodes, plan)
    nodes.fail(0, ERRORS[0])
    nodes.settle()
    caused = any(isinstance(event, RemoteFailure) for event in nodes.store)
    has_cause = any(isinstance(event, Asked) for event in nodes.store)
    assert caused or not has_cause
    for n in range(count):
        assert nodes.ends[n] == ([Join(1)] if caused else [])
