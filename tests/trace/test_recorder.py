"""The recorder: what is in a log after a store was used, what is dropped, and what errors do."""

from __future__ import annotations

import errno
import logging
import os
import stat
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.interpreter import run_python
from tests.support.waiting import eventually
from zmqgrad import environment
from zmqgrad.errors import ArgumentTypeError, TraceError
from zmqgrad.store import TCPStore
from zmqgrad.trace import Job, launch_environment, record
from zmqgrad.trace import tracer as tracing
from zmqgrad.trace import writer as writing
from zmqgrad.trace.events import (
    ContextCreated,
    Dropped,
    Published,
    RequestFinished,
    RequestStarted,
    WaitBegun,
    WaitEnded,
)
from zmqgrad.trace.log import LogReader, find_logs
from zmqgrad.trace.recorder import Recorder, start_from_environment
from zmqgrad.trace.tracer import show_arguments
from zmqgrad.trace.waits import find_waits
from zmqgrad.transport import tap
from zmqgrad.transport.tap import Identity, Tracer
from zmqgrad.wire.messages import MessageType


class Subject:
    """Something traced."""

    tracer: Tracer | None = None

    def identity(self) -> Identity:
        return Identity(tap.WORKER, "w0", 0, 5, "job")


def test_store_queries_replies_and_notifications_are_recorded_at_both_ends(tmp_path: Path) -> None:
    with record(tmp_path):
        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        changed = threading.Event()
        try:
            store.set("key", "value")
            store.watch_key("key", lambda old, new: changed.set())
            store.set("key", "other")
            assert changed.wait(10)
            assert store.get("key") == b"other"
        finally:
            store.close()
    job = Job(tmp_path)
    sets = [c for c in job.calls() if c.request.type == "STORE_SET" and c.function == "key"]
    assert len(sets) == 2
    assert all(c.is_complete and c.duration and c.request.size > 0 for c in sets)
    roles = {(m.source.role.name, m.target.role.name) for m in job.messages() if m.source and m.target}
    assert roles == {("STORE_CLIENT", "STORE_SERVER"), ("STORE_SERVER", "STORE_CLIENT")}
    notified = [m for m in job.messages() if m.kind == MessageType.KEY_UPDATED]
    assert [(m.name, m.sent is not None, m.received is not None) for m in notified] == [("key", True, True)]
    assert all(a.stopped is not None for a in job.actors())


def test_nothing_is_traced_outside_the_block(tmp_path: Path) -> None:
    subject = Subject()
    tap.register(subject)
    try:
        assert subject.tracer is None
        with record(tmp_path):
            assert subject.tracer is not None
        assert subject.tracer is None
    finally:
        tap.unregister(subject)


def test_files_are_for_the_user_alone_and_an_idle_process_has_none(tmp_path: Path) -> None:
    with record(tmp_path / "a" / "b"):
        pass
    assert list((tmp_path / "a" / "b").iterdir()) == []
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    subject = Subject()
    with record(tmp_path / "a" / "b") as recorder:
        tap.register(subject)
        tap.unregister(subject)
    assert recorder.path is not None
    assert stat.S_IMODE(recorder.path.stat().st_mode) == 0o600


def test_the_end_of_what_the_log_shows_as_begun_is_never_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "FLUSH_SECONDS", 3600.0)
    subject = Subject()
    with record(tmp_path, max_events=100) as recorder:
        tap.register(subject)
        assert subject.tracer is not None
        subject.tracer.wait_begun(1, 7)
        subject.tracer.request_started(1, 8)
        recorder.flush()
        for i in range(1000):
            subject.tracer.request_described(i, "f", None, None)
        subject.tracer.request_finished(1, 8, False)
        subject.tracer.wait_ended(1, 7, False)
        recorder.flush()
        found = [type(stamped.event) for stamped in Job(tmp_path).events()]
        tap.unregister(subject)
    assert found.count(RequestStarted) == found.count(RequestFinished) == 1
    assert found.count(WaitBegun) == found.count(WaitEnded) == 1


def test_what_does_not_fit_is_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "FLUSH_SECONDS", 3600.0)
    subject = Subject()
    with record(tmp_path, max_events=100) as recorder:
        tap.register(subject)
        assert subject.tracer is not None
        for i in range(1000):
            subject.tracer.request_described(i, "f", None, None)
        recorder.flush()
        subject.tracer.request_described(5000, "f", None, None)
        tap.unregister(subject)
    assert recorder.path is not None
    with LogReader(recorder.path) as reader:
        events = list(reader)
    dropped = sum(e.count for e in events if isinstance(e, Dropped))
    recorded = sum(hasattr(e, "message_id") for e in events)
    assert dropped + recorded == 1001
    assert recorded <= 102
    assert Job(tmp_path).processes[0].dropped == dropped


def test_a_full_disk_stops_the_trace_says_so_once_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    subject = Subject()
    with caplog.at_level(logging.WARNING), record(tmp_path) as recorder:
        tap.register(subject)
        assert subject.tracer is not None
        recorder.flush()
        monkeypatch.setattr(writing, "write_all", full)
        for _ in range(3):
            subject.tracer.request_started(1, 2)
            recorder.flush()
        assert recorder.failed
        tap.unregister(subject)
    said = [r.getMessage() for r in caplog.records if "cannot write the trace log" in r.getMessage()]
    assert len(said) == 1
    assert os.strerror(errno.ENOSPC) in said[0]


