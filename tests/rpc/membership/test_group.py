"""Joining and leaving, of workers that are threads of this process and meet at a store in memory."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import pytest

from tests.support.waiting import eventually
from tools.ports import free_port
from zmqgrad import rpc
from zmqgrad.errors import (
    ArgumentTypeError,
    ConfigurationError,
    DuplicateWorkerError,
    NotInitializedError,
    RendezvousTimeoutError,
    RpcError,
    RpcTimeoutError,
    StoreTimeoutError,
    WorkerNameError,
    WorldSizeError,
)
from zmqgrad.rpc.membership import registry, shutdown
from zmqgrad.rpc.membership.fixed import FixedGroup
from zmqgrad.rpc.membership.group import Group, make_worker
from zmqgrad.rpc.options import RpcBackendOptions
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import HashStore, PrefixStore, TCPStore
from zmqgrad.store.arguments import Timeout
from zmqgrad.testing.mailbox import MemoryMailbox
from zmqgrad.testing.network import MemoryNetwork

OPTIONS = RpcBackendOptions(rpc_timeout=20.0, num_worker_threads=2)


def groups(n: int, names: str = "", store: HashStore | None = None) -> list[Group]:
    """So many workers that have not joined yet; ``names`` has a letter for each, or they have numbers."""
    network, store = MemoryNetwork(), HashStore() if store is None else store
    made = []
    for rank in range(n):
        name = names[rank] if names else f"worker{rank}"
        mailbox = MemoryMailbox(network, name, rank)
        made.append(FixedGroup(make_worker(name, rank, n, mailbox, OPTIONS), PrefixStore("g", store)))
    return made


def join(group: Group) -> Callable[[], None]:
    return lambda: group.join(Deadline.after(20))


def all_at_once(steps: list[Any]) -> list[BaseException | None]:
    """Run each step in a thread; what each raised."""
    raised: list[BaseException | None] = [None] * len(steps)

    def run(n: int) -> None:
        try:
            steps[n]()
        except BaseException as e:
            raised[n] = e

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(steps))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    return raised


def test_all_join_and_leave() -> None:
    made = groups(3)
    assert all_at_once([lambda g=g: g.join(Deadline.after(20)) for g in made]) == [None] * 3
    assert [r.name for r in made[0].worker.membership.all()] == ["worker0", "worker1", "worker2"]
    assert all_at_once([lambda g=g: g.leave(True, Deadline.after(20)) for g in made]) == [None] * 3


def test_a_worker_whose_init_rpc_was_interrupted_at_its_end_serves_before_it_leaves() -> None:
    """It has joined, so others call it, and leave when it has replied."""
    first, second = groups(2)
    assert all_at_once([join(first), join(second)]) == [None] * 2
    call = second.worker.call(0, pow, (2, 3))
    leaving = threading.Thread(target=first.leave, args=(True, Deadline.after(20)))
    leaving.start()
    assert second.worker.decode(second.worker.wait(call)) == 8
    second.leave(True, Deadline.after(20))
    leaving.join(20)


def test_the_error_names_missing_workers() -> None:
    one, *others = groups(3)
    with pytest.raises(
        RendezvousTimeoutError, match=r"of 3 workers, these ranks have not joined: \[1, 2\].*join_timeout"
    ):
        one.join(Deadline.after(0.05))
    for g in (one, *others):
        g.close()


@pytest.mark.parametrize("first", [0, 1])
def test_different_world_sizes_are_refused_at_once_on_both_sides(first: int) -> None:
    store = HashStore()
    two, three = groups(2, store=store), groups(3, store=store)
    made = two[0], three[1]
    raised: list[BaseException | None] = []
    waiting = threading.Thread(target=lambda: raised.extend(all_at_once([join(made[first])])))
    waiting.start()
    store.wait([f"g/worker/{first}"], 10)
    with pytest.raises(WorldSizeError) as caught:
        made[1 - first].join(Deadline.after(20))
    waiting.join(10)
    assert str(raised[0]) == str(caught.value)
    assert isinstance(raised[0], WorldSizeError)
    text = r"rank 0 \(worker0, process .*\) passed 2.*rank 1 \(worker1, process .*\) passed 3"
    assert re.search(text if first == 0 else r"rank 1 .* passed 3, and rank 0 .* passed 2", str(raised[0]))
    for g in (*two, *three):
        g.close()


def test_a_worker_beyond_the_world_size_of_the_others_is_refused() -> None:
    store = HashStore()
    one, two = groups(2, store=store)
    assert all_at_once([join(one), join(two)]) == [None, None]
    *others, third = groups(3, store=store)
    with pytest.raises(WorldSizeError, match=r"passed 2, and rank 2 .* passed 3"):
        third.join(Deadline.after(20))
    for g in (one, two, third, *others):
        g.close()


def test_a_wait_for_missing_workers_names_them_and_the_launchers_world_size(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("zmqgrad.runtime.wait_log.FIRST_SECONDS", 0.01)
    monkeypatch.setenv("WORLD_SIZE", "2")
    made = groups(3)
    with pytest.raises(RendezvousTimeoutError):
        made[0].join(Deadline.after(0.2))
    (line,) = [text for text in caplog.messages if "have not joined" in text]
    assert "these ranks have not joined: [1, 2]" in line
    assert "WORLD_SIZE=2, but init_rpc got world_size=3" in line
    for g in made:
        g.close()


def test_a_worker_may_join_again_after_a_timeout() -> None:
    store = HashStore()
    for _ in range(2):
        for late in groups(3, store=store)[:2]:  # both, one after the other
            with pytest.raises(RendezvousTimeoutError, match=r"\[2\]|\[., 2\]"):
                late.join(Deadline.after(0.02))
            late.close()
    assert store.list_keys("") == []
    made = groups(3, store=store)
    assert all_at_once([lambda g=g: g.join(Deadline.after(20)) for g in made]) == [None] * 3
    for g in made:
        g.close()


class LateStore(PrefixStore):
    """Says first that what it is to read does not exist yet."""

    is_late = True

    def multi_get(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        if self.is_late:
            self.is_late = False
            raise StoreTimeoutError("not yet")
        return super().multi_get(keys, timeout)


def test_a_worker_whose_time_ends_just_as_the_last_one_joins() -> None:
    """The store replied that a record was missing, and then that all are there."""
    store = HashStore()
    first, second = groups(2, store=store)
    late = LateStore("g", store)
    first = FixedGroup(first.worker, late)
    joining = threading.Thread(target=join(second))
    joining.start()
    eventually(lambda: store.check(["g/worker/1"]))
    first.join(Deadline.after(0))
    assert not late.is_late
    joining.join(20)
    assert all_at_once([lambda g=g: g.leave(True, Deadline.after(20)) for g in (first, second)]) == [None] * 2


def test_a_duplicate_name_fails_all_workers() -> None:
    made = groups(3, "aba")
    raised = all_at_once([lambda g=g: g.join(Deadline.after(20)) for g in made])
    assert all(isinstance(e, DuplicateWorkerError) and "'a' is not unique" in str(e) for e in raised), raised
    for g in made:
        g.close()


def test_shutdown_names_workers_that_do_not_leave() -> None:
    made = groups(3)
    all_at_once([lambda g=g: g.join(Deadline.after(20)) for g in made])
    with pytest.raises(
        RpcTimeoutError, match=r"waiting for worker1, worker2 to call shutdown.*graceful=False"
    ):
        made[0].leave(True, Deadline.after(0.05))
    for g in made:
        g.close()


@pytest.mark.parametrize(
    ("rank", "world_size", "text"),
    [
        ("0", 2, "`rank`"),
        (0.0, 2, "`rank`"),
        (True, 2, "`rank`"),
        (0, "2", "`world_size`"),
        ("0", None, "`rank`"),
    ],
)
def test_invalid_ranks_and_world_sizes(
    monkeypatch: pytest.MonkeyPatch, rank: Any, world_size: Any, text: str
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{free_port()}", rpc_timeout=20)
    for kind in (ValueError, RuntimeError):
        with pytest.raises(kind, match=f"{text} must be an integer"):
            rpc.init_rpc("a", rank=rank, world_size=world_size, rpc_backend_options=options)


class Dead(BaseException):
    """Of a process that was killed at this very line."""


@pytest.mark.parametrize("posted", [False, True])
@pytest.mark.parametrize("step", ["arrived", "quiet/0", "quiet/1"])
def test_a_worker_that_dies_during_shutdown(monkeypatch: pytest.MonkeyPatch, step: str, posted: bool) -> None:
    """Only one of the others is told, at once; all do the same all the same, and none waits for long."""
    made = groups(4)
    victim, witness = made[2].worker, made[1].worker
    monkeypatch.setattr(shutdown, "POLL_SECONDS", 1000.0)
    monkeypatch.setattr(shutdown, "LEAVE_POLL_SECONDS", 0.05)
    for asking in (shutdown, registry):
        monkeypatch.setattr(
            asking, "is_reachable", lambda endpoint, *_: endpoint not in victim.membership.own.endpoints
        )
    all_at_once([lambda g=g: g.join(Deadline.after(20)) for g in made])
    compare_set = made[2].store.compare_set

    def post_or_die(key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        if key != f"{step}/2":
            return compare_set(key, expected, desired)
        if posted:
            compare_set(key, expected, desired)
        witness.lose(2, "it was killed")
        raise Dead

    monkeypatch.setattr(made[2].store, "compare_set", post_or_die)
    left: list[str] = []

    def leave(g: Group) -> None:
        g.leave(True, Deadline.after(20))
        left.append(g.worker.name)

    raised = all_at_once([lambda g=g: leave(g) for g in made])
    assert [type(e) for e in raised] == [type(None), type(None), Dead, type(None)], raised
    assert sorted(left) == ["worker0", "worker1", "worker3"]


def test_a_lost_request_does_not_block_shutdown_forever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All look as often as the others: none stops while another goes on."""
    monkeypatch.setattr(shutdown, "ROUND_BACKOFF_SECONDS", (1e-4, 1e-3))
    made = groups(3)
    all_at_once([lambda g=g: g.join(Deadline.after(20)) for g in made])
    made[1].worker.client.sent += 2
    made[2].worker.server.served += 1
    assert all_at_once([lambda g=g: g.leave(True, Deadline.after(20)) for g in made]) == [None] * 3
    assert caplog.text.count("shutdown goes on, though 2 requests were sent and 1 received") == 3


