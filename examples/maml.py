"""MAML over four workers: the meta-gradient goes through steps of SGD that the workers take.

    python examples/maml.py

Each worker has tasks of its own: to learn a sine wave from ten points (https://arxiv.org/abs/1703.03400). It
gets the common parameters, adapts them by steps of gradient descent, and returns the loss after that. The
gradients of these steps are recorded (``create_graph``), so the backward pass from all losses differentiates
them once more, and leads back to the common parameters. One process repeats the training.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.multiprocessing as mp
from torch import Tensor, optim

from zmqgrad import rpc
from zmqgrad.autograd import backward, context, get_gradients, grad

WORKERS, ROUNDS, STEPS, RATE, META_RATE = 4, 15, 2, 0.05, 0.01

Gradients = Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor | None]]
"""Differentiates a loss by parameters, so that the result can be differentiated again."""


def start() -> list[Tensor]:
    """Return the common parameters before the training."""
    random = torch.Generator().manual_seed(0)
    shapes = ((1, 24), (24,), (24, 1))
    return [torch.randn(s, generator=random, dtype=torch.float64).mul_(0.5).requires_grad_() for s in shapes]


def points(task: int, kind: int) -> tuple[Tensor, Tensor]:
    """Return points of the wave of a task: ``kind`` 0 to learn from, 1 for the test."""
    random = torch.Generator().manual_seed(1000 * kind + task)
    x = torch.rand(10, 1, generator=random, dtype=torch.float64) * 6 - 3
    return x, torch.sin(x + math.pi * (task % 7) / 7)


def loss_of(params: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Return the squared error of the network."""
    weight, bias, out = params
    return (torch.tanh(x @ weight + bias) @ out - y).pow(2).mean()


def adapt(params: Sequence[Tensor], task: int, gradients: Gradients) -> Tensor:
    """Return the loss on a task after steps of gradient descent on it."""
    for _ in range(STEPS):
        found = gradients(loss_of(params, *points(task, 0)), params)
        params = [p - RATE * g for p, g in zip(params, found, strict=True) if g is not None]
    return loss_of(params, *points(task, 1))


def adapt_there(context_id: int, params: Sequence[Tensor], task: int) -> Tensor:
    """As :func:`adapt`, on the worker of the task, in the context of the caller."""
    return adapt(params, task, lambda loss, p: grad(context_id, loss, p, create_graph=True))


def train(meta_step: Callable[[list[Tensor], int], float]) -> tuple[list[float], list[Tensor]]:
    """Train the common parameters. Returns the losses, and the parameters.

    Args:
        meta_step: sets ``.grad`` of the parameters in a round, and returns the loss.
    """
    params = start()
    optimizer = optim.Adam(params, lr=META_RATE)
    losses = []
    for number in range(ROUNDS):
        losses.append(meta_step(params, number))
        optimizer.step()
    return losses, params


def step_over_workers(params: list[Tensor], number: int) -> float:
    """Let all workers adapt the parameters at the same time."""
    with context() as context_id:
        answers = [
            rpc.rpc_async(f"worker{i}", adapt_there, (context_id, params, WORKERS * number + i))
            for i in range(WORKERS)
        ]
        loss = torch.stack([answer.wait() for answer in answers]).mean()
        backward(context_id, [loss])
        found = get_gradients(context_id)
    for p in params:
        p.grad = found[p]
    return loss.item()


def step_here(params: list[Tensor], number: int) -> float:
    """Do the same in this process."""
    gradients = partial(torch.autograd.grad, create_graph=True)
    losses = [adapt(params, WORKERS * number + i, gradients) for i in range(WORKERS)]
    loss = torch.stack(losses).mean()
    for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
        p.grad = g
    return loss.item()


def run_worker(rank: int) -> None:
    """Train on worker 0, which has tasks as well."""
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORKERS)
    if rank == 0:
        losses, params = train(step_over_workers)
        expected_losses, expected = train(step_here)
        gap = max(float((a - b).detach().abs().max()) for a, b in zip(params, expected, strict=True))
        gap = max(gap, *(abs(a - b) for a, b in zip(losses, expected_losses, strict=True)))
        print(f"the loss after adaptation went from {losses[0]:.4f} to {losses[-1]:.4f}")
        print(f"largest difference to one process: {gap:.1e}", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run_worker, nprocs=WORKERS)
