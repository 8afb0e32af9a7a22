"""One node, run by itself, against torch's engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from zmqgrad.autograd.graph import hooks
from zmqgrad.autograd.graph.node import Gradient, release_saved_tensors
from zmqgrad.autograd.graph.node import evaluate_node as evaluate_on_way
from zmqgrad.autograd.torch_internals import outputs_of


class Scale(torch.autograd.Function):
    """Arguments that are no tensors, two outputs."""

    @staticmethod
    def forward(ctx: Any, factor: float, x: torch.Tensor, y: torch.Tensor) -> Any:
        ctx.factor = factor
        return x * factor, y + 1

    @staticmethod
    def backward(ctx: Any, to_x: torch.Tensor, to_y: torch.Tensor) -> Any:
        return None, to_x * ctx.factor, to_y


def evaluate_node(node: Any, gradients: Sequence[Gradient], retain_graph: bool = False) -> list[Gradient]:
    return evaluate_on_way(node, gradients, node.next_functions, retain_graph)


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.rand(*shape, dtype=dtype).requires_grad_()


MADE = {
    "broadcast": lambda a, b: a * b,
    "matmul": lambda a, b: a @ b.reshape(4, 1),
    "function": lambda a, b: Scale.apply(3.0, a, b)[0],
    "mixed types": lambda a, b: a.float() + b,
    "reduction": lambda a, b: (a + b).sum(0),
}


@pytest.mark.parametrize("what", sorted(MADE))
def test_evaluate_node_equals_the_engine(what: str) -> None:
    a, b = leaf(3, 4), leaf(4)
    result = MADE[what](a, b)
    node, gradient = result.grad_fn, torch.rand_like(result)
    gradients = [None] * outputs_of(node)
    gradients[result.output_nr] = gradient
    given = evaluate_node(node, gradients)
    edges = [torch.autograd.graph.GradientEdge(n, i) for n, i in node.next_functions if n is not None]
    wanted = torch.autograd.grad(result, edges, gradient, allow_unused=True)
    present = [g for g, (n, _) in zip(given, node.next_functions, strict=True) if n is not None]
    for mine, theirs in zip(present, wanted, strict=True):
        if theirs is None:
            assert mine is None or not mine.any()
        else:
            assert mine is not None
            assert mine.dtype == theirs.dtype
            torch.testing.assert_close(mine, theirs)


def test_hooks_of_the_tensor_run_once_and_may_change_the_gradient() -> None:
    seen = []
    y = leaf(2) * 2
    y.register_hook(lambda g: (seen.append(g.clone()), g * 10)[1])
    (to_x, *_) = evaluate_node(y.grad_fn, [torch.ones(2, dtype=torch.float64)])
    assert to_x is not None
    assert to_x.tolist() == [20, 20]
    assert len(seen) == 1


def test_node_hooks_run_once_and_may_replace_gradients() -> None:
    y = leaf(2) * 2
    y.grad_fn.register_prehook(lambda gradients: (gradients[0] * 3,))
    y.grad_fn.register_hook(lambda made, _: (made[0] + 1, made[1]))
    assert evaluate_node(y.grad_fn, [torch.ones(2, dtype=torch.float64)])[0].tolist() == [7, 7]


def test_internal_hooks_are_not_counted_and_are_removed() -> None:
    node = (leaf(2) * 2).grad_fn
    before = hooks.hooks_registered()
    for _ in range(2):
        evaluate_node(node, [torch.ones(2, dtype=torch.float64)], retain_graph=True)
    assert hooks.hooks_registered() is before
    leaf(2).register_hook(lambda g: g)
    assert hooks.hooks_registered()


def test_a_hook_counts_while_an_internal_hook_is_being_registered() -> None:
    y = leaf(2) * 2
    y.register_hook(lambda g: g)
    seen = []

    def register(hook: Any) -> Any:
        seen.append(hooks.hooks_registered())
        handle = y.grad_fn.register_hook(hook)  # type: ignore[union-attr]
        seen.append(hooks.hooks_registered())
        return handle

    with hooks.internal_hook(register, lambda *_: None):
        seen.append(hooks.hooks_registered())
    assert seen == [True] * 3


def test_evaluate_node_without_gradients_returns_none() -> None:
    assert evaluate_node((leaf(2) * 2).grad_fn, [None]) == [None, None]


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x * 2)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _, twice = ctx.saved_tensors
        return gradient * twice


SAVERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mul": lambda x: x * x,
    "exp": lambda x: x.exp(),
    "matmul": lambda x: x @ x,
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (2,)),
    "function": lambda x: Squares.apply(x),  # type: ignore[no-any-return]
    "linear": lambda x: torch.nn.functional.linear(x, x, x[0]),
}


@pytest.mark.parametrize("name", SAVERS)
def test_saved_tensors_of_a_node_can_be_released(name: str) -> None:
    x = torch.rand(2, 2, requires_grad=True)
    y = SAVERS[name](x)
    release_saved_tensors(y.grad_fn)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()
    release_saved_tensors(y.grad_fn)


def test_memory_of_saved_tensors_is_freed() -> None:
    made = torch.rand(2, 2, requires_grad=True).exp()
    node, memory = made.grad_fn, made.untyped_storage()
    del made
    users = torch._C._storage_Use_Count
    assert users(memory._cdata) == 2  # ours, and that of the node, which saves what it gave
    release_saved_tensors(node)
    assert users(memory._cdata) == 1


def test_nodes_without_or_with_packed_saved_tensors_are_unchanged() -> None:
    x = torch.rand(2, 2, requires_grad=True)
    release_saved_tensors((x + x).grad_fn)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        y = x * x
    release_saved_tensors(y.grad_fn)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x.detach())
