"""Passes that are recorded (``create_graph``), and gradients of chosen tensors, against one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.autograd.contexts import wait_until_released
from zmqgrad import rpc
from zmqgrad.autograd import backward, context, get_gradients, grad
from zmqgrad.autograd.engine.participant import MODES
from zmqgrad.errors import AutogradError
from zmqgrad.testing import Cluster, cluster

Function = Callable[..., Any]
Call = Callable[[int, Function, tuple[Any, ...]], Any]

every_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture
def c() -> Iterator[Cluster]:
    with cluster(3) as c:
        yield c
        wait_until_released(c)


def leaf(*shape: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=random, dtype=torch.float64) - 0.4).requires_grad_()


WEIGHTS = [leaf(3, 3, seed=i) for i in range(3)]
"""One of each worker: the workers of a test share the process."""


def weight(i: int) -> Tensor:
    return WEIGHTS[i]


def weights() -> list[rpc.RRef[Tensor]]:
    return [rpc.remote(i, weight, (i,)) for i in range(3)]


def here(_: int, function: Function, args: tuple[Any, ...]) -> Any:
    return function(*args)


def layer(i: int, x: Tensor) -> Tensor:
    return torch.tanh(x @ WEIGHTS[i])


def two_layers(x: Tensor, call: Call = rpc.rpc_sync) -> Tensor:
    """Runs on worker 1."""
    made: Tensor = call(2, layer, (2, layer(1, x)))
    return made * x


def model(x: Tensor, call: Call = rpc.rpc_sync) -> Tensor:
    """A function of ``x`` that crosses three workers, two of them twice."""
    hidden = layer(0, x)
    beside: Tensor = call(1, layer, (1, hidden))
    through: Tensor = call(1, two_layers, (hidden, *(() if call is rpc.rpc_sync else (call,))))
    return (beside * through + hidden).pow(2).sum()


def same(got: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    for mine, its in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-12)


# ---- second and third derivatives --------------------------------------------------------------------


@every_mode
def test_third_derivatives_by_grad(c: Cluster, mode: str) -> None:
    x = leaf(2, 3)
    (g,) = torch.autograd.grad(model(x, here), x, create_graph=True)
    (h,) = torch.autograd.grad(g.pow(2).sum(), x, create_graph=True)
    expected = torch.autograd.grad(h.pow(3).sum(), [x, *WEIGHTS])
    with context() as ctx:
        (mine,) = grad(ctx, model(x), x, create_graph=True, mode=mode)
        same([mine], [g])
        (mine,) = grad(ctx, mine.pow(2).sum(), x, create_graph=True, mode=mode)
        same([mine], [h])
        same(grad(ctx, mine.pow(3).sum(), [x, *weights()], mode=mode), expected)
        assert get_gradients(ctx) == {}


def gradient_of_weight(context_id: int, i: int) -> Tensor:
    return get_gradients(context_id)[WEIGHTS[i]]


@every_mode
def test_accumulated_gradients_can_be_differentiated(c: Cluster, mode: str) -> None:
    x = leaf(2, 3)
    first = torch.autograd.grad(model(x, here), [x, *WEIGHTS], create_graph=True)
    second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), [x, *WEIGHTS])
    with context() as ctx:
        backward(ctx, [model(x)], mode=mode, create_graph=True)
        found = [get_gradients(ctx)[x], *(rpc.rpc_sync(i, gradient_of_weight, (ctx, i)) for i in range(3))]
        same(found, first)
        assert all(g.requires_grad for g in found)
        backward(ctx, [sum(g.pow(2).sum() for g in found)], mode=mode)
        sums = [get_gradients(ctx)[x], *(rpc.rpc_sync(i, gradient_of_weight, (ctx, i)) for i in range(3))]
        same(sums, [a + b for a, b in zip(first, second, strict=True)])  # as in .grad


class Across(torch.autograd.Function):
    """A function over workers, for gradgradcheck, which runs torch's own engine."""

    @staticmethod
    def forward(ctx: Any, function: Function, mode: str, x: Tensor) -> Tensor:
        ctx.function, ctx.mode = function, mode
        ctx.save_for_backward(x)
        with context():
            return function(x).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, DerivativeAcross.apply(ctx.function, ctx.mode, ctx.saved_tensors[0], gradients[0])


