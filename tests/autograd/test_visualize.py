"""A context can be looked at: as text, and as a drawing that names what was sent and what waits."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from zmqgrad import rpc
from zmqgrad.autograd import backward, context, describe_context, draw_context
from zmqgrad.testing import cluster


def double(x: Tensor) -> Tensor:
    return x * 2


def relay(to: int, x: Tensor) -> Tensor:
    return rpc.rpc_sync(to, double, (x * x,))


def test_a_context_before_and_after_its_pass() -> None:
    x = torch.ones(1, requires_grad=True)
    with cluster(3), context() as ctx:
        y = x * 3
        rpc.rpc_sync(2, double, (y,))
        loss = (rpc.rpc_sync(1, relay, (2, y)) + y).sum()

        before = describe_context(ctx)
        assert [line.split(":")[0] for line in before.splitlines() if line[0] == "w"] == [
            f"worker{i}" for i in range(3)
        ]
        assert (
            len(
                re.findall(
                    r"entry send 0.* to worker 2 \(double, called in .*test_visualize.py:\d+\)", before
                )
            )
            == 1
        )

        backward(ctx, [loss])
        after = describe_context(ctx)
        assert after.count("entry roots: arrived") == after.count("entry roots") == 1
        assert (
            len(re.findall("entry send 0.*: dropped", after)) == 1
        )  # worker 0's, of the call that was unused

        drawing = draw_context(ctx)
        assert drawing.count("subgraph cluster_") == 3
        ends = set(re.findall(r"-> (s\d+)", drawing))
        nodes = set(re.findall(r"(s\d+) \[shape=box", drawing))
        assert ends <= nodes
        assert len(nodes) == 6  # three calls, three answers
        groups = set(re.findall(r"(g\d+_\d+) \[shape=ellipse", drawing))
        assert groups == set(re.findall(r"-> (g\d+_\d+);", drawing))  # something leads to each
        assert drawing.count("{") == drawing.count("}")


def test_a_context_that_has_lost_a_worker() -> None:
    x = torch.ones(1, requires_grad=True)
    with cluster(3) as c, context() as ctx:
        rpc.rpc_sync(2, double, (rpc.rpc_sync(1, double, (x,)),))
        c.workers[2].close()
        c.workers[0].lose(2, "its process has ended")
        shown = describe_context(ctx)
        assert [line.split(":")[0] for line in shown.splitlines() if line[0] == "w"] == ["worker0", "worker1"]
        assert draw_context(ctx).count("subgraph cluster_") == 2
