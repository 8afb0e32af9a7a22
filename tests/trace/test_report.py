"""The report: what its page is given, and what stands out. From logs written here."""

from __future__ import annotations

import base64
import errno
import gzip
import json
import os
import re
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trace.test_job import SECOND, Writer, call, two
from zmqgrad.__main__ import main
from zmqgrad.cli.trace_output import output_file
from zmqgrad.errors import TraceError
from zmqgrad.trace import Job, events
from zmqgrad.trace.events import tag_of
from zmqgrad.trace.report import data, render
from zmqgrad.trace.report.data import Report
from zmqgrad.wire.messages import MessageType

MS = 1_000_000


def unpack(packed: bytes) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """What the script of the page reads."""
    size = struct.unpack_from("<I", packed)[0]
    head = json.loads(packed[4 : 4 + size])
    codes, at, columns = (
        {"Uint8": "B", "Uint16": "H", "Int16": "h", "Uint32": "I", "Int32": "i"},
        4 + size,
        {},
    )
    for name, kind, count in head["columns"]:
        columns[name] = list(struct.unpack_from(f"<{count}{codes[kind]}", packed, at))
        at += -(-struct.calcsize(codes[kind]) * count // 8) * 8
    assert at == len(packed)
    return head, columns


def data_of(page: bytes) -> tuple[dict[str, Any], dict[str, list[int]]]:
    found = re.search(rb'id="data">([^<]*)<', page)
    assert found is not None
    return unpack(gzip.decompress(base64.b64decode(found[1])))


def titles(directory: Path) -> list[str]:
    return [f"{f.severity.value}: {f.title}" for f in Report(Job(directory)).findings]


def workers(directory: Path, count: int) -> list[Writer]:
    found = [Writer(directory, rank, clock="boot") for rank in range(count)]
    for each in found:
        each.knows(*found)
    return found


def served_call(a: Writer, b: Writer, number: int, at: int, run: int) -> None:
    kinds = int(MessageType.CALL), int(MessageType.RESULT)
    a.message(True, at, kinds[0], b.rank, number, 1)
    b.message(False, at + 1000, kinds[0], a.rank, number, 1)
    b.add(events.RequestStarted, at + 2000, a.rank, number)
    b.message(True, at + 2000 + run, kinds[1], a.rank, number)
    b.add(events.RequestFinished, at + 3000 + run, a.rank, number, False)
    a.message(False, at + 4000 + run, kinds[1], b.rank, number)


def test_the_page_has_more_actors_and_threads_than_16_bits_count(tmp_path: Path) -> None:
    count = 66_000
    a = Writer(tmp_path, 0, clock="boot")
    client = (events.Role.STORE_CLIENT, "", 0, 0, "", "")
    a.rows += [(tag_of(events.ActorStarted), 0, 2 + i, *client) for i in range(count)]
    a.rows += [(tag_of(events.ThreadDeclared), 0, 2 + i, f"thread {i}", i) for i in range(count)]
    get = (int(MessageType.STORE_GET), 9)
    a.rows += [(tag_of(events.MessageSent), i, 2 + i, 2 + i, *get, i) for i in range(1, count)]
    a.write()
    head, columns = unpack(Report(Job(tmp_path)).packed())
    assert head["threads"][columns["senderThread"][-1]] == f"thread {count - 1}"
    assert columns["source"][-1] == count  # after the worker


def test_the_page_has_every_message_with_its_times_and_its_pair(tmp_path: Path) -> None:
    two(tmp_path, 50)
    job = Job(tmp_path)
    head, columns = unpack(Report(job).packed())
    messages = sorted(job.messages(), key=lambda m: m.sent or 0)
    assert len(columns["step"]) == len(messages) == 100
    times = [sum(columns["step"][: i + 1]) * head["tick"] for i in range(100)]
    start = min(m.sent or 0 for m in messages)
    for row, message in enumerate(messages):
        assert message.sent is not None
        assert message.received is not None
        assert times[row] - times[0] == message.sent - start
        assert columns["flight"][row] * head["tick"] == message.received - message.sent
        assert head["actors"][columns["source"][row]]["name"] == f"w{message.source.rank}"  # type: ignore[union-attr]
        assert head["names"][columns["name"][row]] == "m:f"
        pair = columns["pair"][row]
        assert columns["pair"][pair] == row
        assert messages[pair].message_id == message.message_id
    assert {columns["queued"][i] for i in range(0, 100, 2)} <= {*range(4_900, 5_100)}


def test_a_long_job_is_shown_in_coarser_ticks(tmp_path: Path) -> None:
    a, b = workers(tmp_path, 2)
    call(a, b, 1, 0)
    call(a, b, 2, 100_000 * SECOND)
    a.write()
    b.write()
    head, columns = unpack(Report(Job(tmp_path)).packed())
    assert sum(columns["step"]) * head["tick"] == pytest.approx(100_000 * SECOND, abs=100 * head["tick"])


def test_a_straggler_and_a_hot_worker_are_named(tmp_path: Path) -> None:
    a, b, c, d = workers(tmp_path, 4)
    for i in range(60):
        for number, (server, run) in enumerate(((b, 1 * MS), (c, 1 * MS), (d, 5 * MS))):
            served_call(a, server, 1000 * number + i + 1, i * 20 * MS, run)
    for each in (a, b, c, d):
        each.add(events.ActorStopped, 3 * SECOND)
        each.rows[-1] = (tag_of(events.ActorStopped), 3 * SECOND, 1)
        each.write()
    found = titles(tmp_path)
    assert "warning: Straggler: w3" in found
    assert not any("w1" in t or "w2" in t for t in found if t.startswith("warning"))
    for i in range(500):
        served_call(a, b, 5000 + i, 2 * SECOND + i * 2 * MS, 20 * MS)  # ten at a time
    a.write()
    b.write()
    assert "warning: Hot worker: w1" in titles(tmp_path)


def test_workers_that_wait_for_each_other_are_a_deadlock(tmp_path: Path) -> None:
    a, b = workers(tmp_path, 2)
    for x, y in ((a, b), (b, a)):
        kind = int(MessageType.CALL)
        x.message(True, MS, kind, y.rank, 7, 1)
        y.message(False, 2 * MS, kind, x.rank, 7, 1)
        x.add(events.WaitBegun, MS, y.rank, 7)
        y.add(events.RequestStarted, 3 * MS, x.rank, 7)
        y.add(events.ContextCreated, 2 * SECOND, 1)
    a.write()
    b.write()
    report = Report(Job(tmp_path))
    assert report.findings[0].severity == "problem"
    assert report.findings[0].title == "Deadlock: w0 -> w1 -> w0: each waits for the next"
    assert [w.until for w in report.activity.waits] == [None, None]
    assert not any("without a reply" in title for title in titles(tmp_path)), "the deadlock explains them"
    assert "note: 2 workers did not shut down" in titles(tmp_path)


def test_sends_that_no_backward_pass_reaches_are_named(tmp_path: Path) -> None:
    a, b = workers(tmp_path, 2)
    for number in (1, 2):
        request = (int(MessageType.FORWARD_AUTOGRAD_REQ), 1, number, 77, 1, 100, 0)
        a.add(events.MessageSent, number * MS, *request)
        a.add(events.SendRecorded, number * MS, 77, 100 + number, 1, number, False)
    a.add(events.PassStarted, 5 * MS, 77, 9)
    a.add(events.GroupExecuted, 6 * MS, 77, 9, 1000, (101,), ())
    a.write()
    b.write()
    assert not any("gradient" in t for t in titles(tmp_path)), "the pass has not ended"
    a.add(events.PassFinished, 7 * MS, 77, 9, False)
    a.write()
    report = Report(Job(tmp_path))
    unused = next(f for f in report.findings if "gradient" in f.title)
    assert unused.title == "No gradient came back for the arguments of m:f (1 of 2 calls)"
    head, _ = unpack(report.packed())
    (row,) = (f["row"] for f in head["findings"] if f["kind"] == "unused arguments")
    assert report.messages.number[row] == 2
    assert [send[5] for send in head["contexts"][0]["sends"]] == [False, True]


def test_only_the_chosen_time_is_shown(tmp_path: Path) -> None:
    a, _ = two(tmp_path, 100, skew=0, clock="boot")  # a call every 10 ms
    a.add(events.WaitBegun, 900 * MS, 1, 7)
    a.write()
    page = tmp_path / "page.html"
    options = ["--since", "0.495", "--until", "0.695", "-o", str(page)]
    assert main(["trace", "report", str(tmp_path), *options]) == 0
    _, columns = data_of(page.read_bytes())
    assert len(columns["step"]) == 40
    assert len(columns["waitBegun"]) == 0


def test_too_many_messages_are_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two(tmp_path, 100)
    monkeypatch.setattr(data, "MAX_MESSAGES", 50)
    with pytest.raises(TraceError, match=r"more than 50 messages.*--since and --until"):
        render(Job(tmp_path))


def test_without_plotly_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two(tmp_path, 1)
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(TraceError, match=r"pip install 'zmqgrad\[trace\]'"):
        render(Job(tmp_path))


def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two(tmp_path, 10)
    assert main(["trace", "report", str(tmp_path)]) == 0
    page = tmp_path / "report.html"
    assert str(page) in capsys.readouterr().out
    assert page.stat().st_mode & 0o777 == 0o600
    assert len(data_of(page.read_bytes())[1]["step"]) == 20


def test_a_damaged_and_a_foreign_log_are_told_and_the_rest_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, _ = two(tmp_path, 10, skew=0, clock="boot")
    with a.path.open("ab") as file:
        file.write(b"\0\0\0\x02\xff\xff")
    (tmp_path / "other.zgtrace").write_bytes(b"\x89zgtrace\0\0\0\x63rest")
    assert main(["trace", "report", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert "damaged at byte" in said
    assert "version 99" in said
    head, columns = data_of((tmp_path / "report.html").read_bytes())
    assert len(columns["step"]) == 20
    assert {"damaged log", "unreadable log"} <= {f["kind"] for f in head["findings"]}


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no trace logs"), (b"", "no readable trace logs"), (b"text", "is no trace log")],
)
def test_a_directory_without_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "a.zgtrace").write_bytes(content)
    assert main(["trace", "report", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two(tmp_path, 1)
    assert main(["trace", "report", str(tmp_path), "-o", str(tmp_path / "missing" / "r.html")]) == 1
    assert f"cannot write {tmp_path}" in capsys.readouterr().err


def test_a_page_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    """And one that is written is for the user alone, whoever could read the one before."""
    path = tmp_path / "r.html"
    path.write_text("before")
    path.chmod(0o644)

    def fail() -> None:
        with output_file(path) as file:
            file.write(b"a part")
            raise OSError(errno.ENOSPC, "no space")

    with pytest.raises(TraceError, match=r"cannot write .*no space"):
        fail()
    assert path.read_text() == "before"
    two(tmp_path, 1)
    assert main(["trace", "report", str(tmp_path), "-o", str(path)]) == 0
    assert path.stat().st_mode & 0o777 == 0o600
    assert main(["trace", "report", str(tmp_path), "-o", "/dev/null"]) == 0
    assert Path("/dev/null").is_char_device()
    (tmp_path / "other").write_text("kept")
    (tmp_path / f".{path.name}.{os.getpid()}").symlink_to(tmp_path / "other")  # by another user of /tmp, say
    assert main(["trace", "report", str(tmp_path), "-o", str(path)]) == 1
    assert (tmp_path / "other").read_text() == "kept"
    assert [each for each in tmp_path.iterdir() if each.name.startswith(".")] == []
