"""Servers that die and come back, connections that break: clients go on, and nothing is done twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.processes import free_port
from zmqgrad.errors import QueueEmptyError, StoreError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import Store, TCPStore
from zmqgrad.store.server import StoreServer
from zmqgrad.transport.requests.connection import Client
from zmqgrad.transport.requests.short import Handler
from zmqgrad.wire.messages import Message, StorePing, StoreWatchKey

PATIENCE = 20.0


class Died(BaseException):
    """Ends a server at once, as a kill would."""


class Life:
    """A store whose server meets a fate at each query, and is started again whenever it died."""

    def __init__(self, journal: Path | None = None) -> None:
        self.fates: deque[str] = deque()
        self.deaths = 0
        self.journal = journal
        self.servers: list[Mortal] = []
        self.server = Mortal(self, f"tcp://127.0.0.1:{free_port()}")

    def reborn(self) -> None:
        """Called in the dead server's thread."""
        self.deaths += 1
        self.server = Mortal(self, self.server.endpoint)

    def close(self) -> None:
        for server in self.servers:  # the last may have answered before it was assigned
            server.close()


class Mortal(StoreServer):
    """A server whose life may end at a query."""

    def __init__(self, life: Life, address: str) -> None:
        self._life = life
        self._now = ""
        life.servers.append(self)
        super().__init__(address, journal=life.journal)

    def _run(self) -> None:
        self._service_reply = self._service.reply
        self._service.reply = self._reply
        self._service_handler = self._service.handler
        self._service.handler = self._handler  # type: ignore[method-assign]
        try:
            super()._run()
        except Died:
            self._life.reborn()

    def _handler(self, kind: type[Message]) -> Handler:
        handle = self._service_handler(kind)
        counts = kind not in (StorePing, StoreWatchKey)

        def handle_or_die(client: Client, line: int, number: int, query: Message) -> None:
            self._now = self._life.fates.popleft() if counts and self._life.fates else "arrives"
            if self._now == "dies before":
                raise Died
            handle(client, line, number, query)

        return handle_or_die

    def _reply(self, client: Client, number: int, message: Message) -> None:
        if self._now == "dies after":
            raise Died
        if self._now == "breaks":
            self._requests._close(client)
        self._service_reply(client, number, message)


@pytest.fixture(params=["in memory", "with a journal"])
def life(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Life]:
    made = Life(tmp_path / "journal" if request.param == "with a journal" else None)
    yield made
    made.close()


def connect(life: Life) -> TCPStore:
    return TCPStore("127.0.0.1", life.server.port, timeout=PATIENCE)


# ---- one dict, several clients, and no mercy --------------------------------------------------------------


