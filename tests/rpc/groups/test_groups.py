"""Groups of workers over a cluster in memory: who is in them, what calls return, and what errors say."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from tests.support.waiting import eventually
from zmqgrad import rpc
from zmqgrad.errors import (
    ArgumentTypeError,
    ConfigurationError,
    GroupError,
    GroupTimeoutError,
    PayloadError,
    PeerLostError,
    RpcTimeoutError,
    RRefError,
    UnknownWorkerError,
)
from zmqgrad.rpc.current import current_worker
from zmqgrad.testing import Cluster, cluster


@pytest.fixture
def four() -> Iterator[Cluster]:
    with cluster(4) as c:
        yield c


@pytest.fixture
def gate() -> Iterator[int]:
    """The number of an event that :func:`wait_at` waits for; set at the end."""
    event = threading.Event()
    GATES.append(event)
    yield len(GATES) - 1
    event.set()


GATES: list[threading.Event] = []


def lose(c: Cluster, worker: int) -> None:
    """Worker 0 loses another one."""
    lost = threading.Event()
    rpc.on_loss(lambda info, why: lost.set() if info.id == worker else None)
    c.workers[0].lose(worker, "unplugged")
    assert lost.wait(20)


def wait_at(number: int) -> str:
    """Wait until the test lets go."""
    GATES[number].wait(20)
    return where()


def where() -> str:
    """Who runs this?"""
    return current_worker().name


def wait_on(name: str, number: int) -> str:
    """On the worker of that name, wait."""
    return wait_at(number) if where() == name else where()


def fail_on(name: str) -> str:
    """On the worker of that name, fail."""
    if where() == name:
        raise KeyError(f"not on {name}")
    return where()


def scaled(x: Any, by: int = 1) -> Any:
    """A product."""
    return x * by


ALL = ["worker0", "worker1", "worker2", "worker3"]


# ---- members ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "names"),
    [
        ("worker1", ["worker1"]),
        (2, ["worker2"]),
        (rpc.WorkerInfo("worker3", 3), ["worker3"]),
        (["worker2", 0, rpc.WorkerInfo("worker1", 1)], ["worker2", "worker0", "worker1"]),
        (["worker2", 2], ["worker2"]),
        ("worker*", ALL),
        ("worker[13]", ["worker1", "worker3"]),
        ("*2", ["worker2"]),
        (["worker3", "worker?"], ["worker3", "worker0", "worker1", "worker2"]),
        ("trainer*", []),
        ([], []),
    ],
)
def test_who_is_in_a_group(four: Cluster, workers: Any, names: list[str]) -> None:
    group = rpc.group(workers)

    assert [info.name for info in group] == names
    assert len(group) == len(names)
    assert group.members == tuple(group)
    if names:
        assert group.call(where) == names


def test_a_group_is_a_sequence(four: Cluster) -> None:
    group = rpc.group("worker*")

    assert group[0] == rpc.WorkerInfo("worker0", 0)
    assert group[1:].call(where) == ["worker1", "worker2", "worker3"]
    assert group[::-2].call(where) == ["worker3", "worker1"]
    assert (group[2:] | rpc.group([0, "worker3"])).call(where) == ["worker2", "worker3", "worker0"]
    assert rpc.group(group) is group
    assert "worker1" in group
    assert 1 in group
    assert group[1] in group
    assert "worker1" not in group[2:]
    assert repr(group) == "<WorkerGroup worker*>"
    assert repr(group[:2]) == "<WorkerGroup worker0, worker1>"
    with pytest.raises(IndexError):
        group[4]
    with pytest.raises(TypeError):
        group | ["worker1"]  # type: ignore[operator]


def test_a_pattern_follows_the_membership_and_a_list_does_not(four: Cluster) -> None:
    following, fixed = rpc.group("worker*") | rpc.group("worker*"), rpc.group("worker*")[1:]
    lose(four, 2)

    assert following.call(where) == ["worker0", "worker1", "worker3"]
    with pytest.raises(
        GroupError, match=r"1 of 3 members of the group: worker2: PeerLostError.*unplugged"
    ) as e:
        fixed.call(where)
    assert e.value.results == {"worker1": "worker1", "worker3": "worker3"}


def test_whose_call_fails_is_no_member_any_more(
    four: Cluster, gate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group changes before anybody is told by a call."""
    worker = four.workers[0]
    call = rpc.rpc_async(2, wait_at, args=(gate,))
    mark_left, pending = worker.membership.mark_left, []

    def mark(peer: int) -> None:
        pending.append(len(worker.client.pending))
        mark_left(peer)

    monkeypatch.setattr(worker.membership, "mark_left", mark)
    lose(four, 2)
    with pytest.raises(PeerLostError):
        call.wait()
    assert pending == [1]
    assert [info.name for info in rpc.group("worker*")] == ["worker0", "worker1", "worker3"]


