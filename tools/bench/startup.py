"""What a group of many workers costs: to start, to call one another all at once, to leave."""

from __future__ import annotations

import time

import torch

from tools.bench.processes import Place
from tools.bench.sides import Side, take
from tools.bench.workloads import nothing

ROUNDS = 5
"""Of calls from each worker to each."""


def run_group(place: Place, side_name: str) -> dict[str, float]:
    """In each worker: seconds of the three, each from a moment at which all stood ready."""
    torch.set_num_threads(1)
    side = take(side_name)
    name, size = f"worker{place.rank}", place.count

    if place.rank == 0:
        place.say(f"init_{size}")
    began = place.together()
    side.rpc.init_rpc(name, rank=place.rank, world_size=size)
    found = {f"init_{size}": time.perf_counter() - began}

    if place.rank == 0:
        place.say(f"all_to_all_{size}")
    began = place.together()
    for _ in range(ROUNDS):
        _call_everybody(side, size)
    found[f"all_to_all_{size}"] = (time.perf_counter() - began) / ROUNDS

    if place.rank == 0:
        place.say(f"shutdown_{size}")
    began = place.together()
    side.rpc.shutdown()
    found[f"shutdown_{size}"] = time.perf_counter() - began
    return found


def _call_everybody(side: Side, size: int) -> None:
    for future in [side.rpc.rpc_async(f"worker{rank}", nothing) for rank in range(size)]:
        future.wait()
