"""Anomaly mode: no false alarms, a NaN is found where it arrives, an error names its forward call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from zmqgrad import rpc
from zmqgrad.autograd import backward, context, get_gradients
from zmqgrad.rpc.current import current_worker_or_none
from zmqgrad.testing import Cluster, cluster

To = Callable[[Callable[..., Tensor], Tensor], Tensor]


@pytest.fixture
def c() -> Iterator[Cluster]:
    with cluster(2) as made:
        yield made


@pytest.fixture(autouse=True)
def anomaly_mode() -> Iterator[None]:
    with torch.autograd.set_detect_anomaly(True):
        yield


def remotely(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    result: Tensor = rpc.rpc_sync(1, function, (x,))
    return result


def locally(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    return function(x)


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def same(x: Tensor) -> Tensor:
    return x


def square(x: Tensor) -> Tensor:
    return x * x


def refused(x: Tensor) -> Tensor:
    y = x.sin()
    y.register_hook(refuse)
    return y.exp()


def refuse(_: Tensor) -> None:
    raise ValueError("no gradient")


class Named(torch.autograd.Function):
    """Has an attribute of its own with the name of one of nodes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.name = "mine"
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ValueError(f"no gradient is {ctx.name}")


def named(x: Tensor) -> Tensor:
    y: Tensor = Named.apply(x)  # type: ignore[no-untyped-call]
    return y


def root_of_zero(x: Tensor) -> Tensor:
    return (x * 0).sqrt() * 0


def times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda gradient: gradient * factor


def split(to: To, w: Tensor, hooked: bool) -> Tensor:
    """A graph with cut edges, some of which lead to others."""
    x = w * w
    if hooked:
        x.register_hook(times(3))
    return (x.exp() + to(square, x) + w + to(square, to(square, w)) * x).sum()


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("action", ["always", "error"])
def test_split_graphs_cause_no_warnings(c: Cluster, capfd: Any, action: Any, hooked: bool) -> None:
    w, alone = leaf(0.5), leaf(0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        split(locally, alone, hooked).backward()  # type: ignore[no-untyped-call]
        with context() as ctx:
            backward(ctx, [split(remotely, w, hooked)])
            assert get_gradients(ctx)[w].item() == pytest.approx(alone.grad.item())  # type: ignore[union-attr]
    assert [str(each.message) for each in caught] == []
    assert "Error detected" not in capfd.readouterr().err


@pytest.mark.parametrize("stage", [refused, named, root_of_zero])
def test_an_error_carries_the_forward_call_on_its_worker(c: Cluster, stage: Callable[..., Tensor]) -> None:
    nan = stage is root_of_zero
    kind, text = (RuntimeError, "returned nan values in") if nan else (ValueError, "no gradient")
    with warnings.catch_warnings(record=True), pytest.raises(kind, match=text):
        stage(leaf(1)).sum().backward()
    with context() as ctx:
        loss = remotely(same, remotely(stage, leaf(1))).sum()
        with pytest.raises(kind, match=text) as caught:
            backward(ctx, [loss])
    report = str(caught.value)
    assert "Error on Node 1" in report
    assert f"in {stage.__name__}" in report.partition("forward call of ")[2].partition("On <Worker")[0]


def test_an_error_says_that_its_forward_call_is_not_known(c: Cluster) -> None:
    with context() as ctx:
        with torch.autograd.set_detect_anomaly(False):
            loss = remotely(root_of_zero, leaf(1))
        with pytest.raises(RuntimeError, match="anomaly mode was disabled there"):
            backward(ctx, [loss])


@pytest.mark.parametrize("at_a_leaf", [True, False])
def test_a_nan_that_arrives_is_found(c: Cluster, monkeypatch: pytest.MonkeyPatch, at_a_leaf: bool) -> None:
    """From a worker where anomaly mode is disabled."""

    def program(to: To) -> Tensor:
        x = leaf(1)
        return to(root_of_zero, x if at_a_leaf else x * 2).sum()

    with warnings.catch_warnings(record=True), pytest.raises(RuntimeError, match="returned nan values"):
        program(locally).backward()  # type: ignore[no-untyped-call]
    with context() as ctx:
        loss = program(remotely)
        torch.set_anomaly_enabled(False)
        monkeypatch.setattr(torch, "is_anomaly_enabled", lambda: current_worker_or_none() is c.workers[0])
        with pytest.raises(RuntimeError, match="worker 1 returned nan values") as caught:
            backward(ctx, [loss])
        assert get_gradients(ctx) == {}
    assert f"called in {__file__}" in str(caught.value)
    assert ("forward call of MulBackward0" in str(caught.value)) is not at_a_leaf


def test_check_nan_may_be_disabled(c: Cluster) -> None:
    x = leaf(1)
    with torch.autograd.set_detect_anomaly(True, check_nan=False), context() as ctx:
        backward(ctx, [remotely(root_of_zero, x).sum()])
        assert get_gradients(ctx)[x].isnan().all()
