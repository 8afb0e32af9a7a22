"""Two workers, each adding two tensors that live on the other, and improving them there.

    python examples/dist_autograd_simple.py

What a first program for torch.distributed.rpc looks like; only its imports are zmqgrad's.
"""

from __future__ import annotations

import os

import torch
import torch.multiprocessing as mp
from torch import Tensor, optim

import zmqgrad.autograd as dist_autograd
from zmqgrad import rpc
from zmqgrad.optim import DistributedOptimizer

WORLD_SIZE = 2


def random_tensor() -> Tensor:
    """A leaf of the graph, made where this runs."""
    return torch.rand((3, 3), requires_grad=True)


def run_worker(rank: int, world_size: int) -> None:
    """Use the next worker's tensors, forward, backward and one step of SGD."""
    other = f"worker{(rank + 1) % world_size}"
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)

    with dist_autograd.context() as context_id:
        # Forward: two tensors on the other worker, and their sum here.
        rref1 = rpc.remote(other, random_tensor)
        rref2 = rpc.remote(other, random_tensor)
        loss = (rref1.to_here() + rref2.to_here()).sum()

        # Backward: the gradients stay with the other worker, filed under this context.
        dist_autograd.backward(context_id, [loss])

        # One step, over there.
        optimizer = DistributedOptimizer(optim.SGD, [rref1, rref2], lr=0.05)
        optimizer.step(context_id)

    after = (rref1.to_here() + rref2.to_here()).sum()
    print(f"worker{rank}: the sum went from {loss.item():.4f} to {after.item():.4f}", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run_worker, args=(WORLD_SIZE,), nprocs=WORLD_SIZE)