@pytest.mark.parametrize("who", [0, 2])
def test_shutdown_notices_the_death_of_a_worker_without_calls(
    monkeypatch: pytest.MonkeyPatch, who: int
) -> None:
    made = groups(3)
    gone = made[who].worker.membership.own.endpoints
    monkeypatch.setattr(shutdown, "LEAVE_GRACE_SECONDS", 1000.0)
    monkeypatch.setattr(shutdown, "LOG_INTERVAL_SECONDS", 1000.0)
    monkeypatch.setattr(shutdown, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(shutdown, "LEAVE_POLL_SECONDS", 0.02)
    monkeypatch.setattr(shutdown, "is_reachable", lambda endpoint: endpoint not in gone)
    all_at_once([lambda g=g: g.join(Deadline.after(20)) for g in made])
    made.pop(who).close()  # and tells nobody
    assert all_at_once([lambda g=g: g.leave(True, Deadline.after(500)) for g in made]) == [None, None]


@pytest.mark.parametrize("query", ["compare_set", "list_keys", "multi_get"])
def test_shutdown_does_not_wait_long_for_a_store_that_ended_with_worker_0(
    monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    """No message has passed between the two, so that only the barrier can notice the death."""
    made = groups(2)
    gone = made[0].worker.membership.own.endpoints
    monkeypatch.setattr(shutdown, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(shutdown, "is_reachable", lambda endpoint: endpoint not in gone)
    all_at_once([join(g) for g in made])
    made[0].close()
    store, patience = made[1].store, list[float]()

    def no_reply(*_: object) -> list[str]:
        patience.append(store.timeout.total_seconds())
        raise StoreTimeoutError("no reply")

    monkeypatch.setattr(store, query, no_reply)
    with pytest.raises(RpcTimeoutError, match="the store no longer replies"):
        made[1].leave(True, Deadline.after(500))
    assert patience == [shutdown.LOST_STORE_SECONDS]


def test_shutdown_waits_for_a_slow_store_while_worker_0_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    made = groups(2)
    all_at_once([join(g) for g in made])
    store, queries = made[1].store, list[str]()
    compare_set = store.compare_set

    def slow(key: str, *values: str) -> object:
        queries.append(key)
        if len(queries) == 1:
            raise StoreTimeoutError("no reply")
        return compare_set(key, *values)

    monkeypatch.setattr(store, "compare_set", slow)
    assert all_at_once([lambda g=g: g.leave(True, Deadline.after(20)) for g in made]) == [None, None]
    assert queries[:2] == ["arrived/1", "arrived/1"]


def test_shutdown_says_soon_whom_it_waits_for_however_many_calls_it_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutdown, "LOG_INTERVAL_SECONDS", 0.5)
    made, end = groups(2), threading.Event()
    all_at_once([join(g) for g in made])
    for g in made:
        g.worker.server.serve()
    caller, callee = [g.worker for g in made]
    for _ in range(OPTIONS.num_worker_threads):
        callee.submit(lambda: end.wait(20))
    calls = [caller.call(1, len, args=("abc",), timeout=0) for _ in range(40)]

    def end_when_said() -> None:
        eventually(lambda: caplog.text, lambda text: "waits for worker1 to finish" in text, 10)
        end.set()

    try:
        steps = [lambda g=g: g.leave(True, Deadline.after(20)) for g in made]
        assert all_at_once([end_when_said, *steps]) == [None] * 3
    finally:
        end.set()
    assert all(call.promise.exception() is None for call in calls)


def test_a_worker_that_waits_for_many_checks_them_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    made, all_checked, checked = groups(6), threading.Event(), list[str]()
    dead = made[4].worker.membership.own.endpoints[0]

    def is_reachable(endpoint: str) -> bool:
        checked.append(endpoint)
        if len(set(checked)) == 5:
            all_checked.set()
        return endpoint != dead

    monkeypatch.setattr(shutdown, "PROBES_AT_ONCE", 2)
    monkeypatch.setattr(shutdown, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(shutdown, "LEAVE_POLL_SECONDS", 0.02)
    monkeypatch.setattr(shutdown, "is_reachable", is_reachable)
    all_at_once([lambda g=g: g.join(Deadline.after(20)) for g in made])
    made.pop(4).close()
    first, *others = made
    steps = [lambda: first.leave(True, Deadline.after(20))]
    steps += [lambda g=g: (all_checked.wait(20), g.leave(True, Deadline.after(20))) for g in others]
    assert all_at_once(steps) == [None] * 5
    assert all_checked.is_set()
    endpoints = [g.worker.membership.own.endpoints[0] for g in others]
    assert checked[:2] == endpoints[:2], "the first to be checked are those that follow"


def test_a_signal_handler_may_leave_just_before_a_graceful_shutdown_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leave_first(group: Group, graceful: bool, deadline: Deadline) -> None:
        monkeypatch.undo()
        rpc.shutdown(graceful=False)
        group.leave(graceful, deadline)

    options = RpcBackendOptions(init_method=f"tcp://127.0.0.1:{free_port()}")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    monkeypatch.setattr(FixedGroup, "leave", leave_first)
    rpc.shutdown()
    with pytest.raises(NotInitializedError):
        rpc.shutdown()


def test_a_shutdown_that_cannot_be_hurried_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    first, second = groups(2)
    assert all_at_once([join(first), join(second)]) == [None] * 2
    left = threading.Event()

    def leave() -> None:
        first.leave(True, Deadline.after(20))
        left.set()

    leaving = threading.Thread(target=leave)
    leaving.start()
    eventually(lambda: first.leaving)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            first.hurry()
    second.leave(True, Deadline.after(20))
    leaving.join(20)
    assert left.is_set()


@pytest.mark.parametrize("gives_up", [False, True])
def test_rank_0_waits_for_slow_workers_with_a_limit(monkeypatch: pytest.MonkeyPatch, gives_up: bool) -> None:
    checked, released = threading.Semaphore(0), threading.Event()
    monkeypatch.setattr(shutdown, "LEAVE_POLL_SECONDS", 0.01)
    monkeypatch.setattr(shutdown, "LEAVE_GRACE_SECONDS", 0.1 if gives_up else 20.0)
    monkeypatch.setattr(shutdown, "is_reachable", lambda endpoint: checked.release() or True)
    made = groups(2)
    all_at_once([lambda g=g: g.join(Deadline.after(20)) for g in made])
    wait = made[1].store.wait

    def wait_slowly(keys: Any, timeout: Any = None) -> None:
        """Rank 1 does not see at once that it may leave."""
        wait(keys, timeout)
        if keys == ["closing"]:
            assert released.wait(20)

    made[1].store.wait = wait_slowly  # type: ignore[method-assign]
    first, slow = (threading.Thread(target=g.leave, args=(True, Deadline.after(20))) for g in made)
    for t in (first, slow):
        t.start()
    if gives_up:
        first.join(10)  # on a busy machine, its time may be over before it has checked even once
    else:
        for _ in range(3):
            assert checked.acquire(timeout=10), "rank 1 is alive and has not left: rank 0 checks again"
    assert first.is_alive() != gives_up
    released.set()
    for t in (first, slow):
        t.join(10)
        assert not t.is_alive()


@pytest.mark.slow
def test_a_store_that_is_about_to_close_accepts_no_new_clients() -> None:
    with (
        TCPStore("127.0.0.1", 0, is_master=True, timeout=20) as master,
        TCPStore("127.0.0.1", master.port, timeout=20) as guest,
    ):
        master.refuse_newcomers()
        guest.set("key", "value")
        assert guest.get("key") == b"value"
        with pytest.raises(StoreTimeoutError, match="no store answered"):
            TCPStore("127.0.0.1", master.port, timeout=0.05)


def test_one_worker_alone_over_real_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        for use in (rpc.shutdown, rpc.get_worker_info, lambda: rpc.RRef(1), lambda: rpc.rpc_sync(0, len)):
            with pytest.raises(NotInitializedError, match="init_rpc first"):
                use()
        for call in (rpc.rpc_async, rpc.remote, rpc.get_debug_info, rpc.get_rpc_timeout, rpc.barrier):
            with pytest.raises(NotInitializedError, match=r"^RPC has not been initialized"):
                call(0, len) if call in (rpc.rpc_async, rpc.remote) else call()

    refused()
    options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{free_port()}", rpc_timeout=20)
    for _ in range(3):
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        with pytest.raises(RpcError, match=r"already initialized in this process .as alone.; call shutdown"):
            rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        assert rpc.rpc_sync("alone", len, args=("abc",)) == 3
        rref = rpc.remote("alone", len, args=("abc",))
        assert rref.to_here() == 3
        rpc.shutdown()
    refused()


@pytest.mark.parametrize("name", ["", "a b", "x" * 200, None, 3, "a/b"])
def test_names_that_cannot_be(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="name"):
        rpc.init_rpc(name, rank=0, world_size=1)


@pytest.mark.parametrize(
    "options",
    [
        {"num_worker_threads": 0},
        {"num_worker_threads": 1.5},
        {"rpc_timeout": -1},
        {"join_timeout": -1},
        {"device_maps": {"a": {0: "nowhere"}}},
    ],
)
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        rpc.RpcBackendOptions(**options)


@pytest.mark.parametrize("options", [{"num_worker_threads": 0}, {"rpc_timeout": -1}])
def test_options_out_of_range_are_runtime_errors_as_with_torch(options: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=next(iter(options))):
        rpc.RpcBackendOptions(**options)


def test_options_by_torchs_name() -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=3, rpc_timeout=7, _transports=["uv"], arena_limit=0
    )
    assert (options.num_worker_threads, options.rpc_timeout, options.arena_limit) == (3, 7.0, 0)
    registry = rpc.backend_registry
    assert registry.backend_registered("TENSORPIPE")
    assert not registry.backend_registered("GLOO")
    made = registry.construct_rpc_backend_options(registry.BackendType["TENSORPIPE"], 5, num_worker_threads=2)
    assert isinstance(made, rpc.TensorPipeRpcBackendOptions)
    assert (made.rpc_timeout, made.num_worker_threads, made.init_method) == (5.0, 2, "env://")
    for strange in ({"rpc_timeout": timedelta(seconds=3)}, {"rpc_timeout": "3"}, {"num_worker_threads": "3"}):
        with pytest.raises(TypeError, match=next(iter(strange))):
            rpc.TensorPipeRpcBackendOptions(**strange)  # type: ignore[arg-type]
    assert rpc.RpcBackendOptions(rpc_timeout=timedelta(seconds=3)).rpc_timeout == 3.0  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="num_threads"):
        rpc.TensorPipeRpcBackendOptions(num_threads=3)
    options.rpc_timeout = -5
    with pytest.raises(ConfigurationError, match="rpc_timeout"):
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("init_method", None),
        ("init_method", 5),
        ("device_maps", "worker1"),
        ("device_maps", 5),
        ("devices", "cuda:0"),
        ("devices", 0),
        ("liveness_timeout", "3"),
        ("frozen_timeout", None),
        ("refused_timeout", None),
    ],
)
def test_options_of_another_type(option: str, value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=f"{option} must be .*, not {value!r}"):
        rpc.RpcBackendOptions(**{option: value})
    options = rpc.RpcBackendOptions()
    setattr(options, option, value)
    with pytest.raises(ArgumentTypeError, match=option):
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)


