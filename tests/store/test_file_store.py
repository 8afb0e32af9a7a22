"""What is particular to a store in a file: its format, many processes, writers that die, and its end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.processes import run_processes
from zmqgrad.errors import ConfigurationError, StoreError, StoreTimeoutError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import FileStore, HashStore, Store, replica
from zmqgrad.store.shared_log import BLOCK, MAGIC, NEW, START, SharedLog

PATIENCE = 20.0
HEAD = 12


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def store(path: str) -> Iterator[FileStore]:
    with FileStore(path, timeout=PATIENCE) as store:
        yield store


def ends_of_records(path: str) -> list[int]:
    """Where each record ends."""
    data, ends = Path(path).read_bytes(), [START]
    while ends[-1] < len(data):
        ends.append(ends[-1] + HEAD + int.from_bytes(data[ends[-1] : ends[-1] + 4], "big"))
    assert ends[-1] == len(data)
    return ends


# ---- several stores on one file ---------------------------------------------------------------------------


def test_what_one_writes_the_other_reads(store: FileStore, path: str) -> None:
    with FileStore(Path(path), timeout=PATIENCE) as other:  # type: ignore[arg-type]
        assert other.path == path
        store.set("k", "1")
        assert other.get("k") == b"1"
        assert other.add("k", 1) == 2
        store.queue_push("q", "x")
        assert other.queue_pop("q") == b"x"
        assert store.queue_len("q") == 0
        assert store.get("k") == b"2"
    with FileStore(path, timeout=PATIENCE) as late:
        assert late.get("k") == b"2"
        assert late.num_keys() == 1


def test_a_wait_sees_what_another_store_writes(store: FileStore, path: str) -> None:
    got: list[bytes] = []
    with FileStore(path, timeout=PATIENCE) as other:
        threads = [
            threading.Thread(target=lambda: got.append(other.get("k"))),
            threading.Thread(target=lambda: got.append(other.queue_pop("q"))),
        ]
        for thread in threads:
            thread.start()
        store.set("k", "1")
        store.queue_push("q", "2")
        for thread in threads:
            thread.join(PATIENCE)
    assert sorted(got) == [b"1", b"2"]


def test_a_watch_sees_what_another_store_writes(store: FileStore, path: str) -> None:
    seen: list[tuple[bytes | None, bytes | None]] = []
    done = threading.Event()

    def callback(old: bytes | None, new: bytes | None) -> None:
        seen.append((old, new))
        if new is None:
            done.set()

    with FileStore(path, timeout=PATIENCE) as other:
        other.watch_key("k", callback)
        store.set("k", "1")
        store.set("k", "2")
        store.delete_key("k")
        assert done.wait(PATIENCE)
        other.unwatch_key("k")
        store.set("k", "3")
    assert seen == [(None, b"1"), (b"1", b"2"), (b"2", None)]


COMMANDS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["set", "add", "append", "delete_key", "compare_set", "push", "pop", "reopen"]),
        st.sampled_from(["a", "b", "ü"]),
        st.integers(-9, 9),
    ),
    max_size=40,
)


def carry_out(store: Store, name: str, key: str, n: int) -> object:
    try:
        match name:
            case "set":
                return store.set(key, str(n))
            case "add":
                return store.add(key, n)
            case "append":
                return store.append(key, "1")
            case "delete_key":
                return store.delete_key(key)
            case "compare_set":
                return store.compare_set(key, str(n), "7")
            case "push":
                return store.queue_push(key, str(n))
            case _:
                return store.queue_pop(key, False)
    except StoreError as e:
        return type(e)


@pytest.mark.parametrize("compact_bytes", [1 << 20, 300])
@given(commands=COMMANDS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_stores_on_one_file_do_what_one_store_does(
    tmp_path: Path, compact_bytes: int, commands: list[tuple[int, str, str, int]]
) -> None:
    """Three of them take turns, and are opened anew in between; a HashStore is the oracle.

    At 300 bytes, the file is written anew every few commands.
    """
    with mock.patch.object(replica, "COMPACT_BYTES", compact_bytes):
        do_as_a_hash_store(tmp_path, commands)


def do_as_a_hash_store(tmp_path: Path, commands: list[tuple[int, str, str, int]]) -> None:
    path = str(tmp_path / "drawn")
    stores, oracle = [FileStore(path, timeout=PATIENCE) for _ in range(3)], HashStore(PATIENCE)
    try:
        for who, name, key, n in commands:
            if name == "reopen":
                stores[who].close()
                stores[who] = FileStore(path, timeout=PATIENCE)
            else:
                assert carry_out(stores[who], name, key, n) == carry_out(oracle, name, key, n)
        for each in stores:
            keys = oracle.list_keys()
            assert each.list_keys() == keys
            assert each.multi_get(keys) == oracle.multi_get(keys)
            assert [each.queue_len(q) for q in ("a", "b", "ü")] == [
                oracle.queue_len(q) for q in ("a", "b", "ü")
            ]
    finally:
        for each in (*stores, oracle):
            each.close()
        os.unlink(path)


@pytest.fixture
def compacting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written anew as soon as they are longer than 300 bytes."""
    monkeypatch.setattr(replica, "COMPACT_BYTES", 300)


