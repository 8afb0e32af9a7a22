"""What the launcher says at the end."""

from __future__ import annotations

import signal

from zmqgrad.elastic.agent.lifecycle import signal_name
from zmqgrad.elastic.agent.report import failure_report, last_traceback
from zmqgrad.elastic.agent.supervision import Outcome, WorkerExited

CAUSE = ["Traceback (most recent call last):", '  File "a.py", line 1, in <module>', "KeyError: 'x'"]
CHAIN = ["", "The above exception was the direct cause of the following exception:", ""]
EFFECT = ["Traceback (most recent call last):", '  File "a.py", line 2, in <module>', "ValueError: no"]


def failed(code: int, *ended: int) -> Outcome:
    return Outcome(exit_code=1, first_failure=WorkerExited(1, code), ended=ended)


def test_no_report_after_success() -> None:
    assert failure_report(Outcome(exit_code=0), lambda rank: ["noise"]) == []


def test_a_traceback() -> None:
    assert failure_report(failed(3, 0, 2), {1: ["a warning", *EFFECT]}.__getitem__) == [
        "worker 1 failed first: exit code 3",
        "the end of worker 1's stderr:",
        *(f"    {line}" for line in EFFECT),
        "workers 0 and 2 were ended by the launcher",
    ]


def test_a_worker_that_failed_later_was_not_ended_by_the_launcher() -> None:
    outcome = Outcome(1, WorkerExited(1, 3), ended=(0, 2), failed_later=(WorkerExited(2, 9),))
    assert failure_report(outcome, lambda rank: [])[-2:] == [
        "worker 2 failed later: exit code 9",
        "worker 0 was ended by the launcher",
    ]


def test_without_a_traceback_the_last_lines() -> None:
    lines = failure_report(failed(3, 0), lambda rank: [f"line {n}" for n in range(100)])
    assert lines[2] == "    line 88"
    assert lines[-2:] == ["    line 99", "worker 0 was ended by the launcher"]


def test_a_worker_killed_without_output() -> None:
    first, second = failure_report(failed(-signal.SIGKILL), lambda rank: [])
    assert first.startswith("worker 1 failed first: killed by SIGKILL (")
    assert "memory" in first
    assert second == "worker 1 wrote nothing to stderr"


def test_a_signal_without_a_name() -> None:
    assert signal_name(63) == "signal 63"
    assert failure_report(failed(-63), lambda rank: [])[0] == "worker 1 failed first: killed by signal 63"


def test_interrupted_and_given_up() -> None:
    outcome = Outcome(exit_code=130, interrupted_by=signal.SIGINT, ended=(0, 1, 2), given_up=(0, 1, 2))
    assert failure_report(outcome, lambda rank: []) == [
        "stopped by SIGINT",
        "workers 0, 1 and 2 were still running: SIGKILL did not end them in time",
    ]


def test_the_last_traceback_is_shown_with_its_causes() -> None:
    earlier = ["Traceback (most recent call last):", "OSError: logged, and went on", "fine"]
    assert last_traceback([*earlier, *CAUSE, *CHAIN, *EFFECT]) == [*CAUSE, *CHAIN, *EFFECT]
    assert last_traceback([*CAUSE, "fine", *EFFECT]) == EFFECT
    assert last_traceback(["no", "traceback"]) == []
