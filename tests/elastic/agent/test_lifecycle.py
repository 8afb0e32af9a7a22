"""The rules at the head of elastic/agent/lifecycle.py, one by one, and what holds whatever happens."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.elastic.agent.consequences import UNKNOWN, lost_peer
from zmqgrad.elastic.agent.events import (
    Ask,
    Asked,
    Confirm,
    Confirmed,
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
from zmqgrad.elastic.agent.lifecycle import (
    Effect,
    Event,
    GroupEnded,
    Hold,
    HoldEnded,
    LeaseLost,
    Lifecycle,
    Phase,
    Result,
    Say,
    StartWorkers,
)
from zmqgrad.elastic.agent.ranks import NodeInfo, Placement, place
from zmqgrad.elastic.agent.supervision import Outcome, SignalReceived, StopWorkers, WorkerExited
from zmqgrad.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

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


def alone(round: int = 0, restarts: int = 0) -> Placement:
    """The only node."""
    return place([NodeInfo("node", "role", 4, restarts, "10.0.0.1", 4711)], 0, round)


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


def fails(lifecycle: Lifecycle, event: GroupEnded = FAILED) -> list[Effect]:
    """A worker fails, and both nodes live."""
    assert lifecycle.handle(event) == [Hold(), Ask(1)]
    assert lifecycle.handle(Asked(0, 1)) == [Confirm(1)]
    assert lifecycle.handle(Confirmed(0, 1)) == []
    return lifecycle.handle(Confirmed(0, 0))


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
    said, report, join = fails(lifecycle)
    assert said == Say("worker 2 of node 1 failed (exit code 1), restart 1 of 3")
    assert report == ReportFailure(Failure(2, 1, 1, False, ("the reason",), "10.0.0.1"))
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
    failure = Failure(2, 1, 1, True, ("the reason",), "10.0.0.1")
    assert fails(lifecycle) == [ReportFailure(failure), Leave(close=True)]
    fault = "worker 2 of node 1 at 10.0.0.1 (exit code 1)"
    result = Result(1, FAILED.outcome, failure, at_fault=fault, tried="1 of 1 restarts")
    assert lifecycle.handle(Left()) == [result]


def test_rule_2_no_restart_left_there() -> None:
    lifecycle = running()
    assert lifecycle.handle(remote(final=True)) == [StopWorkers()]
    assert lifecycle.handle(STOPPED) == [Leave(close=True)]
    assert lifecycle.handle(Left()) == [
        Result(
            7,
            STOPPED.outcome,
            remote(True).failure,
            at_fault="worker 0 of node 0 (exit code 7)",
            tried="0 of 3 restarts",
        )
    ]


def test_rule_3_a_change_of_nodes_costs_no_restart() -> None:
    lifecycle = running(max_restarts=0)
    assert lifecycle.handle(MembershipChanged(0, "a node joined")) == [Say("a node joined"), StopWorkers()]
    assert lifecycle.handle(STOPPED) == [Join(0)]
    assert actions(lifecycle.handle(Joined(placement(1)))) == [StartWorkers(placement(1))]


def test_rule_3_a_node_that_joins_restarts_no_workers_that_have_succeeded() -> None:
    """It may be noticed before their success, while another node sees that all have, and closes the job."""
    lifecycle = running()
    lifecycle.handle(SUCCESS)
    joined = MembershipChanged(0, "a node joined", joined=True)
    assert lifecycle.handle(joined) == []
    for rank in range(4):
        effects = lifecycle.handle(Exited(0, rank, succeeded=True))
    assert effects == [Leave(close=True)]
    other = running()
    other.handle(SUCCESS)
    assert other.handle(joined) == []
    assert actions(other.handle(MembershipChanged(0, "node 0 left", "node 0"))) == [Join(0)]


def test_rule_4_without_a_lease_workers_are_killed() -> None:
    lifecycle = running()
    assert actions(lifecycle.handle(LeaseLost())) == [StopWorkers(signal.SIGKILL)]
    assert lifecycle.handle(STOPPED) == [Join(0)]
    error = RendezvousConnectionError("the store is gone")
    assert lifecycle.handle(RendezvousFailed(error)) == [Leave(close=False)]
    fault = "this node, which did not reach the others in time"
    tried = "to join the next round, after 0 of 3 restarts"
    assert lifecycle.handle(Left()) == [Result(1, error=error, at_fault=fault, tried=tried)]


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


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RendezvousClosedError("the job has ended"), 0),
        (RendezvousConnectionError("no store"), 0),
        (RendezvousTimeoutError("alone"), 1),
    ],
)
def test_rule_5_a_node_that_has_succeeded_and_loses_its_lease(error: Exception, code: int) -> None:
    """If the others have gone on without it, it runs its workers again."""
    lifecycle = running()
    lifecycle.handle(SUCCESS)
    assert lifecycle.has_lease
    assert actions(lifecycle.handle(LeaseLost())) == [Join(0)]
    assert actions(lifecycle.handle(RendezvousFailed(error))) == [Leave(close=False)]
    [result] = lifecycle.handle(Left())
    assert isinstance(result, Result)
    assert result.exit_code == code


def test_a_spare_that_was_not_needed_leaves_with_success() -> None:
    lifecycle = Lifecycle(3, is_distributed=True)
    lifecycle.begin()
    assert lifecycle.handle(Notice("spare 1 of 2")) == [Say("spare 1 of 2")]
    error = RendezvousGracefulExitError("not needed")
    assert actions(lifecycle.handle(RendezvousFailed(error))) == [Leave(close=False)]
    assert lifecycle.handle(Left()) == [Result(0)]


def test_the_first_fault_is_named_if_no_round_follows() -> None:
    lifecycle = running()
    lifecycle.handle(MembershipChanged(0, "node 0 of 2 left or was lost", "node 0 at 10.0.0.7"))
    lifecycle.handle(LeaseLost())
    lifecycle.handle(STOPPED)
    error = RendezvousTimeoutError("too few")
    lifecycle.handle(RendezvousFailed(error))
    [result] = lifecycle.handle(Left())
    assert isinstance(result, Result)
    assert result.at_fault == "node 0 at 10.0.0.7"
    assert result.tried == "to join the next round, after 0 of 3 restarts"


def test_a_fault_that_another_round_has_mended_is_not_named() -> None:
    lifecycle = running(max_restarts=0)
    lifecycle.handle(MembershipChanged(0, "node 0 of 2 left or was lost", "node 0 at 10.0.0.7"))
    lifecycle.handle(STOPPED)
    lifecycle.handle(Joined(placement(1)))
    lifecycle.handle(remote(final=True, round=1))
    lifecycle.handle(STOPPED)
    [result] = lifecycle.handle(Left())
    assert isinstance(result, Result)
    assert result.at_fault == "worker 0 of node 0 (exit code 7)"


def test_rule_6_a_signal() -> None:
    lifecycle = running()
    outcome = Outcome(130, interrupted_by=signal.SIGINT, ended=(2, 3))
    assert lifecycle.handle(GroupEnded(outcome)) == [Leave(close=False)]
    assert lifecycle.handle(Left()) == [Result(130, outcome, interrupted_by=signal.SIGINT)]


def test_rule_6_while_it_joins_and_again_while_it_leaves() -> None:
    lifecycle = Lifecycle(3, is_distributed=True)
    lifecycle.begin()
    assert lifecycle.handle(SignalReceived(signal.SIGTERM)) == [Leave(close=False)]
    assert lifecycle.handle(Joined(placement())) == [], "no worker is started any more"
    assert lifecycle.handle(SignalReceived(signal.SIGTERM)) == [Result(143, interrupted_by=signal.SIGTERM)]


@pytest.mark.parametrize("is_held", [False, True], ids=["while workers end", "while it is held"])
def test_rule_6_a_signal_after_a_failure(is_held: bool) -> None:
    lifecycle = running()
    signalled = SignalReceived(signal.SIGTERM)
    first, second = (FAILED, signalled) if is_held else (signalled, FAILED)
    assert lifecycle.handle(first) == ([Hold(), Ask(1)] if is_held else [])
    assert lifecycle.handle(second) == [Leave(close=False)]
    failure = Failure(2, 1, 1, True, ("the reason",), "10.0.0.1")
    fault = "worker 2 of node 1 at 10.0.0.1 (exit code 1)"
    result = Result(1, FAILED.outcome, failure, at_fault=fault, tried="0 of 3 restarts")
    assert lifecycle.handle(Left()) == [result]


def test_rule_7_a_failure_that_follows_a_lost_node_costs_no_restart() -> None:
    """Whatever error it has: gloo's, for example."""
    lifecycle = running(max_restarts=0)
    assert lifecycle.handle(FAILED) == [Hold(), Ask(1)]
    assert lifecycle.handle(Asked(0, 1)) == [Confirm(1)]
    assert lifecycle.handle(Confirmed(0, 1)) == []
    assert actions(lifecycle.handle(MembershipChanged(0, "node 0 was lost", "node 0"))) == [Join(0)]
    assert lifecycle.handle(HoldEnded()) == []
    assert lifecycle.handle(Confirmed(0, 0)) == []


