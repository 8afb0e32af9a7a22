"""Signal handlers that make calls, wherever they have interrupted the program."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import zmqgrad
from tests.support.processes import run_processes
from zmqgrad import autograd, rpc
from zmqgrad.errors import AutogradError, TransportError
from zmqgrad.testing import cluster

pytestmark = [pytest.mark.processes, pytest.mark.slow]

LIBRARY = f"{Path(zmqgrad.__file__).parent}{os.sep}"
OPTIONS = rpc.RpcBackendOptions(rpc_timeout=20.0, num_worker_threads=4)
OVER_TCP = rpc.RpcBackendOptions(rpc_timeout=20.0, num_worker_threads=4, local_fast_path=False)


def call() -> None:
    assert rpc.rpc_sync("worker1", pow, args=(2, 3)) == 8


def refer() -> None:
    assert rpc.remote("worker1", pow, args=(2, 3)).to_here() == 8


def send_much() -> None:
    assert rpc.rpc_sync("worker1", torch.sum, args=(torch.ones(30_000),)) == 30_000


def differentiate() -> None:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mul, args=(x, 2)).sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [2, 2, 2]


def send_a_leaf() -> None:
    assert rpc.rpc_sync("worker1", torch.mul, args=(torch.ones(2, requires_grad=True), 2)).tolist() == [2, 2]


def at_each_point(operation: Callable[[], None], handler: Callable[[], None]) -> tuple[int, list[str]]:
    """Runs ``handler`` at each point of ``operation`` in turn: the interpreter runs those of signals there.

    Returns:
        The number of points, and the errors.
    """
    refused: list[str] = []
    point, passed = 0, 0

    def trace(frame: FrameType, event: str, _: Any) -> None:
        nonlocal passed
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(LIBRARY):
            if passed == point:
                sys.setprofile(None)
                try:
                    handler()
                except TransportError as e:
                    refused.append(str(e))
            passed += 1

    while True:
        passed = 0
        sys.setprofile(trace)
        try:
            operation()
        finally:
            sys.setprofile(None)
        if passed <= point:  # the operation has no such point
            return point, refused
        point += 1


def interrupt(rank: int, name: str, fast: bool) -> tuple[int, list[str]]:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=OPTIONS if fast else OVER_TCP)
    found: tuple[int, list[str]] = (0, [])
    if rank == 0:
        operation: Callable[[], None] = globals()[name]
        for each in (operation, call):
            each()
        found = at_each_point(operation, send_a_leaf if operation is differentiate else call)
    rpc.shutdown()
    return found


@pytest.mark.parametrize("operation", [call, refer, send_much, differentiate])
def test_a_signal_handler_may_call_wherever_it_has_interrupted_a_call(operation: Callable[[], None]) -> None:
    (points, refused), _ = run_processes(interrupt, 2, args=(operation.__name__, True))
    assert points > 100
    assert refused == []


def test_a_signal_handler_that_has_interrupted_a_send_by_tcp_is_told() -> None:
    (points, refused), _ = run_processes(interrupt, 2, args=(call.__name__, False))
    assert points > 100
    assert 0 < len(refused) < points / 2
    assert all("worker0 was interrupted while it was sending to worker 1" in each for each in refused)


def test_a_signal_handler_may_describe_a_context_wherever_it_has_interrupted_a_pass() -> None:
    entered: list[int] = []

    def differentiate_alone() -> None:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            entered.append(context_id)
            autograd.backward(context_id, [(x * 2).sum()])
            assert autograd.get_gradients(context_id)[x].tolist() == [2, 2, 2]

    def describe() -> None:
        with contextlib.suppress(AutogradError):  # it has been left, and the next is not yet entered
            autograd.describe_context(entered[-1])
        autograd.get_debug_info()

    with cluster(1):
        differentiate_alone()
        points, refused = at_each_point(differentiate_alone, describe)
    assert points > 100
    assert refused == []
