"""What distributed autograd costs beside what it cannot do without: modes against FAST, and planning.

    python -m tools.bench.modes

prints, for programs in which everything is used, how much longer AUTO and SMART take than FAST; which
share of a backward pass the walk over its graph takes; and what recorded passes and versions cost. Each
figure is a ratio of medians of things that took turns, in two workers of zmqgrad; every other process on the
machine disturbs it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from tools.bench.plan import PATIENCE, meet_at_a_free_port
from tools.bench.processes import PieceFailed, Place, run_together
from tools.bench.sides import OURS, take
from tools.bench.timing import Budget, seconds_of
from tools.bench.workloads import FAN_OUT, OTHER, Layer, product, same
from zmqgrad import rpc
from zmqgrad.autograd import backward, context, grad
from zmqgrad.autograd.api import get_context
from zmqgrad.autograd.engine.executor import LocalPass
from zmqgrad.optim import DistributedOptimizer
from zmqgrad.wire.messages import PassOptions

NODES = 10_000
SIDE = 32
"""Tensors of the large graph are so large, squared."""

HEAVY_SIDE = 256

Loss = Callable[[], torch.Tensor]

GOALS = {
    "auto_pair": 1.03,
    "auto_chain": 1.03,
    "auto_fan_out": 1.03,
    "plan_apart": 0.10,
    "plan_meeting": 0.10,
    "recorded": 1.6,
    "second": 2.0,
    "versions": 1.05,
}
SAYS = {
    "auto_pair": "AUTO over FAST, two hops",
    "auto_chain": "AUTO over FAST, ten calls one after the other",
    "auto_fan_out": f"AUTO over FAST, {FAN_OUT} calls in one context",
    "smart_pair": "SMART over FAST, two hops",
    "smart_fan_out": f"SMART over FAST, {FAN_OUT} calls in one context",
    "plan_apart": f"share of planning, {NODES} nodes that one entry reaches",
    "plan_meeting": f"share of planning, {NODES} nodes behind which two entries meet",
    "recorded": "first derivatives with create_graph over those without, two hops with heavy stages",
    "second": "second derivatives of that over those in one process, on one core",
    "versions": "step of two remote layers with versions=True over one without",
}


def _pair() -> Loss:
    a, b = (torch.rand(8, 8, requires_grad=True) for _ in range(2))
    return lambda: rpc.rpc_sync(OTHER, product, args=(a, b)).sum()


def _chain() -> Loss:
    x = torch.rand(8, 8, requires_grad=True)

    def loss() -> torch.Tensor:
        y = x
        for _ in range(10):
            y = rpc.rpc_sync(OTHER, product, args=(y, x))
        return y.sum()

    return loss


def _fan_out() -> Loss:
    w = torch.rand(8, 8, requires_grad=True)

    def loss() -> torch.Tensor:
        asked = [rpc.rpc_async(OTHER, product, args=(w, w)) for _ in range(FAN_OUT)]
        return torch.stack([answer.wait() for answer in asked]).sum()

    return loss


PROGRAMS = {"pair": _pair, "chain": _chain, "fan_out": _fan_out}


def _large(meeting: bool) -> Loss:
    """A graph of :data:`NODES` nodes, whose end was sent to the other worker as well if ``meeting``."""
    x, w = (torch.rand(SIDE, SIDE, requires_grad=True) for _ in range(2))

    def loss() -> torch.Tensor:
        y = x * 1
        if meeting:
            y = y + rpc.rpc_sync(OTHER, same, args=(y,))
        for i in range(NODES // 2):
            y = y.tanh()
            y = y + w if i % 2 else y * w
        return y.sum()

    return loss


def _in_mode(loss: Loss, mode: str) -> Callable[[], float]:
    def timed() -> float:
        with context() as context_id:
            root = loss()
            return seconds_of(lambda: backward(context_id, [root], mode=mode))

    return timed


def heavy_stage(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Called on the other worker, and in one process."""
    for _ in range(4):
        x = torch.tanh(x @ w)
    return x


