"""Our stores in torch's hands: every call through torch's C++, and process groups that meet over them."""

from __future__ import annotations

import errno
import gc
import math
import re
import socket
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.store import barrier

from tests.support.processes import run_processes
from tools.ports import free_port
from zmqgrad.errors import ConfigurationError, RendezvousError, StoreError, StoreTimeoutError
from zmqgrad.interop import TorchStore, as_torch_store, register_with_torch, rendezvous_handler
from zmqgrad.interop.probe import Probe, Server
from zmqgrad.interop.torch_store import listen, open_torch_store
from zmqgrad.rendezvous.port_mapper import REQUEST
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import HashStore, TCPStore

PATIENCE = 20.0


@pytest.fixture
def ours() -> Iterator[TorchStore]:
    made = as_torch_store(HashStore(PATIENCE))
    yield made
    made.close()


def script(store: Any) -> list[Any]:
    """What a program gets that uses ``store`` through torch's C++."""
    store.set_timeout(timedelta(seconds=PATIENCE))
    seen = dist.PrefixStore("view", store)
    seen.set("k", "1")
    seen.set("b", b"\xff\0")
    seen.append("k", "2")
    seen.multi_set(["m", "n"], ["x", b"y"])
    return [
        seen.get("k"),
        seen.get("b"),
        seen.add("n1", 5),
        seen.add("n1", -7),
        seen.compare_set("c", "", "1"),
        seen.compare_set("c", "no", "2"),
        seen.check(["k", "c"]),
        seen.check(["k", "none"]),
        seen.wait(["k"]),
        seen.wait(["k"], timedelta(seconds=1)),
        seen.multi_get(["m", "n"]),
        seen.num_keys(),
        seen.delete_key("m"),
        seen.delete_key("m"),
        seen.has_extended_api(),
        seen.timeout,
        *(later(seen, store) if HAS_LATER_METHODS else ()),
    ]


HAS_LATER_METHODS = hasattr(dist.Store, "queue_push")
"""Whether torch is recent enough to have them; 2.6 is not."""


def later(seen: Any, store: Any) -> list[Any]:
    """What a program gets from methods that older releases of torch lack."""
    return [
        seen.barrier("one", 1),
        seen.clone().get("k"),
        store.queue_push("q", "1"),
        store.queue_len("q"),
        store.queue_pop("q"),
        sorted(store.list_keys()),
    ]


def test_torch_gets_the_same_from_our_stores(ours: TorchStore) -> None:
    expected, got = script(dist.HashStore()), script(ours)
    assert [repr(one) for one in got] == [repr(one) for one in expected]


def test_timeouts_set_by_torch_reach_our_store(ours: TorchStore) -> None:
    view = dist.PrefixStore("view", ours)
    view.set_timeout(timedelta(milliseconds=10))
    with pytest.raises(StoreTimeoutError, match=r"0\.01 s.*view/none"):
        view.get("none")
    assert ours.underlying.timeout == timedelta(milliseconds=10)
    with pytest.raises(TimeoutError, match=r"0\.02 s"):
        view.wait(["none"], timedelta(milliseconds=20))


@pytest.mark.parametrize("timeout", [math.inf, timedelta.max, timedelta(microseconds=400)])
def test_a_timeout_that_torch_cannot_hold_stays_that_of_our_store(timeout: float | timedelta) -> None:
    with HashStore(timeout) as store:
        before = store.timeout
        ours = as_torch_store(store)
        ours.set("k", "v")
        assert dist.PrefixStore("", ours).timeout >= timedelta(0)
        assert ours.get("k") == b"v"
        assert store.timeout == before
        ours.set_timeout(timedelta.max)
        assert min(ours.timeout, store.timeout) > timedelta(days=365)
        ours.close()


