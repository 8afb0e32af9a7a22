"""Very many clients of one store: connecting, a barrier, reading everybody's address, and watching a key.

    python -m tools.bench.store_scale [-n CLIENTS] [-p PROCESSES] [--sides zmqgrad,torch] [--limit SECONDS]

Clients are threads, each with a store of its own, spread over a few processes; one more process serves.
Says for each side how long each step took until the last client was through, and what it cost in memory.
A side that does not get through all steps within the limit is stopped, and it is said how far it came.

Torch's client looks up the name of each address that it connects from. Where no name server answers that
takes ten seconds for each, so look-ups are given up after one here (``RES_OPTIONS``).
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tools.bench.sides import store_of

STEPS = ("connect", "barrier", "publish", "read all", "watch", "notify")
"""The last two are not torch's."""

LIMIT_SECONDS = 120.0
PATIENCE = timedelta(seconds=300)
"""Of the stores themselves."""

ADDRESS_BYTES = 64


def resident() -> float:
    """MiB of memory that this process holds."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def steps_of(side: str) -> tuple[str, ...]:
    """What that side can do."""
    return STEPS if hasattr(store_of(side).TCPStore, "watch_key") else STEPS[:-2]


def serve(side: str, pipe: Connection) -> None:
    """A store's server; says its port, and at the end how much memory it has come to hold."""
    store = store_of(side).TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    before = resident()
    pipe.send(store.port)
    pipe.recv()
    pipe.send(resident() - before)


def ask(side: str, port: int, ranks: range, clients: int, pipe: Connection, through: Any) -> None:
    """``ranks`` of the clients, a thread each: takes each step when told, and says when all were through.

    ``through`` counts the clients, of all processes, that are through the step.
    """
    make = store_of(side).TCPStore
    stores: dict[int, Any] = {}

    def connect(rank: int) -> None:
        stores[rank] = make("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=PATIENCE)

    def barrier(rank: int) -> None:
        if stores[rank].add("arrived", 1) == clients:
            stores[rank].set("all arrived", b"")
        stores[rank].wait(["all arrived"], PATIENCE)

    def publish(rank: int) -> None:
        stores[rank].set(f"address{rank}", str(rank).encode().ljust(ADDRESS_BYTES))

    # A step of its own: torch's multi_get waits without letting go of the interpreter.
    def read_all(rank: int) -> None:
        found = stores[rank].multi_get([f"address{n}" for n in range(clients)])
        assert [int(address) for address in found] == list(range(clients))

    notified = {rank: threading.Event() for rank in ranks}

    def watch(rank: int) -> None:
        stores[rank].watch_key("watched", lambda old, new: notified[rank].set())

    def notify(rank: int) -> None:
        if rank == 0:
            stores[rank].set("watched", b"changed")
        if not notified[rank].wait(PATIENCE.total_seconds()):
            raise TimeoutError(f"client {rank} was not notified")

    before = resident()
    for step in (connect, barrier, publish, read_all, watch, notify)[: len(steps_of(side))]:
        pipe.send("ready")
        pipe.recv()
        together(step, ranks, through)
        pipe.send(time.monotonic())
    pipe.send(resident() - before)
    pipe.recv()


def together(step: Callable[[int], None], ranks: range, through: Any) -> None:
    """Let each of ``ranks`` take ``step`` in a thread of its own."""
    failed: list[BaseException] = []

    def take_it(rank: int) -> None:
        try:
            step(rank)
            with through.get_lock():
                through.value += 1
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


class LateError(Exception):
    """The limit was reached before all were through."""


def measure(side: str, clients: int, processes: int, limit: float) -> dict[str, str]:
    """Of each step the time; MiB of the server and KiB of a client. What was not reached is left out."""
    deadline = time.monotonic() + limit

    def hear(pipe: Connection) -> Any:
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            raise LateError
        return pipe.recv()

    context = mp.get_context("spawn")
    through = context.Value("i", 0)
    here, there = context.Pipe()
    started = [context.Process(target=serve, args=(side, there), daemon=True)]
    started[0].start()
    pipes: list[Connection] = []
    found: dict[str, str] = {}
    step = "start"
    try:
        port = hear(here)
        for n in range(processes):
            mine, its = context.Pipe()
            arguments = (side, port, range(n, clients, processes), clients, its, through)
            started.append(context.Process(target=ask, args=arguments, daemon=True))
            started[-1].start()
            its.close()  # so that a worker that dies is noticed
            pipes.append(mine)
        for step in steps_of(side):
            for pipe in pipes:
                assert hear(pipe) == "ready"
            through.value = 0
            begun = time.monotonic()
            for pipe in pipes:
                pipe.send("go")
            found[step] = f"{max(hear(pipe) for pipe in pipes) - begun:.2f} s"
        found["a client"] = f"{sum(hear(pipe) for pipe in pipes) / clients * 1024:.0f} KiB"
        here.send("end")
        found["server"] = f"{hear(here):.1f} MiB"
    except LateError:
        found[step] = f"{through.value} through"
    finally:
        for process in started:
            process.kill()  # a thread that waits in C hears nothing else
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
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds for each side")
    options = parser.parse_args()
    os.environ.setdefault("RES_OPTIONS", "attempts:1 timeout:1")
    columns = (*STEPS, "server", "a client")
    print(f"{options.clients} clients, as threads of {options.processes} processes, of one server")
    print(f"{'':10}" + "".join(f"{column:>14}" for column in columns))
    for side in options.sides.split(","):
        found = measure(side, options.clients, options.processes, options.limit)
        print(f"{side:10}" + "".join(f"{found.get(column, '-'):>14}" for column in columns), flush=True)


if __name__ == "__main__":
    main()
