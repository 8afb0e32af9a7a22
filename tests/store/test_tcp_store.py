"""``TCPStore`` as processes meet it: addresses, workers that come or do not, servers that die, ends."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest

from tests.support.interpreter import run_python
from tests.support.processes import run_processes
from tests.support.waiting import eventually
from tools.ports import free_port
from zmqgrad.errors import AddressInUseError, ConfigurationError, StoreError, StoreTimeoutError
from zmqgrad.runtime.clock import MONOTONIC
from zmqgrad.store import HashStore, Store, TCPStore, connection, finalizer
from zmqgrad.store.addresses import connecting_address, listening_address

PATIENCE = 20.0


@pytest.fixture
def master() -> Iterator[TCPStore]:
    with TCPStore("127.0.0.1", 0, is_master=True, timeout=PATIENCE) as made:
        yield made


# ---- beginning --------------------------------------------------------------------------------------------


def test_host_and_port(master: TCPStore) -> None:
    with TCPStore("localhost", master.port, timeout=PATIENCE) as client:
        assert (client.host, client.port) == ("localhost", master.port)
        client.set("k", "1")
        assert master.get("k") == b"1"


def test_several_clients_in_one_process(master: TCPStore) -> None:
    clients = [TCPStore("127.0.0.1", master.port, timeout=PATIENCE) for _ in range(5)]
    assert [client.add("n", 1) for client in clients] == [1, 2, 3, 4, 5]
    clients[0].close()
    assert clients[1].add("n", 1) == 6
    for client in clients:
        client.close()


def test_the_same_port_can_be_used_again_at_once() -> None:
    port = free_port()
    for n in range(5):
        with TCPStore("127.0.0.1", port, is_master=True, timeout=PATIENCE) as store:
            assert store.num_keys() == 0
            store.set("k", str(n))


def test_a_second_master_on_a_port_is_refused(master: TCPStore) -> None:
    with pytest.raises(AddressInUseError, match=f"127.0.0.1:{master.port}"):
        TCPStore("127.0.0.1", master.port, is_master=True, timeout=PATIENCE)
    master.set("k", "the first goes on")


def test_masters_of_one_process_can_share() -> None:
    port = free_port()
    first, second = (
        TCPStore("127.0.0.1", port, is_master=True, timeout=PATIENCE, multi_tenant=True) for _ in range(2)
    )
    first.set("k", "1")
    first.close()
    assert second.get("k") == b"1", "the server is there while one uses it"
    second.close()
    TCPStore("127.0.0.1", port, is_master=True, timeout=PATIENCE).close()


def test_the_master_waits_for_the_workers() -> None:
    port, order = free_port(), []

    def come() -> None:
        client = TCPStore("127.0.0.1", port, 2, timeout=PATIENCE)
        order.append("worker")
        client.close()

    worker = threading.Thread(target=come, daemon=True)
    worker.start()
    with TCPStore("127.0.0.1", port, 2, True, PATIENCE) as master:
        worker.join(PATIENCE)
        assert order == ["worker"]
        assert master.num_keys() == 0, "the count is not the user's"


def test_workers_that_do_not_come_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LATE_SECONDS", PATIENCE)  # the store shall say so, however late
    with pytest.raises(
        StoreTimeoutError,
        match=r"Timed out after 0\.05 s waiting for clients: 1 of 3 workers have connected to 127\.",
    ):
        TCPStore("127.0.0.1", 0, 3, True, timedelta(milliseconds=50))
    TCPStore("127.0.0.1", 0, 3, True, PATIENCE, wait_for_workers=False).close()


def test_a_pop_gets_its_item_though_calls_of_other_threads_return_meanwhile(master: TCPStore) -> None:
    """The item is acknowledged by the channel that has popped it, not by one that has just become idle."""
    others = [threading.Thread(target=master.get, args=(f"k{n}",)) for n in range(9)]
    for thread in others:
        thread.start()
    eventually(lambda: master.statistics()["parked"], lambda parked: parked == len(others))

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        return between_lines if frame.f_code is Store.queue_pop.__code__ else None

    def between_lines(frame: FrameType, event: str, argument: object) -> None:
        if event == "line" and others:
            finish()

    def finish() -> None:
        client.set(f"k{len(others) - 1}", "")
        others.pop().join(PATIENCE)

    before = sys.gettrace()
    with TCPStore("127.0.0.1", master.port, timeout=PATIENCE) as client:
        client.queue_push("q", "item")
        sys.settrace(trace)
        try:
            assert master.queue_pop("q", block=False) == b"item"
        finally:
            sys.settrace(before)
        assert master.queue_len("q") == 0
        while others:
            finish()


@pytest.mark.slow
def test_a_missing_store_is_a_timeout() -> None:
    port = free_port()
    begun = MONOTONIC.now()
    with pytest.raises(StoreTimeoutError, match=rf"no store answered at 127\.0\.0\.1:{port} within 0\.1 s"):
        TCPStore("127.0.0.1", port, timeout=0.1)
    assert MONOTONIC.now() - begun < 10.0


@pytest.mark.slow
def test_an_unknown_host_name_is_named_in_the_error() -> None:
    with pytest.raises(StoreTimeoutError, match=r"the name 'nobody\.invalid' cannot be resolved here"):
        TCPStore("nobody.invalid", 1, timeout=0.01)


@pytest.mark.parametrize(
    ("host", "port", "error", "words"),
    [
        ("", 1, ConfigurationError, "not a host name"),
        ("a b", 1, ConfigurationError, "not a host name"),
        ("tcp://h", 1, ConfigurationError, "not a host name"),
        (None, 1, TypeError, "not NoneType"),
        ("127.0.0.1", "1", TypeError, "a port must be an int, not str"),
        ("127.0.0.1", 65536, ConfigurationError, "65536 is not between 0 and 65535"),
        ("127.0.0.1", -1, ConfigurationError, "-1 is not between"),
        ("127.0.0.1", 0, ConfigurationError, "needs the port"),
    ],
)
def test_addresses_that_cannot_be_right(host: str, port: int, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        TCPStore(host, port, timeout=0.01)


def test_a_master_open_to_the_network_needs_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZMQGRAD_ALLOW_INSECURE", raising=False)
    with pytest.raises(ConfigurationError, match="ZMQGRAD_ALLOW_INSECURE=1"):
        TCPStore("0.0.0.0", 0, is_master=True, timeout=PATIENCE)


def test_the_address_of_a_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZMQGRAD_ALLOW_INSECURE", raising=False)
    assert listening_address("localhost", 5) == "tcp://127.0.0.1:5"
    assert listening_address("10.1.2.3", 0) == "tcp://10.1.2.3:*"
    with pytest.raises(ConfigurationError, match="is not a host name or address"):
        listening_address("node1..cluster", 0)
    assert listening_address("::1", 5) == listening_address("[::1]", 5) == "tcp://[::1]:5"
    assert listening_address("nobody.invalid", 5, keyed=True) == "tcp://*:5"
    with pytest.raises(ConfigurationError, match=r"'nobody.invalid' does not resolve here: \w+"):
        listening_address("nobody.invalid", 5)
    assert connecting_address("::1", 5) == "tcp://[::1]:5"


# ---- trouble ----------------------------------------------------------------------------------------------


def test_a_closing_server_refuses_blocked_queries(master: TCPStore) -> None:
    with TCPStore("127.0.0.1", master.port, timeout=PATIENCE) as client:

        def close_when_it_waits() -> None:
            eventually(lambda: master.statistics()["parked"])
            master.close()

        closing = threading.Thread(target=close_when_it_waits, daemon=True)
        closing.start()
        with pytest.raises(
            StoreError, match=r"get\('never'\): the store at .* refused: the store is closing"
        ):
            client.get("never")
        closing.join(PATIENCE)


@pytest.mark.slow
def test_a_server_that_died_costs_the_timeout(master: TCPStore) -> None:
    with TCPStore("127.0.0.1", master.port, timeout=PATIENCE) as client:
        master.close()
        client.set_timeout(0.05)
        for call in (lambda: client.set("k", "1"), lambda: client.wait(["k"]), lambda: client.add("n", 1)):
            with pytest.raises(StoreTimeoutError, match=f"no store answered at 127.0.0.1:{master.port}"):
                call()


def _serve_until_killed(rank: int) -> None:
    with TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0, PATIENCE) as store:
        if rank == 0:
            store.set("pid", str(os.getpid()))
            store.get("never")
        os.kill(int(store.get("pid")), signal.SIGKILL)
        with pytest.raises(StoreTimeoutError):
            store.wait(["never"], 0.3)


@pytest.mark.processes
@pytest.mark.slow
def test_a_server_that_was_killed_costs_the_timeout() -> None:
    run_processes(_serve_until_killed, 2, may_die=[0])


def _wait_for_a_server_that_was_stopped(rank: int) -> None:
    with TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0, PATIENCE) as store:
        if rank == 0:
            store.set("pid", str(os.getpid()))
            store.get("done")
            return
        pid = int(store.get("pid"))
        os.kill(pid, signal.SIGSTOP)
        timer = threading.Timer(1.0, os.kill, (pid, signal.SIGCONT))
        timer.start()
        with pytest.raises(StoreTimeoutError, match=r"wait timeout after 2 s .*missing: 'never'"):
            store.wait(["never"], 2.0)
        timer.join()
        store.set("done", "")


@pytest.mark.processes
@pytest.mark.slow
def test_a_server_that_was_stopped_says_what_is_missing_at_the_clients_timeout() -> None:
    run_processes(_wait_for_a_server_that_was_stopped, 2)


def _count_and_watch(rank: int) -> list[int]:
    seen, last = [], threading.Event()

    def callback(old: bytes | None, new: bytes | None) -> None:
        seen.append(int(new or 0))
        if new == b"300":
            last.set()

    with TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 3, rank == 0, PATIENCE) as store:
        store.watch_key("n", callback)
        store.add("watching", 1)
        while store.add("watching", 0) < 3:
            store.wait(["watching"])
        for _ in range(100):
            store.add("n", 1)
        assert last.wait(PATIENCE)
        if store.add("done", 1) == 3:
            store.set("all done", "")
        if rank == 0:
            store.wait(["all done"])
    return seen


@pytest.mark.processes
@pytest.mark.slow
def test_processes_count_and_watch_together() -> None:
    for seen in run_processes(_count_and_watch, 3):
        assert seen == list(range(1, 301))


# ---- the interpreter --------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.slow
def test_stores_rendezvous_and_all_leave_torch_unloaded() -> None:
    """A store server must not load torch."""
    code = """
