"""Jobs: logs of several processes on one clock, messages paired, calls assembled. From logs written here."""

from __future__ import annotations

import math
import os
import tracemalloc
from pathlib import Path

import pytest

from zmqgrad.__main__ import main
from zmqgrad.errors import TraceError
from zmqgrad.trace import Job, events, log, pairing
from zmqgrad.trace.events import tag_of
from zmqgrad.trace.findings import find
from zmqgrad.trace.tail import recorded
from zmqgrad.wire.messages import MessageType

CALL, RESULT = int(MessageType.CALL), int(MessageType.RESULT)
SECOND = 1_000_000_000


class Writer:
    """Writes the log of a worker whose clock is ahead of the true time by ``skew``."""

    def __init__(
        self,
        directory: Path,
        rank: int,
        *,
        skew: int = 0,
        clock: str = "",
        job: str = "j",
        launcher: str = "",
        incarnation: int = 0,
        wall: int = 50 * SECOND,
    ) -> None:
        self.rank, self.skew = rank, skew
        self.incarnation = incarnation or 1000 + rank
        info = events.ProcessInfo(
            f"h{rank}", 100 + rank, wall + skew, skew, clock, launcher, program="train.py"
        )
        self.path = directory / f"w{rank}-{self.incarnation}.zgtrace"
        self.path.write_bytes(log.header(info))
        self.rows: list[tuple[object, ...]] = [
            (
                tag_of(events.ActorStarted),
                skew,
                1,
                events.Role.WORKER,
                f"w{rank}",
                rank,
                self.incarnation,
                job,
                "",
            ),
            (tag_of(events.ThreadDeclared), skew, 1, "main", 7),
            (tag_of(events.NameDeclared), skew, 1, "m:f"),
        ]

    def knows(self, *others: Writer, at: int = 0) -> None:
        for other in others:
            self.rows.append((tag_of(events.PeerDeclared), at + self.skew, 1, other.rank, other.incarnation))

    def add(self, kind: type[events.Event], time: int, *values: object) -> None:
        self.rows.append((tag_of(kind), time + self.skew, 1, 1, *values))

    def message(self, out: bool, time: int, kind: int, peer: int, number: int, name: int = 0) -> None:
        self.add(
            events.MessageSent if out else events.MessageReceived, time, kind, peer, number, 0, name, 100, 0
        )

    def write(self) -> None:
        with self.path.open("ab") as file:
            file.write(log.record(self.rows))
        self.rows = []


def call(a: Writer, b: Writer, number: int, at: int, reply: bool = True) -> None:
    """A call of b by a: 10 us there, 5 us in the queue, 20 us of work, 10 us back."""
    us = 1000
    a.message(True, at, CALL, b.rank, number, 1)
    b.message(False, at + 10 * us, CALL, a.rank, number, 1)
    b.add(events.RequestStarted, at + 15 * us, a.rank, number)
    if reply:
        b.message(True, at + 35 * us, RESULT, a.rank, number)
        b.add(events.RequestFinished, at + 36 * us, a.rank, number, False)
        a.message(False, at + 45 * us, RESULT, b.rank, number)


def two(
    directory: Path, calls: int = 100, *, skew: int = 5 * SECOND, clock: str = ""
) -> tuple[Writer, Writer]:
    a, b = Writer(directory, 0, clock=clock), Writer(directory, 1, skew=skew, clock=clock)
    a.knows(b)
    b.knows(a)
    for i in range(calls):
        call(a, b, i + 1, i * 10_000_000)
    a.write()
    b.write()
    return a, b


def test_calls_of_two_processes_are_assembled_on_one_clock(tmp_path: Path) -> None:
    two(tmp_path, skew=5 * SECOND)
    job = Job(tmp_path)
    assert [w.name for w in job.workers()] == ["w0", "w1"]
    calls = list(job.calls())
    assert len(calls) == 100
    for each in calls:
        assert each.request.source is not None
        assert each.request.target is not None
        assert (each.request.source.rank, each.request.target.rank, each.function) == (0, 1, "m:f")
        assert each.reply is not None
        times = [each.request.sent, each.request.received, each.started, each.reply.sent, each.reply.received]
        assert times == sorted(t for t in times if t is not None)
        assert each.duration == 45_000
        assert each.queued is not None
        assert each.queued <= 5_000
    process = job.workers()[1].process
    middle = 500_000_000
    bound = job.bound(process, middle + 5 * SECOND)
    assert abs(job.time(process, middle + 5 * SECOND) - middle) <= bound < 50_000


