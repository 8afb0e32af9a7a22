"""A pass is one graph task on each worker: for checkpoints, hooks of several tensors, and queued callbacks.

The reference is the same program in one process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from zmqgrad import rpc
from zmqgrad.autograd import backward, context, get_gradients
from zmqgrad.testing import Cluster, cluster

To = Callable[..., Tensor]
"""Calls a function with tensors, here or on another worker."""

engine: Any = torch.autograd.Variable


@pytest.fixture
def c() -> Iterator[Cluster]:
    with cluster(3) as made:
        yield made


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def here(_: int, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def there(to: int, function: Callable[..., Any], *args: Any) -> Any:
    return rpc.rpc_sync(to, function, args)


def differentiated(
    program: Callable[..., Tensor], leaves: list[Tensor], retain: bool = False, again: bool = False
) -> list[Tensor | None]:
    """The gradients of ``leaves`` of ``program`` over workers, with one pass or two."""
    with context() as ctx:
        loss = program(there, *leaves)
        for kept in (True, False) if again else (retain,):
            backward(ctx, [loss], retain_graph=kept)
        found = get_gradients(ctx)
        return [found.get(each) for each in leaves]


def alone(program: Callable[..., Tensor], leaves: list[Tensor], again: bool = False) -> list[Tensor | None]:
    loss = program(here, *leaves)
    for kept in (True, False) if again else (False,):
        loss.backward(retain_graph=kept)  # type: ignore[no-untyped-call]
    found = [each.grad for each in leaves]
    for each in leaves:
        each.grad = None
    return found


def square(x: Tensor) -> Tensor:
    return x * x


# ---- checkpoints -----------------------------------------------------------------------------------------


class Region:
    """What is checkpointed: counts its runs, and changes a buffer in each."""

    def __init__(self) -> None:
        self.runs = 0
        self.norm = torch.nn.BatchNorm1d(2, dtype=torch.float64)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.runs += 1
        y = self.norm(x.reshape(2, 2).sin()).exp()
        return y[0], y[1] * y[1]


def save_exp(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op is torch.ops.aten.exp.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "selective": {"context_fn": partial(create_selective_checkpoint_contexts, save_exp)},
}


def leaving_in_two_messages(region: Region, options: dict[str, Any], to: To, x: Tensor) -> Tensor:
    first, second = checkpoint(region, x * 2, use_reentrant=False, **options)
    return (to(1, square, first) + to(2, square, second) + first * second).sum()


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_region_is_recomputed_once_in_each_pass(c: Cluster, kind: str, again: bool, hooked: bool) -> None:
    regions = Region(), Region()
    programs = [partial(leaving_in_two_messages, region, KINDS[kind]) for region in regions]
    x = leaf(0.1, 0.2, 0.3, 0.4)
    if hooked:
        x.register_hook(lambda gradient: gradient)
    if kind == "selective" and again:
        with pytest.raises(RuntimeError, match="extra time"):
            alone(programs[0], [x], again)
        with pytest.raises(RuntimeError, match="extra time"):
            differentiated(programs[1], [x], again=again)
        return
    (expected,), (found,) = alone(programs[0], [x], again), differentiated(programs[1], [x], again=again)
    torch.testing.assert_close(found, expected)
    assert [region.runs for region in regions] == [3 if again else 2] * 2
    for one, other in zip(regions[0].norm.buffers(), regions[1].norm.buffers(), strict=True):
        torch.testing.assert_close(other, one)


def test_a_pass_inside_another_recomputes_for_itself(c: Cluster) -> None:
    """A hook that differentiates through the same region, as in one process."""

    def program(seen: list[Any], region: Region, to: To, x: Tensor) -> Tensor:
        first, second = checkpoint(region, x * 2, use_reentrant=False)

        def differentiate(_: Tensor) -> None:
            seen.append(torch.autograd.grad(first, x, torch.ones(2), retain_graph=True)[0].tolist())

        loss = to(1, square, first) + to(2, square, second)
        loss.register_hook(differentiate)
        return loss.sum()

    seen: list[list[Any]] = [[], []]
    regions = Region(), Region()
    x = leaf(0.1, 0.2, 0.3, 0.4)
    expected = alone(partial(program, seen[0], regions[0]), [x])
    found = differentiated(partial(program, seen[1], regions[1]), [x])
    torch.testing.assert_close(found, expected)
    assert seen[0] == seen[1]
    assert [region.runs for region in regions] == [3, 3]


# ---- hooks of several tensors ----------------------------------------------------------------------------


def watched(calls: list[Any], mode: Any, at: str, used: int, to: To, w: Tensor, v: Tensor) -> Tensor:
    """A hook of leaves or results with gradients from several messages, of which ``used`` arrive."""
    x, y = w * 1, v * 1
    z = x * y

    def hook(gradients: Any) -> None:
        several = gradients if isinstance(gradients, (list, tuple)) else [gradients]
        calls.append([None if gradient is None else gradient.item() for gradient in several])

    register_multi_grad_hook((w, v) if at == "leaves" else (x, y, z), hook, mode=mode)
    # Calls whose results are not used, some of them of tensors that nothing else depends on.
    parts = [to(1, square, x), to(2, square, z) + x, to(2, square, y * 2)]
    return torch.stack(parts[:used]).sum()


@pytest.mark.parametrize("used", [1, 2, 3])
@pytest.mark.parametrize("at", ["leaves", "results"])
@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_of_several_tensors_runs_once_with_whole_gradients(
    c: Cluster, mode: str, at: str, used: int
) -> None:
    calls: list[list[Any]] = [[], []]
    w, v = leaf(2), leaf(3)
    expected = alone(partial(watched, calls[0], mode, at, used), [w, v])
    w, v = leaf(2), leaf(3)
    found = differentiated(partial(watched, calls[1], mode, at, used), [w, v])
    assert found == expected
    if mode == "all":
        assert calls[0] == calls[1]
    else:  # which gradient is the first depends on the order of messages
        assert [len(each) for each in calls] == [1, 1]


def test_passes_at_once_are_graph_tasks_of_their_own(c: Cluster) -> None:
    """Six trainers share a hook of two tensors on one worker."""
    model = Shared()
    together = threading.Barrier(6)

    def train(rank: int) -> None:
        with c.acting(rank % 2), context() as ctx:
            x = leaf(rank + 1)
            first, second = rpc.rpc_sync(2, model.forward, (x,))
            together.wait(20)
            backward(ctx, [first + second])

    model_calls.clear()
    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(model_calls) == [(1.0, 1.0)] * 6


watched_pairs: list[list[float | None]] = []


def watched_pair(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two results with a hook of both."""
    first, second = x * 2, x * 3

    def note(gradients: Any) -> None:
        watched_pairs.append([None if each is None else each.item() for each in gradients])

    register_multi_grad_hook((first, second), note)
    return first, second


