"""A model that computes what its loss does not use: in FAST mode, the backward pass cannot finish.

zmqgrad run --nproc-per-node 3 --trace DIR unused_send.py [fast]
"""

from __future__ import annotations

import os
import sys

import torch

from zmqgrad import autograd, rpc

log: list[torch.Tensor] = []


def encode(x: torch.Tensor) -> torch.Tensor:
    """The features of ``x``; their mean is only logged."""
    log.append(rpc.rpc_sync("worker2", mean, args=(x,)))
    return x * 2


def mean(x: torch.Tensor) -> torch.Tensor:
    """What no loss depends on."""
    return x.mean()


def main() -> None:
    """Runs one backward pass from worker 0."""
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}")
    try:
        if rank == 0:
            with autograd.context() as context:
                features = rpc.rpc_sync("worker1", encode, args=(torch.ones(8, requires_grad=True),))
                autograd.backward(context, [features.sum()], mode="fast" if "fast" in sys.argv else "auto")
    finally:
        rpc.shutdown()


if __name__ == "__main__":
    main()
