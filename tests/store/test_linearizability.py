"""What several clients see at once of a store has an order in which a dict would have said the same.

Over the server, also while it is killed and started again, over the file, and over the table in memory. That
the check can fail is shown by stores that are broken on purpose.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store import histories
from tests.store.histories import KEY_QUERIES, PATIENCE, check, pops, pushes, run_program, run_programs, step
from tests.store.test_restart import World, serve
from tests.store.test_state import KEYS
from tools.ports import free_port
from zmqgrad.store import FileStore, HashStore, Store, TCPStore, connection
from zmqgrad.testing.simulation.linearizability import Operation
from zmqgrad.wire.messages import (
    Message,
    StoreAdd,
    StoreDone,
    StoreGet,
    StoreGetNumKeys,
    StoreItem,
    StoreQueueLen,
    StoreQueuePop,
    StoreQueuePush,
    StoreSet,
)

CLIENTS = 3
PROGRAMS = st.lists(
    st.lists(KEY_QUERIES | pushes(KEYS) | pops(KEYS), max_size=8), min_size=CLIENTS, max_size=CLIENTS
)
STRIKES = st.sampled_from(["restart", "cut", "cut"])
QUEUE = st.just("q")
CONSUMER = st.lists(KEY_QUERIES | pops(QUEUE) | STRIKES, max_size=8)
PRODUCER = st.lists(KEY_QUERIES | pushes(QUEUE) | STRIKES, max_size=8)


@pytest.fixture(autouse=True)
def time_to_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that waits is refused by the store itself, so the key was missing at that moment."""
    monkeypatch.setattr(connection, "LATE_SECONDS", PATIENCE)