class Text(str):
    """As a numpy.str_ or a member of an enumeration."""

    __str__ = str.__repr__


@pytest.mark.parametrize("world_size", [1, None])
def test_a_name_may_be_a_string_of_another_class(world_size: int | None) -> None:
    options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{free_port()}")
    rpc.init_rpc(Text("alone"), rank=0, world_size=world_size, rpc_backend_options=options)
    try:
        assert type(rpc.get_worker_info().name) is str
        assert rpc.rpc_sync(Text("alone"), max, args=(1, 2)) == rpc.rpc_sync("alone", max, args=(1, 2)) == 2
    finally:
        rpc.shutdown()


def test_names_are_ascii() -> None:
    with pytest.raises(WorkerNameError, match="Worker name must match"):
        rpc.init_rpc("w\u00f6rker", rank=0, world_size=1)


def test_other_invalid_arguments() -> None:
    with pytest.raises(ConfigurationError, match="Argument backend must be a member"):
        rpc.init_rpc("a", backend="GLOO", rank=0, world_size=1)
    with pytest.raises(ConfigurationError, match="Argument rpc_backend_options must be an instance of"):
        rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options={"rpc_timeout": 3})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="timeout"):
        rpc.shutdown(timeout=-3)


gates: list[threading.Event] = []


def wait_for_gate() -> None:
    assert gates.pop().wait(30)