@pytest.mark.parametrize("change", [MembershipChanged(0, "node 0 was lost", "node 0"), LeaseLost()])
def test_rule_7_a_failure_does_not_count_if_the_round_ends_before_its_group_has(change: Event) -> None:
    """The other workers take a moment to end. By then nobody is left who could be asked."""
    lifecycle = running(max_restarts=0)
    assert isinstance(actions(lifecycle.handle(change))[-1], StopWorkers)
    assert lifecycle.handle(FAILED) == [Join(0)]


def test_rule_7_the_node_that_asks_first_decides() -> None:
    """It may have failed before this one did, so replies to it are no replies to this one."""
    lifecycle = running(max_restarts=0)
    assert lifecycle.handle(Asked(0, 0)) == [Confirm(1)]
    lifecycle.handle(FAILED)
    assert [lifecycle.handle(Confirmed(0, rank)) for rank in (0, 1)] == [[], []]
    assert actions(lifecycle.handle(remote(final=True))) == [Leave(close=True)]


def test_rule_7_a_node_that_leaves_does_not_reply() -> None:
    lifecycle = running()
    assert lifecycle.handle(SignalReceived(signal.SIGTERM)) == []
    assert lifecycle.handle(Asked(0, 0)) == []
    outcome = Outcome(143, interrupted_by=signal.SIGTERM)
    assert lifecycle.handle(GroupEnded(outcome)) == [Leave(close=False)]