import sys
from zmqgrad.store import HashStore, PrefixStore, Store, TCPStore
import zmqgrad.rendezvous
with TCPStore("127.0.0.1", 0, is_master=True, timeout=20) as store:
    store.watch_key("k", print)
    store.set("k", "1")
print([name for name in sys.modules if name.partition(".")[0] in ("torch", "numpy")])
"""
    assert run_python(code).splitlines()[-1] == "[]"


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    "then", ["", "raise SystemExit(0)", "threading.Thread(target=s.wait, args=(['x'],), daemon=True).start()"]
)
def test_forgotten_stores_do_not_keep_the_interpreter(then: str) -> None:
    code = f"""
import threading
from zmqgrad.store import HashStore, TCPStore
s = TCPStore("127.0.0.1", 0, is_master=True, timeout=20)
c = TCPStore("127.0.0.1", s.port, timeout=20)
c.watch_key("k", lambda old, new: None)
h = HashStore(); h.watch_key("k", lambda old, new: None); h.set("k", "")
s.set("k", "1")
print("end", flush=True)
{then}
"""
    assert run_python(code) == "end\n"


@pytest.mark.processes
@pytest.mark.slow
def test_a_fork_leaves_the_parents_store_alone() -> None:
    code = """
import os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # that forking beside threads is risky is the point
from zmqgrad.errors import StoreError
from zmqgrad.store import TCPStore
with TCPStore("127.0.0.1", 0, is_master=True, timeout=20) as s:
    s.watch_key("k", lambda old, new: None)
    s.set("cached", "1")
    s.get_cached("cached")
    locks = s._registry._lock, s._connection._subscriber._lock
    for lock in locks:
        lock.acquire()  # as a thread of the store may hold it at the fork
    pid = os.fork()
    if not pid:
        calls = [
            lambda: s.set("k", "from the child"),
            lambda: s.get_cached("cached"),
            lambda: s.watch_key("k", lambda old, new: None),
        ]
        for refused in calls:
            try:
                refused()
            except StoreError as e:
                assert "in a fork of it" in str(e), e
            else:
                os._exit(1)
        s.close()
        sys.exit(7)
    for lock in locks:
        lock.release()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), s.add("n", 1))
