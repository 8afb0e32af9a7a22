"""A trainer that sends the same 32 MiB table to a worker with each of its calls.

zmqgrad run --nproc-per-node 2 --trace DIR repeated_send.py
"""

from __future__ import annotations

import os

import torch

from zmqgrad import rpc

STEPS = 40


def score(table: torch.Tensor, index: int) -> float:
    """One row of ``table``, summed."""
    return float(table[index].sum())


def main() -> None:
    """Asks worker 1 for the score of one row after the other."""
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}")
    if rank == 0:
        table = torch.ones(8192, 1024)
        for step in range(STEPS):
            rpc.rpc_sync("worker1", score, args=(table, step))
    rpc.shutdown()


if __name__ == "__main__":
    main()