class Model:
    """What a store should answer, by a dict and lists."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}
        self.queues: dict[str, list[bytes]] = {}

    def set(self, key: str, value: bytes) -> None:
        self.keys[key] = value

    def get(self, key: str) -> Any:
        return self.keys.get(key, "missing")

    def add(self, key: str, amount: int) -> int:
        total = int(self.keys.get(key, b"0")) + amount
        self.keys[key] = b"%d" % total
        return total

    def append(self, key: str, value: bytes) -> None:
        self.keys[key] = self.keys.get(key, b"") + value

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        held = self.keys.get(key)
        if held == expected or (held is None and not expected):
            self.keys[key] = desired
        return self.keys.get(key, expected)

    def delete_key(self, key: str) -> bool:
        return self.keys.pop(key, None) is not None

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        self.keys.update(zip(keys, values, strict=True))

    def queue_push(self, key: str, value: bytes) -> None:
        self.queues.setdefault(key, []).append(value)

    def queue_pop(self, key: str) -> Any:
        return self.queues[key].pop(0) if self.queues.get(key) else "empty"

    def num_keys(self) -> int:
        return len(self.keys)


def ask(store: Store, call: str, *arguments: Any) -> Any:
    if call == "get":
        return store.multi_get(list(arguments))[0] if store.check(list(arguments)) else "missing"
    if call == "queue_pop":
        try:
            return store.queue_pop(arguments[0], False)
        except QueueEmptyError:
            return "empty"
    return getattr(store, call)(*arguments)


NAMES = st.sampled_from(["a", "b"])
VALUES = st.sampled_from([b"", b"1", b"x" * 300])
COMMANDS = st.one_of(
    st.tuples(st.just("set"), NAMES, VALUES),
    st.tuples(st.just("get"), NAMES),
    st.tuples(st.just("add"), st.just("n"), st.integers(-3, 3)),
    st.tuples(st.just("append"), NAMES, VALUES),
    st.tuples(st.just("compare_set"), NAMES, VALUES, VALUES),
    st.tuples(st.just("delete_key"), NAMES),
    st.tuples(st.just("multi_set"), st.just(["a", "b"]), st.tuples(VALUES, VALUES).map(list)),
    st.tuples(st.just("queue_push"), st.just("q"), VALUES),
    st.tuples(st.just("queue_pop"), st.just("q")),
    st.tuples(st.just("num_keys")),
)
FATES = ["arrives", "arrives", "breaks", "dies before", "dies after"]


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_store_is_a_dict_whatever_happens_to_its_server(data: st.DataObject, tmp_path: Path) -> None:
    """(P9), and exactly once: a lost answer is asked for again, and the change is not made again."""
    path = tmp_path / "journal"
    path.unlink(missing_ok=True)
    life, model = Life(path), Model()
    clients = [connect(life) for _ in range(3)]
    try:
        steps = st.tuples(st.integers(0, 2), COMMANDS, st.sampled_from(FATES))
        for which, command, fate in data.draw(st.lists(steps, max_size=25)):
            life.fates.append(fate)
            expected = getattr(model, command[0])(*command[1:])
            assert ask(clients[which], *command) == expected, command
            life.fates.clear()
    finally:
        for client in clients:
            client.close()
        life.close()


@pytest.mark.parametrize("fate", ["breaks", "dies after"])
def test_what_was_answered_in_vain_is_not_done_again(tmp_path: Path, fate: str) -> None:
    life = Life(tmp_path / "journal")
    with connect(life) as store:
        store.queue_push("q", "first")
        store.queue_push("q", "second")
        life.fates += [fate, "arrives"] * 2
        assert store.add("n", 1) == 1
        assert store.queue_pop("q") == b"first"
        life.fates.clear()
        assert (store.add("n", 1), store.queue_len("q")) == (2, 1)
    assert life.deaths == (2 if fate == "dies after" else 0)
    life.close()


@pytest.mark.slow
def test_answers_to_several_that_are_repeated_many_times(life: Life) -> None:
    with connect(life) as store:
        life.fates += ["breaks", "breaks", "breaks", "arrives"] * 5
        assert [store.add("n", 1) for _ in range(5)] == [1, 2, 3, 4, 5]
        life.fates.clear()


# ---- those who wait ---------------------------------------------------------------------------------------


def until(condition: Any) -> None:
    deadline, pause = Deadline.after(PATIENCE), threading.Event()
    while not condition():
        assert not deadline.passed()
        pause.wait(0.002)


@pytest.mark.slow
def test_those_who_wait_go_on_waiting_at_the_next_server(tmp_path: Path) -> None:
    life, got = Life(tmp_path / "journal"), []
    with connect(life) as store, connect(life) as other:
        waiters = [
            threading.Thread(target=lambda call=call: got.append(call()))  # type: ignore[misc]
            for call in (lambda: store.get("k"), lambda: store.queue_pop("q"), lambda: store.wait(["k"]))
        ]
        for waiter in waiters:
            waiter.start()
        until(lambda: life.server.statistics()["parked"] == 3)
        life.fates.append("dies before")
        other.set("unrelated", "")
        until(lambda: life.server.statistics()["parked"] == 3)
        other.queue_push("q", "pushed")
        other.set("k", "set")
        for waiter in waiters:
            waiter.join(PATIENCE)
        assert sorted(got, key=str) == [None, b"pushed", b"set"]
    life.close()


def test_one_who_waited_and_went_takes_nothing(life: Life) -> None:
    """A value that is pushed later goes to one who is there."""
    with connect(life) as store:
        gone = connect(life)

        def wait() -> None:
            with pytest.raises(StoreError, match="closed"):
                gone.queue_pop("q")

        waiter = threading.Thread(target=wait)
        waiter.start()
        until(lambda: life.server.statistics()["parked"] == 1)
        gone.close()
        waiter.join(PATIENCE)
        until(lambda: life.server.statistics()["parked"] == 0)
        store.queue_push("q", "kept")
        assert store.queue_pop("q", False) == b"kept"


def test_a_restart_with_a_journal_is_not_noticed_by_who_waits(tmp_path: Path) -> None:
    """Without one, they are refused: what they wait for would not come back."""
    address, path = f"tcp://127.0.0.1:{free_port()}", tmp_path / "journal"
    server = StoreServer(address, journal=path)
    with TCPStore("127.0.0.1", server.port, timeout=PATIENCE) as store:
        got: list[bytes] = []
        waiter = threading.Thread(target=lambda: got.append(store.get("k")))
        waiter.start()
        until(lambda: server.statistics()["parked"] == 1)
        server.close()
        server = StoreServer(address, journal=path)
        store.set("k", "v")
        waiter.join(PATIENCE)
        assert got == [b"v"]
    server.close()


def test_a_journal_that_cannot_be_written_ends_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is answered that is not in it."""
    server = StoreServer("tcp://127.0.0.1:*", journal=tmp_path / "journal")
    with TCPStore("127.0.0.1", server.port, timeout=PATIENCE) as store:
        store.set("k", "v")

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        assert server._journal is not None
        monkeypatch.setattr(server._journal, "commit", full)
        with pytest.raises(StoreError, match=r"journal .* cannot be written: No space left on device"):
            store.set("k", "w")
        until(lambda: not server.serves)
    server.close()
    again = StoreServer("tcp://127.0.0.1:*", journal=tmp_path / "journal")
    with TCPStore("127.0.0.1", again.port, timeout=PATIENCE) as store:
        assert store.get("k") == b"v"
    again.close()


