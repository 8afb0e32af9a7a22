"""A first program: two workers, each of which trains two tensors that live on the other.

    python examples/dist_autograd_simple.py
    python examples/dist_autograd_simple.py --backend torch    # the same over torch's own RPC

Only the imports differ from a program for torch.distributed.rpc.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.multiprocessing as mp
from torch import Tensor, optim

parser = argparse.ArgumentParser(description="A first program for RPC and distributed autograd.")
parser.add_argument("--backend", choices=("zmqgrad", "torch"), default="zmqgrad", help="whose RPC to use")
OPTIONS = parser.parse_args()

if OPTIONS.backend == "torch":
    import torch.distributed.autograd as dist_autograd
    from torch.distributed import rpc
    from torch.distributed.optim import DistributedOptimizer
else:
    import zmqgrad.autograd as dist_autograd
    from zmqgrad import rpc
    from zmqgrad.optim import DistributedOptimizer

WORLD_SIZE = 2


def random_tensor() -> Tensor:
    """Return a new leaf tensor, on the worker where this runs."""
    return torch.rand((3, 3), requires_grad=True)


def run_worker(rank: int, world_size: int) -> None:
    """Use two tensors of the other worker: forward, backward and one step of SGD."""
    other = f"worker{(rank + 1) % world_size}"
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)

    with dist_autograd.context() as context_id:
        # Forward: two tensors on the other worker, added here.
        rref1 = rpc.remote(other, random_tensor)
        rref2 = rpc.remote(other, random_tensor)
        loss = (rref1.to_here() + rref2.to_here()).sum()

        # Backward: the gradients stay on the other worker, in this context.
        dist_autograd.backward(context_id, [loss])

        # One step of the optimizer, on the other worker.
        optimizer = DistributedOptimizer(optim.SGD, [rref1, rref2], lr=0.05)
        optimizer.step(context_id)

    after = (rref1.to_here() + rref2.to_here()).sum()
    print(f"worker{rank}: the sum went from {loss.item():.4f} to {after.item():.4f}", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run_worker, args=(WORLD_SIZE,), nprocs=WORLD_SIZE)