class DerivativeAcross(torch.autograd.Function):
    """The derivative of the same function. Its own needs two passes."""

    @staticmethod
    def derivative(ctx: Any, context_id: int, x: Tensor, v: Tensor) -> Tensor:
        with torch.enable_grad():
            y = ctx.function(x)
            (g,) = grad(context_id, y, x, v, create_graph=True, mode=ctx.mode)
        assert g is not None
        return g

    @staticmethod
    def forward(ctx: Any, function: Function, mode: str, x: Tensor, v: Tensor) -> Tensor:
        ctx.function, ctx.mode = function, mode
        ctx.save_for_backward(x, v)
        with context() as context_id:
            leaves = x.detach().requires_grad_(), v.detach().requires_grad_()
            return DerivativeAcross.derivative(ctx, context_id, *leaves).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, v = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with context() as context_id:
            g = DerivativeAcross.derivative(ctx, context_id, x, v)
            return None, None, *grad(context_id, g, [x, v], gradients[0], mode=ctx.mode)


def over_two(x: Tensor) -> Tensor:
    y: Tensor = rpc.rpc_sync(1, layer, (1, x.sin()))
    return y * x


def over_three(x: Tensor) -> Tensor:
    y: Tensor = rpc.rpc_sync(1, two_layers, (x,))
    return y.exp() * x


@every_mode
@pytest.mark.parametrize("function", [over_two, over_three])
def test_gradgradcheck(c: Cluster, function: Function, mode: str) -> None:
    x = leaf(2, 3)
    assert torch.autograd.gradcheck(lambda x: Across.apply(function, mode, x), (x,))
    assert torch.autograd.gradgradcheck(lambda x: Across.apply(function, mode, x), (x,))


def hooked(x: Tensor) -> Tensor:
    y = x.sin() * WEIGHTS[1][:2]
    y.register_hook(lambda g: g * y.detach() + g * g)
    z = y * x
    assert z.grad_fn is not None
    z.grad_fn.register_hook(lambda into, out: (into[0] * 2, into[1]))
    return z


@every_mode
def test_what_hooks_do_is_differentiated(c: Cluster, mode: str) -> None:
    x, w = leaf(2, 3), leaf(2, 3, seed=9)
    handle = w.register_hook(lambda g: g.pow(2) + g)

    def run(call: Call) -> Tensor:
        y: Tensor = call(1, hooked, (x * w,))
        return (y * w).pow(2).sum()

    (g,) = torch.autograd.grad(run(here), w, create_graph=True)
    expected = torch.autograd.grad(g.pow(2).sum(), [x, w])
    with context() as ctx:
        (mine,) = grad(ctx, run(rpc.rpc_sync), w, create_graph=True, mode=mode)
        same([mine], [g])
        same(grad(ctx, mine.pow(2).sum(), [x, w], mode=mode), expected)
    handle.remove()


class CallsBack(torch.autograd.Function):
    """Has worker 2 compute its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return rpc.rpc_sync(2, torch.mul, (gradient, 3 * x * x))


def calls_back(x: Tensor) -> Tensor:
    y: Tensor = CallsBack.apply(x)  # type: ignore[no-untyped-call]
    y.register_hook(lambda g: rpc.rpc_sync(0, torch.mul, (g, g)))
    return y


@every_mode
@pytest.mark.parametrize("on", [0, 1])
def test_calls_of_hooks_and_backward_functions_are_differentiated(c: Cluster, on: int, mode: str) -> None:
    x = leaf(2, 3)
    with context() as ctx:
        y: Tensor = rpc.rpc_sync(1, layer, (1, rpc.rpc_sync(on, calls_back, (x,)))) if on else calls_back(x)
        (mine,) = grad(ctx, y.pow(2).sum(), x, create_graph=True, mode=mode)
        assert mine is not None
        (second,) = grad(ctx, mine.sum(), x, mode="auto")

    y = x**3
    y.register_hook(lambda g: g * g)
    (g,) = torch.autograd.grad((layer(1, y) if on else y).pow(2).sum(), x, create_graph=True)
    same([mine, second], [g, *torch.autograd.grad(g.sum(), x)])


class Once(torch.autograd.Function):
    """Cannot be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return 2 * ctx.saved_tensors[0] * gradient


