"""Programs drawn by a seed, and what must be true of them whatever happens.

Each worker runs a few steps: calls that call on, references that are passed on, backward passes, and work on
the store. What a worker executed is noted in its own copy of this module.
"""

from __future__ import annotations

import os
import random
from typing import Any

import torch

from zmqgrad import autograd, rpc

SEED = "SIMULATION_SEED"
"""The environment variable that says which program."""

STEPS = 6
"""Most steps of a worker."""

executed: list[str] = []
"""Tokens of the calls that ran in this process."""

outcomes: dict[str, str] = {}
"""What the caller learned of each call that it made: ``ok``, or the exception."""


def program(rank: int) -> dict[str, str]:
    """Runs the steps of worker ``rank`` in a job that loses nobody."""
    size = int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    run_steps(rank, size)
    rpc.shutdown()
    return outcomes


def program_with_losses(rank: int) -> dict[str, str]:
    """Runs the steps of worker ``rank`` in a job of which workers are killed: any step may fail."""
    size = int(os.environ["WORLD_SIZE"])
    try:
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    except RuntimeError as e:
        outcomes[f"join:{rank}"] = repr(e)
        return outcomes
    run_steps(rank, size)
    try:
        rpc.shutdown()  # whoever leaves without waiting for the others is lost to them
    except RuntimeError as e:
        outcomes[f"shutdown:{rank}"] = repr(e)
        rpc.shutdown(graceful=False)
    return outcomes


def run_steps(rank: int, size: int) -> None:
    """Runs the steps of worker ``rank``."""
    rng = random.Random(f"{os.environ[SEED]}/{rank}")
    kinds = [calls, references, backward]
    for number in range(rng.randrange(1, STEPS + 1)):
        step = rng.choice(kinds)
        token = f"{rank}.{number}"
        try:
            step(token, rng, size)
        except RuntimeError as e:
            outcomes[token] = repr(e)
        else:
            outcomes[token] = "ok"


def calls(token: str, rng: random.Random, size: int) -> None:
    """Several calls at once, each of which may call on."""
    plans = [_plan(f"{token}.{i}", rng, size, depth=3) for i in range(rng.randrange(1, 4))]
    futures = [rpc.rpc_async(f"worker{to}", work, args=(plan,)) for to, plan in plans]
    for (_, plan), future in zip(plans, futures, strict=True):
        try:
            expected = _count(plan)
            if future.wait() != expected:
                raise AssertionError(f"call {plan[0]} returned {future.value()}, not {expected}")
        except RuntimeError as e:
            outcomes[plan[0]] = repr(e)
            raise
        outcomes[plan[0]] = "ok"


Plan = tuple[str, list[Any]]
"""The token of a call, and the calls that it makes: who is called, and the plan."""


def _plan(token: str, rng: random.Random, size: int, depth: int) -> tuple[int, Plan]:
    inner = [_plan(f"{token}.{i}", rng, size, depth - 1) for i in range(rng.randrange(3) if depth > 1 else 0)]
    return rng.randrange(size), (token, inner)


def _count(plan: Plan) -> int:
    return 1 + sum(_count(inner) for _, inner in plan[1])


def work(plan: Plan) -> int:
    """Runs at the callee. Returns how many calls it took, itself included."""
    token, inner = plan
    executed.append(token)
    futures = [rpc.rpc_async(f"worker{to}", work, args=(nested,)) for to, nested in inner]
    return 1 + sum(int(future.wait()) for future in futures)


def make(token: str, value: int) -> int:
    """Makes the value of a reference."""
    executed.append(token)
    return value


def read(token: str, ref: Any, on_to: list[int]) -> int:
    """Reads a reference, after it was passed on to others."""
    executed.append(token)
    if on_to:
        value: int = rpc.rpc_sync(f"worker{on_to[0]}", read, args=(f"{token}.0", ref, on_to[1:]))
        return value
    value = ref.to_here()
    return value


def references(token: str, rng: random.Random, size: int) -> None:
    """A reference to a value elsewhere, passed on along a chain of workers."""
    value = rng.randrange(1000)
    ref = rpc.remote(f"worker{rng.randrange(size)}", make, args=(f"{token}.make", value))
    chain = [rng.randrange(size) for _ in range(rng.randrange(1, 4))]
    found = rpc.rpc_sync(f"worker{chain[0]}", read, args=(f"{token}.read", ref, chain[1:]))
    if found != value:
        raise AssertionError(f"reference {token} is {found}, not {value}")


def product(x: torch.Tensor, factors: list[float], on_to: list[int]) -> torch.Tensor:
    """Multiplies ``x`` by the first factor, and by the others elsewhere."""
    y = x * factors[0]
    if on_to:
        y = rpc.rpc_sync(f"worker{on_to[0]}", product, args=(y, factors[1:], on_to[1:]))
    return y


def backward(token: str, rng: random.Random, size: int) -> None:
    """A backward pass through several workers. Its gradients are compared with those of one process."""
    chains = []
    for _ in range(rng.randrange(1, 4)):
        length = rng.randrange(1, 4)
        chains.append(
            (
                [float(rng.randrange(1, 9)) for _ in range(length)],
                [rng.randrange(size) for _ in range(length)],
            )
        )
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        total = sum(
            rpc.rpc_sync(f"worker{to[0]}", product, args=(x, factors, to[1:])).sum() for factors, to in chains
        )
        autograd.backward(context, [total])
        found = autograd.get_gradients(context)[x]
    expected = 0.0
    for factors, _ in chains:
        part = 1.0
        for factor in factors:
            part *= factor
        expected += part
    if not torch.equal(found, torch.full((3,), expected)):
        raise AssertionError(f"gradient {token} is {found}, not {expected}")


def check(run: Any, copies: list[Any]) -> None:
    """Checks what must be true after each run.

    Args:
        run: a :class:`~zmqgrad.testing.simulation.campaign.Run`.
        copies: this module as each process has it, killed ones included.

    Raises:
        AssertionError: if something is not.
    """
    ran = [token for copy in copies for token in copy.executed]
    twice = sorted({token for token in ran if ran.count(token) > 1})
    if twice:
        raise AssertionError(f"these calls ran more than once: {', '.join(twice)}")
    for rank, found in run.values.items():
        for token, outcome in found.items():
            if outcome == "ok" and token.count(".") == 2 and token not in ran:
                raise AssertionError(f"worker{rank} got a result of call {token}, which nobody ran")
            if outcome != "ok" and not run.kills:
                raise AssertionError(f"worker{rank}: {token} failed, although nobody was lost: {outcome}")
            if "AssertionError" in outcome or "not ended" in outcome:
                raise AssertionError(f"worker{rank}: {token}: {outcome}")
