"""Group calls over real processes: one of which dies in the middle, and one that joins later."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch

from tests.support.namespaces import Hosts, enter, hosts
from tests.support.processes import run_processes
from tests.support.waiting import eventually
from zmqgrad import rpc
from zmqgrad.errors import GroupError, PeerLostError
from zmqgrad.rpc.current import current_worker

pytestmark = [pytest.mark.processes, pytest.mark.slow]

__all__ = ["hosts"]


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


# ---- two hosts ---------------------------------------------------------------------------------------------

SIZE = 1_500_000  # 6 MB
FAR = [1, 2, 3, 4]


def sent() -> int:
    """How many bytes this worker has sent through sockets."""
    return int(rpc.get_stats()["sent_by_path"]["frames"])


def far_total(dies: str, x: torch.Tensor) -> tuple[str, float]:
    """The sum of an argument that belongs to this worker; the one that dies does so when it has it."""
    name = die_on(dies, x)
    found = float(x.sum())
    x.zero_()
    return name, found


def all_is_free() -> None:
    """Wait until nobody reads memory of this worker, and it passes nothing on."""
    eventually(lambda: leased() == 0 and not current_worker().shelf.keys())


def across(rank: int) -> int:
    """0 calls members of another host, of which one after the other dies. Returns how much it has sent."""
    enter(min(rank, 1))
    rpc.init_rpc(f"worker{rank}", rpc_backend_options=rpc.RpcBackendOptions(rpc_timeout=60.0))
    if rank != 0:
        assert told_to_end.wait(90)
        rpc.shutdown(graceful=False)
        return 0
    x, everyone = torch.ones(SIZE), rpc.group("worker*")
    assert everyone.call(far_total, ("nobody", x)) == [(f"worker{n}", SIZE) for n in range(5)]
    once = sent()
    everyone[1:].call(all_is_free)
    all_is_free()
    for dies in ("worker1", "worker2"):
        members = rpc.group("worker*")
        with pytest.raises(GroupError, match=rf"members of the group: {dies}: PeerLostError") as e:
            members.call(far_total, (dies, x))
        living = [info.name for info in members if info.name != dies]
        assert e.value.results == {name: (name, SIZE) for name in living}
    rpc.group(living).call(all_is_free)
    rpc.group(living[1:]).call(end)
    rpc.shutdown(graceful=False)
    return once


told_to_end = threading.Event()


def end() -> None:
    """This worker is not needed any more."""
    told_to_end.set()


def die_while_others_wait(rank: int) -> bool:
    """0 is killed when the first of its members has the arguments."""
    enter(min(rank, 1))
    rpc.init_rpc(f"worker{rank}", rpc_backend_options=rpc.RpcBackendOptions(rpc_timeout=60.0))
    if rank == 0:
        for _, future in rpc.group(FAR).call_async(far_total, ("nobody", torch.ones(SIZE))).as_completed():
            future.wait()
            os.kill(os.getpid(), signal.SIGKILL)
    rpc.on_loss(lambda info, why: told_to_end.set())
    assert told_to_end.wait(60)
    all_is_free()
    rpc.shutdown(graceful=False)
    return True


@pytest.mark.timeout(150)
def test_each_other_host_gets_arguments_once_and_members_may_die(hosts: Hosts) -> None:
    once = run_processes(across, 5, timeout=120, env=hosts.environment(), may_die=[1, 2])[0]
    assert 4 * SIZE <= once < 6 * SIZE


@pytest.mark.timeout(150)
def test_a_killed_caller_leaves_no_memory_on_another_host(hosts: Hosts) -> None:
    results = run_processes(die_while_others_wait, 5, timeout=120, env=hosts.environment(), may_die=[0])
    assert results[1:] == [True] * 4
