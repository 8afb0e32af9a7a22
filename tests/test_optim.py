"""DistributedOptimizer: the same steps as one local optimizer, wherever the parameters live."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from zmqgrad import rpc
from zmqgrad.autograd import backward, context
from zmqgrad.errors import ConfigurationError
from zmqgrad.optim import DistributedOptimizer
from zmqgrad.testing import Cluster, cluster


@pytest.fixture
def c() -> Iterator[Cluster]:
    with cluster(3) as made:
        yield made


def make(number: int) -> Tensor:
    random = torch.Generator().manual_seed(number)
    return torch.rand(3, generator=random, dtype=torch.float64).requires_grad_()


def make_with_grad() -> Tensor:
    p = make(0)
    p.grad = torch.full((3,), 7.0, dtype=torch.float64)
    return p


def grad_of(p: rpc.RRef[Tensor]) -> Tensor | None:
    return p.local_value().grad


def loss_of(params: list[Tensor], step: int) -> Tensor:
    product = torch.stack(params).sin().prod(0)
    return ((product - 0.1 * step) ** 2).sum()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": 0.05}),
        (torch.optim.Adagrad, {"lr": 0.05}),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_steps_equal_those_of_one_process(c: Cluster, kind: type, options: dict[str, Any]) -> None:
    local = [make(i) for i in range(4)]
    optimizer = kind(local, **options)
    params = [rpc.remote(to, make, (i,)) for i, to in enumerate([0, 1, 2, 1])]
    distributed = DistributedOptimizer(kind, params, **options)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(local, step).backward()
        optimizer.step()
        with context() as ctx:
            backward(ctx, [loss_of([p.to_here() for p in params], step)])
            distributed.step(ctx)
        for p, expected in zip(params, local, strict=True):
            torch.testing.assert_close(p.to_here().detach(), expected.detach(), rtol=1e-12, atol=1e-14)


def test_a_parameter_without_gradient_stays(c: Cluster) -> None:
    used, unused = (rpc.remote(1, make, (i,)) for i in range(2))
    optimizer = DistributedOptimizer(torch.optim.SGD, [used, unused], lr=1.0)
    with context() as ctx:
        backward(ctx, [used.to_here().sum()])
        optimizer.step(ctx)
    assert torch.equal(unused.to_here(), make(1))
    torch.testing.assert_close(used.to_here().detach(), make(0).detach() - 1)


def test_grad_is_as_before(c: Cluster) -> None:
    p = rpc.remote(1, make_with_grad)
    optimizer = DistributedOptimizer(torch.optim.SGD, [p], lr=1.0)
    with context() as ctx:
        backward(ctx, [p.to_here().sum()])
        optimizer.step(ctx)
    grad = rpc.rpc_sync(1, grad_of, (p,))
    assert grad is not None
    assert grad.tolist() == [7.0] * 3
    torch.testing.assert_close(p.to_here().detach(), make(0).detach() - 1)


class Failing(torch.optim.SGD):
    """Refuses to step where its first parameter is parameter 1."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if torch.equal(self.param_groups[0]["params"][0], make(1)):
            raise LookupError("no step today")
        super().step(closure)


def test_an_error_of_one_owner_names_it_and_the_others_step(c: Cluster) -> None:
    params = [rpc.remote(to, make, (i,)) for i, to in enumerate([0, 1, 2])]
    optimizer = DistributedOptimizer(Failing, params, lr=1.0)
    with context() as ctx:
        backward(ctx, [sum(p.to_here().sum() for p in params)])
        with pytest.raises(LookupError, match=r"(?s)worker1.*no step today"):
            optimizer.step(ctx)
    moved = [not torch.equal(p.to_here(), make(i)) for i, p in enumerate(params)]
    assert moved == [True, False, True]


def test_an_optimizer_that_cannot_be_made_says_why(c: Cluster) -> None:
    p = rpc.remote(1, make, (0,))
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        DistributedOptimizer(torch.optim.SGD, [p], lr=-1)
    with pytest.raises(TypeError, match="no_such_option"):
        DistributedOptimizer(torch.optim.SGD, [p], no_such_option=1)


def test_arguments_that_cannot_be(c: Cluster) -> None:
    with pytest.raises(ConfigurationError, match="optimizer got an empty parameter list"):
        DistributedOptimizer(torch.optim.SGD, [], lr=1.0)
    with pytest.raises(ConfigurationError, match=r"params_rref\[1\] must be an RRef, not Tensor"):
        DistributedOptimizer(torch.optim.SGD, [rpc.RRef(make(0)), make(1)], lr=1.0)  # type: ignore[list-item]


def test_a_step_outside_its_context_is_an_error(c: Cluster) -> None:
    p = rpc.remote(1, make, (0,))
    optimizer = DistributedOptimizer(torch.optim.SGD, [p], lr=1.0)
    with pytest.raises(RuntimeError, match="Could not find autograd context with id: 12345"):
        optimizer.step(12345)


@pytest.mark.open_outcomes  # RRefs that are deleted while their fork request is on its way leave one
def test_concurrent_steps_on_shared_parameters_all_count(c: Cluster) -> None:
    params = [rpc.remote(to, make, (to,)) for to in range(3)]
    together = threading.Barrier(4)
    failed: list[BaseException] = []

    def train(rank: int) -> None:
        try:
            with c.acting(rank % 3):
                optimizer = DistributedOptimizer(torch.optim.SGD, params_of[rank], lr=1.0)
                together.wait(10)
                for _ in range(5):
                    with context() as ctx:
                        backward(ctx, [sum(p.to_here().sum() for p in params_of[rank])])
                        optimizer.step(ctx)
        except BaseException as e:
            failed.append(e)

    params_of = {rank: forks_of(c, rank % 3, params) for rank in range(4)}
    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed
    for i, p in enumerate(params):
        torch.testing.assert_close(p.to_here().detach(), make(i).detach() - 20)


_kept: dict[int, list[rpc.RRef[Tensor]]] = {}


def keep(rank: int, params: list[rpc.RRef[Tensor]]) -> None:
    _kept[rank] = params


def forks_of(c: Cluster, rank: int, params: list[rpc.RRef[Tensor]]) -> list[rpc.RRef[Tensor]]:
    """References to ``params`` that belong to worker ``rank``, as if its program had been given them."""
    rpc.rpc_sync(rank, keep, (rank, params))
    return _kept.pop(rank)
