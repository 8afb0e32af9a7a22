"""Servers that die and come back, connections that break: clients go on, and nothing is done twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.relay import Direction, Fate, Relay, at_random, passes
from tests.support.waiting import eventually
from tools.ports import free_port
from zmqgrad.errors import QueueEmptyError, StoreError, StoreTimeoutError
from zmqgrad.runtime.clock import MONOTONIC, Clock, ManualClock
from zmqgrad.store import Store, TCPStore
from zmqgrad.store.journal import Journal
from zmqgrad.store.leases import ACK_SECONDS, RENEW_SECONDS
from zmqgrad.store.server import StoreServer
from zmqgrad.store.service import SWEEP_SECONDS
from zmqgrad.transport.security import keys_for_store, secure_client
from zmqgrad.wire.codec import decode, encode
from zmqgrad.wire.messages import StoreDeleteKey, StoreNumber

PATIENCE = 20.0


class World:
    """A store's server, which can be started again, behind a relay that breaks connections.

    With a journal, what it holds survives.
    """

    def __init__(self, journal: Path | None = None, clock: Clock = MONOTONIC) -> None:
        self.journal = journal
        self.clock = clock
        self.server = StoreServer("tcp://127.0.0.1:*", journal=journal, clock=clock)
        self.relay = Relay(self.server.port)

    def connect(self, timeout: float = PATIENCE) -> TCPStore:
        return TCPStore("127.0.0.1", self.relay.port, timeout=timeout, fast_path=False)

    def restart(self) -> None:
        """End the server and start it again."""
        self.server.close()
        self.server = StoreServer(
            f"tcp://127.0.0.1:{self.relay.target[1]}", journal=self.journal, clock=self.clock
        )

    def strike(self, fate: str) -> None:
        """Have ``fate`` befall what is sent next."""
        if fate == "restart":
            self.restart()
        elif fate != "arrives":
            self.relay.fate = _once(self.relay, *FATES[fate])

    def close(self) -> None:
        self.relay.close()
        self.server.close()


FATES: dict[str, tuple[Direction, Fate]] = {
    "the query is lost": ("to server", "drop"),
    "the query is cut in two": ("to server", "truncate"),
    "the query arrives, then it breaks": ("to server", "cut"),
    "the reply is lost": ("to client", "drop"),
    "the reply is cut in two": ("to client", "truncate"),
}


def _once(relay: Relay, where: Direction, fate: Fate) -> Callable[[Direction, bytes], Fate]:
    def strike(direction: Direction, chunk: bytes) -> Fate:
        if direction != where:
            return "pass"
        relay.fate = passes
        return fate

    return strike


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "journal")
    yield made
    made.close()


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
STEPS = st.tuples(st.integers(0, 2), COMMANDS, st.sampled_from(["arrives", "arrives", "restart", *FATES]))


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, max_size=25))
def test_a_store_is_a_dict_whatever_breaks(steps: list[tuple[int, Any, str]], tmp_path: Path) -> None:
    """P9, and exactly once: a query without a reply is repeated, and the change is not made again."""
    path = tmp_path / "journal"
    path.unlink(missing_ok=True)
    world, model = World(path), Model()
    clients = [world.connect() for _ in range(3)]
    try:
        for which, command, fate in steps:
            world.strike(fate)
            expected = getattr(model, command[0])(*command[1:])
            assert ask(clients[which], *command) == expected, (command, fate)
            world.relay.fate = passes
    finally:
        for client in clients:
            client.close()
        world.close()


@pytest.mark.parametrize("fate", FATES)
def test_a_change_whose_reply_was_lost_is_not_applied_again(world: World, fate: str) -> None:
    with world.connect() as store:
        store.queue_push("q", "first")
        store.queue_push("q", "second")
        world.strike(fate)
        assert store.add("n", 1) == 1
        world.strike(fate)
        assert store.queue_pop("q") == b"first"
        world.strike(fate)
        assert store.compare_set("c", "", "x") == b"x"
        assert (store.add("n", 1), store.queue_len("q")) == (2, 1)


# ---- items of queues --------------------------------------------------------------------------------------


def test_an_unacknowledged_item_returns_to_the_head(tmp_path: Path) -> None:
    clock = ManualClock()
    world = World(clock=clock)
    with (
        world.connect(timeout=0.5) as gone,
        TCPStore("127.0.0.1", world.server.port, timeout=PATIENCE) as store,
    ):
        for item in ("first", "second"):
            store.queue_push("q", item)
        world.relay.fate = lambda direction, chunk: "drop" if direction == "to client" else "pass"
        with pytest.raises(StoreTimeoutError):
            gone.queue_pop("q")
        assert store.queue_len("q") == 1, "the first one is on its way"
        clock.advance(ACK_SECONDS + SWEEP_SECONDS)
        store.add("n", 1)  # which makes the server look at the clock
        eventually(lambda: store.queue_len("q"), lambda length: length == 2)
        assert [store.queue_pop("q") for _ in range(2)] == [b"first", b"second"]
    world.close()


def test_an_item_that_two_dead_clients_were_offered_returns_once() -> None:
    """The first one dies when it has popped the item, the second while it waits for one."""
    clock = ManualClock()
    world = World(clock=clock)
    with TCPStore("127.0.0.1", world.server.port, timeout=PATIENCE) as store:
        first, second = world.connect(timeout=0.5), world.connect()
        store.queue_push("q", "item")
        world.relay.fate = lambda direction, chunk: "drop" if direction == "to client" else "pass"
        with pytest.raises(StoreTimeoutError):
            first.queue_pop("q")
        world.relay.fate = passes
        thread = threading.Thread(target=_pop_until_closed, args=(second, []))
        thread.start()
        eventually(lambda: world.server.statistics()["parked"], lambda parked: parked == 1)
        world.relay.refusing = True
        world.relay.cut()
        eventually(lambda: world.relay.connections, lambda connections: connections == 0)
        clock.advance(RENEW_SECONDS + SWEEP_SECONDS)  # the server was stopped for so long, say
        store.add("n", 1)  # which makes it look at the clock
        eventually(lambda: store.queue_len("q"), lambda length: length > 0)
        assert store.queue_pop("q", False) == b"item"
        with pytest.raises(QueueEmptyError):
            store.queue_pop("q", False)
        for client in (first, second):
            client.close()
        thread.join(PATIENCE)
    world.close()


def test_an_undeliverable_item_goes_to_the_next_blocked_pop(world: World) -> None:
    """ROUTER_MANDATORY tells at once that a client's connection is gone."""
    with TCPStore("127.0.0.1", world.server.port, timeout=PATIENCE) as store:
        gone, got = world.connect(), list[bytes]()
        world.relay.refusing = True  # it cannot come back
        threads = [
            threading.Thread(target=_pop_until_closed, args=(gone, got)),
            threading.Thread(target=lambda: got.append(store.queue_pop("q"))),
        ]
        for n, thread in enumerate(threads):
            thread.start()
            eventually(lambda: world.server.statistics()["parked"], lambda parked, n=n: parked == n + 1)
        world.relay.cut()
        eventually(lambda: world.relay.connections, lambda connections: connections == 0)
        with TCPStore("127.0.0.1", world.server.port, timeout=PATIENCE) as other:
            other.queue_push("q", "item")
        threads[1].join(PATIENCE)
        assert got == [b"item"]
        gone.close()
        threads[0].join(PATIENCE)


