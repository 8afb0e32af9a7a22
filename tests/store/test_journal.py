"""The journal: what was answered is there after a kill; damage is refused by its place, and salvaged."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zmqgrad.errors import JournalError
from zmqgrad.store.answers import Answers
from zmqgrad.store.durable import compact, replay
from zmqgrad.store.journal import Journal, salvage
from zmqgrad.store.records import MAGIC, Damage, Entry, scan, write_record
from zmqgrad.store.state import State
from zmqgrad.wire.messages import (
    Message,
    StoreAdd,
    StoreAppend,
    StoreDeleteKey,
    StoreDone,
    StoreNumber,
    StoreQueuePop,
    StoreQueuePush,
    StoreSet,
)

CHANGES: list[Message] = [
    StoreSet("a", b"1"),
    StoreAdd("n", 5),
    StoreAppend("a", b"23"),
    StoreQueuePush("q", b"x"),
    StoreQueuePush("q", b"y"),
    StoreQueuePop("q", True, 10.0),
    StoreDeleteKey("a"),
    StoreAdd("n", 2),
]


def write(path: Path, changes: list[Message], line: int = 7) -> None:
    journal = Journal(path)
    assert list(journal.entries()) == []
    for number, change in enumerate(changes, 1):
        journal.note(line, number, change)
        journal.commit()
    journal.close()


def load(path: Path) -> tuple[State, Answers]:
    journal, state, answers = Journal(path), State(), Answers()
    try:
        replay(journal, state, answers)
    finally:
        journal.close()
    return state, answers


def test_a_state_comes_back(tmp_path: Path) -> None:
    write(tmp_path / "j", CHANGES)
    state, answers = load(tmp_path / "j")
    assert list(state.as_queries()) == [StoreSet("n", b"7"), StoreQueuePush("q", b"y")]
    assert state.revision == 5
    assert answers.last[7] == (8, StoreNumber(7))


def test_a_journal_can_be_written_on(tmp_path: Path) -> None:
    write(tmp_path / "j", CHANGES)
    journal, state = Journal(tmp_path / "j", sync=True), State()
    replay(journal, state, Answers())
    journal.note(0, 0, StoreSet("more", b""))
    journal.commit()
    journal.close()
    assert StoreSet("more", b"") in list(load(tmp_path / "j")[0].as_queries())


def ends(data: bytes) -> list[int]:
    """Where records end."""
    return [len(MAGIC)] + [piece.end for piece in scan(memoryview(data))]


def test_a_record_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    """Cut at every byte of the last two records: what was answered before is there."""
    path = tmp_path / "j"
    write(path, CHANGES)
    data = path.read_bytes()
    *_, two_before, one_before, end = ends(data)
    for size in range(two_before, end):
        path.write_bytes(data[:size])
        state, _ = load(path)
        whole = len(CHANGES) - (1 if size >= one_before else 2)
        assert state.contents.changes == whole, size
        assert path.stat().st_size == (one_before if size >= one_before else two_before)


def test_a_file_that_grew_and_was_not_written_is_dropped(tmp_path: Path) -> None:
    """As file systems leave it after a power failure."""
    path = tmp_path / "j"
    write(path, CHANGES)
    data = path.read_bytes()
    path.write_bytes(data + bytes(100))
    assert load(path)[0].contents.changes == len(CHANGES)
    assert path.read_bytes() == data


@pytest.mark.parametrize("which", [-1, -3])
def test_damage_is_refused_wherever_it_is(tmp_path: Path, which: int) -> None:
    """At every byte of the last record, and of one in the middle, with any bit."""
    path = tmp_path / "j"
    write(path, CHANGES)
    data = path.read_bytes()
    marks = ends(data)
    begin, end = marks[which - 1], marks[which]
    before, behind = len(CHANGES) + which, -which - 1
    for at in range(begin, end):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        with pytest.raises(JournalError) as caught:
            load(path)
        said = str(caught.value)
        assert f"{path} is damaged at byte {begin}:" in said, at
        assert f"{before} changes before it are whole, and {behind} behind it" in said, at
        assert path.read_bytes() == damaged, "nothing is thrown away unasked"


@pytest.mark.parametrize("beyond", [False, True])
def test_what_is_whole_is_saved(tmp_path: Path, beyond: bool) -> None:
    path, new = tmp_path / "j", tmp_path / "new"
    write(path, CHANGES)
    data = bytearray(path.read_bytes())
    marks = ends(bytes(data))
    data[marks[2] + 3] ^= 0xFF  # the length of the third
    path.write_bytes(data)
    saved = salvage(path, new, beyond=beyond)
    assert saved.gaps == 1
    if beyond:
        assert saved == (len(CHANGES) - 1, 1, marks[3] - marks[2])
        assert list(load(new)[0].as_queries()) == [StoreSet("n", b"7"), StoreQueuePush("q", b"y")]
    else:
        assert saved == (2, 1, marks[-1] - marks[2])
        assert list(load(new)[0].as_queries()) == [StoreSet("a", b"1"), StoreSet("n", b"5")]
    with pytest.raises(JournalError, match=r"cannot write what was saved to .*exists"):
        salvage(path, new)


def test_of_a_whole_journal_everything_is_saved(tmp_path: Path) -> None:
    write(tmp_path / "j", CHANGES)
    assert salvage(tmp_path / "j", tmp_path / "new") == (len(CHANGES), 0, 0)
    assert (tmp_path / "new").read_bytes() == (tmp_path / "j").read_bytes()


def test_a_whole_record_that_says_nothing_we_know() -> None:
    """Of another release, say."""
    record = write_record(Entry(9, 1, 1, StoreDone()))  # type: ignore[arg-type]
    (piece,) = scan(memoryview(MAGIC + b"".join(record)))
    assert isinstance(piece.what, Damage)
    assert "another release" in piece.what.why


@pytest.mark.parametrize("begin", [b"", MAGIC[:5], MAGIC[:-1]])
def test_a_journal_that_had_just_begun(tmp_path: Path, begin: bytes) -> None:
    (tmp_path / "j").write_bytes(begin)
    assert load(tmp_path / "j")[0].contents.changes == 0
    assert (tmp_path / "j").read_bytes() == MAGIC


@pytest.mark.parametrize("begin", [b"what?", b"x" * 100])
def test_another_file_is_left_alone(tmp_path: Path, begin: bytes) -> None:
    (tmp_path / "j").write_bytes(begin)
    with pytest.raises(JournalError, match="is no journal of a store"):
        load(tmp_path / "j")
    assert (tmp_path / "j").read_bytes() == begin


def test_one_process_has_it_at_a_time(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    with pytest.raises(JournalError, match="another process uses the journal"):
        Journal(tmp_path / "j")
    journal.close()
    journal.close()
    Journal(tmp_path / "j").close()
    with pytest.raises(JournalError, match=r"cannot open the journal .*: No such file"):
        Journal(tmp_path / "nowhere" / "j")


# ---- written anew -----------------------------------------------------------------------------------------


KEYS = st.sampled_from(["a", "b", "\0hidden"])
QUERIES = st.one_of(
    st.builds(StoreSet, KEYS, st.binary(max_size=3)),
    st.builds(StoreAdd, st.sampled_from(["m", "n"]), st.integers(-5, 5)),
    st.builds(StoreAppend, KEYS, st.binary(max_size=3)),
    st.builds(StoreDeleteKey, KEYS),
    st.builds(StoreQueuePush, KEYS, st.binary(max_size=3)),
    st.builds(StoreQueuePop, KEYS, st.just(False), st.just(0.0)),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(QUERIES, st.integers(1, 3), st.booleans()), max_size=30))
def test_a_compacted_journal_says_the_same(tmp_path: Path, drawn: list[tuple[Message, int, bool]]) -> None:
    path = tmp_path / "j"
    path.unlink(missing_ok=True)
    journal, state, answers = Journal(path), State(), Answers()
    replay(journal, state, answers)
    for number, (query, line, then_compact) in enumerate(drawn, 1):
        before = state.contents.changes
        (reply,) = state.apply(query, "asker", 0.0)
        if state.contents.changes != before:
            answers.remember(line, number, reply.message)
            journal.note(line, number, query)
            journal.commit()
        if then_compact:
            compact(journal, state, answers)
    journal.close()
    again, again_answers = load(path)
    assert list(again.as_queries()) == list(state.as_queries())
    assert (again.revision, list(again_answers.last.items())) == (state.revision, list(answers.last.items()))
    assert [p.name for p in tmp_path.iterdir()] == ["j"]


def test_it_asks_to_be_written_anew_when_it_has_doubled(tmp_path: Path) -> None:
    journal, state, answers = Journal(tmp_path / "j"), State(), Answers()
    replay(journal, state, answers)
    sizes = []
    for _ in range(40):
        query = StoreSet("k", bytes(1 << 20))
        state.apply(query, None, 0.0)
        journal.note(0, 0, query)
        journal.commit()
        if journal.has_grown:
            sizes.append(journal.size)
            compact(journal, state, answers)
            assert journal.size < 2 << 20
    assert sizes
    assert max(sizes) < 8 << 20
    journal.close()


def test_no_room_to_write_it_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "j", CHANGES)
    journal, state, answers = Journal(tmp_path / "j"), State(), Answers()
    replay(journal, state, answers)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        compact(journal, state, answers)
    journal.note(0, 0, StoreSet("z", b"z"))
    journal.commit()
    journal.close()
    assert load(tmp_path / "j")[0].contents.changes == len(CHANGES) + 1
    assert [p.name for p in tmp_path.iterdir()] == ["j"]
