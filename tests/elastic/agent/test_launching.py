"""``zmqgrad.elastic.launch``: results, errors, restarts, and what is left, with each start method."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.elastic.agent.nodes import exits
from tests.support.interpreter import run_python
from tests.support.waiting import eventually
from zmqgrad.elastic import LaunchConfig, launch
from zmqgrad.elastic.agent.error_files import read_error, write_error
from zmqgrad.elastic.agent.functions import FunctionWorker
from zmqgrad.elastic.agent.signals import SignalInbox
from zmqgrad.errors import ConfigurationError, WorkerFailedError

METHODS = pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(m, marks=pytest.mark.slow) for m in ("spawn", "forkserver"))]
)


def ranks(factor: int) -> tuple[int, str]:
    return int(os.environ["RANK"]) * factor, os.environ["WORLD_SIZE"]


def fail(text: str) -> None:
    if os.environ["RANK"] == "1":
        raise KeyError(text)
    signal.pause()


def fail_once(text: str) -> str:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return text


def large(size: int) -> bytes:
    return bytes(size)


def say(text: str) -> None:
    os.write(1, text.encode())


def unpicklable() -> object:
    return threading.Lock()


@pytest.mark.processes
@METHODS
def test_results_by_rank(method: str) -> None:
    config = LaunchConfig(nproc_per_node=3, start_method=method)
    assert launch(ranks, config)(10) == {0: (0, "3"), 1: (10, "3"), 2: (20, "3")}


@pytest.mark.processes
@METHODS
def test_the_exception_of_a_worker(method: str) -> None:
    with pytest.raises(
        WorkerFailedError, match=r"(?s)worker 1 failed first.*KeyError: 'the reason'"
    ) as raised:
        launch(fail, LaunchConfig(nproc_per_node=2, start_method=method))("the reason")
    assert (raised.value.rank, raised.value.exit_code) == (1, 1)
    assert "in fail\n" in str(raised.value)


@pytest.mark.processes
@METHODS
def test_a_restart(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    config = LaunchConfig(nproc_per_node=2, start_method=method, max_restarts=1)
    assert launch(fail_once, config)("well") == {0: "well", 1: "well"}
    assert "failed (killed by SIGKILL), restart 1 of 1\n" in capfd.readouterr().err


@pytest.mark.processes
def test_a_signal_to_a_forked_worker_that_begins_is_none_to_its_agent(tmp_path: Path) -> None:
    """It has the handlers of the agent at first, which write to a socket of that."""
    with SignalInbox() as inbox:
        for _ in range(5):
            call = time.sleep, (60.0,)
            worker = FunctionWorker(0, get_context("fork"), call, os.environ, tmp_path / "result")
            try:
                worker.signal(signal.SIGTERM)
                assert eventually(worker.poll, lambda code: code is not None) == -signal.SIGTERM
            finally:
                worker.close()
            assert inbox.take() == []


def test_a_signal_that_stops_is_not_lost_among_the_exits_of_many_workers(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with SignalInbox() as inbox:
        for _ in range(1000):
            signal.raise_signal(signal.SIGCHLD)
        signal.raise_signal(signal.SIGTERM)
        assert inbox.take() == [signal.SIGTERM]
        assert inbox.take() == []
    assert capfd.readouterr().err == ""


@pytest.mark.processes
def test_a_result_that_no_pipe_holds() -> None:
    [result] = launch(large, LaunchConfig(start_method="fork"))(1 << 22).values()
    assert len(result) == 1 << 22


@pytest.mark.processes
def test_a_worker_that_exits_with_success_has_no_result() -> None:
    assert launch(sys.exit, LaunchConfig(nproc_per_node=2, start_method="fork"))() == {0: None, 1: None}


@pytest.mark.processes
def test_a_result_that_cannot_be_pickled() -> None:
    with pytest.raises(WorkerFailedError, match="cannot pickle"):
        launch(unpicklable, LaunchConfig(start_method="fork"))()


@pytest.mark.processes
@METHODS
def test_output_goes_to_the_log_directory(
    method: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = LaunchConfig(nproc_per_node=2, start_method=method, log_dir=tmp_path / "logs")
    launch(say, config)("a line")
    assert (tmp_path / "logs" / "worker-1.stdout.log").read_text() == "a line"
    assert "[worker 1] a line\n" in capfd.readouterr().out


IN_A_THREAD = """
import threading
from tests.elastic.agent.test_launching import ranks
from zmqgrad.elastic import LaunchConfig, launch
results = []
config = LaunchConfig(nproc_per_node=2, start_method="fork")
thread = threading.Thread(target=lambda: results.append(launch(ranks, config)(1)))
thread.start()
thread.join(60)
print(results)
"""


@pytest.mark.processes
def test_in_a_thread_that_receives_no_signals() -> None:
    """In a process of its own: torch's FSDP keeps process groups in the memory of a thread. If another thread
    forks, Python clears that in the child, where their threads, which the destructor joins, are not.
    """
    assert run_python(IN_A_THREAD) == "[{0: (0, '2'), 1: (1, '2')}]\n"


IN_TWO_THREADS = """
import os, threading
from tests.elastic.agent.test_launching import ranks
from zmqgrad.elastic import LaunchConfig, launch
before = dict(os.environ)
both = threading.Barrier(2)
def run():
    for _ in range(3):
        both.wait()
        launch(ranks, LaunchConfig(nproc_per_node=8, start_method="fork"))(1)
threads = [threading.Thread(target=run) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(dict(os.environ) == before)
"""


@pytest.mark.processes
def test_two_at_a_time_leave_the_environment_as_it_was() -> None:
    assert run_python(IN_TWO_THREADS) == "True\n"


PROGRAM = """
import os, signal, sys
from zmqgrad.elastic import LaunchConfig, launch
def wait():
    print(os.getpid(), flush=True)
    os.kill({target}, signal.{signum})
    signal.pause()
try:
    launch(wait, LaunchConfig(start_method="fork"))()
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.processes
@pytest.mark.slow
def test_ctrl_c() -> None:
    text = run_python(PROGRAM.format(target="os.getppid()", signum="SIGINT"))
    pid, last = text.split()
    assert last == "interrupted"
    assert exits(int(pid))


@pytest.mark.processes
def test_a_signal_that_ends_the_program_leaves_no_files(tmp_path: Path) -> None:
    program = PROGRAM.format(target="os.getppid()", signum="SIGTERM")
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", program], env=environ, timeout=60, check=False)
    assert ended.returncode == -signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_start_method() -> None:
    with pytest.raises(ConfigurationError, match="'vfork'; it must be one of spawn, fork, forkserver"):
        launch(say, LaunchConfig(start_method="vfork"))("")


def test_an_error_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    try:
        fail_here("the reason")
    except ValueError as error:
        write_error(path, error)
    lines = read_error(path)
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: the reason"


def fail_here(text: str) -> None:
    raise ValueError(text)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"message": {}}', '{"message": {"extraInfo": 1}}'])
def test_an_error_file_that_was_cut_off_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "error.json").write_text(text)
    assert read_error(tmp_path / "error.json") == []
    assert read_error(tmp_path / "missing.json") == []
