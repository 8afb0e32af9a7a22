"""The tools themselves: a check that cannot fail is worth nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path

import pytest
import zmq

from tests.support import leaks
from tests.support.interpreter import run_python
from tests.support.leaks import Bomb, Watcher
from tests.support.processes import ProcessFailure, run_processes
from tests.support.waiting import eventually
from zmqgrad.runtime.future import Promise


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "PATIENCE", 0.02)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("daemon", [True, False])
def test_a_thread_left_is_seen(daemon: bool) -> None:
    watcher = Watcher()
    go = threading.Event()
    thread = threading.Thread(target=go.wait, args=(10,), name="w0-engine-1", daemon=daemon)
    thread.start()
    assert watcher.what_is_left() == ["thread w0-engine-1"]
    go.set()
    thread.join()
    assert watcher.what_is_left() == []


@pytest.mark.usefixtures("impatient")
def test_a_process_left_is_seen() -> None:
    watcher = Watcher()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert watcher.what_is_left() == [f"process {process.pid}"]
        process.communicate(b"\n")
    assert watcher.what_is_left() == []


@pytest.mark.usefixtures("impatient")
def test_a_socket_and_a_context_left_are_seen() -> None:
    watcher = Watcher()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    assert sorted(what.split("(")[0] for what in watcher.what_is_left()) == [
        "zmq <zmq.Context",
        "zmq <zmq.Socket",
    ]
    socket.close()
    assert len(watcher.what_is_left()) == 1
    context.term()
    assert watcher.what_is_left() == []


@pytest.mark.usefixtures("impatient")
def test_a_file_left_is_seen() -> None:
    watcher = Watcher()
    directory = tempfile.mkdtemp(prefix="zmqgrad-")
    assert watcher.what_is_left() == [f"file {Path(directory).name}"]
    os.rmdir(directory)
    assert watcher.what_is_left() == []


def test_a_file_that_a_cycle_keeps_open_warns_at_the_end_of_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: warned.append(raised.exc_type))
    watcher = Watcher()
    cycle: list[object] = [open(os.devnull)]  # noqa: SIM115
    cycle.append(cycle)
    del cycle
    assert warned == []
    assert watcher.what_is_left() == []
    assert warned == [ResourceWarning]


def test_leak_checks_wait_for_ending_threads() -> None:
    watcher = Watcher()
    go = threading.Event()
    thread = threading.Thread(target=go.wait, args=(0.03,))
    thread.start()
    assert watcher.what_is_left() == []


@pytest.mark.usefixtures("impatient")
@pytest.mark.open_outcomes
def test_an_outcome_never_set_is_seen_even_when_it_has_died() -> None:
    with Bomb() as bomb:
        done: Promise[int] = Promise()
        done.set_result(1)
        assert bomb.open_outcomes() == []
        for _ in range(3):
            Promise()
        (place,) = bomb.open_outcomes()
        assert place.startswith("test_support.py:")
        assert place.endswith("(3 times)")


def test_the_seed_follows_from_the_name(seed: int, request: pytest.FixtureRequest) -> None:
    import random
    import zlib

    run = os.environ.get("ZMQGRAD_TEST_SEED", "0")
    assert seed == zlib.crc32(f"{run} {request.node.nodeid}".encode())
    assert random.random() == random.Random(seed).random()


def test_run_python_returns_the_output() -> None:
    assert run_python("import sys; print(sys.argv[1:])", "a", "b").strip() == "['a', 'b']"
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run_python("1/0")


# ---- real processes --------------------------------------------------------------------------------------


def environment(rank: int, extra: str) -> tuple[int, dict[str, str]]:
    """What a process sees."""
    names = ("MASTER_ADDR", "RANK", "LOCAL_RANK", "WORLD_SIZE", extra)
    return rank, {name: os.environ[name] for name in names}


def fail_one(rank: int) -> None:
    """Rank 1 fails; the others would wait for ever."""
    if rank == 1:
        print("said before it failed", flush=True)
        raise ZeroDivisionError("in rank 1")
    threading.Event().wait()


def never_ends(rank: int) -> None:
    """Waits for ever."""
    threading.Event().wait()


def dies(rank: int) -> int:
    """Rank 0 is killed."""
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


@pytest.mark.slow
@pytest.mark.processes
def test_processes_return_by_rank_and_have_their_environment() -> None:
    results = run_processes(environment, 2, args=("EXTRA",), env={"EXTRA": "yes"})
    for rank, (said, env) in enumerate(results):
        assert said == rank
        assert env == {
            "MASTER_ADDR": "127.0.0.1",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "EXTRA": "yes",
        }


@pytest.mark.slow
@pytest.mark.processes
def test_a_failed_process_is_reported_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.processes.GRACE", 1.0)
    with pytest.raises(ProcessFailure) as caught:
        run_processes(fail_one, 2)
    said = str(caught.value)
    assert "ZeroDivisionError: in rank 1" in said
    assert "said before it failed" in said
    assert "rank 0: no result came" in said
    assert "in fail_one" in said, "the stack of the one that still waited"


@pytest.mark.slow
@pytest.mark.processes
def test_a_process_that_does_not_end_shows_its_stacks() -> None:
    with pytest.raises(ProcessFailure, match="in never_ends"):
        run_processes(never_ends, 1, timeout=1)


@pytest.mark.slow
@pytest.mark.processes
def test_a_dead_process_is_an_error_unless_allowed() -> None:
    with pytest.raises(ProcessFailure, match="rank 0: ended without a result, exit code -9"):
        run_processes(dies, 2)
    assert run_processes(dies, 2, may_die=[0]) == [None, 1]


def test_eventually_returns_the_value_that_is_met() -> None:
    values = iter([0, 1, 2, 3])
    assert eventually(lambda: next(values), lambda value: value == 2) == 2
    assert next(values) == 3, "nothing is read after that"


def test_eventually_shows_the_last_value_when_time_is_up() -> None:
    with pytest.raises(AssertionError, match=r"not met within 0\.01 s; the last value was \[7\]"):
        eventually(lambda: [7], lambda value: value == [8], timeout=0.01)


def test_eventually_keeps_no_value_alive_while_it_waits() -> None:
    """Between two reads; a test may wait for objects to be released."""

    class Value:
        pass

    kept: list[weakref.ref[Value]] = []

    def read() -> Value:
        assert all(ref() is None for ref in kept)
        value = Value()
        kept.append(weakref.ref(value))
        return value

    eventually(read, lambda value: len(kept) == 3)