def test_rule_7_a_node_whose_workers_have_ended_replies() -> None:
    for event in (SUCCESS, LOST_PEER):
        lifecycle = running()
        lifecycle.handle(event)
        assert lifecycle.handle(Asked(0, 0)) == [Confirm(1)]


def test_rule_8_a_consequence_of_a_lost_node() -> None:
    lifecycle = running(max_restarts=0)
    assert actions(lifecycle.handle(LOST_PEER)) == HELD
    assert actions(lifecycle.handle(MembershipChanged(0, "node 0 was lost"))) == [Join(0)]


def test_rule_8_the_first_failure_of_another_node_is_the_cause() -> None:
    lifecycle = running(max_restarts=0)
    assert actions(lifecycle.handle(LOST_STORE)) == HELD
    assert actions(lifecycle.handle(remote(final=True))) == [Leave(close=True)]
    [result] = lifecycle.handle(Left())
    assert isinstance(result, Result)
    assert (result.exit_code, result.failure) == (7, remote(True).failure)


@pytest.mark.parametrize("failed", [FAILED, LOST_PEER])
def test_rule_9_without_news_the_failure_counts(failed: GroupEnded) -> None:
    lifecycle = running()
    lifecycle.handle(failed)
    assert lifecycle.handle(RendezvousFailed(RendezvousConnectionError("no store"))) == []
    said, report, join = lifecycle.handle(HoldEnded())
    assert said == Say("worker 2 of node 1 failed (exit code 1), restart 1 of 3")
    assert report == ReportFailure(Failure(2, 1, 1, False, failed.lines, "10.0.0.1"))
    assert join == Join(1)


@pytest.mark.parametrize("is_known_before", [True, False])
@pytest.mark.parametrize("lost", [LOST_PEER, LOST_STORE])
def test_rule_8_the_failure_counts_if_the_lost_peer_has_succeeded(
    lost: GroupEnded, is_known_before: bool
) -> None:
    lifecycle = running()
    effects = []
    for event in (Exited(0, 0, True), lost) if is_known_before else (lost, Exited(0, 0, True)):
        effects += actions(lifecycle.handle(event))
    assert effects == [*HELD, ReportFailure(Failure(2, 1, 1, False, lost.lines, "10.0.0.1")), Join(1)]


@pytest.mark.parametrize("is_first", [True, False])
def test_rule_8_the_failure_counts_if_no_worker_is_left_and_it_is_the_first(is_first: bool) -> None:
    lifecycle = running()
    lifecycle.handle(LOST_PEER)
    ranks = (2, 3, 0, 1) if is_first else (0, 1, 2, 3)
    effects = [actions(lifecycle.handle(Exited(0, rank, False))) for rank in ranks]
    assert effects[:3] == [[], [], []]
    assert effects[3][-1:] == ([Join(1)] if is_first else [])
    assert (lifecycle.phase is Phase.HOLDING) != is_first