def test_a_group_can_be_sent(four: Cluster) -> None:
    assert rpc.rpc_sync(3, call_from_there, (rpc.group("worker[12]"),)) == ["worker1", "worker2"]


def call_from_there(group: rpc.WorkerGroup) -> list[str]:
    """Call all members."""
    return group.call(where)


def test_a_member_that_is_unknown_where_the_group_is_used_fails_alone(four: Cluster) -> None:
    """It has left before that worker joined."""
    membership = four.workers[0].membership
    membership.learn(replace(membership.own, name="former", id=9))
    group = rpc.group(["former", "worker1", "worker2"])

    found, chosen = rpc.rpc_sync(3, use_there, (group,))
    assert [type(each) for each in found] == [UnknownWorkerError, str, str]
    assert sorted(chosen) == ["worker1", "worker1", "worker2", "worker2"]


def use_there(group: rpc.WorkerGroup) -> tuple[list[Any], list[str]]:
    """Call all members, and some."""
    return group.call(where, errors="return"), [group.choose(where) for _ in range(4)]


# ---- results ----------------------------------------------------------------------------------------------


def test_results_are_in_the_order_of_the_members_whoever_replies_first(four: Cluster, gate: int) -> None:
    future = rpc.group("worker*").call_async(wait_on, ("worker1", gate))
    ended = future.as_completed()

    first = [next(ended) for _ in range(3)]
    assert {info.name for info, _ in first} == {"worker0", "worker2", "worker3"}
    assert all(each.wait() == info.name for info, each in first)
    assert not future.done()
    GATES[gate].set()
    last, each = next(ended)
    assert (last.name, each.wait()) == ("worker1", "worker1")
    assert next(ended, None) is None
    assert future.wait() == ALL
    assert future.members == tuple(rpc.group("worker*"))


def test_the_future_of_a_group_is_one_of_torch(four: Cluster) -> None:
    group = rpc.group("worker*")

    async def awaited() -> list[str]:
        return await group.call_async(where)

    assert asyncio.run(awaited()) == ALL
    assert group.call_async(where).then(lambda f: len(f.wait())).wait() == 4
    assert rpc.wait_all([group.call_async(where), rpc.rpc_async(1, where)]) == [ALL, "worker1"]
    assert torch.futures.wait_all([group.call_async(where)]) == [ALL]


