"""Calls to many workers: a group call, a loop of ``rpc_async``, and a loop over as many actors of Ray.

    python -m tools.bench.fanout [--workers 24] [--seconds 5] [--kb 1024]

prints milliseconds from the first call to the last result, of a number and of ``--kb`` kilobytes, and ratios.
One process calls all, in turn: the caller of the workers is the driver of the actors, too (if Ray is there).
The kilobytes are a tensor here, and an array of numpy there (``ray.put``, then passed by reference).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tools.bench import machine
from tools.bench.plan import meet_at_a_free_port
from tools.bench.processes import PieceFailed, Place, run_together
from tools.bench.timing import Budget
from zmqgrad import rpc

LIMIT_SECONDS = 170.0


def first(x: Any) -> float:
    """Runs on a worker: read one number of ``x``."""
    return float(x if isinstance(x, float) else x[0])


def measure(place: Place, kb: int, seconds: float) -> dict[str, float]:
    """Worker 0 measures; the others serve."""
    rpc.init_rpc(f"w{place.rank}", rank=place.rank, world_size=place.count)
    found: dict[str, float] = {}
    if place.rank == 0:
        others = rpc.group("w*")[1:]
        tensor = torch.ones(kb << 8)
        works: dict[str, Callable[[], object]] = {}
        for size, x in (("number", 1.0), (f"{kb} kB", tensor)):
            works[f"group, {size}"] = partial(others.call, first, (x,))
            works[f"loop, {size}"] = partial(call_each, others, x)
        close = add_ray(works, place.count - 1, kb)
        for work in works.values():
            work()
        found = Budget(seconds, at_least=10).medians(works)
        close()
    rpc.shutdown()
    return found


def call_each(workers: rpc.WorkerGroup, x: Any) -> None:
    """As a program without group calls does it."""
    rpc.wait_all([rpc.rpc_async(worker, first, (x,)) for worker in workers])


def add_ray(works: dict[str, Callable[[], object]], count: int, kb: int) -> Callable[[], None]:
    """Add the same calls to ``count`` actors, if Ray is installed. Returns what ends them."""
    try:
        import numpy as np
        import ray
    except ImportError:
        return lambda: None
    ray.init(num_cpus=count, include_dashboard=False, log_to_driver=False)

    class Actor:  # local: so actors need not import this module
        def first(self, x: Any) -> float:
            return float(x if isinstance(x, float) else x[0])

    actors = [ray.remote(Actor).remote() for _ in range(count)]
    array = np.ones(kb << 8, dtype=np.float32)
    works["Ray, number"] = lambda: ray.get([actor.first.remote(1.0) for actor in actors])

    def with_array() -> None:
        shared = ray.put(array)
        ray.get([actor.first.remote(shared) for actor in actors])

    works[f"Ray, {kb} kB"] = with_array
    return lambda: ray.shutdown()


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--kb", type=int, default=1024)
    args = parser.parse_args()
    meet_at_a_free_port()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    try:
        found = run_together(
            measure, 1 + args.workers, LIMIT_SECONDS, lambda text: None, args.kb, args.seconds
        )[0]
    except PieceFailed as e:
        print(e, file=sys.stderr)
        return 1
    print(f"# {machine.describe()}, load {machine.load()}; {args.workers} workers")
    for name, seconds in found.items():
        group = found["group, " + name.partition(", ")[2]]
        print(f"{name:16} {1000 * seconds:8.2f} ms   group / this {group / seconds:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
