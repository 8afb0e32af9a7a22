"""``python -m tools.conformance``: the report, and one real test of torch's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tools.conformance.__main__ import report
from tools.conformance.exceptions import EXCEPTIONS
from tools.conformance.running import Result, Verdict, reason_of

FAILED = Result(Verdict.FAILED, "ValueError: wrong")


def test_only_failures_beyond_the_exceptions_fail_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    known = next(iter(EXCEPTIONS))
    suite, name = known.split()
    assert report({suite: {"test_a": Result(Verdict.PASSED), name: FAILED}}) == 0
    printed = capsys.readouterr().out
    assert f"{known}: {EXCEPTIONS[known]}" in printed
    assert "ValueError" not in printed
    assert report({"rpc": {"test_a": FAILED}}) == 1
    assert "rpc test_a: ValueError: wrong" in capsys.readouterr().out
    assert report({"another": {name: FAILED}}) == 1


def test_an_exception_that_passes_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    known = next(iter(EXCEPTIONS))
    suite, name = known.split()
    assert report({suite: {name: Result(Verdict.PASSED)}}) == 0
    assert f"to be removed from the table:\n  {known}" in capsys.readouterr().out


def test_the_reason_is_the_error_of_the_worker() -> None:
    text = """Traceback (most recent call last):
RuntimeError: Process 1 exited with error code 10 and exception:
Traceback (most recent call last):
    raise ValueError(x)
module.OddError: wrong
more
"""
    assert reason_of(text) == "module.OddError: wrong"
    assert reason_of("something\nelse\n") == "something"


@pytest.mark.processes
@pytest.mark.slow
def test_one_of_torchs_tests_passes() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tools.conformance", "-k", "RpcTest.test_worker_id"],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[1/1] rpc test_worker_id: passed" in done.stdout
