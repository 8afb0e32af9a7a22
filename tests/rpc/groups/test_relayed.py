"""Group calls to other hosts: each gets large arguments once, whatever happens to who passes them on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.support.waiting import eventually
from zmqgrad import autograd, rpc
from zmqgrad.errors import GroupError, PeerLostError, RpcTimeoutError
from zmqgrad.rpc.current import current_worker
from zmqgrad.runtime.clock import ManualClock
from zmqgrad.testing import Cluster, cluster
from zmqgrad.wire.messages import MessageType

SIZE = 500_000
BYTES = 4 * SIZE
FAR = [2, 3, 4, 5]

runs: Counter[str] = Counter()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def hosts(clock: ManualClock) -> Iterator[Cluster]:
    """Workers 0 and 1 are on one host, 2 to 5 on another one."""
    runs.clear()
    with cluster(6, clock=clock, hosts="aabbbb") as c:
        yield c
        eventually(lambda: [worker.shelf.keys() for worker in c.workers], lambda left: not any(left))


def names(*ranks: int) -> list[str]:
    return [f"worker{rank}" for rank in ranks]


def total(x: torch.Tensor) -> tuple[str, float]:
    """Who runs this, and what it has got; it writes to it, too."""
    name = current_worker().name
    runs[name] += 1
    found = float(x.sum())
    x.zero_()
    return name, found


def sent(c: Cluster, rank: int) -> int:
    """How many bytes a worker has sent."""
    count: int = c.workers[rank].mailbox.statistics()["bytes_sent"]
    return count


def calls_between(c: Cluster, sources: list[int], target: int) -> int:
    """How many calls ``sources`` have sent to ``target``."""
    return sum(
        m.envelope.type == MessageType.CALL and m.envelope.source in sources and m.target == target
        for m in list(c.network.history)
    )


@contextmanager
def relay_2_is_late(c: Cluster, **options: Any) -> Iterator[rpc.GroupFuture[Any]]:
    """A call to all far workers, of whom 3, 4 and 5 wait for worker 2, which waits for the frames."""
    with c.network.hold(MessageType.RESULT, 1, source=0, target=2) as frames:
        with c.network.hold(MessageType.CALL, 3, source=0, target=[3, 4, 5]):
            future = rpc.group(FAR).call_async(total, (torch.ones(SIZE),), **options)
            frames.wait()
        eventually(lambda: calls_between(c, [3, 4, 5], 2) == 3)
        yield future


def lose(c: Cluster, lost: int, at: list[int]) -> None:
    """The workers ``at`` lose another one."""
    for rank in at:
        c.workers[rank].lose(lost, "unplugged")


def test_each_other_host_gets_large_arguments_once(hosts: Cluster) -> None:
    x = torch.ones(SIZE)
    assert rpc.group(FAR).call(total, (x,)) == [(name, SIZE) for name in names(*FAR)]
    assert BYTES < sent(hosts, 0) < 1.5 * BYTES
    before = sent(hosts, 0)
    everyone = rpc.group("worker*")
    assert everyone.call_async(total, (x,)).wait() == [(name, SIZE) for name in names(*range(6))]
    assert sent(hosts, 0) - before < 3.5 * BYTES  # one is for itself, one for its neighbour
    assert float(x.sum()) == SIZE
    assert set(runs.values()) == {1, 2}
    for future in rpc.broadcast(FAR, total, (x,)):
        assert future.wait()[1] == SIZE
    assert sent(hosts, 0) - before < 4.5 * BYTES


@pytest.mark.parametrize(("size", "group"), [(1000, FAR), (SIZE, [0, 1, 2])])
def test_small_arguments_and_single_members_get_theirs_directly(
    hosts: Cluster, size: int, group: list[int]
) -> None:
    found = rpc.group(group).call(total, (torch.ones(size),))
    assert found == [(name, size) for name in names(*group)]
    assert calls_between(hosts, FAR, 0) == 0


def test_all_kinds_of_arguments_arrive_as_they_are(hosts: Cluster) -> None:
    args = (torch.rand(700, 900).t(), {"many": [torch.rand(50) for _ in range(200)]}, bytes(BYTES), "text")
    for found in rpc.group(FAR).call(same, args):
        assert torch.equal(found[0], args[0])
        assert all(map(torch.equal, found[1]["many"], args[1]["many"]))
        assert found[2:] == args[2:]


def same(*args: Any) -> Any:
    return args


class Sum:
    """Counts elements."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def add(self, x: torch.Tensor) -> float:
        return float(self.x.sum() + x.sum())


