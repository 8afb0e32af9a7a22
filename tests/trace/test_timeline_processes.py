"""Views of a trace of real processes over real sockets: timeline with a profile, and the autograd graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.support.processes import run_processes
from tests.trace.test_timeline import check
from zmqgrad import autograd, rpc
from zmqgrad.trace import Job, launch_environment
from zmqgrad.trace.profiles import profile_events
from zmqgrad.trace.sequence import context_diagram
from zmqgrad.trace.timeline import Timeline

pytestmark = [pytest.mark.processes, pytest.mark.slow]

CALLS = 20

SHIFT = 1000.0
"""Microseconds by which the clock of the profiler, which torch estimates, may be off as a whole."""


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def relay(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = rpc.rpc_sync("worker2", double, args=(x,))
    return result


def work(rank: int, path: Path) -> None:
    rpc.init_rpc(f"worker{rank}")
    if rank == 0:
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            for _ in range(CALLS):
                rpc.rpc_sync("worker1", double, args=(torch.ones(2),))
        recorded.export_chrome_trace(str(path))
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context:
            unused = rpc.rpc_async("worker2", double, args=(x,))
            loss = rpc.rpc_sync("worker1", relay, args=(x,)).sum()
            unused.wait()
            autograd.backward(context, [loss])
    rpc.shutdown()


def test_a_timeline_joins_a_profile_and_a_graph_names_the_unused_send(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    run_processes(work, 3, (path,), env=launch_environment(tmp_path))
    job = Job(tmp_path)
    timeline = Timeline(job)
    events = list(timeline.events())
    check(events)

    profiled = list(profile_events(timeline, job, path))
    named = [e for e in profiled if e["name"] == "rpc_sync#double(worker0 -> worker1)"]
    ranges = sorted(named, key=lambda e: e["ts"])
    calls = [e for e in events if e["ph"] == "b" and e["name"] == f"call {__name__}:double"]
    own = timeline.pids[id(job.workers()[0].process)]
    sent = sorted(e["ts"] for e in calls if e["pid"] == own)[:CALLS]  # events are in order of arrival
    assert len(ranges) == len(sent) == CALLS
    # By one shift of that clock, each call was sent within the range that the profiler recorded of it.
    earliest = max(r["ts"] - s for r, s in zip(ranges, sent, strict=True))
    latest = min(r["ts"] + r["dur"] - s for r, s in zip(ranges, sent, strict=True))
    assert max(earliest, -SHIFT) <= min(latest, SHIFT), (ranges, sent)
    assert {r["pid"] for r in ranges} == {own}

    diagram = context_diagram(job)
    assert diagram.lanes == ["worker0", "worker2", "worker1"]
    groups = [step.source for step in diagram.steps if step.text.startswith("ran group")]
    assert groups == ["worker0", "worker1", "worker2", "worker1", "worker0"]
    # Neither the tensors of that call nor its result got gradients.
    unused = {(step.source, step.target) for step in diagram.steps if step.text.endswith("(unused)")}
    assert unused == {("worker0", "worker2"), ("worker2", "worker0")}