def test_a_future_that_the_program_has_set_stays_as_it_is(
    four: Cluster, gate: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """And C++ prints no error."""
    future = rpc.group("worker*").call_async(wait_on, ("worker1", gate))
    future.set_result(["enough"])
    GATES[gate].set()
    assert rpc.wait_all(future.futures) == ALL
    eventually(four.workers[0].is_idle)
    assert future.wait() == ["enough"]
    assert capfd.readouterr().err == ""


def test_arguments_are_those_of_rpc_sync(four: Cluster) -> None:
    group = rpc.group([1, 2])

    assert group.call(scaled, (2,)) == [2, 2]
    assert group.call(scaled, [2], {"by": 3}) == [6, 6]
    assert group.call(lambda timeout, errors: timeout + errors, kwargs={"timeout": 1, "errors": 2}) == [3, 3]
    assert [x.tolist() for x in group.call(torch.add, (torch.ones(2), 1))] == [[2.0, 2.0]] * 2
    with pytest.raises(PayloadError, match="must be a tuple of arguments"):
        group.call(scaled, "text")
    with pytest.raises(PayloadError, match="function should be callable"):
        group.call("scaled")  # type: ignore[call-overload]
    with pytest.raises(PayloadError, match=r"cannot serialize args\[0\]"):
        group.call(scaled, (threading.Lock(),))
    with pytest.raises(ConfigurationError, match='errors must be "raise" or "return"'):
        group.call(scaled, (1,), errors="ignore")  # type: ignore[call-overload]


def test_a_call_is_serialized_once(four: Cluster) -> None:
    times = 0

    class Counting:
        def __reduce__(self) -> Any:
            nonlocal times
            times += 1
            return float, (2.0,)

    assert rpc.group("*").call(scaled, (Counting(),)) == [2.0] * 4
    assert times == 1
    assert rpc.group("*").call_async(scaled, (Counting(),)).wait() == [2.0] * 4
    assert times == 2


def test_each_member_gets_its_own_references(four: Cluster) -> None:
    """R1 to R3: each of them keeps the value, and nothing does once all are gone."""
    value = rpc.RRef(5)
    held = rpc.group("*").call(keep, (value,))
    assert held == [5] * 4
    del value
    assert rpc.group("worker[123]").call(kept) == [5] * 3
    KEPT.clear()


KEPT: dict[str, Any] = {}


def keep(rref: Any) -> Any:
    """Keep a reference."""
    KEPT[where()] = rref
    return rref.to_here()


def kept() -> Any:
    """The value of the reference."""
    return KEPT[where()].to_here()


def test_map_gives_each_member_its_own_arguments(four: Cluster) -> None:
    group = rpc.group([3, 1])

    assert group.map(scaled, [(1,), (2,)]) == [1, 2]
    assert group.map(scaled, ([x] for x in "ab"), {"by": 2}) == ["aa", "bb"]
    assert group.map_async(scaled, [(1, 2), (3, 4)]).wait() == [2, 12]
    with pytest.raises(ConfigurationError, match=r"map got 3 sets .* for 2 members.*choose_async"):
        group.map(scaled, [(1,), (2,), (3,)])
    with pytest.raises(PayloadError, match=r"for one argument write args=\(x,\)"):
        group.map(scaled, torch.ones(2))


def test_choose_takes_who_has_least_to_do(four: Cluster, gate: int) -> None:
    group = rpc.group([1, 2, 3])

    assert sorted(group.choose(where) for _ in range(6)) == sorted(ALL[1:] * 2)
    busy = [rpc.rpc_async(1, wait_at, (gate,)), rpc.rpc_async(3, wait_at, (gate,))]
    assert [group.choose(where) for _ in range(4)] == ["worker2"] * 4
    chosen = [group.choose_async(wait_at, (gate,)) for _ in range(4)]
    GATES[gate].set()
    assert sorted(future.wait() for future in chosen) == ["worker1", "worker2", "worker2", "worker3"]
    lose(four, 2)
    assert {group.choose(where) for _ in range(4)} == {"worker1", "worker3"}
    assert rpc.wait_all(busy) == ["worker1", "worker3"]
    lose(four, 1)
    lose(four, 3)
    with pytest.raises(PeerLostError, match="unplugged"):
        group.choose(where)


# ---- references -------------------------------------------------------------------------------------------


class Counter:
    """Counts from a start; that of worker 1 is broken."""

    def __init__(self, start: int, broken: str = "") -> None:
        if where() == broken:
            raise ValueError(f"{broken} cannot count")
        self.value = start

    def add(self, number: int, to_all: torch.Tensor | None = None) -> int:
        """Count on."""
        self.value += number
        return self.value

    def owner(self, broken: str = "") -> str:
        """Who has this?"""
        return fail_on(broken)

    def wait(self, number: int) -> str:
        """Wait until the test lets go."""
        return wait_on("worker1", number)


def test_references_to_what_a_group_has_made(four: Cluster) -> None:
    counters = rpc.group("worker*").remote(Counter, (10,))

    assert len(counters) == 4
    assert [rref.owner_name() for rref in counters] == ALL
    assert counters.rpc_sync().add(1) == [11] * 4
    assert counters.rpc_async().add(number=2).wait() == [13] * 4
    assert counters.remote().add(3).to_here() == [16] * 4
    assert counters[1:3].rpc_sync().owner() == ["worker1", "worker2"]
    assert counters[0].rpc_sync().add(1) == 17
    assert [copy.value for copy in counters.to_here()] == [17, 16, 16, 16]
    assert repr(counters[:2]) == "<RRefGroup of worker0, worker1>"
    several = rpc.RRefGroup([*counters, *rpc.group("worker1").remote(Counter, (20,))])
    assert several.rpc_sync().add(0) == [17, 16, 16, 16, 20]
    assert len(several.rpc_sync().add(0, torch.ones(3))) == 5
    with pytest.raises(RRefError, match="RRefGroup without references"):
        counters[4:].rpc_sync().add(1)
    with pytest.raises(AttributeError, match="subtract"):
        counters[1:].remote().subtract(1)


def test_errors_of_references_name_their_owners(four: Cluster, gate: int) -> None:
    counters = rpc.group("worker*").remote(Counter, (10, "worker1"))

    for use in (counters.to_here, counters.rpc_sync().owner, lambda: counters.rpc_async().owner().wait()):
        with pytest.raises(GroupError, match=r"worker1: (RRef|Value)Error.*worker1 cannot count") as e:
            use()
        assert sorted(e.value.results) == ["worker0", "worker2", "worker3"]
    found = counters.rpc_sync(errors="return").owner("worker2")
    assert [type(each) for each in found] == [str, ValueError, KeyError, str]
    with pytest.raises(GroupTimeoutError, match=r"no reply within 0.1 s from worker1"):
        rpc.group("worker*").remote(Counter, (10,)).rpc_sync(timeout=0.1).wait(gate)
    twice = rpc.RRefGroup([counters[0], counters[1], counters[1]])
    with pytest.raises(GroupError, match=r"worker1 .member 1.: .*; worker1 .member 2.: ") as e:
        twice.rpc_sync().owner()
    assert list(e.value.results) == ["worker0"]


def test_each_value_gets_arguments_of_its_own(four: Cluster) -> None:
    counters = rpc.group("worker*").remote(Counter, (10,))
    assert counters.map("add", [(1,), (2,), (3,), (4,)]) == [11, 12, 13, 14]
    assert counters.map_async("add", ([n] for n in range(4))).wait() == [11, 13, 15, 17]
    with pytest.raises(
        ConfigurationError, match="map got 1 sets of arguments for 4 members of <RRefGroup of"
    ):
        counters.map("add", [(1,)])
    for args in ("text", torch.ones(2), 3):
        with pytest.raises(PayloadError, match=r"for one argument write args=\(x,\)"):
            counters.map("add", [args] * 4)  # type: ignore[list-item]


def test_futures_of_any_calls_are_iterated_as_they_end(four: Cluster, gate: int) -> None:
    late, *others = futures = [rpc.rpc_async(1, wait_at, (gate,)), *rpc.broadcast(None, where)]
    found = rpc.as_completed(futures)
    assert {next(found).wait() for _ in others} == {f"worker{n}" for n in range(4)}
    assert {future.peer for future in others} == set(range(4))
    with pytest.raises(RpcTimeoutError, match="4 of 5 calls are done after"):
        list(rpc.as_completed(futures, timeout=0.01))
    GATES[gate].set()
    assert list(found) == [late]
    assert list(rpc.as_completed([])) == []
    with pytest.raises(ArgumentTypeError, match=r"is not a torch\.futures\.Future"):
        rpc.as_completed([late, 5])  # type: ignore[list-item]


# ---- errors -----------------------------------------------------------------------------------------------


def test_an_error_has_the_results_of_the_others(four: Cluster) -> None:
    group = rpc.group("worker*")

    with pytest.raises(GroupError, match=r"fail_on failed on 1 of 4 members.*worker2: KeyError") as e:
        group.call(fail_on, ("worker2",))
    assert e.value.results == {"worker0": "worker0", "worker1": "worker1", "worker3": "worker3"}
    assert list(e.value.errors) == ["worker2"]
    assert isinstance(e.value.__cause__, KeyError)
    assert not isinstance(e.value, RpcTimeoutError)
    with pytest.raises(GroupError) as e:
        group.call_async(fail_on, ("worker2",)).wait()
    assert e.value.results == {"worker0": "worker0", "worker1": "worker1", "worker3": "worker3"}


def test_errors_can_be_returned(four: Cluster) -> None:
    group = rpc.group("worker*")
    lose(four, 1)
    with_lost = rpc.group(["worker0", "worker2"]) | rpc.group("worker*")

    found = with_lost.call(fail_on, ("worker2",), errors="return")
    assert [str(each) for each in found if not isinstance(each, Exception)] == ["worker0", "worker3"]
    assert isinstance(found[1], KeyError)
    assert "".join(traceback.format_exception(found[1])).count("not on worker2")
    again = group.call_async(fail_on, ("worker2",), errors="return").wait()
    assert [type(each) for each in again] == [str, KeyError, str]
    mapped: list[Any] = group.map(fail_on, [("worker0",), ("worker0",), ("worker0",)], errors="return")
    assert [type(each) for each in mapped] == [KeyError, str, str]


def test_who_has_not_answered_is_named(four: Cluster, gate: int) -> None:
    group = rpc.group("worker*")

    for call in (
        lambda: group.call(wait_on, ("worker1", gate), timeout=0.2),
        lambda: group.call_async(wait_on, ("worker1", gate), timeout=0.2).wait(),
    ):
        with pytest.raises(GroupTimeoutError, match=r"no reply within 0.2 s from worker1") as e:
            call()
        assert isinstance(e.value, RpcTimeoutError)
        assert sorted(e.value.results) == ["worker0", "worker2", "worker3"]
        assert isinstance(e.value.errors["worker1"], RpcTimeoutError)


def time_out_there() -> None:
    """Raise the error of a call of its own."""
    raise RpcTimeoutError("the store was silent")


def test_a_timeout_on_a_member_is_its_reply(four: Cluster) -> None:
    with pytest.raises(GroupTimeoutError, match=r"worker1: RpcTimeoutError.*the store was silent") as e:
        rpc.group("worker[12]").call(time_out_there)
    assert "no reply" not in str(e.value)


def test_a_member_that_dies_in_the_middle_is_named(four: Cluster, gate: int) -> None:
    group = rpc.group("worker*")

    future = group.call_async(wait_on, ("worker1", gate))
    lose(four, 1)
    with pytest.raises(GroupError, match=r"worker1: PeerLostError.*unplugged") as e:
        future.wait()
    assert sorted(e.value.results) == ["worker0", "worker2", "worker3"]


def test_a_group_without_members_says_what_to_do(four: Cluster) -> None:
    empty, matches_nothing = rpc.group([]), rpc.group("trainer*")

    for group in (empty, matches_nothing, rpc.group("worker*")[4:]):
        for call in (group.call, group.call_async, group.choose, group.choose_async):
            with pytest.raises(UnknownWorkerError, match=r"has no members.*rpc.wait_for_workers"):
                call(where)
        with pytest.raises(UnknownWorkerError, match="has no members"):
            group.map(scaled, [])


def test_who_is_unknown_is_refused(four: Cluster) -> None:
    for workers in (["worker1", "nobody"], "nobody", 7, [1.5], rpc.WorkerInfo("x", 9)):
        with pytest.raises(UnknownWorkerError):
            rpc.group(workers)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="a group is made of names"):
        rpc.group(None)  # type: ignore[arg-type]


def test_what_cannot_be_sent_to_a_later_member_stops_the_others(four: Cluster, gate: int) -> None:
    """The calls that were sent are given up."""

    class Sulking:
        pass

    with pytest.raises(PayloadError, match="cannot serialize"):
        rpc.group([1, 2]).map(scaled, [(Sulking,), (threading.Lock(),)])
    assert not current_worker().client.pending.all()
