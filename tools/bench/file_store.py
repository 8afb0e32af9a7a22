"""Many processes on one ``FileStore``: adding, waiting, and what waiting costs, beside torch's.

    python -m tools.bench.file_store [-n PROCESSES] [-s SECONDS] [--sides zmqgrad,torch] [--directory PATH]

Processes are forks of one that has loaded the side's module, and each opens the file itself. Prints for
each side the seconds until the last process was through each step, and how much of a core all of them took
while they waited.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from tools.bench.sides import store_of

PATIENCE = timedelta(seconds=300)
ADDS = 20


def work(side: str, path: str, size: int, begin: Any, results: Any) -> None:
    """One process: add, meet, wait until released; reports when it was through each step."""
    store = store_of(side).FileStore(path, size + 1)
    store.set_timeout(PATIENCE)
    begin.wait()
    for _ in range(ADDS):
        store.add("sum", 1)
    added = time.monotonic()
    store.add("met", 1)
    store.wait(["released"], PATIENCE)
    results.put((added, time.monotonic()))


def cpu_seconds(pid: int) -> float:
    """What process ``pid`` has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(side: str, size: int, seconds: float, directory: str) -> tuple[float, float, float]:
    """Seconds for all adds and from release to the last that noticed, and cores used while all waited."""
    store_of(side)  # loaded before the forks
    context = mp.get_context("fork")
    begin, results = context.Barrier(size + 1), context.SimpleQueue()
    with tempfile.TemporaryDirectory(dir=directory) as place:
        path = str(Path(place) / "store")
        processes = [
            context.Process(target=work, args=(side, path, size, begin, results)) for _ in range(size)
        ]
        for process in processes:
            process.start()
        begin.wait()
        began = time.monotonic()
        store = store_of(side).FileStore(path, size + 1)
        store.set_timeout(PATIENCE)
        while int(store.add("met", 0)) < size:
            time.sleep(0.05)
        time.sleep(1)  # as all have just seen changes, they look more often than they will
        before = sum(cpu_seconds(process.pid or 0) for process in processes)
        time.sleep(seconds)
        cpu = sum(cpu_seconds(process.pid or 0) for process in processes) - before
        released = time.monotonic()
        store.set("released", "1")
        reports = [results.get() for _ in processes]
        for process in processes:
            process.join()
        assert int(store.get("sum")) == size * ADDS
        if side == "zmqgrad":
            store.close()
    added, noticed = zip(*reports, strict=True)
    return max(added) - began, max(noticed) - released, cpu / seconds


def main() -> None:
    """Run both sides and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=100, help="processes")
    parser.add_argument("-s", type=float, default=10.0, help="seconds for which all wait")
    parser.add_argument("--sides", default="zmqgrad,torch")
    parser.add_argument("--directory", default=None, help="where the file lies (default: TMPDIR)")
    options = parser.parse_args()
    directory = options.directory or os.environ.get("TMPDIR", "/tmp")
    print(f"{options.n} processes, {options.n * ADDS} adds, in {directory}")
    print(f"{'':10}{'adds (s)':>12}{'wake all (s)':>14}{'waiting (cores)':>17}")
    for side in options.sides.split(","):
        adds, wake, cores = run(side, options.n, options.s, directory)
        print(f"{side:10}{adds:12.2f}{wake:14.3f}{cores:17.3f}", flush=True)


if __name__ == "__main__":
    main()