"""
    assert run_python(code) == "7 1\n"


@pytest.mark.processes
@pytest.mark.slow
def test_a_fork_has_a_hash_store_of_its_own() -> None:
    code = """
import os, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from zmqgrad.store import HashStore
s = HashStore(20)
s.set("k", "1")
s.watch_key("k", lambda old, new: None)
pop = threading.Thread(target=s.queue_pop, args=("q",))
pop.start()
while not s.statistics()["parked"]:
    pass
s._table.lock.acquire()  # as another thread may hold it at the fork
pid = os.fork()
if not pid:
    s.queue_push("q", "the child's")
    with s.watch("k", timeout=20) as changes:
        s.set("k", "2")
        os._exit(7 if next(changes).new == b"2" and s.queue_pop("q", block=False) else 1)
s._table.lock.release()
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), s.get("k"))
s.queue_push("q", "")
"""
    assert run_python(code) == "7 b'1'\n"


def test_a_store_that_became_garbage_is_closed() -> None:
    """Whether alone or in a cycle, which the collector finds at any line of any code."""
    port, before = free_port(), set(finalizer._open)  # some that the collector is to pass over
    for in_a_cycle in (False, True):
        store = TCPStore("127.0.0.1", port, is_master=True, timeout=PATIENCE)
        client = TCPStore("127.0.0.1", port, timeout=PATIENCE)
        client.watch_key("k", lambda old, new: None)
        if in_a_cycle:
            store.itself, client.itself = client, store  # type: ignore[attr-defined]
        del store, client
        # Again at each look, as the thread of the watch may hold the client during one.
        eventually(
            lambda: (gc.collect(), finalizer._open.keys() - before)[1], lambda left: not left, PATIENCE
        )
    TCPStore("127.0.0.1", port, is_master=True, timeout=PATIENCE).close()


def test_a_local_store_that_became_garbage_is_closed() -> None:
    store = HashStore()
    store.watch_key("k", lambda old, new: None)
    store.set("k", "")
    del store
    gc.collect()
    # That nothing is left is seen after each test.


@pytest.mark.processes
@pytest.mark.slow
def test_ctrl_c_ends_a_wait() -> None:
    code = """
