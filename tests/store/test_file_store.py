"""What is particular to a store in a file: many processes, writers that die, other files, and its end."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.processes import START, run_processes
from tests.support.waiting import eventually
from zmqgrad import environment
from zmqgrad.errors import ConfigurationError, StoreError, StoreTimeoutError
from zmqgrad.store import FileStore, HashStore, Store, file_connection
from zmqgrad.store import sqlite as store_sqlite

PATIENCE = 20.0


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def store(path: str) -> Iterator[FileStore]:
    with FileStore(path, timeout=PATIENCE) as store:
        yield store


# ---- several stores on one file ---------------------------------------------------------------------------


def test_writes_are_visible_to_other_stores_on_the_file(store: FileStore, path: str) -> None:
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


def _write_what_is_awaited(rank: int, path: str) -> None:
    with FileStore(path, timeout=PATIENCE) as store:
        store.set("here", "")
        store.wait(["go"])
        store.set("k", "1")
        store.queue_push("q", "2")
        for n in range(50):
            store.set("n", str(n))


@pytest.mark.processes
@pytest.mark.slow
def test_waits_and_watches_see_writes_of_other_processes(store: FileStore, path: str) -> None:
    seen: list[tuple[bytes | None, bytes | None]] = []
    last = threading.Event()

    def callback(old: bytes | None, new: bytes | None) -> None:
        seen.append((old, new))
        if new == b"49":
            last.set()

    def wait_for_both() -> list[bytes]:
        store.wait(["here"], START)  # their time begins when the process has started, however long that takes
        waits = [pool.submit(store.get, "k"), pool.submit(store.queue_pop, "q")]
        eventually(lambda: store.statistics()["parked"], lambda parked: parked == len(waits))
        store.set("go", "")
        return [wait.result(PATIENCE) for wait in waits]

    store.watch_key("n", callback)
    with ThreadPoolExecutor(3) as pool:
        got = pool.submit(wait_for_both)
        run_processes(_write_what_is_awaited, 1, (path,))
        assert got.result(PATIENCE) == [b"1", b"2"]
    assert last.wait(PATIENCE), "the last value is seen, though some between may not be"
    assert seen[0][0] is None
    assert all(before[1] == after[0] for before, after in pairwise(seen))


def test_a_watch_sees_writes_of_another_store_in_the_process(store: FileStore, path: str) -> None:
    events: list[tuple[bytes | None, bytes | None]] = []
    done = threading.Event()

    def callback(old: bytes | None, new: bytes | None) -> None:
        events.append((old, new))
        if new == b"2":
            done.set()

    with FileStore(path, timeout=PATIENCE) as other:
        other.watch_key("k", callback)
        store.set("k", "1")
        store.delete_key("k")
        store.set("k", "2")
        assert done.wait(PATIENCE)
        other.unwatch_key("k")
        store.set("k", "3")
    assert events[-1][1] == b"2"
    assert all(before[1] == after[0] for before, after in pairwise(events))


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


@given(commands=COMMANDS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_stores_on_one_file_do_what_one_store_does(
    tmp_path: Path, commands: list[tuple[int, str, str, int]]
) -> None:
    """Three stores take turns, and are reopened in between; a HashStore is the oracle."""
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
            assert each.num_keys() == oracle.num_keys()
            assert each.multi_get(keys) == oracle.multi_get(keys)
            queues = ("a", "b", "ü")
            assert [each.queue_len(q) for q in queues] == [oracle.queue_len(q) for q in queues]
    finally:
        for each in (*stores, oracle):
            each.close()
        os.unlink(path)


# ---- writers that die, and disks that are full ------------------------------------------------------------


def _write_until_killed(rank: int, path: str) -> int:
    """Acknowledge each write by a number in a file of its own; the parent kills the first four."""
    done = Path(f"{path}.done{rank}")
    with FileStore(path, timeout=60) as store:
        store.wait(["go"])
        for n in range(1, 400 if rank < 4 else 60):
            store.append(f"by {rank}", f"{n} ")
            done.write_text(str(n))
            store.add("n", 1)
            if rank < 4 and n == 20 + rank:
                os.kill(os.getpid(), signal.SIGKILL)
    return rank


@pytest.mark.processes
@pytest.mark.slow
def test_no_acknowledged_write_is_lost_though_writers_are_killed(store: FileStore, path: str) -> None:
    store.set("go", "")
    run_processes(_write_until_killed, 8, (path,), may_die=range(4))
    for rank in range(8):
        acknowledged = int(Path(f"{path}.done{rank}").read_text())
        numbers = store.get(f"by {rank}").split()
        assert numbers == [b"%d" % n for n in range(1, len(numbers) + 1)], "each once, in order"
        assert len(numbers) >= acknowledged
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()


def _die_in_mid_commit(rank: int, path: str) -> None:
    """Leave a journal behind, as a process killed between writing pages and ending its transaction does."""
    with FileStore(path, timeout=PATIENCE) as store:
        store.set("k", "before")
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA cache_size = 1")  # so that pages reach the file before the commit
    db.execute("BEGIN IMMEDIATE")
    for n in range(200):
        db.execute("INSERT OR REPLACE INTO keys VALUES (?, ?)", (b"k", b"torn" * 3000))
        db.execute("INSERT OR REPLACE INTO keys VALUES (?, ?)", (b"more%d" % n, b"torn" * 3000))
    assert os.path.getsize(f"{path}-journal") > 0
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.processes
@pytest.mark.slow
def test_an_unfinished_write_of_a_killed_process_is_rolled_back(path: str) -> None:
    run_processes(_die_in_mid_commit, 1, (path,), may_die=[0])
    with FileStore(path, 1, timeout=PATIENCE) as store:
        assert store.get("k") == b"before"
        assert store.list_keys() == ["k"]


def _fill_up(rank: int, path: str) -> tuple[str, int]:
    """A limit on the size of files stands for a disk that is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with FileStore(path, timeout=PATIENCE) as store:
        store.set("small", "1")
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
        try:
            for n in range(1000):
                store.set(f"k{n}", "v" * 10_000)
        except StoreError as e:
            error = str(e)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert store.get("small") == b"1"
        assert store.num_keys() == n + 1, "as if the write that failed had not been tried"
        store.set("after", "2")
        return error, n


