"""Waits and findings, from logs written here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.trace.test_job import CALL, RESULT, SECOND, Writer, call
from zmqgrad.__main__ import main
from zmqgrad.trace import Job, events
from zmqgrad.trace.cycles import find_cycles
from zmqgrad.trace.events import tag_of
from zmqgrad.trace.findings import Severity, find
from zmqgrad.trace.places import locate
from zmqgrad.trace.requests import RemoteRequests
from zmqgrad.trace.sequence import context_diagram
from zmqgrad.trace.waits import Wait, Waits, find_waits
from zmqgrad.transport.tap import WORKER, Identity
from zmqgrad.wire.messages import MessageType

MS = 1_000_000


def workers(directory: Path, count: int) -> list[Writer]:
    found = [Writer(directory, rank, clock="boot") for rank in range(count)]
    for each in found:
        each.knows(*found)
    return found


def finish(*writers: Writer) -> None:
    for each in writers:
        each.write()


def waits_for(
    a: Writer, b: Writer, number: int, at: int, until: int | None = None, *, arrives: bool = True
) -> None:
    """A call of b by a without a reply, for which a waits; it fails at ``until``."""
    a.message(True, at, CALL, b.rank, number, 1)
    a.add(events.WaitBegun, at, b.rank, number)
    if arrives:
        b.message(False, at + MS, CALL, a.rank, number, 1)
        b.add(events.RequestStarted, at + 2 * MS, a.rank, number)
    if until is not None:
        a.add(events.WaitEnded, until, b.rank, number, True)


@pytest.mark.parametrize("until", [None, 30 * SECOND])
def test_a_cycle_is_named_whether_it_lasts_or_has_timed_out(tmp_path: Path, until: int | None) -> None:
    a, b, c, d = workers(tmp_path, 4)
    waits_for(a, b, 1, SECOND, until)
    waits_for(b, c, 2, 2 * SECOND, until)
    waits_for(c, a, 3, 3 * SECOND, until)
    waits_for(d, a, 4, 4 * SECOND, until)
    d.add(events.RendezvousStep, 31 * SECOND, 1, "later", 0, 0)
    finish(a, b, c, d)
    waits = find_waits(Job(tmp_path))
    (cycle,) = find_cycles(waits)
    assert [(w.waiter.name, w.target and w.target.name) for w in cycle] == [
        ("w0", "w1"),
        ("w1", "w2"),
        ("w2", "w0"),
    ]
    assert "w1 has run it for" in locate(cycle[0], waits)
    assert len(waits.stuck()) == 4
    problems = [f for f in find(Job(tmp_path)) if f.severity is Severity.PROBLEM]
    assert [f.kind for f in problems] == ["deadlock", "open wait" if until is None else "failed wait"]
    assert problems[0].workers == ("w0", "w1", "w2")
    assert problems[1].workers == ("w3",)


def test_waits_one_after_the_other_are_no_cycle(tmp_path: Path) -> None:
    a, b = workers(tmp_path, 2)
    waits_for(a, b, 1, SECOND, 5 * SECOND)
    waits_for(b, a, 2, 6 * SECOND, 9 * SECOND)
    finish(a, b)
    assert find_cycles(find_waits(Job(tmp_path))) == []


def stack(actor: Writer, line: str) -> None:
    actor.rows.append(
        (
            tag_of(events.StackDumped),
            9 * SECOND,
            7,
            "main",
            f'  File "/a.py", line 1, in f\n    {line}\n',
        )
    )


@pytest.mark.parametrize(("line", "cycles"), [("with lock:", 1), ("x = x @ x", 0)])
def test_a_thread_that_computes_waits_for_nobody(tmp_path: Path, line: str, cycles: int) -> None:
    a, b = workers(tmp_path, 2)
    waits_for(a, b, 1, SECOND)
    waits_for(b, a, 2, SECOND)  # both began before the other's call: no thread serves and waits
    stack(a, line)
    stack(b, line)
    finish(a, b)
    assert len(find_cycles(find_waits(Job(tmp_path), 10 * SECOND))) == cycles


def test_a_worker_that_is_about_to_shut_down_blocks_nobody(tmp_path: Path) -> None:
    a, b = workers(tmp_path, 2)
    b.rows.append((tag_of(events.NameDeclared), 0, 2, "zmqgrad.rpc.membership.collectives:_contribute"))
    b.message(True, SECOND, CALL, 0, 9, 2)
    b.add(events.WaitBegun, SECOND, 0, 9)
    waits_for(a, b, 1, 2 * SECOND)
    finish(a, b)
    assert find_cycles(find_waits(Job(tmp_path), 60 * SECOND)) == []


def test_a_chain_of_waits_is_no_cycle(tmp_path: Path) -> None:
    a, b, c = workers(tmp_path, 3)
    waits_for(a, b, 1, SECOND)
    waits_for(b, c, 2, SECOND)
    c.add(events.RendezvousStep, 99 * SECOND, 1, "later", 0, 0)
    finish(a, b, c)
    waits = find_waits(Job(tmp_path))
    assert len(waits.open) == 2
    assert find_cycles(waits) == []


def test_cycles_need_a_wait_in_vain_and_a_common_moment(tmp_path: Path) -> None:
    finish(*workers(tmp_path, 4))
    actors = Job(tmp_path).workers()

    def wait(a: int, b: int, since: int, until: int | None = 10, failed: bool = False) -> Wait:
        return Wait(actors[a], 1, 1, b, since, until, failed, target=actors[b])

    def cycles(*all_waits: Wait) -> list[list[int]]:
        opened = [w for w in all_waits if w.until is None]
        failed = [w for w in all_waits if w.failed]
        ended = [w for w in all_waits if w.until is not None and not w.failed]
        waits = Waits(10, opened, failed, ended, [], {}, {})
        return [[w.waiter.rank for w in cycle] for cycle in find_cycles(waits, at_least=4)]

    assert cycles(wait(0, 1, 0), wait(1, 0, 2, 8)) == [], "a call that calls back"
    assert cycles(wait(0, 1, 0, None), wait(1, 0, -11, -1)) == [], "one after the other"
    assert cycles(wait(0, 1, 0, None), wait(1, 2, 0, None)) == [], "a chain"
    assert cycles(wait(0, 1, 0, failed=True), wait(1, 2, 0), wait(2, 1, 0)) == [], "the cycle has ended well"
    three = wait(0, 1, 0, failed=True), wait(1, 2, 1, 9), wait(2, 0, 2), wait(3, 0, 0, 9)
    assert cycles(*three) == [[0, 1, 2]]


def test_each_stage_of_a_request_is_told(tmp_path: Path) -> None:
    a, b = workers(tmp_path, 2)
    waits_for(a, b, 1, SECOND, arrives=False)
    waits_for(a, b, 2, SECOND)
    waits_for(a, b, 3, SECOND, arrives=False)
    b.message(False, 2 * SECOND, CALL, 0, 3, 1)
    waits_for(a, b, 4, SECOND)
    b.add(events.RequestFinished, 2 * SECOND, 0, 4, False)
    waits_for(a, b, 5, SECOND)
    b.message(True, 3 * SECOND, RESULT, 0, 5)
    b.add(events.RequestFinished, 3 * SECOND, 0, 5, False)
    waits_for(a, b, 6, SECOND, 2 * SECOND)
    b.message(True, 4 * SECOND, RESULT, 0, 6)
    a.message(False, 4 * SECOND + MS, RESULT, 1, 6)
    finish(a, b)
    waits = find_waits(Job(tmp_path), 11 * SECOND)
    told = {w.message_id: locate(w, waits) for w in waits.stuck()}
    assert told[1] == "w1 has not received it, as far as its log shows"
    assert told[2].startswith("w1 has run it for 10.0 s, in thread main")
    assert told[3] == "w1 received it 9.0 s before, and has not begun it: 0 are queued before it, 1 run"
    assert told[4] == "w1 has run it for 998.0 ms, and has not replied"
    assert told[5] == "w1 replied 8.0 s before; the reply has not arrived"
    assert told[6] == "w1 has run it for 998.0 ms, in thread main; its reply came 2.0 s too late"


@pytest.mark.parametrize("until", [None, 20 * SECOND])
def test_threads_that_wait_for_one_future_wait_for_the_same_request(
    tmp_path: Path, until: int | None
) -> None:
    a, b = workers(tmp_path, 2)
    a.rows.append((tag_of(events.ThreadDeclared), 0, 2, "other", 8))
    waits_for(a, b, 1, SECOND, until)
    a.rows.append((tag_of(events.WaitBegun), 2 * SECOND, 2, 1, 1, 1))
    finish(a, b)
    waits = find_waits(Job(tmp_path), 30 * SECOND)
    assert sorted(wait.thread for wait in waits.stuck()) == [1, 2]
    for wait in waits.stuck():
        assert wait.function == "m:f"
        assert "w1 has run it for" in locate(wait, waits)


def test_a_request_is_located_beside_logs_that_cannot_be_read(tmp_path: Path) -> None:
    (b,) = (each for each in workers(tmp_path, 2) if each.rank == 1)
    b.message(False, SECOND, CALL, 0, 5, 1)
    b.add(events.RequestStarted, SECOND, 0, 5)
    finish(b)
    (tmp_path / "starting.zgtrace").write_bytes(b"")
    (tmp_path / "removed.zgtrace").symlink_to(tmp_path / "nothing")
    for path in tmp_path.iterdir():
        if path != b.path and path.exists():
            os.utime(path, (2e9, 2e9))  # newer than the one that is wanted
    requests = RemoteRequests(tmp_path, Identity(WORKER, "w0", 0, 1000, "j"))
    assert "w1 has run it for" in requests.locate(1, b.incarnation, 5)


def test_a_peer_without_a_log_is_told(tmp_path: Path) -> None:
    a, b = workers(tmp_path, 2)
    waits_for(a, b, 1, SECOND)
    finish(a)
    b.path.unlink()
    waits = find_waits(Job(tmp_path))
    assert [locate(w, waits) for w in waits.open] == ["rank 1 has not received it, or has no log here"]


def test_a_call_that_no_thread_waits_for_is_open_too(tmp_path: Path) -> None:
    a, b = workers(tmp_path, 2)
    call(a, b, 1, SECOND, reply=False)
    finish(a, b)
    (wait,) = find_waits(Job(tmp_path), 9 * SECOND).open
    assert (wait.is_blocking, wait.function, wait.duration(9 * SECOND)) == (False, "m:f", 8 * SECOND)


def test_a_call_to_a_worker_that_was_lost_lasted_until_then(tmp_path: Path) -> None:
    a, b = workers(tmp_path, 2)
    waits_for(a, b, 1, SECOND, 2 * SECOND)
    a.message(True, SECOND, CALL, 1, 2, 1)  # no thread waits for its reply
    b.message(False, SECOND + MS, CALL, 0, 2, 1)
    b.add(events.RequestStarted, SECOND + MS, 0, 2)
    a.add(events.CallFailed, 2 * SECOND, 1, 2, "PeerLostError")
    a.add(events.RendezvousStep, 60 * SECOND, 1, "later", 0, 0)
    finish(a, b)
    waits = find_waits(Job(tmp_path))
    assert [(w.is_blocking, w.duration(waits.now), w.failed) for w in waits.failed] == [
        (True, SECOND, True),
        (False, SECOND, True),
    ]
    assert not waits.open
    assert all(locate(w, waits).startswith("w1 has run it for 99") for w in waits.failed)
    assert not [f for f in find(Job(tmp_path)) if f.kind in ("open wait", "failed wait")]


def test_a_worker_that_was_killed_and_started_again_waits_no_more(tmp_path: Path) -> None:
    a, b = (Writer(tmp_path, rank, clock="boot", launcher="l") for rank in range(2))
    waits_for(a, b, 1, SECOND, arrives=False)
    c, d = (
        Writer(tmp_path, rank, clock="boot", launcher="l", job="k", incarnation=2000 + rank)
        for rank in range(2)
    )
    for each, time in (a, 2), (b, 2), (c, 60), (d, 60):
        each.rows.append((tag_of(events.ClockSample), time * SECOND, (50 + time) * SECOND))
    for each in c, d:
        each.rows.append((tag_of(events.ActorStopped), 60 * SECOND, 1))
    finish(a, b, c, d)
    waits = find_waits(job := Job(tmp_path))
    assert [(w.until, w.duration(waits.now), w.failed) for w in waits.failed] == [(2 * SECOND, SECOND, True)]
    assert [locate(w, waits) for w in waits.failed] == ["w1 has not received it, as far as its log shows"]
    assert not waits.open
    assert not [f for f in find(job) if f.severity is Severity.PROBLEM]


def test_a_backward_pass_waits_for_the_workers_that_have_not_finished(tmp_path: Path) -> None:
    a, b, c = workers(tmp_path, 3)
    backward = int(MessageType.BACKWARD_AUTOGRAD_REQ)
    a.add(events.PassStarted, SECOND, 77, 5)
    for peer, number in ((b, 1), (c, 2)):
        a.add(events.MessageSent, SECOND, backward, peer.rank, number, 77, 0, 100, 0)
        peer.add(events.MessageReceived, SECOND + MS, backward, 0, number, 77, 0, 100, 0)
        peer.add(events.RequestStarted, SECOND + 2 * MS, 0, number)
    b.add(events.RequestFinished, SECOND + 3 * MS, 0, 1, False)
    a.add(events.WaitBegun, SECOND, 0, 5)
    finish(a, b, c)
    waits = find_waits(Job(tmp_path), 9 * SECOND)
    assert [(w.function, w.target and w.target.name) for w in waits.open] == [("backward pass", "w2")]


def served(a: Writer, b: Writer, number: int, at: int, runs: int, queued: int = 0) -> None:
    a.message(True, at, CALL, b.rank, number, 1)
    b.message(False, at + 1000, CALL, a.rank, number, 1)
    b.add(events.RequestStarted, at + 1000 + queued, a.rank, number)
    b.message(True, at + 1000 + queued + runs, RESULT, a.rank, number)
    b.add(events.RequestFinished, at + 1000 + queued + runs, a.rank, number, False)
    a.message(False, at + 3000 + queued + runs, RESULT, b.rank, number)


def kinds(directory: Path) -> dict[str, tuple[str, ...]]:
    return {f.kind: f.workers for f in find(Job(directory))}


def test_the_slow_one_of_equal_workers_is_a_straggler(tmp_path: Path) -> None:
    everybody = workers(tmp_path, 4)
    leader, *others = everybody
    for i in range(10):
        for worker in others:
            runs = 30 * MS if worker.rank == 2 else 10 * MS
            served(leader, worker, 10 * i + worker.rank, SECOND + i * 100 * MS, runs)
    finish(*everybody)
    assert kinds(tmp_path) == {"straggler": ("w2",)}
    (finding,) = find(Job(tmp_path))
    assert finding.evidence["median"] == 30 * MS


def test_a_worker_with_all_requests_is_hot_only_if_they_pile_up(tmp_path: Path) -> None:
    for piled, found in ((False, {}), (True, {"hot worker": ("w0",)})):
        directory = tmp_path / str(piled)
        directory.mkdir()
        everybody = workers(directory, 4)
        server, *others = everybody
        for i in range(10):
            for worker in others:
                at = SECOND + i * 30 * MS + worker.rank * (9 * MS)
                served(worker, server, 10 * i, at, 8 * MS, 9 * MS * worker.rank if piled else 0)
        finish(*everybody)
        # Long queues are a finding of their own.
        assert {kind: w for kind, w in kinds(directory).items() if kind != "queueing"} == found


def test_calls_wait_for_a_thread_only_while_all_threads_are_busy(tmp_path: Path) -> None:
    """Otherwise the thread that takes a call waits for a processor, which more threads would not help."""
    for runs, found in ((20 * MS, {"queueing": ("w1",)}), (MS, {})):
        directory = tmp_path / str(runs)
        directory.mkdir()
        caller, callee = workers(directory, 2)
        callee.rows.append((tag_of(events.Usage), 0, 1, 2, 0, 2))
        for i in range(5):
            served(caller, callee, i, SECOND + i * 100 * MS, runs, 40 * MS if i == 3 else 0)
        finish(caller, callee)
        assert kinds(directory) == found


def test_contexts_of_one_number_in_two_groups_are_two(tmp_path: Path) -> None:
    for number, (job, send) in enumerate((("j", 10), ("k", 11))):
        worker = Writer(tmp_path, 0, clock="boot", launcher="l", job=job, incarnation=1000 + number)
        at = (1 + 10 * number) * SECOND
        worker.message(True, at, int(MessageType.FORWARD_AUTOGRAD_REQ), 1, 7, 1)
        worker.add(events.SendRecorded, at, 5, send, 1, 7, False)
        if job == "k":  # only there a backward pass begins
            worker.add(events.PassStarted, at, 5, 6)
            worker.add(events.GroupExecuted, at, 5, 6, MS, (send,), ())
            worker.add(events.PassFinished, at + SECOND, 5, 6, False)
        worker.rows.append((tag_of(events.ActorStopped), at + SECOND, 1))
        worker.write()
    job = Job(tmp_path)
    assert not [f for f in find(job) if f.kind == "unused arguments"]
    assert context_diagram(job, 5).title == "autograd context 0.5: 1 workers, 1 sends"


def test_only_sends_that_no_pass_reached_are_unused(tmp_path: Path) -> None:
    a, b = workers(tmp_path, 2)
    for context in (1, 2):  # a pass ends in the first only
        for send in (10, 11):
            a.add(events.SendRecorded, SECOND, context, context * send, 1, context * send, False)
        a.add(events.PassStarted, 2 * SECOND, context, 5 + context)
        a.add(events.GroupExecuted, 2 * SECOND, context, 5 + context, MS, (10 * context,), ())
    a.add(events.PassFinished, 3 * SECOND, 1, 6, False)
    finish(a, b)
    (finding,) = find(Job(tmp_path))
    assert finding.kind == "unused arguments"
    assert finding.evidence == {"sends": 1, "contexts": 1, "failed": 0}


@pytest.mark.parametrize(
    ("missing", "title"),
    [
        ([(0, 1), (0, 1)], "The loss does not use tensor 2 of the 2 that m:f returned (1 of 2 calls)"),
        ([(1, 0), (0, 1)], ""),  # two passes, which together reach all
        ([()], ""),
        ([], "The loss does not use what m:f returned (1 of 2 calls)"),
    ],
)
def test_a_result_that_the_loss_uses_in_part_is_told(
    tmp_path: Path, missing: list[tuple[int, ...]], title: str
) -> None:
    a, b = workers(tmp_path, 2)
    request, reply = int(MessageType.FORWARD_AUTOGRAD_REQ), int(MessageType.FORWARD_AUTOGRAD_RESP)
    for number in (1, 2):
        a.add(events.MessageSent, SECOND, request, 1, number, 7, 1, 100, 0)
        b.add(events.MessageReceived, SECOND + MS, request, 0, number, 7, 1, 100, 0)
        b.add(events.SendRecorded, SECOND + 2 * MS, 7, 10 + number, 0, number, True)
        b.add(events.MessageSent, SECOND + 3 * MS, reply, 0, number, 7, 0, 100, 0)
        a.add(events.MessageReceived, SECOND + 4 * MS, reply, 1, number, 7, 0, 100, 0)
    for i, each in enumerate([(), *missing]):
        send, part = (12, ()) if i == 0 else (11, [(11, each)] if each else ())
        a.add(events.PassStarted, 2 * SECOND, 7, 20 + i)
        b.add(events.GroupExecuted, 2 * SECOND, 7, 20 + i, MS, (send,), (), part)
        a.add(events.PassFinished, 3 * SECOND, 7, 20 + i, False)
    b.add(events.RendezvousStep, 4 * SECOND, 1, "later", 0, 0)
    finish(a, b)
    assert [f.title for f in find(Job(tmp_path))] == [title] * bool(title)


@pytest.mark.parametrize("by_requester", [True, False])
def test_a_call_whose_reply_may_have_been_dropped_is_no_finding(tmp_path: Path, by_requester: bool) -> None:
    a, b = workers(tmp_path, 2)
    call(a, b, 1, SECOND, reply=False)
    (a if by_requester else b).rows.append((tag_of(events.Dropped), 2 * SECOND, 7))
    waits_for(a, b, 2, SECOND)  # its thread still waits, which is certain
    call(a, b, 3, 3 * SECOND, reply=False)  # nothing was dropped since then
    a.add(events.RendezvousStep, 30 * SECOND, 1, "later", 0, 0)
    finish(a, b)
    waits = find_waits(Job(tmp_path))
    assert [wait.message_id for wait in waits.open] == [2, 3]
    assert {call.request.message_id for call in waits.open_calls} == {2, 3}


def test_drops_damage_and_unknown_clocks_are_told(tmp_path: Path) -> None:
    a = Writer(tmp_path, 0, clock="boot")
    b = Writer(tmp_path, 1, clock="another")
    a.rows.append((tag_of(events.Dropped), SECOND, 7))
    finish(a, b)
    with b.path.open("ab") as file:
        file.write(b"\0\0\0\x01\xc1")
    assert kinds(tmp_path) == {"dropped events": ("w0",), "damaged log": ("w1",), "clock": ("w1",)}


def test_notes_are_what_is_no_fault_and_lead_to_their_calls(tmp_path: Path) -> None:
    a, b = workers(tmp_path, 2)
    served(a, b, 1, SECOND, MS)
    served(a, b, 2, 2 * SECOND, 50 * MS)
    finish(a, b)
    notes = {f.kind: f for f in find(Job(tmp_path), notes=True)}
    assert notes.keys() == {"not shut down", "slow call"}
    assert notes["not shut down"].workers == ("w0", "w1")
    assert notes["slow call"].message == (a.incarnation, 2)
    assert all(f.severity is Severity.NOTE for f in notes.values())


def test_all_waits_are_told_if_notes_are_wanted(tmp_path: Path) -> None:
    a, b = workers(tmp_path, 2)
    for i in range(7):
        waits_for(a, b, i, SECOND + i * SECOND, 20 * SECOND)
    a.add(events.RendezvousStep, 21 * SECOND, 1, "later", 0, 0)
    finish(a, b)
    assert [f.kind for f in find(Job(tmp_path))].count("failed wait") == 5
    found = [f for f in find(Job(tmp_path), notes=True) if f.kind == "failed wait"]
    assert [round(f.evidence["seconds"]) for f in found] == [19, 18, 17, 16, 15, 14, 13]
    assert [f.severity for f in found] == [Severity.PROBLEM] * 5 + [Severity.NOTE] * 2
    assert found[6].evidence["where"] == "w1 has run it for 13.0 s, in thread main"


def test_calls_without_a_reply_are_counted_by_function(tmp_path: Path) -> None:
    a, b = workers(tmp_path, 2)
    served(a, b, 1, SECOND, MS)
    for number in (2, 3):
        call(a, b, number, 2 * SECOND, reply=False)
    finish(a, b)
    (finding,) = find(Job(tmp_path))
    assert (finding.kind, finding.title) == ("unanswered calls", "2 calls without a reply")
    assert "m:f (2)" in finding.detail
    assert finding.message == (a.incarnation, 2)


def test_a_healthy_job_has_no_findings(tmp_path: Path) -> None:
    a, b = workers(tmp_path, 2)
    for i in range(20):
        served(a, b, 2 * i + 1, SECOND + i * 10 * MS, MS)
        served(b, a, 2 * i + 2, SECOND + i * 10 * MS, MS)
    finish(a, b)
    assert find(Job(tmp_path)) == []


def test_other_waits_of_the_workers_of_a_deadlock_are_told_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = workers(tmp_path, 2)
    a.rows.append((tag_of(events.ThreadDeclared), 0, 2, "engine", 8))
    # The main thread calls its own worker, whose engine thread is part of the cycle.
    a.message(True, SECOND, CALL, 0, 1, 1)
    a.add(events.WaitBegun, SECOND, 0, 1)
    a.knows(a)
    a.message(False, SECOND + MS, CALL, 0, 1, 1)
    a.rows.append((tag_of(events.RequestStarted), SECOND + 2 * MS, 2, 1, 0, 1))
    a.message(True, 2 * SECOND, CALL, 1, 2, 1)
    a.rows.append((tag_of(events.WaitBegun), 2 * SECOND, 2, 1, 1, 2))
    b.message(False, 2 * SECOND + MS, CALL, 0, 2, 1)
    b.add(events.RequestStarted, 2 * SECOND + 2 * MS, 0, 2)
    waits_for(b, a, 3, 3 * SECOND)
    a.add(events.RendezvousStep, 31 * SECOND, 1, "later", 0, 0)
    finish(a, b)
    problems = [f for f in find(Job(tmp_path)) if f.severity is Severity.PROBLEM]
    assert [f.kind for f in problems] == ["deadlock"]
    assert problems[0].detail.splitlines() == [
        "w0 (engine) waits 29.0 s for w1: m:f",
        "    w1 has run it for 29.0 s, in thread main",
        "w1 (main) waits 28.0 s for w0: m:f",
        "    w0 has run it for 28.0 s, in thread main",
        "w0 (main) waits 30.0 s for w0: m:f, which cannot end before that",
        "Is a lock held during a call, or do all threads of the pool wait? "
        "The same command shows the lines of code while the job hangs.",
    ]
    assert [each["thread"] for each in problems[0].evidence["waits"]] == ["engine", "main", "main"]
    assert main(["trace", str(tmp_path)]) == 3
    assert "which cannot end before that" in capsys.readouterr().out


@pytest.mark.parametrize("waits", [0, 1, 2])
def test_a_worker_that_waits_for_its_own_calls_is_no_straggler(tmp_path: Path, waits: int) -> None:
    """Also where its thread makes another call while it waits, as a hook does in a backward pass."""
    everybody = workers(tmp_path, 4)
    leader, *others = everybody
    for i in range(10):
        for worker in others:
            at = SECOND + i * 100 * MS
            served(leader, worker, 10 * i + worker.rank, at, 30 * MS if worker.rank == 2 else 10 * MS)
            if worker.rank == 2 and waits:
                worker.add(events.WaitBegun, at + MS, 0, 1000 + i)
                if waits > 1:
                    worker.add(events.WaitBegun, at + 18 * MS, 0, 2000 + i)
                    worker.add(events.WaitEnded, at + 20 * MS, 0, 2000 + i, False)
                worker.add(events.WaitEnded, at + 21 * MS, 0, 1000 + i, False)
    finish(*everybody)
    assert ("straggler" in kinds(tmp_path)) is not bool(waits)


def test_a_straggler_is_found_beside_waits_of_group_calls(tmp_path: Path) -> None:
    everybody = workers(tmp_path, 4)
    leader, *others = everybody
    for i in range(10):
        for worker in others:
            at = SECOND + i * 100 * MS
            served(leader, worker, 10 * i + worker.rank, at, 40 * MS if worker.rank == 2 else 20 * MS)
            calls = [(rank, 1000 + 10 * i + rank) for rank in range(4)]
            for rank, number in calls:
                worker.add(events.WaitBegun, at + 2 * MS, rank, number)
            for rank, number in reversed(calls):
                worker.add(events.WaitEnded, at + 12 * MS, rank, number, False)
    finish(*everybody)
    (finding,) = (f for f in find(Job(tmp_path)) if f.kind == "straggler")
    assert (finding.workers, finding.evidence["median"], finding.evidence["others"]) == (
        ("w2",),
        30 * MS,
        10 * MS,
    )


def test_a_straggler_that_gets_slower_is_told(tmp_path: Path) -> None:
    everybody = workers(tmp_path, 3)
    leader, *others = everybody
    for i in range(10):
        for worker in others:
            runs = 20 * MS + i * 5 * MS if worker.rank == 2 else 10 * MS
            served(leader, worker, 10 * i + worker.rank, SECOND + i * 100 * MS, runs)
    finish(*everybody)
    (finding,) = find(Job(tmp_path))
    assert "It changes: 30.0 ms in the first half of the calls, 55.0 ms in the second." in finding.detail
    assert "lost in all" in finding.detail


def test_a_hot_worker_has_its_pool_its_functions_and_the_time_that_calls_lose(tmp_path: Path) -> None:
    everybody = workers(tmp_path, 4)
    server, *others = everybody
    server.rows.append((tag_of(events.Usage), 0, 1, 2, 0, 2))
    for i in range(10):
        for worker in others:
            served(worker, server, i + 1, SECOND + i * 30 * MS, 8 * MS, 12 * MS * worker.rank)
    finish(*everybody)
    (finding,) = find(Job(tmp_path))
    assert finding.kind == "hot worker"
    assert "2 threads of its pool: busy" in finding.detail
    assert "m:f (100%)" in finding.detail
    assert "720.0 ms in all" in finding.detail


@pytest.mark.parametrize("is_result", [False, True])
@pytest.mark.parametrize(
    ("changes", "count", "title"),
    [
        (False, 5, "sent the same 32.0 MiB 5 times, as {} of m:f"),
        (False, 4, ""),
        (True, 20, ""),
    ],
)
def test_large_contents_that_are_sent_again_are_a_finding(
    tmp_path: Path, is_result: bool, changes: bool, count: int, title: str
) -> None:
    a, b = workers(tmp_path, 2)
    sender, other = (b, a) if is_result else (a, b)
    for i in range(count):
        served(a, b, i + 1, SECOND + i * 10 * MS, MS)
        contents = (3, 0, i if changes else 0, 32 << 20)
        sender.add(events.Serialized, SECOND + i * 10 * MS, other.rank, i + 1, MS, is_result, (contents,))
    finish(a, b)
    what = title.format("the result" if is_result else "arguments")
    name = f"w{sender.rank}"
    assert [f.title for f in find(Job(tmp_path))] == ([f"{name} {what}"] if title else [])
    for finding in find(Job(tmp_path)):
        assert finding.evidence["repeated_bytes"] == (count - 1) * 32 << 20
        assert finding.detail.endswith("Changes through numpy or .data are not seen.")
    (slowest,) = [f for f in find(Job(tmp_path), notes=True) if f.kind == "slow call"]
    assert "1.0 ms to serialize and copy" in slowest.detail
