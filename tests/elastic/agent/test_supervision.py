"""The rules at the head of elastic/agent/supervision.py, one by one, and what holds whatever happens."""

from __future__ import annotations

import math
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.elastic.agent.supervision import (
    Event,
    Outcome,
    Phase,
    SignalReceived,
    SignalWorkers,
    StopWorkers,
    Supervisor,
    TimePassed,
    WorkerExited,
)


@pytest.fixture
def three() -> Supervisor:
    """Three workers that have just started; a grace period of one second."""
    return Supervisor(range(3), grace=1.0)


def test_rule_1_all_well(three: Supervisor) -> None:
    assert three.handle(WorkerExited(1, 0), now=5) == []
    assert three.handle(WorkerExited(0, 0), now=6) == []
    assert three.deadline == math.inf
    assert three.handle(WorkerExited(2, 0), now=7) == [Outcome(exit_code=0, succeeded=(1, 0, 2))]
    assert three.phase is Phase.OVER


def test_rule_2_the_first_failure_decides(three: Supervisor) -> None:
    assert three.handle(WorkerExited(1, 7), now=5) == [SignalWorkers((0, 2), signal.SIGTERM)]
    assert three.handle(WorkerExited(2, 9), now=5.1) == []
    assert three.handle(WorkerExited(0, -signal.SIGTERM), now=5.2) == [
        Outcome(
            exit_code=7,
            first_failure=WorkerExited(1, 7),
            ended=(0, 2),
            failed_later=(WorkerExited(2, 9),),
        )
    ]


def test_rule_2_a_worker_killed_by_a_signal(three: Supervisor) -> None:
    three.handle(WorkerExited(0, 0), now=1)
    three.handle(WorkerExited(2, -signal.SIGKILL), now=2)
    [outcome] = three.handle(WorkerExited(1, -signal.SIGTERM), now=2.1)
    assert outcome == Outcome(
        exit_code=137, first_failure=WorkerExited(2, -signal.SIGKILL), ended=(1,), succeeded=(0,)
    )


def test_rule_2_the_last_worker_may_be_the_one_that_fails(three: Supervisor) -> None:
    three.handle(WorkerExited(0, 0), now=1)
    three.handle(WorkerExited(1, 0), now=1)
    assert three.handle(WorkerExited(2, 3), now=2) == [
        Outcome(exit_code=3, first_failure=WorkerExited(2, 3), succeeded=(0, 1))
    ]


@pytest.mark.parametrize(
    ("received", "sent", "code"),
    [
        (signal.SIGINT, signal.SIGINT, 130),
        (signal.SIGTERM, signal.SIGTERM, 143),
        (signal.SIGHUP, signal.SIGTERM, 129),
        (signal.SIGQUIT, signal.SIGTERM, 131),
        (signal.SIGPIPE, signal.SIGTERM, 141),
    ],
)
def test_rule_3_a_signal_ends_all(three: Supervisor, received: int, sent: int, code: int) -> None:
    three.handle(WorkerExited(2, 0), now=1)
    assert three.handle(SignalReceived(received), now=2) == [SignalWorkers((0, 1), sent)]
    three.handle(WorkerExited(0, -sent), now=2.1)
    assert three.handle(WorkerExited(1, 1), now=2.2) == [
        Outcome(exit_code=code, interrupted_by=received, ended=(0, 1), succeeded=(2,))
    ]


def test_rule_4_signalled_then_killed_then_abandoned(three: Supervisor) -> None:
    three.handle(SignalReceived(signal.SIGTERM), now=10)
    assert three.deadline == 11
    assert three.handle(TimePassed(), now=10.9) == []
    three.handle(WorkerExited(0, -signal.SIGTERM), now=10.95)
    assert three.handle(TimePassed(), now=11) == [SignalWorkers((1, 2), signal.SIGKILL)]
    assert three.deadline == 12
    three.handle(WorkerExited(2, -signal.SIGKILL), now=11.1)
    [outcome] = three.handle(TimePassed(), now=12)
    assert outcome == Outcome(exit_code=143, interrupted_by=signal.SIGTERM, ended=(0, 1, 2), given_up=(1,))


def test_rule_5_a_second_signal_kills_immediately(three: Supervisor) -> None:
    three.handle(SignalReceived(signal.SIGINT), now=10)
    assert three.handle(SignalReceived(signal.SIGINT), now=10.1) == [SignalWorkers((0, 1, 2), signal.SIGKILL)]
    assert three.handle(SignalReceived(signal.SIGINT), now=10.2) == []


