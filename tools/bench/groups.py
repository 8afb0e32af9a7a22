"""One call to many workers: by a group, and by a loop of ``rpc_async``, which is what torch has.

Both are measured in turn on our side, so that their ratio does not depend on the moment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tools.bench.processes import Place
from tools.bench.sides import OURS, Side, take
from tools.bench.timing import Budget
from tools.bench.workloads import MB, drop, nothing

CALLED = 24
"""How many workers a small call goes to."""

SENT_TO = 8
"""How many workers a large tensor goes to."""

SIZES = {
    CALLED: {
        "collect": f"call {CALLED} workers at once and collect the results, by a group (torch: by a loop)",
        "collect_state": "the same with a hundred small tensors in a dict",
        "collect_loop": "the first by a loop of rpc_async",
        "collect_state_loop": "the second by a loop of rpc_async",
    },
    SENT_TO: {
        "send_256MB_to_8": f"a tensor to {SENT_TO} workers at once, by a group (torch: by a loop)",
        "send_256MB_to_1": "a tensor to one worker, by a group",
        "send_256MB_to_8_loop": f"a tensor to {SENT_TO} workers by a loop of rpc_async",
    },
}
"""Of called workers: the rows that are measured with so many."""


def run_groups(place: Place, side_name: str, names: list[str], budget: Budget) -> dict[str, float]:
    """In each worker; worker 0 calls the others, and gives seconds by row."""
    torch.set_num_threads(1)
    side = take(side_name)
    side.rpc.init_rpc(f"worker{place.rank}", rank=place.rank, world_size=place.count)
    found: dict[str, float] = {}
    if place.rank == 0:
        place.say(", ".join(names))
        torch.manual_seed(0)
        works = {name: _work(side, name, place.count) for name in names}
        for work in works.values():
            work()  # to warm up
        found = budget.medians(works)
    side.rpc.shutdown()
    return found


def _work(side: Side, name: str, count: int) -> Callable[[], object]:
    called = range(1, 2 if name.endswith("_to_1") else count)
    function: Any = nothing if name in ("collect", "collect_loop") else drop
    args: tuple[Any, ...] = ()
    if "state" in name:
        args = ({f"layer{n}": torch.rand(16, 16) for n in range(100)},)
    elif name.startswith("send"):
        args = (torch.rand(64 * MB),)
    if name.endswith("_loop") or side.name != OURS:
        return lambda: [f.wait() for f in [side.rpc.rpc_async(to, function, args=args) for to in called]]
    group = side.rpc.group(called)
    return lambda: group.call(function, args)
