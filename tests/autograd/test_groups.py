"""Gradients of group calls: summed in the order of the members, whoever replies first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from tests.support.processes import run_processes
from zmqgrad import rpc
from zmqgrad.autograd import backward, context, get_gradients
from zmqgrad.optim import DistributedOptimizer
from zmqgrad.rpc.current import current_worker
from zmqgrad.testing import cluster

MEMBERS = 6


def scaled(x: torch.Tensor) -> torch.Tensor:
    """By a number that differs from member to member, so that the order of a sum shows."""
    return x * (0.1 + 1.7 ** (3 * current_worker().id))


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of two tensors."""
    return x * y


def test_the_gradient_of_an_argument_of_all_members_does_not_depend_on_who_is_first() -> None:
    x = torch.linspace(0.1, 1.3, 50, requires_grad=True)
    found: list[torch.Tensor] = []
    with cluster(MEMBERS) as c:
        for seed in range(8):
            with c.network.reorder(seed, MEMBERS), context() as context_id:
                losses = [y.sum() for y in rpc.group("worker*").call(scaled, (x,))]
                backward(context_id, losses)
                found.append(get_gradients(context_id)[x])
    assert all(torch.equal(gradient, found[0]) for gradient in found)
    torch.testing.assert_close(found[0], sum(torch.full((50,), 0.1 + 1.7 ** (3 * n)) for n in range(MEMBERS)))


def test_each_gradient_of_map_comes_from_its_member() -> None:
    xs = [torch.full((3,), float(n), requires_grad=True) for n in range(4)]
    y = torch.ones(3, requires_grad=True)
    with cluster(4), context() as context_id:
        products = rpc.group("worker*").map(product, [(x, y * (n + 1)) for n, x in enumerate(xs)])
        backward(context_id, [sum(products).sum()])
        gradients = get_gradients(context_id)
        assert [gradients[x].tolist() for x in xs] == [[n + 1.0] * 3 for n in range(4)]
        assert gradients[y].tolist() == [float(sum(n * (n + 1) for n in range(4)))] * 3


def test_results_that_are_not_used_and_calls_under_no_grad() -> None:
    x = torch.ones(3, requires_grad=True)
    with cluster(3), context() as context_id:
        first, *_ = rpc.group("*").call(scaled, (x,))
        with torch.no_grad():
            assert not any(y.requires_grad for y in rpc.group("*").call_async(scaled, (x,)).wait())
        backward(context_id, [first.sum()])
        assert torch.equal(get_gradients(context_id)[x], torch.full((3,), 1.1))


class Linear(nn.Module):
    """A parameter on its worker."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(current_worker().id)
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A product."""
        return x * self.weight

    def gradient(self, context_id: int) -> torch.Tensor:
        """Of the parameter."""
        return get_gradients(context_id)[self.weight]


@pytest.mark.parametrize("how", ["sync", "async", "remote"])
def test_gradients_go_through_references(how: str) -> None:
    x = torch.linspace(0.1, 1.0, 4, requires_grad=True)
    with cluster(4), context() as context_id:
        layers = rpc.group("worker*").remote(Linear, (4,))
        if how == "sync":
            products = layers.rpc_sync().forward(x)
        elif how == "async":
            products = layers.rpc_async().forward(x).wait()
        else:
            products = layers.remote().forward(x).to_here()
        backward(context_id, [sum(products).sum()])
        weights = [copy.weight for copy in layers.to_here()]
        torch.testing.assert_close(get_gradients(context_id)[x], sum(weights).detach())
        assert all(torch.equal(g, x) for g in layers.rpc_sync().gradient(context_id))


# ---- data parallelism -------------------------------------------------------------------------------------


def make_model() -> nn.Module:
    """The same everywhere."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the trainer of that rank learns from in a step."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    return tuple(torch.rand(7, n, generator=random, dtype=torch.float64) for n in (5, 2))  # type: ignore[return-value]


def loss_of(parameters: dict[str, Any], step: int) -> torch.Tensor:
    """The loss of this worker's batch."""
    x, y = batch(step, current_worker().id)
    return nn.functional.mse_loss(functional_call(make_model(), parameters, (x,)), y)


def train_by_a_group(trainers: rpc.WorkerGroup, steps: int) -> nn.Module:
    """Data parallelism in five lines."""
    model = make_model()
    references = [rpc.RRef(p) for p in model.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=0.1, momentum=0.9)
    for step in range(steps):
        with context() as context_id:
            losses = trainers.call(loss_of, (dict(model.named_parameters()), step))
            backward(context_id, [sum(losses) / len(losses)])
            optimizer.step(context_id)
    return model


def test_data_parallelism_is_training_on_the_whole_batch() -> None:
    with cluster(3):
        ours = train_by_a_group(rpc.group("worker*"), 5)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        parts = [batch(step, rank) for rank in range(3)]
        x, y = (torch.cat(part) for part in zip(*parts, strict=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    for mine, its in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-14)


def train_both_ways(rank: int) -> None:
    """By torch's DistributedDataParallel, and by worker 0 with a group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    replica = nn.parallel.DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        nn.functional.mse_loss(replica(x), y).backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
    rpc.init_rpc(f"worker{rank}")
    if rank == 0:
        ours = train_by_a_group(rpc.group("worker*"), 5)
        for mine, its in zip(ours.parameters(), replica.module.parameters(), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-14)
    rpc.shutdown()


@pytest.mark.processes
@pytest.mark.slow
def test_data_parallelism_is_that_of_torch() -> None:
    run_processes(train_both_ways, 3)