def once(x: Tensor) -> Tensor:
    y: Tensor = Once.apply(x)  # type: ignore[no-untyped-call]
    return y


def test_a_second_derivative_that_does_not_exist_is_torchs_error(c: Cluster) -> None:
    x = leaf(3)
    with context() as ctx:
        (g,) = grad(ctx, rpc.rpc_sync(1, once, (x,)).pow(2).sum(), x, create_graph=True)
        assert g is not None
        with pytest.raises(RuntimeError, match="once_differentiable"):
            backward(ctx, [g.sum()])


@pytest.mark.filterwarnings("ignore:.*Using backward.. with create_graph")
@pytest.mark.parametrize("beside_replicas", [False, True])
def test_a_pass_that_is_not_recorded_keeps_the_history_of_one_before(
    c: Cluster, monkeypatch: pytest.MonkeyPatch, beside_replicas: bool
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: beside_replicas)
    x = leaf(2, 3)
    with context() as ctx:
        y: Tensor = rpc.rpc_sync(1, torch.pow, (x, 3))
        backward(ctx, [y.sum()], create_graph=True)
        backward(ctx, [y.sum()], retain_graph=True)
        same(grad(ctx, get_gradients(ctx)[x].sum(), x), [6 * x])


@every_mode
def test_a_pass_that_is_not_recorded_has_no_history(c: Cluster, mode: str) -> None:
    x, v = leaf(2, 3), leaf(2, 3)
    with context() as ctx:
        y: Tensor = rpc.rpc_sync(1, layer, (1, x)) + x
        (g,) = grad(ctx, y, x, v, retain_graph=True, mode=mode)
        assert g is not None
        assert not g.requires_grad
        backward(ctx, [y.sum()], mode=mode)
        assert not get_gradients(ctx)[x].requires_grad


def test_the_calling_threads_modes_do_not_matter(c: Cluster) -> None:
    x = leaf(2, 3)
    (g,) = torch.autograd.grad(model(x, here), x, create_graph=True)
    with context() as ctx:
        loss = model(x)
        with torch.no_grad():
            backward(ctx, [loss], create_graph=True)
            (mine,) = grad(ctx, loss, x, create_graph=True)
            accumulated = get_gradients(ctx)[x]
        assert mine is not None
        expected = torch.autograd.grad(g.sum(), x, retain_graph=True)
        same(grad(ctx, mine.sum(), x, retain_graph=True), expected)
        same(grad(ctx, accumulated.sum(), x), expected)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_pass_in_inference_mode(c: Cluster, create_graph: bool) -> None:
    x = leaf(2, 3)
    (g,) = torch.autograd.grad(model(x, here), x, create_graph=True)
    with context() as ctx:
        loss = model(x)
        with torch.inference_mode():
            (mine,) = grad(ctx, loss, x, retain_graph=True, create_graph=create_graph)
            backward(ctx, [loss], create_graph=create_graph)
        accumulated = get_gradients(ctx)[x]
        for found in (mine, accumulated):
            assert found is not None
            same([found], [g])
            assert found.requires_grad == create_graph
        if create_graph:
            expected = torch.autograd.grad(g.sum(), x)
            same(grad(ctx, accumulated.sum(), x), expected)


def test_a_gradient_is_not_the_memory_that_its_graph_has_saved(c: Cluster) -> None:
    x = leaf(3)
    with context() as ctx:
        backward(ctx, [rpc.rpc_sync(1, torch.exp, (x,)).sum()], create_graph=True)
        g = get_gradients(ctx)[x]
        with torch.no_grad():
            g.zero_()  # as an optimizer may
        (second,) = grad(ctx, g.sum(), x)
        same([second], [x.detach().exp()])