def test_processes_that_share_a_clock_need_no_alignment(tmp_path: Path) -> None:
    two(tmp_path, skew=0, clock="boot")
    job = Job(tmp_path)
    assert job.alignment is None
    assert {m.received - m.sent for m in job.messages() if m.received and m.sent is not None} == {10_000}
    assert job.bound(job.processes[1], 0) == 0.0


def test_a_call_without_reply_is_open(tmp_path: Path) -> None:
    a, b = two(tmp_path, 3, skew=0, clock="boot")
    call(a, b, 99, SECOND, reply=False)
    a.write()
    b.write()
    *done, last = Job(tmp_path).calls()
    assert len(done) == 3
    assert not last.is_complete
    assert last.started == SECOND + 15_000
    assert last.finished is None


def test_the_log_of_a_killed_worker_may_be_missing_or_cut(tmp_path: Path) -> None:
    a, b = two(tmp_path, 3, skew=0, clock="boot")
    b.path.write_bytes(b.path.read_bytes() + b"\0\0\1")
    assert len(list(Job(tmp_path).calls())) == 3
    b.path.unlink()
    calls = list(Job(tmp_path).calls())
    assert len(calls) == 3
    assert all(c.request.target is None and c.request.peer == 1 and c.request.received is None for c in calls)
    assert a.path.exists()


def test_a_worker_that_joins_again_reuses_message_ids(tmp_path: Path) -> None:
    a, b = two(tmp_path, 2, skew=0, clock="boot")
    again = Writer(tmp_path, 0, clock="boot", incarnation=77)
    again.knows(b)
    b.knows(again, at=SECOND)  # as recorders do: at the time of its first message
    call(again, b, 1, SECOND)
    again.write()
    b.write()
    calls = list(Job(tmp_path).calls())
    assert [c.request.source.incarnation for c in calls if c.request.source] == [1000, 1000, 77]
    assert all(c.is_complete for c in calls)
    assert a.path.exists()


def test_jobs_in_one_directory_are_told_apart(tmp_path: Path) -> None:
    two(tmp_path, 2, skew=0, clock="boot")
    Writer(tmp_path, 0, clock="boot", job="other", incarnation=5, wall=40 * SECOND).write()
    assert Job(tmp_path).id == "j", "the one that began last"
    assert len(list(Job(tmp_path, "j").calls())) == 2
    assert list(Job(tmp_path, "other").calls()) == []
    with pytest.raises(TraceError, match="no traces of job 'x'"):
        Job(tmp_path, "x")


def test_unreadable_files_are_left_out_and_named(tmp_path: Path) -> None:
    two(tmp_path, 2, skew=0, clock="boot")
    (tmp_path / "x.zgtrace").write_bytes(log.MAGIC + b"\0\0\0\x09" + b"rest")
    job = Job(tmp_path)
    assert len(job.processes) == 2
    assert "has version 9" in job.unreadable[0]


def test_damage_in_the_middle_keeps_what_is_before(tmp_path: Path) -> None:
    _, b = two(tmp_path, 2, skew=0, clock="boot")
    with b.path.open("ab") as file:
        file.write(b"\0\0\0\x01\xc1")
    job = Job(tmp_path)
    damaged = [p for p in job.processes if p.damage]
    assert [p.path for p in damaged] == [b.path]
    assert len(list(job.calls())) == 2


def test_a_part_of_a_job_has_the_calls_of_that_time(tmp_path: Path) -> None:
    two(tmp_path, 100)  # a call each 10 ms; workers with clocks of their own
    job = Job(tmp_path)
    job.choose_part(since=0.495, until=0.595)
    assert [call.request.message_id for call in job.calls()] == list(range(51, 61))
    assert all(call.is_complete for call in job.calls())
    job.choose_part(last=0.015)
    assert {message.message_id for message in job.messages()} == {99, 100}
    job.choose_part()
    assert len(list(job.calls())) == 100


@pytest.mark.parametrize(
    "part", [{"since": 2}, {"since": 0.5, "until": 0.4}, {"last": -1}, {"last": math.nan}]
)
def test_a_part_that_has_nothing_is_an_error(tmp_path: Path, part: dict[str, float]) -> None:
    two(tmp_path, 100)
    with pytest.raises(TraceError, match=r"nothing of the chosen time: the job lasted 1\.0 s"):
        Job(tmp_path).choose_part(**part)