@pytest.fixture(autouse=True)
def restless() -> Iterator[None]:
    """Threads take turns within an operation, not only where it waits."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


# ---- in one process ---------------------------------------------------------------------------------------


@contextmanager
def hash_stores() -> Iterator[list[Store]]:
    with ExitStack() as stack:
        first = stack.enter_context(HashStore(PATIENCE))
        yield [first, *(stack.enter_context(first.clone()) for _ in range(CLIENTS - 1))]


@contextmanager
def file_stores() -> Iterator[list[Store]]:
    with TemporaryDirectory() as directory, ExitStack() as stack:
        path = f"{directory}/store"
        yield [stack.enter_context(FileStore(path, timeout=PATIENCE)) for _ in range(CLIENTS)]


@contextmanager
def tcp_stores() -> Iterator[list[Store]]:
    with ExitStack() as stack:
        first = stack.enter_context(TCPStore("127.0.0.1", 0, is_master=True, timeout=PATIENCE))
        yield [first, *(stack.enter_context(first.clone()) for _ in range(CLIENTS - 1))]


@pytest.mark.parametrize("opened", [hash_stores, file_stores, tcp_stores])
@settings(max_examples=max(5, settings.default.max_examples // 5))
@given(programs=PROGRAMS)
def test_threads_see_one_order(opened: Callable[[], Any], programs: list[list[Message]]) -> None:
    with opened() as stores:
        check(run_programs(stores, programs))


@pytest.mark.slow
@settings(max_examples=max(10, settings.default.max_examples // 5))
@given(programs=st.tuples(CONSUMER, PRODUCER, PRODUCER))
def test_restarts_and_cut_connections_keep_the_order(programs: tuple[list[Any], ...]) -> None:
    """The journal and the repetition of queries are part of what is checked.

    One client pops: an item that is on its way to a client while the server restarts returns to its queue,
    which other clients may have seen without it (docs/store.md).
    """
    with TemporaryDirectory() as directory, ExitStack() as stack:
        world = World(Path(directory) / "journal")
        stack.callback(world.close)
        lock = threading.Lock()  # guards the world

        def restart() -> None:
            with lock:
                world.restart()

        strikes = {"restart": restart, "cut": world.relay.cut}
        stores = [stack.enter_context(world.connect(PATIENCE)) for _ in range(CLIENTS)]
        check(run_programs(stores, [[strikes.get(q, q) for q in program] for program in programs]))


# ---- several processes ------------------------------------------------------------------------------------


def random_program(seed: int, length: int, pops: bool = True) -> list[Message]:
    """Queries that are easy on the checker: few of them wait, and each value shows where it comes from."""
    rng = random.Random(seed)
    key = lambda: rng.choice("abc")  # noqa: E731
    kinds: list[Callable[[int], Message]] = [
        lambda n: StoreSet(key(), b"%d" % (seed * 1000 + n)),
        lambda n: StoreGet(key(), histories.BLOCK_SECONDS),
        lambda n: StoreAdd(key(), 1),
        lambda n: StoreGetNumKeys(),
        lambda n: StoreQueuePush("q", b"%d.%d" % (seed, n)),
    ]
    if pops:
        kinds += [
            lambda n: StoreQueuePop("q", False, histories.BLOCK_SECONDS),
            lambda n: StoreQueueLen("q"),
        ]
    return [rng.choice(kinds)(n) for n in range(length)]


@pytest.mark.processes
def test_sigkill_of_the_server_keeps_the_order(tmp_path: Path) -> None:
    """P9: killed twice amid the queries of all clients, and started again with its journal."""
    port, path = free_port(), tmp_path / "journal"
    server = [serve(port, path)]

    def kill() -> None:
        os.kill(server[0].pid, signal.SIGKILL)
        server[0].communicate()
        server[0] = serve(port, path)

    programs: list[list[Any]] = [list(random_program(seed, 60, pops=not seed)) for seed in range(CLIENTS)]
    programs[0][20:20] = programs[0][40:40] = [kill]
    with ExitStack() as stack:
        stack.callback(lambda: (server[0].kill(), server[0].communicate()))
        stores = [stack.enter_context(TCPStore("127.0.0.1", port, timeout=PATIENCE)) for _ in range(CLIENTS)]
        check(run_programs(stores, programs))


def run_in_process(rank: int, path: str) -> list[Operation]:
    with FileStore(path, timeout=PATIENCE) as store:
        return run_program(store, rank, random_program(rank, 60))


@pytest.mark.processes
def test_processes_see_one_order_of_a_file(tmp_path: Path) -> None:
    """Monotonic clocks are those of the system, so their times compare."""
    with ProcessPoolExecutor(CLIENTS, mp_context=get_context("spawn")) as pool:
        running = [pool.submit(run_in_process, rank, str(tmp_path / "store")) for rank in range(CLIENTS)]
        found = [future.result(2 * PATIENCE) for future in running]
    check([operation for history in found for operation in history])


# ---- the check can fail -----------------------------------------------------------------------------------


class Broken(HashStore):
    """A store with a defect in how it replies to one kind of query."""

    seen: dict[str, Any]

    def __init__(self, defect: Callable[[Broken, Message, Callable[[Message], Any]], Any]) -> None:
        super().__init__(PATIENCE)
        self.defect, self.seen = defect, {}
        whole = self._request
        self._request = lambda query, seconds: self.defect(self, query, lambda q: whole(q, seconds))


def adds_twice(store: Broken, query: Message, ask: Callable[[Message], Any]) -> Any:
    """As if a repeated query were applied again."""
    if type(query) is StoreAdd:
        ask(query)
    return ask(query)


def reads_old(store: Broken, query: Message, ask: Callable[[Message], Any]) -> Any:
    """As if a replica that lags replied."""
    reply = ask(query)
    return store.seen.setdefault(query.key, reply) if type(query) is StoreGet else reply


def forgets(store: Broken, query: Message, ask: Callable[[Message], Any]) -> Any:
    """As if a write were acknowledged before it is in the journal, and the server killed."""
    return StoreDone() if type(query) is StoreSet and query.value[-1:] in b"02468" else ask(query)


def delivers_twice(store: Broken, query: Message, ask: Callable[[Message], Any]) -> Any:
    """As if an item returned to its queue although it had been delivered."""
    reply = ask(query)
    if type(query) is StoreQueuePop and type(reply) is not StoreItem:
        ask(StoreQueuePush(query.key, reply.value))
    return reply


def tears_add(store: Broken, query: Message, ask: Callable[[Message], Any]) -> Any:
    """As if the lock were missing: two clients read the same number before either writes."""
    if type(query) is not StoreAdd:
        return ask(query)
    number = ask(StoreAdd(query.key, 0)).number + query.amount
    both: threading.Barrier = store.seen.setdefault("barrier", threading.Barrier(2))
    try:
        both.wait(0.01)
    except threading.BrokenBarrierError:
        both.reset()
    ask(StoreSet(query.key, b"%d" % number))
    return ask(StoreAdd(query.key, 0))


@pytest.mark.parametrize("defect", [adds_twice, reads_old, forgets, delivers_twice, tears_add])
def test_a_broken_store_is_caught(defect: Callable[[Broken, Message, Any], Any]) -> None:
    for seed in range(0, 40 * CLIENTS, CLIENTS):
        with Broken(defect) as store:
            programs = [random_program(seed + n, 12) for n in range(CLIENTS)]
            try:
                check(run_programs([store] * CLIENTS, programs))
            except AssertionError as e:
                if not str(e).startswith("not linearizable"):
                    raise
                return
    pytest.fail(f"{defect.__name__} passed the check")


def test_the_specification_leaves_its_state_alone() -> None:
    before = ((("a", b"1"),), (("q", (b"x",)),))
    after, popped = step(before, StoreQueuePop("q", False, 0.0))
    assert (before[1], after[1], popped) == ((("q", (b"x",)),), (), b"x")
