"""The programs of ``tests/trace/cases``: their faults are found from the trace."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ProcessFailure
from tests.support.scripts import run_script
from zmqgrad.errors import TraceError
from zmqgrad.trace import Job, launch_environment
from zmqgrad.trace.cycles import find_cycles
from zmqgrad.trace.findings import Finding, find
from zmqgrad.trace.waits import find_waits

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(200)]

CASES = Path(__file__).parent / "cases"
COMMAND = (sys.executable, "-m", "zmqgrad")


@contextmanager
def started(
    directory: Path, case: str, workers: int, *args: str, **env: str
) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        *COMMAND,
        "run",
        f"--nproc-per-node={workers}",
        "--trace",
        str(directory),
        str(CASES / case),
        *args,
    ]
    output = directory / "output.txt"
    with output.open("w") as file:
        job = subprocess.Popen(
            command, env={**os.environ, **env}, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield job
    finally:
        if job.poll() is None:
            job.terminate()  # the launcher ends its workers
        job.wait(60)


def run(directory: Path, case: str, workers: int, *args: str) -> None:
    run_script(CASES / case, *args, workers=workers, env=launch_environment(directory))


def findings(directory: Path) -> dict[str, Finding]:
    return {each.kind: each for each in find(Job(directory))}


def view(directory: Path, *args: str) -> tuple[int, Any]:
    done = subprocess.run(
        [*COMMAND, "trace", *args], capture_output=True, text=True, timeout=100, check=False
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def wait_for_deadlock(directory: Path, job: subprocess.Popen[bytes]) -> None:
    """Returns when three calls hang, and long enough: the logs show them, as nothing else can."""
    while job.poll() is None:
        try:
            job_so_far = Job(directory)
            hangs = len(find_waits(job_so_far).open) == 3
            if hangs and any(finding.kind == "deadlock" for finding in find(job_so_far)):
                return
        except TraceError:
            pass  # no log yet
        try:
            job.wait(0.2)
        except subprocess.TimeoutExpired:
            pass
    raise AssertionError("the job ended, instead of hanging")


def test_the_cycle_of_a_running_job_is_named_with_the_lines_that_hang(tmp_path: Path) -> None:
    with started(tmp_path, "deadlock.py", 3, CASE_TIMEOUT="100") as job:
        wait_for_deadlock(tmp_path, job)
        code, text = view(tmp_path, str(tmp_path), "--json", "--seconds", "30")
        told = {each["kind"]: each for each in json.loads(text)}
        check_hang(tmp_path, interrupted=False)
        for worker in Job(tmp_path).workers():
            os.kill(worker.process.info.pid, signal.SIGKILL)
    assert code == 3
    waits = {w["waiter"]: w for w in told["deadlock"]["evidence"]["waits"]}
    assert {name: w["for"] for name, w in waits.items()} == {"worker0": "worker1", "worker1": "worker0"}
    assert all("rpc.rpc_sync(to, add" in wait["stack"] for wait in waits.values())
    assert all("with lock:" in wait["serving"] for wait in waits.values())
    # Its workers were killed: the logs alone name the cycle.
    (cycle,) = find_cycles(find_waits(Job(tmp_path)), at_least=0)
    assert [w.waiter.name for w in cycle] == ["worker0", "worker1"]


def test_the_cycle_of_a_job_that_timed_out_is_named_by_its_errors_and_its_trace(tmp_path: Path) -> None:
    with started(tmp_path, "deadlock.py", 3, CASE_TIMEOUT="5", ZMQGRAD_DEBUG="1") as job:
        job.wait(150)
    printed = (tmp_path / "output.txt").read_text()
    assert re.search(r"worker0 has waited 2\.\d s .* for add on worker1: worker1 has run it for", printed)
    assert re.search(r"RpcTimeoutError: .*; worker\d has run it for", printed)
    code, text = view(tmp_path, str(tmp_path))
    assert code == 3
    assert "PROBLEM: Deadlock: worker0 -> worker1 -> worker0" in text
    assert text.count("in add: with lock:") >= 2


def test_a_hang_is_named_with_its_lines_after_ctrl_c(tmp_path: Path) -> None:
    with started(tmp_path, "deadlock.py", 3, CASE_TIMEOUT="100") as job:
        wait_for_deadlock(tmp_path, job)
        job.send_signal(signal.SIGINT)
        job.wait(60)
    check_hang(tmp_path, interrupted=True)


def check_hang(directory: Path, interrupted: bool) -> None:
    code, text = view(directory, str(directory), "--seconds", "30")
    assert code == 3
    assert text.startswith("PROBLEM: Deadlock: worker0 -> worker1 -> worker0: each waits for the next")
    # The first worker that Ctrl-C reaches releases its lock, by which the other may get its reply in time.
    least = 1 if interrupted else 2
    for part in ("in move: rpc.rpc_sync(to, add", "runs tests/trace/cases/deadlock.py:24 in add: with lock:"):
        assert text.count(part) >= least, text
    assert ("until the job was interrupted" in text) is interrupted
    assert "failed in" not in text, "a consequence of Ctrl-C"


def test_the_straggler_is_found(tmp_path: Path) -> None:
    run(tmp_path, "straggler.py", 4)
    found = findings(tmp_path)
    assert found["straggler"].workers == ("worker2",)
    assert found["straggler"].evidence["function"] == "__main__:forward"
    assert not {"deadlock", "hot worker", "unused result"} & found.keys()


def test_the_hot_server_is_found(tmp_path: Path) -> None:
    run(tmp_path, "hot_server.py", 5)
    found = findings(tmp_path)
    assert found["hot worker"].workers == ("worker0",)
    assert not {"deadlock", "straggler", "unused result"} & found.keys()


@pytest.mark.parametrize("mode", ["auto", "fast"])
def test_the_unused_send_is_found(tmp_path: Path, mode: str) -> None:
    if mode == "fast":
        with pytest.raises(ProcessFailure, match="cannot finish in FAST mode"):
            run(tmp_path, "unused_send.py", 3, mode)
    else:
        run(tmp_path, "unused_send.py", 3, mode)
    finding = findings(tmp_path)["unused result"]
    assert finding.title == "The loss does not use what __main__:mean returned (1 of 1 call)"
    assert "worker1 calls worker2 (1): no gradient came back" in finding.detail
    assert finding.evidence["failed"] == (mode == "fast")


@pytest.mark.parametrize(
    ("part", "title"),
    [
        ((), "The loss does not use what __main__:penalty returned (10 of 10 calls)"),
        (("part",), "The loss does not use tensor 2 of the 2 that __main__:encode returned (10 of 10 calls)"),
    ],
)
def test_a_forgotten_term_of_the_loss_is_found(tmp_path: Path, part: tuple[str, ...], title: str) -> None:
    run(tmp_path, "unused_result.py", 3, *part)
    code, text = view(tmp_path, str(tmp_path))
    assert (code, text.splitlines()[0]) == (0, f"WARNING: {title}")
    assert "Is a term missing from the loss?" in " ".join(text.split())
    assert text.count("WARNING") == 1


def test_a_tensor_that_is_sent_again_and_again_is_found(tmp_path: Path) -> None:
    run(tmp_path, "repeated_send.py", 2)
    code, text = view(tmp_path, str(tmp_path))
    assert (code, text.splitlines()[0]) == (
        0,
        "WARNING: worker0 sent the same 32.0 MiB 40 times, as arguments of __main__:score",
    )
    assert "Publish it (rpc.publish), or keep it" in " ".join(text.split())
    assert text.count("WARNING") == 1