@pytest.mark.usefixtures("compacting")
def test_a_file_of_history_is_written_anew_under_those_who_wait_and_watch(path: str) -> None:
    seen: list[tuple[bytes | None, bytes | None]] = []
    last, got = threading.Event(), []

    def callback(old: bytes | None, new: bytes | None) -> None:
        seen.append((old, new))
        if new == b"199":
            last.set()

    with FileStore(path, timeout=PATIENCE) as writer, FileStore(path, timeout=PATIENCE) as other:
        other.watch_key("n", callback)
        waits = [
            threading.Thread(target=lambda: got.append(other.get("k"))),
            threading.Thread(target=lambda: got.append(other.wait(["n", "k"]))),
        ]
        for wait in waits:
            wait.start()
        for n in range(200):
            writer.set("n", str(n))
        assert last.wait(PATIENCE), "the last value is seen, though some between may not be"
        writer.set("k", "1")
        for wait in waits:
            wait.join(PATIENCE)
        assert other._replica._log.moves > 0
    assert sorted(got, key=repr) == [None, b"1"]
    assert seen[0][0] is None
    assert all(old == earlier[1] for earlier, (old, _) in pairwise(seen))
    assert os.path.getsize(path) < 700


def add_many(store: Store) -> None:
    for _ in range(100):
        store.add("n", 1)


@pytest.mark.usefixtures("compacting")
def test_one_who_dies_while_writing_anew_costs_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = FileStore(path, 1, PATIENCE), FileStore(path, timeout=PATIENCE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            add_many(store)
    n = int(other.get("n"))
    assert os.path.exists(path + NEW)
    assert store.add("n", 1) == n + 1
    assert other.get("n") == b"%d" % (n + 1)
    other.close()
    Path(path + NEW).touch()
    store.close()
    assert not os.path.exists(path)
    assert not os.path.exists(path + NEW)


@pytest.mark.usefixtures("compacting")
def test_a_file_that_cannot_be_written_anew_goes_on(
    store: FileStore, path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=OSError(28, "No space left on device")))
    for n in range(50):
        assert store.add("n", 1) == n + 1
    assert "goes on growing" in caplog.text
    assert 1 <= len(caplog.records) < 10, "not tried each time"


def test_another_store_in_the_place_of_ours_is_not_taken_for_it(store: FileStore, path: str) -> None:
    store.set("k", "1")
    os.rename(path, f"{path}.away")
    with FileStore(path, timeout=PATIENCE) as other:
        other.set("k", "2")
        with pytest.raises(StoreError, match="was removed, and another store's is there now"):
            store.get("k")