import os, signal, threading
from zmqgrad.store import HashStore, TCPStore, finalizer
with TCPStore("127.0.0.1", 0, is_master=True, timeout=60) as s:
    done = threading.Event()
    def interrupt():
        while not s.statistics()["parked"]:
            done.wait(0.001)
        while not done.wait(0.5):  # more than once: just before the wait begins, it is seen at its end only
            os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        s.get("never")
    except KeyboardInterrupt:
        done.set()
        print("interrupted", s.add("n", 1))
"""
    assert run_python(code) == "interrupted 1\n"


def test_threads_that_close_a_watching_store_at_once(master: TCPStore) -> None:
    """As its finalizer and the interpreter's end may: libzmq aborted the process, or hung."""
    master.set("k", "v")
    for _ in range(10):
        store = TCPStore("127.0.0.1", master.port, timeout=PATIENCE)
        store.get_cached("k")
        together = threading.Barrier(3)

        def close(store: TCPStore = store, together: threading.Barrier = together) -> None:
            together.wait(PATIENCE)
            store.close()

        threads = [threading.Thread(target=close, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


# ---- a socket that somebody else has bound ----------------------------------------------------------------


@pytest.mark.parametrize("listens", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_a_master_takes_over_a_bound_socket(listens: bool, given: bool) -> None:
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    if listens:
        bound.listen()
    number = bound.detach()
    with TCPStore(
        "127.0.0.1", port if given else 0, is_master=True, timeout=PATIENCE, master_listen_fd=number
    ) as store:
        assert store.port == port
        with TCPStore("127.0.0.1", port, timeout=PATIENCE) as client:
            client.set("k", "v")
        assert store.get("k") == b"v"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_an_unusable_listen_fd_is_named_and_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZMQGRAD_ALLOW_INSECURE", raising=False)
    monkeypatch.delenv("ZMQGRAD_SECRET", raising=False)

    def serve(number: int, port: int = 0) -> None:
        TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=number)

    with socket.socket() as unbound, socket.socket() as open_to_all, socket.socket(socket.AF_UNIX) as local:
        open_to_all.bind(("0.0.0.0", 0))
        for number, port, words in (
            (unbound.fileno(), 0, "bound to port 0"),
            (open_to_all.fileno(), 1, r"bound to port \d+, not 1"),
            (open_to_all.fileno(), 0, "without a secret"),
            (local.fileno(), 0, "no tcp socket"),
            (99_999, 0, "no socket to listen at: Bad file descriptor"),
        ):
            with pytest.raises(ConfigurationError, match=words):
                serve(number, port)
        for each in (unbound, open_to_all, local):
            os.fstat(each.fileno())