@pytest.mark.processes
@pytest.mark.slow
def test_a_full_disk_is_an_error_and_loses_nothing(path: str) -> None:
    ((error, written),) = run_processes(_fill_up, 1, (path,))
    assert "cannot use the store's file" in error
    assert written > 3
    with FileStore(path, 1, timeout=PATIENCE) as store:
        assert store.multi_get(["small", "after"]) == [b"1", b"2"]
        assert store.num_keys() == written + 2


def _stand_still(rank: int, path: str) -> None:
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("BEGIN EXCLUSIVE")
    Path(f"{path}.locked").touch()
    eventually(lambda: os.path.exists(f"{path}.release"), timeout=PATIENCE)
    db.execute("COMMIT")
    db.close()


@pytest.mark.processes
@pytest.mark.slow
def test_the_lock_of_a_process_that_stands_still_costs_the_timeout(store: FileStore, path: str) -> None:
    store.set("k", "1")
    holder = threading.Thread(target=run_processes, args=(_stand_still, 1, (path,)))
    holder.start()
    eventually(lambda: os.path.exists(f"{path}.locked"), timeout=PATIENCE)
    store.set_timeout(0.05)
    for call in (lambda: store.get("k"), lambda: store.set("k", "2"), lambda: store.wait(["k"], 0.05)):
        with pytest.raises(StoreTimeoutError, match="another process holds the lock"):
            call()
    Path(f"{path}.release").touch()
    holder.join(PATIENCE)
    store.set_timeout(PATIENCE)
    assert store.get("k") == b"1"


