"""What checkpointed calls save and cost: a pipeline by ``rpc.checkpoint_async`` against ``rpc.rpc_async``.

    python -m tools.bench.checkpoints

prints two ratios: of the memory that a training step takes at its peak on the workers of the stages, and of
the time of the step. Both kinds of calls take turns, in the same processes of zmqgrad. Linux only.

Memory and time are measured in different processes. A peak can only be read if memory is returned to the
system as soon as it is freed; then each new tensor costs page faults, in the forward pass most of all, which
a checkpoint runs twice (``torch.utils.checkpoint`` in one process: 1.34 as usual, 1.54 that way).
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tools.bench.plan import PATIENCE, meet_at_a_free_port
from tools.bench.processes import PieceFailed, Place, run_together
from tools.bench.sides import OURS
from tools.bench.timing import Budget, seconds_of
from zmqgrad import rpc
from zmqgrad.autograd import backward, context, get_debug_info

STAGES = 2
LAYERS = 8
MICRO_BATCHES = 8
WIDTH = 512
ROWS = 2048

GOALS = {"memory": 0.5, "time": 1.4}
SAYS = {
    "memory": f"peak of {MICRO_BATCHES} micro-batches in flight, the mean of {STAGES} stages",
    "time": "a step, forward and backward",
}

_MMAP_THRESHOLD = -3
"""The parameter of ``mallopt``: from which size memory is returned to the system when it is freed."""

stage: torch.nn.Sequential
"""That of this process."""


def make_stage(returns_memory: bool) -> None:
    """Run on the worker of a stage, first."""
    global stage
    if returns_memory:
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(LAYERS)]
    stage = torch.nn.Sequential(*layers)


def forward(x: torch.Tensor) -> torch.Tensor:
    """Run on the worker of a stage."""
    y: torch.Tensor = stage(x)
    return y


def begin_peak() -> int:
    """Once all contexts are released, let the kernel note the peak of this process anew.

    Returns:
        The bytes that it has now.
    """
    while get_debug_info()["num_autograd_contexts"]:
        time.sleep(1e-3)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    """Return the most bytes that this process has had since."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def _step(call: Callable[..., Any], batches: list[torch.Tensor], memory: list[int]) -> Callable[[], float]:
    stages = range(1, STAGES + 1)

    def step() -> None:
        with context() as context_id:
            results = batches
            for worker in stages:
                results = [call(worker, x) for x in results]
                results = [future.wait() for future in results]  # type: ignore[attr-defined]
            backward(context_id, [torch.stack([y.square().mean() for y in results]).sum()])

    def measured() -> float:
        before = [rpc.rpc_sync(worker, begin_peak) for worker in stages]
        seconds = seconds_of(step)
        after = [rpc.rpc_sync(worker, peak) for worker in stages]
        memory.append(sum(after) - sum(before))
        return seconds

    return measured


CALLS: dict[str, Callable[..., Any]] = {
    "checkpointed": lambda to, x: rpc.checkpoint_async(to, forward, x),
    "plain": lambda to, x: rpc.rpc_async(to, forward, (x,)),
}


def measure(place: Place, budget: Budget, returns_memory: bool) -> dict[str, float]:
    """In all workers; worker 0 gives the figures of memory, or else of time, by name."""
    torch.set_num_threads(1)
    rpc.init_rpc(f"worker{place.rank}", rank=place.rank, world_size=place.count)
    found: dict[str, float] = {}
    if place.rank == 0:
        for worker in range(1, STAGES + 1):
            rpc.rpc_sync(worker, make_stage, args=(returns_memory,))
        batches = list(torch.rand(MICRO_BATCHES, ROWS, WIDTH).unbind())
        memory: dict[str, list[int]] = {name: [] for name in CALLS}
        works = {name: _step(call, batches, memory[name]) for name, call in CALLS.items()}
        for work in works.values():
            work()
        seconds = budget.medians(works)
        if returns_memory:
            for name, figures in memory.items():
                found[f"{name} MB"] = statistics.median(figures) / STAGES / 1e6
            found["memory"] = found["checkpointed MB"] / found["plain MB"]
        else:
            found["time"] = seconds["checkpointed"] / seconds["plain"]
    rpc.shutdown()
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 1 if that failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.checkpoints", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="S", help="for each kind and figure (default: 10)"
    )
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    try:
        for returns_memory in (True, False):
            meet_at_a_free_port()
            budget = Budget(options.seconds)
            found |= run_together(measure, STAGES + 1, PATIENCE, lambda _: None, budget, returns_memory)[0]
    except PieceFailed as e:
        print(f"{OURS} could not be measured: {e}", file=sys.stderr)
        return 1
    for name, says in SAYS.items():
        print(f"{name:14} {found[name]:6.3f}  goal <= {GOALS[name]:g}  {says}")
    print(f"memory of a step: {found['checkpointed MB']:.0f} MB, not {found['plain MB']:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
