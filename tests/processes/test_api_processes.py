"""The public calls once over real processes and sockets, as a program would use them together."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.processes import run_processes
from zmqgrad import autograd, rpc
from zmqgrad.errors import PeerLostError, RpcTimeoutError
from zmqgrad.nn import RemoteModule
from zmqgrad.optim import DistributedOptimizer

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@rpc.functions.async_execution
def relay(way: list[int], value: Any) -> Any:
    """Hand ``value`` on along ``way``, where each adds 1; no thread waits."""
    to, *rest = way
    if not rest:
        return rpc.rpc_async(to, add_one, args=(value,))
    return rpc.rpc_async(to, relay, args=(rest, value)).then(lambda f: f.wait() + 1)


def add_one(value: Any) -> Any:
    """At the end of the way."""
    return value + 1


class Replay:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, what: Any) -> int:
        """Keep it."""
        self.seen.append(what)
        return len(self.seen)


def note_there(replay: Any, what: Any) -> int:
    """From a third worker, by a reference that came in a message."""
    assert replay.confirmed_by_owner()
    return replay.rpc_sync().note((rpc.get_worker_info().name, what))


async def in_asyncio() -> list[Any]:
    """Many calls at once."""
    return await asyncio.gather(*(_one(n) for n in range(20)))


async def _one(n: int) -> Any:
    return await rpc.rpc_async(n % 3, relay, args=([1, 2], n))


def program(rank: int) -> Any:
    rpc.init_rpc(f"worker{rank}")
    if rank != 0:
        rpc.shutdown()  # serves until all are done; one of the two ends in the middle of a call
        return None
    assert asyncio.run(in_asyncio()) == [n + 2 for n in range(20)]
    replay = rpc.remote(1, Replay)
    assert sorted(rpc.wait_all(rpc.broadcast([0, 1, 2], note_there, (replay, "x")))) == [1, 2, 3]
    assert replay.remote().note(5).to_here() == 4
    assert replay._get_type() is Replay
    train()
    info = rpc.get_debug_info()
    assert [p["state"] for p in info["peers"]] == ["this worker", "up", "up"]
    with pytest.raises(PeerLostError, match="worker1"):
        rpc.rpc_sync(1, os._exit, args=(3,))
    with pytest.raises(PeerLostError, match="worker1"):
        rpc.rpc_async(1, add_one, args=(1,)).wait()
    assert rpc.rpc_sync(2, add_one, args=(1,)) == 2, "the others go on"
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync(2, never, timeout=0.1)
    rpc.shutdown()
    return "done"


@rpc.functions.async_execution
def never() -> Any:
    """It is never set."""
    return torch.futures.Future()


def train() -> None:
    """A step through two remote modules is the step of the same modules here."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 2)]
    there = [RemoteModule(f"worker{n + 1}/cpu", copy_of, args=(layers[n],)) for n in (0, 1)]
    x = torch.randn(3, 4)
    parameters = [p for module in there for p in module.remote_parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [there[1](there[0](x)).square().sum()])
        optimizer.step(context_id)
    local = nn.Sequential(*layers)
    plain = torch.optim.SGD(local.parameters(), lr=0.1)
    local(x).square().sum().backward()
    plain.step()
    for mine, theirs in zip(local.parameters(), parameters, strict=True):
        assert torch.equal(mine, theirs.to_here())


def copy_of(layer: nn.Module) -> nn.Module:
    """What came is a copy already."""
    return layer


def test_the_api_over_processes() -> None:
    assert run_processes(program, 3, may_die=(1,))[0] == "done"