def test_a_wall_clock_that_is_set_is_noted_and_changes_no_time(tmp_path: Path) -> None:
    a, _ = two(tmp_path, 2, skew=0, clock="boot")
    a.rows += [
        (tag_of(events.ClockSample), 1, 50 * SECOND),
        (tag_of(events.ClockSample), SECOND, 3600 * SECOND),
    ]
    a.write()
    job = Job(tmp_path)
    assert [p.jumps for p in job.processes if p.path == a.path] == [[SECOND]]
    assert len(list(job.calls())) == 2


@pytest.mark.parametrize(
    ("wall", "set_to", "is_part"),
    [(10, 15, False), (1000, 1005, True), (9000, 9005, False), (10, 1005, True), (9000, 1005, True)],
)
def test_what_belongs_to_no_job_is_part_of_those_that_ran_meanwhile(
    tmp_path: Path, wall: int, set_to: int, is_part: bool
) -> None:
    """Also if its wall clock was set meanwhile, or its host was suspended."""
    rows = [
        (tag_of(events.ActorStarted), 0, 1, events.Role.STORE_SERVER, ""),
        (tag_of(events.ClockSample), 5 * SECOND, set_to * SECOND),
    ]
    info = events.ProcessInfo("h", 7, wall * SECOND, 0, "of the store")
    (tmp_path / "store.zgtrace").write_bytes(log.header(info) + log.record(rows))
    assert len(Job(tmp_path).processes) == 1
    a = Writer(tmp_path, 0, clock="boot", wall=1000 * SECOND)
    a.add(events.ContextCreated, 30 * SECOND, 1)
    a.write()
    assert [p.info.pid for p in Job(tmp_path).processes] == ([7, 100] if is_part else [100])


def test_a_job_that_began_before_its_reference_was_booted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = Writer(tmp_path, 0, clock="a new host", wall=1000 * SECOND)  # its clock began at 1000 s
    b = Writer(tmp_path, 1, clock="an old one", wall=100 * SECOND)
    b.message(True, SECOND, CALL, 2, 7, 1)
    b.add(events.SendRecorded, SECOND, 1, 9, 2, 7, False)
    b.message(True, 905 * SECOND, CALL, 2, 8, 1)
    a.add(events.ContextCreated, 2 * SECOND, 1)
    a.write()
    b.write()
    os.utime(a.path, (1, 1))  # it was lost first, so its log comes first
    job = Job(tmp_path)
    assert job.reference.path == a.path
    assert job.span()[0] == -900 * SECOND
    assert [line.message.message_id for line in recorded(job.messages())] == [7, 8]
    assert "unused" not in {finding.kind.split()[0] for finding in find(job)}
    assert main(["trace", "tail", "--since", "0", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_reports_of_passes_are_paired_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairing, "MAX_OPEN", 100)
    a, b = Writer(tmp_path, 0, clock="boot"), Writer(tmp_path, 1, clock="boot")
    a.knows(b)
    b.knows(a)
    kind, passes = int(MessageType.BACKWARD_AUTOGRAD_RESP), 20_000
    for number in range(1, passes + 1):
        for i in range(2):  # several reports have the id of their pass
            b.message(True, number * 1000 + i, kind, 0, number)
            a.message(False, number * 1000 + 100 + i, kind, 1, number)
        if number % 500 == 0:
            a.write()
            b.write()
    job = Job(tmp_path)
    messages = job.messages()
    next(messages)
    tracemalloc.start()
    try:
        assert sum(m.transfer == 100 for m in messages) == 2 * passes - 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000  # what was kept of each pass took 300 bytes


def test_samples_of_a_clock_are_kept_only_where_it_was_set(tmp_path: Path) -> None:
    a, hour = Writer(tmp_path, 0, clock="boot"), 3600
    for second in range(hour):
        wall = 50 * SECOND if second < 1000 else 20 * SECOND
        a.rows.append((tag_of(events.ClockSample), second * SECOND, wall + second * SECOND + second % 7))
    a.write()
    (process,) = Job(tmp_path).processes
    assert process.jumps == [1000 * SECOND]
    assert len(process.samples) == 2
    assert process.last == (hour - 1) * SECOND
