"""The job that is attacked: two workers that call each other and watch a key, until their input ends.

    python -m tools.attacks.victim

Rank 0 prints one line of JSON when all is set up, and one at the end.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from datetime import timedelta

import torch
import torch.multiprocessing as mp

from zmqgrad import rpc
from zmqgrad.store import TCPStore

STEP_SECONDS = 0.01


def main() -> None:
    port = int(sys.argv[1])
    mp.spawn(run, args=(port, os.getpid()), nprocs=2)


def run(rank: int, port: int, launcher: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))
        store.set("password", "of the job")
        store.watch_key("password", lambda *_: None)
        peer = rpc.rpc_sync("worker1", os.getpid)
        print(json.dumps({"pids": [os.getpid(), peer, launcher], "store": store.port}), flush=True)
        calls, lost = call_until(closed())
        print(json.dumps({"calls": calls, "lost": lost}), flush=True)
        store.close()
    rpc.shutdown()


def closed() -> threading.Event:
    """An event that is set when stdin of the launcher ends, which a file tells that it removes."""
    ended = threading.Event()

    def wait() -> None:
        while not os.path.exists(os.environ["ATTACKS_STOP"]):
            ended.wait(STEP_SECONDS)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    return ended


def call_until(ended: threading.Event) -> tuple[int, int]:
    calls = lost = 0
    tensor = torch.ones(1000)
    while not ended.wait(STEP_SECONDS):
        calls += 1
        try:
            lost += not torch.equal(rpc.rpc_sync("worker1", torch.add, args=(tensor, 1)), tensor + 1)
        except Exception as e:
            print(f"call {calls} failed: {e}", file=sys.stderr)
            lost += 1
    return calls, lost


if __name__ == "__main__":
    main()