def test_references_are_made_and_called_with_them(hosts: Cluster) -> None:
    x = torch.ones(SIZE)
    sums = rpc.group(FAR).remote(Sum, (x,))
    assert sums.rpc_sync().add(x) == [2.0 * SIZE] * 4
    assert sent(hosts, 0) < 2.5 * BYTES
    twice = rpc.RRefGroup([sums[0], sums[0], sums[1]])
    assert twice.rpc_sync().add(x) == [2.0 * SIZE] * 3


def test_gradients_are_those_of_one_process(hosts: Cluster) -> None:
    x = torch.rand(SIZE, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [sum(rpc.group(FAR).call(loss, (x,)))])
        found = autograd.get_gradients(context_id)[x]
    (2 * x.square().sum() + 2 * x.square().sum()).backward()
    assert x.grad is not None
    assert torch.equal(found, x.grad)
    assert sent(hosts, 0) < 1.5 * BYTES


def loss(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum()


# ---- losses -----------------------------------------------------------------------------------------------


def test_another_member_passes_on_what_a_lost_one_should(hosts: Cluster) -> None:
    with relay_2_is_late(hosts) as future:
        lose(hosts, 2, [0, 3, 4, 5])
        with pytest.raises(GroupError, match="1 of 4 members of the group: worker2: PeerLostError") as e:
            future.wait()
    assert e.value.results == {name: (name, SIZE) for name in names(3, 4, 5)}
    assert isinstance(e.value.errors["worker2"], PeerLostError)
    assert {name: runs[name] for name in names(3, 4, 5)} == dict.fromkeys(names(3, 4, 5), 1)
    assert sent(hosts, 0) < 2.5 * BYTES
    hosts.workers[2].lose(0, "unplugged")  # it does not know yet


def test_a_member_that_only_its_neighbours_lose_is_not_asked_again(hosts: Cluster) -> None:
    with relay_2_is_late(hosts) as future:
        lose(hosts, 2, [3, 4, 5])
        eventually(lambda: sum(runs.values()) == 3)
    assert future.wait() == [(name, SIZE) for name in names(*FAR)]
    assert sent(hosts, 0) < 2.5 * BYTES


def test_a_slow_member_is_waited_for_during_half_of_the_time(clock: ManualClock, hosts: Cluster) -> None:
    with relay_2_is_late(hosts, timeout=40.0) as future:
        clock.advance(21.0)
        eventually(lambda: sum(each.done() for each in future.futures) == 3)
        clock.advance(20.0)
        # The time is over at both ends: worker2's own error may arrive before the caller gives up.
        with pytest.raises(GroupError, match=r"no reply within 40 s from worker2$|worker2: RpcTimeout") as e:
            future.wait()
        assert isinstance(e.value, RpcTimeoutError)
        assert sorted(e.value.results) == names(3, 4, 5)


def test_who_has_nothing_to_pass_on_says_so(hosts: Cluster) -> None:
    """The frames are dropped on their way to worker 2, as if its call were over: the others ask again."""
    with relay_2_is_late(hosts) as future:
        shelf = hosts.workers[2].shelf
        (key,) = shelf.keys()
        shelf.drop(key)
        eventually(lambda: sum(runs.values()) == 3)
    assert future.wait() == [(name, SIZE) for name in names(*FAR)]


def test_a_caller_that_is_lost_leaves_nothing(hosts: Cluster) -> None:
    with relay_2_is_late(hosts) as future:
        for rank in FAR:
            lose(hosts, 0, [rank])
        eventually(lambda: not any(hosts.workers[rank].shelf.keys() for rank in FAR))
        lose(hosts, 2, [0])
        for rank in (3, 4, 5):
            lose(hosts, rank, [0])
        with pytest.raises(GroupError, match="4 of 4 members"):
            future.wait()
    assert not runs


def test_a_call_that_is_over_leaves_nothing(clock: ManualClock, hosts: Cluster) -> None:
    """Also if the frames arrive at worker 2 later."""
    with relay_2_is_late(hosts, timeout=20.0) as future:
        clock.advance(21.0)
        with pytest.raises(GroupError, match="4 of 4 members"):
            future.wait()
        eventually(lambda: not any(hosts.workers[rank].shelf.keys() for rank in (0, *FAR)))
