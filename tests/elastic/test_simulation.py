"""Random histories of whole rendezvous: nodes that join, stall, die and return, with clocks that drift."""

from __future__ import annotations

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.elastic.simulation import DriftingClock, Fault, Phase, SimulatedAgent, SimulatedBackend
from zmqgrad.elastic.operators import Action
from zmqgrad.elastic.settings import RendezvousSettings, RendezvousTimeout
from zmqgrad.elastic.state import NodeDesc, RendezvousState, decode, encode
from zmqgrad.elastic.transitions import apply

INTERVAL, ATTEMPTS = 5.0, 3


class Rendezvous(RuleBasedStateMachine):
    """Steps agents in any order, and checks what they agree on."""

    @initialize(low=st.integers(1, 3), more=st.integers(0, 3))
    def begin(self, low: int, more: int) -> None:
        self.settings = RendezvousSettings(
            "job", low, low + more, RendezvousTimeout(join=300.0, last_call=10.0), INTERVAL, ATTEMPTS
        )
        self.backend = SimulatedBackend()
        self.agents: list[SimulatedAgent] = []
        self.checked = 0
        self.previous = RendezvousState()
        self.members: set[NodeDesc] = set()  # of the last complete round, and present ever since

    @rule(start=st.floats(-1e6, 1e6), rate=st.floats(0.95, 1.05))
    def a_node_comes(self, start: float, rate: float) -> None:
        if len(self.agents) < 7:
            number = len(self.agents)
            self.agents.append(
                SimulatedAgent(number, self.backend, self.settings, DriftingClock(start, rate))
            )

    @rule(which=st.integers(0, 6), times=st.integers(1, 8))
    def a_node_runs(self, which: int, times: int) -> None:
        if which < len(self.agents):
            for _ in range(times):
                self.agents[which].step()

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0]))
    def all_run_for_a_while(self, seconds: float) -> None:
        for agent in self.agents:
            agent.clock.advance(seconds)
            agent.step()

    @rule(seconds=st.floats(0.0, 30.0))
    def all_stall(self, seconds: float) -> None:
        for agent in self.agents:
            agent.clock.advance(seconds)

    @rule(which=st.integers(0, 6), times=st.integers(1, 25))
    def one_stalls_while_the_others_run(self, which: int, times: int) -> None:
        for _ in range(times):
            for number, agent in enumerate(self.agents):
                agent.clock.advance(1.0)
                if number != which:
                    agent.step()

    @rule(which=st.integers(0, 6))
    def a_node_dies(self, which: int) -> None:
        if which < len(self.agents):
            self.agents[which].phase = Phase.TIMED_OUT

    @rule(writes=st.integers(1, 3))
    def writes_lose(self, writes: int) -> None:
        self.backend.lose_next = writes

    @rule(after=st.integers(0, 6), fault=st.sampled_from(Fault))
    def a_request_fails(self, after: int, fault: Fault) -> None:
        self.backend.faults[self.backend.requests + after] = fault

    @rule()
    def closed_by_a_node(self) -> None:
        if len(self.agents) > 5:  # rarely: nothing happens afterwards
            state = self.backend.state
            apply(Action.MARK_RENDEZVOUS_CLOSED, state, self.agents[0].node, self.settings)
            self.backend.history.append(encode(state))

    # ---- what must hold ---------------------------------------------------------------------------------

    @invariant()
    def every_state_follows_from_the_one_before(self) -> None:
        for data in self.backend.history[self.checked :]:
            state, before = decode(data), self.previous
            assert state.round >= before.round
            assert state.closed >= before.closed, "closed stays closed"
            assert len(state.participants) <= self.settings.max_nodes
            assert not set(state.wait_list) & set(state.participants)
            assert len(state.wait_list) == len(set(state.wait_list))
            assert {*state.participants, *state.wait_list} == set(state.last_heartbeats)
            if state.complete and not (before.complete and before.round == state.round):
                assert len(state.participants) >= self.settings.min_nodes
                if len(state.participants) == self.settings.max_nodes:
                    assert not self.members & set(state.wait_list), "a spare displaced a living node"
                self.members = set(state.participants)
                assert sorted(state.participants.values()) == list(range(len(state.participants)))
                for node, rank in state.participants.items():
                    kept = before.completed_ranks.get(node)
                    assert kept is None or kept >= len(state.participants) or rank == kept
            elif state.complete:
                assert state.completed_ranks == before.completed_ranks, "a complete round does not change"
                assert state.participants.items() <= before.participants.items()
            self.members &= {*state.participants, *state.wait_list}
            self.previous = state
        self.checked = len(self.backend.history)

    @invariant()
    def all_nodes_of_a_round_agree(self) -> None:
        rounds: dict[int, dict[object, int]] = {}
        for agent in self.agents:
            for number, ranks in agent.formed:
                assert agent.node in ranks
                assert rounds.setdefault(number, dict(ranks)) == ranks, "no split round"

    @invariant()
    def no_node_is_removed_while_its_lease_lasts(self) -> None:
        for agent in self.agents:
            if agent.lease_left() > 0:
                assert agent.node in self.backend.state.participants

    def teardown(self) -> None:
        """Left alone, the living nodes form a group: the dead are removed, the waiting are served."""
        if not hasattr(self, "agents"):
            return
        living = [a for a in self.agents if a.phase not in (Phase.TIMED_OUT, Phase.CLOSED)]
        self.backend.lose_next = 0
        self.backend.faults.clear()
        for _ in range(1500):
            for agent in living:
                agent.clock.advance(0.25)
                agent.step()
            self.every_state_follows_from_the_one_before()
            self.all_nodes_of_a_round_agree()
            self.no_node_is_removed_while_its_lease_lasts()
        state = self.backend.state
        if state.closed:
            assert all(a.phase in (Phase.CLOSED, Phase.RUNNING, Phase.TIMED_OUT) for a in living)
            return
        running = {a.node for a in living if a.phase is Phase.RUNNING}
        if len(living) >= self.settings.min_nodes:
            assert len(running) == min(len(living), self.settings.max_nodes), (living, state)
            assert set(state.participants) == running
        else:
            assert not running or state.complete