def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * 1, y * 1


@pytest.mark.parametrize("at", ["callee", "caller"])
def test_a_message_that_brings_some_of_the_gradients_completes_a_hook(c: Cluster, at: str) -> None:
    """Two tensors leave in one message, in which a gradient of only one of them comes back."""

    def program(to: Any, x: Tensor) -> Tensor:
        if at == "callee":
            first, _ = to(1, watched_pair, x)
        else:
            first, _ = to(1, both, *watched_pair(x))
        return first * 5

    watched_pairs.clear()
    alone(program, [leaf(2)])
    differentiated(program, [leaf(2)])
    assert watched_pairs == [[5, None]] * 2


class FirstOnly(torch.autograd.Function):
    """Gives no gradient for its second input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x * 5 + y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 5, None


def of_the_first_only(x: Tensor, y: Tensor) -> Tensor:
    result: Tensor = FirstOnly.apply(x, y)  # type: ignore[no-untyped-call]
    return result


@pytest.mark.parametrize("at", ["callee", "caller"])
def test_an_undefined_gradient_from_another_worker_completes_a_hook(c: Cluster, at: str) -> None:
    def program(to: Any, x: Tensor) -> Tensor:
        if at == "callee":
            return of_the_first_only(*to(1, watched_pair, x))
        return to(1, of_the_first_only, *watched_pair(x))  # type: ignore[no-any-return]

    watched_pairs.clear()
    alone(program, [leaf(2)])
    differentiated(program, [leaf(2)])
    assert watched_pairs == [[5, None]] * 2


model_calls: list[tuple[float, ...]] = []


class Shared:
    """Results with a hook of both; no object of a test travels, so the calls are counted outside of it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x * 2, x * 3
        register_multi_grad_hook(
            (first, second), lambda grads: model_calls.append(tuple(g.item() for g in grads if g is not None))
        )
        return first * 1, second * 1


# ---- callbacks -------------------------------------------------------------------------------------------


events: list[str] = []


class Notes(torch.autograd.Function):
    """Notes when its backward function runs, and queues a callback."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        events.append(ctx.name)
        engine._execution_engine.queue_callback(partial(ended, ctx.name))
        return gradients[0] * 2, None


def ended(name: str) -> None:
    assert torch._C._current_graph_task_id() != -1
    events.append(f"end of {name}")
    if name == "again":
        engine._execution_engine.queue_callback(partial(ended, "last"))
    if name == "fails":
        raise ValueError("a callback fails")


def notes(x: Tensor, name: str) -> Tensor:
    y: Tensor = Notes.apply(x, name)  # type: ignore[no-untyped-call]
    return y


def with_callbacks(to: To, x: Tensor) -> Tensor:
    y = notes(x, "again")
    return to(1, notes, to(2, notes, to(1, notes, y, "c"), "b"), "a") + to(1, notes, y, "unused") * 0


def unused_result(to: To, x: Tensor) -> Tensor:
    to(1, notes, x, "never")
    return with_callbacks(to, x).sum()


@pytest.mark.parametrize("mode", ["auto", "fast", "smart"])
def test_callbacks_run_at_the_end_of_the_pass(c: Cluster, mode: str) -> None:
    events.clear()
    alone(unused_result, [leaf(1)])
    expected = sorted(events)
    events.clear()
    with context() as ctx:
        backward(ctx, [unused_result(there, leaf(1))], mode=mode)
    assert sorted(events) == expected
    functions = [i for i, event in enumerate(events) if "end" not in event]
    assert functions == list(range(len(functions)))  # none after a callback
    assert events.index("end of last") > events.index("end of again")


def test_an_error_in_a_callback_is_raised(c: Cluster) -> None:
    with context() as ctx, pytest.raises(ValueError, match=r"(?s)Error on Node 1.*a callback fails"):
        backward(ctx, [rpc.rpc_sync(1, notes, (leaf(1), "fails"))])


def test_callbacks_of_a_failed_pass_are_dropped_as_in_one_process(c: Cluster) -> None:
    def program(to: To, x: Tensor) -> Tensor:
        return to(1, notes, to(2, failing, to(1, notes, x, "after")), "before")

    for differentiate in alone, differentiated:
        events.clear()
        with pytest.raises(ValueError, match="no gradient from me"):
            differentiate(program, [leaf(1)])  # type: ignore[operator]
        c.network.wait_quiet()
        assert events == ["before"]


def failing(x: Tensor) -> Tensor:
    def fail(_: Tensor) -> None:
        raise ValueError("no gradient from me")

    y = x * 1
    y.register_hook(fail)
    return y
