"""A gradient penalty: the derivative of a critic, whose layers are on two other workers, is part of the loss.

    python examples/gradient_penalty.py

The critic of a Wasserstein GAN (https://arxiv.org/abs/1704.00028) shall have a gradient of length 1 between
real and false samples. So each step differentiates the critic with respect to its input, records that pass
(``create_graph``), and differentiates the loss that it is a part of. One process repeats the training.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn, optim

from zmqgrad import rpc
from zmqgrad.autograd import backward, context, grad
from zmqgrad.optim import DistributedOptimizer

STEPS, BATCH, WIDTH, RATE = 20, 64, 32, 0.05


@functools.cache
def layers(half: int) -> nn.Module:
    """Return a half of the critic. In the training, each is on a worker of its own."""
    torch.manual_seed(half)
    shape = (2, WIDTH) if half == 1 else (WIDTH, 1)
    linear = nn.Linear(*shape, dtype=torch.float64)
    return nn.Sequential(linear, nn.Tanh()) if half == 1 else linear


def run_half(half: int, x: Tensor) -> Tensor:
    """Run a half of the critic, on the worker that holds it."""
    y: Tensor = layers(half)(x)
    return y


def parameters(half: int) -> list[rpc.RRef[Tensor]]:
    """Return references to the parameters of a half, on the worker that holds it."""
    return [rpc.RRef(p) for p in layers(half).parameters()]


def over_workers(x: Tensor) -> Tensor:
    """Run the critic, where its halves are."""
    y: Tensor = rpc.rpc_sync("half2", run_half, (2, rpc.rpc_sync("half1", run_half, (1, x))))
    return y


def here(x: Tensor) -> Tensor:
    """Run the critic in this process."""
    return run_half(2, run_half(1, x))


def loss_of(critic: Callable[[Tensor], Tensor], step: int, derivative: Callable[..., Tensor]) -> Tensor:
    """Return the loss of a step; ``derivative`` differentiates its first argument by the second."""
    torch.manual_seed(100 + step)
    real = torch.randn(BATCH, 2, dtype=torch.float64) * 0.3 + 1
    false = torch.randn(BATCH, 2, dtype=torch.float64)
    share = torch.rand(BATCH, 1, dtype=torch.float64)
    between = (share * real + (1 - share) * false).requires_grad_()
    slope = derivative(critic(between).sum(), between)
    penalty = (slope.norm(dim=1) - 1).pow(2).mean()
    return critic(false).mean() - critic(real).mean() + 10 * penalty


def train_over_workers() -> list[float]:
    """Train the critic on its workers. Returns the losses."""
    params = [p for half in (1, 2) for p in rpc.rpc_sync(f"half{half}", parameters, (half,))]
    optimizer = DistributedOptimizer(optim.SGD, params, lr=RATE)
    losses = []
    for step in range(STEPS):
        with context() as context_id:

            def derivative(y: Tensor, x: Tensor, context_id: int = context_id) -> Tensor:
                (slope,) = grad(context_id, y, x, create_graph=True)
                assert slope is not None
                return slope

            loss = loss_of(over_workers, step, derivative)
            backward(context_id, [loss])
            optimizer.step(context_id)
            losses.append(loss.item())
    return losses


def train_here() -> list[float]:
    """Train the critic in this process. Returns the losses."""

    def derivative(y: Tensor, x: Tensor) -> Tensor:
        return torch.autograd.grad(y, x, create_graph=True)[0]

    optimizer = optim.SGD([*layers(1).parameters(), *layers(2).parameters()], lr=RATE)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(here, step, derivative)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run_worker(rank: int) -> None:
    """Train on worker 0; the others hold the halves of the critic."""
    rpc.init_rpc(f"half{rank}" if rank else "trainer", rank=rank, world_size=3)
    if rank == 0:
        losses = train_over_workers()
        gap = max(abs(a - b) for a, b in zip(losses, train_here(), strict=True))
        print(f"the loss went from {losses[0]:.4f} to {losses[-1]:.4f}")
        print(f"largest difference to one process: {gap:.1e}", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run_worker, nprocs=3)