def test_a_pop_of_an_empty_queue_waits_for_a_change(store: FileStore) -> None:
    """What it does itself to look at the queue is none."""
    waits, popped = threading.Event(), SimpleQueue[bytes]()

    def note_wait(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is threading.Condition.wait.__code__:
            waits.set()

    def pop() -> None:
        sys.setprofile(note_wait)
        popped.put(store.queue_pop("q"))

    waiter = threading.Thread(target=pop, daemon=True)
    waiter.start()
    assert waits.wait(PATIENCE)
    store.queue_push("q", "item")
    assert popped.get(timeout=PATIENCE) == b"item"
    waiter.join(PATIENCE)


def test_a_write_that_waits_for_a_reader_holds_up_no_other_call(store: FileStore, path: str) -> None:
    """The reader has begun, and stands still; other threads read as it does."""
    store.set("k", "1")
    reader, newcomer = (sqlite3.connect(path, isolation_level=None, timeout=0) for _ in range(2))
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM keys").fetchall()
    writer = threading.Thread(target=store.set, args=("k", "2"), daemon=True)
    writer.start()

    def is_refused() -> bool:
        """As SQLite lets nobody begin to read while a writer waits for those who read."""
        try:
            newcomer.execute("SELECT * FROM keys").fetchall()
        except sqlite3.OperationalError:
            return True
        return False

    eventually(is_refused)
    assert store.get("k") == b"1"
    assert writer.is_alive(), "before its time was over"
    reader.execute("COMMIT")
    writer.join(PATIENCE)
    assert store.get("k") == b"2"
    reader.close()
    newcomer.close()


def test_a_transaction_that_is_interrupted_leaves_nothing_behind(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between two writes of one query."""
    store.set("a", "1")

    class Value(bytes):
        """Interrupts a write of it."""

        def __conform__(self, protocol: Any) -> Any:
            raise KeyboardInterrupt

    values = iter(["2", Value(b"3")])
    monkeypatch.setattr("zmqgrad.store.base.as_value", lambda value: next(values))
    with pytest.raises(KeyboardInterrupt):
        store.multi_set(["a", "b"], ["2", "3"])
    monkeypatch.undo()
    assert store.get("a") == b"1"
    assert not store.check(["b"])
    store.set("b", "4")
    assert store.get("b") == b"4"


def _hundred(rank: int, path: str, size: int) -> tuple[float, bytes]:
    with FileStore(path, size, timeout=120) as store:
        before = sum(os.times()[:2])
        store.barrier("met", size)
        store.add("sum", rank)
        store.barrier("added", size)
        return sum(os.times()[:2]) - before, store.get("sum")


@pytest.mark.processes
@pytest.mark.slow
def test_many_processes_share_one_file(path: str) -> None:
    """They create it at the same moment. For a hundred see tools.bench.file_store."""
    size = 16
    results = run_processes(_hundred, size, (path, size), timeout=100)
    assert {found for _, found in results} == {b"%d" % sum(range(size))}
    assert not os.path.exists(path)


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
    assert not os.path.exists(f"{path}-journal")


def test_a_relative_path_names_one_file_wherever_the_program_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with FileStore("here", 1) as store:
        store.set("k", "1")
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert store.get("k") == b"1"
        with store.clone() as clone:
            assert clone.get("k") == b"1"
    assert [each.name for each in tmp_path.rglob("*")] == ["elsewhere"]


def test_a_relative_path_in_a_directory_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(StoreError, match="cannot open 'here'"):
        FileStore("here")


def test_no_name_stands_for_the_memory_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with FileStore(":memory:", 1) as store, FileStore(":memory:") as other:
        store.set("k", "1")
        assert other.get("k") == b"1"


def test_the_file_is_removed_only_on_request(path: str) -> None:
    FileStore(path).close()
    assert os.path.exists(path)


def test_a_file_that_is_removed_while_another_opens_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the last of a group, just as the next group meets there: SQLite reports an I/O error."""
    FileStore(path).close()
    connect = file_connection.connect

    def connect_late(*args: Any) -> sqlite3.Connection:
        monkeypatch.undo()
        os.unlink(path)
        raise StoreError("is no FileStore file: disk I/O error")

    monkeypatch.setattr(file_connection, "connect", connect_late)
    with FileStore(path, 1, PATIENCE) as store:
        assert store.num_keys() == 0
    assert file_connection.connect is connect


def test_a_replaced_file_is_detected(store: FileStore, path: str) -> None:
    store.set("k", "1")
    os.rename(path, f"{path}.away")
    with FileStore(path, timeout=PATIENCE) as other:
        other.set("k", "2")
        with pytest.raises(StoreError, match="was removed"):
            store.get("k")
        assert other.get("k") == b"2"


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda p: FileStore(f"{p}/no/such/place"), StoreError, "No such file or directory"),
        (lambda p: FileStore(os.path.dirname(p)), StoreError, "Is a directory"),
        (lambda p: FileStore(3), TypeError, "must be a str, not int"),
        (lambda p: FileStore(""), ConfigurationError, "no name of a file"),
        (lambda p: FileStore(p, "2"), TypeError, "must be an int"),
        (lambda p: FileStore(p, timeout=-1), ConfigurationError, "negative"),
    ],
)
def test_files_that_cannot_be_opened(
    path: str, make: Callable[[str], FileStore], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make(path)


def _sqlite_of_others(path: str) -> bytes:
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE diary (day)")
    db.commit()
    db.close()
    return Path(path).read_bytes()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"my diary", "it begins with b'my diary'"),
        (b"\x09\0\0\0refcount/\1\0\0\0001", r"a file of torch.distributed.FileStore"),
        (b"\2\0\0\0/k\1\0\0\0v", r"a file of torch.distributed.FileStore"),
        (b"SQLite format 3\0" + bytes(10), "a damaged SQLite database"),
        (None, "an SQLite database of another program"),
    ],
)
def test_a_foreign_file_is_not_modified(path: str, content: bytes | None, words: str) -> None:
    if content is None:
        content = _sqlite_of_others(path)
    else:
        Path(path).write_bytes(content)
    with pytest.raises(StoreError, match=words):
        FileStore(path)
    assert Path(path).read_bytes() == content