@pytest.mark.slow
def test_errors_are_those_that_torch_catches(ours: TorchStore) -> None:
    soon = timedelta(milliseconds=1)
    for missing in (lambda: ours.wait(["k"], soon), lambda: dist.PrefixStore("view", ours).wait(["k"], soon)):
        with pytest.raises(dist.DistStoreError) as timeout:
            missing()
        assert isinstance(timeout.value, StoreTimeoutError)
    ours.set("k", "text")
    with pytest.raises(dist.DistStoreError, match="no 64-bit number"):
        ours.add("k", 1)
    with pytest.raises(getattr(dist, "QueueEmptyError", dist.DistStoreError), match="queue is empty"):
        ours.queue_pop("q", block=False)
    with pytest.raises(dist.DistStoreError, match=r"missing_ranks=\[1\]"):
        barrier(ours, 2, "job/", barrier_timeout=0.001, rank=0, rank_tracing_decoder=str, trace_timeout=0.001)


def test_a_store_held_only_by_torch_stays_alive() -> None:
    """torch keeps only the C++ half; without the other there is no call that works."""
    view = dist.PrefixStore("view", as_torch_store(HashStore(PATIENCE)))
    other = view.clone() if HAS_LATER_METHODS else view
    gc.collect()
    view.set("k", "1")
    assert other.get("k") == b"1"
    view.underlying_store.close()


def test_a_closed_store_is_not_kept_alive() -> None:
    made = as_torch_store(HashStore(PATIENCE))
    clone = weakref.ref(made.clone())
    gone = weakref.ref(made)
    assert as_torch_store(made) is made  # type: ignore[arg-type]
    made.close()
    made.close()
    del made
    gc.collect()
    assert gone() is None
    assert clone() is None


def test_an_address_where_nothing_listens_and_one_that_does_not_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a refusal shows that nothing listens."""
    for error, seen in (
        (ConnectionRefusedError(111, "refused"), "10.0.0.1:5: nothing listens"),
        (TimeoutError("timed out"), "10.0.0.1:5: no answer (a firewall drops packets, or the host is down)"),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), "10.0.0.1:5: this host has no route there"),
        (socket.gaierror(-2, "not known"), "10.0.0.1:5: its name cannot be resolved here"),
    ):

        def fail(*_: object, error: OSError = error) -> None:
            raise error

        monkeypatch.setattr("zmqgrad.interop.torch_store.Probe", fail)
        with pytest.raises(StoreTimeoutError, match=re.escape(seen)) as caught:
            open_torch_store("10.0.0.1", 5, False, Deadline.after(PATIENCE))
        assert "`zmqgrad doctor --peer 10.0.0.1:5`" in str(caught.value)


def test_a_short_timeout_is_for_waiting_and_not_for_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine torch's client takes a while even to the server of its own process."""
    monkeypatch.setattr("zmqgrad.interop.torch_store._served", {})  # not kept: it ends with the test
    theirs = dist.TCPStore("127.0.0.1", free_port(), None, True, wait_for_workers=False, multi_tenant=True)
    served = open_torch_store("127.0.0.1", theirs.port, True, Deadline.after(0.0002))
    served.set("key", "value")
    assert theirs.get("key") == b"value"


def kind_of_server(port: int) -> Server | None:
    with Probe("127.0.0.1", port, Deadline.after(PATIENCE)) as probe:
        return probe.identify(PATIENCE, REQUEST)


def test_a_store_of_torch_listens_only_when_a_process_group_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zmqgrad.interop.torch_store._served", {})
    port, patience = free_port(), Deadline.after(PATIENCE)
    shared = open_torch_store("127.0.0.1", port, True, patience)
    shared.set("before", "4001")
    assert kind_of_server(port) is Server.PORT_MAPPER
    met = open_torch_store("127.0.0.1", port, False, patience)
    assert met.get("before") == b"4001"
    with ThreadPoolExecutor(2) as pool:
        later = pool.submit(met.get, "after")
        waits = pool.submit(lambda: next(iter(dist.rendezvous(f"tcp://127.0.0.1:{port}", 1, 2)))[0])
        theirs, *_ = next(iter(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, 2)))
        assert kind_of_server(port) is Server.TORCH
        assert waits.result(PATIENCE).get("before") == b"4001"
        shared.set("after", "4002")
        assert later.result(PATIENCE) == b"4002"
    assert theirs.get("after") == b"4002"
    shared.withdraw("before", "after")


