"""A loss that forgets a term, in each of several steps: a remote result goes unused whole, or in part.

zmqgrad run --nproc-per-node 3 --trace DIR unused_result.py [part]
"""

from __future__ import annotations

import os
import sys

import torch

from zmqgrad import autograd, rpc

STEPS = 10


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The features of ``x``, and how much they should be punished."""
    return x * 2, (x * x).mean()


def penalty(x: torch.Tensor) -> torch.Tensor:
    """What should be added to the loss."""
    return (x * x).mean()


def loss_of(x: torch.Tensor) -> torch.Tensor:
    """The loss, without the penalty."""
    features, forgotten = rpc.rpc_sync("worker1", encode, args=(x,))
    if "part" not in sys.argv:
        features = features.sum() + forgotten
        rpc.rpc_sync("worker2", penalty, args=(x,))
    return features.sum()


def main() -> None:
    """Trains from worker 0."""
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}")
    if rank == 0:
        weight = torch.ones(64, requires_grad=True)
        for _ in range(STEPS):
            with autograd.context() as context:
                autograd.backward(context, [loss_of(weight)])
    rpc.shutdown()


if __name__ == "__main__":
    main()