@pytest.mark.slow
def test_torch_s_own_file_is_recognized(path: str) -> None:
    import torch.distributed as dist

    theirs = dist.FileStore(path, 2)
    with pytest.raises(StoreError, match=r"a file of torch.distributed.FileStore"):
        FileStore(path)
    theirs.set("k", "v")
    with pytest.raises(StoreError, match=r"a file of torch.distributed.FileStore"):
        FileStore(path)


def test_a_journal_is_no_file_store(path: str) -> None:
    from zmqgrad.store.journal import Journal

    Journal(path).close()
    with pytest.raises(StoreError, match="its format is 1001, not 1"):
        FileStore(path)


def test_a_network_file_system_requires_a_setting(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_sqlite, "file_system_of", lambda path: "nfs4")
    with pytest.raises(ConfigurationError, match=r"network file system \(nfs4\).*TCPStore.*=1"):
        FileStore(path)
    with FileStore(path, allow_network_file_system=True) as store, store.clone() as clone:
        clone.set("k", "v")
    monkeypatch.setenv(environment.ALLOW_NETWORK_FILE_SYSTEM, "1")
    FileStore(path, 1).close()


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="only Linux tells the type of a file system")
def test_the_type_of_a_file_system_is_that_of_its_innermost_mount() -> None:
    assert store_sqlite.file_system_of(Path("/proc/self/status")) == "proc"
    assert store_sqlite.file_system_of(Path(__file__)) not in ("", "proc")


def _fork_and_look(rank: int, path: str) -> list[str]:
    store = FileStore(path, timeout=PATIENCE)
    store.set("k", "1")
    ours, theirs = os.pipe()
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            store.add("n", 1)

    writer = threading.Thread(target=write)  # so that the fork would meet a transaction
    writer.start()
    said = []
    for _ in range(20):
        if os.fork() == 0:
            try:
                store.get("k")
            except StoreError as e:
                os.write(theirs, str(e).encode())
            store.close()
            with FileStore(path, timeout=PATIENCE) as anew:
                anew.add("forks", 1)
            os._exit(0)
        said.append(os.read(ours, 1000).decode())
        os.wait()
    stop.set()
    writer.join()
    assert store.get("k") == b"1"
    assert store.get("forks") == b"20"
    store.close()
    return said


@pytest.mark.processes
@pytest.mark.slow
def test_a_fork_must_open_the_file_itself(path: str) -> None:
    (said,) = run_processes(_fork_and_look, 1, (path,))
    assert len(said) == 20
    assert all("opened before a fork" in each for each in said)
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()