def test_a_directory_that_others_may_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(TraceError, match=r"all users may write to .* use a directory of your own") as refused:
        Recorder(tmp_path)
    Recorder(str(refused.value).split("such as ")[1].split(",")[0])  # the advice works
    tmp_path.chmod(0o755)
    Recorder(tmp_path)
    owner = os.getuid() or 4711
    os.chown(tmp_path, owner, -1)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(TraceError, match=rf"belongs to another user \(uid {owner}\): use a directory"):
        Recorder(tmp_path)
    monkeypatch.setenv("ZMQGRAD_TRACE", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert start_from_environment() is None, "the job goes on untraced"
    assert "belongs to another user" in caplog.text


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(TraceError, match="cannot create the trace directory"),
        record(tmp_path / "file" / "d"),
    ):
        pass


def test_the_environment_starts_a_recorder_and_a_fork_gets_its_own(tmp_path: Path) -> None:
    program = """
        import os
        from zmqgrad.store import TCPStore
        def use():
            store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            store.set(str(os.getpid()), "x")
            return store
        store = use()
        pid = os.fork()
        if pid == 0:
            use().close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        store.set("again", "x")
        # not closed: the end of the interpreter writes the rest
    """
    run_python(textwrap.dedent(program), env=launch_environment(tmp_path))
    logs = find_logs(tmp_path)
    assert len(logs) == 2
    job = Job(tmp_path)
    assert len({p.info.job for p in job.processes}) == 1
    by_pid = {p.info.pid: {n for n in p.names.values() if n} for p in job.processes}
    assert all(str(pid) in names for pid, names in by_pid.items())
    assert sum("again" in names for names in by_pid.values()) == 1


def test_a_directory_that_is_no_path() -> None:
    with (
        pytest.raises(ArgumentTypeError, match="the directory of a trace must be a path, not int"),
        record(5),  # type: ignore[arg-type]
    ):
        pass


@pytest.mark.parametrize("arguments", [{"job": 5}, {"job": None}, {"max_events": "5"}, {"max_events": 1.5}])
def test_arguments_of_another_type_are_refused(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentTypeError, match=next(iter(arguments))), record(tmp_path, **arguments):
        pass


def test_arguments_are_cut_and_cannot_fail_a_call() -> None:
    class Bad:
        def __repr__(self) -> str:
            raise ValueError("no")

    assert "Bad" in show_arguments((Bad(),), {})
    assert show_arguments((1, "two"), {"three": 3}) == "1, 'two', three=3"
    assert len(show_arguments(("x" * 10**6,) * 20, {})) <= 400


def test_the_launcher_names_directory_and_job(tmp_path: Path) -> None:
    first, second = launch_environment(tmp_path / "t"), launch_environment(tmp_path / "t")
    assert environment.trace_directory(first) == str(tmp_path / "t")
    assert environment.trace_job(first) != environment.trace_job(second)


def _happened(directory: Path) -> list[tuple[str, int]]:
    events = [s.event for s in Job(directory).events()]
    return [(type(e).__name__, e.message_id) for e in events if hasattr(e, "message_id")]


def test_a_short_wait_is_not_recorded_and_one_that_failed_or_lasts_is(tmp_path: Path) -> None:
    with record(tmp_path) as recorder:
        tracer = recorder.attach(Identity(tap.WORKER, "w0", 0, 5, "job"))
        tracer.wait_begun(1, 1)
        tracer.wait_begun(1, 2)
        recorder.flush()
        assert _happened(tmp_path) == [("WaitBegun", 1), ("WaitBegun", 2)]  # were it killed now
        tracer.wait_ended(1, 2, False)
        tracer.wait_begun(1, 3)
        tracer.wait_ended(1, 3, True)
        tracer.close()
    assert sorted(_happened(tmp_path)) == [
        ("WaitBegun", 1),
        ("WaitBegun", 2),
        ("WaitBegun", 3),
        ("WaitEnded", 2),
        ("WaitEnded", 3),
    ]


def test_a_wait_gets_longer_in_the_log_while_nothing_else_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "FLUSH_SECONDS", 0.005)
    monkeypatch.setattr(writing, "CLOCK_SAMPLE_NANOSECONDS", 50_000_000)
    with record(tmp_path) as recorder:
        tracer = recorder.attach(Identity(tap.WORKER, "w0", 0, 5, "job"))
        tracer.wait_begun(1, 1)
        assert eventually(
            lambda: _open_wait(tmp_path) > 200_000_000
        )  # read while it is written, as of a hang
        tracer.close()


