"""Two workers that lock themselves and then call each other: a distributed deadlock.

    zmqgrad run --nproc-per-node 3 --trace DIR deadlock.py

``add`` needs the lock of the worker that it runs on, which is held by the thread that waits for the other
worker. The third worker is not part of it, and only waits for one of them.
"""

from __future__ import annotations

import os
import threading

import torch

from zmqgrad import rpc

lock = threading.Lock()
total = torch.zeros(1)


def add(amount: torch.Tensor) -> torch.Tensor:
    """Adds ``amount`` to the total of this worker."""
    with lock:
        return total.add_(amount)


def move(to: str, amount: torch.Tensor) -> None:
    """Moves ``amount`` from this worker's total to that of worker ``to``."""
    with lock:
        total.sub_(amount)
        rpc.barrier(["worker0", "worker1"])  # so that it happens each time: both hold their locks
        rpc.rpc_sync(to, add, args=(amount,))


def main() -> None:
    """Moves 1 from each of the first two workers to the other."""
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rpc_backend_options=rpc.RpcBackendOptions(rpc_timeout=TIMEOUT_SECONDS))
    try:
        if rank < 2:
            move(f"worker{1 - rank}", torch.ones(1))
        else:
            rpc.rpc_sync("worker0", add, args=(torch.ones(1),))
    finally:
        rpc.shutdown(graceful=False)


TIMEOUT_SECONDS = float(os.environ.get("CASE_TIMEOUT", "60"))

if __name__ == "__main__":
    main()
