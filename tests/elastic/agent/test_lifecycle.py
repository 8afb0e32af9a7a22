"""The rules at the head of elastic/agent/lifecycle.py, one by one, and what holds whatever happens."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.elastic.agent.consequences import UNKNOWN, lost_peer
from zmqgrad.elastic.agent.events import (
    Exited,
    Failure,
    Joined,
    Left,
    MembershipChanged,
    RemoteFailure,
    RendezvousFailed,
)
from zmqgrad.elastic.agent.lifecycle import (
    Effect,
    Event,
    GroupEnded,
    Hold,
    HoldEnded,
    Interrupted,
    Join,
    LeaseLost,
    Leave,
    Lifecycle,
    Phase,
    ReportExits,
    ReportFailure,
    Result,
    Say,
    StartWorkers,
    StopWorkers,
)
from zmqgrad.elastic.agent.ranks import NodeInfo, Placement, place
from zmqgrad.elastic.agent.supervision import Outcome, WorkerExited
from zmqgrad.errors import RendezvousConnectionError

SUCCESS = GroupEnded(Outcome(0))
FAILED = GroupEnded(Outcome(1, WorkerExited(2, 1)), ("the reason",))
LOST_PEER = GroupEnded(FAILED.outcome, ("Traceback", "zmqgrad.errors.PeerLostError: w0 (worker 0) is gone"))
LOST_STORE = GroupEnded(
    FAILED.outcome,
    ("zmqgrad.errors.RpcTimeoutError: w1: shutdown gave up: the store no longer replies; w0 has ended",),
)
HELD: list[Effect] = [Hold(), ReportExits(range(2, 4), succeeded=False)]
STOPPED = GroupEnded(Outcome(0, ended=(2, 3), stopped=True))


def placement(round: int = 0, restarts: int = 0) -> Placement:
    """Node 1 of 2, with two workers each."""
    node = NodeInfo("node", "role", 2, restarts, "10.0.0.1", 4711)
    return place([node, node], 1, round)


def running(max_restarts: int = 3, restarts: int = 0) -> Lifecycle:
    """An agent whose workers run in round 0."""
    lifecycle = Lifecycle(max_restarts, is_distributed=True)
    assert lifecycle.begin() == [Join(0)]
    said, started = lifecycle.handle(Joined(placement(restarts=restarts)))
    assert started == StartWorkers(placement(restarts=restarts))
    assert isinstance(said, Say)
    assert "node 1 of 2 has workers 2 to 3 of 4" in said.text
    return lifecycle


def actions(effects: list[Effect]) -> list[Effect]:
    return [effect for effect in effects if not isinstance(effect, Say)]


def remote(final: bool, round: int = 0) -> RemoteFailure:
    return RemoteFailure(round, Failure(0, 0, 7, final))


def test_rule_1_all_well() -> None:
    lifecycle = running()
    assert [effect for rank in (2, 0, 3) for effect in lifecycle.handle(Exited(0, rank, True))] == []
    assert lifecycle.handle(SUCCESS) == []
    assert lifecycle.handle(Exited(0, 1, True)) == [Leave(close=True)]
    assert lifecycle.handle(Left()) == [Result(0, Outcome(0))]
    assert lifecycle.phase is Phase.OVER


def test_rule_2_a_failure_here_restarts_all() -> None:
    lifecycle = running()
    said, report, join = lifecycle.handle(FAILED)
    assert said == Say("worker 2 of node 1 failed (exit code 1), restart 1 of 3")
    assert report == ReportFailure(Failure(2, 1, 1, False, ("the reason",)))
    assert join == Join(1)


def test_rule_2_a_failure_there_restarts_all() -> None:
    lifecycle = running()
    said, stop = lifecycle.handle(remote(final=False))
    assert said == Say("worker 0 of node 0 failed (exit code 7), restart 1 of 3")
    assert stop == StopWorkers()
    assert lifecycle.handle(STOPPED) == [Join(1)]


def test_rule_2_failures_of_one_round_cost_one_restart() -> None:
    lifecycle = running()
    lifecycle.handle(remote(final=False))
    assert lifecycle.handle(FAILED) == [Join(1)]


def test_rule_2_no_restart_left() -> None:
    lifecycle = running(max_restarts=1, restarts=1)
    failure = Failure(2, 1, 1, True, ("the reason",))
    assert lifecycle.handle(FAILED) == [ReportFailure(failure), Leave(close=True)]
    assert lifecycle.handle(Left()) == [Result(1, FAILED.outcome, failure)]


def test_rule_2_no_restart_left_there() -> None:
    lifecycle = running()
    assert lifecycle.handle(remote(final=True)) == [StopWorkers()]
    assert lifecycle.handle(STOPPED) == [Leave(close=True)]
    assert lifecycle.handle(Left()) == [Result(7, STOPPED.outcome, remote(True).failure)]


def test_rule_3_a_change_of_nodes_costs_no_restart() -> None:
    lifecycle = running(max_restarts=0)
    assert lifecycle.handle(MembershipChanged(0, "a node joined")) == [Say("a node joined"), StopWorkers()]
    assert lifecycle.handle(STOPPED) == [Join(0)]
    assert actions(lifecycle.handle(Joined(placement(1)))) == [StartWorkers(placement(1))]


def test_rule_4_without_a_lease_workers_are_killed() -> None:
    lifecycle = running()
    assert actions(lifecycle.handle(LeaseLost())) == [StopWorkers(signal.SIGKILL)]
    assert lifecycle.handle(STOPPED) == [Join(0)]
    error = RendezvousConnectionError("the store is gone")
    assert lifecycle.handle(RendezvousFailed(error)) == [Leave(close=False)]
    assert lifecycle.handle(Left()) == [Result(1, error=error)]


def test_rule_4_also_while_they_stop() -> None:
    lifecycle = running()
    lifecycle.handle(MembershipChanged(0, "a node joined"))
    assert lifecycle.handle(LeaseLost()) == [StopWorkers(signal.SIGKILL)]


def test_rule_5_workers_run_again_after_they_succeeded() -> None:
    lifecycle = running()
    lifecycle.handle(SUCCESS)
    assert actions(lifecycle.handle(remote(final=False))) == [Join(1)]
    again = running()
    again.handle(SUCCESS)
    assert actions(again.handle(MembershipChanged(0, "node 0 was lost"))) == [Join(0)]


def test_rule_6_a_signal() -> None:
    lifecycle = running()
    outcome = Outcome(130, interrupted_by=signal.SIGINT, ended=(2, 3))
    assert lifecycle.handle(GroupEnded(outcome)) == [Leave(close=False)]
    assert lifecycle.handle(Left()) == [Result(130, outcome, interrupted_by=signal.SIGINT)]


def test_rule_6_while_it_joins_and_again_while_it_leaves() -> None:
    lifecycle = Lifecycle(3, is_distributed=True)
    lifecycle.begin()
    assert lifecycle.handle(Interrupted(signal.SIGTERM)) == [Leave(close=False)]
    assert lifecycle.handle(Joined(placement())) == [], "no worker is started any more"
    assert lifecycle.handle(Interrupted(signal.SIGTERM)) == [Result(143, interrupted_by=signal.SIGTERM)]


def test_rule_7_a_failure_that_follows_a_lost_node_costs_no_restart() -> None:
    lifecycle = running(max_restarts=0)
    assert actions(lifecycle.handle(LOST_PEER)) == HELD
    assert actions(lifecycle.handle(MembershipChanged(0, "node 0 was lost"))) == [Join(0)]
    assert lifecycle.handle(HoldEnded()) == []


def test_rule_7_the_first_failure_of_another_node_is_the_cause() -> None:
    lifecycle = running(max_restarts=0)
    assert actions(lifecycle.handle(LOST_STORE)) == HELD
    assert actions(lifecycle.handle(remote(final=True))) == [Leave(close=True)]
    assert lifecycle.handle(Left()) == [Result(7, FAILED.outcome, remote(True).failure)]


@pytest.mark.parametrize("end", [HoldEnded(), RendezvousFailed(RendezvousConnectionError("no store"))])
def test_rule_7_without_news_the_failure_counts(end: Event) -> None:
    lifecycle = running()
    lifecycle.handle(LOST_PEER)
    said, report, join = lifecycle.handle(end)
    assert said == Say("worker 2 of node 1 failed (exit code 1), restart 1 of 3")
    assert report == ReportFailure(Failure(2, 1, 1, False, LOST_PEER.lines))
    assert join == Join(1)


@pytest.mark.parametrize("is_known_before", [True, False])
@pytest.mark.parametrize("lost", [LOST_PEER, LOST_STORE])
def test_rule_7_the_failure_counts_if_the_lost_peer_has_succeeded(
    lost: GroupEnded, is_known_before: bool
) -> None:
    lifecycle = running()
    effects = []
    for event in (Exited(0, 0, True), lost) if is_known_before else (lost, Exited(0, 0, True)):
        effects += actions(lifecycle.handle(event))
    assert effects == [*HELD, ReportFailure(Failure(2, 1, 1, False, lost.lines)), Join(1)]


@pytest.mark.parametrize("is_first", [True, False])
def test_rule_7_the_failure_counts_if_no_worker_is_left_and_it_is_the_first(is_first: bool) -> None:
    lifecycle = running()
    lifecycle.handle(LOST_PEER)
    ranks = (2, 3, 0, 1) if is_first else (0, 1, 2, 3)
    effects = [actions(lifecycle.handle(Exited(0, rank, False))) for rank in ranks]
    assert effects[:3] == [[], [], []]
    assert effects[3][-1:] == ([Join(1)] if is_first else [])
    assert (lifecycle.phase is Phase.HOLDING) != is_first


def test_rule_7_a_node_that_is_cut_off_ends_the_job_of_no_other() -> None:
    lifecycle = running(max_restarts=0)
    lifecycle.handle(LOST_PEER)
    assert lifecycle.has_lease
    assert actions(lifecycle.handle(LeaseLost())) == [Join(0)]


def test_rule_7_needs_other_nodes() -> None:
    alone = Lifecycle(3, is_distributed=True)
    alone.begin()
    alone.handle(Joined(place([NodeInfo("node", "role", 4, 0, "10.0.0.1", 4711)], 0, 0)))
    assert actions(alone.handle(LOST_PEER))[-1] == Join(1)


@pytest.mark.parametrize(
    ("last", "peer"),
    [
        ("ValueError: zmqgrad.errors.PeerLostError", None),
        ("zmqgrad.errors.RemoteError: PeerLostError", None),
        ("zmqgrad.errors.PeerLostError: w1 (worker 12) is gone", 12),
        ("zmqgrad.errors.PeerLostError", UNKNOWN),
        ("zmqgrad.errors.StoreTimeoutError: get timed out: no store answered at h:1", 0),
    ],
)
def test_what_is_a_consequence(last: str, peer: int | None) -> None:
    assert lost_peer(["Traceback (most recent call last):", last, "[0] bye"]) == peer


@pytest.mark.parametrize("late", [MembershipChanged(0, "a node joined"), remote(True), Exited(0, 0, True)])
def test_events_of_an_earlier_round_change_nothing(late: Event) -> None:
    lifecycle = running()
    lifecycle.handle(FAILED)
    assert lifecycle.handle(late) == []
    lifecycle.handle(Joined(placement(1, restarts=1)))
    assert lifecycle.handle(late) == []


def test_a_single_node_reports_to_nobody() -> None:
    lifecycle = Lifecycle(1, is_distributed=False)
    lifecycle.begin()
    assert lifecycle.handle(Joined(placement())) == [StartWorkers(placement())]
    assert lifecycle.handle(FAILED) == [Say("worker 2 failed (exit code 1), restart 1 of 1"), Join(1)]
    lifecycle.handle(Joined(placement(1, restarts=1)))
    assert lifecycle.handle(SUCCESS) == [Leave(close=True)]


events = st.one_of(
    st.builds(MembershipChanged, st.integers(0, 3), st.just("a node joined")),
    st.builds(remote, st.booleans(), st.integers(0, 3)),
    st.builds(Exited, st.integers(0, 3), st.integers(0, 3), st.booleans()),
    st.just(RendezvousFailed(RendezvousConnectionError("the store is gone"))),
    st.just(LeaseLost()),
    st.just(HoldEnded()),
    st.builds(Interrupted, st.sampled_from([signal.SIGINT, signal.SIGTERM])),
    st.just(Left()),
)


@given(data=st.data(), max_restarts=st.integers(0, 2))
def test_whatever_happens(data: st.DataObject, max_restarts: int) -> None:
    """Workers run in one round at a time, restarts are bounded, and at the end nothing more happens."""
    lifecycle = Lifecycle(max_restarts, is_distributed=True)
    pending = lifecycle.begin()
    rounds = 0
    are_running = is_joining = stopping = False
    results: list[Result] = []
    for _ in range(30):
        for effect in pending:
            match effect:
                case Join(restarts):
                    assert not are_running
                    assert 0 <= restarts <= max_restarts
                    is_joining = True
                    known = restarts
                case StartWorkers():
                    assert not are_running
                    are_running, stopping = True, False
                case StopWorkers():
                    stopping = True
                case Leave():
                    assert not are_running
                    is_joining = False
                case Result():
                    results.append(effect)
        if results:
            break
        choices: list[st.SearchStrategy[Event]] = [events]
        if is_joining:
            choices.append(st.just(Joined(placement(rounds, known))))
        if are_running:
            choices.append(st.just(STOPPED if stopping else SUCCESS))
            choices.append(st.sampled_from([FAILED, LOST_PEER, LOST_STORE]))
        event = data.draw(st.one_of(choices))
        if are_running and isinstance(event, Interrupted):
            event = GroupEnded(Outcome(130, interrupted_by=signal.SIGINT))
        if isinstance(event, Joined):
            rounds, is_joining = rounds + 1, False
        if isinstance(event, GroupEnded):
            are_running = False
        pending = lifecycle.handle(event)
    if results:
        assert lifecycle.handle(Left()) == lifecycle.handle(FAILED) == []
