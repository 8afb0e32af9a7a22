"""What a worker tells of itself, and what of its calls shows in torch's profiler."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from zmqgrad import autograd, rpc
from zmqgrad.rpc.torch_names import agent_debug_info
from zmqgrad.testing import Cluster, cluster
from zmqgrad.wire.messages import MessageType


@pytest.fixture
def pair() -> Iterator[Cluster]:
    with cluster(2) as c:
        yield c


def test_an_idle_worker(pair: Cluster) -> None:
    info = rpc.get_debug_info()
    assert info["worker"]["name"] == "worker0"
    assert not info["worker"]["closed"]
    assert info["pending_calls"] == []
    assert [(p["name"], p["id"], p["state"]) for p in info["peers"]] == [
        ("worker0", 0, "this worker"),
        ("worker1", 1, "up"),
    ]
    assert info["references"]["owner_rrefs"] == info["references"]["forks"] == 0
    assert info["autograd"]["num_autograd_contexts"] == 0


GATES: list[threading.Event] = []


def wait_at(number: int) -> None:
    """Wait until the test lets go."""
    GATES[number].wait(20)


def test_a_busy_worker(pair: Cluster) -> None:
    GATES.append(threading.Event())
    with autograd.context():
        future = rpc.rpc_async(1, wait_at, args=(len(GATES) - 1,), timeout=15)
        endless = rpc.rpc_async(1, wait_at, args=(len(GATES) - 1,), timeout=0)
        info = rpc.get_debug_info()
        assert [(c["call"], c["to"]) for c in info["pending_calls"]] == [("wait_at", "worker1")] * 2
        limited, unlimited = (c["seconds_left"] for c in info["pending_calls"])
        assert 0 < limited <= 15
        assert unlimited is None
        assert info["autograd"]["num_autograd_contexts"] == 1
        GATES[-1].set()
        torch.futures.wait_all([future, endless])
    with pair.acting(1):
        assert rpc.get_debug_info()["worker"]["requests_served"] >= 2
    assert rpc.get_debug_info()["autograd"]["num_autograd_contexts"] == 0


def test_references_and_losses(pair: Cluster) -> None:
    held = rpc.remote(1, list)
    assert held.to_here() == []
    assert rpc.get_debug_info()["references"]["user_rrefs"] == 1
    with pair.acting(1) as owner:
        assert rpc.get_debug_info()["references"]["owner_rrefs"] == 1
        owner.lose(0, "unplugged")
        pair.network.wait_quiet()
        assert rpc.get_debug_info()["peers"][0]["state"] == "lost: unplugged"
        assert rpc.get_debug_info()["references"]["forks"] == 0


def test_torchs_names_for_the_same(pair: Cluster) -> None:
    whole, rrefs, contexts = (
        rpc._get_debug_info(),
        rpc._rref_context_get_debug_info(),
        autograd._get_debug_info(),
    )
    agent = agent_debug_info(pair.workers[0])
    assert whole.keys() == rrefs.keys() | agent.keys() | contexts.keys()
    assert all(isinstance(value, str) for value in whole.values())
    with pair.network.hold(MessageType.REMOTE_RESULT) as held:
        rref = rpc.remote(1, list)
        held.wait()
        assert rpc._rref_context_get_debug_info()["num_pending_users"] == "1"
        assert rpc._rref_context_get_debug_info()["num_pending_futures"] == "1"
    rref._get_future().wait()
    pair.network.wait_quiet()
    assert rpc._rref_context_get_debug_info()["num_pending_users"] == "0"


def work(x: Any) -> Any:
    """Something that shows."""
    return x + 1


@torch.jit.script
def compiled(x: torch.Tensor) -> torch.Tensor:
    """A script function."""
    return x


def test_calls_show_in_the_profiler(pair: Cluster) -> None:
    config = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as p:
        rpc.rpc_sync(1, work, args=(torch.ones(1),))
        rpc.rpc_async(1, work, args=(1,)).wait()
        rref = rpc.remote(1, list)
        assert rref.rpc_sync().copy() == []
        assert rref.remote().count(1).to_here() == 0
        rpc.rpc_sync(1, torch.add, args=(1, 2))
        rpc.rpc_sync(1, compiled, args=(torch.ones(1),))
    names = [event.name for event in p.events()]
    for wanted in (
        "rpc_sync#work(worker0 -> worker1)",
        "rpc_async#work(worker0 -> worker1)",
        "rpc_remote#list(worker0 -> worker1)",
        "rpc_sync#copy(worker0 -> worker1)",
        "rpc_remote#count(worker0 -> worker1)",
        "rpc_sync#aten::add(worker0 -> worker1)",  # this and the next: torch's names
        f"rpc_sync#{compiled.qualified_name}(worker0 -> worker1)",
    ):
        assert names.count(wanted) == 1, names
    served = [name for name in names if name.startswith("rpc_serve#")]
    assert sum(name.endswith(":work(worker0 -> worker1)") for name in served) == 2, served


def top_level(rref: rpc.RRef[Any]) -> list[list[str]]:
    """Names of the events of each call that stand in no other event."""
    calls = rref.local_value().process_global_function_events
    return [[e.name for e in events if e.cpu_parent is None] for events in calls if events]


def ranges(rref: rpc.RRef[Any]) -> list[tuple[float, float]]:
    """When the first event of each call that was recorded began and ended."""
    calls = rref.local_value().process_global_function_events
    return [(events[0].time_range.start, events[0].time_range.end) for events in calls if events]


def test_calls_that_are_profiled_from_afar_follow_each_other(pair: Cluster) -> None:
    x = torch.ones(2)
    whole = rpc.remote(1, rpc._server_process_global_profile)
    whole.rpc_sync().__enter__()
    for _ in range(5):
        rpc.rpc_sync(1, torch.add, args=(x, x))
    whole.rpc_sync().__exit__(None, None, None)
    times = [at for begin_and_end in rpc.rpc_sync(1, ranges, args=(whole,)) for at in begin_and_end]
    assert len(times) == 10
    assert times == sorted(times)


def test_what_a_worker_serves_can_be_profiled_from_afar(pair: Cluster) -> None:
    x = torch.ones(2)
    outer, inner = (rpc.remote(1, rpc._server_process_global_profile) for _ in range(2))
    rpc.rpc_sync(1, torch.mul, args=(x, x))
    outer.rpc_sync().__enter__()
    rpc.rpc_sync(1, torch.add, args=(x, x))
    inner.rpc_sync().__enter__()
    rpc.remote(1, torch.sub, args=(x, x)).to_here()
    with pytest.raises(RuntimeError, match="not reentrant"):
        inner.rpc_sync().__enter__()
    inner.rpc_sync().__exit__(None, None, None)
    outer.rpc_sync().__exit__(None, None, None)
    rpc.rpc_sync(1, torch.mul, args=(x, x))
    assert rpc.rpc_sync(1, top_level, args=(inner,)) == [["aten::sub"]]
    assert rpc.rpc_sync(1, top_level, args=(outer,)) == [["aten::add"], ["aten::sub"]]
    assert "aten::sub" in str(
        rpc.rpc_sync(1, lambda r: r.local_value().key_averages().table(), args=(inner,))
    )


def test_backward_passes_show_in_the_profiler(pair: Cluster) -> None:
    x = torch.ones(1, requires_grad=True)
    config = _ExperimentalConfig(profile_all_threads=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync(1, torch.add, args=(x, x))
        with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as p:
            autograd.backward(context_id, [y])
    names = [event.name.rpartition(":")[2] for event in p.events()]
    assert names.count("backward") == 1
    assert names.count("SendRpcBackward") == 2
    assert names.count("RecvRpcBackward") == 2


def test_a_pass_shows_in_the_profile_of_its_root_thread(pair: Cluster) -> None:
    """As with torch: a profiler records the thread that calls ``backward``, and sees its worker's part."""
    x = torch.ones(1, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync(1, torch.add, args=(x, x))
        with profile(activities=[ProfilerActivity.CPU]) as p:
            autograd.backward(context_id, [y])
        assert autograd.get_gradients(context_id)[x].item() == 2
    names = [event.name.rpartition(":")[2] for event in p.events()]
    assert names.count("SendRpcBackward") == 1
    assert names.count("RecvRpcBackward") == 1
