"""The findings of a report about real processes: a deadlock, a straggler, a send without a gradient."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from tests.support.processes import run_processes
from zmqgrad import autograd, rpc
from zmqgrad.errors import RpcError
from zmqgrad.trace import Job, launch_environment
from zmqgrad.trace.report.data import Report

pytestmark = [pytest.mark.processes, pytest.mark.slow]

LOCK, HELD = threading.Lock(), threading.Event()
TIMEOUT = 3.0


def held() -> bool:
    return HELD.wait(30)


def touch() -> None:
    with LOCK:
        pass


def grab(other: str) -> None:
    """Takes the lock of this worker, and then that of the other one, which does the same."""
    with LOCK:
        HELD.set()
        assert rpc.rpc_sync(other, held)
        rpc.rpc_sync(other, touch, timeout=TIMEOUT)


def work(x: torch.Tensor) -> torch.Tensor:
    if rpc.get_worker_info().id == 2:
        time.sleep(0.05)
    return x * 2


def job(rank: int) -> None:
    rpc.init_rpc(f"worker{rank}")
    if rank == 0:
        x = torch.ones(3, requires_grad=True)
        for _ in range(6):
            with autograd.context() as context:
                used, unused = (rpc.rpc_async(f"worker{i}", work, args=(x,)) for i in (1, 2))
                unused.wait()
                autograd.backward(context, [used.wait().sum()])
        calls = [rpc.rpc_async(f"worker{i}", grab, args=(f"worker{3 - i}",)) for i in (1, 2)]
        outcomes = []
        for call in calls:
            try:
                call.wait()
            except RpcError as e:
                outcomes.append(e)
        assert outcomes, "one of them has timed out"
    rpc.shutdown()


def test_a_deadlock_a_straggler_and_unused_sends_are_found(tmp_path: Path) -> None:
    run_processes(job, 3, env=launch_environment(tmp_path))
    found = {f.title: f for f in Report(Job(tmp_path)).findings}
    assert "Deadlock: worker1 -> worker2 -> worker1: each waits for the next" in found
    assert "Straggler: worker2" in found
    (unused,) = [f for f in found.values() if f.kind == "unused result"]
    assert "worker0 calls worker2 (6): no gradient came back in 6 contexts" in unused.detail
