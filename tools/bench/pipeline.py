"""A pipeline of four stages, each on a worker of its own, with eight micro-batches in flight.

Worker 0 drives: a micro-batch goes from stage to stage by reference, and only the last answer comes back.
What is timed is the backward pass over all of them.
"""

from __future__ import annotations

import torch

from tools.bench.processes import Place
from tools.bench.sides import Side, take
from tools.bench.timing import Budget, seconds_of
from tools.bench.workloads import Work

STAGES = 4
MICRO_BATCHES = 8
WIDTH = 128
ROWS = 32


class Stage(torch.nn.Module):
    """A part of a model, which fetches what it works on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())

    def forward(self, x: object) -> torch.Tensor:
        """``x`` is a reference to a tensor."""
        y: torch.Tensor = self.layers(x.to_here())  # type: ignore[attr-defined]
        return y


def _prepare(side: Side) -> Work:
    rpc, autograd = side.rpc, side.autograd
    stages = [rpc.remote(f"worker{i + 1}", Stage) for i in range(STAGES)]
    batches = torch.rand(MICRO_BATCHES, ROWS, WIDTH).unbind()

    def backward() -> float:
        with autograd.context() as context_id:
            answers = []
            for batch in batches:
                y = rpc.RRef(batch)
                for stage in stages[:-1]:
                    y = stage.remote().forward(y)
                answers.append(stages[-1].rpc_async().forward(y))
            loss = torch.cat([answer.wait() for answer in answers]).square().mean()
            return seconds_of(lambda: autograd.backward(context_id, [loss]))

    return backward


def run_pipeline(place: Place, side_name: str, name: str, budget: Budget) -> dict[str, float]:
    """In each worker; worker 0 gives the seconds of a backward pass, as ``name``."""
    torch.set_num_threads(1)
    side = take(side_name)
    side.rpc.init_rpc(f"worker{place.rank}", rank=place.rank, world_size=place.count)
    found: dict[str, float] = {}
    if place.rank == 0:
        torch.manual_seed(0)
        found[name] = budget.median(_prepare(side))
    side.rpc.shutdown()
    return found