def test_a_slow_disk_does_not_shift_the_samples_of_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = writing.write_all

    def slowly(fd: int, data: bytes) -> None:
        write(fd, data)
        threading.Event().wait(0.05)

    monkeypatch.setattr(writing, "write_all", slowly)
    with record(tmp_path) as recorder:
        recorder.attach(Identity(tap.WORKER, "w0", 0, 5, "job")).close()
    (process,) = Job(tmp_path).processes
    ahead = [wall - time for wall, time in [(process.info.wall, process.info.monotonic), *process.samples]]
    assert len(ahead) == 2
    assert max(ahead) - min(ahead) < 5_000_000


def _open_wait(directory: Path) -> int:
    """Nanoseconds for which the only wait has been open; 0: it is not in the log yet."""
    try:
        waits = find_waits(Job(directory))
    except TraceError:
        return 0
    return sum(wait.duration(waits.now) for wait in waits.open)


def test_short_waits_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "FLUSH_SECONDS", 3600.0)
    monkeypatch.setattr(tracing, "SHORT_WAIT_NANOSECONDS", 1 << 60)
    with record(tmp_path) as recorder:
        tracer = recorder.attach(Identity(tap.WORKER, "w0", 0, 5, "job"))
        for number in range(100):
            tracer.wait_begun(1, number)
            tracer.wait_ended(1, number, False)
        tracer.close()
    assert _happened(tmp_path) == []


def test_a_request_reads_the_same_whether_a_flush_came_while_it_ran(tmp_path: Path) -> None:
    with record(tmp_path) as recorder:
        tracer = recorder.attach(Identity(tap.WORKER, "w0", 0, 5, "job"))
        for number, flushed in enumerate((False, True)):
            tracer.request_started(1, number)
            if flushed:
                recorder.flush()
            tracer.request_finished(1, number, True)
        tracer.close()
    events = [s for s in Job(tmp_path).events() if isinstance(s.event, (RequestStarted, RequestFinished))]
    assert [type(s.event) for s in events] == [RequestStarted, RequestFinished] * 2
    assert [s.event.message_id for s in events] == [0, 0, 1, 1]
    assert [s.time for s in events] == sorted(s.time for s in events)
    assert all(s.event.failed for s in events if isinstance(s.event, RequestFinished))


def test_each_begin_and_end_is_written_once_while_flushes_compete(tmp_path: Path) -> None:
    def work(tracer: Tracer, peer: int) -> None:
        for number in range(2000):
            tracer.request_started(peer, number)
            tracer.request_finished(peer, number, False)

    with record(tmp_path) as recorder:
        tracer = recorder.attach(Identity(tap.WORKER, "w0", 0, 5, "job"))
        threads = [threading.Thread(target=work, args=(tracer, peer)) for peer in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            recorder.flush()
        tracer.close()
    assert recorder.path is not None
    running: dict[tuple[int, int], int] = {}
    finished = 0
    with LogReader(recorder.path) as reader:
        for event in reader:  # in the order of the file: an end never comes before its begin
            if isinstance(event, RequestStarted):
                assert (event.peer, event.message_id) not in running
                running[event.peer, event.message_id] = event.time
            elif isinstance(event, RequestFinished):
                assert running.pop((event.peer, event.message_id)) <= event.time
                finished += 1
    assert (running, finished) == ({}, 8000)


def test_the_last_writer_and_the_next_one_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "FLUSH_SECONDS", 3600.0)
    recorder, entered, both = Recorder(tmp_path), threading.Event(), threading.Barrier(2)
    take, found = recorder.take, list[bool]()

    def meet() -> list[tuple[Any, ...]]:
        entered.set()
        try:
            both.wait(0.5)
            found.append(True)
        except threading.BrokenBarrierError:  # nobody else takes events at the same time
            found.append(False)
        return take()

    monkeypatch.setattr(recorder, "take", meet)
    first = recorder.attach(Identity(tap.STORE_CLIENT, ""))
    closing = threading.Thread(target=first.close)
    closing.start()
    assert entered.wait(10)
    second = recorder.attach(Identity(tap.STORE_CLIENT, ""))  # has a writer of its own
    recorder.flush()
    closing.join()
    second.close()
    recorder.close()
    assert found
    assert not any(found)
    assert [actor.stopped is not None for actor in Job(tmp_path).actors()] == [True, True]


def test_what_ends_after_the_recorder_was_closed_is_in_the_log(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    tracers = [recorder.attach(Identity(tap.WORKER, f"w{rank}", rank, 5, "job")) for rank in range(2)]
    recorder.close()  # as at the end of the interpreter, before what the program registered first
    for tracer in tracers:
        tracer.context_created(7)
        tracer.close()
    job = Job(tmp_path)
    assert [process.has_end for process in job.processes] == [True]
    assert sum(isinstance(stamped.event, ContextCreated) for stamped in job.events()) == 2


def test_names_of_a_type_derived_from_str_are_recorded(tmp_path: Path) -> None:
    class Name(str):
        __slots__ = ()

    with record(tmp_path) as recorder:
        tracer = recorder.attach(Identity(tap.WORKER, Name("w0"), 0, 5, "job"))
        tracer.published(0, Name("weights"), 1, 8)
        tracer.published(0, Name("\udc80"), 2, 8)  # no text
        tracer.close()
    published = [e.event.name for e in Job(tmp_path).events() if isinstance(e.event, Published)]
    assert published == ["weights", "\\udc80"]
