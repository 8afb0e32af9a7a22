"""Few Python frames lie under a served function: anomaly mode formats them for each node of the graph."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.support.processes import run_processes
from zmqgrad import rpc
from zmqgrad.autograd import context

pytestmark = pytest.mark.processes

MOST = 8
"""Frames of a served function, its own and three of threading's included."""


def frames(*_: object) -> list[str]:
    """The names of the functions on the stack."""
    frame = sys._getframe()
    names = [frame.f_code.co_name]
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        names.append(frame.f_code.co_name)
    return names


def ask_for_stacks(rank: int) -> dict[str, list[list[str]]]:
    """Calls of every kind, one after the other (the leader serves them) and at once (the pool helps)."""
    rpc.init_rpc(f"worker{rank}")
    found: dict[str, list[list[str]]] = {}
    if rank == 0:
        x = torch.ones(2, requires_grad=True)
        found["alone"] = [rpc.rpc_sync("worker1", frames, (x.detach(),)) for _ in range(20)]
        found["at once"] = [f.wait() for f in [rpc.rpc_async("worker1", frames) for _ in range(200)]]
        found["remote"] = [rpc.remote("worker1", frames).to_here() for _ in range(20)]
        with context():
            found["in a context"] = [rpc.rpc_sync("worker1", frames, (x,)) for _ in range(20)]
            found["remote in a context"] = [rpc.remote("worker1", frames, (x,)).to_here() for _ in range(20)]
    rpc.shutdown()
    return found


def test_few_frames_lie_under_a_served_function() -> None:
    found = run_processes(ask_for_stacks, 2)[0]
    assert set(found) == {"alone", "at once", "remote", "in a context", "remote in a context"}
    for how, stacks in found.items():
        assert max(map(len, stacks)) <= MOST, (how, max(stacks, key=len))