def test_rule_6_a_request_is_neither_success_nor_failure(three: Supervisor) -> None:
    three.handle(WorkerExited(1, 0), now=5)
    assert three.handle(StopWorkers(), now=6) == [SignalWorkers((0, 2), signal.SIGTERM)]
    three.handle(WorkerExited(0, 1), now=6.1)
    [outcome] = three.handle(WorkerExited(2, -signal.SIGTERM), now=6.2)
    assert outcome == Outcome(exit_code=0, ended=(0, 2), stopped=True, succeeded=(1,))


def test_rule_6_a_request_to_kill(three: Supervisor) -> None:
    assert three.handle(StopWorkers(signal.SIGKILL), now=5) == [SignalWorkers((0, 1, 2), signal.SIGKILL)]
    assert three.handle(StopWorkers(signal.SIGKILL), now=5.1) == [], "once is enough"


def test_rule_6_a_request_to_kill_ends_the_grace_period(three: Supervisor) -> None:
    three.handle(StopWorkers(), now=5)
    assert three.handle(StopWorkers(signal.SIGKILL), now=5.1) == [SignalWorkers((0, 1, 2), signal.SIGKILL)]


def test_rule_6_a_signal_meanwhile_counts_and_a_second_one_kills(three: Supervisor) -> None:
    three.handle(StopWorkers(), now=5)
    assert three.handle(SignalReceived(signal.SIGINT), now=5.1) == []
    assert three.handle(SignalReceived(signal.SIGINT), now=5.2) == [SignalWorkers((0, 1, 2), signal.SIGKILL)]
    for rank in (0, 1):
        three.handle(WorkerExited(rank, -9), now=5.3)
    [outcome] = three.handle(WorkerExited(2, -9), now=5.3)
    assert isinstance(outcome, Outcome)
    assert (outcome.exit_code, outcome.interrupted_by) == (130, signal.SIGINT)


def test_a_signal_after_a_failure_hurries_but_does_not_change_the_code(three: Supervisor) -> None:
    three.handle(WorkerExited(1, 7), now=5)
    assert three.handle(SignalReceived(signal.SIGINT), now=5.1) == [SignalWorkers((0, 2), signal.SIGKILL)]
    three.handle(WorkerExited(0, -9), now=5.2)
    [outcome] = three.handle(WorkerExited(2, -9), now=5.2)
    assert isinstance(outcome, Outcome)
    assert (outcome.exit_code, outcome.interrupted_by) == (7, None)


@given(data=st.data(), workers=st.integers(1, 5))
def test_every_sequence_of_events_ends_with_an_outcome(data: st.DataObject, workers: int) -> None:
    """After the first failure or signal it is over within two grace periods, with no gap in between."""
    supervisor = Supervisor(range(workers), grace=1.0)
    running = set(range(workers))
    now, began = 0.0, math.inf
    outcomes: list[Outcome] = []
    killed: set[int] = set()
    while not outcomes:
        choices: list[st.SearchStrategy[Event]] = [
            st.builds(WorkerExited, st.sampled_from(sorted(running)), st.sampled_from([0, 1, -9])),
            st.sampled_from([SignalReceived(signal.SIGINT), SignalReceived(signal.SIGTERM)]),
        ]
        if supervisor.deadline < math.inf:
            choices.append(st.just(TimePassed()))
        event = data.draw(st.one_of(choices))
        now = min(now + data.draw(st.floats(0, 0.4)), supervisor.deadline)
        if event == TimePassed():
            now = supervisor.deadline
        if isinstance(event, WorkerExited):
            running.discard(event.rank)
        for effect in supervisor.handle(event, now):
            if isinstance(effect, SignalWorkers):
                began = min(began, now)
                assert set(effect.ranks) == running, "nobody is signalled who has left, nobody is forgotten"
                killed |= set(effect.ranks) if effect.signum == signal.SIGKILL else set()
            else:
                outcomes.append(effect)
    [outcome] = outcomes
    assert now <= began + 2.0 + 1e-9 or began == math.inf
    assert set(outcome.given_up) == running <= killed
    assert (outcome.exit_code == 0) == (outcome.first_failure is None and outcome.interrupted_by is None)
    assert supervisor.handle(SignalReceived(signal.SIGINT), now) == []