# ---- gradients of chosen tensors ---------------------------------------------------------------------


def weight_copy(i: int) -> Tensor:
    return WEIGHTS[i].detach().clone().requires_grad_()


def twice(rref: rpc.RRef[Tensor]) -> Tensor:
    return rref.local_value() * 2


@every_mode
def test_inputs_on_other_workers_also_where_tensors_come_from_them(c: Cluster, mode: str) -> None:
    x = leaf(2, 3)
    with context() as ctx:
        first, second = (rpc.remote(i, weight_copy, (i,)) for i in (1, 2))
        made = rpc.remote(1, twice, (first,))
        w1, w2, m = first.to_here(), second.to_here(), made.to_here()
        loss = (torch.tanh(x @ w1) @ w2 @ m).pow(3).sum()
        found = grad(ctx, loss, [x, made, first, second, w1], create_graph=True, mode=mode)

        a, b = (WEIGHTS[i].detach().requires_grad_() for i in (1, 2))
        a_sent, a_made = a.view_as(a), a * 2.0
        value = (torch.tanh(x @ a_sent) @ b @ a_made).pow(3).sum()
        expected = torch.autograd.grad(value, [x, a_made, a, b, a_sent], create_graph=True)
        same(found, expected)
        assert all(g is not None and g.requires_grad for g in found)

        more = grad(ctx, sum(g.pow(2).sum() for g in found if g is not None), [x, first, second], mode=mode)
        same(more, torch.autograd.grad(sum(g.pow(2).sum() for g in expected), [x, a, b]))


@every_mode
@pytest.mark.parametrize("hooks", [False, True])
def test_an_input_between_others(c: Cluster, mode: str, hooks: bool) -> None:
    """It is used here and sent, twice, so that its gradient has several parts."""
    seen: list[Tensor] = []

    def run(call: Call) -> tuple[Tensor, list[Tensor]]:
        x = leaf(2, 3)
        middle = x.sin() * 2
        received: Tensor = call(1, layer, (1, middle))
        if hooks:
            middle.register_hook(lambda g: seen.append(g) or g * 2)
        loss = (received * middle + call(2, layer, (2, middle * x)) * received).sum()
        return loss, [x, middle, received]

    value, inputs = run(here)
    expected = torch.autograd.grad(value, inputs)
    with context() as ctx:
        loss, inputs = run(rpc.rpc_sync)
        same(grad(ctx, loss, inputs, mode=mode), expected)
    if hooks:
        same(seen[1:], seen[:1])


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, needed: list[Any]) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.needed = needed
        return x * y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, y = ctx.saved_tensors
        ctx.needed.append(ctx.needs_input_grad[:2])
        return g * y, g * x, None


def doubled(x: Tensor) -> Tensor:
    return x * 2


@every_mode
@pytest.mark.parametrize("inputs", [["a", "b", "x"], ["a", "b"], ["b", "x"], ["c", "b"], ["b", "c"]])
def test_inputs_where_nodes_run_one_by_one(c: Cluster, inputs: list[str], mode: str) -> None:
    """As ``a`` is used here and sent, and has a hook. What does not lead to inputs neither runs nor is freed;
    a gradient that is returned is that before the hooks of its tensor if other inputs lie behind it."""

    def run(call: Callable[[Tensor], Tensor], finish: Function) -> list[Any]:
        x, w = leaf(3), leaf(3, seed=1)
        needed: list[Any] = []
        a = x * 2
        b = Product.apply(a, w, needed)
        c = b.sin()
        d = w.cos() * w
        for t in (a, b, c, d):
            t.register_hook(lambda g: g * 3)
        named = {"x": x, "w": w, "a": a, "b": b, "c": c, "d": d}
        loss = (c * d).sum() + call(a).sum()
        return [*finish(loss, [named[name] for name in inputs], d, w), needed]

    def finish_here(loss: Tensor, inputs: list[Tensor], d: Tensor, w: Tensor) -> list[Any]:
        found = torch.autograd.grad(loss, inputs, allow_unused=True)
        assert w.grad is None
        d.sum().backward()  # type: ignore[no-untyped-call]
        return [*found, w.grad]

    def finish_there(loss: Tensor, inputs: list[Tensor], d: Tensor, w: Tensor) -> list[Any]:
        found = grad(ctx, loss, inputs, mode=mode, allow_unused=True)
        assert get_gradients(ctx) == {}
        backward(ctx, [d.sum()])
        return [*found, get_gradients(ctx)[w]]

    *expected, needed = run(doubled, finish_here)
    with context() as ctx:
        *found, needed_there = run(lambda t: rpc.rpc_sync(1, doubled, (t,)), finish_there)
    same(found, expected)
    assert needed_there == needed


