"""Registers scenarios, and runs a family of them in the workers of one group."""

from __future__ import annotations

import importlib
import itertools
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from tests.oracles.outcome import Raised, compare, plain

F = TypeVar("F", bound=Callable[[], Any])

BEFORE, DURING, AFTER = "before init_rpc", "during", "after shutdown"

WORKERS = 3

RPC_TIMEOUT_SECONDS = 20.0

_registered: dict[str, dict[str, tuple[str, Callable[[], Any]]]] = {}


def scenario(phase: str = DURING) -> Callable[[F], F]:
    """Register a scenario of the family that is its module. Worker 0 runs it and records what it returns."""

    def register(function: F) -> F:
        _registered.setdefault(function.__module__, {})[function.__name__] = (phase, function)
        return function

    return register


def names(family: str) -> list[str]:
    """Return the names of the scenarios of a family, which is a module of this package."""
    module = f"{__package__}.{family}"
    importlib.import_module(module)
    return list(_registered[module])


def run_family(rank: int, family: str, seconds: float = 0.0) -> dict[str, Any]:
    """Run all scenarios of a family as worker ``rank``. Returns their results, on worker 0.

    Args:
        rank: of this worker.
        family: a module of this package.
        seconds: for so long, those of the group are run again and again; each round must find the same.

    Raises:
        AssertionError: if a later round finds something else.
    """
    from tests.oracles.implementation import rpc

    module = importlib.import_module(f"{__package__}.{family}")
    scenarios = _registered[module.__name__]
    results: dict[str, Any] = {}

    def run(phase: str) -> None:
        for name, (when, function) in scenarios.items():
            if when == phase and rank == 0:
                print("scenario", name, file=sys.stderr, flush=True)  # shown if the group fails
                results[name] = observe(function)

    run(BEFORE)
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=RPC_TIMEOUT_SECONDS)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORKERS, rpc_backend_options=options)
    run(DURING)
    first, until = dict(results), time.monotonic() + seconds
    for number in itertools.count(2):
        if rank or time.monotonic() >= until:
            break
        print("round", number, file=sys.stderr, flush=True)
        run(DURING)
        if (differences := compare(first, results)) != compare(first, first):
            raise AssertionError(f"round {number} differs from the first: {differences}")
    rpc.shutdown()
    run(AFTER)
    return results


def observe(function: Callable[[], Any]) -> Any:
    """Call a scenario and return what it returns, or the exception, as plain data."""
    try:
        return plain(function())
    except Exception as e:
        traceback.print_exc()
        return Raised.of(e)
