"""The first error of a pass ends it on all workers, whatever they are doing; the context stays usable."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.waiting import eventually
from zmqgrad import rpc
from zmqgrad.autograd import backward, context, get_gradients
from zmqgrad.autograd.engine import work_queue
from zmqgrad.autograd.forwarding import autograd_of
from zmqgrad.testing import Cluster, cluster
from zmqgrad.wire.messages import MessageType

DEADLINE = 20.0


@pytest.fixture
def c() -> Iterator[Cluster]:
    with cluster(3) as c, c.acting(0):
        yield c


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits behind a group has not begun."""
    monkeypatch.setattr(work_queue, "MAX_CONSUMERS", 1)


class Runs(torch.autograd.Function):
    """Calls a function in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        THEN[ctx.name]()
        return gradients[0] * 2, None


THEN: dict[str, Callable[[], object]] = {}
"""What happens in the backward pass, by name: calls carry no functions of a test."""


def runs(x: Tensor, name: str) -> Tensor:
    y: Tensor = Runs.apply(x, name)  # type: ignore[no-untyped-call]
    return y


def same(x: Tensor) -> Tensor:
    return x


def passes_at(c: Cluster, worker: int, context_id: int) -> list[int]:
    return list(autograd_of(c.workers[worker]).contexts.find(context_id).local_passes())


def fail() -> None:
    raise ValueError("this stage fails")


def leaf() -> Tensor:
    return torch.ones(1, requires_grad=True)


def test_backward_raises_while_another_worker_computes(c: Cluster) -> None:
    """What it computes is dropped, and what waits there does not begin."""
    begun, go_on, ran = threading.Event(), threading.Event(), list[str]()

    def compute() -> None:
        ran.append("begun")
        begun.set()
        assert go_on.wait(DEADLINE)

    def fail_then() -> None:
        assert begun.wait(DEADLINE)
        fail()

    THEN.update(long=compute, fails=fail_then)
    x, w = leaf(), leaf()
    with context() as ctx:
        parts = [rpc.rpc_async(2, runs, (w * 1, "long")) for _ in range(4)]
        parts.append(rpc.rpc_async(1, runs, (x, "fails")))
        loss = torch.stack([part.wait() for part in parts]).sum()
        with pytest.raises(ValueError, match="this stage fails"):
            backward(ctx, [loss], retain_graph=True)
        assert not go_on.is_set()
        eventually(lambda: not passes_at(c, 2, ctx))
        go_on.set()
        c.network.wait_quiet()
        assert ran == ["begun"]
        assert get_gradients(ctx) == {}
        THEN.update(long=lambda: None, fails=lambda: None)
        backward(ctx, [loss])
        assert {id(t): g.item() for t, g in get_gradients(ctx).items()} == {id(x): 2.0, id(w): 8.0}


def test_others_stop_while_the_thread_that_called_backward_computes(c: Cluster) -> None:
    begun, ran = threading.Event(), list[str]()

    def compute() -> None:
        begun.set()
        eventually(lambda: not passes_at(c, 1, ctx))

    def fail_then() -> None:
        assert begun.wait(DEADLINE)
        fail()

    THEN.update(here=compute, fails=fail_then, after=lambda: ran.append("after"))
    with context() as ctx:
        y = runs(rpc.rpc_sync(1, runs, (leaf(), "after")), "here")
        loss = rpc.rpc_sync(1, same, (y,)) + rpc.rpc_sync(2, runs, (leaf(), "fails"))
        with pytest.raises(ValueError, match="this stage fails"):
            backward(ctx, [loss])
        c.network.wait_quiet()
        assert ran == []
        assert get_gradients(ctx) == {}


def test_two_workers_fail_at_once(c: Cluster) -> None:
    both = threading.Barrier(2)

    def fail_together() -> None:
        both.wait(DEADLINE)
        fail()

    THEN.update(fails=fail_together)
    x = leaf()
    with context() as ctx:
        loss = torch.stack([rpc.rpc_async(to, runs, (x, "fails")).wait() for to in (1, 2)]).sum()
        for _ in range(2):
            with pytest.raises(ValueError, match="this stage fails"):
                backward(ctx, [loss], retain_graph=True)
        THEN.update(fails=lambda: None)
        backward(ctx, [loss])
        assert get_gradients(ctx)[x].item() == 4


def test_gradients_of_a_failed_pass_that_arrive_late_are_dropped(c: Cluster) -> None:
    ran: list[str] = []
    THEN.update(late=lambda: ran.append("late"), fails=fail)
    x = leaf()
    with context() as ctx:
        loss = rpc.rpc_sync(2, runs, (x, "late")) + rpc.rpc_sync(1, runs, (x, "fails"))
        with c.network.hold(MessageType.BACKWARD_AUTOGRAD_REQ, target=2):
            with pytest.raises(ValueError, match="this stage fails"):
                backward(ctx, [loss], retain_graph=True)
            c.network.wait_sent(MessageType.CLEANUP_AUTOGRAD_CONTEXT_REQ, 2)
            c.network.wait_quiet()
        c.network.wait_quiet()
        assert ran == []
        THEN.update(fails=lambda: None)
        backward(ctx, [loss])
        assert ran == ["late"]
        assert get_gradients(ctx)[x].item() == 4


def halves(x: Tensor, to: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """A leaf that has its gradient when the pass fails behind it, and one that has none yet."""
    w = leaf()
    return w, to(runs, (to(same, (x,)), "fails")) * w


def test_what_was_accumulated_before_the_error_stays_as_in_one_process(c: Cluster) -> None:
    THEN.update(fails=fail)
    x = leaf()
    w, loss = halves(x, lambda f, args: f(*args))
    with pytest.raises(ValueError, match="this stage fails"):
        loss.backward()  # type: ignore[no-untyped-call]
    alone = [None if t.grad is None else t.grad.item() for t in (x, w)]
    with context() as ctx:
        w, loss = halves(x, lambda f, args: rpc.rpc_sync(1, f, args))
        with pytest.raises(ValueError, match="this stage fails"):
            backward(ctx, [loss])
        gradients = get_gradients(ctx)
        assert [gradients[t].item() if t in gradients else None for t in (x, w)] == alone == [None, 1.0]


@pytest.mark.parametrize("creator", [0, 1])
def test_a_pass_fails_at_once_when_its_context_is_released(c: Cluster, creator: int) -> None:
    """By the worker that runs the pass, and by another, while a third worker computes."""
    begun, go_on = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def compute() -> None:
        begun.set()
        assert go_on.wait(DEADLINE)

    def run_pass(context_id: int, loss: Tensor) -> None:
        with c.acting(0):
            try:
                backward(context_id, [loss])
            except RuntimeError as e:
                errors.append(e)

    THEN.update(long=compute)
    with c.acting(creator):
        with context() as ctx:
            y = rpc.rpc_sync(0, partly, (leaf(),)) if creator else partly(leaf())
            thread = threading.Thread(target=run_pass, args=(ctx, LOSSES.pop()))
            thread.start()
            assert begun.wait(DEADLINE)
        del y
    thread.join(DEADLINE)
    assert not go_on.is_set()
    ended = not thread.is_alive()
    go_on.set()
    c.network.wait_quiet()
    assert ended
    assert "has been released during a backward pass" in str(errors)


LOSSES: list[Tensor] = []


def partly(x: Tensor) -> Tensor:
    """Computes a loss here, part of it at worker 2, and keeps it."""
    y: Tensor = rpc.rpc_sync(2, runs, (x, "long"))
    LOSSES.append(y.sum())
    return y


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_program_in_a_hook_makes_no_cycle(kind: type[BaseException], c: Cluster) -> None:
    """A program that catches it had the tensors of the graph until the next collection."""

    class Hook:
        def __call__(self, _: Tensor) -> None:
            raise kind

    def fail() -> weakref.ref[Hook]:
        hook = Hook()
        y = torch.ones(3, requires_grad=True) * 2
        y.register_hook(hook)
        with context() as context_id, pytest.raises(kind):
            backward(context_id, [y.sum()])
        return weakref.ref(hook)

    gc.disable()
    try:
        assert fail()() is None
    finally:
        gc.enable()
