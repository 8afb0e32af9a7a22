"""Group calls over real processes: one of which dies in the middle, and one that joins later."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.support.processes import run_processes
from tests.support.waiting import eventually
from zmqgrad import rpc
from zmqgrad.errors import GroupError, PeerLostError

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def die_on(name: str, x: Any) -> str:
    """The worker of that name ends at once."""
    if rpc.get_worker_info().name == name:
        os._exit(3)
    return rpc.get_worker_info().name


def total(x: torch.Tensor) -> float:
    """The sum of a tensor."""
    return float(x.sum())


def doubled(x: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Of an argument that belongs to this worker, which keeps it and writes to it."""
    x.mul_(2)
    kept.append(x)
    return float(x.sum()), x[:2]


kept: list[torch.Tensor] = []


def drop() -> float:
    """What was kept, and is let go."""
    total = sum(float(x.sum()) for x in kept)
    kept.clear()
    return total


def leased() -> int:
    """Blocks that others hold."""
    blocks: int = rpc.get_stats()["arena"]["blocks_leased"]
    return blocks


class Replay:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, what: Any) -> int:
        """Keep it."""
        self.seen.append(what)
        return len(self.seen)


def calls(rank: int) -> Any:
    rpc.init_rpc(f"worker{rank}")
    if rank != 0:
        rpc.shutdown()
        return None
    everyone, others = rpc.group("worker*"), rpc.group([1, 2, 3])
    for size in (1, 100_000):
        x = torch.ones(size)
        assert everyone.call(total, (x,)) == [size] * 4
        assert everyone.call_async(total, (x,)).wait() == [size] * 4
        assert others.map(total, [(x * n,) for n in range(3)]) == [0, size, 2 * size]
    assert (
        sorted(float(f.wait()) for _, f in others.call_async(total, (x,)).as_completed()) == [100_000.0] * 3
    )
    assert [(total, y.tolist()) for total, y in everyone.call(doubled, (x,))] == [(200_000.0, [2.0, 2.0])] * 4
    assert [total for total, _ in everyone.call_async(doubled, (x,)).wait()] == [200_000.0] * 4
    assert float(x.sum()) == 100_000.0
    eventually(leased, lambda blocks: blocks == 2)  # one copy for all members, of each call
    assert everyone.call(drop) == [400_000.0] * 4
    eventually(lambda: leased() == 0)
    replays = everyone.remote(Replay)
    assert replays.rpc_sync().note(x) == [1] * 4
    assert [len(each.seen) for each in replays.to_here()] == [1] * 4
    del replays
    for attempt in (1, 2):
        with pytest.raises(GroupError, match=r"1 of 3 members of the group: worker2: PeerLostError") as e:
            others.call(die_on, ("worker2", x))
        assert e.value.results == {"worker1": "worker1", "worker3": "worker3"}, attempt
        assert isinstance(e.value.errors["worker2"], PeerLostError)
    assert rpc.group("worker*").call(die_on, ("worker2", x)) == ["worker0", "worker1", "worker3"]
    rpc.shutdown()
    return None


def test_group_calls_over_processes() -> None:
    run_processes(calls, 4, may_die={2})
