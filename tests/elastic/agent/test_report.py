"""What the launcher says at the end."""

from __future__ import annotations

import signal

import pytest

from zmqgrad.elastic.agent.lifecycle import signal_name
from zmqgrad.elastic.agent.report import failure_report, last_traceback, summary
from zmqgrad.elastic.agent.supervision import Outcome, WorkerExited
from zmqgrad.elastic.agent.workers import Tail

CAUSE = ["Traceback (most recent call last):", '  File "a.py", line 1, in <module>', "KeyError: 'x'"]
CHAIN = ["", "The above exception was the direct cause of the following exception:", ""]
EFFECT = ["Traceback (most recent call last):", '  File "a.py", line 2, in <module>', "ValueError: no"]


def failed(code: int, *ended: int) -> Outcome:
    return Outcome(exit_code=1, first_failure=WorkerExited(1, code), ended=ended)


def test_no_report_after_success() -> None:
    assert failure_report(Outcome(exit_code=0), lambda rank: Tail(["noise"])) == []


def test_a_traceback() -> None:
    assert failure_report(failed(3, 0, 2), lambda rank: Tail(["a warning", *EFFECT])) == [
        "worker 1 failed first: exit code 3: ValueError: no",
        "the end of worker 1's stderr:",
        *(f"    {line}" for line in EFFECT),
        "workers 0 and 2 were ended by the launcher",
    ]


def test_what_was_shown_is_not_quoted() -> None:
    tail = Tail(["a warning", *EFFECT], was_shown=True)
    assert failure_report(failed(3), lambda rank: tail) == [
        "worker 1 failed first: exit code 3: ValueError: no"
    ]


REMOTE = ["ValueError: On WorkerInfo(id=2, name=ps):", "ValueError('no')", *EFFECT, ""]
LOST = ["Traceback (most recent call last):", "zmqgrad.errors.PeerLostError: ps is lost: it died"]
DURING = ["", "During handling of the above exception, another exception occurred:", ""]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["no", "traceback"], ""),
        ([*CAUSE, *CHAIN, *EFFECT], ": ValueError: no"),
        ([*CAUSE, *DURING, *LOST], ": KeyError: 'x'"),
        (LOST, ": zmqgrad.errors.PeerLostError: ps is lost: it died"),
        ([*CAUSE[:2], *REMOTE], ": ValueError: no, on ps"),
    ],
)
def test_the_error_is_named_in_a_line(lines: list[str], said: str) -> None:
    assert summary(lines) == said


def test_a_worker_that_failed_later_was_not_ended_by_the_launcher() -> None:
    outcome = Outcome(1, WorkerExited(1, 3), ended=(0, 2), failed_later=(WorkerExited(2, 9),))
    assert failure_report(outcome, lambda rank: Tail([]))[-2:] == [
        "worker 2 failed later: exit code 9",
        "worker 0 was ended by the launcher",
    ]


@pytest.mark.parametrize(("succeeded", "is_said"), [((0,), True), ((2,), False), ((), False)])
def test_the_loss_of_a_worker_that_exited_early_is_explained(
    succeeded: tuple[int, ...], is_said: bool
) -> None:
    lost = [LOST[0], "zmqgrad.errors.PeerLostError: ps (worker 0) is gone: its process has ended"]
    outcome = Outcome(1, WorkerExited(1, 1), succeeded=succeeded)
    lines = failure_report(outcome, lambda rank: Tail(lost, was_shown=True))
    assert ("worker 0 had exited with 0 before" in lines[-1]) is is_said
    assert ("rpc.shutdown()" in lines[-1]) is is_said


def test_without_a_traceback_the_last_lines() -> None:
    lines = failure_report(failed(3, 0), lambda rank: Tail([f"line {n}" for n in range(100)]))
    assert lines[2] == "    line 88"
    assert lines[-2:] == ["    line 99", "worker 0 was ended by the launcher"]


def test_a_worker_killed_without_output() -> None:
    first, second = failure_report(failed(-signal.SIGKILL), lambda rank: Tail([]))
    assert first.startswith("worker 1 failed first: killed by SIGKILL (")
    assert "memory" in first
    assert second == "worker 1 wrote nothing to stderr"


def test_a_signal_without_a_name() -> None:
    assert signal_name(63) == "signal 63"
    assert (
        failure_report(failed(-63), lambda rank: Tail([]))[0] == "worker 1 failed first: killed by signal 63"
    )


def test_interrupted_and_given_up() -> None:
    outcome = Outcome(exit_code=130, interrupted_by=signal.SIGINT, ended=(0, 1, 2), given_up=(0, 1, 2))
    assert failure_report(outcome, lambda rank: Tail([])) == [
        "stopped by SIGINT",
        "workers 0, 1 and 2 were still running: SIGKILL did not end them in time",
    ]


def test_the_last_traceback_is_shown_with_its_causes() -> None:
    earlier = ["Traceback (most recent call last):", "OSError: logged, and went on", "fine"]
    assert last_traceback([*earlier, *CAUSE, *CHAIN, *EFFECT]) == [*CAUSE, *CHAIN, *EFFECT]
    assert last_traceback([*CAUSE, "fine", *EFFECT]) == EFFECT
    assert last_traceback(["no", "traceback"]) == []
