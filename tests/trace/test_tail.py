"""Tail: what is printed of recorded and of growing logs, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.trace.test_job import CALL, SECOND, Writer, call, two
from zmqgrad.__main__ import main
from zmqgrad.trace import Job, record
from zmqgrad.trace.events import MessageSent
from zmqgrad.trace.follow import Follower
from zmqgrad.trace.tail import Filter, LiveMessages, recorded
from zmqgrad.transport import tap


def run(*arguments: object) -> int:
    return main(["trace", "tail", *map(str, arguments)])


def shown(live: LiveMessages, follower: Follower, waited: int = 0) -> list[tuple[str, int, int | None]]:
    lines = live.add(follower.poll(), waited)
    return [(line.message.type, line.message.message_id, line.latency) for line in lines]


def test_a_growing_log_is_followed_and_so_are_new_workers(tmp_path: Path) -> None:
    a, b = two(tmp_path, 2, skew=0, clock="boot")
    live = LiveMessages()
    with Follower(tmp_path) as follower:
        both = [("CALL", 1, None), ("RESULT", 1, 45_000), ("CALL", 2, None), ("RESULT", 2, 45_000)]
        assert shown(live, follower) == both
        assert shown(live, follower) == []
        c = Writer(tmp_path, 2, clock="boot")
        c.knows(b)
        b.knows(c)
        call(c, b, 9, SECOND)
        c.write()
        b.write()
        assert shown(live, follower) == [("CALL", 9, None), ("RESULT", 9, 45_000)]
        assert a.path.exists()


def test_a_message_that_does_not_arrive_is_shown_when_it_is_overdue(tmp_path: Path) -> None:
    a, b = two(tmp_path, 1, skew=0, clock="boot")
    live = LiveMessages()
    with Follower(tmp_path) as follower:
        shown(live, follower)
        a.message(True, 1_000_000, CALL, 1, 5, 1)
        a.write()
        assert shown(live, follower) == []
        assert shown(live, follower, SECOND // 2) == []
        (line,) = live.add(follower.poll(), 2 * SECOND)
        assert (line.message.message_id, line.message.received) == (5, None)
        b.message(False, 3 * SECOND, CALL, 0, 5, 1)
        b.write()
        (line,) = live.add(follower.poll(), 2 * SECOND)
        assert (line.message.sent, line.message.received) == (None, 3 * SECOND)


def test_a_long_log_is_read_in_parts(tmp_path: Path) -> None:
    a = Writer(tmp_path, 0)
    for i in range(100):
        a.message(True, i, CALL, 1, i + 1)
        a.write()
    with Follower(tmp_path) as follower:
        counts = []
        while follower.behind:
            counts.append(sum(isinstance(entry[3], MessageSent) for entry in follower.poll()))
    assert sum(counts) == 100
    assert len(counts) > 2


def test_unreadable_and_damaged_logs_are_problems_not_errors(tmp_path: Path) -> None:
    _, b = two(tmp_path, 1, skew=0, clock="boot")
    (tmp_path / "new.zgtrace").write_bytes(b"")
    with b.path.open("ab") as file:
        file.write(b"\0\0\0\x01\xc1")
    with Follower(tmp_path) as follower:
        assert len(follower.poll()) > 0
        assert follower.poll() == []
        assert sorted(path.name for path in follower.problems) == sorted(["new.zgtrace", b.path.name])
        Writer(tmp_path, 3, clock="boot").path.replace(tmp_path / "new.zgtrace")
        follower.poll()
        assert list(follower.problems) == [b.path]


def test_a_job_is_chosen_by_its_id(tmp_path: Path) -> None:
    two(tmp_path, 1, skew=0, clock="boot")
    Writer(tmp_path, 0, job="other", incarnation=5).write()
    with Follower(tmp_path, "other") as follower:
        follower.poll()
        assert [p.jobs() for p in follower.processes()] == [{"other"}]


FILTERS = [
    (Filter(), {"CALL", "RESULT"}),
    (Filter(types=["RES*"]), {"RESULT"}),
    (Filter(without=["RES*"]), {"CALL"}),
    (Filter(functions=["m:*"]), {"CALL", "RESULT"}),
    (Filter(functions=["other"]), set()),
    (Filter(contexts=[7]), set()),
    (Filter(contexts=[0]), {"CALL", "RESULT"}),
    (Filter(workers=["w0"]), {"CALL", "RESULT"}),
    (Filter(workers=["w1"], peers=["w0"]), {"CALL", "RESULT"}),
    (Filter(workers=["w0"], peers=["w0"]), set()),
    (Filter(peers=["w2"]), set()),
]


@pytest.mark.parametrize(("wanted", "types"), FILTERS)
def test_filters(tmp_path: Path, wanted: Filter, types: set[str]) -> None:
    two(tmp_path, 3, skew=0, clock="boot")
    lines = recorded(Job(tmp_path).messages())
    assert {line.message.type for line in lines if wanted.matches(line.message)} == types


def test_what_a_thread_has_recorded_late_is_in_its_place(tmp_path: Path) -> None:
    a, b = two(tmp_path, 1, skew=0, clock="boot")
    b.message(True, SECOND + 300, CALL, 0, 8, 1)
    b.message(False, SECOND + 200, CALL, 0, 7, 1)
    b.write()
    a.message(False, SECOND + 400, CALL, 1, 8, 1)
    a.write()  # what follows is in another part of the log
    a.message(True, SECOND + 100, CALL, 1, 7, 1)
    a.write()
    sent = [line.message.sent for line in recorded(Job(tmp_path).messages())]
    assert sent[-2:] == [SECOND + 100, SECOND + 300]


def test_a_finished_job_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, _ = two(tmp_path, 3, skew=0, clock="boot")
    a.message(True, SECOND, CALL, 1, 77, 1)
    a.write()
    assert run(tmp_path, "--no-follow", "--type", "call") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert "w0 > w1 CALL m:f #0.1 100 B transit=10.0 us" in lines[0]
    assert lines[-1].endswith("#0.77 100 B (not received yet)")


def test_json_lines_have_all_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two(tmp_path, 1, skew=0, clock="boot")
    assert run(tmp_path, "--no-follow", "--json", "--function", "m:f", "--type", "RESULT") == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert line["latency"] == 45_000
    assert (line["source"], line["target"], line["id"], line["name"]) == ("w1", "w0", 1, "m:f")


# ---- a running job: this process, which records ------------------------------------------------------------


class Talker:
    """Something that is traced: sends messages that nobody receives."""

    def __init__(self) -> None:
        self.tracer: tap.Tracer | None = None
        tap.register(self)

    def identity(self) -> tap.Identity:
        return tap.Identity(tap.WORKER, "talker", 0, 1, "j")

    def wait_once(self) -> None:
        assert self.tracer is not None
        self.tracer.wait_begun(1, 1)


@contextmanager
def tailing(directory: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "zmqgrad", "trace", "tail", str(directory), "--from-start", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.processes
@pytest.mark.slow
def test_two_tails_at_once_end_by_ctrl_c_and_by_a_closed_pipe(tmp_path: Path) -> None:
    a, b = two(tmp_path, 3, skew=0, clock="boot")
    with record(tmp_path) as recorder:
        talker = Talker()
        talker.wait_once()
        recorder.flush()
        with tailing(tmp_path) as one, tailing(tmp_path) as other:
            for each in (one, other):
                assert each.stdout is not None
                assert "CALL m:f #0.1" in each.stdout.readline()
            call(a, b, 99, 10 * SECOND)
            a.write()
            b.write()
            assert one.stdout is not None
            assert any("RESULT m:f #0.99" in line for line in iter(one.stdout.readline, ""))
            one.send_signal(signal.SIGINT)
            assert one.wait(20) == 130
            assert one.stderr is not None
            assert "Traceback" not in one.stderr.read()
            assert other.stdout is not None
            other.stdout.close()  # nothing more is written, and yet it notices
            assert other.wait(20) == 141
        tap.unregister(talker)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("is_listed", [True, False])
def test_a_log_whose_process_was_killed_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_listed: bool
) -> None:
    """Nor while it is a zombie, whose descriptors only root may list."""
    list_directory = Path.iterdir

    def refuse(self: Path) -> Iterator[Path]:
        if self.match("/proc/*/fd"):
            raise PermissionError(str(self))
        return list_directory(self)

    script = "import time\nfrom zmqgrad.trace import record\nfrom tests.trace.test_tail import Talker\n"
    script += (
        f"with record({str(tmp_path)!r}) as r:\n t=Talker(); t.wait_once(); r.flush(); print(1, flush=True)\n"
    )
    script += " time.sleep(60)\n"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": "."}) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with Follower(tmp_path) as follower:
            assert follower.is_recording()
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            with monkeypatch.context() as patch:
                if not is_listed:
                    patch.setattr(Path, "iterdir", refuse)
                assert not follower.is_recording()
    assert run(tmp_path) == 0
