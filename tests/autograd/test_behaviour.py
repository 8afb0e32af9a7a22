"""Distributed autograd, scenario by scenario: what a program may do, and what it is told when it may not."""

from __future__ import annotations

import contextvars
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from tests.autograd.contexts import wait_until_released
from zmqgrad import rpc
from zmqgrad.autograd import backward, context, describe_context, get_gradients
from zmqgrad.autograd.engine import differentiation, executor
from zmqgrad.autograd.graph.hooks import internal_hook
from zmqgrad.errors import ArgumentTypeError, AutogradError
from zmqgrad.rpc.futures import PythonFuture
from zmqgrad.testing import Cluster, cluster


@pytest.fixture
def c() -> Iterator[Cluster]:
    """Three workers; at the end of every test, whatever happened in it, none knows any context."""
    with cluster(3) as made:
        yield made
        wait_until_released(made)


def leaf(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def assert_gradients(context_id: int, *expected: tuple[Tensor, Any]) -> None:
    """Exactly these tensors have gradients in the context, and these ones."""
    gradients = get_gradients(context_id)
    assert {id(t) for t in gradients} == {id(t) for t, _ in expected}
    for tensor, value in expected:
        torch.testing.assert_close(gradients[tensor], torch.as_tensor(value, dtype=tensor.dtype))


# ---- what runs on the other workers ---------------------------------------------------------------------


def same(x: Any) -> Any:
    return x


def double(x: Tensor) -> Tensor:
    return x * 2


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def second(x: Tensor, y: Tensor) -> Tensor:
    return y


def relay(route: list[int], x: Tensor) -> Tensor:
    """Doubles ``x`` here and at each stop of ``route``."""
    y = x * 2
    return rpc.rpc_sync(route[0], relay, (route[1:], y)) if route else y


def scale_in_place(x: Tensor, by: float) -> Tensor:
    x.mul_(by)
    return x.add_(1)


def make(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def gradient_there(context_id: int, owner: rpc.RRef[Tensor]) -> Tensor | None:
    return get_gradients(context_id).get(owner.local_value())


def known_there(context_id: int) -> bool:
    try:
        get_gradients(context_id)
    except AutogradError:
        return False
    return True


# ---- what a program may do ------------------------------------------------------------------------------


@pytest.mark.parametrize("route", [[], [0], [2], [0, 1], [2, 0, 1, 1], [0, 1, 0, 1, 0]], ids=str)
def test_nested_calls_go_anywhere_and_come_back(c: Cluster, route: list[int]) -> None:
    x = leaf(1, -2)
    with context() as ctx:
        backward(ctx, [rpc.rpc_sync(1, relay, (route, x)).sum()])
        assert_gradients(ctx, (x, [2.0 ** (len(route) + 1)] * 2))


@pytest.mark.parametrize("to", [0, 1])
@pytest.mark.parametrize("how", ["sync", "async", "remote"])
def test_a_leaf_that_is_sent_itself(c: Cluster, to: int, how: str) -> None:
    x = leaf(3, 4)
    with context() as ctx:
        if how == "sync":
            y = rpc.rpc_sync(to, double, (x,))
        elif how == "async":
            y = rpc.rpc_async(to, double, (x,)).wait()
        else:
            y = rpc.remote(to, double, (x,)).to_here()
        backward(ctx, [(y * y).sum()])
        assert_gradients(ctx, (x, [24.0, 32.0]))


def test_a_received_tensor_returned_as_it_is(c: Cluster) -> None:
    x = leaf(3)
    with context() as ctx:
        backward(ctx, [rpc.rpc_sync(1, same, (x * 5,)).sum()])
        assert_gradients(ctx, (x, [5.0]))


def test_an_answer_that_is_a_root_itself(c: Cluster) -> None:
    x = leaf(3)
    with context() as ctx:
        backward(ctx, [rpc.rpc_sync(1, double, (x,))])
        assert_gradients(ctx, (x, [2.0]))


def test_in_place_changes_of_received_tensors_stay_on_the_receiver(c: Cluster) -> None:
    x = leaf(1, 2)
    with context() as ctx:
        y = rpc.rpc_sync(1, scale_in_place, (x, 3.0))
        y.mul_(7)
        backward(ctx, [y.sum()])
        assert_gradients(ctx, (x, [21.0, 21.0]))
    assert x.tolist() == [1, 2]


def test_one_tensor_sent_to_many_and_twice_in_a_call(c: Cluster) -> None:
    x = leaf(1, 2)
    with context() as ctx:
        y = x * 3
        parts = [rpc.rpc_async(to, add, (y, y)) for to in (0, 1, 2, 1)]
        backward(ctx, [sum(p.wait() for p in parts).sum()])  # type: ignore[union-attr]
        assert_gradients(ctx, (x, [24.0, 24.0]))


def test_tensors_that_need_no_gradient_travel_among_those_that_do(c: Cluster) -> None:
    x, constant = leaf(2), torch.tensor([10.0], dtype=torch.float64)
    with context() as ctx:
        got = rpc.rpc_sync(1, same, ([constant, x, {"n": torch.tensor([3]), "x": x * 2}],))
        assert [got[0].requires_grad, got[1].requires_grad, got[2]["n"].requires_grad] == [False, True, False]
        backward(ctx, [(got[0] * got[1] + got[2]["n"] * got[2]["x"]).sum()])
        assert_gradients(ctx, (x, [16.0]))


def top(x: Tensor) -> Any:
    return torch.topk(x, 2)


def test_outputs_that_cannot_be_differentiated(c: Cluster) -> None:
    x = leaf(3, 1, 2)
    with context() as ctx:
        values, indices = rpc.rpc_sync(1, top, (x,))
        assert not indices.requires_grad
        backward(ctx, [values.sum()])
        assert_gradients(ctx, (x, [1.0, 0.0, 1.0]))


def test_a_parameter_sent_as_an_argument_has_a_gradient(c: Cluster) -> None:
    p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    with context() as ctx:
        backward(ctx, [rpc.rpc_sync(1, add, (p, double(p))).sum()])
        assert_gradients(ctx, (p, [3.0, 3.0]))


def test_a_parameter_by_reference(c: Cluster) -> None:
    p = rpc.remote(1, make, ([1.0, 2.0],))
    with context() as ctx:
        backward(ctx, [(p.to_here() * 3).sum() + p.to_here().sum()])
        assert get_gradients(ctx) == {}
        assert rpc.rpc_sync(1, gradient_there, (ctx, p)).tolist() == [4.0, 4.0]
        assert rpc.rpc_sync(2, known_there, (ctx,))  # by this very call
    assert p.rpc_sync().requires_grad_().grad is None


@pytest.mark.parametrize("driver", [1, 2])
def test_any_worker_may_start(c: Cluster, driver: int) -> None:
    with c.acting(driver):
        x = leaf(1)
        with context() as ctx:
            backward(ctx, [rpc.rpc_sync(0, relay, ([driver, 0], x)).sum()])
            assert_gradients(ctx, (x, [8.0]))


def test_gradients_of_two_passes_add_up(c: Cluster) -> None:
    x = leaf(3)
    with context() as ctx:
        loss = (rpc.rpc_sync(1, double, (x,)) ** 2).sum()
        backward(ctx, [loss], retain_graph=True)
        assert_gradients(ctx, (x, [24.0]))
        backward(ctx, [loss])
        assert_gradients(ctx, (x, [48.0]))


def square(x: Tensor) -> Tensor:
    return x * x


@pytest.mark.parametrize("where", ["here", "there"])
def test_a_second_pass_without_retain_graph_is_torchs_error(c: Cluster, where: str) -> None:
    x = leaf(3)
    with context() as ctx:
        y = rpc.rpc_sync(1, square, (x,))
        loss = (y * y if where == "here" else y).sum()
        backward(ctx, [loss])
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            backward(ctx, [loss])


@pytest.mark.parametrize("hooks", [False, True])
def test_a_second_pass_over_groups_is_torchs_error_too(c: Cluster, hooks: bool) -> None:
    """Also where groups are run node by node: at this border torch would not stop, or hooks are feared."""
    w = leaf(3)
    with context() as ctx:
        x = w * w
        if hooks:
            x.register_hook(lambda g: None)
        loss = (x.exp() + rpc.rpc_sync(1, same, (x,)) + w).sum()
        backward(ctx, [loss], retain_graph=True)
        backward(ctx, [loss])
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            backward(ctx, [loss])


@pytest.mark.parametrize("hooks", [False, True])
def test_a_pass_frees_only_what_it_has_run(c: Cluster, hooks: bool) -> None:
    """Also where groups run node by node: the call gives no gradient for its first argument."""
    x, w = leaf(3), leaf(5)
    with context() as ctx:
        y = x.clone()
        if hooks:
            y.register_hook(lambda g: None)
        unused = y * w
        loss = (rpc.rpc_sync(1, second, (unused, y.neg())) + y).sum()
        backward(ctx, [loss])
        backward(ctx, [unused.sum()])
        assert_gradients(ctx, (x, [5.0]), (w, [3.0]))


def test_contexts_in_parallel_threads_do_not_mix(c: Cluster) -> None:
    x = leaf(1, 2)
    together = threading.Barrier(6)
    results: dict[int, Tensor] = {}

    def train(factor: int) -> None:
        with c.acting(factor % 3), context() as ctx:
            together.wait(10)
            for _ in range(3):
                y = rpc.rpc_sync((factor + 1) % 3, relay, ([(factor + 2) % 3], x * factor))
                backward(ctx, [y.sum()])
            results[factor] = get_gradients(ctx)[x]

    threads = [threading.Thread(target=train, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert {f: g.tolist() for f, g in results.items()} == {f: [12.0 * f] * 2 for f in range(6)}


def test_grad_is_left_alone(c: Cluster) -> None:
    x = leaf(1)
    x.grad = torch.tensor([5.0], dtype=torch.float64)
    with context() as ctx:
        backward(ctx, [rpc.rpc_sync(1, double, (x,)).sum()])
        assert_gradients(ctx, (x, [2.0]))
    assert x.grad.tolist() == [5.0]


def test_gradients_belong_to_their_context(c: Cluster) -> None:
    x = leaf(1)
    for factor in (2, 3):
        with context() as ctx:
            assert get_gradients(ctx) == {}
            backward(ctx, [rpc.rpc_sync(1, same, (x * factor,)).sum()])
            assert_gradients(ctx, (x, [float(factor)]))


def sum_of(*tensors: Tensor) -> Tensor:
    return sum(tensors)  # type: ignore[return-value]


def joined(*tensors: Tensor) -> Tensor:
    return torch.cat([t * t for t in tensors])


@pytest.mark.parametrize("function", [sum_of, joined])
@pytest.mark.parametrize("remote", [True, False])
def test_gradients_do_not_share_memory(c: Cluster, function: Callable[..., Tensor], remote: bool) -> None:
    leaves = [leaf(1, 2) for _ in range(3)]
    with context() as ctx:
        y = rpc.rpc_sync(1, function, tuple(leaves)) if remote else function(*leaves)
        backward(ctx, [y.sum()])
        gradients = [get_gradients(ctx)[x] for x in leaves]
        before = [g.clone() for g in gradients]
        gradients[0].zero_()
        assert [g.tolist() for g in gradients[1:]] == [g.tolist() for g in before[1:]]
        for g in gradients:
            g += torch.tensor([1.0, 2.0])  # would be refused by an expanded one


def in_rows(x: Tensor) -> Tensor:
    return (x * 2).contiguous()


def in_columns(x: Tensor) -> Tensor:
    return (x.t().contiguous() * 2).t() if x.dim() == 2 else x * 2


LAID_OUT: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: torch.rand(3, 4),
    "columns": lambda: torch.rand(4, 3).t(),
    "channels last": lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "with gaps": lambda: torch.rand(3, 8)[:, ::2],
    "one row": lambda: torch.rand(1, 4).as_strided((1, 4), (7, 1)),
    "overlapping": lambda: torch.rand(1, 4).expand(3, 4),
}


@pytest.mark.parametrize("way", ["sent", "twice", "hooks", "replicas", "passes", "create_graph"])
@pytest.mark.parametrize("shape", LAID_OUT)
@pytest.mark.filterwarnings("ignore:.*Using backward.. with create_graph")
def test_gradients_have_the_strides_that_torch_gives_them(
    c: Cluster, monkeypatch: pytest.MonkeyPatch, shape: str, way: str
) -> None:
    """Torch's "gradient layout contract", which fused optimizers rely on."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: way == "replicas")
    create_graph = way == "create_graph"

    def run(call: Callable[..., Tensor], differentiate: Callable[[Tensor], None], x: Tensor) -> None:
        if way == "hooks":
            x.register_post_accumulate_grad_hook(lambda _: None)
        for function in (in_columns, in_rows) if way == "passes" else (in_rows,):
            y = call(function, x)
            differentiate((y * y.exp()).sum() + (call(in_columns, x).sum() if way == "twice" else 0))

    expected = LAID_OUT[shape]().requires_grad_()
    x = expected.detach().requires_grad_()
    run(lambda f, x: f(x), lambda loss: loss.backward(create_graph=create_graph), expected)  # type: ignore[no-untyped-call]
    with context() as ctx:
        run(
            lambda f, x: rpc.rpc_sync(1, f, (x,)),
            lambda loss: backward(ctx, [loss], create_graph=create_graph),
            x,
        )
        found = get_gradients(ctx)[x]
    assert expected.grad is not None
    torch.testing.assert_close(found, expected.grad)
    if 1 not in x.shape:  # such a dimension has any stride
        assert found.stride() == expected.grad.stride()


def look_up(weight: Tensor, rows: Tensor) -> Tensor:
    return torch.nn.functional.embedding(rows, weight, sparse=True)


@pytest.mark.parametrize("remote", [False, True])
def test_sparse_gradients_of_embeddings(c: Cluster, remote: bool) -> None:
    weight = torch.ones(4, 2, requires_grad=True)
    rows = torch.tensor([1, 3, 1])
    with context() as ctx:
        y = (
            rpc.rpc_sync(1, look_up, (weight, rows))
            if remote
            else rpc.rpc_sync(1, same, (look_up(weight, rows),))
        )
        backward(ctx, [y.sum()])
        gradient = get_gradients(ctx)[weight]
        assert gradient.is_sparse
        assert gradient.to_dense()[:, 0].tolist() == [0.0, 2.0, 0.0, 1.0]


@pytest.mark.parametrize("sparse_first", [False, True])
def test_sparse_and_dense_gradients_of_one_tensor(c: Cluster, sparse_first: bool) -> None:
    rows = torch.tensor([1, 3, 1])

    def run(to: Callable[..., Tensor], differentiate: Callable[[list[Tensor]], None], x: Tensor) -> None:
        w = x * 1
        sparse = [to(look_up, w, rows).sum(), to(look_up, x, rows).sum()]
        dense = [(to(torch.sin, w) * w).sum(), to(torch.cos, x).sum()]
        roots = [*sparse, *dense] if sparse_first else [*dense, *sparse]
        for root in roots:
            differentiate([root])
        differentiate(roots)  # sums at borders, too

    weight, alone = (torch.ones(4, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    run(lambda f, *args: f(*args), lambda roots: torch.autograd.backward(roots, retain_graph=True), alone)
    with context() as ctx:
        run(
            lambda f, *args: rpc.rpc_sync(1, f, args),
            lambda roots: backward(ctx, roots, retain_graph=True),
            weight,
        )
        assert_gradients(ctx, (weight, alone.grad))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.complex128])
def test_other_dtypes(c: Cluster, dtype: torch.dtype) -> None:
    x = torch.tensor([1, 2], dtype=dtype, requires_grad=True)
    expected = torch.tensor([1, 2], dtype=dtype, requires_grad=True)
    (square(expected) * 3).abs().sum().backward()
    with context() as ctx:
        backward(ctx, [(rpc.rpc_sync(1, square, (x,)) * 3).abs().sum()])
        gradient = get_gradients(ctx)[x]
        assert gradient.dtype is dtype
        torch.testing.assert_close(gradient, expected.grad)


def test_without_grad_mode_nothing_is_recorded(c: Cluster) -> None:
    x = leaf(1)
    with context() as ctx:
        with torch.no_grad():
            assert rpc.rpc_sync(1, same, (x,)).is_leaf
            assert not rpc.rpc_sync(1, double, (x,)).grad_fn
            assert rpc.rpc_sync(1, known_there, (ctx,))
        backward(ctx, [rpc.rpc_sync(1, double, (x,)).sum()])
        assert_gradients(ctx, (x, [2.0]))


def without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 3


def partly_without_grad(x: Tensor) -> Tensor:
    y = x * 2
    with torch.no_grad():
        scale = rpc.rpc_sync(2, double, (y,))
    return y * scale


def test_regions_without_grad_on_either_side(c: Cluster) -> None:
    """What comes out of such a region is a constant, as in one process; in fast mode too."""
    x = leaf(1)
    with context() as ctx:
        assert not rpc.rpc_sync(1, without_grad, (x,)).requires_grad
        y = rpc.rpc_sync(1, partly_without_grad, (x,))
        with torch.no_grad():
            z = rpc.rpc_sync(1, relay, ([2], y))
        backward(ctx, [(y * z).sum()], mode="fast")
        assert_gradients(ctx, (x, [8.0 * 32.0]))


@pytest.mark.parametrize("how", ["sync", "async", "remote"])
def test_results_that_arrive_in_inference_mode_are_tensors_like_others(c: Cluster, how: str) -> None:
    """As on torch's RPC: an actor keeps what it receives, and a trainer differentiates with it."""
    x = leaf(3)
    with torch.inference_mode():
        if how == "sync":
            found = rpc.rpc_sync(1, double, (x.detach(),))
        elif how == "async":
            found = rpc.rpc_async(1, same, ([x.detach() * 2],)).wait()[0]
        else:
            found = rpc.remote(1, double, (x.detach(),)).to_here()
    assert not found.is_inference()
    (x * found).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert x.grad.tolist() == [6]


def large(_: Tensor) -> list[Tensor]:
    return [torch.ones(100, 100), torch.ones(200, 100).t(), *(torch.ones(10, 10) for _ in range(20))]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_results_that_arrive_without_grad_can_be_written_to_with_it(c: Cluster, mode: type) -> None:
    """Whether they were views that were made under no_grad depended on who was first to read the reply."""
    with mode():
        found = rpc.rpc_sync(1, large, (torch.ones(2),))
    for each in found:
        weight = torch.full_like(each, 2, requires_grad=True)
        each.mul_(weight).sum().backward()  # type: ignore[no-untyped-call]
        assert torch.equal(weight.grad, torch.ones_like(each))


def test_a_call_that_is_waited_for_in_inference_mode_keeps_its_history(c: Cluster) -> None:
    x = leaf(3)
    with context() as ctx:
        future = rpc.rpc_async(1, double, (x,))
        with torch.inference_mode():
            y = future.wait()
        backward(ctx, [(y * y).sum()])
        assert_gradients(ctx, (x, [24.0]))


def trained(layer: torch.nn.Module, x: Tensor) -> tuple[bool, Tensor]:
    return all(type(p) is torch.nn.Parameter and p.is_leaf for p in layer.parameters()), layer(x)


def test_a_module_that_is_sent_is_a_copy_with_parameters_of_its_own(c: Cluster) -> None:
    layer = torch.nn.Linear(2, 2, dtype=torch.float64)
    x = leaf(1, 2)
    with context() as ctx:
        whole, y = rpc.rpc_sync(1, trained, (layer, x))
        assert whole
        backward(ctx, [y.sum()])
        assert_gradients(ctx, (x, layer.weight.sum(0)))


@pytest.mark.parametrize("retain_graph", [False, True])
def test_a_leaf_used_beside_a_tensor_made_from_it_that_was_sent(c: Cluster, retain_graph: bool) -> None:
    w = leaf(1)
    with context() as ctx:
        x = w * w
        backward(ctx, [(x + rpc.rpc_sync(1, same, (x,)) + w).sum()], retain_graph)
        assert_gradients(ctx, (w, [5.0]))


class Generous(torch.autograd.Function):
    """Returns gradients for inputs that do not require any."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x * 2 + y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 2, gradient


def test_gradients_of_constants_are_dropped_where_nodes_run_one_by_one(c: Cluster) -> None:
    w = leaf(1)
    with context() as ctx:
        x = w * w
        y = Generous.apply(x, torch.ones(1, dtype=torch.float64)) + w
        backward(ctx, [(y + rpc.rpc_sync(1, same, (x,))).sum()])
        assert_gradients(ctx, (w, [7.0]))


@pytest.mark.parametrize("hooked", ["its node", "the leaf"])
def test_a_leaf_that_is_frozen_after_its_use_gets_no_gradient_where_it_has_hooks(
    c: Cluster, hooked: str
) -> None:
    def seen_in(differentiate: Callable[[Tensor], None]) -> tuple[list[Any], Any]:
        w, seen = leaf(3), list[Any]()
        y = w * 2
        node = y.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        if hooked == "the leaf":
            w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
        else:
            node.register_hook(lambda *gradients: seen.append(gradients[1][0].item()))
        w.requires_grad_(False)
        differentiate(y)
        return seen, w.grad

    def in_a_context(y: Tensor) -> None:
        with context() as ctx:
            backward(ctx, [rpc.rpc_sync(1, same, (y,)).sum()])
            assert_gradients(ctx)

    assert seen_in(in_a_context) == seen_in(lambda y: y.sum().backward())  # type: ignore[no-untyped-call]


def test_a_hook_of_a_tensor_sees_the_whole_gradient_once(c: Cluster) -> None:
    w = leaf(1)
    seen: list[float] = []

    def triple(gradient: Tensor) -> Tensor:
        seen.append(gradient.item())
        return gradient * 3

    with context() as ctx:
        x = w * 1
        x.register_hook(triple)
        backward(ctx, [(x + rpc.rpc_sync(1, same, (x,))).sum()])
        assert_gradients(ctx, (w, [6.0]))
    assert seen == [2.0]


def test_a_pass_that_starts_while_another_registers_a_hook_runs_hooks_once(c: Cluster) -> None:
    w, other = leaf(1), leaf(1) * 2
    registering, ended = threading.Event(), threading.Event()

    def register(hook: Any) -> Any:
        registering.set()
        ended.wait(0.3)  # the pass may wait for the registration
        return other.grad_fn.register_hook(hook)  # type: ignore[union-attr]

    def other_pass() -> None:
        with internal_hook(register, lambda *_: None):
            pass

    with context() as ctx:
        x = w * 1
        x.register_hook(lambda gradient: gradient * 3)
        loss = (x + rpc.rpc_sync(1, same, (x,))).sum()
        thread = threading.Thread(target=other_pass)
        thread.start()
        assert registering.wait(10)
        backward(ctx, [loss])
        ended.set()
        thread.join(10)
        assert_gradients(ctx, (w, [6.0]))


@pytest.mark.parametrize("at", ["cut", "within"])
def test_a_hook_at_one_of_several_cuts_leaves_the_others_alone(c: Cluster, at: str) -> None:
    """Groups that do not end at the tensor with the hook run as if there were none."""

    def run(call: Callable[[Tensor], Tensor], w: Tensor) -> tuple[Tensor, list[float]]:
        seen: list[float] = []
        first = (w * 2).sin()
        inner = first * 3
        second = inner.exp()
        third = second * w.cos()
        {"cut": first, "within": inner}[at].register_hook(lambda g: (seen.append(g.item()), g * 3)[1])
        return first + second * third + call(first) + call(second) + call(third), seen

    w, alone = leaf(0.3), leaf(0.3)
    loss, expected = run(lambda x: x * 2, alone)
    loss.backward()  # type: ignore[no-untyped-call]
    with context() as ctx:
        loss, seen = run(lambda x: rpc.rpc_sync(1, double, (x,)), w)
        backward(ctx, [loss.sum()])
        torch.testing.assert_close(get_gradients(ctx)[w], alone.grad)
    assert seen == pytest.approx(expected)


def test_a_hook_of_a_leaf_sees_the_whole_gradient_once(c: Cluster) -> None:
    w = leaf(1)
    w.register_hook(lambda g: g.clamp(max=1.0))
    with context() as ctx:
        backward(ctx, [(w + rpc.rpc_sync(1, same, (w * 1,))).sum()])
        assert_gradients(ctx, (w, [1.0]))


def slices(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y[:1], y.view(2, 1)[1]


def test_views_of_what_was_received_and_of_what_is_sent(c: Cluster) -> None:
    x = leaf(1, 2, 3, 4)
    with context() as ctx:
        first, second = rpc.rpc_sync(1, slices, (x.view(2, 2)[:, 1],))
        first.mul_(3)
        backward(ctx, [(first.view(1, 1).expand(2, 1) * second).sum()])
        assert_gradients(ctx, (x, [0.0, 2 * 2 * 3 * 8, 0.0, 2 * 2 * 3 * 4.0]))


class Selective(torch.autograd.Function):
    """Has no gradient for its second argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x * 2 + y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 2, None


def selective(x: Tensor, y: Tensor) -> Tensor:
    z: Tensor = Selective.apply(x, y)
    return z


class NoSlope(torch.autograd.Function):
    """Its gradient is a zero tensor, which has no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        made: Tensor = torch._efficientzerotensor(gradient.shape, dtype=gradient.dtype)  # type: ignore[attr-defined]
        return made


def no_slope(x: Tensor) -> Tensor:
    return no_slope_of(x)


no_slope_of: Callable[[Tensor], Tensor] = NoSlope.apply  # type: ignore[assignment]


@pytest.mark.parametrize("n", [3, 100_000])
@pytest.mark.parametrize("of", ["leaf", "sent"])
def test_a_gradient_without_memory_is_zeros(c: Cluster, of: str, n: int) -> None:
    weight = torch.ones(n, dtype=torch.float64, requires_grad=True)
    used = weight if of == "leaf" else weight * 2
    no_slope(used).sum().backward()
    expected = weight.grad
    assert expected is not None
    with context() as ctx:
        received = rpc.rpc_sync(1, no_slope, (used if of == "leaf" else weight * 2,))
        backward(ctx, [no_slope(received).sum()], retain_graph=True)
        assert_gradients(ctx, (weight, expected))
        backward(ctx, [rpc.rpc_sync(1, no_slope, ((weight * 2),)).sum() + no_slope(weight).sum()])
        assert_gradients(ctx, (weight, expected))
        get_gradients(ctx)[weight].add_(1)  # it has memory of its own


def test_an_undefined_gradient_is_sent_as_none(c: Cluster) -> None:
    x, y, z = leaf(1), leaf(2), leaf(3)
    with context() as ctx:
        backward(ctx, [rpc.rpc_sync(1, selective, (x, rpc.rpc_sync(2, add, (y, z)))).sum()])
        assert_gradients(ctx, (x, [2.0]))
        assert rpc.rpc_sync(1, leaves_with_gradients, (ctx,)) == 0


def leaves_with_gradients(context_id: int) -> int:
    return len(get_gradients(context_id))


def checkpointed(x: Tensor, weight: rpc.RRef[Tensor], use_reentrant: bool) -> Tensor:
    w = weight.local_value()
    y: Tensor = torch.utils.checkpoint.checkpoint(lambda t: (t * w).sin(), x, use_reentrant=use_reentrant)
    return y


class Refuses(torch.autograd.Function):
    """Asked for a gradient, it gives none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None


class Counts(torch.autograd.Function):
    """Is called with zeros where nothing comes, or with None if it would rather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, zeros: bool) -> Tensor:
        ctx.set_materialize_grads(zeros)
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return gradient if gradient is None else gradient + 1, None


def refuse(x: Tensor) -> Tensor:
    refused: Tensor = Refuses.apply(x)
    return refused


def refuse_first(x: Tensor, y: Tensor, unused: Tensor) -> Tensor:
    return refuse(x) + y


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("how", ["separate", "meeting", "node by node"])
def test_a_function_before_an_undefined_gradient_is_called_as_in_one_process(
    c: Cluster, monkeypatch: pytest.MonkeyPatch, how: str, zeros: bool
) -> None:
    """A gradient that was requested and is undefined differs from one that was not requested."""
    monkeypatch.setattr(executor, "hooks_registered", lambda *_: how == "node by node")
    monkeypatch.setattr(differentiation, "has_tensor_hooks", lambda *_: how == "node by node")

    def run(to: Callable[..., Tensor], ws: list[Tensor]) -> Tensor:
        a, b, unused, d, e = (Counts.apply(w, zeros).sin() for w in ws)
        y = to(refuse_first, a, b, unused) + to(relay_refused, d)
        z = e * 1
        return (y + to(refuse, z) + (refuse(z) if how != "separate" else 0)).sum()

    ws, alone = ([leaf(i + 1) for i in range(5)] for _ in range(2))
    run(lambda f, *args: f(*args) if f is not relay_refused else refuse(args[0] * 1), alone).backward()
    with context() as ctx:
        backward(ctx, [run(lambda f, *args: rpc.rpc_sync(1, f, args), ws)])
        expected = [(w, one.grad) for w, one in zip(ws, alone, strict=True) if one.grad is not None]
        assert len(expected) == (4 if zeros else 1)
        assert_gradients(ctx, *expected)


def relay_refused(x: Tensor) -> Tensor:
    y: Tensor = rpc.rpc_sync(2, refuse, (x * 1,))
    return y


def test_checkpointing_inside_a_stage(c: Cluster) -> None:
    x, weight = leaf(0.5), rpc.remote(1, make, ([2.0],))
    with context() as ctx:
        backward(ctx, [rpc.rpc_sync(1, checkpointed, (x, weight, False)).sum()])
        cos = torch.tensor(1.0, dtype=torch.float64).cos().item()
        assert_gradients(ctx, (x, [2 * cos]))
        assert rpc.rpc_sync(1, gradient_there, (ctx, weight)).tolist() == pytest.approx([0.5 * cos])


def test_reentrant_checkpointing_is_torchs_error(c: Cluster) -> None:
    x, weight = leaf(0.5), rpc.remote(1, make, ([2.0],))
    with context() as ctx:
        y = rpc.rpc_sync(1, checkpointed, (x, weight, True))
        with pytest.raises(RuntimeError, match=r"(?s)worker1.*use_reentrant=True"):
            backward(ctx, [y.sum()])


def autocast(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ weight


def test_mixed_types_under_autocast(c: Cluster) -> None:
    x, weight = torch.rand(3, 3, requires_grad=True), torch.rand(3, 3, requires_grad=True)
    expected = torch.autograd.grad((autocast(x, weight).float() * x).sum(), [x, weight])
    with context() as ctx:
        y = rpc.rpc_sync(1, autocast, (x, weight))
        assert y.dtype is torch.bfloat16
        backward(ctx, [(y.float() * x).sum()])
        for tensor, gradient in zip((x, weight), expected, strict=True):
            torch.testing.assert_close(get_gradients(ctx)[tensor], gradient)


@rpc.functions.async_execution
def double_there_and_add(to: int, x: Tensor) -> Any:
    return rpc.rpc_async(to, double, (x * 3,)).then(lambda f: f.wait() + x)


def test_asynchronous_functions_in_a_context(c: Cluster) -> None:
    x = leaf(1)
    with context() as ctx:
        backward(ctx, [rpc.rpc_sync(1, double_there_and_add, (2, x)).sum()])
        assert_gradients(ctx, (x, [7.0]))


@rpc.functions.async_execution
def double_in_two_hops(to: int, x: Tensor) -> Any:
    """The second hop is a call that the callback of the first one makes."""
    both = rpc.rpc_async(to, double_later, (x,)).then(
        lambda f: f.wait() + rpc.rpc_sync(to, double, (f.wait(),))
    )
    CALLBACK_ADDED.set()
    return both


@rpc.functions.async_execution
def double_in_two_hops_together(to: int, x: Tensor) -> Any:
    """As above, where C++ calls the callback: the future of ``collect_all`` is torch's."""
    parts = [rpc.rpc_async(to, double_later, (x,)), rpc.rpc_async(0, double_later, (x,))]

    def second(done: Any) -> Tensor:
        first, other = (part.wait() for part in done.wait())
        return rpc.rpc_sync(to, add, (first, first + other))

    both = torch.futures.collect_all(parts).then(second)
    CALLBACK_ADDED.set()
    return both


CALLBACK_ADDED = threading.Event()


@pytest.fixture
def no_callback_added() -> None:
    CALLBACK_ADDED.clear()


def double_later(x: Tensor) -> Tensor:
    """Returns after its caller has added a callback."""
    assert CALLBACK_ADDED.wait(20)
    return x * 2


@pytest.mark.usefixtures("no_callback_added")
@pytest.mark.parametrize("function", [double_in_two_hops, double_in_two_hops_together])
def test_calls_in_callbacks_of_asynchronous_functions_are_recorded(c: Cluster, function: Any) -> None:
    x = leaf(1.0, 2.0)
    with context() as ctx:
        y = rpc.rpc_sync(1, function, (2, x))
        assert y.tolist() == [6.0, 12.0]
        backward(ctx, [y.sum()])
        assert_gradients(ctx, (x, [6.0, 6.0]))


@pytest.mark.usefixtures("no_callback_added")
@pytest.mark.parametrize("how", ["then", "add_done_callback", "chain"])
def test_calls_in_callbacks_of_the_caller_are_recorded(c: Cluster, how: str) -> None:
    x, done = leaf(1.0, 2.0), PythonFuture[Tensor]()

    def twice(f: Any) -> Tensor:
        return rpc.rpc_sync(2, double, (f.wait(),))

    with context() as ctx:
        first: Any = rpc.rpc_async(1, double_later, (x,))
        made: Any = done
        if how == "add_done_callback":
            first.add_done_callback(lambda f: done.set_result(twice(f)))
        elif how == "then":
            made = first.then(twice)
        else:
            made = first.then(lambda f: f.wait()).then(twice)
        CALLBACK_ADDED.set()
        y = made.wait()
        backward(ctx, [y.sum()])
        assert_gradients(ctx, (x, [4.0, 4.0]))


def test_a_callback_records_for_the_context_in_which_it_was_added(c: Cluster) -> None:
    """Whichever context sets the future; and for none once that has ended."""
    x, future, late = leaf(1.0), PythonFuture[None](), PythonFuture[None]()
    with context() as ctx:
        result = future.then(lambda _: rpc.rpc_sync(1, double, (x,)))
        unrecorded = late.then(lambda _: rpc.rpc_sync(1, double, (x,)))

        def other() -> None:
            with c.acting(0), context():
                future.set_result(None)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(10)
        backward(ctx, [result.wait().sum()])
        assert_gradients(ctx, (x, [2.0]))
    with context() as ctx:
        late.set_result(None)
        assert unrecorded.wait().is_leaf
        assert not get_gradients(ctx)


def test_one_reference_fetched_often_and_used_in_part(c: Cluster) -> None:
    x = leaf(3)
    with context() as ctx:
        made = rpc.remote(1, relay, ([2], x))
        copies = [made.to_here() for _ in range(3)]
        loss = (copies[0] * copies[2] + rpc.rpc_sync(1, double_of, (made,))).sum()
        backward(ctx, [loss])
        assert_gradients(ctx, (x, [2 * 16 * 3.0 + 8.0]))


def double_of(made: rpc.RRef[Tensor]) -> Tensor:
    return made.local_value() * 2


def test_another_thread_records_if_it_is_given_the_context_variables(c: Cluster) -> None:
    x = leaf(1)
    results: list[Tensor] = []
    with context() as ctx:
        variables = contextvars.copy_context()
        thread = threading.Thread(
            target=variables.run, args=(lambda: results.append(rpc.rpc_sync(1, double, (x,))),)
        )
        thread.start()
        thread.join()
        backward(ctx, [results[0].sum()])
        assert_gradients(ctx, (x, [2.0]))


def test_passes_of_one_context_at_a_time_add_up(c: Cluster) -> None:
    x = leaf(1)
    with context() as ctx:
        losses = [rpc.rpc_sync(1 + i % 2, relay, ([2 - i % 2], x * (i + 1))).sum() for i in range(6)]

        def differentiate(loss: Tensor) -> None:
            with c.acting(0):
                backward(ctx, [loss])

        threads = [threading.Thread(target=differentiate, args=(loss,)) for loss in losses]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert_gradients(ctx, (x, [4.0 * sum(range(1, 7))]))


def test_passes_of_two_threads_leave_garbage_collection_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass may collect nothing for a while; here one begins as another ends to do so."""
    is_enabled, enable, disable = gc.isenabled, gc.enable, gc.disable
    has_begun, has_seen, has_ended = threading.Event(), threading.Event(), threading.Event()

    def see() -> bool:
        found = is_enabled()
        if threading.current_thread().name == "second":
            has_seen.set()
            has_ended.wait(10)
        return found

    def begin() -> None:
        disable()
        if threading.current_thread().name == "first":
            has_begun.set()
            has_seen.wait(10)

    def end() -> None:
        enable()
        has_ended.set()

    def differentiate() -> None:
        with c.acting(0), context() as ctx:
            backward(ctx, [(leaf(1) * 2).sum()])
        for each in (has_begun, has_ended):  # if passes do without all this
            each.set()

    with cluster(1) as c:
        for name, replacement in {"isenabled": see, "disable": begin, "enable": end}.items():
            monkeypatch.setattr(gc, name, replacement)
        threads = [threading.Thread(target=differentiate, name=name) for name in ("first", "second")]
        threads[0].start()
        assert has_begun.wait(10)
        threads[1].start()
        for t in threads:
            t.join()
        monkeypatch.undo()
    collects = gc.isenabled()
    gc.enable()
    assert collects


def train_there(context_id: int, weight: rpc.RRef[Tensor], to: int, times: int) -> int:
    """Runs passes of its own, over a call of its own, in the context that it was called in."""
    w = weight.local_value()
    for _ in range(times):
        backward(context_id, [rpc.rpc_sync(to, double, (w * 3,)).sum()])
    return times


def test_passes_that_several_workers_begin_in_one_context(c: Cluster) -> None:
    x = leaf(1)
    weights = {to: rpc.remote(to, make, ([1.0],)) for to in (1, 2)}
    with context() as ctx:
        waits = [rpc.rpc_async(to, train_there, (ctx, w, 3 - to, 5)) for to, w in weights.items()]
        for _ in range(5):
            backward(ctx, [rpc.rpc_sync(1, relay, ([2], x)).sum()])
        for w in waits:
            w.wait()
        assert_gradients(ctx, (x, [5 * 4.0]))
        for to, w in weights.items():
            assert rpc.rpc_sync(to, gradient_there, (ctx, w)).tolist() == [5 * 6.0]


def loss_with(weight: rpc.RRef[Tensor], x: Tensor) -> Tensor:
    return (weight.local_value() * x).sum()


def test_a_backward_function_may_begin_a_pass_of_another_context(c: Cluster) -> None:
    """As people do who differentiate inside: here in a hook, on an engine thread of another worker."""
    x, weight = leaf(2), rpc.remote(2, make, ([3.0],))
    with context() as ctx:
        y = rpc.rpc_sync(1, hooked, (x, weight))
        backward(ctx, [y.sum()])
        assert_gradients(ctx, (x, [2 * 3.0]))


def hooked(x: Tensor, weight: rpc.RRef[Tensor]) -> Tensor:
    def inner(gradient: Tensor) -> Tensor:
        probe = leaf(1)
        with torch.enable_grad(), context() as ctx:
            backward(ctx, [rpc.rpc_sync(2, loss_with, (weight, probe))])
            return gradient * get_gradients(ctx)[probe]

    y = x * 2
    y.register_hook(inner)
    return y


def test_several_roots_some_of_them_remote_results(c: Cluster) -> None:
    x = leaf(1)
    with context() as ctx:
        y = rpc.rpc_sync(1, double, (x,))
        backward(ctx, [y, (y * x).sum(), y])
        assert_gradients(ctx, (x, [2 + 4 + 2.0]))


def sparse_leaf(*values: float) -> Tensor:
    """A sparse vector that requires grad."""
    made = torch.sparse_coo_tensor([list(range(len(values)))], values, (9,), check_invariants=True)
    return made.coalesce().requires_grad_()


def test_sparse_leaves(c: Cluster) -> None:
    def loss(one: Tensor, two: Tensor, add: Callable[..., Tensor]) -> Tensor:
        return torch.sparse.sum(add(one, two) * 3)

    here, there = ([sparse_leaf(1.0, 2.0), sparse_leaf(4.0)] for _ in range(2))
    loss(*here, torch.add).backward()
    with context() as ctx:
        backward(ctx, [loss(*there, lambda *both: rpc.rpc_sync(1, torch.add, both))])
        gradients = get_gradients(ctx)
        for mine, its in zip(here, there, strict=True):
            assert torch.equal(mine.grad.to_dense(), gradients[its].to_dense())


class Doubling:
    """Hooks that count how often they run, and double."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def of_tensor(self, gradient: Tensor) -> Tensor:
        self.seen.append(gradient.item())
        return gradient * 2

    def before_node(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.seen.append(gradients[0].item())
        return (gradients[0] * 2, *gradients[1:])

    def after_node(self, made: tuple[Any, ...], gradients: tuple[Tensor, ...]) -> tuple[Any, ...]:
        self.seen.append(gradients[0].item())
        return tuple(None if m is None else m * 2 for m in made)

    def after_accumulation(self, leaf: Tensor) -> None:
        assert leaf.grad is not None
        self.seen.append(leaf.grad.item())
        leaf.grad *= 2

    def attach(self, how: str, x: Tensor) -> None:
        if how == "tensor":
            x.register_hook(self.of_tensor)
        elif how == "before":
            x.grad_fn.register_prehook(self.before_node)  # type: ignore[union-attr]
        else:
            x.grad_fn.register_hook(self.after_node)  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["tensor", "before", "after"])
@pytest.mark.parametrize("at", ["sent", "deep", "received", "answer"])
@pytest.mark.parametrize("mode", ["fast", "auto"])
def test_hooks_run_once_on_the_sum(c: Cluster, how: str, at: str, mode: str) -> None:
    """Of ``x -> y``, sent twice and used here, whichever tensor or node they are of; against one process."""

    def run(call: Callable[[Tensor], Tensor], finish: Callable[[Tensor, Tensor], Any]) -> tuple[Any, Any]:
        hooks = Doubling()
        w = leaf(0.5)
        x = w.sin()
        y = x.exp()
        a = call(y)
        b = call(y * a)
        attached = {"sent": y, "deep": x, "received": b, "answer": a}[at]
        if not (how == "after" and at in ("received", "answer")):  # it gets no gradients of inputs there
            hooks.attach(how, attached)
        finish(w, (a * b + y + x * y + w).sum())
        return hooks.seen, w.grad

    def finish(w: Tensor, loss: Tensor) -> None:
        with_id = current.pop()
        backward(with_id, [loss], mode=mode)
        w.grad = get_gradients(with_id)[w]

    current: list[int] = []
    with context() as ctx:
        current.append(ctx)
        seen, gradient = run(lambda t: rpc.rpc_sync(1, double, (t,)), finish)
    expected_seen, expected = run(double, lambda w, loss: loss.backward())
    assert seen == pytest.approx(expected_seen)
    torch.testing.assert_close(gradient, expected)


def triple_both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * 3, y * 3


def test_hooks_of_the_node_of_received_tensors(c: Cluster) -> None:
    """As on torch's RPC: one node for all of a message, after the hooks of its tensors."""
    seen: list[Any] = []

    def before(gradients: tuple[Tensor, ...]) -> tuple[Any, ...]:
        seen.append([g.item() for g in gradients])
        return gradients[0] * 10, None

    x, y = leaf(1), leaf(1)
    with context() as ctx:
        a, b = rpc.rpc_sync(1, triple_both, (x, y))
        a.register_hook(lambda g: g + 1)
        node: Any = a.grad_fn
        handles = node.register_prehook(before), node.register_hook(lambda *both: seen.append(both))
        rpc.rpc_sync(1, triple_both, (x, y))[0].grad_fn.register_prehook(lambda _: seen.append("unused"))
        backward(ctx, [(a * b + a * 2 + rpc.rpc_sync(2, same, (a,))).sum()], retain_graph=True)
        gradient = torch.tensor([70.0], dtype=torch.float64)
        assert seen == [[7.0, 3.0], ((), (gradient, None))]
        assert_gradients(ctx, (x, [210.0]))
        for handle in handles:
            handle.remove()
        node.register_prehook(lambda gradients: gradients[0])
        with pytest.raises(TypeError, match="tuple of 2 gradients"):
            backward(ctx, [a + b])


def checkpoint_call(to: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return rpc.checkpoint(to, function, *args)


@pytest.mark.parametrize(
    ("call", "create_graph"), [(rpc.rpc_sync, False), (rpc.rpc_sync, True), (checkpoint_call, False)]
)
def test_hooks_run_in_the_grad_mode_of_the_pass(c: Cluster, call: Any, create_graph: bool) -> None:
    """As in torch's engine."""
    modes: dict[str, bool] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda *_: modes.update({name: torch.is_grad_enabled()})

    x = leaf(1, 2)
    x.register_post_accumulate_grad_hook(note("post"))
    node: Any = x.view(2).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_prehook(note("before the leaf"))
    node.register_hook(note("after the leaf"))
    with context() as ctx:
        y = call(1, torch.mul, (x, 3))
        y.grad_fn.register_prehook(note("before the message"))
        y.grad_fn.register_hook(note("after the message"))
        z = y.exp()
        z.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(note("end")))
        backward(ctx, [z.sum()], create_graph=create_graph)
    assert len(modes) == 6
    assert set(modes.values()) == {create_graph}


WEIGHT = leaf(3, 4)


def scaled(x: Tensor) -> Tensor:
    return x * WEIGHT


@pytest.mark.parametrize("call", [rpc.rpc_sync, checkpoint_call])
def test_a_hook_of_a_leaf_may_step(c: Cluster, call: Any) -> None:
    def step(p: Tensor) -> None:
        p.sub_(p.grad)  # type: ignore[arg-type]

    x = leaf(1, 2)
    handles = [t.register_post_accumulate_grad_hook(step) for t in (x, WEIGHT)]
    with context() as ctx:
        backward(ctx, [call(1, scaled, (x,)).sum()])
    assert [x.tolist(), WEIGHT.tolist()] == [[-2, -2], [2, 2]]
    WEIGHT.data = torch.tensor([3.0, 4.0], dtype=torch.float64)
    for handle in handles:
        handle.remove()


def hooked_second(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Only the second has a hook, which accepts no None."""
    y.register_hook(lambda g: g * 2)
    return x * 3, rpc.rpc_sync(2, torch.mul, (x, y))


@pytest.mark.parametrize("used", [[0], [1], [0, 1]])
def test_a_hook_of_a_received_tensor_runs_only_with_its_gradient(c: Cluster, used: list[int]) -> None:
    """Although the tensors of a message have one node, at which torch's engine runs the hooks of all."""
    x = leaf(1, 2)
    with context() as ctx:
        both = rpc.rpc_sync(1, hooked_second, (x, x * 5))
        backward(ctx, [sum(both[i].sum() for i in used)])
        assert_gradients(ctx, (x, [sum([3.0, 5 * v + 2 * 5 * v][i] for i in used) for v in (1.0, 2.0)]))


def test_a_hook_of_another_output_runs_once_where_a_tensor_is_used_here_and_sent(c: Cluster) -> None:
    """Though the engine stops at the node, with a partial sum, and again with the complete one."""

    def run(call: Callable[[Tensor], Tensor], finish: Callable[[Tensor], None]) -> list[Any]:
        seen: list[Any] = []
        a, b = leaf(1, 2).unbind()
        a.register_hook(seen.append)
        finish((b.sin() + call(b)).sum())
        return seen

    expected = run(double, lambda loss: loss.backward())  # type: ignore[no-untyped-call]
    with context() as ctx:
        found = run(lambda t: rpc.rpc_sync(1, double, (t,)), lambda loss: backward(ctx, [loss]))
    assert found == expected == [None]


@pytest.mark.parametrize("how", ["all", "any"])
def test_a_multi_gradient_hook_of_what_came_in_one_message(c: Cluster, how: Any) -> None:
    seen: list[Any] = []
    with context() as ctx:
        a, b = rpc.rpc_sync(1, triple_both, (leaf(1), leaf(1)))
        register_multi_grad_hook([b, a], seen.append, mode=how)
        backward(ctx, [(a * 2 + rpc.rpc_sync(2, double, (a,))).sum()])
    gradient = torch.tensor([4.0], dtype=torch.float64)
    assert seen == ([[None, gradient]] if how == "all" else [gradient])


@pytest.mark.parametrize("at", ["used here and sent", "before it", "received", "received and sent"])
def test_retained_gradients_are_the_whole_sum(c: Cluster, at: str) -> None:
    def run(call: Callable[[Tensor], Tensor], differentiate: Callable[[Tensor], None]) -> Any:
        w = leaf(1)
        v = w * 2
        x = v * v
        y = call(x)
        z = call(y)
        kept = {"used here and sent": x, "before it": v, "received": y, "received and sent": z}[at]
        kept.retain_grad()
        differentiate((y * x + x + v + y + call(z)).sum())
        return kept.grad

    expected = run(double, lambda loss: loss.backward())  # type: ignore[no-untyped-call]
    with context() as ctx:
        found = run(lambda t: rpc.rpc_sync(1, double, (t,)), lambda loss: backward(ctx, [loss]))
    torch.testing.assert_close(found, expected)


def test_a_gradient_retained_where_a_tensor_is_used_and_sent(c: Cluster) -> None:
    x = leaf(2)
    with context() as ctx:
        y = x * 1
        y.retain_grad()
        backward(ctx, [(rpc.rpc_sync(1, square, (y,)) * 4 + y * 4).sum()])
        assert y.grad is not None
        assert y.grad.tolist() == [20.0]


@pytest.mark.parametrize("how", ["itself", "by a view", "between passes"])
def test_a_gradient_retained_of_a_tensor_that_is_changed_in_place(c: Cluster, how: str) -> None:
    """Where it is used and sent, the hook that keeps the gradient moves with the tensor."""

    def run(call: Callable[[Tensor], Tensor], differentiate: Callable[[Tensor], None]) -> Any:
        w = leaf(1, 2)
        y = w * 2
        y.retain_grad()
        changed = y if how == "itself" else y[:1]
        if how == "between passes":
            differentiate((y * 3 + call(y)).sum())
            y.grad = None
        changed.mul_(3)
        differentiate((y * 4 + call(y)).sum())
        return y.grad

    expected = run(double, lambda loss: loss.backward(retain_graph=True))  # type: ignore[no-untyped-call]
    with context() as ctx:
        found = run(
            lambda t: rpc.rpc_sync(1, double, (t,)), lambda loss: backward(ctx, [loss], retain_graph=True)
        )
    torch.testing.assert_close(found, expected)


class Acting(torch.autograd.Function):
    """Calls something when it is differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, action: Callable[[], object]) -> Tensor:
        ctx.action = action
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.action()
        return gradient * 1, None


@pytest.mark.parametrize("by", ["the same group", "one before it"])
@pytest.mark.parametrize("what", ["hook", "retained gradient", "hook of the node", "hook of the leaf"])
def test_a_hook_that_is_registered_during_the_pass_where_a_tensor_is_used_and_sent(
    c: Cluster, what: str, by: str
) -> None:
    """It runs once, on the complete gradient, also if it is the first hook of this process."""

    def run(call: Callable[[Tensor], Tensor], differentiate: Callable[[Tensor], None]) -> Any:
        w, seen = leaf(1, 2), list[Any]()
        v = w * 3

        def register() -> None:
            if what == "hook":
                v.register_hook(lambda g: (seen.append(g.tolist()), g * 3)[1])
            elif what == "retained gradient":
                v.retain_grad()
            elif what == "hook of the leaf":
                w.register_post_accumulate_grad_hook(
                    lambda p: seen.append(p.grad.tolist())  # type: ignore[union-attr]
                )
            else:
                node: Any = v.grad_fn
                node.register_prehook(lambda gs: (seen.append(gs[0].tolist()), (gs[0] * 3,))[1])

        u = v.sin()
        loss = Acting.apply(u, register) + call(v) * 2  # type: ignore[no-untyped-call]
        differentiate((loss if by == "the same group" else loss + call(u)).sum())
        return w, [*seen, v.grad.tolist() if v.retains_grad else None]  # type: ignore[union-attr]

    with context() as ctx:
        w, found = run(lambda t: rpc.rpc_sync(1, double, (t,)), lambda loss: backward(ctx, [loss]))
        gradient = get_gradients(ctx)[w]
    alone, expected = run(double, lambda loss: loss.backward())  # type: ignore[no-untyped-call]
    torch.testing.assert_close(gradient, alone.grad)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("how", ["separate", "meeting", "node by node"])
def test_hooks_of_a_leafs_node_run_around_its_accumulation(c: Cluster, how: str) -> None:
    """In the order of torch: the tensor's, before the node, after the accumulation, after the node."""

    def run(call: Callable[[Tensor], Tensor], finish: Callable[[Tensor, Tensor], None]) -> tuple[Any, Any]:
        seen: list[Any] = []
        w = leaf(0.5)
        node: Any = torch.autograd.graph.get_gradient_edge(w).node

        def before(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            seen.append(("before", gradients[0].item()))
            return (gradients[0] * 3,)

        w.register_hook(lambda g: seen.append(("tensor", g.item())))
        node.register_prehook(before)
        node.register_prehook(lambda gradients: seen.append(("again", gradients[0].item())))
        w.register_post_accumulate_grad_hook(lambda p: seen.append(("sum", p.grad.item())))
        node.register_hook(lambda made, gradients: seen.append((made, gradients[0].item())))
        node.register_hook(lambda made, gradients: seen.append("removed")).remove()
        y = w.sin()
        loss = call(w * 1) if how == "routes" else call(w) + w * 2 + (call(y) * y if "node" in how else 0)
        finish(w, loss.sum())
        return seen, w.grad

    def finish(w: Tensor, loss: Tensor) -> None:
        for retain_graph in (True, False):
            backward(ctx, [loss], retain_graph)
        w.grad = get_gradients(ctx)[w]

    def plain(w: Tensor, loss: Tensor) -> None:
        for retain_graph in (True, False):
            loss.backward(retain_graph=retain_graph)

    with context() as ctx:
        seen, gradient = run(lambda t: rpc.rpc_sync(1, double, (t,)), finish)
    expected_seen, expected = run(double, plain)
    for mine, its in zip(seen, expected_seen, strict=True):
        assert mine[0] == its[0]
        assert mine[1] == pytest.approx(its[1])
    torch.testing.assert_close(gradient, expected)


def test_a_hook_before_a_leaf_may_stop_its_gradient(c: Cluster) -> None:
    w = leaf(1)
    node: Any = torch.autograd.graph.get_gradient_edge(w).node
    handle = node.register_prehook(lambda gradients: (None,))
    with context() as ctx:
        backward(ctx, [rpc.rpc_sync(1, double, (w,)).sum()])
        assert_gradients(ctx)
    handle.remove()
    node.register_prehook(lambda gradients: gradients[0])
    with context() as ctx, pytest.raises(TypeError, match="tuple of one gradient"):
        backward(ctx, [rpc.rpc_sync(1, double, (w,)).sum()])


class Keeps(torch.autograd.Function):
    """Keeps the gradient that it gives, once or for two inputs."""

    kept: list[Tensor]

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.count = len(tensors)
        return torch.stack(tensors).sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        made = gradient * 2
        Keeps.kept = [made]
        return (made,) * ctx.count


@pytest.mark.parametrize("meets", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_a_gradient_with_another_reference_is_copied(c: Cluster, count: int, meets: bool) -> None:
    leaves = [leaf(1, 2) for _ in range(count)]
    with context() as ctx:
        y = Keeps.apply(*leaves)
        backward(ctx, [(rpc.rpc_sync(1, double, (y,)) + (y if meets else 0)).sum()])
        (kept,) = Keeps.kept
        found = [get_gradients(ctx)[x] for x in leaves]
        for gradient in found:
            gradient.zero_()
        assert kept.tolist() == [6.0 if meets else 4.0] * 2


def test_a_gradient_without_other_references_is_not_copied(c: Cluster) -> None:
    x = leaf(1, 2)
    addresses = []
    with context() as ctx:
        y = x.view(1, 2).view(2)
        y.register_hook(lambda g: addresses.append(g.data_ptr()))
        backward(ctx, [rpc.rpc_sync(1, double, (y,)).sum()])
        assert [get_gradients(ctx)[x].data_ptr()] == addresses


def test_a_post_accumulate_hook_runs_once_with_the_sum(c: Cluster) -> None:
    hooks = Doubling()
    w = leaf(1)
    w.grad = torch.full((1,), 9.0, dtype=torch.float64)
    w.register_post_accumulate_grad_hook(hooks.after_accumulation)
    with context() as ctx:
        loss = (w * 3 + rpc.rpc_sync(1, same, (w * 1,)) + rpc.rpc_sync(2, same, (w,))).sum()
        backward(ctx, [loss], retain_graph=True)
        assert_gradients(ctx, (w, [10.0]))
        backward(ctx, [loss])
        assert_gradients(ctx, (w, [30.0]))
    assert hooks.seen == [5.0, 15.0]
    assert w.grad.tolist() == [9.0]


LEAVES: list[Tensor] = []


def train_leaf(number: int, to: int, factor: float) -> list[float]:
    """One pass over a leaf of this process in a context of its own, and over a call of worker ``to``."""
    weight = LEAVES[number]
    with context() as ctx:
        backward(ctx, [rpc.rpc_sync(to, double, (weight * factor,)).sum()])
        return list(get_gradients(ctx)[weight].tolist())


def test_hooks_of_a_leaf_run_in_one_pass_of_a_context_at_a_time(c: Cluster) -> None:
    """What they leave in ``.grad`` does not replace what another pass adds meanwhile."""
    w = leaf(1)
    begun, reached, ended = threading.Event(), threading.Event(), threading.Event()

    def add_a_hundred(tensor: Tensor) -> None:
        if not begun.is_set():
            begun.set()
            assert reached.wait(20)
            ended.wait(0.3)  # the other pass may wait for this hook
        assert tensor.grad is not None
        tensor.grad = tensor.grad + 100

    w.register_post_accumulate_grad_hook(add_a_hundred)
    with context() as ctx:
        first, second = (rpc.rpc_sync(1, double, (w,)).sum() for _ in range(2))

        def other_pass() -> None:
            assert begun.wait(20)
            w.register_hook(lambda gradient: reached.set())
            with c.acting(0):
                backward(ctx, [second])
            ended.set()

        thread = threading.Thread(target=other_pass)
        thread.start()
        backward(ctx, [first])
        thread.join(20)
        assert_gradients(ctx, (w, [2.0 + 100 + 2.0 + 100]))


def test_a_post_accumulate_hook_may_wait_for_another_pass(c: Cluster) -> None:
    """Each of two hooks makes a call which begins a pass that runs the other one's kind of hook."""
    LEAVES[:] = [leaf(1.0), leaf(1.0)]
    nested: list[Any] = []

    def call(p: Tensor) -> None:
        if not nested:
            nested.append(None)
            nested[0] = rpc.rpc_sync(1, train_leaf, (1, 2, 3.0), timeout=20)
        assert p.grad is not None
        p.grad += 1

    LEAVES[0].register_post_accumulate_grad_hook(call)
    LEAVES[1].register_post_accumulate_grad_hook(call)
    assert train_leaf(0, 2, 5.0) == [11.0]
    assert nested == [[7.0]]
    assert LEAVES[0].grad is None
    assert LEAVES[1].grad is None


def test_a_slow_hook_delays_only_passes_that_run_hooks_of_the_same_leaf(c: Cluster) -> None:
    LEAVES[:] = [leaf(1.0), leaf(1.0)]
    entered, go_on = threading.Semaphore(0), threading.Event()
    inside, most = [0], [0]

    def slow(p: Tensor) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        entered.release()
        assert p.grad is not None
        gradient = p.grad.clone()
        assert go_on.wait(20)
        assert torch.equal(p.grad, gradient), "another pass has put its gradient into .grad"
        inside[0] -= 1

    LEAVES[0].register_post_accumulate_grad_hook(slow)
    LEAVES[1].register_post_accumulate_grad_hook(lambda p: None)
    futures = [rpc.rpc_async(1, train_leaf, (0, 2, factor)) for factor in (1.0, 2.0)]
    assert entered.acquire(timeout=20)
    assert rpc.rpc_sync(1, train_leaf, (1, 2, 1.0), timeout=20) == [2.0]
    go_on.set()
    assert [f.wait() for f in futures] == [[2.0], [4.0]]
    assert most == [1]


@pytest.mark.parametrize("beside_replicas", [False, True])
@pytest.mark.parametrize("way", ["itself", "computed", "sent", "met"])
def test_hooks_of_a_leaf_run_without_a_gradient(
    c: Cluster, way: str, beside_replicas: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: beside_replicas)

    def run(remote: bool) -> tuple[list[object], list[float]]:
        seen: list[object] = []

        def halve(p: Tensor) -> None:
            seen.append(None if p.grad is None else p.grad.tolist())
            if p.grad is not None:
                p.grad = p.grad * 0.5

        def away(x: Tensor) -> Tensor:
            return rpc.rpc_sync(1, same, (x,)) if remote else same(x)

        w = leaf(2)
        w.register_post_accumulate_grad_hook(halve)
        node = w.view_as(w).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        node.register_prehook(lambda g: seen.append(["before", g[0] is None]))
        node.register_hook(lambda _, g: seen.append(["after", g[0] is None]))

        def roots() -> list[Tensor]:
            if way == "itself":
                return [Refuses.apply(w).sum()]
            if way == "computed":
                return [Refuses.apply(w * 1).sum()]
            if way == "sent":
                return [Refuses.apply(away(w)).sum()]
            return [(Refuses.apply(w) + Refuses.apply(away(w * 1))).sum()]

        if remote:
            with context() as ctx:
                for losses in (roots, lambda: [(w * 4).sum()], roots):
                    backward(ctx, losses())
                return seen, get_gradients(ctx)[w].tolist()
        for losses in (roots, lambda: [(w * 4).sum()], roots):
            losses()[0].backward()
        assert w.grad is not None
        return seen, w.grad.tolist()

    assert run(remote=True) == run(remote=False)


def test_a_post_accumulate_hook_may_consume_the_gradient(c: Cluster) -> None:
    def step(p: Tensor) -> None:
        assert p.grad is not None
        with torch.no_grad():
            p -= p.grad
        p.grad = None

    w = leaf(1)
    w.register_post_accumulate_grad_hook(step)
    with context() as ctx:
        backward(ctx, [rpc.rpc_sync(1, double, (w,)).sum()])
        assert get_gradients(ctx) == {}
    assert w.item() == -1.0


def test_hooks_of_modules_run_where_the_module_is(c: Cluster) -> None:
    layer = rpc.remote(1, hooked_layer)
    x = leaf(1, 2)
    with context() as ctx:
        y = layer.rpc_sync().forward(x) + layer.rpc_sync().forward(x * 2)
        backward(ctx, [y.sum()])
        assert rpc.rpc_sync(1, ran_of, (layer,)) == ["full", "full", "weight"]


def hooked_layer() -> torch.nn.Module:
    layer = torch.nn.Linear(2, 2, dtype=torch.float64)
    ran: list[str] = []
    layer.ran = ran  # type: ignore[assignment]
    layer.weight.register_hook(lambda g: ran.append("weight"))
    outer = torch.nn.Sequential(layer)
    outer.register_full_backward_hook(lambda *_: ran.append("full"))
    return Calling(outer)


class Calling(torch.nn.Module):
    """Calls the module, so that its hooks run, where a method call would go past them."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


def ran_of(layer: rpc.RRef[Any]) -> list[str]:
    ran: list[str] = layer.local_value().inner[0].ran
    return ran


# ---- what it is told when it may not --------------------------------------------------------------------


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise LookupError("no gradient today")


def fails_later(x: Tensor) -> Tensor:
    y: Tensor = _Fails.apply(x)
    return y


@pytest.mark.parametrize("to", [0, 1])
def test_an_error_in_a_backward_function_reaches_the_caller(c: Cluster, to: int) -> None:
    x = leaf(1)
    with context() as ctx:
        y = rpc.rpc_sync(2, double, (rpc.rpc_sync(to, fails_later, (x,)),))
        with pytest.raises(LookupError, match="no gradient today") as caught:
            backward(ctx, [y.sum()])
        assert isinstance(caught.value, RuntimeError)
        assert f"Error on Node {to}: no gradient today" in str(caught.value)
        assert f"worker{to}" in str(caught.value)
    with context() as ctx:
        backward(ctx, [rpc.rpc_sync(to, double, (x,)).sum()])
        assert_gradients(ctx, (x, [2.0]))


def unused_result_of(x: Tensor) -> Tensor:
    rpc.rpc_sync(2, double, (x * 2,))
    return x * x


@pytest.mark.parametrize("where", ["here", "there"])
def test_an_unused_result(c: Cluster, where: str) -> None:
    """Fast mode names the call, to whom, and the line; the others give the gradients."""
    x = leaf(1)

    def loss() -> Tensor:
        y = x * 2
        if where == "there":
            return rpc.rpc_sync(1, unused_result_of, (y,)).sum()
        rpc.rpc_sync(1, double, (y,))
        return (y * 3).sum()

    with context() as ctx, pytest.raises(AutogradError, match=r"FAST mode.*\n.*double") as caught:
        backward(ctx, [loss()], mode="fast")
    text = str(caught.value)
    assert ("worker0 to worker1" if where == "here" else "worker1 to worker2") in text
    maker = loss if where == "here" else unused_result_of
    line = maker.__code__.co_firstlineno + (4 if where == "here" else 1)
    assert f"called in {__file__}:{line}" in text
    for mode in ("smart", "auto"):
        with context() as ctx:
            backward(ctx, [loss()], mode=mode)
            assert_gradients(ctx, (x, [6.0 if where == "here" else 8.0]))


def test_sends_that_wait_for_a_dead_branch_are_not_reported(c: Cluster) -> None:
    """Behind the unused call, a used one waits; only the unused one is the reason."""
    x = leaf(1)
    with context() as ctx:
        y = rpc.rpc_sync(1, double, (x,))
        rpc.rpc_sync(2, same, (y,))
        with pytest.raises(AutogradError) as caught:
            backward(ctx, [y.sum()], mode="fast")
    assert str(caught.value).count("tensors sent by") == 1
    assert "same" in str(caught.value)


BAD_ROOTS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: [leaf(1, 2) * 2], RuntimeError, "is not a scalar, all roots need to be scalar"),
    (lambda: [torch.ones(1)], RuntimeError, "requires_grad not set on root"),
    (lambda: [leaf(1).sum(), torch.ones(1)], RuntimeError, r"requires_grad not set on root roots\[1\]"),
    (lambda: [leaf(1)], RuntimeError, r"roots\[0\] does not have a valid gradient function"),
    (lambda: [], RuntimeError, "No tensors provided for gradient computation"),
    (lambda: [3.0], TypeError, r"roots\[0\] must be a tensor, not float"),
    (lambda: leaf(1).sum(), TypeError, "roots must be a list of tensors, not Tensor"),
    (lambda: None, TypeError, "roots must be a list"),
]


@pytest.mark.parametrize(("roots", "kind", "text"), BAD_ROOTS, ids=[text for *_, text in BAD_ROOTS])
def test_roots_that_cannot_be(c: Cluster, roots: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with context() as ctx, pytest.raises(kind, match=text):
        backward(ctx, roots())


@pytest.mark.parametrize("bad", ["1", 1.0, None, True], ids=repr)
def test_context_ids_that_cannot_be(c: Cluster, bad: Any) -> None:
    with pytest.raises(TypeError, match="context_id must be an int"):
        backward(bad, [leaf(1).sum()])
    for call in get_gradients, describe_context, rpc.RRef(leaf(1).sum()).backward:
        with pytest.raises(ArgumentTypeError, match="incompatible function arguments: context_id must be an"):
            call(bad)


@pytest.mark.parametrize("number", [0, -1, 12345, 2**70])
def test_an_unknown_context(c: Cluster, number: int) -> None:
    text = f"Could not find autograd context with id: {number}"
    with pytest.raises(RuntimeError, match=text):
        get_gradients(number)
    with pytest.raises(RuntimeError, match=text):
        backward(number, [leaf(1).sum()])


def test_the_error_for_a_released_context(c: Cluster) -> None:
    with context() as ctx:
        pass
    text = f"Could not find autograd context with id: {ctx}; it has been released"
    with pytest.raises(AutogradError, match=text):
        get_gradients(ctx)
    with pytest.raises(AutogradError, match=text):
        backward(ctx, [leaf(1).sum()])


def test_a_context_is_unknown_on_a_worker_without_its_calls(c: Cluster) -> None:
    with context() as ctx, c.acting(2):
        with pytest.raises(AutogradError, match=r"no call inside it has arrived from worker 0"):
            get_gradients(ctx)
        with pytest.raises(AutogradError, match=r"no call inside it has arrived from worker 0"):
            backward(ctx, [leaf(1).sum()])


def enter_acting(c: Cluster, once: context) -> None:
    with c.acting(0), once:
        pass


def test_a_context_entered_twice_is_refused(c: Cluster) -> None:
    once = context()
    with once as ctx:
        with pytest.raises(AutogradError, match="Already have an autograd context"), once:
            pass
        with pytest.raises(AutogradError, match="has been entered already"):
            contextvars.Context().run(enter_acting, c, once)  # as another thread would
        assert get_gradients(ctx) == {}
    with once as again:
        assert again != ctx


def test_a_context_left_twice_or_never_entered_is_refused(c: Cluster) -> None:
    once = context()
    with pytest.raises(AutogradError, match="without having been entered"):
        once.__exit__(None, None, None)
    with once:
        pass
    with pytest.raises(AutogradError, match="for the second time"):
        once.__exit__(None, None, None)


def test_contexts_do_not_nest_in_one_thread(c: Cluster) -> None:
    with context() as ctx:
        with pytest.raises(AutogradError, match="Already have an autograd context"), context():
            pass
        assert get_gradients(ctx) == {}
    with context():
        pass


def test_an_unknown_mode(c: Cluster) -> None:
    with context() as ctx, pytest.raises(AutogradError, match="mode must be one of fast, smart, auto"):
        backward(ctx, [leaf(1).sum()], mode="slow")


def test_a_tensor_of_another_context_is_refused(c: Cluster) -> None:
    with context():
        old = rpc.rpc_sync(1, double, (leaf(1),))
    with context() as ctx, pytest.raises(AutogradError, match=r"received in context .* use one context"):
        backward(ctx, [old.sum()])


def test_plain_backward_through_a_call_is_refused(c: Cluster) -> None:
    with context():
        y = rpc.rpc_sync(1, double, (leaf(1),))
        with pytest.raises(RuntimeError, match=r"call zmqgrad.autograd.backward"):
            y.sum().backward()


@pytest.mark.parametrize("how", ["routes", "hooks", "groups"])
def test_a_leaf_that_no_longer_requires_grad_gets_no_gradient(c: Cluster, how: str) -> None:
    x, y = leaf(1), leaf(2)
    handle = y.register_hook(lambda g: None) if how == "hooks" else None
    with context() as context_id:
        total = (rpc.rpc_sync(1, double, (x,)) + rpc.rpc_sync(1, double, (y,))).sum()
        if how == "groups":  # two entries that meet
            z = y * 3
            total = total + (rpc.rpc_sync(1, double, (z,)) + rpc.rpc_sync(1, double, (z + 1,))).sum()
        x.requires_grad_(False)
        backward(context_id, [total])
        assert list(get_gradients(context_id)) == [y]
    if handle is not None:
        handle.remove()


def test_torchs_own_nodes_of_that_kind_are_nodes_like_others(c: Cluster) -> None:
    x = leaf(1)
    with context() as context_id:
        y = rpc.rpc_sync(1, double, (x,))
        behind = torch._C._functions.DelayedError("never reached", 1)(y * 2)
        behind = rpc.rpc_sync(1, double, (behind,))
        with pytest.raises(RuntimeError, match="never reached"):
            backward(context_id, [behind.sum()])


def test_a_context_ends_everywhere_when_its_block_fails(c: Cluster) -> None:
    with pytest.raises(ZeroDivisionError), context():  # noqa: PT012
        rpc.rpc_sync(1, relay, ([2], leaf(1)))
        raise ZeroDivisionError