def in_a_fork(options: RpcBackendOptions, pending: Any) -> str:
    """Use the parent's worker, then one of its own."""
    signal.alarm(20)
    for wait in (pending.wait, lambda: rpc.wait_all([pending]), lambda: next(rpc.as_completed([pending]))):
        with pytest.raises(NotInitializedError, match="this process is a fork"):
            wait()
    try:
        rpc.rpc_sync("parent", len, args=("abc",))
    except NotInitializedError as e:
        told = str(e)
    rpc.init_rpc("child", rank=0, world_size=1, rpc_backend_options=options)
    told += f"; and then {rpc.rpc_sync('child', len, args=('abcd',))}"
    rpc.shutdown()
    return told


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_calls_in_a_fork_raise_and_the_fork_may_join_by_itself() -> None:
    options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{free_port()}", rpc_timeout=10)
    own = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{free_port()}", rpc_timeout=10)
    rpc.init_rpc("parent", rank=0, world_size=1, rpc_backend_options=options)
    assert rpc.rpc_sync("parent", len, args=("abc",)) == 3
    opened = threading.Event()
    gates.append(opened)
    pending = rpc.rpc_async("parent", wait_for_gate)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, in_a_fork(own, pending).encode())
        finally:
            os._exit(0)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    with open(reading, "rb") as answer:
        told = answer.read().decode()
    assert status == 0
    assert told.startswith(f"this process is a fork of process {os.getpid()}, in which worker parent runs")
    assert told.endswith("and then 4")
    opened.set()
    pending.wait()
    rpc.shutdown()