@pytest.mark.parametrize("failed", [FAILED, LOST_PEER])
def test_rule_7_a_node_that_is_cut_off_ends_the_job_of_no_other(failed: GroupEnded) -> None:
    lifecycle = running(max_restarts=0)
    lifecycle.handle(failed)
    assert lifecycle.handle(RendezvousFailed(RendezvousConnectionError("no store"))) == []
    assert lifecycle.has_lease
    assert actions(lifecycle.handle(LeaseLost())) == [Join(0)]


def test_rule_7_needs_other_nodes() -> None:
    for failed in (FAILED, LOST_PEER):
        lifecycle = Lifecycle(3, is_distributed=True)
        lifecycle.begin()
        lifecycle.handle(Joined(alone()))
        assert actions(lifecycle.handle(failed))[-1] == Join(1)


@pytest.mark.parametrize(
    ("last", "peer"),
    [
        ("ValueError: zmqgrad.errors.PeerLostError", None),
        ("zmqgrad.errors.RemoteError: PeerLostError", None),
        ("zmqgrad.errors.PeerLostError: w1 (worker 12) is gone", 12),
        ("zmqgrad.errors.PeerLostError", UNKNOWN),
        ("RuntimeError: [/w/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:3", UNKNOWN),
        ("RuntimeError: Connection closed by peer", None),
        ("zmqgrad.errors.StoreTimeoutError: get timed out: no store answered at h:1", 0),
    ],
)
def test_what_is_a_consequence(last: str, peer: int | None) -> None:
    assert lost_peer(["Traceback (most recent call last):", last, "[0] bye"]) == peer


@pytest.mark.parametrize(
    "late",
    [MembershipChanged(0, "a node joined"), remote(True), Exited(0, 0, True), Asked(0, 0), Confirmed(0, 0)],
)
def test_events_of_an_earlier_round_change_nothing(late: Event) -> None:
    lifecycle = running()
    fails(lifecycle)
    assert lifecycle.handle(late) == []
    lifecycle.handle(Joined(placement(1, restarts=1)))
    assert lifecycle.handle(late) == []


def test_a_single_node_reports_to_nobody() -> None:
    lifecycle = Lifecycle(1, is_distributed=False)
    lifecycle.begin()
    assert lifecycle.handle(Joined(alone())) == [StartWorkers(alone())]
    assert lifecycle.handle(FAILED) == [Say("worker 2 failed (exit code 1), restart 1 of 1"), Join(1)]
    lifecycle.handle(Joined(alone(1, restarts=1)))
    assert lifecycle.handle(SUCCESS) == [Leave(close=True)]


events = st.one_of(
    st.builds(MembershipChanged, st.integers(0, 3), st.just("a node joined"), joined=st.booleans()),
    st.builds(remote, st.booleans(), st.integers(0, 3)),
    st.builds(Exited, st.integers(0, 3), st.integers(0, 3), st.booleans()),
    st.just(RendezvousFailed(RendezvousConnectionError("the store is gone"))),
    st.builds(Asked, st.integers(0, 3), st.integers(0, 1)),
    st.builds(Confirmed, st.integers(0, 3), st.integers(0, 1)),
    st.just(LeaseLost()),
    st.just(HoldEnded()),
    st.builds(SignalReceived, st.sampled_from([signal.SIGINT, signal.SIGTERM])),
    st.just(Left()),
)


@given(data=st.data(), max_restarts=st.integers(0, 2))
def test_whatever_happens(data: st.DataObject, max_restarts: int) -> None:
    """Workers run in one round at a time, restarts are bounded, and at the end nothing more happens."""
    lifecycle = Lifecycle(max_restarts, is_distributed=True)
    pending = lifecycle.begin()
    rounds = 0
    are_running = is_joining = stopping = has_signal = False
    results: list[Result] = []
    for _ in range(30):
        for effect in pending:
            match effect:
                case Join(restarts):
                    assert not are_running
                    assert not has_signal
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
        has_signal |= isinstance(event, SignalReceived)
        if are_running and isinstance(event, SignalReceived):
            assert lifecycle.handle(event) == []
            interrupted = GroupEnded(Outcome(130, interrupted_by=signal.SIGINT))
            event = data.draw(st.sampled_from([interrupted, FAILED, LOST_PEER]))
        if isinstance(event, Joined):
            rounds, is_joining = rounds + 1, False
        if isinstance(event, GroupEnded):
            are_running = False
        pending = lifecycle.handle(event)
    if results:
        assert lifecycle.handle(Left()) == lifecycle.handle(FAILED) == []
