"""The table of docs/autograd.md, "What works across calls": one test for each row, beside one process.

``@row(name)`` ties a test to the row whose first cell is ``name``.
"""

from __future__ import annotations

import contextvars
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd import forward_ad

from tests.autograd.contexts import wait_until_released
from tests.support.processes import run_processes
from zmqgrad import rpc
from zmqgrad.autograd import allreduce_gradients, backward, context, get_gradients, grad
from zmqgrad.errors import AutogradError, PayloadError
from zmqgrad.optim import DistributedOptimizer
from zmqgrad.testing import Cluster, cluster

PAGE = Path(__file__).parents[2] / "docs" / "autograd.md"
HEADING = "## What works across calls"

ROWS: dict[str, Callable[..., None]] = {}


def row(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Tie a test to a row of the table."""

    def tie(test: Callable[..., None]) -> Callable[..., None]:
        assert ROWS.setdefault(name, test) is test
        return test

    return tie


def test_every_row_of_the_table_has_a_test_and_every_test_a_row() -> None:
    section = PAGE.read_text().split(HEADING + "\n", 1)[1].split("\n## ", 1)[0]
    cells = re.findall(r"^\| (.+?) \| .+ \|$", section, re.MULTILINE)
    assert cells[0] == "feature"
    assert sorted(cells[1:]) == sorted(ROWS)
    assert len(set(cells)) == len(cells)


@pytest.fixture(autouse=True)
def c() -> Iterator[Cluster]:
    """Two workers."""
    with cluster(2) as made:
        yield made
        wait_until_released(made)


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def call(function: Callable[..., Any], *args: Any) -> Any:
    """A call of another worker; :func:`one_process` replaces it."""
    return rpc.rpc_sync(1, function, args)


def in_place(function: Callable[..., Any], *args: Any) -> Any:
    """What a call is in one process."""
    return function(*args)


Program = Callable[[Callable[..., Any], Tensor], Tensor]
"""Given how to call and a leaf, computes a loss."""


def assert_as_in_one_process(program: Program, x: Tensor) -> None:
    """Its gradient in a context, and without any other worker, are equal."""
    there = x.detach().clone().requires_grad_()
    with context() as ctx:
        backward(ctx, [program(call, there)])
        found = get_gradients(ctx)[there]
    program(in_place, x).backward()
    assert x.grad is not None
    torch.testing.assert_close(found, x.grad)


# ---- what runs on the other worker ----------------------------------------------------------------------


def double(x: Any) -> Any:
    return x * 2


def square(x: Any) -> Any:
    return x * x


def add_one_in_place(x: Tensor) -> Tensor:
    return x.add_(1)


def drop(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x, 0.5)


def checkpointed(x: Tensor) -> Tensor:
    found: Tensor = torch.utils.checkpoint.checkpoint(
        lambda y: drop(torch.sin(y)).exp(), x * 1, use_reentrant=False
    )
    return found


def reentrant(x: Tensor) -> Tensor:
    found: Tensor = torch.utils.checkpoint.checkpoint(torch.sin, x * 1, use_reentrant=True)
    return found


def offloaded(x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return torch.sin(x) * x


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return g * 3 * x * x


def cube(x: Tensor) -> Tensor:
    result: Tensor = Cube.apply(x)
    return result


def in_low_precision(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x.float() @ torch.ones(2, 2)).double()


# ---- the rows ---------------------------------------------------------------------------------------------


@row("views and in-place changes")
def test_views_and_in_place_changes() -> None:
    def program(call: Callable[..., Any], x: Tensor) -> Tensor:
        y = call(add_one_in_place, (x * 3)[1:])
        return (y.mul_(2) * x[:1]).sum()

    assert_as_in_one_process(program, leaf(1, 2, 3))


@row("`torch.autograd.Function`")
def test_functions() -> None:
    assert_as_in_one_process(lambda call, x: (call(cube, x) * cube(x)).sum(), leaf(1, 2))


@row("hooks of tensors, nodes and modules")
def test_hooks_run_once_on_the_complete_gradient() -> None:
    seen: list[list[float]] = []

    def program(call: Callable[..., Any], x: Tensor) -> Tensor:
        y = x * 3
        y.register_hook(lambda g: seen.append(g.tolist()))
        x.register_hook(lambda g: g * 10)
        return (call(square, y) + y).sum()

    assert_as_in_one_process(program, leaf(1, 2))
    assert len(seen) == 2
    assert seen[0] == seen[1]


@row("sparse gradients")
def test_sparse_gradients() -> None:
    def program(call: Callable[..., Any], x: Tensor) -> Tensor:
        rows = torch.nn.functional.embedding(torch.tensor([0, 2, 0]), x, sparse=True)
        found: Tensor = call(square, rows).sum()
        return found

    assert_as_in_one_process(program, torch.rand(3, 1, dtype=torch.float64, requires_grad=True))


class ToSparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: torch.layout) -> Tensor:
        return x.to_sparse(layout=layout)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g.to_dense(), None


def squared_sum(x: Tensor) -> Tensor:
    return x.to_dense().square().sum()


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_results_of_functions(layout: torch.layout) -> None:
    def program(call: Callable[..., Any], x: Tensor) -> Tensor:
        found: Tensor = call(squared_sum, ToSparse.apply(x, layout))
        return found

    assert_as_in_one_process(program, torch.eye(3, dtype=torch.float64).requires_grad_())


@row("`retain_graph=True`")
def test_retained_graphs() -> None:
    x = leaf(1, 2)
    with context() as ctx:
        loss = call(square, x).sum()
        backward(ctx, [loss], retain_graph=True)
        backward(ctx, [loss])
        assert get_gradients(ctx)[x].tolist() == [4, 8]


@row("`create_graph=True`")
def test_create_graph() -> None:
    x = leaf(1, 2)
    with context() as ctx:
        cube = call(square, x) * x
        (first,) = grad(ctx, cube.sum(), x, create_graph=True)
        assert first is not None
        backward(ctx, [call(square, first).sum()])  # of (3 x^2)^2
        assert get_gradients(ctx)[x].tolist() == [36, 288]


@row("`torch.utils.checkpoint` in a stage, with `use_reentrant=False`")
def test_a_checkpoint_in_a_stage() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()

    def program(call: Callable[..., Any], x: Tensor) -> Tensor:
        torch.set_rng_state(state)
        found: Tensor = call(checkpointed, x).sum()
        return found

    assert_as_in_one_process(program, leaf(*range(20)))


@row("`torch.utils.checkpoint` with `use_reentrant=True`")
def test_a_reentrant_checkpoint_is_refused() -> None:
    with context() as ctx:
        loss = call(reentrant, leaf(1)).sum()
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            backward(ctx, [loss])


def sine_of_dropped(x: Tensor) -> Tensor:
    found: Tensor = call(drop, x).sin()  # saves what the call returns
    return found


def differentiate_a_checkpoint_around_a_call(rank: int) -> Any:
    """On worker 0: what was computed, the gradient, and what the callee draws after it.

    First without shared parameters on the callee, then with one.
    """
    rpc.init_rpc(f"worker{rank}")
    found = []
    shared: list[Any] = []
    for _ in range(2 if rank == 0 else 0):
        x = torch.full((200,), 0.25, requires_grad=True)
        with context() as ctx:
            call(torch.manual_seed, 5)
            y = torch.utils.checkpoint.checkpoint(sine_of_dropped, x * 1, use_reentrant=False)
            torch.rand(5)  # what the program draws next does not matter
            backward(ctx, [y.sum()])
            found.append((y.detach(), get_gradients(ctx)[x], call(torch.rand, 3)))
        params = [rpc.remote(1, torch.nn.Parameter, (torch.ones(1),))]
        shared.append(DistributedOptimizer(torch.optim.SGD, params, lr=0.1, versions=True))
    rpc.shutdown()
    return found


@pytest.mark.processes
@pytest.mark.slow
@row("`torch.utils.checkpoint` around calls, with random numbers in them")
def test_a_checkpoint_around_a_call_repeats_its_random_numbers() -> None:
    """What was computed shows which elements dropout has kept, and so what the gradient is in one process."""
    found = run_processes(differentiate_a_checkpoint_around_a_call, 2)[0]
    assert len(found) == 2
    for y, gradient, drawn in found:
        kept = y != 0
        assert 50 < kept.sum() < 150
        torch.testing.assert_close(gradient, torch.where(kept, 2 * torch.cos(torch.tensor(0.5)), 0.0))
        torch.manual_seed(5)
        torch.testing.assert_close(drawn, torch.rand(3))


def square_of_dropped(x: Tensor) -> Tensor:
    found: Tensor = torch.utils.checkpoint.checkpoint(
        lambda y: rpc.rpc_sync(0, drop, (y,)) * y, x * 1, use_reentrant=False
    )
    return found


@pytest.mark.parametrize("mode", ["fast", "auto"])
def test_a_checkpoint_around_a_call_in_a_stage_repeats_its_random_numbers(mode: str) -> None:
    x = torch.rand(50).requires_grad_()
    with context() as ctx:
        y = call(square_of_dropped, x)
        for _ in range(2):
            backward(ctx, [y.sum()], retain_graph=True, mode=mode)
        torch.testing.assert_close(get_gradients(ctx)[x], 2 * 2 * y.detach() / x.detach())


@row("checkpointed calls (`rpc.checkpoint`)")
def test_a_checkpointed_call() -> None:
    def program(call: Callable[..., Any], x: Tensor) -> Tensor:
        found: Tensor = rpc.checkpoint(1, square, x) if call is not in_place else square(x)
        return found.sum()

    assert_as_in_one_process(program, leaf(1, 2, 3))


@row("checkpointed calls with `create_graph=True`")
def test_a_checkpointed_call_and_second_derivatives() -> None:
    with context() as ctx:
        loss = rpc.checkpoint(1, square, leaf(1, 2, 3)).sum()
        with pytest.raises(AutogradError, match="rpc_sync or rpc_async"):
            backward(ctx, [loss], create_graph=True)


@row("`saved_tensors_hooks`, `save_on_cpu`")
def test_saved_tensors_hooks() -> None:
    assert_as_in_one_process(lambda call, x: (call(offloaded, x) * offloaded(x)).sum(), leaf(1, 2))


@row("`torch.autocast`")
def test_autocast_applies_where_it_was_entered() -> None:
    assert_as_in_one_process(lambda call, x: call(in_low_precision, x.reshape(1, 2)).sum(), leaf(1, 2))
    with torch.autocast("cpu", torch.bfloat16):
        assert call(torch.mm, torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float32


@row("`torch.compile`")
def test_compiled_functions() -> None:
    def program(call: Callable[..., Any], x: Tensor) -> Tensor:
        def body(x: Tensor) -> Tensor:
            y = call(cube, x * 2) * x
            found: Tensor = (call(square, y) + y).sum()
            return found

        compiled: Callable[[Tensor], Tensor] = torch.compile(body, backend="eager", dynamic=True)
        return compiled(x)

    assert_as_in_one_process(program, leaf(1, 2))
    assert_as_in_one_process(program, leaf(1, 2, 3))


@row("`torch.no_grad`")
def test_a_call_without_grad_is_a_constant() -> None:
    def program(call: Callable[..., Any], x: Tensor) -> Tensor:
        with torch.no_grad():
            constant = call(square, x)
        assert not constant.requires_grad
        return (call(square, x) * constant).sum()

    assert_as_in_one_process(program, leaf(1, 2))


class Labelled(torch.Tensor):
    """A subclass that overrides nothing of torch's dispatcher."""

    label = ""


def is_labelled(x: Tensor) -> Tensor:
    assert isinstance(x, Labelled)
    assert x.label == "heights"
    return x * 2


class Unfinished(Exception):
    pass


def raise_with(x: Tensor) -> None:
    raise Unfinished(x * 2, {"leaf": torch.ones(1, requires_grad=True)})


@row("tensors in exceptions")
def test_tensors_in_exceptions_are_constants() -> None:
    with context() as ctx:
        with pytest.raises(Unfinished) as raised:
            call(raise_with, leaf(1, 2))
        found, others = raised.value.args
        assert found.tolist() == [2, 4]
        assert others["leaf"].requires_grad  # as that of a module
        with pytest.raises(AutogradError, match="requires_grad not set"):
            backward(ctx, [found.sum()])


@row("subclasses of `torch.Tensor`")
def test_subclasses_keep_their_history() -> None:
    def program(call: Callable[..., Any], x: Tensor) -> Tensor:
        labelled = (x * 3).as_subclass(Labelled)
        labelled.label = "heights"
        y = call(is_labelled, labelled)
        assert isinstance(y, Labelled)
        return (y * y).as_subclass(Tensor).sum()

    assert_as_in_one_process(program, leaf(1, 2))


class Wrapping(torch.Tensor):
    """A subclass that is made of another tensor."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, requires_grad: bool = False) -> Wrapping:
        made: Wrapping = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, dtype=inner.dtype, requires_grad=requires_grad
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = [each.inner if isinstance(each, Wrapping) else each for each in args]
        return cls(function(*inner, **(kwargs or {})))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Wrapping, (self.inner, self.requires_grad)


def inner_of(x: Wrapping) -> Tensor:
    return x.inner


@row("subclasses with `__torch_dispatch__`, such as DTensor")
def test_wrapper_subclasses_lose_their_history_with_a_warning() -> None:
    with context(), pytest.warns(UserWarning, match="arrives as a leaf"):
        assert call(inner_of, Wrapping(torch.ones(2), requires_grad=True)).tolist() == [1, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with context():
            call(inner_of, Wrapping(torch.ones(2)))  # has no history
        call(inner_of, Wrapping(torch.ones(2), requires_grad=True))  # nothing is recorded


class WrappingGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return Wrapping(g * 2)


def with_wrapping_gradient(x: Tensor) -> Any:
    return WrappingGradient.apply(x)


@pytest.mark.parametrize("n", [2, 100_000])
def test_wrapper_subclasses_are_no_gradients_of_another_worker(n: int) -> None:
    x = torch.ones(n, requires_grad=True)
    with context() as ctx:
        y = call(with_wrapping_gradient, x)
        with pytest.raises(PayloadError, match="type Wrapping: it has no memory of its own"):
            backward(ctx, [y.sum()])


@row("nested tensors of layout `torch.jagged`")
def test_jagged_tensors() -> None:
    def program(call: Callable[..., Any], x: Tensor) -> Tensor:
        rows = x.reshape(3, 2)
        nested = torch.nested.as_nested_tensor([rows[:1], rows[1:] * 5], layout=torch.jagged)
        y = call(square, nested)
        assert y.is_nested
        return (y * 3).values().sum()

    assert_as_in_one_process(program, leaf(1, 2, 3, 4, 5, 6))


@row("nested tensors of layout `torch.strided`")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strided_nested_tensors_are_refused() -> None:
    with context(), pytest.raises(PayloadError, match="send its components"):
        call(double, torch.nested.as_nested_tensor([torch.ones(1), torch.ones(2)]))


@row("forward-mode AD (dual tensors)")
def test_dual_tensors_are_refused() -> None:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(2), torch.full((2,), 5.0))
        for sent in (x, [x], {"x": x}):
            with pytest.raises(PayloadError, match="unpack_dual"):
                call(double, sent)
        assert call(double, torch.ones(2)).tolist() == [2, 2]
        assert [call(double, each).tolist() for each in forward_ad.unpack_dual(x)] == [[2, 2], [10, 10]]


@row("`torch.func`, `vmap`")
def test_function_transforms_are_refused() -> None:
    with pytest.raises(PayloadError, match="cannot send a tensor"):
        torch.func.grad(lambda x: call(double, x).sum())(torch.ones(2))
    with pytest.raises(PayloadError, match="cannot send a tensor"):
        torch.func.vmap(lambda x: call(double, x))(torch.ones(2, 2))


@row("`Tensor.backward()`")
def test_backward_of_a_tensor_is_refused() -> None:
    with context(), pytest.raises(RuntimeError, match=r"zmqgrad\.autograd\.backward"):
        call(double, leaf(1)).sum().backward()


LOCAL = "work on one worker only"


@row("`torch.autograd.grad`, `torch.autograd.functional`, `backward(inputs=...)`")
def test_local_passes_warn_if_calls_would_be_left_out() -> None:
    x = leaf(1, 2)
    with context():
        with pytest.warns(UserWarning, match=LOCAL):
            (found,) = torch.autograd.grad((call(double, x) + x * 3).sum(), x)
        assert found.tolist() == [3, 3]  # in one process: 5
        with pytest.warns(UserWarning, match=LOCAL):
            found = torch.autograd.functional.jacobian(lambda y: call(double, y), x)
        assert not found.any()
        with pytest.warns(UserWarning, match=LOCAL):
            (call(double, x * 2) * x).sum().backward(inputs=[x])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            w, y = leaf(1), call(double, x)
            assert torch.autograd.grad((y * w).sum(), w)[0].tolist() == [6]  # complete
            assert torch.autograd.grad((call(double, x) * 5).sum(), [y], allow_unused=True) == (None,)
            assert torch.autograd.grad((x * 3).sum(), x)[0].tolist() == [3, 3]  # no call is part of it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.autograd.functional.jacobian(lambda y: y * call(double, y), x)  # nothing is recorded


@row("calls of other threads")
def test_other_threads_record_with_the_context_variables() -> None:
    def run(target: Callable[[], object]) -> None:
        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        thread.join(20.0)

    x, results = leaf(1, 2), list[Tensor]()
    outside = contextvars.copy_context()  # in these tests, the worker is a context variable, too
    with context() as ctx:
        run(lambda: outside.run(lambda: results.append(call(double, x))))
        assert results[0].is_leaf  # as on torch's RPC (tests/oracles/gradients.py)
        variables = contextvars.copy_context()
        run(lambda: variables.run(lambda: results.append(call(double, x))))
        backward(ctx, [results[1].sum()])
        assert get_gradients(ctx)[x].tolist() == [2, 2]


arrived, may_reply = threading.Event(), threading.Event()


def double_later(x: Tensor) -> Tensor:
    arrived.set()
    may_reply.wait(20.0)
    return x * 2


@row("replies after the end of their context")
def test_late_replies_are_refused() -> None:
    arrived.clear()
    may_reply.clear()
    with context():
        late = rpc.rpc_async(1, double_later, (leaf(1),))
        arrived.wait(20.0)
    may_reply.set()
    with pytest.raises(AutogradError, match="Wait for the reply inside"):
        late.wait()


@row("optimizers in the backward pass (`_apply_optimizer_in_backward`)")
def test_optimizers_that_step_in_the_backward_pass() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    def train(call: Callable[..., Any], w: Tensor, finish: Callable[[Tensor], None]) -> list[float]:
        _apply_optimizer_in_backward(torch.optim.SGD, [w], {"lr": 0.5})
        for _ in range(2):
            finish((call(square, w) + w * 3).sum())
        return w.tolist()

    def finish(loss: Tensor) -> None:
        loss.backward()

    wanted = train(in_place, leaf(1, 2), finish)
    w = leaf(1, 2)
    _apply_optimizer_in_backward(torch.optim.SGD, [w], {"lr": 0.5})
    for _ in range(2):
        with context() as ctx:
            backward(ctx, [(call(square, w) + w * 3).sum()])
            assert get_gradients(ctx) == {}  # the hook has cleared it
        assert w.grad is None
    assert w.tolist() == wanted


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_local_passes_in_a_context_are_as_without_one(mode: Callable[[], Any]) -> None:
    x = leaf(1, 2)
    cubes = (x**3).sum()
    with context(), mode():
        hessian = torch.func.hessian(lambda y: (y**3).sum())
        expected = hessian(x), torch.autograd.grad(cubes, x, retain_graph=True)[0]
        with torch.inference_mode(False):
            call(double, x)
        torch.testing.assert_close((hessian(x), torch.autograd.grad(cubes, x)[0]), expected)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@row("`DistributedDataParallel`")
def test_data_parallel_stages(group: None) -> None:
    replica = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1).double())
    assert_as_in_one_process(lambda call, x: (call(square, replica(x * 2))).sum(), leaf(1, 2))


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this version of torch has none")
def test_averaged_gradients_keep_their_dtypes(group: None) -> None:
    """A parameter of low precision may have gradients of a high one, and its replica none at all."""
    first, second, third = (torch.ones(2, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    first.grad_dtype, third.grad_dtype = torch.float32, None
    with context() as ctx:
        backward(ctx, [(first.float() * 0.1).sum() + second.sum() + (third.float() * 0.1).sum()])
        before = get_gradients(ctx)
        allreduce_gradients(ctx, [first, second, third])
        after = get_gradients(ctx)
    assert [after[p].dtype for p in (first, second)] == [torch.float32, torch.bfloat16]
    for p in before:
        assert torch.equal(after[p].to(before[p].dtype), before[p])


@pytest.mark.slow
@row("`fully_shard` (FSDP2)")
def test_fully_sharded_stages_are_refused(group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(2, 1).double()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    for x in (leaf(1, 2), torch.ones(2, dtype=torch.float64)):
        with context() as ctx:
            loss = call(square, model(x)).sum()
            with pytest.raises(AutogradError, match="use DistributedDataParallel"):
                backward(ctx, [loss])
