"""The job that is attacked: two workers that call each other and watch a key, until their input ends.

    python -m tools.attacks.victim PORT DIRECTORY

Rank 0 prints one line of JSON when all is set up, and one at the end, when there is a file ``stop`` in the
directory. It counts its calls in ``progress``.
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from io import FileIO

import torch
import torch.multiprocessing as mp

from zmqgrad import rpc
from zmqgrad.store import TCPStore
from zmqgrad.transport import tap

STEP_SECONDS = 0.01
BULK_EVERY = 20
"""Every so many calls, one has a tensor of a megabyte, which between hosts has a connection of its own."""

CONNECT_EVERY = 5
"""Every so many calls, one is made by a new thread, with connections of its own, beside a new store."""


def main() -> None:
    arguments = (int(sys.argv[1]), sys.argv[2], os.getpid())
    mp.start_processes(run, arguments, nprocs=2, start_method="fork")  # torch is imported once


def run(rank: int, port: int, directory: str, launcher: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))
        store.set("password", "of the job")
        store.watch_key("password", lambda *_: None)
        peer = rpc.rpc_sync("worker1", os.getpid)
        call(BULK_EVERY)  # so that all connections are open
        roles = {**addresses(), **rpc.rpc_sync("worker1", addresses)}
        with open(f"{directory}/progress", "wb", buffering=0) as progress:
            print(json.dumps({"pids": [os.getpid(), peer, launcher], "roles": roles}), flush=True)
            calls, lost = call_until(closed(directory), progress, store.port)
        print(json.dumps({"calls": calls, "lost": lost}), flush=True)
        store.close()
    rpc.shutdown()


def addresses() -> dict[int, str]:
    """What listens in this process at tcp ports, as far as it is known by name."""
    found = {}
    for traced in list(tap._traced):
        shown = traced.identity()
        for scheme, port in re.findall(r"(tcp|heartbeat)://[^ ,/]*:(\d+)", shown.address):
            kind = {tap.WORKER: "mailbox", tap.STORE_SERVER: "store"}.get(shown.role)
            if kind is not None:
                kind = "heartbeats" if scheme == "heartbeat" else kind
                found[int(port)] = "notifications" if shown.name == "publisher" else kind
    return found


def closed(directory: str) -> threading.Event:
    """An event that is set when the launcher makes the file ``stop``."""
    ended = threading.Event()

    def wait() -> None:
        while not os.path.exists(f"{directory}/stop"):
            ended.wait(STEP_SECONDS)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    return ended


def call_until(ended: threading.Event, progress: FileIO, port: int) -> tuple[int, int]:
    calls = lost = 0
    while not ended.wait(STEP_SECONDS):
        calls += 1
        try:
            lost += not (call_connecting(calls, port) if calls % CONNECT_EVERY == 0 else call(calls))
        except Exception as e:
            print(f"call {calls} failed: {e}", file=sys.stderr)
            lost += 1
        os.pwrite(progress.fileno(), struct.pack("=QQ", calls, lost), 0)
    return calls, lost


def call_connecting(number: int, port: int) -> bool:
    """The same as :func:`call`, by new connections."""
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(call, number)
        with TCPStore("127.0.0.1", port, timeout=timedelta(seconds=30)) as store:
            return called.result() and store.get("password") == b"of the job"


def call(number: int) -> bool:
    """Returns whether the result is right."""
    tensor = torch.full((1000 if number % BULK_EVERY else 1 << 18,), float(number))
    return torch.equal(rpc.rpc_sync("worker1", torch.add, args=(tensor, 1)), tensor + 1)


if __name__ == "__main__":
    main()