def test_looking_does_not_make_the_file_grow(store: FileStore, path: str) -> None:
    store.set("k", "1")
    size = os.path.getsize(path)
    store.get("k")
    store.check(["k", "x"])
    store.compare_set("k", "no", "2")
    store.compare_set("k", "1", "1")
    store.delete_key("x")
    store.queue_len("q")
    with pytest.raises(StoreError, match="empty"):
        store.queue_pop("q", False)
    assert os.path.getsize(path) == size


# ---- writers that die -------------------------------------------------------------------------------------


def test_a_record_without_its_end_is_ignored_and_overwritten(store: FileStore, path: str) -> None:
    """Cut after each byte of the last record: what came before is there, and the next write is good."""
    store.set("k", "1")
    store.set("k", "a longer value that is lost")
    *_, kept, end = ends_of_records(path)
    whole = Path(path).read_bytes()
    for cut in range(kept, end):
        torn = f"{path}-{cut}"
        Path(torn).write_bytes(whole[:cut])
        with FileStore(torn, timeout=PATIENCE) as one, FileStore(torn, timeout=PATIENCE) as other:
            assert one.get("k") == b"1"
            one.set("k", "2")
            assert other.get("k") == b"2"
        assert len(ends_of_records(torn)) == 3


@pytest.mark.parametrize("size", range(len(MAGIC)))
def test_a_file_cut_before_its_first_record_is_an_empty_store(path: str, size: int) -> None:
    Path(path).write_bytes(MAGIC[:size])
    with FileStore(path, timeout=PATIENCE) as store:
        assert store.num_keys() == 0
        store.set("k", "1")
        assert store.get("k") == b"1"


def test_what_a_crashed_host_left_is_ignored(store: FileStore, path: str) -> None:
    """Room without bytes, and a last record of which not all pages were written."""
    store.set("k", "1")
    good = Path(path).read_bytes()
    store.set("k", "2" * 100)
    whole = Path(path).read_bytes()
    for left in (good + bytes(500), good + bytes(3 * BLOCK), whole[:-50] + bytes(50)):
        Path(path).write_bytes(left)
        with FileStore(path, timeout=PATIENCE) as other:
            assert other.get("k") == b"1"
            other.set("k", "3")
        with FileStore(path, timeout=PATIENCE) as other:
            assert other.get("k") == b"3"


def test_damage_is_refused_and_says_where(store: FileStore, path: str) -> None:
    for n in range(3):
        store.set("k", str(n))
    first, second, *_ = ends_of_records(path)
    whole = Path(path).read_bytes()
    for at in range(first, second):
        damaged = bytearray(whole)
        damaged[at] ^= 0x40
        Path(path).write_bytes(damaged)
        with pytest.raises(StoreError, match=f"damaged at byte {first}:"):
            FileStore(path)
        assert Path(path).read_bytes() == damaged, "not touched"


def test_the_lock_of_somebody_who_stands_still_costs_the_timeout(store: FileStore, path: str) -> None:
    store.set("k", "1")
    other = SharedLog(path)
    with other.locked(Deadline.after(PATIENCE), alone=True):
        store.set_timeout(0.02)
        for call in (lambda: store.get("k"), lambda: store.set("k", "2"), lambda: store.wait(["k"], 0.01)):
            with pytest.raises(StoreTimeoutError, match="others hold the lock"):
                call()
    other.close()
    assert store.get("k") == b"1"


