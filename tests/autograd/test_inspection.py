"""Contexts from the inside, under the names that torch has for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from zmqgrad import autograd, rpc
from zmqgrad.autograd import DistAutogradContext
from zmqgrad.errors import AutogradError, NotInitializedError
from zmqgrad.testing import Cluster, cluster

SEND = "torch::distributed::autograd::SendRpcBackward"
RECV = "torch::distributed::autograd::RecvRpcBackward"


@pytest.fixture
def c() -> Iterator[Cluster]:
    with cluster(3) as made:
        yield made


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def names(functions: Any) -> list[str]:
    return [node.name() for node, _ in functions]


def seen_there(context_id: int) -> tuple[list[list[str]], list[str], set[int]]:
    """What follows the sends, the names of the recvs, and the workers known."""
    context = autograd._retrieve_context(context_id)
    sends = [names(send.next_functions) for send in context._send_functions().values()]
    return sends, [recv.name() for recv in context._recv_functions().values()], context._known_worker_ids()


def test_sends_and_recvs_at_both_ends_of_a_call(c: Cluster) -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        z = rpc.rpc_sync(1, add, (x * 2, y))
        context = autograd._current_context()
        assert context._context_id() == context_id
        (send,) = context._send_functions().values()
        assert send.name() == SEND
        assert names(send.next_functions) == ["MulBackward0", "torch::autograd::AccumulateGrad"]
        assert send.next_functions[1][0].variable is y
        assert list(context._recv_functions().values()) == [z.grad_fn]
        assert context._known_worker_ids() == {1}
        sends, recvs, known = rpc.rpc_sync(1, seen_there, (context_id,))
        assert (sends, recvs, known) == ([["AddBackward0"]], [RECV], {0})
        (again,) = context._send_functions().values()
        assert (again, hash(again)) == (send, hash(send))
        assert "to worker 1: " in repr(send)


def test_peers_without_differentiable_tensors_are_known(c: Cluster) -> None:
    with autograd.context():
        context = autograd._current_context()
        with torch.no_grad():
            waits = rpc.rpc_async(1, add, (torch.ones(1), 1))
            assert context._known_worker_ids() == {1}  # before any answer
        rpc.rpc_sync(2, add, (1, 2))
        assert context._known_worker_ids() == {1, 2}
        assert (context._send_functions(), context._recv_functions()) == ({}, {})
        waits.wait()


def test_a_context_without_a_block(c: Cluster) -> None:
    made = autograd._new_context()
    number = made._context_id()
    assert made == autograd._current_context() == autograd._retrieve_context(number)
    assert hash(made) == hash(autograd._current_context())
    assert isinstance(made, DistAutogradContext)
    autograd._is_valid_context(number)
    with pytest.raises(AutogradError, match="Already have an autograd context id for this thread"):
        autograd._new_context()
    with pytest.raises(AutogradError, match="Already have"), autograd.context():
        pass
    x = torch.ones(1, requires_grad=True)
    autograd.backward(number, [rpc.rpc_sync(1, add, (x, x))])
    assert autograd.get_gradients(number)[x].tolist() == [2.0]
    autograd._release_context(number)
    for asks in (autograd._retrieve_context, autograd._is_valid_context, autograd._release_context):
        with pytest.raises(AutogradError, match=f"Could not find autograd context with id: {number}"):
            asks(number)
    with pytest.raises(AutogradError, match="Current thread doesn't have a valid autograd context"):
        autograd._current_context()
    assert rpc.rpc_sync(1, add, (x, x)).is_leaf  # nothing is recorded any more
    with autograd.context() as another:
        assert another != number


def test_numbers_of_contexts(c: Cluster) -> None:
    with c.acting(2):
        assert autograd._get_max_id() == (2 << 48) + (1 << 48) - 1
        with autograd.context() as context_id:
            assert context_id >> 48 == 2
            expected = {"num_autograd_contexts": 1, "num_current_backward_passes": 0}
            assert autograd.get_debug_info() == expected
            assert autograd._get_debug_info() == {name: str(n) for name, n in expected.items()}


class Held(torch.autograd.Function):
    """Its backward waits until the test goes on."""

    reached, go_on = threading.Event(), threading.Event()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Any function."""
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Wait."""
        Held.reached.set()
        assert Held.go_on.wait(20)
        return gradients[0]


def hold(x: Tensor) -> Tensor:
    return cast("Tensor", Held.apply(x))


def test_a_running_pass_counts_on_each_worker_that_is_part_of_it(c: Cluster) -> None:
    def running() -> list[int]:
        found = []
        for worker in range(3):
            with c.acting(worker):
                found.append(autograd.get_debug_info()["num_current_backward_passes"])
        return found

    def run(context_id: int, loss: Tensor) -> None:
        with c.acting(0):
            autograd.backward(context_id, [loss])

    Held.reached.clear()
    Held.go_on.clear()
    x = torch.ones(1, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync(1, hold, (x,)) * 1
        rpc.rpc_sync(2, add, (x, x))  # nothing depends on it
        thread = threading.Thread(target=run, args=(context_id, loss))
        thread.start()
        assert Held.reached.wait(20)
        assert running() == [1, 1, 0]
        Held.go_on.set()
        thread.join(20)
        assert running() == [0, 0, 0]
        assert autograd.get_gradients(context_id)[x].tolist() == [1.0]


def test_init_only_checks_the_worker(c: Cluster) -> None:
    assert autograd.is_available()
    autograd._init(0)
    with pytest.raises(AutogradError, match="worker 0, not 1"):
        autograd._init(1)


def test_without_rpc_there_are_no_contexts() -> None:
    for asks in (autograd._new_context, autograd._get_debug_info, autograd._get_max_id):
        with pytest.raises(NotInitializedError):
            asks()
