"""Independent branches of one pass on one worker run side by side; sums do not depend on which is first."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from zmqgrad import rpc
from zmqgrad.autograd import backward, context, get_gradients
from zmqgrad.autograd.engine import executor, participant, work_queue
from zmqgrad.rpc.current import current_worker_or_none
from zmqgrad.testing import Cluster, cluster

BRANCHES = 13
DEADLINE = 20.0


@pytest.fixture
def c() -> Iterator[Cluster]:
    with cluster(2) as c, c.acting(0):
        yield c


@pytest.fixture(autouse=True)
def enough_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_queue, "MAX_CONSUMERS", 4)


class Runs(torch.autograd.Function):
    """Calls a function in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Callable[[], object]) -> Tensor:
        ctx.then = then
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.then()
        return gradients[0] * 2, None


THEN: dict[str, Callable[[], object]] = {}
"""What branches do in their backward pass, by name: calls carry no functions of a test."""


def branch(x: Tensor, name: str) -> Tensor:
    y: Tensor = Runs.apply(x, THEN[name])  # type: ignore[no-untyped-call]
    return y


def same(x: Tensor) -> Tensor:
    return x


def two_branches(at: int, x: Tensor, first: str = "first", second: str = "second") -> Tensor:
    """The sum of two branches on worker ``at``, whose gradients come from the other worker."""
    names = (first, second)
    if at == 1:
        answers = [rpc.rpc_async(1, branch, (x, name)) for name in names]
    else:
        answers = [rpc.rpc_async(1, same, (branch(x, name),)) for name in names]
    return torch.stack([answer.wait() for answer in answers]).sum()


@pytest.mark.parametrize("at", [0, 1])
def test_two_branches_run_at_the_same_time(c: Cluster, at: int) -> None:
    both, seen = threading.Barrier(2), []

    def meet() -> None:
        both.wait(DEADLINE)
        seen.append((threading.get_ident(), current_worker_or_none(), torch.is_grad_enabled()))

    THEN.update(first=meet, second=meet)
    x = torch.ones(2, requires_grad=True)
    with context() as ctx:
        backward(ctx, [two_branches(at, x)])
        assert get_gradients(ctx)[x].tolist() == [4, 4]
    threads, workers, grad_enabled = zip(*seen, strict=True)
    assert len(set(threads)) == 2
    assert set(workers) == {c.workers[at]}
    assert set(grad_enabled) == {False}


def test_the_thread_of_timers_does_not_look_at_the_graph(c: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk over a large one takes seconds, in which it would answer no heartbeat."""
    both, threads, recomputes = threading.Barrier(2), list[str](), executor.recomputes

    def note(nodes: Iterable[Any]) -> bool:
        threads.append(threading.current_thread().name)
        return recomputes(nodes)

    monkeypatch.setattr(executor, "recomputes", note)
    THEN.update(dict.fromkeys(("first", "second"), lambda: both.wait(DEADLINE)))
    with context() as ctx:
        backward(ctx, [two_branches(1, torch.ones(2, requires_grad=True))])
    assert threads
    assert f"{c.workers[1].name}-service" not in threads


def recomputed(x: Tensor, name: str) -> Tensor:
    result: Tensor = checkpoint(lambda x: branch(x * x, name), x, use_reentrant=False)
    return result


@pytest.mark.parametrize("heavy", [False, True])
def test_branches_that_recompute_run_one_by_one(c: Cluster, heavy: bool) -> None:
    """Else one would set the random generator while another one draws from it."""
    running, most = 0, 0

    def run() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        threading.Event().wait(0.02)  # longer than it takes to let another thread help
        running -= 1

    THEN["recomputed"] = run
    if heavy:
        THEN.update(first=run, second=run)
        with context() as ctx:
            backward(ctx, [two_branches(1, torch.ones(2, requires_grad=True))])
    running, most = 0, 0
    x = torch.ones(2, requires_grad=True)
    with context() as ctx:
        answers = [rpc.rpc_async(1, recomputed, (x, "recomputed")) for _ in range(3)]
        backward(ctx, [torch.stack([answer.wait() for answer in answers]).sum()])
        assert get_gradients(ctx)[x].tolist() == [12, 12]
    assert most == 1


@pytest.mark.parametrize("attempt", range(10))
def test_an_error_in_one_branch_ends_the_pass_while_another_runs(c: Cluster, attempt: int) -> None:
    """The other one may end before the error is reported, or after."""
    started, failing = threading.Event(), threading.Event()

    def fail() -> None:
        assert started.wait(DEADLINE)
        failing.set()
        raise ValueError("this branch fails")

    def go_on() -> None:
        started.set()
        assert failing.wait(DEADLINE)

    THEN.update(first=fail, second=go_on, third=lambda: None)
    x = torch.ones(2, requires_grad=True)
    with context() as ctx:
        with pytest.raises(ValueError, match="this branch fails"):
            backward(ctx, [two_branches(1, x)])
        before = get_gradients(ctx).get(x, torch.zeros(2))
        backward(ctx, [two_branches(1, x, "third", "third")])
        assert (get_gradients(ctx)[x] - before).tolist() == [4, 4]


# ---- sums ------------------------------------------------------------------------------------------------


def take_some_time() -> None:
    threading.Event().wait(random.random() * 2e-3)  # the order in which branches end varies


class Weights:
    """What the branches on one worker share."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.leaf = torch.randn(50, generator=generator, requires_grad=True)
        self.made = self.leaf * 2


def scaled(x: Tensor, weights: rpc.RRef[Weights], through_a_node: bool) -> Tensor:
    """A branch that shares a leaf with the others, or a node before it."""
    shared = weights.local_value().made if through_a_node else weights.local_value().leaf
    return branch(x * shared, "slow").sum() * 1e3


def gradient_there(weights: rpc.RRef[Weights], ctx: int) -> Tensor:
    return get_gradients(ctx)[weights.local_value().leaf]


@pytest.mark.parametrize("through_a_node", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
def test_repeated_runs_have_equal_bits(
    c: Cluster, monkeypatch: pytest.MonkeyPatch, through_a_node: bool, hooked: bool
) -> None:
    """Of the sums at a leaf and a node that branches share, and at a leaf and a node that are sent often."""
    monkeypatch.setattr(participant, "HELP_SECONDS", 0.0)
    THEN.update(slow=take_some_time)
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(50, generator=generator, requires_grad=True)
    factors = [torch.randn(50, generator=generator) * 10 ** (i % 7) for i in range(BRANCHES)]
    if hooked:
        w.register_hook(lambda gradient: gradient)
    found = set()
    for _ in range(4):
        weights = rpc.remote(1, Weights)
        with context() as ctx:
            x = w * 1 if through_a_node else w
            answers = [rpc.rpc_sync(1, scaled, (x * f, weights, through_a_node)) for f in factors]
            answers += [rpc.rpc_sync(1, scaled, (x, weights, through_a_node)) for _ in factors]
            backward(ctx, [torch.stack(answers).sum()])
            there = rpc.rpc_sync(1, gradient_there, (weights, ctx))
            found.add((*get_gradients(ctx)[w].tolist(), *there.tolist()))
    assert len(found) == 1
