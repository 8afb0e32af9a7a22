"""A parameter server that all trainers wait for: its one lock lets them in one by one.

zmqgrad run --nproc-per-node 5 --trace DIR hot_server.py
"""

from __future__ import annotations

import os
import threading
import time

import torch

from zmqgrad import rpc

STEPS = 20
lock = threading.Lock()
parameters = torch.zeros(64)


def update(gradient: torch.Tensor) -> torch.Tensor:
    """Applies a gradient, and returns the parameters."""
    with lock:
        time.sleep(0.005)
        return parameters.sub_(gradient, alpha=0.1)


def main() -> None:
    """Worker 0 serves; the others train."""
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}")
    if rank:
        for _ in range(STEPS):
            time.sleep(0.002)
            rpc.rpc_sync("worker0", update, args=(torch.ones(64),))
    rpc.shutdown()


if __name__ == "__main__":
    main()
