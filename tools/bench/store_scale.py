"""Very many clients of one store: connecting, a barrier, and everybody reading everybody's address.

    python -m tools.bench.store_scale [-n CLIENTS] [-p PROCESSES] [--sides zmqgrad,torch]

Clients are threads, each with a store of its own, spread over a few processes; one more process serves.
Says for each side how long each step took until the last client was through, and what it cost in memory.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tools.bench.sides import take

STEPS = ("connect", "barrier", "publish", "read all")
LIMIT = timedelta(seconds=300)
ADDRESS_BYTES = 64


def resident() -> float:
    """MiB of memory that this process holds."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def serve(side: str, pipe: Connection) -> None:
    """A store's server; says its port, and at the end how much memory it has come to hold."""
    store = take(side).store.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    before = resident()
    pipe.send(store.port)
    pipe.recv()
    pipe.send(resident() - before)


def ask(side: str, port: int, ranks: range, clients: int, pipe: Connection) -> None:
    """``ranks`` of the clients, a thread each: takes each step when told, and says when all were through."""
    make = take(side).store.TCPStore
    stores: dict[int, Any] = {}

    def connect(rank: int) -> None:
        stores[rank] = make("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=LIMIT)

    def barrier(rank: int) -> None:
        if stores[rank].add("arrived", 1) == clients:
            stores[rank].set("all arrived", b"")
        stores[rank].wait(["all arrived"], LIMIT)

    def publish(rank: int) -> None:
        stores[rank].set(f"address{rank}", str(rank).encode().ljust(ADDRESS_BYTES))

    # A step of its own: torch's multi_get waits without letting go of the interpreter.
    def read_all(rank: int) -> None:
        found = stores[rank].multi_get([f"address{n}" for n in range(clients)])
        assert [int(address) for address in found] == list(range(clients))

    before = resident()
    for step in (connect, barrier, publish, read_all):
        pipe.send("ready")
        pipe.recv()
        together(step, ranks)
        pipe.send(time.monotonic())
    pipe.send(resident() - before)
    pipe.recv()


def together(step: Callable[[int], None], ranks: range) -> None:
    """Let each of ``ranks`` take ``step`` in a thread of its own."""
    failed: list[BaseException] = []

    def take_it(rank: int) -> None:
        try:
            step(rank)
        except BaseException as e:
            failed.append(e)

    threading.stack_size(1 << 20)
    threads = [threading.Thread(target=take_it, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def measure(side: str, clients: int, processes: int) -> dict[str, float]:
    """Seconds of each step, and MiB of the server and of a client."""
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(side, there), daemon=True)
    server.start()
    port = here.recv()
    pipes, workers = [], []
    for n in range(processes):
        mine, its = context.Pipe()
        ranks = range(n, clients, processes)
        workers.append(context.Process(target=ask, args=(side, port, ranks, clients, its), daemon=True))
        workers[-1].start()
        its.close()  # so that a worker that dies is noticed
        pipes.append(mine)
    found: dict[str, float] = {}
    for step in STEPS:
        for pipe in pipes:
            assert pipe.recv() == "ready"
        begun = time.monotonic()
        for pipe in pipes:
            pipe.send("go")
        found[step] = max(pipe.recv() for pipe in pipes) - begun
    found["client"] = sum(pipe.recv() for pipe in pipes) / clients
    here.send("end")
    found["server"] = here.recv()
    for pipe in pipes:
        pipe.send("end")
    for process in (*workers, server):
        process.terminate()
        process.join()
    return found


def main() -> None:
    """Measure each side once, in turn, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("-n", "--clients", type=int, default=1000)
    parser.add_argument("-p", "--processes", type=int, default=4)
    parser.add_argument("--sides", default="zmqgrad,torch")
    options = parser.parse_args()
    print(f"{options.clients} clients, as threads of {options.processes} processes, of one server")
    print(f"{'':10}" + "".join(f"{step:>12}" for step in STEPS) + f"{'server':>14}{'a client':>14}")
    for side in options.sides.split(","):
        found = measure(side, options.clients, options.processes)
        steps = "".join(f"{found[step]:10.2f} s" for step in STEPS)
        print(f"{side:10}{steps}{found['server']:10.1f} MiB{found['client'] * 1024:10.0f} KiB", flush=True)


if __name__ == "__main__":
    main()
