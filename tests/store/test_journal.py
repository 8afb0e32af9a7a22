"""The journal: what was committed is there after a kill; other files and damage are refused."""

from __future__ import annotations

import copy
import os
import resource
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.processes import run_processes
from zmqgrad.errors import JournalError
from zmqgrad.store import FileStore
from zmqgrad.store.contents import Contents
from zmqgrad.store.journal import Journal
from zmqgrad.store.reply_cache import ReplyCache
from zmqgrad.store.state import State
from zmqgrad.store.watch_targets import INTERNAL_PREFIX
from zmqgrad.wire.messages import (
    Message,
    StoreAdd,
    StoreAppend,
    StoreDeleteKey,
    StoreMultiSet,
    StoreNumber,
    StoreQueuePop,
    StoreQueuePush,
    StoreSet,
)


def load(path: Path) -> tuple[Contents, ReplyCache]:
    journal, contents, replies = Journal(path), Contents(), ReplyCache()
    try:
        journal.load(contents, replies)
    finally:
        journal.close()
    return contents, replies


def held(contents: Contents) -> tuple[object, ...]:
    """All that a journal keeps of ``contents``."""
    return contents.values, contents.queues, contents.revision, contents.last_item, contents.num_keys


KEYS = st.sampled_from(["a", "b", "ü", f"{INTERNAL_PREFIX}hidden"])
QUERIES = st.one_of(
    st.builds(StoreSet, KEYS, st.binary(max_size=3)),
    st.builds(StoreAdd, st.sampled_from(["m", "n"]), st.integers(-5, 5)),
    st.builds(StoreAppend, KEYS, st.binary(max_size=3)),
    st.builds(StoreMultiSet, st.just(("a", "b")), st.just((b"1", b"2"))),
    st.builds(StoreDeleteKey, KEYS),
    st.builds(StoreQueuePush, KEYS, st.binary(max_size=3)),
    st.builds(StoreQueuePop, KEYS, st.just(False), st.just(0.0)),
)
STEPS = st.tuples(QUERIES, st.integers(1, 3), st.sampled_from(["goes on", "goes on", "commits", "restarts"]))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STEPS, max_size=30))
def test_a_journal_restores_exactly_what_was_committed(
    tmp_path: Path, drawn: list[tuple[Message, int, str]]
) -> None:
    path = tmp_path / "j"
    path.unlink(missing_ok=True)
    journal, contents, replies = Journal(path), Contents(), ReplyCache()
    journal.load(contents, replies)
    state = State(contents)
    for number, (query, client, then) in enumerate(drawn, 1):
        *_, reply = state.apply(query, "requester", 0.0)
        replies.remember(client, number, reply.message)
        journal.remember(client, number, reply.message)
        if then == "commits":
            journal.commit()
        if then == "restarts":
            journal.commit()
            expected = copy.deepcopy(held(contents)), dict(replies.last)
            state.apply(StoreSet("a", b"not committed"), "requester", 0.0)
            journal.close()
            journal, contents, replies = Journal(path), Contents(), ReplyCache()
            journal.load(contents, replies)
            assert (held(contents), dict(replies.last)) == expected
            state = State(contents)
    journal.close()


def test_a_journal_can_be_flushed_to_the_disk(tmp_path: Path) -> None:
    journal, contents = Journal(tmp_path / "j", sync=True), Contents()
    journal.load(contents, ReplyCache())
    contents.put("k", b"v", [])
    journal.remember(7, 3, StoreNumber(5))
    journal.commit()
    journal.commit()
    journal.close()
    contents, replies = load(tmp_path / "j")
    assert contents.values == {"k": b"v"}
    assert replies.last == {7: (3, StoreNumber(5))}


def test_an_unacknowledged_item_is_in_its_queue_after_a_restart(tmp_path: Path) -> None:
    journal, contents = Journal(tmp_path / "j"), Contents()
    journal.load(contents, ReplyCache())
    for value in (b"1", b"2", b"3"):
        contents.push("q", value)
    contents.delivered(contents.pop("q"))
    contents.pop("q")  # its receiver has not acknowledged it
    journal.commit()
    journal.close()
    assert [item.value for item in load(tmp_path / "j")[0].queues["q"]] == [b"2", b"3"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"what?", "is no journal file: it begins with b'what"),
        (b"SQLite format 3\0" + bytes(90), "a damaged SQLite database"),
    ],
)
def test_another_file_is_left_alone(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "j").write_bytes(content)
    with pytest.raises(JournalError, match=words):
        Journal(tmp_path / "j")
    assert (tmp_path / "j").read_bytes() == content


def test_a_file_store_is_no_journal(tmp_path: Path) -> None:
    FileStore(str(tmp_path / "j")).close()
    with pytest.raises(JournalError, match="its format is 1, not 1001"):
        Journal(tmp_path / "j")


def test_a_damaged_journal_is_refused_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal, contents = Journal(path), Contents()
    journal.load(contents, ReplyCache())
    for n in range(2000):
        contents.put(f"k{n}", b"v" * 50, [])
    journal.commit()
    journal.close()
    damaged = bytearray(path.read_bytes())
    for at in range(8192, len(damaged), 4096):
        damaged[at : at + 16] = b"\xff" * 16
    path.write_bytes(damaged)
    with pytest.raises(JournalError, match=r"j is damaged: .*recover"):
        load(path)


def test_a_journal_is_locked_by_one_process(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    with pytest.raises(JournalError, match="another process uses the journal"):
        Journal(tmp_path / "j")
    journal.close()
    journal.close()
    Journal(tmp_path / "j").close()
    with pytest.raises(JournalError, match=r"cannot open the journal .*: No such file"):
        Journal(tmp_path / "nowhere" / "j")


def _fill_up(rank: int, path: str) -> tuple[str, int]:
    """A limit on the size of files stands for a disk that is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    journal, contents = Journal(path), Contents()
    journal.load(contents, ReplyCache())
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    for n in range(1000):
        contents.put(f"k{n}", b"v" * 10_000, [])
        try:
            journal.commit()
        except OSError as e:
            for _ in range(2):  # and nothing is written after that
                with pytest.raises(OSError, match="disk I/O error"):
                    journal.commit()
            journal.close()
            return str(e), n
    raise AssertionError("the disk was never full")


@pytest.mark.processes
@pytest.mark.slow
def test_a_full_disk_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    ((error, written),) = run_processes(_fill_up, 1, (str(tmp_path / "j"),))
    assert error == "[Errno 5] disk I/O error"  # what SQLite makes of EFBIG
    assert written > 3
    assert len(load(tmp_path / "j")[0].values) == written


def test_ids_of_64_bits_are_kept(tmp_path: Path) -> None:
    """Ours are smaller, but another client may choose any; a failure would keep others from their replies."""
    largest = (1 << 64) - 1
    journal, contents, replies = Journal(tmp_path / "j"), Contents(), ReplyCache()
    journal.load(contents, replies)
    for number in (1, 1 << 63, largest):
        journal.remember(number, number, StoreNumber(5))
    journal.forget(1 << 63)
    journal.commit()
    journal.close()
    assert load(tmp_path / "j")[1].last == {n: (n, StoreNumber(5)) for n in (1, largest)}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_contents_of_another_user_are_refused(tmp_path: Path) -> None:
    """SQLite takes what is in this file for a part of the journal. Anybody can make it in ``/tmp``."""
    load(tmp_path / "journal")
    made = tmp_path / "journal-wal"
    made.write_bytes(b"forged")
    os.chown(made, 65534, 65534)
    with pytest.raises(JournalError, match="'journal-wal' belongs to user 65534"):
        load(tmp_path / "journal")
