"""Hessian-vector products of a model on two workers: the sharpest direction of its loss.

    python examples/hessian_vector_product.py

The inputs of ``grad`` are references to the parameters, wherever they are. Its result is on the calling
worker and, with ``create_graph``, a part of the distributed graph; so the derivative of the gradient in
direction v is one more pass: H v. Power iteration with that gives the largest eigenvalue of the Hessian.
One process repeats it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from zmqgrad import rpc
from zmqgrad.autograd import context, grad

ITERATIONS, BATCH, WIDTH = 12, 32, 8


@functools.cache
def stage(number: int) -> nn.Module:
    """Return a stage of the model. On two workers, each holds one."""
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh())


def run_stage(number: int, x: Tensor) -> Tensor:
    """Run a stage, on the worker that holds it."""
    y: Tensor = stage(number)(x)
    return y


def parameters(number: int) -> list[rpc.RRef[Tensor]]:
    """Return references to the parameters of a stage, on the worker that holds it."""
    return [rpc.RRef(p) for p in stage(number).parameters()]


def batch() -> Tensor:
    """Return what the model is applied to."""
    return torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def largest_eigenvalue(
    gradients: Sequence[Tensor], product: Callable[[list[Tensor]], Sequence[Tensor]]
) -> float:
    """Return the largest eigenvalue, by power iteration; ``product`` multiplies a vector by the Hessian."""
    random = torch.Generator().manual_seed(8)
    v = [torch.randn(g.shape, generator=random, dtype=g.dtype) for g in gradients]
    found = 0.0
    for _ in range(ITERATIONS):
        length = torch.cat([part.flatten() for part in v]).norm()
        v = [part / length for part in v]
        hv = product(v)
        found = float(sum((a * b).sum() for a, b in zip(v, hv, strict=True)))
        v = list(hv)
    return found


def over_workers() -> float:
    """Return the largest eigenvalue of the model whose stages are on two workers."""
    params = [p for number in (0, 1) for p in rpc.rpc_sync(f"worker{number}", parameters, (number,))]
    with context() as context_id:
        y = rpc.rpc_sync("worker1", run_stage, (1, run_stage(0, batch())))
        gradients = grad(context_id, y.pow(2).mean(), params, create_graph=True)
        known = [g for g in gradients if g is not None]

        def product(v: list[Tensor]) -> list[Tensor]:
            found = grad(context_id, known, params, v, retain_graph=True)
            return [g for g in found if g is not None]

        return largest_eigenvalue(known, product)


def here() -> float:
    """Return the largest eigenvalue of the same model in this process."""
    params = [*stage(0).parameters(), *stage(1).parameters()]
    loss = run_stage(1, run_stage(0, batch())).pow(2).mean()
    gradients = torch.autograd.grad(loss, params, create_graph=True)
    return largest_eigenvalue(
        gradients, lambda v: torch.autograd.grad(gradients, params, v, retain_graph=True)
    )


def run_worker(rank: int) -> None:
    """Compute on worker 0, which holds a stage as well."""
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        found, expected = over_workers(), here()
        print(f"largest eigenvalue of the Hessian: {found:.6f}")
        print(f"largest difference to one process: {abs(found - expected):.1e}", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run_worker, nprocs=2)
