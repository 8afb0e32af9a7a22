"""Many nodes of one rendezvous, a process each, without torch; and the traffic of their keep-alives.

    python -m tools.bench.elastic_nodes 64 15

Prints a line of JSON: seconds until all know the round, and messages and bytes per second at the store
afterwards. Requests and replies are counted once each, a notification once for each node that watches.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
from collections import Counter
from multiprocessing.synchronize import Barrier, Event
from typing import Any

from zmqgrad.elastic import RendezvousHandler, RendezvousSettings, StoreBackend
from zmqgrad.store import StoreServer, TCPStore
from zmqgrad.transport.query import publisher, server

LIMIT_SECONDS = 120.0

_context = multiprocessing.get_context("fork")  # a fresh interpreter each would take a minute of imports


def measure(nodes: int, seconds: float) -> dict[str, float]:
    """Run this module in a process of its own, which has not loaded torch."""
    command = [sys.executable, "-m", "tools.bench.elastic_nodes", str(nodes), str(seconds)]
    limit = 2 * LIMIT_SECONDS + seconds
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def take_part(port: Any, nodes: int, barrier: Barrier, over: Event, times: Any) -> None:
    """Runs in each process: joins, and stays until ``over``."""
    barrier.wait(LIMIT_SECONDS)
    store = TCPStore("127.0.0.1", port.value, timeout=LIMIT_SECONDS, wait_for_workers=False)
    settings = RendezvousSettings("bench", nodes, nodes)
    backend = StoreBackend(store, settings.run_id)
    handler = RendezvousHandler(settings, backend, store)
    barrier.wait(LIMIT_SECONDS)
    began = time.monotonic()
    rank = handler.next_rendezvous().rank
    times[2 * rank : 2 * rank + 2] = began, time.monotonic()
    barrier.wait(LIMIT_SECONDS)
    over.wait(10 * LIMIT_SECONDS)
    handler.stop()
    backend.close()
    store.close()


class Traffic:
    """Counts the messages of the stores that this process serves. Patches the codec of the server."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._count(server, "decode_query", "requests", lambda args, result: args[0])
        self._count(server, "encode", "replies", lambda args, result: result)
        self._count(publisher, "encode", "notifications", lambda args, result: result)

    def _count(self, module: Any, function: str, name: str, body: Any) -> None:
        original = getattr(module, function)

        def counted(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.counts[name] += 1
            self.counts[f"{name}_bytes"] += len(body(args, result))
            return result

        setattr(module, function, counted)

    def during(self, seconds: float, nodes: int) -> dict[str, float]:
        """Messages and bytes per second. Each notification goes to ``nodes`` subscribers."""
        before = self.counts.copy()
        time.sleep(seconds)
        rates = {name: (self.counts[name] - before[name]) / seconds for name in self.counts}
        total = {"messages": 0.0, "bytes": 0.0}
        for name, rate in rates.items():
            kind = "bytes" if name.endswith("_bytes") else "messages"
            total[kind] += rate * (nodes if name.startswith("notifications") else 1)
        return {f"{name} per second": rate for name, rate in sorted({**rates, **total}.items())}


def main(nodes: int, seconds: float) -> dict[str, float]:
    """Start the nodes, and measure."""
    port, barrier, over = _context.Value("i", 0), _context.Barrier(nodes + 1), _context.Event()
    times = _context.Array("d", 2 * nodes)
    arguments = (port, nodes, barrier, over, times)
    processes = [_context.Process(target=take_part, args=arguments, daemon=True) for _ in range(nodes)]
    for process in processes:  # before this process has threads
        process.start()
    traffic = Traffic()
    store = StoreServer("tcp://127.0.0.1:*")
    try:
        port.value = store.port
        for _ in range(3):
            barrier.wait(LIMIT_SECONDS)
        complete = max(times[1::2]) - max(times[::2])
        rates = traffic.during(seconds, nodes)
        over.set()
        for process in processes:
            process.join(LIMIT_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.join()
        store.close()
    return {"seconds until all know the round": complete, **rates}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), float(sys.argv[2]))))
