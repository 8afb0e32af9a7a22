"""Timelines: valid by the Trace Event Format, nested, with arrows. From logs written here."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.trace.test_job import CALL, SECOND, Writer, call, two
from zmqgrad import rpc
from zmqgrad.__main__ import main
from zmqgrad.errors import GroupError, TraceError
from zmqgrad.testing import cluster
from zmqgrad.trace import Job, log, record
from zmqgrad.trace.events import (
    ActorStarted,
    ContextCreated,
    GroupCalled,
    GroupExecuted,
    PassFinished,
    PassStarted,
    ProcessInfo,
    RequestStarted,
    Role,
    WaitBegun,
    WaitEnded,
    tag_of,
)
from zmqgrad.trace.profiles import profile_events
from zmqgrad.trace.timeline import Timeline

Event = dict[str, Any]

REQUIRED = {
    "X": {"tid", "ts", "dur", "cat"},
    "b": {"ts", "id2", "cat"},
    "e": {"ts", "id2", "cat"},
    "s": {"tid", "ts", "id", "cat"},
    "f": {"tid", "ts", "id", "cat", "bp"},
    "C": {"ts", "args"},
    "M": {"args"},
    "i": {"tid", "ts", "s"},
}
"""The fields that the format wants of each phase that is used, beside ``name`` and ``pid``."""


def timeline(directory: Path) -> list[Event]:
    """The events of a timeline, checked: against the format, that slices nest, that arrows have both ends."""
    events = [json.loads(json.dumps(e)) for e in Timeline(Job(directory)).events()]
    check(events)
    return events


def check(events: list[Event]) -> None:
    tracks, arrows, asyncs = defaultdict(list), defaultdict(list), defaultdict(list)
    for event in events:
        phase = event["ph"]
        assert REQUIRED[phase] | {"name", "pid"} <= event.keys(), event
        assert isinstance(event["pid"], int)
        assert event.get("ts", 0) >= 0, event
        if phase == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append(event)
        elif phase in "sf":
            arrows[event["cat"], event["name"], event["id"]].append(event)
        elif phase in "be":
            asyncs[event["cat"], event["name"], event["id2"]["local"], event["pid"]].append(event)
        elif phase == "C":
            assert all(isinstance(v, int) and v >= 0 for v in event["args"].values()), event
    for track in tracks.values():
        track.sort(key=lambda e: (e["ts"], -e["dur"]))
        ends: list[float] = []
        for event in track:
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            end = event["ts"] + event["dur"]
            assert not ends or end <= ends[-1] + 1e-6, f"{event} begins within a slice and ends after it"
            ends.append(end)
    for group, phases in ((arrows, "sf"), (asyncs, "be")):
        for pair in group.values():
            assert "".join(e["ph"] for e in pair) == phases, pair
            assert pair[0]["ts"] <= pair[1]["ts"], pair
    for pair in arrows.values():
        for event in pair:
            assert any(
                s["ts"] <= event["ts"] <= s["ts"] + s["dur"] for s in tracks[event["pid"], event["tid"]]
            ), f"{event} is bound to no slice"


def named(events: list[Event], phase: str, name: str) -> list[Event]:
    return [e for e in events if e["ph"] == phase and e["name"] == name]


def test_a_call_is_shown_at_both_ends_with_its_queueing_apart(tmp_path: Path) -> None:
    two(tmp_path, 3, skew=0, clock="boot")
    events = timeline(tmp_path)
    caller, callee = (e["pid"] for name in ("w0", "w1") for e in events if _titled(e, name))
    served = named(events, "X", "m:f")
    assert next((e["pid"], e["ts"], e["dur"]) for e in served) == (callee, 15.0, 21.0)
    assert next((e["pid"], e["ts"]) for e in named(events, "b", "call m:f")) == (caller, 0.0)
    assert next(e["ts"] for e in named(events, "e", "call m:f")) == 45.0
    assert next((e["pid"], e["ts"]) for e in named(events, "b", "queued m:f")) == (callee, 10.0)
    assert next(e["ts"] for e in named(events, "e", "queued m:f")) == 15.0
    arrows = named(events, "s", "message")
    assert len(arrows) == 6
    assert [e["args"]["requests"] for e in named(events, "C", "w1 queue")] == [1, 0] * 3
    assert [e["args"]["bytes"] for e in named(events, "C", "w0 bytes in flight")] == [100, 0] * 3


def _titled(event: Event, name: str) -> bool:
    return event["name"] == "process_name" and event["args"]["name"].startswith(name)


def test_what_has_no_end_reaches_to_the_end_of_its_log(tmp_path: Path) -> None:
    a, b = two(tmp_path, 1, skew=0, clock="boot")
    call(a, b, 9, SECOND, reply=False)
    a.add(WaitBegun, SECOND + 1000, 1, 9)
    a.add(ContextCreated, 2 * SECOND, 5)
    a.write()
    b.write()
    events = timeline(tmp_path)
    (wait,) = named(events, "X", "wait for w1")
    assert wait["args"] == {"request": 9, "unfinished": True}
    assert wait["ts"] + wait["dur"] == 2e6
    assert [e for e in named(events, "b", "call m:f") if "unfinished" in e["args"]]
    assert [e for e in named(events, "X", "m:f") if "unfinished" in e["args"]]


def test_backward_passes_contain_their_groups_and_waits(tmp_path: Path) -> None:
    a, _ = two(tmp_path, 1, skew=0, clock="boot")
    a.add(PassStarted, SECOND, 4, 7)
    a.add(GroupExecuted, SECOND + 10, 4, 7, 5000, (), ((11, 1),))
    a.add(WaitBegun, SECOND + 6000, 0, 7)
    a.add(WaitEnded, SECOND + 8000, 0, 7, False)
    a.add(PassFinished, SECOND + 9000, 4, 7, True)
    a.write()
    events = timeline(tmp_path)
    (whole,) = named(events, "X", "backward pass")
    assert whole["args"] == {"context": 4, "pass": 7, "failed": True}
    assert whole["dur"] == 9.0
    assert named(events, "X", "backward roots")[0]["dur"] == 5.0
    assert named(events, "X", "wait for the backward pass")[0]["dur"] == 2.0


def test_a_message_that_never_arrived_has_no_arrow(tmp_path: Path) -> None:
    a, b = two(tmp_path, 1, skew=0, clock="boot")
    a.message(True, SECOND, CALL, 1, 50, 1)
    a.write()
    b.path.unlink()
    events = timeline(tmp_path)
    assert len(named(events, "X", "send CALL")) == 2
    assert not named(events, "s", "message")


def test_the_file_is_compressed_by_its_suffix_and_is_whole_or_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    two(tmp_path, 3)
    plain, packed = tmp_path / "t.json", tmp_path / "t.json.gz"

    def command(path: Path) -> int:
        return main(["trace", "timeline", str(tmp_path), "-o", str(path)])

    assert command(plain) == command(packed) == 0
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert json.loads(plain.read_bytes())["traceEvents"] == json.loads(json.dumps(timeline(tmp_path)))
    assert command(tmp_path / "missing" / "t.json") == 1
    assert re.search(r"cannot write .*No such file", capsys.readouterr().err)

    def broken(self: Timeline) -> Any:
        yield {"ph": "M", "name": "a"}
        raise TraceError("cut")

    monkeypatch.setattr(Timeline, "events", broken)
    before, there = plain.read_bytes(), sorted(tmp_path.iterdir())
    assert command(plain) == command(tmp_path / "other.json") == 1
    assert plain.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == there


def test_processes_of_one_pid_in_many_containers_keep_numbers_that_viewers_read(tmp_path: Path) -> None:
    for i in range(450):
        info = ProcessInfo(f"pod{i}", 1, 0, 0, "boot")
        start = (tag_of(ActorStarted), 0, 1, Role.WORKER, f"w{i}", i, 1000 + i, "j", "")
        (tmp_path / f"{i}.zgtrace").write_bytes(log.header(info) + log.record([start]))
    numbers = Timeline(Job(tmp_path)).pids.values()
    assert len(set(numbers)) == 450
    assert max(numbers) < 1 << 31


def test_a_wall_clock_of_another_century_is_no_error(tmp_path: Path) -> None:
    Writer(tmp_path, 0, clock="boot", wall=0).write()
    far = Writer(tmp_path, 1, clock="other", wall=1 << 62)
    far.knows(Writer(tmp_path, 2, clock="boot", wall=0))
    for number, waits in ((7, 1), (8, 0)):  # nanoseconds
        far.message(False, (1 << 60) - waits, CALL, 2, number, 1)
        far.add(RequestStarted, 1 << 60, 2, number)
    far.write()
    shown = list(Timeline(Job(tmp_path)).events())
    assert [e["args"]["requests"] for e in shown if e["name"] == "w1 queue"] == [1, 0]


# ---- profiles -------------------------------------------------------------------------------------------


def profile(path: Path, **more: Any) -> Path:
    """A trace as Kineto exports them; its process has pid 101, and its clock is that of the log."""
    events = [
        {"ph": "M", "name": "thread_name", "pid": 101, "tid": 7, "ts": 0, "args": {"name": "thread 7"}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 101, "tid": 7, "ts": 2e6 + 20, "dur": 5},
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 2e6 + 22, "dur": 2},
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 2e6},
    ]
    trace = {"host_name": "h1", "baseTimeNanoseconds": 48 * SECOND, "traceEvents": events, **more}
    path.write_text(json.dumps(trace))
    return path


def test_profiles_of_workers_join_on_the_clock_of_the_job(tmp_path: Path) -> None:
    two(tmp_path, 3, skew=5 * SECOND)  # its wall clock is ahead by 5 s as well
    job = Job(tmp_path)
    shown = Timeline(job)
    # The wall clock of worker 1 was at 55 s when its log began, at time 0 of the job.
    path = profile(tmp_path / "p.json", baseTimeNanoseconds=53 * SECOND)
    name, op, kernel = profile_events(shown, job, path)
    pid = shown.pids[id(job.workers()[1].process)]
    assert (name["pid"], name["args"]["name"]) == (pid, "main (torch.profiler)")
    assert op["pid"] == pid
    assert op["ts"] == pytest.approx(20, abs=10)
    assert kernel["pid"] >= 1000


def test_a_compressed_profile_that_is_damaged_is_refused(tmp_path: Path) -> None:
    two(tmp_path, 1, skew=0, clock="boot")
    job = Job(tmp_path)
    path = tmp_path / "p.json.gz"
    whole = gzip.compress(b'{"traceEvents": [], "baseTimeNanoseconds": 1}')
    path.write_bytes(whole[:12] + b"\xff\xff\xff" + whole[15:])
    with pytest.raises(TraceError, match="cannot read the profile"):
        list(profile_events(Timeline(job), job, path))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "cannot read the profile"),
        ("[]", "is no trace of torch.profiler"),
        ('{"traceEvents": []}', "does not say when it was recorded"),
        ('{"traceEvents": [], "baseTimeNanoseconds": 1}', "is the profile of no process of this job"),
    ],
)
def test_files_that_are_no_profile_of_the_job_are_refused(tmp_path: Path, content: str, problem: str) -> None:
    two(tmp_path, 1, skew=0, clock="boot")
    job = Job(tmp_path)
    path = tmp_path / "p.json"
    path.write_text(content)
    with pytest.raises(TraceError, match=problem):
        list(profile_events(Timeline(job), job, path))


@pytest.mark.parametrize(
    "wrong", [{"ts": "soon"}, {"ts": None}, {"ts": 1e308}, {"tid": [7]}, {"ph": "M", "tid": 8, "args": None}]
)
def test_a_profile_with_an_event_of_other_types_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    two(tmp_path, 1, skew=0, clock="boot")
    job = Job(tmp_path)
    event = {"ph": "X", "name": "thread_name", "pid": 101, "tid": 7, "ts": 1.0, **wrong}
    path = profile(tmp_path / "p.json", traceEvents=[event])
    with pytest.raises(TraceError, match="is no trace of"):
        list(profile_events(Timeline(job), job, path))


def test_a_profile_whose_process_is_not_unique_is_refused(tmp_path: Path) -> None:
    two(tmp_path, 1, skew=0, clock="boot")
    twin = Writer(tmp_path, 1, incarnation=5)
    assert isinstance(twin.path, Path)
    twin.write()
    job = Job(tmp_path)
    with pytest.raises(TraceError, match="more than one process"):
        list(profile_events(Timeline(job), job, profile(tmp_path / "p.json")))


# ---- the command ----------------------------------------------------------------------------------------


def test_the_command_writes_the_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two(tmp_path, 2, skew=0, clock="boot")
    assert main(["trace", "timeline", str(tmp_path)]) == 0
    path = tmp_path / "timeline.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert f"{path}: {len(events)} events" in capsys.readouterr().out
    assert path.stat().st_mode & 0o777 == 0o600
    check(events)
    assert main(["trace", "timeline", str(tmp_path / "missing")]) == 1
    assert "cannot read the trace directory" in capsys.readouterr().err


def test_a_process_without_workers_has_a_track(tmp_path: Path) -> None:
    from zmqgrad.trace import log

    path = tmp_path / "s.zgtrace"
    rows = [(tag_of(ActorStarted), 5, 1, Role.STORE_SERVER, "store", 0, 0, "", "tcp://h:1")]
    path.write_bytes(log.header(ProcessInfo("h", 5, 50, 10, "boot")) + log.record(rows))
    assert [e["args"]["name"] for e in timeline(tmp_path) if e["name"] == "process_name"] == [
        "store server (pid 5, h)"
    ]


def double(x: int) -> int:
    """Twice a number."""
    return 2 * x


def test_a_group_call_is_one_thing_with_its_calls(tmp_path: Path) -> None:
    with record(tmp_path), cluster(4):
        group = rpc.group("worker*")
        assert group.call(double, (1,)) == [2] * 4
        with pytest.raises(GroupError):
            group.call_async(double, ("text", "more")).wait()
    called = [each.event for each in Job(tmp_path).events() if isinstance(each.event, GroupCalled)]
    assert [(event.function, len(event.calls), event.failed) for event in called] == [
        ("double", 4, False),
        ("double", 4, True),
    ]
    events = timeline(tmp_path)
    begun = [e for e in events if e.get("cat") == "group call" and e["ph"] == "b"]
    ended = [e for e in events if e.get("cat") == "group call" and e["ph"] == "e"]
    assert [e["name"] for e in begun] == ["group call double on 4 workers"] * 2
    calls = [e for e in events if e.get("cat") == "call" and e["ph"] == "b" and e["name"].endswith("double")]
    assert len(calls) == 8
    for one, end in zip(begun, ended, strict=True):
        own = [call for call in calls if call["args"]["id"] in one["args"]["calls"]]
        assert len(own) == 4
        assert all(one["ts"] <= call["ts"] <= end["ts"] for call in own)
    waits = {e["name"] for e in events if e.get("cat") == "wait"}  # those that took long enough
    assert waits <= {f"wait for worker{rank}" for rank in range(4)}


def test_a_wait_for_a_call_of_ones_own_is_none_for_a_backward_pass(tmp_path: Path) -> None:
    a, _ = two(tmp_path, 1, skew=0, clock="boot")
    a.add(PassStarted, SECOND, 4, 7)
    a.add(WaitBegun, SECOND + 1000, 0, 9)
    a.add(WaitEnded, SECOND + 2000, 0, 9, False)
    a.add(WaitBegun, SECOND + 6000, 0, 7)
    a.write()
    waits = [e["name"] for e in timeline(tmp_path) if e.get("cat") == "wait"]
    assert waits == ["wait for w0", "wait for the backward pass"]
