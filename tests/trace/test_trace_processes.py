"""Traces of real processes over real sockets."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.support.processes import run_processes
from zmqgrad import autograd, rpc
from zmqgrad.trace import Job, launch_environment
from zmqgrad.trace.events import GroupExecuted, Heartbeat, PassFinished, PassStarted, WaitBegun, WaitEnded

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def train(rank: int) -> int:
    rpc.init_rpc(f"worker{rank}")
    if rank == 0:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context:
            autograd.backward(context, [rpc.rpc_sync("worker1", double, args=(x,)).sum()])
        rpc.rpc_sync("worker1", double, args=(torch.ones(1 << 20),))
        rpc.rpc_sync("worker1", lambda: None)
        for _ in range(300):
            rpc.rpc_async("worker1", os.getpid).wait()
    rpc.shutdown()
    return os.getpid()


def test_a_job_is_traced_from_end_to_end(tmp_path: Path) -> None:
    env = {**launch_environment(tmp_path), "ZMQGRAD_TRACE_ARGS": "1", "ZMQGRAD_TRACE_HEARTBEATS": "1"}
    pids = run_processes(train, 2, env=env)
    job = Job(tmp_path, shared_clocks=False)
    assert [(w.name, w.rank, w.process.info.pid, w.stopped is not None) for w in job.workers()] == [
        ("worker0", 0, pids[0], True),
        ("worker1", 1, pids[1], True),
    ]
    calls = [c for c in job.calls() if c.request.source in job.workers()]
    served = [c for c in calls if c.function == "posix:getpid"]
    assert len(served) == 300
    for each in served:
        assert each.is_complete
        assert each.started is not None
        assert each.finished is not None
        assert each.request.sent is not None
        assert each.request.sent <= each.started <= each.finished
        assert each.duration
    assert any("lambda" in c.function for c in calls)
    forward = [c for c in calls if c.request.type == "FORWARD_AUTOGRAD_REQ"]
    assert len(forward) == 1
    assert forward[0].request.context
    assert any(c.request.size > 4 << 20 and c.request.path == 2 for c in calls), "through shared memory"
    events = [s.event for s in job.events()]
    assert any("tensor([1., 1., 1.]" in c.arguments for c in calls)
    for kind in (Heartbeat, PassStarted, PassFinished, GroupExecuted, WaitBegun, WaitEnded):
        assert any(isinstance(e, kind) for e in events), kind
    # Both processes have one clock, so what the messages say must be an offset of 0.
    other = next(w.process for w in job.workers() if w.process is not job.reference)
    moment = served[150].started
    assert moment is not None
    assert job.alignment is not None
    assert abs(job.time(other, moment) - moment) <= job.bound(other, moment)
    assert job.bound(other, moment) < 1_000_000
    print(f"offset {job.time(other, moment) - moment} ns, bound {job.bound(other, moment):.0f} ns")


def hang(rank: int) -> None:
    rpc.init_rpc(f"worker{rank}")
    if rank == 0:
        rpc.rpc_async("worker1", time.sleep, args=(60,))
        rpc.rpc_sync("worker1", os.getpid)
        time.sleep(0.5)  # longer than the interval of the writer
        os.kill(rpc.rpc_sync("worker1", os.getpid), signal.SIGKILL)
    else:
        time.sleep(60)


def test_a_killed_worker_leaves_what_it_was_doing(tmp_path: Path) -> None:
    run_processes(hang, 2, env=launch_environment(tmp_path), may_die=(0, 1))
    job = Job(tmp_path)
    killed = job.workers()[1]
    assert killed.stopped is None
    open_calls = [c for c in job.calls() if c.function == "time:sleep"]
    assert [(c.is_complete, c.started is not None, c.finished) for c in open_calls] == [(False, True, None)]
