"""Checkpointed calls: the gradients of a plain call, without its graph in between, and what does not work."""

from __future__ import annotations

import contextvars
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from tests.autograd.contexts import wait_until_released
from tests.support.processes import run_processes
from tests.support.waiting import eventually
from zmqgrad import rpc
from zmqgrad.autograd import _retrieve_context, backward, context, get_gradients, grad
from zmqgrad.autograd.engine.participant import MODES
from zmqgrad.errors import AutogradError
from zmqgrad.nn import RemoteModule
from zmqgrad.optim import DistributedOptimizer
from zmqgrad.testing import Cluster, cluster


@pytest.fixture(autouse=True)
def c() -> Iterator[Cluster]:
    """Four workers; at the end of every test, whatever happened in it, none knows any context."""
    runs.clear()
    with cluster(4) as made:
        yield made
        wait_until_released(made)


def leaf(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape or (3, 3), generator=random, dtype=dtype).requires_grad_()


Call = Callable[..., Any]
"""Calls a function on a worker: ``call(to, function, *args, **kwargs)``."""


def here(to: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def assert_as_in_one_process(
    program: Callable[[Call], Tensor], *leaves: Tensor, mode: str = "auto", passes: int = 1
) -> None:
    """The gradients of ``leaves`` by checkpointed calls equal those of one process without checkpoints."""
    expected = torch.autograd.grad(program(here), leaves)
    runs.clear()
    with context() as ctx:
        loss = program(rpc.checkpoint)
        for left in reversed(range(passes)):
            backward(ctx, [loss], retain_graph=left > 0, mode=mode)
        found = get_gradients(ctx)
    for each, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(found[each], passes * gradient)


# ---- what runs on the other workers ---------------------------------------------------------------------

runs: list[str] = []


def layer(x: Tensor, w: Tensor) -> Tensor:
    runs.append("layer")
    return torch.tanh(x @ w)


def in_containers(x: dict[str, list[Tensor]], *, by: tuple[float, Tensor]) -> Any:
    a, b = x["pair"]
    return {"sum": a * by[0] + b, "text": "t", "others": [(a * by[1], 3), None, (b > 0)]}


def chained(call: Call, route: list[int], x: Tensor, w: Tensor) -> Tensor:
    runs.append(f"chained {len(route)}")
    y = torch.tanh(x @ w)
    return call(route[0], chained, call, route[1:], y, w) * 2 if route else y * 3


def relayed(to: int, x: Tensor, w: Tensor) -> Tensor:
    runs.append("relayed")
    return rpc.rpc_sync(to, layer, (x * 2, w)) + rpc.rpc_async(to, layer, (w, x)).wait()


def dropped(x: Tensor) -> Tensor:
    return nn.functional.dropout(x * 2, 0.5)


def dropped_twice(x: Tensor, to: int) -> Tensor:
    return rpc.rpc_sync(to, dropped, (dropped(x),)) * torch.rand(())


@pytest.mark.parametrize("mode", MODES)
def test_gradients_equal_those_of_one_process(mode: str) -> None:
    x, w = leaf(1), leaf(2)
    assert_as_in_one_process(lambda call: call(1, layer, x, w).sum(), x, w, mode=mode)
    assert runs == ["layer"] * 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("to", [0, 2])
def test_one_after_the_other_each_runs_twice(mode: str, to: int) -> None:
    x, w = leaf(1), leaf(2)

    def pipeline(call: Call) -> Tensor:
        y = x
        for worker in (1, to, 3, 1):
            y = call(worker, layer, y, w)
        return y.sum()

    assert_as_in_one_process(pipeline, x, w, mode=mode)
    assert runs == ["layer"] * 8


@pytest.mark.parametrize("mode", MODES)
def test_one_inside_the_other_each_runs_twice(mode: str) -> None:
    x, w = leaf(1), leaf(2)
    expected = torch.autograd.grad(chained(here, [2, 3, 0], x, w).sum(), [x, w])
    runs.clear()
    with context() as ctx:
        backward(ctx, [rpc.checkpoint(1, chained, rpc.checkpoint, [2, 3, 0], x, w).sum()], mode=mode)
        found = get_gradients(ctx)
    torch.testing.assert_close([found[x], found[w]], list(expected))
    assert sorted(runs) == sorted([f"chained {n}" for n in range(4)] * 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("to", [0, 1, 2])
def test_calls_inside_are_made_again(mode: str, to: int) -> None:
    x, w = leaf(1), leaf(2)
    expected = torch.autograd.grad((layer(x * 2, w) + layer(w, x)).sum() + x.sum(), [x, w])
    runs.clear()
    with context() as ctx:
        backward(ctx, [rpc.checkpoint(1, relayed, to, x, w).sum() + x.sum()], mode=mode)
        found = get_gradients(ctx)
    torch.testing.assert_close([found[x], found[w]], list(expected))
    assert sorted(runs) == ["layer"] * 4 + ["relayed"] * 2


@pytest.mark.parametrize("mode", MODES)
def test_containers_keywords_and_unused_results(mode: str) -> None:
    x, w, v = leaf(1), leaf(2), leaf(3)

    def program(call: Call) -> Tensor:
        found = call(1, in_containers, {"pair": [x, w]}, by=(2.0, v))
        assert [found["text"], found["others"][0][1], found["others"][1]] == ["t", 3, None]
        call(2, layer, x, w)  # the loss does not use it
        assert isinstance(found["others"][2], Tensor)
        return found["sum"].sum() + found["others"][0][0].sum()

    assert_as_in_one_process(program, x, w, v, mode="auto" if mode == "fast" else mode)
    assert runs == ["layer"]


def overlapping(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    return y, y[1:], y.view(-1)


def test_results_that_share_memory_have_memory_of_their_own_at_the_caller() -> None:
    """As those of a plain call: a write to one must not change what another has saved."""
    x, gradients = leaf(1), []
    for call in (lambda: rpc.rpc_sync(1, overlapping, (x,)), lambda: rpc.checkpoint(1, overlapping, x)):
        with context() as ctx:
            whole, rows, flat = call()
            saved = flat.exp()
            whole.mul_(3)
            rows.zero_()
            backward(ctx, [whole.sum() + rows.sum() + saved.sum() + (flat * flat).sum()])
            gradients.append(get_gradients(ctx)[x])
    assert torch.equal(*gradients)


def hooked(x: dict[str, Tensor]) -> Tensor:
    x["x"].register_hook(lambda g: g * 10)
    return x["x"] * x["x"]


def test_hooks_that_the_function_registers_at_its_arguments_run_once() -> None:
    """Each time that it is computed again."""
    x = leaf(1)
    with context() as ctx:
        loss = rpc.checkpoint(1, hooked, {"x": x}).sum()
        for passes in (1, 2, 3):
            backward(ctx, [loss], retain_graph=True)
            torch.testing.assert_close(get_gradients(ctx)[x], passes * 20 * x.detach())


def test_many_at_a_time() -> None:
    x, w = leaf(1), leaf(2)
    expected = torch.autograd.grad(sum((layer(x * i, w).sum() for i in range(8)), torch.zeros(())), [x, w])
    with context() as ctx:
        calls = [rpc.checkpoint_async(1 + i % 3, layer, x * i, w) for i in range(8)]
        backward(ctx, [each.wait().sum() for each in calls])
        found = get_gradients(ctx)
    torch.testing.assert_close([found[x], found[w]], list(expected))


def test_several_passes_compute_again_each() -> None:
    x, w = leaf(1), leaf(2)
    assert_as_in_one_process(lambda call: call(1, layer, x, w).sum(), x, w, passes=3)
    assert runs == ["layer"] * 4


class Marked(Tensor):
    """A subclass."""


def marked(x: Tensor) -> Any:
    jagged = torch.nested.nested_tensor_from_jagged(x * 3, offsets=torch.tensor([0, 1, 3]))
    y = (x * x).as_subclass(Marked)
    y.mark = "of the program"  # type: ignore[attr-defined]
    return {"y": y, "z": jagged}


def test_subclasses_in_a_result() -> None:
    x = leaf(1)
    with context() as ctx:
        found = rpc.checkpoint(1, marked, x)
        assert isinstance(found["y"], Marked)
        assert vars(found["y"]) == {"mark": "of the program"}
        backward(ctx, [found["y"].as_subclass(Tensor).sum() + found["z"].values().sum()])
        torch.testing.assert_close(get_gradients(ctx)[x], 2 * x + 3)


def with_marked_constant(x: Tensor) -> Any:
    return x * 2, torch.ones(2).as_subclass(Marked), {"z": (x * 3).detach().as_subclass(Marked)}


def test_subclasses_without_history_in_a_result(c: Cluster) -> None:
    x = leaf(1)
    with context() as ctx:
        y, a, b = rpc.checkpoint(1, with_marked_constant, x)
        backward(ctx, [y.sum() + (a.sum() + b["z"].sum()).as_subclass(Tensor)])
        torch.testing.assert_close(get_gradients(ctx)[x], torch.full_like(x, 2.0))
        with c.acting(1):
            assert get_gradients(ctx) == {}


def by_own_weight(x: Tensor, route: list[int]) -> Tensor:
    own = torch.full((3, 3), 0.5, dtype=torch.float64, requires_grad=True)
    return rpc.rpc_sync(route[0], by_own_weight, (x @ own, route[1:])) if route else x @ own


@pytest.mark.parametrize("mode", MODES)
def test_calls_of_calls_are_recorded_only_the_second_time(mode: str) -> None:
    x, half = leaf(1), torch.full((3, 3), 0.5, dtype=torch.float64)
    with context() as ctx:
        loss = rpc.checkpoint(1, by_own_weight, x, [2, 3, 0]).sum()
        assert len(rpc.rpc_sync(2, sends_of, (ctx,))) == 0
        backward(ctx, [loss], mode=mode)
        torch.testing.assert_close(
            get_gradients(ctx)[x], torch.ones_like(x) @ torch.linalg.matrix_power(half, 4).T
        )


def sends_of(context_id: int) -> Any:
    return _retrieve_context(context_id)._send_functions()


def product_of(x: Tensor, y: rpc.RRef[Tensor]) -> Tensor:
    return x * y.to_here()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("owner", [0, 1, 2])
def test_what_an_rref_refers_to_gets_its_gradients(mode: str, owner: int) -> None:
    x, w = leaf(1), leaf(2)
    expected = torch.autograd.grad((x * layer(x, w)).sum(), [x, w])
    with context() as ctx:
        y = rpc.remote(owner, layer, (x, w))
        backward(ctx, [rpc.checkpoint(1, product_of, x, y).sum()], mode=mode)
        found = get_gradients(ctx)
    torch.testing.assert_close([found[x], found[w]], list(expected))


def relayed_product_of(x: Tensor, y: rpc.RRef[Tensor], to: int) -> Tensor:
    return rpc.rpc_sync(to, product_of, (x, y))


def relayed_layer(to: int, x: Tensor, w: Tensor) -> list[Tensor]:
    return [rpc.rpc_sync(to, layer, (x.sin(), w)).cos()]


def product_of_item(x: Tensor, y: rpc.RRef[list[Tensor]]) -> Tensor:
    return x * (y.local_value() if y.is_owner() else y.to_here())[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("owner", [0, 1, 2])
@pytest.mark.parametrize("calls_inside", [False, True])
def test_an_rref_that_plain_and_checkpointed_calls_use(owner: int, mode: str, calls_inside: bool) -> None:
    """Whichever pass is first at what it refers to: the one of the program, or one of a call."""
    x, w = leaf(1), leaf(2)
    z = layer(x, w)
    expected = torch.autograd.grad((x * z + z * 2 + w * z + x.exp() * z).sum(), [x, w])
    for _ in range(3):
        with context() as ctx:
            y = rpc.remote(owner, layer, (x, w))
            more = (relayed_product_of, (x, y, 3)) if calls_inside else (product_of, (x, y))
            parts = [rpc.checkpoint(1, more[0], *more[1]), y.to_here() * 2]
            parts += [rpc.rpc_sync(3, product_of, (w, y)), rpc.checkpoint(2, product_of, x.exp(), y)]
            backward(ctx, [torch.stack(parts).sum()], mode=mode)
            found = get_gradients(ctx)
        torch.testing.assert_close([found[x], found[w]], list(expected))


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_an_rref_to_what_other_workers_have_computed(owner: int) -> None:
    x, w = leaf(1), leaf(2)
    z = layer(x.sin(), w).cos()
    expected = torch.autograd.grad((x * z + w * z).sum(), [x, w])
    for _ in range(3):
        with context() as ctx:
            y = rpc.remote(owner, relayed_layer, (3, x, w))
            parts = [rpc.checkpoint(1, product_of_item, x, y), rpc.rpc_sync(2, product_of_item, (w, y))]
            backward(ctx, [torch.stack(parts).sum()])
            found = get_gradients(ctx)
        torch.testing.assert_close([found[x], found[w]], list(expected))


def test_outside_of_contexts_and_under_no_grad_it_is_a_plain_call() -> None:
    x, w = leaf(1), leaf(2)
    torch.testing.assert_close(rpc.checkpoint(1, layer, x, w), layer(x, w))
    with context(), torch.no_grad():
        assert not rpc.checkpoint(1, layer, x, w).requires_grad
    assert runs == ["layer"] * 3


def constant(x: Tensor) -> Any:
    runs.append("constant")
    return torch.ones(2, dtype=torch.float64), 5, x.detach() * 2


sparse_weight = torch.eye(3, dtype=torch.float64).to_sparse().requires_grad_()


def with_sparse_weight(x: Tensor) -> Any:
    return x * 2, sparse_weight


def test_sparse_leaves_in_a_result(c: Cluster) -> None:
    x = leaf(1)
    with context() as ctx:
        a, weight = rpc.checkpoint(1, with_sparse_weight, x)
        backward(ctx, [a.sum() + weight.to_dense().sum()])
        assert torch.equal(get_gradients(ctx)[x], torch.full((3, 3), 2.0, dtype=torch.float64))
        with c.acting(1):
            assert torch.equal(get_gradients(ctx)[sparse_weight].to_dense(), torch.eye(3).double())


table = torch.zeros(4, 2, dtype=torch.float64, requires_grad=True)


def get_table() -> Tensor:
    return table


def test_a_sparse_gradient_of_a_leaf_in_a_result(c: Cluster) -> None:
    with context() as ctx:
        rows = torch.nn.functional.embedding(torch.tensor([0, 2]), rpc.checkpoint(1, get_table), sparse=True)
        backward(ctx, [rows.sum()])
        with c.acting(1):
            gradient = get_gradients(ctx)[table]
    assert gradient.is_sparse
    assert gradient.to_dense()[:, 0].tolist() == [1, 0, 1, 0]


def test_nothing_that_requires_grad() -> None:
    x = leaf(1)
    with context() as ctx:
        assert rpc.checkpoint(1, int, "7") == 7
        a, five, b = rpc.checkpoint(1, constant, x)
        assert five == 5
        backward(ctx, [a.sum() + b.sum()])
        assert get_gradients(ctx) == {}
    assert runs == ["constant"] * 2


@rpc.functions.async_execution
def deferred(to: int, x: Tensor, w: Tensor) -> Any:
    return rpc.rpc_async(to, layer, args=(x, w)).then(lambda f: f.wait() * x)


def test_asynchronous_functions() -> None:
    x, w = leaf(1), leaf(2)
    expected = torch.autograd.grad((layer(x, w) * x).sum(), [x, w])
    with context() as ctx:
        backward(ctx, [rpc.checkpoint(1, deferred, 2, x, w).sum()])
        found = get_gradients(ctx)
    torch.testing.assert_close([found[x], found[w]], list(expected))


WEIGHT = leaf(7, 32, 32, dtype=torch.float32)


def by_weight(x: Tensor) -> Tensor:
    return torch.tanh(x @ WEIGHT)


def thrice(to: int, x: Tensor, w: Tensor) -> Tensor:
    calls = [rpc.rpc_async(to, by_weight, (y,)) for y in (x, w, x * w)]
    return sum((call.wait() for call in calls), x @ w)


def gradient_of_weight(context_id: int) -> Tensor:
    return get_gradients(context_id)[WEIGHT]


@pytest.mark.parametrize("how", ["calls inside", "calls at the same time", "both"])
def test_gradients_are_added_in_a_fixed_order(how: str) -> None:
    """Whichever call is computed again first: equal bits, in single precision."""
    found = []
    for _ in range(4):
        x, w = (leaf(i, 32, 32, dtype=torch.float32) for i in (1, 2))
        with context() as ctx:
            results = [x * w]
            for i in range(6 if how != "calls at the same time" else 0):
                results.append(rpc.checkpoint(1 + i % 3, thrice, 1 + (i + 1) % 3, x * i, w))
            for i in range(6 if how != "calls inside" else 0):
                results.append(rpc.checkpoint(1 + i % 3, by_weight, x * i))
                results.append(rpc.rpc_sync(1 + i % 3, by_weight, (w * i,)))
            backward(ctx, [sum(y.sum() for y in results)])  # type: ignore[list-item]
            gradients = get_gradients(ctx)
            there = [rpc.rpc_sync(i, gradient_of_weight, (ctx,)) for i in (1, 2, 3)]
            found.append(torch.stack([gradients[x], gradients[w], *there]))
    for other in found[1:]:
        assert torch.equal(other, found[0])


# ---- the state of torch ---------------------------------------------------------------------------------


def test_random_numbers_are_the_same_and_generators_undisturbed() -> None:
    x = leaf(1, 100)
    found = []
    for call in (rpc.checkpoint, lambda to, f, *args: rpc.rpc_sync(to, f, args)):
        torch.manual_seed(4)
        with context() as ctx:
            loss = call(1, dropped, x).sum()
            before = torch.get_rng_state()
            backward(ctx, [loss])
            assert torch.equal(before, torch.get_rng_state())
            found.append([loss.detach(), get_gradients(ctx)[x]])
    torch.testing.assert_close(found[0], found[1])


def mixed(x: Tensor, w: Tensor, inside: bool | None) -> Tensor:
    if inside is None:
        return x @ w.to(x.dtype) @ w.to(x.dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=inside):
        x = x.to(torch.bfloat16 if inside else w.dtype)
        return x @ w @ w


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("inside", [None, False, True])
@pytest.mark.parametrize("both", [False, True])
def test_autocast(mode: str, outside: bool, inside: bool | None, both: bool) -> None:
    """``both``: the backward pass is under the caller's autocast, too."""
    x, w = leaf(1, dtype=torch.float32), leaf(2, dtype=torch.float32)
    found = []
    for call in (rpc.checkpoint, lambda to, f, *args: rpc.rpc_sync(to, f, args)):
        with context() as ctx:
            with torch.autocast("cpu", torch.bfloat16, enabled=outside):
                y = call(1, mixed, x @ w, w, inside)
                loss = (y.float() * w).sum()
                if both:
                    backward(ctx, [loss], mode=mode)
            if not both:
                backward(ctx, [loss], mode=mode)
            found.append([y.detach(), get_gradients(ctx)[x], get_gradients(ctx)[w]])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


# ---- memory ---------------------------------------------------------------------------------------------

saved: list[weakref.ref[Tensor]] = []


class Remembered(torch.autograd.Function):
    """Notes what it saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        ctx.held = y.clone()
        saved.append(weakref.ref(ctx.held))
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert saved[-1]() is not None
        (y,) = ctx.saved_tensors
        return gradient * y


def remembering(x: Tensor, to: int | None) -> Tensor:
    y: Tensor = Remembered.apply(x)
    return y * 2 if to is None else rpc.rpc_sync(to, remembering, (y, None))


@pytest.mark.parametrize("to", [None, 2])
def test_no_graph_is_kept_between_the_call_and_the_pass_nor_after_it(to: int | None) -> None:
    saved.clear()
    x = leaf(1)
    with context() as ctx:
        y = rpc.checkpoint(1, remembering, x, to)
        first = len(saved)
        assert all(each() is None for each in saved)
        backward(ctx, [y.sum()], retain_graph=True)
        assert len(saved) == 2 * first
        eventually(lambda: all(each() is None for each in saved))  # another thread may just end its task
    assert first == (1 if to is None else 2)


# ---- modules --------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """A layer with a random mask; counts its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        runs.append("module")
        return dropped(self.inner(x))


def apply(module: RemoteModule, x: Tensor) -> Tensor:
    assert module.checkpoint
    found: Tensor = module(x)
    return found


@pytest.mark.parametrize("on", ["worker0", "worker1"])
@pytest.mark.parametrize("used", ["here", "there", "async", "with a timeout"])
def test_remote_modules(on: str, used: str) -> None:
    module = RemoteModule(on, Counting, checkpoint=True)
    params = module.remote_parameters()
    x = leaf(1)
    found = []
    for checkpoint in (True, False):
        one = RemoteModule.init_from_module_rref(on, module.module_rref, checkpoint=checkpoint)
        torch.manual_seed(3)
        runs.clear()
        with context() as ctx:
            if not checkpoint:
                y = one(x)
            elif used == "there":
                y = rpc.rpc_sync(2, apply, (one, x))
            elif used == "async":
                y = one.forward_async(x).wait()
            else:
                y = (one if used == "here" else one.with_timeout(20))(x)
            loss = y.sum()
            found.append([loss.detach(), *grad(ctx, loss, [x, *params], retain_graph=True)])
            backward(ctx, [loss])
            found[-1].append(get_gradients(ctx)[x])
        assert runs == ["module"] * (3 if checkpoint else 1)
    torch.testing.assert_close(found[0], found[1])


# ---- errors ---------------------------------------------------------------------------------------------


def other_each_time(x: Tensor, kind: str) -> Any:
    runs.append("other")
    if len(runs) % 2:
        return x * 2
    return {"number": (x, x * 2), "shape": x[:1], "dtype": x.float(), "none": None}[kind]


@pytest.mark.parametrize("kind", ["number", "shape", "dtype", "none"])
@pytest.mark.parametrize("mode", MODES)
def test_a_function_that_does_something_else_the_second_time(kind: str, mode: str) -> None:
    x = leaf(1)
    with context() as ctx:
        loss = rpc.checkpoint(1, other_each_time, x, kind).sum()
        with pytest.raises(AutogradError, match=r"other_each_time on worker1 gave .* must do the same"):
            backward(ctx, [loss], mode=mode)


def failing(x: Tensor, at: int) -> Tensor:
    runs.append("failing")
    if len(runs) == at:
        raise KeyError("on purpose")
    return x * 2


def test_errors_of_the_function() -> None:
    x = leaf(1)
    with context() as ctx:
        with pytest.raises(KeyError, match="on purpose"):
            rpc.checkpoint(1, failing, x, 1)
        loss = rpc.checkpoint(1, failing, x, 3).sum()
        with pytest.raises(KeyError, match="on purpose") as caught:
            backward(ctx, [loss])
        assert "worker1" in str(caught.value.__cause__)
        backward(ctx, [rpc.checkpoint(1, failing, x, 0).sum()])  # the context may be used further
        torch.testing.assert_close(get_gradients(ctx)[x], torch.full_like(x, 2))


kept: list[Tensor] = []


def keep(x: Tensor, y: Tensor) -> Tensor:
    kept[:] = [x, y]
    return x * y


def change_kept(index: int) -> None:
    with torch.no_grad():
        kept[index].add_(1)


@pytest.mark.parametrize("index", [0, 1])
def test_an_argument_that_was_changed_meanwhile(index: int) -> None:
    x, y = leaf(1), leaf(2).detach()
    with context() as ctx:
        loss = rpc.checkpoint(1, keep, x, y).sum()
        rpc.rpc_sync(1, change_kept, (index,))
        with pytest.raises(AutogradError, match=r"keep on worker1.* modified by an inplace operation"):
            backward(ctx, [loss])
        kept.clear()


def change(x: Tensor) -> Tensor:
    return x.add_(1)


def test_a_function_that_changes_its_argument() -> None:
    with context(), pytest.raises(AutogradError, match="modified by an inplace operation"):
        rpc.checkpoint(1, change, leaf(1))


def test_create_graph_is_refused() -> None:
    x, w = leaf(1), leaf(2)
    with context() as ctx:
        loss = rpc.checkpoint(1, layer, x, w).sum()
        with pytest.raises(AutogradError, match="create_graph=True: the gradients of layer on worker1"):
            backward(ctx, [loss], create_graph=True)


def test_grad_does_not_lead_through_calls_of_a_checkpointed_function() -> None:
    x, w = leaf(1), leaf(2)
    with context() as ctx:
        loss = rpc.checkpoint(1, relayed, 2, x, w).sum()
        with pytest.raises(AutogradError, match="grad does not lead through the calls that relayed"):
            grad(ctx, loss, [x])


def parameter() -> Tensor:
    return leaf(5)


def by_parameter(x: Tensor, w: rpc.RRef[Tensor]) -> Tensor:
    return x @ w.local_value()


def test_a_step_of_another_trainer_between() -> None:
    x, w = leaf(1), rpc.remote(1, parameter)
    outside = contextvars.copy_context()
    optimizer = DistributedOptimizer(torch.optim.SGD, [w], lr=0.1, versions=True)
    with context() as ctx:
        loss = rpc.checkpoint(1, by_parameter, x, w).sum()
        thread = threading.Thread(target=outside.run, args=(step_of_another_trainer, optimizer, x, w))
        thread.start()
        thread.join()
        with pytest.raises(AutogradError, match=r"another trainer .* a parameter of by_parameter on worker1"):
            backward(ctx, [loss])
        loss = rpc.checkpoint(1, by_parameter, x, w).sum()  # of the new values
        backward(ctx, [loss])


def checkpointed_by_torch(x: Tensor, w: rpc.RRef[Tensor]) -> Tensor:
    found: Tensor = torch.utils.checkpoint.checkpoint(
        lambda y: torch.tanh(y @ w.local_value()), x, use_reentrant=False
    )
    return found


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_step_of_another_trainer_before_torchs_checkpoint_computes_again(checkpoint: bool) -> None:
    x, w = leaf(1), rpc.remote(1, parameter)
    outside = contextvars.copy_context()
    optimizer = DistributedOptimizer(torch.optim.SGD, [w], lr=0.1, versions=True)
    with context() as ctx:
        loss = rpc.rpc_sync(1, checkpointed_by_torch if checkpoint else by_parameter, (x, w)).sum()
        thread = threading.Thread(target=outside.run, args=(step_of_another_trainer, optimizer, x, w))
        thread.start()
        thread.join()
        if checkpoint:
            with pytest.raises(
                AutogradError, match=r"another trainer .* a parameter of a torch\.utils\.checkpoint since"
            ):
                backward(ctx, [loss])
        else:
            backward(ctx, [loss])
            torch.testing.assert_close(get_gradients(ctx)[x], (leaf(5).sum(1)).expand(3, 3).detach())


def step_of_another_trainer(optimizer: DistributedOptimizer, x: Tensor, w: rpc.RRef[Tensor]) -> None:
    with context() as ctx:
        backward(ctx, [rpc.rpc_sync(1, by_parameter, (x, w)).sum()])
        optimizer.step(ctx)


# ---- processes ------------------------------------------------------------------------------------------


def train(rank: int) -> Any:
    """Worker 0 trains two stages on the others by three steps, checkpointed or not. Also random numbers."""
    rpc.init_rpc(f"worker{rank}")
    found: list[Any] = []
    for checkpoint in (True, False) if rank == 0 else ():
        for worker in (1, 2):
            rpc.rpc_sync(worker, torch.manual_seed, (worker,))
        stages = [RemoteModule(f"rank:{n}", Counting, checkpoint=checkpoint) for n in (1, 2)]
        params = [each for stage in stages for each in stage.remote_parameters()]
        optimizer = DistributedOptimizer(torch.optim.SGD, params, lr=0.1)
        losses = []
        for _ in range(3):
            with context() as ctx:
                loss = stages[1](stages[0](leaf(1).detach())).square().sum()
                losses.append(loss.item())
                backward(ctx, [loss])
                optimizer.step(ctx)
        found.append(losses)
    if rank == 0:
        x = leaf(1, 100)
        with context() as ctx:
            y = rpc.checkpoint(1, dropped_twice, x, 2)
            backward(ctx, [y.sum()])
            found.append([y.detach(), get_gradients(ctx)[x] * x.detach()])
    rpc.shutdown()
    return found


@pytest.mark.processes
@pytest.mark.slow
def test_training_in_processes_is_the_same_and_calls_inside_repeat_their_random_numbers() -> None:
    checkpointed, plain, (y, product) = run_processes(train, 3)[0]
    assert len(set(plain)) == 3
    torch.testing.assert_close(checkpointed, plain)
    torch.testing.assert_close(product, y)  # linear, but for what was drawn
