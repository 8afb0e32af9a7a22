"""Data parallel training in which one worker is slower than the others, so all wait for it in each step.

zmqgrad run --nproc-per-node 4 --trace DIR straggler.py
"""

from __future__ import annotations

import os
import time

import torch

from zmqgrad import autograd, rpc

STEPS = 15
SLOW = "worker2"


def forward(x: torch.Tensor) -> torch.Tensor:
    """A part of the model; on one worker it takes five times as long."""
    time.sleep(0.05 if rpc.get_worker_info().name == SLOW else 0.01)
    return x * 2


def main() -> None:
    """Trains from worker 0."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"worker{rank}")
    if rank == 0:
        weight = torch.ones(64, requires_grad=True)
        for _ in range(STEPS):
            with autograd.context() as context:
                parts = [
                    rpc.rpc_async(f"worker{peer}", forward, args=(weight,)) for peer in range(1, world_size)
                ]
                autograd.backward(context, [sum(part.wait().sum() for part in parts)])
    rpc.shutdown()


if __name__ == "__main__":
    main()
