"""The format of trace logs: round trips, cut ends, growing files, and files that are no logs."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from zmqgrad.errors import TraceError
from zmqgrad.trace import Job, events, log
from zmqgrad.trace.events import ActorStopped, MessageSent, NameDeclared, ProcessInfo, RequestFinished, tag_of

INFO = ProcessInfo("host", 42, 1_700_000_000_000_000_000, 5_000_000_000, "clock", "job")
EVENTS = [
    NameDeclared(1, 7, "m:f"),
    MessageSent(2, 1, 1, 0x102, 3, 1 << 48, 0, 7, 100),
    RequestFinished(3, 1, 1, 0, 9),
]


def write(path: Path, *batches: list[object], info: ProcessInfo = INFO) -> Path:
    path.write_bytes(log.header(info) + b"".join(map(log.record, batches)))
    return path


def test_events_come_back_in_order(tmp_path: Path) -> None:
    with log.LogReader(write(tmp_path / "a.zgtrace", EVENTS[:1], EVENTS[1:])) as reader:
        assert reader.info == INFO
        assert list(reader) == EVENTS


def test_a_tuple_that_begins_with_the_tag_is_read_as_the_struct(tmp_path: Path) -> None:
    row = (tag_of(MessageSent), 2, 1, 1, 0x102, 3, 1 << 48, 0, 7, 100, 0)
    with log.LogReader(write(tmp_path / "a.zgtrace", [row])) as reader:
        assert list(reader) == [EVENTS[1]]


def test_what_is_no_text_is_escaped(tmp_path: Path) -> None:
    path = os.fsdecode(b"caf\xe9")
    info = msgspec.structs.replace(INFO, program=f"train.py {path} \u00e9")
    with log.LogReader(
        write(tmp_path / "a.zgtrace", [EVENTS[0], (tag_of(NameDeclared), 1, 8, path)], info=info)
    ) as reader:
        assert reader.info.program == r"train.py caf\udce9 é"
        assert list(reader) == [EVENTS[0], NameDeclared(1, 8, r"caf\udce9")]


def test_tags_of_events_have_no_gaps() -> None:
    tags = {cls.__struct_config__.tag for cls in events.decoded().__args__}
    assert tags == set(range(1, len(tags) + 1))


@given(cut=st.integers(min_value=0, max_value=10_000))
def test_a_log_cut_anywhere_yields_the_complete_records(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.zgtrace"
    head, batches = log.header(INFO), [log.record(EVENTS[:1]), log.record(EVENTS[1:])]
    data = head + b"".join(batches)
    cut %= len(data) + 1
    path.write_bytes(data[:cut])
    if cut < len(head):
        with pytest.raises(TraceError, match="ends within its header"):
            log.LogReader(path)
        return
    complete = 0 if cut < len(head) + len(batches[0]) else 1 if cut < len(data) else 3
    with log.LogReader(path) as reader:
        assert list(reader) == EVENTS[:complete]


def test_a_reader_follows_a_growing_log(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zgtrace", EVENTS[:1])
    more = log.record(EVENTS[1:])
    with log.LogReader(path) as reader, path.open("ab", buffering=0) as file:
        assert list(reader) == EVENTS[:1]
        file.write(more[:7])
        assert list(reader) == []
        file.write(more[7:])
        assert list(reader) == EVENTS[1:]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"#!/bin/sh\nexit 0\n", "is no trace log"),
        (b"x", "is no trace log"),
        (log.MAGIC + b"\0\0\0\x63" + b"\0" * 20, "has version 99 of the format"),
        (log.header(INFO) + b"\xff\xff\xff\xff", "damaged at byte"),
        (log.header(INFO) + b"\0\0\0\0", "damaged at byte .*: an empty record"),
        (log.header(INFO) + b"\0\0\0\x02\x91\x05", "damaged at byte"),
        (log.header(INFO) + log.record([(99, 1)]), "damaged at byte"),
        (log.header(INFO) + log.record([(tag_of(ActorStopped), -1 << 62, 1)]), "damaged at byte"),
        (log.header(INFO) + log.record([(tag_of(ActorStopped), 1 << 62, 1)]), "damaged at byte"),
        (log.header(INFO) + log.record([(tag_of(MessageSent), 2, 1, 1, -2, 3, 4)]), "damaged at byte"),
        (log.header(INFO) + log.record([(tag_of(MessageSent), 2, 1, 1, 2, 3, -4)]), "damaged at byte"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "a.zgtrace"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=message), log.LogReader(path) as reader:
        list(reader)


def test_a_named_pipe_is_refused_instead_of_waiting_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.zgtrace")
    with pytest.raises(TraceError, match="no regular file"):
        log.LogReader(tmp_path / "a.zgtrace")


def test_a_link_to_nothing_hides_no_other_log(tmp_path: Path) -> None:
    log_path = write(tmp_path / "a.zgtrace", EVENTS)
    for name, target in (("b", "b"), ("c", "nothing")):
        (tmp_path / f"{name}.zgtrace").symlink_to(f"{target}.zgtrace")
    assert log_path in log.find_logs(tmp_path)
    assert len(Job(tmp_path).unreadable) == 2


def test_a_directory_without_logs_is_an_error_that_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(TraceError, match=r"no trace logs .* ZMQGRAD_TRACE="):
        log.find_logs(tmp_path)
    with pytest.raises(TraceError, match="cannot read the trace directory"):
        log.find_logs(tmp_path / "missing")
