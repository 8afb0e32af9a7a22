"""Clusters in one process."""

from __future__ import annotations

import threading

import pytest
import torch

from zmqgrad import rpc
from zmqgrad.errors import NotInitializedError
from zmqgrad.rpc.current import current_worker_or_none
from zmqgrad.testing import Cluster, cluster
from zmqgrad.wire.messages import MessageType


def test_the_block_acts_for_worker_0_and_others_can_be_acted_for() -> None:
    with cluster(3) as c:
        assert rpc.get_worker_info().name == "worker0"
        with c.acting(2) as worker:
            assert rpc.get_worker_info().name == worker.name == "worker2"
            assert rpc.rpc_sync("worker0", torch.add, args=(1, 2)) == 3
        assert rpc.get_worker_info().name == "worker0"
    assert current_worker_or_none() is None
    with pytest.raises(NotInitializedError, match="init_rpc first"):
        rpc.get_worker_info()


def test_workers_share_no_object_by_accident() -> None:
    with cluster(2):
        tensor, items = torch.zeros(3), [1]
        rpc.rpc_sync(1, torch.Tensor.fill_, args=(tensor, 5))
        rpc.rpc_sync(1, list.append, args=(items, 2))
        assert tensor.sum() == 0
        assert items == [1]


def test_the_network_records_messages() -> None:
    with cluster(2) as c:
        rpc.rpc_sync(1, abs, args=(-1,))
        said = [(p.envelope.source, p.target, p.envelope.type) for p in c.network.history]
        assert said == [(0, 1, MessageType.CALL), (1, 0, MessageType.RESULT)]


def test_two_clusters_know_nothing_of_each_other() -> None:
    with cluster(2) as one, cluster(2) as two:
        assert rpc.rpc_sync(1, abs, args=(-1,)) == 1
        assert len(one.network.history) == 0
        assert len(two.network.history) == 2


def test_a_cluster_without_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one worker, not 0"):
        Cluster(0)


def test_close_is_idempotent_and_fails_pending_calls() -> None:
    go = threading.Event()
    holders.append(go)
    c = Cluster(2)
    with c.acting(0):
        future = rpc.rpc_async(1, hold)
    c.workers[0].close()
    with pytest.raises(RuntimeError, match="shut down"):
        future.wait()
    go.set()
    c.close()
    c.close()


holders: list[threading.Event] = []


def hold() -> None:
    """Until the test lets go."""
    holders[-1].wait(10)
