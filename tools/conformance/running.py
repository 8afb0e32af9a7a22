"""Runs one test of torch's in processes of its own."""

from __future__ import annotations

import enum
import faulthandler
import multiprocessing
import os
import re
import signal
import tempfile
import unittest
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import IO

STACKS_SECONDS = 10.0
"""How long the processes of a test that hangs have to write down their stacks."""

_FORK = multiprocessing.get_context("fork")


class Verdict(enum.Enum):
    """How a test ended."""

    PASSED = "passed"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True)
class Result:
    """How a test ended.

    Attributes:
        reason: one line; empty if it passed.
        output: all that its processes have written, and the traceback of a failure.
    """

    verdict: Verdict
    reason: str = ""
    output: str = ""


class RunningTest:
    """A test that has been started. Its processes form a session, so that all of them can be killed."""

    def __init__(self, case: type[unittest.TestCase], method: str, seconds: float) -> None:
        self.case = case
        self.method = method
        self._seconds = seconds
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  finish() closes it
        self.connection, theirs = _FORK.Pipe(duplex=False)
        self._process = _FORK.Process(target=_run, args=(case, method, theirs, self._output.fileno()))
        self._process.start()
        theirs.close()

    def finish(self, timed_out: bool) -> Result:
        """Return the result, and end all processes of the test."""
        result = Result(Verdict.FAILED, f"took more than {self._seconds:.0f} s")
        try:
            if timed_out:
                self._write_stacks()
            else:
                result = self.connection.recv()
        except EOFError:
            result = Result(Verdict.FAILED, "the process of the test died")
        finally:
            self._kill()
            self.connection.close()
        self._output.seek(0)
        written = self._output.read().decode(errors="replace")
        self._output.close()
        return Result(result.verdict, result.reason, written + result.output)

    def _write_stacks(self) -> None:
        """Let all processes of the test write their stacks to its output, and end."""
        try:
            os.killpg(self._process.pid or 0, signal.SIGABRT)  # faulthandler handles it in each of them
        except ProcessLookupError:
            return  # all have ended, or the session does not exist yet
        self.connection.poll(STACKS_SECONDS)  # the last of them to end closes the pipe

    def _kill(self) -> None:
        try:
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        except ProcessLookupError:
            pass  # all have ended, or the session does not exist yet
        self._process.kill()
        self._process.join()


def ready(tests: list[RunningTest], seconds: float) -> list[RunningTest]:
    """Wait until a test has ended, for at most ``seconds``. Returns those that have."""
    done = wait([test.connection for test in tests], max(0.0, seconds))
    return [test for test in tests if test.connection in done]


def _run(case: type[unittest.TestCase], method: str, connection: Connection, output: int) -> None:
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    os.chdir(tempfile.gettempdir())
    outcome = unittest.TestResult()
    case(method).run(outcome)
    connection.send(_result(outcome))


def _result(outcome: unittest.TestResult) -> Result:
    for _, text in outcome.errors + outcome.failures:
        return Result(Verdict.FAILED, reason_of(text), text)
    for _, reason in outcome.skipped:
        return Result(Verdict.SKIPPED, reason)
    return Result(Verdict.PASSED)


def reason_of(text: str) -> str:
    """The line of a traceback that names the error of a worker, or the last line."""
    lines = [line.strip() for line in text.splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failure)(:|$)", line)]
    # The first is of the process that waits for the workers; it says which worker failed.
    of_worker = [
        line for line in errors if not re.match(r"RuntimeError: Process \d+ (exited|terminated)", line)
    ]
    return ((of_worker or errors or [line for line in lines if line] or ["no message"])[0])[:160]
