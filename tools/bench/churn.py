"""References made and dropped by the hundred thousand: is everything empty after, and memory flat?

    python -m tools.bench.churn                       # 100,000 references between three workers
    python -m tools.bench.churn --references 1000000

Worker 0 has worker 1 make values, passes every tenth reference to worker 2, and drops all. Printed: time,
memory of each worker after the first tenth and at the end, and what is left in the ledgers (nothing).
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from pathlib import Path

import torch

from tools.bench.processes import Place, run_together
from tools.bench.sides import OURS, take
from tools.ports import free_port

AT_ONCE = 100
"""References alive at a time."""


def main() -> int:
    """Run; 1 if something is left."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--references", type=int, default=100_000)
    options = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    found = run_together(churn, 3, 3600.0, lambda text: None, options.references)
    seconds = max(took for took, *_ in found)
    print(
        f"{options.references} references: {seconds:.1f} s, {seconds / options.references * 1e6:.0f} us each"
    )
    for rank, (_, early, late, left) in enumerate(found):
        print(f"worker {rank}: {early:.1f} MB after a tenth, {late:.1f} MB at the end; left: {left}")
    return int(any(any(left.values()) for *_, left in found))


def churn(place: Place, references: int) -> tuple[float, float, float, dict[str, int]]:
    """In each worker: seconds, megabytes after a tenth and at the end, and what is left."""
    torch.set_num_threads(1)
    rpc = take(OURS).rpc
    rpc.init_rpc(f"worker{place.rank}", rank=place.rank, world_size=place.count)
    began = place.together()
    memory = []
    for part in (references // 10, references - references // 10):
        if place.rank == 0:
            make_and_drop(part)
        place.together()
        memory.append(megabytes())
    took = time.perf_counter() - began
    left = wait_until_empty()
    place.together()
    rpc.shutdown()
    return took, memory[0], memory[1], left


def make_and_drop(count: int) -> None:
    """Runs on worker 0."""
    from zmqgrad import rpc

    for _ in range(count // AT_ONCE):
        made: list[rpc.RRef[list[int]]] = [rpc.remote("worker1", list) for _ in range(AT_ONCE)]
        torch.futures.wait_all([rpc.rpc_async("worker2", look, args=(r,)) for r in made[::10]])


def look(rref: object) -> None:
    """Runs on worker 2, which lets go of it again."""


def megabytes() -> float:
    """Memory of this process that is resident."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def wait_until_empty(seconds: float = 20.0) -> dict[str, int]:
    """What the ledgers of this worker still hold, at the latest after so long."""
    from zmqgrad.rpc.current import current_worker

    references = current_worker().references
    limit = time.monotonic() + seconds
    while any((left := references.statistics()).values()) and time.monotonic() < limit:
        references.flush_releases()
        time.sleep(0.01)
    return left


if __name__ == "__main__":
    raise SystemExit(main())