def test_nothing_else_is_accumulated_and_no_hook_of_another_leaf_runs(c: Cluster) -> None:
    x = leaf(2, 3)
    ran: list[str] = []
    handles = [
        WEIGHTS[1].register_hook(lambda g: ran.append("tensor")),
        WEIGHTS[1].register_post_accumulate_grad_hook(lambda p: ran.append("post")),
        x.register_post_accumulate_grad_hook(lambda p: ran.append("post of an input")),
    ]
    with context() as ctx:
        grad(ctx, rpc.rpc_sync(1, layer, (1, x)).sum(), x)
        assert get_gradients(ctx) == {}
        assert rpc.rpc_sync(1, get_gradients, (ctx,)) == {}
    assert ran == []
    assert x.grad is None
    for handle in handles:
        handle.remove()


def of_received(call: Call, x: Tensor) -> tuple[Tensor, Tensor]:
    received: Tensor = call(1, layer, (1, x))
    return received, received


def between(call: Call, x: Tensor) -> tuple[Tensor, Tensor]:
    made = call(1, layer, (1, x.exp())) * 2
    return made, made.exp()


def sent_on(call: Call, x: Tensor) -> tuple[Tensor, Tensor]:
    made = call(1, layer, (1, x)).exp()
    return made, call(2, layer, (2, made)) * made


@every_mode
@pytest.mark.parametrize("program", [of_received, between, sent_on])
def test_what_lies_behind_the_inputs_neither_runs_nor_is_freed(c: Cluster, program: Any, mode: str) -> None:
    """The gradient of an input is what its hook returns, as nothing behind it is differentiated."""
    runs: list[str] = []

    def run(call: Call, x: Tensor, differentiate: Function, backward: Function) -> list[Tensor]:
        z = x * 1
        z.register_hook(lambda g: runs.append("behind"))
        middle, y = program(call, z)
        middle.register_hook(lambda g: g * 3)
        (first,) = differentiate((y * y).sum(), middle)
        runs.append("first")
        backward((middle * first).sum())
        runs.append("second")
        return [first]

    x = leaf(2, 3)
    expected = run(here, x, torch.autograd.grad, lambda loss: loss.backward())
    assert x.grad is not None
    with context() as ctx:
        found = run(
            rpc.rpc_sync,
            x,
            lambda y, of: grad(ctx, y, of, mode=mode),
            lambda loss: backward(ctx, [loss]),
        )
        same([*found, get_gradients(ctx)[x]], [*expected, x.grad])
    assert runs == ["first", "behind", "second"] * 2


@every_mode
@pytest.mark.parametrize("inputs", [[1, 3], [3, 1], [2, 3], [1, 2, 3], [0, 3]], ids=str)
def test_what_arrived_before_the_inputs_were_sent_neither_runs_nor_is_freed(
    c: Cluster, inputs: list[int], mode: str
) -> None:
    """Of several inputs the pass leads from each only to those before it."""
    runs: list[str] = []

    def run(call: Call, x: Tensor, differentiate: Function, backward: Function) -> Sequence[Tensor]:
        z = x * 1
        z.register_hook(lambda g: runs.append("behind"))
        made = [call(1, torch.square, (z,))]
        made.append(made[0] * 2)
        made[1].register_hook(lambda g: g * 3)
        made += [call(2, torch.square, (made[1],))]
        made += [call(0, torch.square, (made[2] * made[1],))]
        found: Sequence[Tensor] = differentiate((made[3] * made[2]).sum(), [made[i] for i in inputs])
        runs.append("first")
        backward((made[0] * found[0].detach()).sum())
        return found

    x = leaf(2, 3)
    expected = run(here, x, torch.autograd.grad, lambda loss: loss.backward())
    assert x.grad is not None
    with context() as ctx:
        found = run(
            rpc.rpc_sync,
            x,
            lambda y, of: grad(ctx, y, of, mode=mode),
            lambda loss: backward(ctx, [loss]),
        )
        same([*found, get_gradients(ctx)[x]], [*expected, x.grad])
    assert runs == ["first", "behind"] * 2


