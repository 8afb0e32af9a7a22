"""Two workers that call each other, for ``zmqgrad doctor``.

Started in two processes as ``python -m zmqgrad.rpc.selftest NAME``, with the variables of a launcher. Rank 0
prints one line of JSON with what it found.
"""

from __future__ import annotations

import json
import sys

import torch

from zmqgrad import rpc
from zmqgrad.rpc.options import RpcBackendOptions
from zmqgrad.runtime.clock import MONOTONIC

CALLS = 200
MEGABYTES = 64
TIMEOUT = 30.0


def main(name: str) -> None:
    """Join as one of two, measure as rank 0, and leave."""
    torch.set_num_threads(1)
    rpc.init_rpc(name, rpc_backend_options=RpcBackendOptions(rpc_timeout=TIMEOUT, join_timeout=TIMEOUT))
    report = measure() if rpc.get_worker_info().id == 0 else None
    rpc.shutdown(timeout=TIMEOUT)
    if report is not None:
        print(f"\n{json.dumps(report)}")


def measure() -> dict[str, object]:
    """Time of an empty call (median), of a large tensor there and back, and which way that went."""
    times = []
    for _ in range(CALLS):
        begun = MONOTONIC.now()
        rpc.rpc_sync(1, len, args=("",))
        times.append(MONOTONIC.now() - begun)
    tensor = torch.ones(MEGABYTES << 18)
    best = float("inf")
    for _ in range(4):
        begun = MONOTONIC.now()
        there_and_back = rpc.rpc_sync(1, torch.neg, args=(tensor,))
        best = min(best, MONOTONIC.now() - begun)
    right = bool((there_and_back == -1).all())
    sent = rpc.get_stats()["sent_by_path"]
    return {
        "call_us": sorted(times)[CALLS // 2] * 1e6,
        "tensor_ms": best * 1e3,
        "tensor_right": right,
        "path": max(sent, key=sent.get),
    }


if __name__ == "__main__":
    main(sys.argv[1])