TestRendezvous = pytest.mark.timeout(400)(
    Rendezvous.TestCase
)  # hypothesis shrinks a failure for 300 s at most
TestRendezvous.settings = hypothesis_settings(stateful_step_count=40)


@pytest.mark.slow
@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("lasts", [1, 4, 60])
def test_a_backend_that_fails_at_any_step_never_makes_two_groups(fault: Fault, lasts: int) -> None:
    """Two nodes form a group, one joins later, one dies; requests fail from the k-th one on, for each k."""
    k = 0
    while True:
        backend = SimulatedBackend()
        backend.faults = dict.fromkeys(range(k, k + lasts), fault)
        _run_a_job(backend)
        if k > backend.requests:
            return
        k += 1 if lasts == 1 else 7


def _run_a_job(backend: SimulatedBackend) -> None:
    """Runs the agents, and checks that they agree and that those which live form a group."""
    settings = RendezvousSettings(
        "job", 1, 3, RendezvousTimeout(join=300.0, last_call=2.0), INTERVAL, ATTEMPTS
    )
    agents: list[SimulatedAgent] = []
    for step in range(85):
        if step in (0, 10):
            agents += [
                SimulatedAgent(n, backend, settings, DriftingClock(n, 1.0))
                for n in ((0, 1), (2,))[step // 10]
            ]
        if step == 25:
            agents[1].phase = Phase.TIMED_OUT
        if step == 55:
            backend.faults.clear()
        for agent in agents:
            agent.clock.advance(1.0)
            agent.step()
            assert agent.lease_left() <= 0 or agent.node in backend.state.participants
    rounds: dict[int, object] = {}
    for agent in agents:
        for number, ranks in agent.formed:
            assert rounds.setdefault(number, ranks) == ranks, "two groups of one round"
    left = (agents[0], agents[2])
    assert all(agent.phase is Phase.RUNNING for agent in left)
    assert backend.state.participants.keys() == {agent.node for agent in left}


def test_a_heartbeat_whose_reply_was_lost_renews_the_lease_from_its_first_attempt() -> None:
    backend, clock = SimulatedBackend(), DriftingClock(0.0, 1.0)
    agent = SimulatedAgent(0, backend, RendezvousSettings("job", 1, 1), clock)
    while agent.phase is not Phase.RUNNING:
        agent.step()
    clock.advance(INTERVAL)
    backend.faults[backend.requests + 1] = Fault.REPLY_LOST  # of the write; the read comes first
    for _ in range(2):
        agent.step()
    before = agent.lease_left()
    clock.advance(3.0)
    for _ in range(3):
        agent.step()
    assert not backend.faults
    assert agent.lease_left() <= before + INTERVAL - 3.0, "other nodes count from the first attempt"
