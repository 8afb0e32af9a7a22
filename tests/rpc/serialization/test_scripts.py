"""TorchScript: functions go by name, modules as copies; errors are RuntimeErrors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zmqgrad.autograd as dist_autograd
import zmqgrad.rpc as rpc
from zmqgrad.errors import ConfigurationError, OperatorError, PayloadError
from zmqgrad.rpc.serialization.naming import find_function, reference_to
from zmqgrad.testing import Cluster, cluster


@torch.jit.script
def scaled(x: torch.Tensor, by: int = 3) -> torch.Tensor:
    return x * by


@torch.jit.script
def picky(x: int) -> int:
    if x > 0:
        raise ValueError("above zero")
    return x


@rpc.functions.async_execution
@torch.jit.script
def scaled_later(x: torch.Tensor, by: int = 3) -> torch.jit.Future[torch.Tensor]:
    return torch.jit.fork(scaled, x, by)


def hidden() -> Callable[..., torch.Tensor]:
    @torch.jit.script
    def two_steps(x: torch.Tensor, by: int = 5) -> torch.Tensor:
        return scaled(x, by) + 1

    return two_steps


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("shift", torch.full((2,), 7.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x) + self.shift
        return out


def apply(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


X = torch.tensor([1.0, 2.0])


@pytest.fixture
def pair() -> Iterator[Cluster]:
    with cluster(2) as made, made.acting(0):
        yield made


def test_functions_that_both_have_go_by_name(pair: Cluster) -> None:
    for how in (rpc.rpc_sync, lambda *a: rpc.remote(*a).to_here(), lambda *a: rpc.rpc_async(*a).wait()):
        assert torch.equal(how("worker1", scaled, (X,)), X * 3)
        assert torch.equal(how("worker1", scaled, (), {"x": X, "by": 2}), X * 2)
    assert rpc.rpc_sync("worker1", apply, (apply, scaled, X)).tolist() == (X * 3).tolist()
    assert rpc.rpc_sync("worker1", find_function, (reference_to(scaled),)) is not None


def test_functions_that_cannot_be_found_by_name_are_refused(pair: Cluster) -> None:
    function = hidden()
    assert reference_to(function) == ""
    for how in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(PayloadError, match=r"func .*two_steps is sent by name"):
            how("worker1", function, (X,))
        with pytest.raises(PayloadError, match=r"args\[0\] .*two_steps is sent by name"):
            how("worker1", apply, (function, X))
    with pytest.raises(PayloadError, match=r"two_steps is sent by name"):
        rpc.rpc_sync("worker1", hidden)


def test_modules_arrive_as_copies(pair: Cluster) -> None:
    scripted = torch.jit.script(Layer())
    expected = scripted(X)
    assert torch.equal(rpc.rpc_sync("worker1", scripted, (X,)), expected)
    copy = rpc.rpc_sync("worker1", apply, (lambda m: m, scripted))
    assert copy is not scripted
    assert torch.equal(copy(X), expected)
    assert all(p.requires_grad for p in copy.parameters())
    with torch.no_grad():
        copy.linear.weight.zero_()
    assert torch.equal(scripted(X), expected)


def test_a_script_module_is_called_on_its_owner(pair: Cluster) -> None:
    rref = rpc.remote("worker1", torch.jit.script, (Layer(),))
    there = rref.rpc_sync().forward(X)
    assert torch.equal(rref.to_here()(X), there)
    assert torch.equal(rref.remote().forward(X).to_here(), there)


def test_its_errors_are_those_of_torch_here_and_runtime_errors(pair: Cluster) -> None:
    for wait in (
        lambda: rpc.rpc_sync("worker1", picky, (1,)),
        lambda: torch.futures.wait_all([rpc.rpc_async("worker1", picky, (1,))]),
        lambda: rpc.remote("worker1", picky, (1,)).to_here(),
        lambda: rpc.rpc_sync("worker1", rpc.rpc_sync, ("worker0", picky, (1,))),
    ):
        with pytest.raises(RuntimeError, match="above zero") as caught:
            wait()
        assert isinstance(caught.value, torch.jit.Error)


@pytest.mark.parametrize(
    ("args", "kwargs", "told"),
    [
        ((X, 1, 2), {}, r"scaled\(\) expected at most 2 argument\(s\) but received 3 argument\(s\)"),
        ((X,), {"times": 2}, "Unknown keyword argument 'times'"),
        ((), {"by": 2}, r"scaled\(\) is missing value for argument 'x'"),
    ],
)
def test_arguments_are_counted_before_anything_is_sent(
    pair: Cluster, args: Any, kwargs: Any, told: str
) -> None:
    for how in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(OperatorError, match=told):
            how("worker1", scaled, args, kwargs)
    with pytest.raises(RuntimeError, match=told):
        scaled(*args, **kwargs)


def test_a_method_of_a_module_cannot_go(pair: Cluster) -> None:
    with pytest.raises(TypeError, match=r"pickle.*ScriptMethod"):
        rpc.rpc_async("worker1", torch.jit.script(Layer()).forward, (X,))


def test_an_asynchronous_script_function(pair: Cluster) -> None:
    assert torch.equal(rpc.rpc_sync("worker1", scaled_later, args=(X,)), X * 3)
    assert torch.equal(rpc.rpc_async("worker1", scaled_later, args=(X, 5)).wait(), X * 5)
    assert torch.equal(rpc.remote("worker1", scaled_later, args=(X,), kwargs={"by": 2}).to_here(), X * 2)


def use_sync(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("worker1", scaled, (x,))


def use_remote(x: torch.Tensor) -> torch.Tensor:
    return rpc.remote("worker1", scaled, (x,)).to_here()


def use_future(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_async("worker1", scaled, (x,)).wait()


def use_backward(context_id: int, x: torch.Tensor) -> None:
    dist_autograd.backward(context_id, [x])


def use_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    return dist_autograd.get_gradients(context_id)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (use_sync, "rpc.rpc_sync"),
        (use_remote, "rpc.remote"),
        (use_future, "rpc.rpc_async"),
        (use_backward, "autograd.backward"),
        (use_gradients, "autograd.get_gradients"),
    ],
)
def test_what_torchscript_cannot_call_is_named(function: Callable[..., Any], told: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"TorchScript cannot compile zmqgrad\.{told}: call it from"
    ):
        torch.jit.script(function)


def test_a_reference_is_no_argument_of_a_script_function(pair: Cluster) -> None:
    for args, kwargs in (((rpc.RRef(X),), {}), ((), {"x": rpc.RRef(X)})):
        with pytest.raises(OperatorError, match=r"scaled\(\) cannot have one: call it by a Python function"):
            rpc.rpc_sync("worker1", scaled, args, kwargs)