def _derivatives(order: int, here: bool = False) -> Callable[[], float]:
    """The last of ``order`` derivatives; 0: the first one, without ``create_graph``. ``here``: of torch."""
    x, w = ((torch.rand(HEAVY_SIDE, HEAVY_SIDE) / HEAVY_SIDE).requires_grad_() for _ in range(2))

    def timed() -> float:
        with nullcontext(0) if here else context() as context_id:
            y = heavy_stage(x, w) if here else rpc.rpc_sync(OTHER, heavy_stage, args=(x, w))
            root = y.square().sum()

            def derive(of: torch.Tensor, create_graph: bool) -> Any:
                if here:
                    return torch.autograd.grad([of], [x, w], create_graph=create_graph)
                return grad(context_id, [of], [x, w], create_graph=create_graph)

            if order < 2:
                return seconds_of(lambda: derive(root, order == 1))
            first = sum(g.square().sum() for g in derive(root, True))
            return seconds_of(lambda: derive(first, False))

    return timed


def _step(versions: bool) -> Callable[[], None]:
    layers = [rpc.remote(OTHER, Layer, args=(512,)) for _ in range(2)]
    parameters = [p for layer in layers for p in layer.rpc_sync().references()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.01, versions=versions)
    x = torch.rand(256, 512)

    def step() -> None:
        with context() as context_id:
            y = x
            for layer in layers:
                y = layer.rpc_sync().forward(y)
            backward(context_id, [y.square().mean()])
            optimizer.step(context_id)

    return step


def _share(loss: Loss, budget: Budget) -> float:
    """Planning of a pass, done once more for itself, over the whole pass."""

    def planned() -> float:
        with context() as context_id:
            root = loss()
            here = get_context(context_id)
            return seconds_of(lambda: LocalPass(here, rpc.get_worker_info().id, PassOptions(True), [root]))

    found = budget.medians({"plan": planned, "pass": _in_mode(loss, "auto")})
    return found["plan"] / found["pass"]


def measure(place: Place, budget: Budget) -> dict[str, float]:
    """In both workers; worker 0 gives the figures, by name."""
    torch.set_num_threads(1)
    take(OURS)
    rpc.init_rpc(f"worker{place.rank}", rank=place.rank, world_size=place.count)
    found: dict[str, float] = {}
    if place.rank == 0:
        for name, make in PROGRAMS.items():
            place.say(name)
            loss = make()
            times = budget.medians({mode: _in_mode(loss, mode) for mode in ("fast", "auto", "smart")})
            found[f"auto_{name}"] = times["auto"] / times["fast"]
            found[f"smart_{name}"] = times["smart"] / times["fast"]
        for name, meeting in (("plan_apart", False), ("plan_meeting", True)):
            place.say(name)
            found[name] = _share(_large(meeting), budget)
        place.say("derivatives")
        works = {"plain": _derivatives(0), "recorded": _derivatives(1), "second": _derivatives(2)}
        times = budget.medians({**works, "alone": _derivatives(2, here=True)})
        found["recorded"] = times["recorded"] / times["plain"]
        found["second"] = times["second"] / times["alone"]
        place.say("versions")
        times = budget.medians({"shared": _step(True), "own": _step(False)})
        found["versions"] = times["shared"] / times["own"]
    rpc.shutdown()
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 1 if that failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.modes", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=2.0, metavar="S", help="for each figure (default: 2)"
    )
    options = parser.parse_args(arguments)
    meet_at_a_free_port()
    try:
        found: dict[str, Any] = run_together(measure, 2, PATIENCE, lambda _: None, Budget(options.seconds))[0]
    except PieceFailed as e:
        print(f"{OURS} could not be measured: {e}", file=sys.stderr)
        return 1
    for name, says in SAYS.items():
        goal = f"goal <= {GOALS[name]:g}" if name in GOALS else ""
        print(f"{name:14} {found[name]:6.3f}  {goal:13} {says}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