@every_mode
def test_unused_inputs(c: Cluster, mode: str) -> None:
    x, unused = leaf(2, 3), leaf(3)
    with context() as ctx:
        far = rpc.remote(2, weight, (2,))
        y = rpc.rpc_sync(1, layer, (1, x)).sum()
        with pytest.raises(AutogradError, match=r"not have been used in the graph: inputs\[1\], inputs\[2\]"):
            grad(ctx, y, [x, unused, far], retain_graph=True, mode=mode)
        g, *none = grad(ctx, y, [x, unused, far], allow_unused=True, mode=mode)
        assert g is not None
        assert none == [None, None]


def test_an_output_that_is_an_input(c: Cluster) -> None:
    x = leaf(2, 3)
    v = torch.randn(2, 3, dtype=torch.float64)
    with context() as ctx:
        y: Tensor = rpc.rpc_sync(1, layer, (1, x))
        same(grad(ctx, [x, y], [x, y], [v, v], retain_graph=True), torch.autograd.grad(
            [x, z := layer(1, x)], [x, z], [v, v]
        ))  # fmt: skip


def text() -> str:
    return "text"


def test_arguments_are_checked(c: Cluster) -> None:
    x = leaf(2, 3)
    with context() as ctx:
        y: Tensor = rpc.rpc_sync(1, layer, (1, x))
        with pytest.raises(AutogradError, match=r"scalar outputs: outputs\[0\] has shape \(2, 3\)"):
            grad(ctx, y, x)
        with pytest.raises(AutogradError, match="Mismatch in shape"):
            grad(ctx, y, x, torch.ones(3))
        complex_y = torch.complex(y, y)
        with pytest.raises(AutogradError, match=r"real scalar outputs: outputs\[0\] is torch\.complex128"):
            grad(ctx, complex_y.sum(), x)
        for output, gradient in (
            (complex_y, torch.ones(2, 3)),
            (y, torch.ones(2, 3, dtype=torch.complex128)),
        ):
            with pytest.raises(AutogradError, match=r"Mismatch in dtype: grad_outputs\[0\] has a dtype of"):
                grad(ctx, output, x, gradient)
        with pytest.raises(AutogradError, match="2 grad_outputs were given for 1 outputs"):
            grad(ctx, y, x, [torch.ones(3)] * 2)
        with pytest.raises(AutogradError, match=r"inputs\[1\] does not require grad"):
            grad(ctx, y.sum(), [x, torch.ones(3)])
        with pytest.raises(AutogradError, match="non-empty inputs"):
            grad(ctx, y.sum(), [])
        with pytest.raises(TypeError, match=r"inputs\[0\] must be a tensor or an RRef to one, not str"):
            grad(ctx, y.sum(), ["x"])  # type: ignore[list-item]
        with pytest.raises(AutogradError, match=r"outputs\[0\] does not require grad"):
            grad(ctx, torch.ones(1), x)
        with pytest.raises(AutogradError, match=r"inputs\[0\] refers to a str, not to a tensor"):
            grad(ctx, y.sum(), rpc.remote(1, text))
        with pytest.raises(AutogradError, match="mode must be one of"):
            grad(ctx, y.sum(), x, mode="slow")
        same(grad(ctx, y.sum(), x), torch.autograd.grad(layer(1, x).sum(), x))  # the context is usable
