"""Stacks of the threads of a process that records, on request."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from zmqgrad import trace
from zmqgrad.errors import TraceError
from zmqgrad.runtime.clock import MonotonicClock
from zmqgrad.trace import Job
from zmqgrad.trace.events import StackDumped
from zmqgrad.trace.live import ask_for_stacks, running
from zmqgrad.trace.log import LogReader
from zmqgrad.trace.stacks import Requests, innermost, request_stacks
from zmqgrad.transport.tap import WORKER, Identity


def hold(entered: threading.Event, release: threading.Event) -> None:
    entered.set()
    release.wait(60)


def test_a_process_records_the_stacks_of_its_threads_when_asked(tmp_path: Path) -> None:
    entered, release = threading.Event(), threading.Event()
    thread = threading.Thread(target=hold, args=(entered, release), name="holder")
    thread.start()
    try:
        assert entered.wait(60)
        with trace.record(tmp_path) as recorder:
            tracer = recorder.attach(Identity(WORKER, "w0", 0, 1, "j"))
            recorder.flush()
            job = Job(tmp_path)
            assert [p.info.pid for p in running(job)] == [os.getpid()]
            assert ask_for_stacks(tmp_path, job.processes, 60.0, MonotonicClock()) == []
            tracer.close()
    finally:
        release.set()
        thread.join()
    found = {e.event.name: e.event for e in Job(tmp_path).events() if isinstance(e.event, StackDumped)}
    assert "zmqgrad-trace" not in found
    assert found["holder"].native_id == thread.native_id
    assert innermost(found["holder"].stack, 1)[0].endswith("in hold: release.wait(60)")
    assert running(Job(tmp_path)) == [], "its worker is closed"


def test_a_stack_can_be_told_where_the_directory_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    stack = '  File "/app/step.py", line 7, in step\n    wait()\n'
    assert innermost(stack) == ["/app/step.py:7 in step: wait()"]


def test_a_process_that_records_nothing_any_more_is_named_after_the_deadline(tmp_path: Path) -> None:
    with trace.record(tmp_path) as recorder:
        recorder.attach(Identity(WORKER, "w0", 0, 1, "j")).close()
    job = Job(tmp_path)
    assert ask_for_stacks(tmp_path, job.processes, 0.1, MonotonicClock()) == job.processes


def test_each_request_is_seen_once_and_old_ones_never(tmp_path: Path) -> None:
    request_stacks(tmp_path)
    requests = Requests(tmp_path)
    assert not requests.is_new()
    for _ in range(3):
        request_stacks(tmp_path)
        assert requests.is_new()
        assert not requests.is_new()


def test_a_directory_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot ask for stacks in .*missing"):
        request_stacks(tmp_path / "missing")


def test_frames_of_the_program_are_shown_before_those_that_wait() -> None:
    stack = (
        '  File "/app/train.py", line 3, in main\n    step()\n'
        '  File "/app/train.py", line 9, in step\n    lock.acquire()\n    ^^^^\n'
        '  File "/usr/lib/python3/threading.py", line 5, in wait\n    waiter.acquire()\n'
    )
    assert innermost(stack, 2) == [
        "/app/train.py:9 in step: lock.acquire()",
        "/app/train.py:3 in main: step()",
    ]
    assert innermost('  File "/x/threading.py", line 1, in run\n') == ["/x/threading.py:1 in run: "]


def test_skipping_leaves_whole_records_of_the_given_size(tmp_path: Path) -> None:
    with trace.record(tmp_path) as recorder:
        tracer = recorder.attach(Identity(WORKER, "w0", 0, 1, "j"))
        for number in range(10):
            tracer.wait_begun(1, number)
            recorder.flush()
        tracer.close()
        assert recorder.path is not None
        with LogReader(recorder.path) as reader:
            everything = list(reader)
        with LogReader(recorder.path) as reader:
            reader.skip(60)
            some = list(reader)
        assert 0 < len(some) < len(everything)
        assert some == everything[-len(some) :]
        with LogReader(recorder.path) as reader:
            reader.skip()
            assert list(reader) == []
