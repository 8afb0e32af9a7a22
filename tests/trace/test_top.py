"""Top: the load of a job from logs written here, and the terminal interface in a pseudo-terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trace.test_job import CALL, SECOND, call, two
from zmqgrad.__main__ import main
from zmqgrad.cli.trace_output import MIN_NAME_WIDTH
from zmqgrad.cli.trace_top import fitting, text_of
from zmqgrad.trace import events
from zmqgrad.trace.events import tag_of
from zmqgrad.trace.follow import Follower
from zmqgrad.trace.load import Load, Rate, Snapshot, WorkerLoad


def load_of(directory: Path) -> Load:
    load = Load()
    with Follower(directory) as follower:
        while follower.behind:
            load.add(follower.poll())
    return load


def test_rates_and_latencies_are_of_the_window(tmp_path: Path) -> None:
    a, b = two(tmp_path, 0, clock="boot", skew=0)
    call(a, b, 1, 0)  # leaves the window
    for i in range(40):
        call(a, b, 2 + i, 20 * SECOND + i * SECOND // 4)
    a.write()
    b.write()
    snapshot = load_of(tmp_path).snapshot()
    rates = {rate.name: rate for rate in (*snapshot.types, *snapshot.pairs)}
    assert rates.keys() == {"CALL", "RESULT", "w0 > w1", "w1 > w0"}
    for name in ("CALL", "w0 > w1"):
        rate = rates[name]
        assert rate.messages * snapshot.seconds == pytest.approx(40)
        assert rate.bytes * snapshot.seconds == pytest.approx(4000)
        assert rate.calls * snapshot.seconds == pytest.approx(40)
        assert rate.p50 == pytest.approx(45_000, rel=0.01)
    assert [(w.name, round(w.sent * snapshot.seconds)) for w in snapshot.workers] == [("w0", 40), ("w1", 40)]


def test_an_idle_job_has_no_rates_after_a_while(tmp_path: Path) -> None:
    two(tmp_path, 10, clock="boot", skew=0)
    load = load_of(tmp_path)
    assert load.snapshot().types
    assert load.snapshot(60 * SECOND).types == []


def worker(snapshot: Snapshot, name: str) -> tuple[int, int, int, int]:
    (found,) = [w for w in snapshot.workers if w.name == name]
    return found.queued, found.running, found.oldest_ns, found.waiting


def test_queues_running_requests_and_waits(tmp_path: Path) -> None:
    a, b = two(tmp_path, 2, clock="boot", skew=0)
    start = 5 * SECOND
    for i in range(3):
        a.message(True, start, CALL, 1, 10 + i, 1)
        b.message(False, start, CALL, 0, 10 + i, 1)
    b.add(events.RequestStarted, start + 1000, 0, 10)
    a.add(events.WaitBegun, start, 1, 10)
    a.write()
    b.write()
    snapshot = load_of(tmp_path).snapshot(SECOND)
    assert worker(snapshot, "w1") == (2, 1, SECOND, 0)
    assert worker(snapshot, "w0") == (0, 0, 0, 1)
    b.add(events.RequestFinished, start + 2000, 0, 10, False)
    a.add(events.WaitEnded, start + 3000, 1, 10, False)
    a.write()
    b.write()
    snapshot = load_of(tmp_path).snapshot(SECOND)
    assert worker(snapshot, "w1") == (2, 0, 0, 0)
    assert worker(snapshot, "w0") == (0, 0, 0, 0)


def test_usage_drops_and_stopped_workers(tmp_path: Path) -> None:
    a, b = two(tmp_path, 2, clock="boot", skew=0)
    a.rows.append((tag_of(events.Usage), SECOND, 1, 5, 2, 16, 1024, 4096))
    a.rows.append((tag_of(events.Dropped), SECOND, 9))
    b.rows.append((tag_of(events.ActorStopped), SECOND, 1))
    a.write()
    b.write()
    (only,) = load_of(tmp_path).snapshot().workers
    assert (only.name, only.threads, only.blocked, only.working_limit) == ("w0", 5, 2, 16)
    assert (only.leased_bytes, only.leased_limit, only.dropped) == (1024, 4096, 9)
    assert load_of(tmp_path).snapshot(alive=lambda _: False).workers == []


def test_columns_that_do_not_fit_are_left_out_from_the_end() -> None:
    rows = [("a-long-name", "1", "22")]
    assert [fitting(("x", "y", "z"), rows, width) for width in (5, 13, 15, 16, 19, 20, 99)] == [
        1,
        1,
        1,
        2,
        2,
        3,
        3,
    ]
    assert fitting(("x", "y"), [], 99) == 2


@pytest.mark.parametrize("width", [10, 40, 80])
def test_long_names_leave_room_for_the_numbers(width: int) -> None:
    name = "trainer-" + "x" * 90
    worker = WorkerLoad(name, 77, 1, 1, 1, 0, 31, 1, 5, 0, 4, 0, 4, 0, 0, 0)
    pair = Rate(f"{name} > {name}", 42, 1, 1, 1, 1)
    lines = list(text_of(Snapshot(0, 1.0, [], [pair], [worker]), 0, "messages", width, 40))[1:]
    shown = [line.split() for line in lines if line.startswith("trainer-")]
    assert [len(words) > 1 for words in shown] == [width > 10] * 2
    if width > 10:
        assert [words[1] for words in shown] == ["31", "42"]  # queued; messages per second
    assert max(map(len, lines)) <= max(width, MIN_NAME_WIDTH)


def test_a_job_that_has_ended_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = two(tmp_path, 2, clock="boot", skew=0)
    for each in (a, b):
        os.utime(each.path, (0, 0))
    assert main(["trace", "top", str(tmp_path)]) == 1
    assert "any more; `zmqgrad trace stats`" in capsys.readouterr().err


def test_a_file_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two(tmp_path, 2, clock="boot", skew=0)
    assert main(["trace", "top", str(tmp_path)]) == 1
    assert "--once and --json" in capsys.readouterr().err


COMMAND = (sys.executable, "-m", "zmqgrad", "trace", "top")


@pytest.mark.processes
@pytest.mark.slow
def test_once_prints_tables_or_json(tmp_path: Path) -> None:
    two(tmp_path, 2, clock="boot", skew=0)
    text = subprocess.run([*COMMAND, str(tmp_path), "--once"], capture_output=True, text=True, timeout=60)
    assert (text.returncode, text.stderr) == (0, "")
    assert [line.split()[0] for line in text.stdout.splitlines() if line.startswith("w")] == [
        "worker",
        "w0",
        "w1",
        "w0",
        "w1",
    ]
    shown = subprocess.run([*COMMAND, str(tmp_path), "--once", "--json"], capture_output=True, timeout=60)
    assert {w["name"] for w in json.loads(shown.stdout)["workers"]} == {"w0", "w1"}


def read_until(fd: int, text: bytes, seconds: float = 30) -> bytes:
    seen = b""
    while text not in seen:
        assert select.select([fd], [], [], seconds)[0], seen
        seen += os.read(fd, 65536)
    return seen


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_terminal_is_drawn_and_restored(tmp_path: Path, signum: int, code: int) -> None:
    two(tmp_path, 2, clock="boot", skew=0)
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "150", "LINES": "40"}
    with subprocess.Popen(
        [*COMMAND, str(tmp_path), "--sort", "bytes"], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    ) as top:
        os.close(theirs)
        try:
            seen = read_until(ours, b"from > to")
            assert b"\x1b[?1049h" in seen  # the alternate screen
            assert b"by bytes" in seen
            top.send_signal(signum)
            read_until(ours, b"\x1b[?1049l")
            assert top.wait(20) == code
        finally:
            top.kill()
            os.close(ours)