def _write_and_die(rank: int, path: str) -> None:
    replica.COMPACT_BYTES = 1000
    store = FileStore(path, timeout=PATIENCE)
    store.wait(["go"])
    if rank == 0:
        write = os.pwrite

        def half(file: int, data: Any, at: int) -> int:
            write(file, bytes(data)[: len(data) // 2], at)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        os.pwrite = half
    for n in range(40):
        store.add("n", 1)
        store.append(f"by {rank}", f"{n} ")
    store.close()


@pytest.mark.processes
@pytest.mark.slow
def test_processes_add_up_though_one_is_killed_in_mid_write(store: FileStore, path: str) -> None:
    store.set("go", "")
    run_processes(_write_and_die, 4, (path,), may_die=[0])
    assert store.get("n") == b"120"
    expected = "".join(f"{n} " for n in range(40)).encode()
    assert store.multi_get(["by 1", "by 2", "by 3"]) == [expected] * 3
    assert not store.check(["by 0"])


# ---- the beginning and the end ----------------------------------------------------------------------------


def test_the_last_of_world_size_removes_the_file(path: str) -> None:
    stores = [FileStore(path, 3, PATIENCE) for _ in range(2)]
    for each in stores:
        each.close()
        each.close()
        assert os.path.exists(path)
    third = FileStore(path, world_size=3, timeout=PATIENCE)
    clone = third.clone()
    third.close()
    assert not os.path.exists(path)
    with pytest.raises(StoreError, match="was removed"):
        clone.set("k", "1")
    clone.close()
    with FileStore(path, 1, PATIENCE) as anew:
        assert anew.num_keys() == 0
    assert not os.path.exists(path)


def test_nobody_removes_the_file_unless_asked(path: str) -> None:
    FileStore(path).close()
    assert os.path.exists(path)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda p: FileStore(f"{p}/no/such/place"), StoreError, "No such file or directory"),
        (lambda p: FileStore(os.path.dirname(p)), StoreError, "Is a directory"),
        (lambda p: FileStore(3), TypeError, "must be a str, not int"),
        (lambda p: FileStore(""), ConfigurationError, "no name of a file"),
        (lambda p: FileStore(p, "2"), TypeError, "integer"),
        (lambda p: FileStore(p, timeout=-1), ConfigurationError, "negative"),
    ],
)
def test_what_cannot_be_opened(
    path: str, make: Callable[[str], FileStore], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make(path)


def test_a_file_of_somebody_else_is_not_touched(path: str) -> None:
    Path(path).write_text("my diary")
    with pytest.raises(StoreError, match="no file of a FileStore"):
        FileStore(path)
    assert Path(path).read_text() == "my diary"


def test_a_file_that_is_cut_under_a_store(store: FileStore, path: str) -> None:
    store.set("k", "1")
    os.truncate(path, 3)
    with pytest.raises(StoreError, match="was cut to 3 bytes"):
        store.get("k")


def test_a_failed_write_is_as_if_it_had_not_been_tried(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.set("k", "1")
    write = os.pwrite

    def full(file: int, data: bytes, at: int) -> int:
        write(file, bytes(data)[:7], at)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreError, match="No space left"):
        store.set("k", "2")
    assert store.get("k") == b"1"
    monkeypatch.undo()
    store.set("k", "3")
    assert store.get("k") == b"3"


def test_a_ctrl_c_in_the_middle_of_reading_applies_nothing_twice(
    store: FileStore, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileStore(path, timeout=PATIENCE) as other:
        for _ in range(5):
            other.add("n", 1)
    machine = type(store._replica._state)
    apply, calls = machine.apply, iter(range(99))

    def interrupted(*args: Any) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return apply(*args)

    monkeypatch.setattr(machine, "apply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.get("n")
    assert store.get("n") == b"5"


def _fork_and_look(rank: int, path: str) -> str:
    store = FileStore(path, timeout=PATIENCE)
    store.set("k", "1")
    ours, theirs = os.pipe()
    if os.fork() == 0:
        try:
            store.get("k")
        except StoreError as e:
            os.write(theirs, str(e).encode())
        os._exit(0)
    os.close(theirs)
    said = os.read(ours, 1000).decode()
    os.wait()
    assert store.get("k") == b"1"
    store.close()
    return said


@pytest.mark.processes
@pytest.mark.slow
def test_a_fork_is_told_to_open_the_file_itself(path: str) -> None:
    (said,) = run_processes(_fork_and_look, 1, (path,))
    assert "opened before a fork" in said