def test_the_port_is_free_when_the_last_store_has_been_withdrawn() -> None:
    port, patience = free_port(), Deadline.after(PATIENCE)
    first = open_torch_store("127.0.0.1", port, True, patience)
    second = open_torch_store("127.0.0.1", port, True, patience)
    first.set("first", "4001")
    second.set("second", "4002")
    first.withdraw("first")
    assert open_torch_store("127.0.0.1", port, False, patience).get("second") == b"4002"
    second.withdraw("second")
    listen("127.0.0.1", port).close()


def test_the_port_is_free_if_an_interrupt_came_as_its_thread_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread went on, and nobody could end it: ``init_rpc`` found the port in use from then on."""
    port, start, patience = free_port(), threading.Thread.start, Deadline.after(PATIENCE)

    def interrupted_start(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted_start)
        with pytest.raises(KeyboardInterrupt):
            open_torch_store("127.0.0.1", port, True, patience)
    listen("127.0.0.1", port).close()


def test_a_port_of_another_rank_0_is_refused() -> None:
    port, patience = free_port(), Deadline.after(PATIENCE)
    shared = open_torch_store("127.0.0.1", port, True, patience)
    with pytest.raises(StoreError, match="has rank 0, too"):
        open_torch_store("127.0.0.1", port, False, patience).set("k", "v")
    shared.withdraw()


def test_what_is_no_store_of_ours_is_refused() -> None:
    with pytest.raises(TypeError, match="not HashStore"):
        as_torch_store(dist.HashStore())
    register_with_torch()
    with pytest.raises(ConfigurationError, match="does not take color"):
        next(rendezvous_handler("zmq://127.0.0.1:1", color="red"))
    with pytest.raises(RendezvousError, match="lacks a host or a port"):
        next(iter(dist.rendezvous("zmq://here", 0, 1)))


def test_a_group_by_url_and_what_is_left_of_it() -> None:
    """In this process: its store is open as long as the group is there, and no longer."""
    url = f"zmq://127.0.0.1:{free_port()}"
    before = threading.active_count()
    for _ in range(2):
        dist.init_process_group("gloo", init_method=url, rank=0, world_size=1)
        try:
            gc.collect()
            ones = torch.ones(2)
            dist.all_reduce(ones, group=dist.new_group([0]))
            assert ones.tolist() == [1, 1]
            assert threading.active_count() > before
        finally:
            dist.destroy_process_group()


def _reduce_by_both(rank: int, port: int) -> list[float]:
    sums = []
    with TCPStore("127.0.0.1", port, 2, rank == 0, PATIENCE) as store:
        for given in ({"store": as_torch_store(store)}, {"init_method": f"zmq://127.0.0.1:{free_port()}"}):
            if "init_method" in given:  # at the first one's choice
                given = {"init_method": store.get("url").decode()} if rank else given
                store.set("url", given["init_method"])
            dist.init_process_group("gloo", rank=rank, world_size=2, **given)
            mine = torch.tensor([1.0 + rank])
            dist.all_reduce(mine)
            sums.append(mine.item())
            dist.barrier()
            dist.destroy_process_group()
            store.barrier("left", 2)
        if rank:  # the other one closes the store then; it may be first to leave a barrier
            store.set("done", "")
        else:
            store.wait(["done"])
    return sums


@pytest.mark.processes
@pytest.mark.slow
def test_processes_reduce_over_a_store_and_by_url() -> None:
    assert run_processes(_reduce_by_both, 2, (free_port(),)) == [[3.0, 3.0]] * 2
