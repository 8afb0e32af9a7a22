"""Distributed autograd between real processes: drawn programs, and the first program that anybody writes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.support.processes import run_processes
from tests.support.programs import Program, assert_same, gradients_here, gradients_over_rpc, programs
from zmqgrad import rpc
from zmqgrad.autograd import backward, context
from zmqgrad.optim import DistributedOptimizer

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def drawn(workers: int, count: int, from_seed: int) -> list[Program]:
    """The same ``count`` programs each time."""
    found: list[Program] = []

    @seed(from_seed)
    @settings(
        max_examples=count, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck)
    )
    @given(programs(workers, all_used=False))
    def collect(program: Program) -> None:
        found.append(program)

    collect()
    return found


def run_programs(rank: int, todo: list[Program]) -> list[str]:
    """In each process: drive the programs that it is the driver of; gives what went wrong."""
    rpc.init_rpc(f"worker{rank}")
    wrong = []
    for program, mode in zip(todo, itertools.cycle(["auto", "smart", "auto"]), strict=False):
        if program.driver == rank:
            try:
                assert_same(gradients_over_rpc(program, mode), gradients_here(program))
            except Exception as e:
                wrong.append(f"{program!r}\n{mode}: {type(e).__name__}: {e}")
    rpc.shutdown()
    return wrong


@pytest.mark.timeout(150)  # a minute on a machine that does much else
def test_drawn_programs_have_the_gradients_of_one_process() -> None:
    todo = drawn(workers=3, count=40, from_seed=20)
    wrong = [text for texts in run_processes(run_programs, 3, (todo,), timeout=100) for text in texts]
    assert not wrong, "\n\n".join(wrong)


def random_tensor() -> torch.Tensor:
    return torch.rand((3, 3), requires_grad=True)


def first_program(rank: int) -> float:
    """Two tensors of the other worker are added here; one step of SGD over there lowers the sum."""
    rpc.init_rpc(f"worker{rank}")
    other = f"worker{1 - rank}"
    with context() as context_id:
        rref1, rref2 = rpc.remote(other, random_tensor), rpc.remote(other, random_tensor)
        loss = (rref1.to_here() + rref2.to_here()).sum()
        backward(context_id, [loss])
        DistributedOptimizer(torch.optim.SGD, [rref1, rref2], lr=0.05).step(context_id)
    after = (rref1.to_here() + rref2.to_here()).sum()
    rpc.shutdown()
    return (loss - after).item()


def test_the_first_program() -> None:
    assert run_processes(first_program, 2) == pytest.approx([18 * 0.05] * 2, abs=1e-5)
