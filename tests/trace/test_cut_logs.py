"""Logs that end before others: those that still grow, and those that were cut or whose process was killed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.scripts import run_script
from tests.support.waiting import eventually
from tests.trace.test_job import CALL, RESULT, SECOND, Writer, call, two
from tests.trace.test_waits import MS, finish, served, stack, waits_for, workers
from zmqgrad.__main__ import main
from zmqgrad.trace import Job, events, launch_environment
from zmqgrad.trace.cycles import find_cycles
from zmqgrad.trace.events import tag_of
from zmqgrad.trace.findings import find
from zmqgrad.trace.labels import ends
from zmqgrad.trace.stats import statistics
from zmqgrad.trace.waits import find_waits


def live(directory: Path) -> Job:
    job = Job(directory)
    job.cut_live(lambda _: True)
    return job


def stopped(*writers: Writer, at: int) -> None:
    for each in writers:
        each.rows.append((tag_of(events.ActorStopped), at, 1))


def test_a_live_job_is_read_up_to_what_all_processes_have_written(tmp_path: Path) -> None:
    a, b = workers(tmp_path, 2)
    waits_for(a, b, 1, SECOND)
    a.message(True, 10 * SECOND, CALL, 1, 2, 1)  # b has not yet written that it served this
    b.message(True, 9 * SECOND + 10 * MS, RESULT, 0, 3)
    served(a, b, 9, 8 * SECOND, MS)
    finish(a, b)
    job = live(tmp_path)
    assert job.cut == 9 * SECOND
    waits = find_waits(job)
    assert waits.now == 9 * SECOND
    assert [w.message_id for w in waits.open] == [1]
    assert [w.duration(waits.now) for w in waits.open] == [8 * SECOND]
    assert len(list(job.calls())) == 2


def test_a_process_that_is_stopped_does_not_hide_what_the_others_did(tmp_path: Path) -> None:
    a, b, c = workers(tmp_path, 3)
    c.message(True, SECOND, CALL, 0, 9, 1)
    served(a, b, 1, 30 * SECOND, MS)
    finish(a, b, c)
    assert live(tmp_path).cut > 29 * SECOND


def test_stacks_of_a_live_job_are_read_although_they_were_recorded_after_the_cut(tmp_path: Path) -> None:
    a, b = workers(tmp_path, 2)
    waits_for(a, b, 1, SECOND)
    stack(a, "with lock:")
    b.message(True, 8 * SECOND, CALL, 0, 3, 1)
    finish(a, b)
    waits = find_waits(live(tmp_path))
    assert waits.now < 8 * SECOND
    assert waits.stacks


def test_calls_on_their_way_in_a_live_job_are_no_finding(tmp_path: Path) -> None:
    a, b = workers(tmp_path, 2)
    for number in range(1, 15):
        call(a, b, number, 9 * SECOND, reply=False)
    a.add(events.RendezvousStep, 10 * SECOND, 1, "later", 0, 0)
    b.add(events.RendezvousStep, 10 * SECOND, 1, "later", 0, 0)
    finish(a, b)
    assert find(live(tmp_path)) == []
    assert [f.title for f in find(Job(tmp_path))] == ["14 calls without a reply"]


def test_a_wait_whose_reply_may_have_come_after_the_end_of_its_log_is_neither_open_nor_in_a_cycle(
    tmp_path: Path,
) -> None:
    a, b = workers(tmp_path, 2)
    waits_for(a, b, 1, SECOND)
    waits_for(b, a, 2, SECOND)
    a.add(events.RendezvousStep, 6 * SECOND, 1, "later", 0, 0)  # then the log of a was cut
    b.message(True, 7 * SECOND, RESULT, 0, 1)
    b.add(events.RendezvousStep, 20 * SECOND, 1, "later", 0, 0)
    finish(a, b)
    waits = find_waits(Job(tmp_path))
    assert [w.message_id for w in waits.open] == [2]
    assert find_cycles(waits) == []


def test_a_wait_whose_reply_was_sent_long_ago_forms_no_cycle(tmp_path: Path) -> None:
    a, b = workers(tmp_path, 2)
    waits_for(a, b, 1, SECOND)
    waits_for(b, a, 2, SECOND)
    b.message(True, 7 * SECOND, RESULT, 0, 1)
    finish(a, b)
    with_reply = find_waits(Job(tmp_path), 20 * SECOND)
    assert find_cycles(with_reply) == []


def test_a_cut_log_is_a_finding_and_nothing_after_its_end_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = workers(tmp_path, 2)
    b.add(events.SendRecorded, SECOND, 5, 50, 0, 7, True)  # its gradient came after the cut
    a.add(events.PassStarted, 2 * SECOND, 5, 9)
    a.add(events.PassFinished, 3 * SECOND, 5, 9, False)
    for number in range(1, 4):
        a.message(True, 4 * SECOND, CALL, 1, number, 1)
        a.message(False, 4 * SECOND + MS, RESULT, 1, number)
    stopped(a, at=5 * SECOND)
    finish(a, b)
    (finding,) = find(Job(tmp_path))
    assert (finding.kind, finding.workers, finding.evidence) == ("cut log", ("w1",), {"messages": {"w1": 6}})
    assert "until 1.00 s of the job" in finding.detail
    assert statistics(Job(tmp_path)).lost == 0
    assert main(["trace", "findings", str(tmp_path)]) == 0
    noted = capsys.readouterr().err
    assert "note: 1 of 2 logs have no end" in noted
    assert "w1 (until 1.00 s)" in noted


def test_a_message_that_did_not_arrive_while_its_receiver_recorded_is_lost(tmp_path: Path) -> None:
    a, b = workers(tmp_path, 2)
    a.message(True, SECOND, CALL, 1, 1, 1)
    served(a, b, 2, SECOND, MS)
    finish(a, b)
    assert statistics(Job(tmp_path)).lost == 0, "the log of w1 may have ended before it arrived"
    stopped(a, b, at=9 * SECOND)
    finish(a, b)
    assert statistics(Job(tmp_path)).lost == 1
    (lost,) = [m for m in Job(tmp_path).messages() if m.received is None]
    assert ends(lost) == ("w0", "w1")


def test_a_log_whose_header_is_damaged_is_a_finding(tmp_path: Path) -> None:
    a, _ = two(tmp_path, 5, skew=0, clock="boot")
    a.path.write_bytes(a.path.read_bytes()[:5] + b"?" + a.path.read_bytes()[6:])
    found = {f.kind: f for f in find(Job(tmp_path))}
    assert "is no trace log" in found["unreadable log"].detail


@pytest.mark.parametrize(("failures", "found"), [(2, False), (3, True), (9, True)])
def test_functions_that_fail_often_are_a_finding(tmp_path: Path, failures: int, found: bool) -> None:
    a, b = workers(tmp_path, 2)
    for i in range(10):
        served(a, b, i + 1, SECOND + i * 10 * MS, MS)
    for row in [r for r in b.rows if r[0] == tag_of(events.RequestFinished)][:failures]:
        b.rows[b.rows.index(row)] = (*row[:-1], True)
    finish(a, b)
    titles = [f.title for f in find(Job(tmp_path)) if f.kind == "failing calls"]
    assert titles == ([f"m:f failed in {failures} of 10 calls"] if found else [])


def test_calls_that_time_out_have_failed(tmp_path: Path) -> None:
    """Nobody need wait for them; the finding tells where they were. A lost peer is a finding of its own."""
    a, b = workers(tmp_path, 2)
    for i in range(4):
        served(a, b, i + 1, SECOND + i * MS, SECOND)
    for i in range(3):
        a.add(events.CallFailed, SECOND + 50 * MS, 1, i + 1, "RpcTimeoutError")
    a.message(True, SECOND, CALL, 1, 9, 1)
    a.add(events.CallFailed, SECOND + 50 * MS, 1, 9, "RpcTimeoutError")
    a.message(True, SECOND, CALL, 1, 10, 1)
    a.add(events.CallFailed, 2 * SECOND, 1, 10, "PeerLostError")
    finish(a, b)
    (finding,) = [f for f in find(Job(tmp_path)) if f.kind == "failing calls"]
    assert finding.title == "m:f failed in 4 of 6 calls"
    assert finding.detail == "4 timed out: 3 while running, 1 before arriving. At w1 (4)."
    (row,) = statistics(Job(tmp_path)).functions
    assert (row.calls, row.failed, row.unanswered) == (6, 5, 0)


PROGRAM = """
import os, sys, threading, time
from zmqgrad import rpc
rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}")
open("ready", "w").close()
end = time.monotonic() + 60
while rank == 0 and time.monotonic() < end and os.path.exists("go on"):
    for future in [rpc.rpc_async("worker1", divmod, args=(i, 3)) for i in range(30)]:
        future.wait()
    threading.Event().wait(0.01)  # the trace must not grow faster than a busy machine reads it
rpc.shutdown()
"""


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_a_healthy_job_that_runs_has_neither_long_waits_nor_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, traces = tmp_path / "busy.py", tmp_path / "trace"
    script.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{PROGRAM}")
    (going := tmp_path / "go on").touch()
    found = []
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(run_script, script, workers=2, seconds=90, env=launch_environment(traces))
        try:
            eventually(lambda: job.done() or (tmp_path / "ready").exists(), bool, 90)
            eventually(lambda: job.done() or len(list(traces.glob("*.zgtrace"))) == 2, bool, 90)
            for _ in range(2):
                assert main(["trace", str(traces), "--all"]) == 0
                found.append(capsys.readouterr())
        finally:
            going.unlink()
        job.result()
    for each in found:
        assert "open wait" not in each.out
        assert "got no reply" not in each.out
        assert " -" not in each.out.replace(" -> ", " "), "no negative durations"
        assert "too late" not in each.out
        assert "without a reply" not in each.out
        assert "have no end" not in each.err