# ---- a real kill ------------------------------------------------------------------------------------------


def serve(port: int, path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "zmqgrad", "store", "serve", "--port", str(port), "--journal", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == f"serving a store at tcp://127.0.0.1:{port}\n", line + (process.stdout.read() or "")
    return process


@pytest.mark.processes
@pytest.mark.slow
def test_acknowledged_writes_survive_sigkill_in_the_middle_of_writes(tmp_path: Path) -> None:
    """(P9), three times over, with four threads that write without a pause."""
    port, path = free_port(), tmp_path / "journal"
    process = serve(port, path)
    stop = threading.Event()
    done: dict[int, int] = {}
    failures: list[BaseException] = []
    with TCPStore("127.0.0.1", port, timeout=60.0) as store:

        def write(which: int) -> None:
            try:
                n = 0
                while not stop.is_set():
                    n += 1
                    assert store.add(f"count{which}", 1) == n
                    store.set(f"last{which}", f"{n}" + "x" * 2000)
                    done[which] = n
            except BaseException as e:
                failures.append(e)

        writers = [threading.Thread(target=write, args=(i,)) for i in range(4)]
        for writer in writers:
            writer.start()
        for _ in range(3):
            before = sum(done.values())
            until(lambda before=before: sum(done.values()) >= before + 100 or failures)  # type: ignore[misc]
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
            process = serve(port, path)
        stop.set()
        for writer in writers:
            writer.join(60.0)
        assert not failures
        for which, n in done.items():
            assert store.get(f"count{which}") == b"%d" % n
            assert store.get(f"last{which}").startswith(b"%dx" % n)
    process.terminate()
    assert process.communicate(timeout=60)[0] == ""
    assert process.returncode == 0
