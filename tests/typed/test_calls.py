"""Type checkers know the results of calls, and what they cannot know is Any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.futures import Future
from typing_extensions import assert_type

from zmqgrad import rpc
from zmqgrad.errors import OperatorError
from zmqgrad.store import HashStore
from zmqgrad.testing import cluster


def halve(number: int, digits: int = 0) -> float:
    return round(number / 2, digits)


@rpc.functions.async_execution
def halve_there(to: str, number: int) -> Future[float]:
    return rpc.rpc_async(to, halve, args=(number,))


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, number: int) -> int:
        self.count += number
        return self.count


def test_a_with_block_has_the_class_of_its_store() -> None:
    with HashStore() as store:
        assert assert_type(store, HashStore).num_keys() == 0


def test_results_have_types() -> None:
    with cluster(2):
        assert assert_type(rpc.rpc_sync("worker1", halve, args=(3, 1)), float) == 1.5
        assert assert_type(rpc.rpc_async("worker1", halve, args=[4]), rpc.RpcFuture[float]).wait() == 2
        assert assert_type(rpc.rpc_async("worker1", halve, kwargs={"number": 4}).wait(), float) == 2
        assert assert_type(rpc.rpc_sync("worker1", torch.neg, args=(torch.ones(1),)), torch.Tensor) == -1
        futures = rpc.broadcast(["worker1"], halve, args=(4,))
        assert [assert_type(each.wait(), float) for each in futures] == [2]


def test_an_asynchronous_function_returns_what_its_future_has() -> None:
    with cluster(2):
        assert assert_type(rpc.rpc_sync("worker1", halve_there, args=("worker0", 4)), float) == 2
        there = rpc.remote("worker1", halve_there, args=("worker0", 4))
        assert assert_type(there, rpc.RRef[float]).to_here() == 2


def test_methods_of_references_are_checked() -> None:
    with cluster(2):
        counter = rpc.remote("worker1", Counter, args=(1,))
        assert assert_type(counter, rpc.RRef[Counter]).owner_name() == "worker1"
        assert assert_type(counter.rpc_sync().add(2), int) == 3
        with pytest.raises(TypeError):
            counter.rpc_sync().add("two")  # type: ignore[arg-type]


def test_arguments_are_checked_where_a_call_takes_those_of_the_function() -> None:
    with cluster(2):
        assert assert_type(rpc.checkpoint("worker1", halve, 3, digits=1), float) == 1.5
        assert assert_type(rpc.checkpoint("worker1", halve, 4, timeout=30), float) == 2
        assert assert_type(rpc.checkpoint_async("worker1", halve, 4), rpc.RpcFuture[float]).wait() == 2
        with pytest.raises(TypeError):
            rpc.checkpoint("worker1", halve, "three")  # type: ignore[call-overload]


def test_groups_have_types() -> None:
    with cluster(2):
        workers = rpc.group("worker*")
        assert assert_type(workers.call(halve, args=(4,)), list[float]) == [2, 2]
        assert assert_type(workers.choose(halve, args=(4,)), float) == 2
        counters = workers.remote(Counter)
        assert assert_type(counters[0], rpc.RRef[Counter]).rpc_sync().add(1) == 1


def test_a_function_without_types_has_any_result() -> None:
    with cluster(2):
        add: Any = torch.add
        assert assert_type(rpc.rpc_sync("worker1", add, args=(1, 2)), Any) == 3
        with pytest.raises(OperatorError):
            rpc.rpc_sync("worker1", add, args=("one",))
