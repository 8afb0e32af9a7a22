"""Private names of ``torch.distributed.rpc`` that libraries use."""

from __future__ import annotations

import copy
import enum
import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.rpc.membership.test_collectives import on_each
from zmqgrad import rpc
from zmqgrad.errors import ConfigurationError, NotInitializedError, RRefError, UnknownWorkerError
from zmqgrad.rpc import api, backend_registry
from zmqgrad.testing import Cluster, cluster

TORCH_RREF = torch._C._distributed_rpc.PyRRef


@pytest.fixture
def trio() -> Iterator[Cluster]:
    with cluster(3) as c:
        yield c


# ---- the agent -------------------------------------------------------------------------------------------


def test_the_agent_knows_the_workers(trio: Cluster) -> None:
    agent = rpc._get_current_rpc_agent()
    assert [(i.name, i.id) for i in agent.get_worker_infos()] == [(f"worker{n}", n) for n in range(3)]
    assert agent.get_worker_info() == rpc.get_worker_info()
    assert agent.get_worker_info("worker2") == agent.get_worker_info(2) == rpc.get_worker_info("worker2")
    with pytest.raises(UnknownWorkerError):
        agent.get_worker_info("nobody")
    assert int(agent.get_debug_info()["agent.thread_pool_size"]) == 16
    assert api._get_current_rpc_agent().get_worker_info().name == "worker0"


def test_the_agent_knows_the_device_maps() -> None:
    options = rpc.TensorPipeRpcBackendOptions(device_maps={"worker1": {"cuda:0": "cuda:1"}})
    # The devices are not touched: only their names are kept.
    with cluster(2, options) as c, c.acting(0):
        agent = rpc._get_current_rpc_agent()
        there = agent.get_worker_info("worker1")
        assert agent._get_device_map(there) == {torch.device("cuda:0"): torch.device("cuda:1")}
        assert agent._get_device_map(agent.get_worker_info()) == {}


@api._require_initialized
def add(x: int, y: int = 1) -> int:
    """Sum of both."""
    return x + y


def test_before_init_rpc() -> None:
    with pytest.raises(NotInitializedError, match="Current RPC agent is not set"):
        rpc._get_current_rpc_agent()
    with pytest.raises(NotInitializedError, match="RPC has not been initialized"):
        add(1)
    assert add.__name__ == "add"


def test_require_initialized_calls_the_function(trio: Cluster) -> None:
    assert add(1, y=2) == 3


# ---- collectives -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [set(), {}, [], None])
def test_no_names_means_all_workers(trio: Cluster, names: Any) -> None:
    gathered = on_each(trio, [0, 1, 2], lambda rank: api._all_gather(rank, worker_names=names))
    assert gathered == [{"worker0": 0, "worker1": 1, "worker2": 2}] * 3
    if names is not None:
        assert on_each(trio, [0, 1, 2], lambda rank: api._barrier(names)) == [None] * 3


def test_barrier_of_some(trio: Cluster) -> None:
    assert on_each(trio, [0, 2], lambda rank: api._barrier(["worker0", "worker2"])) == [None] * 2


def test_all_gather_states() -> None:
    state = rpc.AllGatherStates()
    assert state.gathered_objects == {}
    assert not state.proceed_signal.is_set()
    assert rpc.AllGatherStates().gathered_objects is not state.gathered_objects


# ---- names that torch has removed ------------------------------------------------------------------------


@pytest.mark.usefixtures("registries")
def test_the_process_group_backend() -> None:
    backend_registry.register_backend("OTHER", dict, dict)
    for kind in rpc.BackendType, backend_registry.BackendType:
        assert not hasattr(kind, "PROCESS_GROUP")
        with pytest.raises(ConfigurationError, match="Leave the argument `backend` out"):
            _ = kind.PROCESS_GROUP
        with pytest.raises(AttributeError, match="no member NOWHERE"):
            _ = kind.NOWHERE
        assert isinstance(kind.ZMQ, enum.Enum)
        assert repr(kind.TENSORPIPE) == "BackendType.TENSORPIPE"
    with pytest.raises(ConfigurationError, match=r"rpc\.ProcessGroupRpcBackendOptions"):
        _ = rpc.ProcessGroupRpcBackendOptions
    assert not hasattr(rpc, "ProcessGroupRpcBackendOptions")
    assert not hasattr(rpc, "nowhere")


# ---- isinstance with torch's class -----------------------------------------------------------------------


def kind_of(rref: Any) -> tuple[bool, bool, bool]:
    """How the receiver of a reference sees it."""
    return isinstance(rref, TORCH_RREF), isinstance(rref, rpc.RRef), type(rref) is rpc.RRef


def test_references_are_instances_of_torchs_class(trio: Cluster) -> None:
    for rref in (rpc.RRef(1), rpc.RRef[int](1), rpc.remote(1, add, (1,))):
        assert kind_of(rref) == (True, True, True)
        for to in range(3):
            assert rpc.rpc_sync(to, kind_of, (rref,)) == (True, True, True)
            assert rpc.rpc_sync(to, kind_of, ({"a": [rref]}["a"][0],)) == (True, True, True)
    assert not isinstance(1, TORCH_RREF)
    assert not issubclass(rpc.RRef, TORCH_RREF)


def test_they_cannot_be_pickled_or_copied(trio: Cluster) -> None:
    rref = rpc.remote(1, add, (1,))
    for attempt in pickle.dumps, copy.copy, copy.deepcopy:
        with pytest.raises(RRefError, match="Can not pickle rref in python pickler"):
            attempt(rref)


def test_they_are_freed(trio: Cluster) -> None:
    rref = rpc.RRef(torch.ones(1))
    freed = weakref.ref(rref)
    del rref
    gc.collect()
    assert freed() is None


@torch.jit.script
def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_torchscript_refuses_them(trio: Cluster) -> None:
    with pytest.raises(RuntimeError):
        _double(rpc.RRef(torch.ones(1)))
    assert torch.equal(_double(rpc.RRef(torch.ones(1)).local_value()), torch.full((1,), 2.0))


class Holder(torch.nn.Module):
    """A module with a reference as an attribute, which ``forward`` does not use."""

    def __init__(self, rref: Any) -> None:
        super().__init__()
        self.rref = rref

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice ``x``."""
        return x * 2


def test_torchscript_skips_them_where_a_module_says_so(
    trio: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The price of ``isinstance``, which docs/api-differences.md names: TorchScript tries to convert them."""
    module = Holder(rpc.RRef(1))
    with pytest.raises(RuntimeError, match="Unable to cast Python instance"):
        torch.jit.script(module)
    monkeypatch.setattr(Holder, "__jit_ignored_attributes__", ["rref"], raising=False)
    assert torch.equal(torch.jit.script(module)(torch.ones(1)), torch.full((1,), 2.0))


def test_futures_carry_them(trio: Cluster) -> None:
    future: torch.futures.Future[Any] = torch.futures.Future()
    rref = rpc.RRef(3)
    future.set_result(rref)
    assert future.wait() is rref
    assert future.then(lambda f: f.wait().local_value()).wait() == 3