def _pop_until_closed(store: TCPStore, got: list[bytes]) -> None:
    with pytest.raises(StoreError, match="closed"):
        got.append(store.queue_pop("q"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_item_is_lost_or_delivered_twice(world: World, seed: int) -> None:
    """Over connections that break at random, with a server that is started again."""
    count, got, lock = 200, list[int](), threading.Lock()
    stores = [world.connect() for _ in range(4)]

    def push(store: TCPStore, first: int) -> None:
        for n in range(first, count, 2):
            store.queue_push("q", str(n))

    def pop(store: TCPStore) -> None:
        while True:
            item = store.queue_pop("q")
            with lock:
                if item == b"end":
                    return
                got.append(int(item))

    world.relay.fate = at_random(0.03, seed)
    pushers = [threading.Thread(target=push, args=(store, n)) for n, store in enumerate(stores[:2])]
    poppers = [threading.Thread(target=pop, args=(store,)) for store in stores[2:]]
    for thread in (*pushers, *poppers):
        thread.start()
    for portion in (0.3, 0.6):
        eventually(lambda: len(got), lambda items, portion=portion: items > portion * count)
        world.restart()
    for thread in pushers:
        thread.join(60.0)
    for _ in poppers:
        stores[0].queue_push("q", "end")
    for thread in poppers:
        thread.join(60.0)
    assert sorted(got) == list(range(count))
    for half in (0, 1):
        mine = [n for n in got if n % 2 == half]
        assert len(mine) == count // 2
    for store in stores:
        store.close()


# ---- those who wait ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_blocked_queries_continue_at_the_restarted_server(world: World) -> None:
    got: list[Any] = []
    with world.connect() as store, world.connect() as other:
        waiters = [
            threading.Thread(target=lambda call=call: got.append(call()))  # type: ignore[misc]
            for call in (lambda: store.get("k"), lambda: store.queue_pop("q"), lambda: store.wait(["k"]))
        ]
        for waiter in waiters:
            waiter.start()
        eventually(lambda: world.server.statistics()["parked"], lambda parked: parked == 3)
        world.restart()
        eventually(lambda: world.server.statistics()["parked"], lambda parked: parked == 3)
        world.relay.cut()
        other.queue_push("q", "pushed")
        other.set("k", "set")
        for waiter in waiters:
            waiter.join(PATIENCE)
        assert sorted(got, key=str) == [None, b"pushed", b"set"]


@pytest.mark.parametrize("fate", ["the reply is lost", "the reply is cut in two"])
def test_a_wait_whose_reply_was_lost_ends_though_its_key_is_gone(world: World, fate: str) -> None:
    with world.connect() as store, TCPStore("127.0.0.1", world.server.port, timeout=PATIENCE) as other:
        got: list[bytes] = []
        waiter = threading.Thread(target=lambda: got.append(store.get("k")))
        waiter.start()
        eventually(lambda: world.server.statistics()["parked"], lambda parked: parked == 1)
        world.strike(fate)
        other.set("k", "set")
        assert other.delete_key("k")
        waiter.join(PATIENCE)
        assert got == [b"set"]
        assert store.add("n", 1) == 1


def test_a_wait_that_is_not_repeated_is_forgotten() -> None:
    """So clients that died, or went without a word, keep nothing and take nothing."""
    clock = ManualClock()
    world = World(clock=clock)
    with TCPStore("127.0.0.1", world.server.port, timeout=PATIENCE) as store:
        gone = world.connect()
        thread = threading.Thread(target=_pop_until_closed, args=(gone, []))
        thread.start()
        eventually(lambda: world.server.statistics()["parked"], lambda parked: parked == 1)
        gone.close()
        thread.join(PATIENCE)
        clock.advance(RENEW_SECONDS + SWEEP_SECONDS)
        store.add("n", 1)  # which makes the server look at the clock
        eventually(lambda: world.server.statistics()["parked"], lambda parked: parked == 0)
        store.queue_push("q", "kept")
        assert store.queue_pop("q", False) == b"kept"
    world.close()


def test_an_abandoned_query_pops_nothing(world: World) -> None:
    """The next query of its client tells the server."""
    with world.connect(timeout=0.2) as store:
        with pytest.raises(StoreTimeoutError):
            store.queue_pop("q")
        store.queue_push("q", "kept")
        assert store.queue_len("q") == 1


def test_blocked_clients_do_not_notice_a_restart_with_a_journal(tmp_path: Path) -> None:
    """Without one, they are refused: what they wait for would not come back."""
    address, path = f"tcp://127.0.0.1:{free_port()}", tmp_path / "journal"
    server = StoreServer(address, journal=path)
    with TCPStore("127.0.0.1", server.port, timeout=PATIENCE) as store:
        got: list[bytes] = []
        waiter = threading.Thread(target=lambda: got.append(store.get("k")))
        waiter.start()
        eventually(lambda: server.statistics()["parked"], lambda parked: parked == 1)
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

        monkeypatch.setattr(Journal, "commit", full)
        with pytest.raises(StoreError, match=r"journal .* cannot be written: No space left on device"):
            store.set("k", "w")
        eventually(lambda: server.serves, lambda serves: not serves)
    server.close()
    monkeypatch.undo()
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
@pytest.mark.parametrize("fast_path", [True, False])
def test_a_store_that_is_not_restarted_is_not_waited_for(tmp_path: Path, fast_path: bool) -> None:
    port = free_port()
    process = serve(port, tmp_path / "journal")
    with TCPStore("127.0.0.1", port, timeout=PATIENCE, fast_path=fast_path) as store:
        store.expect_no_restart()
        began = MONOTONIC.now()
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        with pytest.raises(StoreError, match=f"served it has ended: tcp://127.0.0.1:{port} is") as e:
            store.get("key")
        assert not isinstance(e.value, StoreTimeoutError)
        assert MONOTONIC.now() - began < PATIENCE / 2


@pytest.mark.processes
def test_it_is_not_waited_for_by_short_queries_to_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each ends before the server has refused connections for so long that it has certainly ended."""
    monkeypatch.setattr("zmqgrad.transport.query.dealer.is_on_this_host", lambda address: False)
    monkeypatch.setattr("zmqgrad.transport.query.dealer.REFUSED_SECONDS", 0.5)
    monkeypatch.setattr("zmqgrad.transport.query.pending.REPEAT_SECONDS", (0.1, 0.2, 0.5))
    port = free_port()
    process = serve(port, tmp_path / "journal")
    with TCPStore("127.0.0.1", port, timeout=PATIENCE, fast_path=False) as store:
        store.set("key", "value")
        store.expect_no_restart()
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        store.set_timeout(0.4)
        for _ in range(5):
            with pytest.raises(StoreError) as e:
                store.get("key")
        assert not isinstance(e.value, StoreTimeoutError)


@pytest.mark.processes
@pytest.mark.slow
def test_acknowledged_writes_survive_sigkill_in_the_middle_of_writes(tmp_path: Path) -> None:
    """P9 of docs/guarantees.md, three times over, with four threads that write without a pause."""
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
            eventually(lambda: sum(done.values()), lambda n, before=before: n >= before + 100 or failures)
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


@pytest.mark.parametrize("fate", ["arrives", "restart"])
def test_a_late_repetition_of_a_query_that_changed_nothing_changes_nothing(world: World, fate: str) -> None:
    """Meanwhile another client has made it a query that would."""
    query = encode(StoreDeleteKey("key"), 0, 77, 1)
    with (
        TCPStore("127.0.0.1", world.server.port, timeout=PATIENCE) as store,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
    ):
        dealer.linger, dealer.rcvtimeo = 0, int(PATIENCE * 1000)
        keys = keys_for_store()
        assert keys is not None
        secure_client(dealer, keys)
        dealer.connect(f"tcp://127.0.0.1:{world.server.port}")
        for value in ("", "value"):
            if value:
                world.strike(fate)
                store.set("key", value)
            dealer.send(query)
            assert decode(dealer.recv())[1] == StoreNumber(0)
        assert store.get("key") == b"value"