def test_the_files_are_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "store"
    old = os.umask(0)
    try:
        with FileStore(str(path)) as store:
            store.set("key", "value")
            modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()}
    finally:
        os.umask(old)
    assert modes.pop("store") == 0o600
    assert set(modes.values()) <= {0o600}


def test_a_file_that_others_can_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.touch(0o644)
    with FileStore(str(path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.touch(0o600)
    os.chown(path, 65534, 65534)
    with pytest.raises(StoreError, match="'store' belongs to user 65534"):
        FileStore(str(path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("beside", store_sqlite.BESIDE)
def test_contents_of_another_user_are_refused(tmp_path: Path, beside: str) -> None:
    """SQLite takes what is in these files for a part of the store. Anybody can make them in ``/tmp``."""
    FileStore(str(tmp_path / "store"), timeout=PATIENCE).close()
    made = tmp_path / f"store{beside}"
    made.write_bytes(b"forged")
    made.chmod(0o666)
    os.chown(made, 65534, 65534)
    with pytest.raises(StoreError, match=f"'store{beside}' belongs to user 65534"):
        FileStore(str(tmp_path / "store"))
    made.unlink()
    made.symlink_to(tmp_path / "store")
    with pytest.raises(StoreError, match=f"'store{beside}'"):
        FileStore(str(tmp_path / "store"))


def test_nobody_else_can_make_the_files_beside_a_store(tmp_path: Path) -> None:
    """As they are there: in a directory like ``/tmp``, others cannot replace them."""
    path = tmp_path / "store"
    others = [tmp_path / f"store{suffix}" for suffix in store_sqlite.BESIDE]
    with FileStore(str(path), timeout=PATIENCE) as store:
        assert all(map(os.path.exists, others))
        identities = [os.stat(each).st_ino for each in others]
        store.set("key", "value")
        assert [os.stat(each).st_ino for each in others] == identities
    with FileStore(str(path), timeout=PATIENCE) as store:
        assert store.get("key") == b"value"
    assert [os.stat(each).st_ino for each in others] == identities
    FileStore(str(path), 1, PATIENCE).close()
    assert not list(tmp_path.iterdir())


def test_a_signal_handler_that_calls_the_store_undoes_no_call(store: FileStore) -> None:
    """Whichever call it interrupts: both are made, or the one that cannot be says so and changes nothing."""
    left, steps, refused = 0, 0, 0

    def handle(frame: FrameType, event: str, argument: object) -> None:
        """As a signal handler, which runs between any two steps of the main thread."""
        nonlocal left
        if left and event == "c_return" and "file_con" in frame.f_code.co_filename:
            left -= 1
            if not left:
                store.add("n", 1)

    while not left:
        steps += 1
        left, before, refusal = steps, store.add("n", 0), ""
        sys.setprofile(handle)
        try:
            store.add("n", 1)
        except StoreError as e:
            refusal = str(e)
        finally:
            sys.setprofile(None)
        made = store.add("n", 0) - before
        assert made == (0 if refusal else 1 if left else 2)
        refused += "signal handler" in refusal
    assert 0 < refused < steps


def test_an_interrupt_after_any_step_leaves_a_store_that_works(tmp_path: Path) -> None:
    """Ctrl-C where Python handles it: when a function returns, such as the one that begins a transaction."""
    left = 0

    def count_down(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        if left and event == "c_return" and "file_connection" in frame.f_code.co_filename:
            left -= 1
            if not left:
                raise KeyboardInterrupt

    added: SimpleQueue[int] = SimpleQueue()
    kept: BaseException | None = None  # as the prompt keeps the last error, and with it all frames
    with FileStore(tmp_path / "f", timeout=10) as store:
        steps, interrupted = 0, True
        while interrupted:
            steps += 1
            left, interrupted = steps, False
            sys.setprofile(count_down)
            try:
                store.add("n", 1)
            except KeyboardInterrupt as e:
                kept, interrupted = e, True
            finally:
                sys.setprofile(None)
            assert store.add("n", 0) <= steps
            threading.Thread(target=lambda: added.put(store.add("n", 0)), daemon=True).start()
            assert added.get(timeout=20) <= steps
    assert isinstance(kept, KeyboardInterrupt)
    assert steps > 3
