"""Statistics of jobs whose logs are written here, so that every figure is known."""

from __future__ import annotations

import io
import json
import re
import sys
import threading
from pathlib import Path

import pytest

from tests.support.waiting import eventually
from tests.trace.test_job import CALL, RESULT, SECOND, Writer, call, two
from zmqgrad import rpc
from zmqgrad.__main__ import main
from zmqgrad.cli import trace_output
from zmqgrad.cli.trace_output import table
from zmqgrad.errors import RpcTimeoutError
from zmqgrad.testing import cluster
from zmqgrad.trace import Job, events, record
from zmqgrad.trace.events import tag_of
from zmqgrad.trace.stats import statistics


def about(value: int) -> object:
    return pytest.approx(value, rel=0.01)


def test_calls_are_split_into_their_parts(tmp_path: Path) -> None:
    two(tmp_path, 100, skew=0, clock="boot")
    found = statistics(Job(tmp_path))
    assert (found.messages, found.bytes, found.lost, found.dropped) == (200, 20_000, 0, 0)
    for rows, name in ((found.types, "CALL"), (found.pairs, "w0 > w1"), (found.functions, "m:f")):
        (row,) = [row for row in rows if row.name == name]
        assert (row.calls, row.failed, row.unanswered) == (100, 0, 0)
        assert row.sending.max == 0, "what is small is not measured"
        medians = [part.p50 for part in (row.whole, row.transfer, row.queued, row.running)]
        assert medians == [about(45_000), about(20_000), about(5_000), about(20_000)]
        assert sum(filter(None, medians[1:])) == about(medians[0] or 0), "what follows the reply is no part"
        assert row.whole.max == 45_000
    assert [(row.name, row.messages) for row in found.functions] == [("m:f", 200)]
    assert [p.clock_bound for p in found.processes] == [0, 0]


def test_methods_of_remote_values_are_one_function(tmp_path: Path) -> None:
    """Their names have the id of the value, which says nothing."""
    a, b = Writer(tmp_path, 0, clock="boot"), Writer(tmp_path, 1, clock="boot")
    a.knows(b)
    b.knows(a)
    for number, name in ((2, "rref:281:step"), (3, "rref:562949953421321:step")):
        a.rows.append((tag_of(events.NameDeclared), 0, number, name))
        a.message(True, number * SECOND, CALL, 1, number, number)
        b.message(False, number * SECOND, CALL, 0, number)
    a.write()
    b.write()
    assert [(row.name, row.calls) for row in statistics(Job(tmp_path)).functions] == [("RRef.step", 2)]


def test_what_sending_costs_is_no_part_of_the_transfer(tmp_path: Path) -> None:
    a, b = Writer(tmp_path, 0, clock="boot"), Writer(tmp_path, 1, clock="boot")
    a.knows(b)
    b.knows(a)
    a.add(events.Serialized, 1_000, 1, 5, 300_000, False, ())
    a.add(events.MessageSent, SECOND, CALL, 1, 5, 0, 1, 1 << 20, 2, 900_000)
    b.add(events.MessageReceived, SECOND + 1_000_000, CALL, 0, 5, 0, 1, 1 << 20, 2)
    b.add(events.MessageSent, SECOND + 2_000_000, RESULT, 0, 5, 0, 0, 100, 0)
    a.add(events.MessageReceived, SECOND + 2_000_000, RESULT, 1, 5, 0, 0, 100, 0)
    a.write()
    b.write()
    (row,) = statistics(Job(tmp_path)).functions
    assert (row.sending.p50, row.transfer.p50) == (about(1_200_000), about(100_000))


def test_failures_and_missing_replies_are_counted(tmp_path: Path) -> None:
    a, b = two(tmp_path, 1, skew=0, clock="boot")
    call(a, b, 50, SECOND, reply=False)
    call(a, b, 51, 2 * SECOND)
    b.rows[-1] = (tag_of(events.RequestFinished), 2 * SECOND + 36_000, 1, 1, a.rank, 51, True)
    a.rows.append((tag_of(events.Dropped), 3 * SECOND, 7))
    a.write()
    b.write()
    found = statistics(Job(tmp_path))
    (row,) = found.functions
    assert (row.calls, row.failed, row.unanswered) == (3, 1, 1)
    assert found.dropped == 7


def test_a_worker_without_a_log_is_named_by_its_rank(tmp_path: Path) -> None:
    _, b = two(tmp_path, 3, skew=0, clock="boot")
    b.path.unlink()
    found = statistics(Job(tmp_path))
    assert {row.name for row in found.pairs} == {"w0 > rank 1", "rank 1 > w0"}


def run(*arguments: object) -> int:
    return main(["trace", *map(str, arguments)])


def test_json_is_the_statistics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two(tmp_path, 3, skew=0, clock="boot")
    assert run("stats", tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["functions"][0]["name"] == "m:f"
    assert found["functions"][0]["whole"]["max"] == 45_000
    assert [p["name"] for p in found["processes"]] == ["w0", "w1"]


def test_tables_have_a_row_for_each_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, _ = two(tmp_path, 3, skew=0, clock="boot")
    with a.path.open("ab") as file:
        file.write(b"\0\0\0\x01\xc1")
    assert run("stats", tmp_path) == 0
    shown = capsys.readouterr()
    assert [line.split()[:2] for line in shown.out.splitlines() if line.startswith("m:f")] == [["m:f", "6"]]
    assert "45.0 us" in shown.out
    assert "read in part" in shown.err


def test_the_log_of_a_worker_that_was_killed_has_no_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = two(tmp_path, 1, skew=0, clock="boot")
    a.add(events.ActorStopped, 60 * 10**9)
    for each in a, b:
        each.write()
    assert run("stats", tmp_path) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[-1].strip() for line in shown[2:4]] == ["whole", "no end"]


def test_names_cannot_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = Writer(tmp_path, 0)
    a.rows.append((tag_of(events.NameDeclared), 0, 2, "\x1b]0;owned\x07\x9b2J"))
    a.message(True, 1, 0x102, 1, 1, 2)
    a.write()
    for options in [], ["--json"]:
        assert run("stats", tmp_path, *options) == 0
        shown = capsys.readouterr().out
        assert "owned" in shown
        assert not {"\x1b", "\x9b"} & set(shown)


@pytest.mark.parametrize(("options", "shown"), [([], r"gr\xf6\u65e5"), (["--json"], r"gr\u00f6\u65e5")])
def test_names_that_the_locale_lacks_are_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], shown: str
) -> None:
    a = Writer(tmp_path, 0)
    a.rows.append((tag_of(events.NameDeclared), 0, 2, "gr\u00f6\u65e5"))
    a.message(True, 1, 0x102, 1, 1, 2)
    a.write()
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert run("stats", tmp_path, *options) == 0
    assert shown in stdout.buffer.getvalue().decode()


@pytest.mark.parametrize(
    ("make", "code", "told"),
    [
        (lambda path: path / "missing", 1, "cannot read the trace directory"),
        (lambda path: path, 1, "no trace logs"),
        (lambda path: "", 2, "set ZMQGRAD_TRACE"),
    ],
)
def test_what_cannot_be_read_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: object, code: int, told: str
) -> None:
    assert callable(make)
    assert run("stats", make(tmp_path)) == code
    assert told in capsys.readouterr().err


def test_a_job_is_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two(tmp_path, 3, skew=0, clock="boot")
    Writer(tmp_path, 0, clock="boot", job="other", incarnation=5, wall=60 * SECOND).write()
    assert run("stats", tmp_path, "--json") == 0
    shown = capsys.readouterr()
    assert [p["name"] for p in json.loads(shown.out)["processes"]] == ["w0"], "the newest"
    assert "has 2 jobs; this is the newest, " in shown.err
    assert run("stats", tmp_path, "--json", "--job", "j") == 0
    assert len(json.loads(capsys.readouterr().out)["processes"]) == 2
    assert run("stats", tmp_path, "--job", "no") == 1
    assert "no traces of job 'no'; it has j, other" in capsys.readouterr().err
    assert run("stats", tmp_path, "--jobs") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert (first.split()[0], second.split()[0]) == ("j", "other")
    assert "2 workers: train.py" in first


def test_a_large_trace_is_read_in_part_and_shows_its_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    two(tmp_path, 100)
    monkeypatch.setattr(trace_output, "MANY_EVENTS", 500)
    monkeypatch.setattr(trace_output, "PROGRESS_NANOSECONDS", 0)
    assert main(["trace", "stats", str(tmp_path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["messages"] == 200
    assert "608 events, which takes minutes to read: --last SECONDS" in err
    assert re.search(r"reading .* of logs, pass 2: \d+%", err)
    assert main(["trace", "stats", str(tmp_path), "--json", "--last", "0.015"]) == 0
    assert json.loads(capsys.readouterr().out)["messages"] == 4
    assert main(["trace", "stats", str(tmp_path), "--since", "9"]) == 1
    assert "the job lasted 1.0 s" in capsys.readouterr().err


def test_a_table_keeps_to_the_width_of_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two(tmp_path, 2, clock="boot", skew=0)
    arguments = ["trace", "stats", str(tmp_path), "--stores"]
    assert main(arguments) == 0
    wide = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("function", "m:f"))]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    tables = lines[1 : next(i for i, line in enumerate(lines) if line.startswith("per call: "))]
    assert max(map(len, tables)) <= 60
    heads = [line for line in tables if line.startswith("function")]
    cells = [line for line in tables if line.startswith("m:f ")]
    assert len(heads) == len(cells) > 1
    assert " ".join([heads[0], *(h.removeprefix("function") for h in heads[1:])]).split() == wide[0].split()
    assert " ".join([cells[0], *(c.removeprefix("m:f") for c in cells[1:])]).split() == wide[1].split()


def test_long_names_are_cut_before_numbers() -> None:
    lines = list(table(("function", "calls"), [("x" * 50, "123456")], 30))
    assert lines == ["function       calls", f"{'x' * 11}~  123456"]


gates: list[threading.Event] = []


def wait_for_gate() -> None:
    assert gates[0].wait(30)


@pytest.mark.parametrize("waits", [True, False])
def test_a_call_that_timed_out_has_failed(tmp_path: Path, waits: bool) -> None:
    gates.append(threading.Event())
    with record(tmp_path), cluster(2):
        future = rpc.rpc_async("worker1", wait_for_gate, timeout=0.05)
        if waits:
            with pytest.raises(RpcTimeoutError):
                future.wait()
        eventually(future.done)
        gates[0].set()
    gates.clear()
    (row,) = [row for row in statistics(Job(tmp_path)).functions if "wait_for_gate" in row.name]
    assert (row.calls, row.failed, row.unanswered) == (1, 1, 0)
