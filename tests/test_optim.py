"""DistributedOptimizer: the same steps as one local optimizer, wherever the parameters live."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from zmqgrad import rpc
from zmqgrad.autograd import backward, context, get_gradients, grad
from zmqgrad.errors import AutogradError, ConfigurationError, PeerLostError
from zmqgrad.optim import DistributedLRScheduler, DistributedOptimizer, clip_grad_norm
from zmqgrad.testing import Cluster, cluster
from zmqgrad.wire.messages import MessageType


@pytest.fixture
def c() -> Iterator[Cluster]:
    with cluster(3) as made:
        yield made


def make(number: int, *shape: int) -> Tensor:
    random = torch.Generator().manual_seed(number)
    return torch.rand(shape or (3,), generator=random, dtype=torch.float64).requires_grad_()


def make_with_grad() -> Tensor:
    p = make(0)
    p.grad = torch.full((3,), 7.0, dtype=torch.float64)
    return p


def grad_of(p: rpc.RRef[Tensor]) -> Tensor | None:
    return p.local_value().grad


def loss_of(params: list[Tensor], step: int) -> Tensor:
    product = torch.stack(params).sin().prod(0)
    return ((product - 0.1 * step) ** 2).sum()


SPECIAL = {
    "Optimizer",  # the base of all
    "SparseAdam",  # sparse gradients only: tested below
    "LBFGS",  # its step needs a closure
}
SHAPES = {"Muon": (3, 4)}  # matrices only
KINDS = sorted(n for n, k in vars(torch.optim).items() if isinstance(k, type) and n not in SPECIAL)


@pytest.mark.parametrize("versions", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_those_of_one_process(c: Cluster, kind: str, versions: bool) -> None:
    options: dict[str, Any] = {"lr": 0.05, **({"momentum": 0.9} if kind == "SGD" else {})}
    make_optimizer = getattr(torch.optim, kind)
    shape = SHAPES.get(kind, ())
    local = [make(i, *shape) for i in range(4)]
    optimizer = make_optimizer(local, **options)
    params = [rpc.remote(to, make, (i, *shape)) for i, to in enumerate([0, 1, 2, 1])]
    distributed = DistributedOptimizer(make_optimizer, params, versions=versions, **options)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(local, step).backward()
        optimizer.step()
        train_step(distributed, params, step)
    assert_same(params, local)


def train_step(optimizer: DistributedOptimizer, params: list[rpc.RRef[Tensor]], step: int) -> None:
    with context() as ctx:
        backward(ctx, [loss_of([p.to_here() for p in params], step)])
        optimizer.step(ctx)


def assert_same(params: list[rpc.RRef[Tensor]], expected: list[Tensor]) -> None:
    for p, its in zip(params, expected, strict=True):
        torch.testing.assert_close(p.to_here().detach(), its.detach(), rtol=1e-12, atol=1e-14)


def make_columns(seed: int) -> Tensor:
    return make(seed, 3, 4).detach().t().requires_grad_()


@pytest.mark.parametrize("versions", [False, True])
def test_a_fused_optimizer_of_a_parameter_that_lies_in_columns(c: Cluster, versions: bool) -> None:
    """It goes through the memory of parameters and gradients, whatever their strides are."""
    options: dict[str, Any] = {"lr": 0.05, "fused": True}
    local = [make_columns(i) for i in range(2)]
    optimizer = torch.optim.Adam(local, **options)
    params = [rpc.remote(to, make_columns, (i,)) for i, to in enumerate([0, 1])]
    distributed = DistributedOptimizer(torch.optim.Adam, params, versions=versions, **options)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(local, step).backward()
        optimizer.step()
        train_step(distributed, params, step)
    assert_same(params, local)


def embedded(table: rpc.RRef[Tensor]) -> Tensor:
    return torch.nn.functional.embedding(torch.tensor([1, 1, 2]), table.local_value(), sparse=True)


def make_table() -> Tensor:
    return torch.ones(4, 2, requires_grad=True)


LOW = [torch.ones(3, dtype=torch.bfloat16) for _ in range(2)]
"""A parameter of worker 1, and the same in one process."""


def low(i: int) -> Tensor:
    return LOW[i]


def loss_of_low(i: int) -> Tensor:
    return (LOW[i] * torch.tensor([0.1, 0.2, 0.3])).square().sum()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this version of torch has none")
@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_parameters_with_a_grad_dtype(c: Cluster, dtype: torch.dtype | None) -> None:
    for each in LOW:
        each.requires_grad_().grad_dtype = dtype
    optimizer = DistributedOptimizer(torch.optim.SGD, [rpc.remote(1, low, (0,))], lr=0.7)
    local = torch.optim.SGD([LOW[1]], lr=0.7)
    for _ in range(3):
        with context() as ctx:
            backward(ctx, [rpc.rpc_sync(1, loss_of_low, (0,))])
            optimizer.step(ctx)
        local.zero_grad()
        loss_of_low(1).backward()
        local.step()
    assert torch.equal(*LOW)


def test_sparse_gradients_and_their_optimizer(c: Cluster) -> None:
    here = make_table()
    local = torch.optim.SparseAdam([here], lr=0.1)
    torch.nn.functional.embedding(torch.tensor([1, 1, 2]), here, sparse=True).sum().backward()
    local.step()
    table = rpc.remote(1, make_table)
    with context() as ctx:
        backward(ctx, [rpc.rpc_sync(1, embedded, (table,)).sum()])
        DistributedOptimizer(torch.optim.SparseAdam, [table], lr=0.1).step(ctx)
    torch.testing.assert_close(table.to_here().detach(), here.detach())


class Closing(torch.optim.SGD):
    """Needs a closure, by its own account only."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


def make_sparse(layout: str) -> Tensor:
    values = 2 * torch.eye(3)
    return torch.nn.Parameter(values.to_sparse_csr() if layout == "csr" else values.to_sparse().coalesce())


def times(p: rpc.RRef[Tensor], x: Tensor) -> Tensor:
    return torch.sparse.mm(p.local_value(), x)


def as_dense(p: rpc.RRef[Tensor]) -> Tensor:
    return p.local_value().detach().to_dense()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("versions", [False, True])
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_parameters_of_a_sparse_layout(c: Cluster, layout: str, versions: bool) -> None:
    """A change in place gives some of them other memory."""
    x, local = torch.tensor([[1.0], [2.0], [3.0]]), make_sparse(layout)
    reference = torch.optim.SGD([local], lr=0.01, momentum=0.9)
    p = rpc.remote(1, make_sparse, (layout,))
    optimizer = DistributedOptimizer(torch.optim.SGD, [p], lr=0.01, momentum=0.9, versions=versions)
    for _ in range(3):
        reference.zero_grad()
        torch.sparse.mm(local, x).square().sum().backward()
        reference.step()
        with context() as ctx:
            backward(ctx, [rpc.rpc_sync(1, times, (p, x)).square().sum()])
            optimizer.step(ctx)
    assert torch.equal(rpc.rpc_sync(1, as_dense, (p,)), local.detach().to_dense())


def test_parameters_that_are_made_of_other_tensors(c: Cluster) -> None:
    """Their gradients may have no memory of their own."""
    params = [torch.nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2))) for _ in range(2)]
    optimizer = DistributedOptimizer(torch.optim.SGD, list(map(rpc.RRef, params)), lr=0.25)
    with context() as ctx:
        backward(ctx, [(params[0] + params[1]).sum() ** 2])
        get_gradients(ctx)[params[0]].mul_(2)  # only that one
        optimizer.step(ctx)
    assert [p.a.tolist() for p in params] == [[1 - 4.0] * 2, [1 - 2.0] * 2]


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Closing])
def test_an_optimizer_whose_step_needs_a_closure_is_refused(c: Cluster, kind: type) -> None:
    with pytest.raises(ConfigurationError, match=rf"(?s)worker1.*{kind.__name__} cannot be distributed"):
        DistributedOptimizer(kind, [rpc.remote(1, make, (0,))])


def test_groups_have_options_of_their_own(c: Cluster) -> None:
    local = [make(i) for i in range(4)]
    optimizer = torch.optim.SGD([{"params": local[:3], "lr": 0.2}, {"params": local[3]}], lr=0.01)
    params = [rpc.remote(to, make, (i,)) for i, to in enumerate([0, 1, 2, 1])]
    groups = [{"params": params[:3], "lr": 0.2}, {"params": params[3]}]
    distributed = DistributedOptimizer(torch.optim.SGD, groups, lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(local, step).backward()
        optimizer.step()
        train_step(distributed, params, step)
    assert_same(params, local)


def test_a_schedule_sets_the_rates_of_all_owners(c: Cluster) -> None:
    local = [make(i) for i in range(3)]
    optimizer = torch.optim.SGD(local, lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    params = [rpc.remote(to, make, (i,)) for i, to in enumerate([0, 1, 2])]
    distributed = DistributedOptimizer(torch.optim.SGD, params, lr=0.1)
    schedules = DistributedLRScheduler(distributed, torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(local, step).backward()
        optimizer.step()
        train_step(distributed, params, step)
        schedule.step()
        schedules.step()
        assert schedules.get_last_lr() == {f"worker{i}": schedule.get_last_lr() for i in range(3)}
        schedules.load_state_dict(schedules.state_dict())
    with pytest.raises(ConfigurationError, match=r"belongs to worker9, but .* owned by worker0, worker1"):
        schedules.load_state_dict({"worker9": {}})
    assert_same(params, local)


def test_a_schedule_sets_the_rates_of_owners_that_come_later(c: Cluster) -> None:
    local = [make(i) for i in range(2)]
    optimizer = torch.optim.SGD(local[:1], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    params = [rpc.remote(to, make, (i,)) for i, to in enumerate([1, 2])]
    distributed = DistributedOptimizer(torch.optim.SGD, params[:1], lr=1.0)
    schedules = DistributedLRScheduler(distributed, torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    for step in range(4):
        if step == 1:
            optimizer.add_param_group({"params": local[1:], "lr": 0.25})
            distributed.add_param_group({"params": params[1:], "lr": 0.25})
        optimizer.step()  # or torch warns
        train_step(distributed, params[: min(step, 1) + 1], step)
        schedule.step()
        schedules.step()
        rates = [group["lr"] for group in optimizer.param_groups]
        for each in distributed.remote_optimizers:
            assert [group["lr"] for group in each.rpc_sync().options()] == rates


def test_a_schedule_made_by_a_function_and_stepped_with_a_metric(c: Cluster) -> None:
    params = [rpc.remote(1, make, (0,))]
    optimizer = DistributedOptimizer(torch.optim.SGD, params, lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    schedules = DistributedLRScheduler(optimizer, lambda o: plateau(o, patience=0, factor=0.5))
    for _ in range(2):
        schedules.step(1.0)
    assert schedules.get_last_lr() == {"worker1": [0.05]}


def test_training_goes_on_from_a_state(c: Cluster) -> None:
    params = [rpc.remote(to, make, (i,)) for i, to in enumerate([0, 1, 2])]
    first = DistributedOptimizer(torch.optim.Adam, params, lr=0.05)
    train_step(first, params, 0)
    state, values = first.state_dict(), [p.to_here().detach().clone() for p in params]
    train_step(first, params, 1)
    expected = [p.to_here().detach().clone() for p in params]

    again = [rpc.remote(to, torch.clone, (v.requires_grad_(),)) for to, v in enumerate(values)]
    again = [rpc.remote(to, fresh, (p,)) for to, p in enumerate(again)]
    second = DistributedOptimizer(torch.optim.Adam, again, lr=99.0)
    second.load_state_dict(state)
    train_step(second, again, 1)
    assert_same(again, expected)
    with pytest.raises(ConfigurationError, match=r"belongs to worker0, but .* owned by worker0, worker1"):
        second.load_state_dict({"worker0": {}})


def fresh(p: rpc.RRef[Tensor]) -> Tensor:
    return p.local_value().detach().clone().requires_grad_()


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 0.0, "inf", "-inf"])
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipping_equals_that_of_one_process(c: Cluster, norm_type: Any, max_norm: float) -> None:
    local = [make(i) for i in range(4)]
    (loss_of(local, 0) * 50).backward()
    expected = torch.nn.utils.clip_grad_norm_(local, max_norm, norm_type)
    params = [rpc.remote(to, make, (i,)) for i, to in enumerate([0, 1, 2, 1])]
    with context() as ctx:
        backward(ctx, [loss_of([p.to_here() for p in params], 0) * 50])
        torch.testing.assert_close(clip_grad_norm(ctx, [*params, params[0]], max_norm, norm_type), expected)
        for p, its in zip(params, local, strict=True):
            torch.testing.assert_close(rpc.rpc_sync(p.owner(), gradient_of, (ctx, p)), its.grad)


def test_clipping_is_not_part_of_the_history_of_a_gradient(c: Cluster) -> None:
    """As in torch, which clips without grad mode."""
    p = make(0)
    with context() as ctx:
        backward(ctx, [rpc.rpc_sync(1, torch.pow, (p, 3)).sum()], create_graph=True)
        clip_grad_norm(ctx, [rpc.RRef(p)], 0.1)
        clipped = get_gradients(ctx)[p]
        torch.testing.assert_close(clipped.norm().item(), 0.1, rtol=1e-4, atol=0)
        torch.testing.assert_close(grad(ctx, clipped.sum(), p)[0], 6 * p)


def gradient_of(context_id: int, p: rpc.RRef[Tensor]) -> Tensor:
    return get_gradients(context_id)[p.local_value()]


def test_a_norm_that_is_not_finite(c: Cluster) -> None:
    params = [rpc.remote(to, make, (to,)) for to in (1, 2)]
    with context() as ctx:
        backward(ctx, [params[0].to_here().sum() * float("inf") + params[1].to_here().sum()])
        with pytest.raises(RuntimeError, match=r"non-finite.*worker1 has inf, worker2 has 1\.7"):
            clip_grad_norm(ctx, params, 1.0, error_if_nonfinite=True)
    with pytest.raises(ConfigurationError, match="clip_grad_norm got an empty parameter list"):
        clip_grad_norm(1, [], 1.0)


def test_a_parameter_without_gradient_stays(c: Cluster) -> None:
    used, unused = (rpc.remote(1, make, (i,)) for i in range(2))
    optimizer = DistributedOptimizer(torch.optim.SGD, [used, unused], lr=1.0)
    with context() as ctx:
        backward(ctx, [used.to_here().sum()])
        optimizer.step(ctx)
    assert torch.equal(unused.to_here(), make(1))
    torch.testing.assert_close(used.to_here().detach(), make(0).detach() - 1)


def test_grad_is_as_before(c: Cluster) -> None:
    p = rpc.remote(1, make_with_grad)
    optimizer = DistributedOptimizer(torch.optim.SGD, [p], lr=1.0)
    with context() as ctx:
        backward(ctx, [p.to_here().sum()])
        optimizer.step(ctx)
    grad = rpc.rpc_sync(1, grad_of, (p,))
    assert grad is not None
    assert grad.tolist() == [7.0] * 3
    torch.testing.assert_close(p.to_here().detach(), make(0).detach() - 1)


class TrainsLocally(torch.optim.SGD):
    """In the middle of a step, the program of the owner trains the parameter itself."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        p = TrainsLocally.live
        super().step(closure)
        p.grad = None
        (p.detach() * 0 + p * 5).sum().backward()
        TrainsLocally.seen = p.grad

    live: Tensor
    seen: Tensor | None = None


def make_live() -> Tensor:
    TrainsLocally.live = make_with_grad()
    return TrainsLocally.live


def test_a_step_does_not_touch_what_its_owner_accumulates(c: Cluster) -> None:
    p = rpc.remote(1, make_live)
    optimizer = DistributedOptimizer(TrainsLocally, [p], lr=1.0)
    with context() as ctx:
        backward(ctx, [p.to_here().sum()])
        optimizer.step(ctx)
    assert TrainsLocally.seen is not None
    assert TrainsLocally.seen.tolist() == [5.0] * 3
    assert TrainsLocally.live.grad is TrainsLocally.seen, "the step restored an older .grad"


def test_the_owner_may_replace_or_resize_the_memory_of_a_parameter(c: Cluster) -> None:
    p, local = rpc.remote(1, make, (0,)), make(0)
    optimizer, here = DistributedOptimizer(torch.optim.SGD, [p], lr=0.5), torch.optim.SGD([local], lr=0.5)
    for change in (None, replace_memory, enlarge, None):
        if change is not None:
            rpc.rpc_sync(1, change, (p,))
            change(rpc.RRef(local))
        here.zero_grad()
        (local**2).sum().backward()
        here.step()
        with context() as ctx:
            backward(ctx, [(p.to_here() ** 2).sum()])
            optimizer.step(ctx)
        assert_same([p], [local])
    assert p.to_here().shape == (5,)


def replace_memory(p: rpc.RRef[Tensor]) -> None:
    p.local_value().data = torch.full((3,), 2.0, dtype=torch.float64)


def enlarge(p: rpc.RRef[Tensor]) -> None:
    with torch.no_grad():
        p.local_value().data = torch.cat([p.local_value(), torch.ones(2, dtype=torch.float64)])


@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_steps_on_all_parameters_at_once_equal_those_of_one_process(c: Cluster, how: str) -> None:
    local = [make(i) for i in range(4)]
    optimizer = torch.optim.Adam(local, lr=0.05, **{how: True})
    params = [rpc.remote(to, make, (i,)) for i, to in enumerate([0, 1, 2, 1])]
    distributed = DistributedOptimizer(torch.optim.Adam, params, lr=0.05, **{how: True})
    for step in range(3):
        optimizer.zero_grad()
        loss_of(local, step).backward()
        optimizer.step()
        train_step(distributed, params, step)
    assert_same(params, local)


def test_saved_values_that_a_step_changes_are_noticed_as_in_one_process(c: Cluster) -> None:
    p = rpc.RRef(make(0))
    optimizer = DistributedOptimizer(torch.optim.SGD, [p], lr=1.0)
    squared = (p.local_value() ** 2).sum()
    with context() as ctx:
        backward(ctx, [p.local_value().sum()])
        optimizer.step(ctx)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


def test_what_an_optimizer_may_ask_of_a_parameter(c: Cluster) -> None:
    """Its class, whether it requires grad, and the attributes that the program gave it."""
    optimizer = DistributedOptimizer(torch.optim.SGD, [rpc.remote(1, make_marked)], lr=1.0)
    asked = [rpc.rpc_sync(owner, ask, (local,)) for owner, local in optimizer.local_optimizers.items()]
    assert asked == [(torch.nn.Parameter, True, "mine")]
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        DistributedOptimizer(torch.optim.SGD, [rpc.remote(1, make_computed)], lr=1.0)
    with pytest.raises(TypeError, match="optimizer can only optimize Tensors"):
        DistributedOptimizer(torch.optim.SGD, [rpc.remote(1, abs, (1,))], lr=1.0)


def ask(local: Any) -> Any:
    (p,) = local.local_value().optim.param_groups[0]["params"]
    return type(p), p.requires_grad, p.mark


def make_marked() -> Tensor:
    p = torch.nn.Parameter(torch.ones(2))
    p.mark = "mine"  # type: ignore[attr-defined]
    return p


def make_computed() -> Tensor:
    return make(0) * 2


class Failing(torch.optim.SGD):
    """Refuses to step where its first parameter is parameter 1."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if torch.equal(self.param_groups[0]["params"][0], make(1)):
            raise LookupError("no step today")
        super().step(closure)


def test_an_error_of_one_owner_names_it_and_the_others_step(c: Cluster) -> None:
    params = [rpc.remote(to, make, (i,)) for i, to in enumerate([0, 1, 2])]
    optimizer = DistributedOptimizer(Failing, params, lr=1.0)
    with context() as ctx:
        backward(ctx, [sum(p.to_here().sum() for p in params)])
        with pytest.raises(LookupError, match=r"(?s)worker1.*no step today"):
            optimizer.step(ctx)
    moved = [not torch.equal(p.to_here(), make(i)) for i, p in enumerate(params)]
    assert moved == [True, False, True]


def test_an_optimizer_that_cannot_be_made_says_why(c: Cluster) -> None:
    p = rpc.remote(1, make, (0,))
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        DistributedOptimizer(torch.optim.SGD, [p], lr=-1)
    with pytest.raises(TypeError, match="no_such_option"):
        DistributedOptimizer(torch.optim.SGD, [p], no_such_option=1)


def test_arguments_that_cannot_be(c: Cluster) -> None:
    with pytest.raises(ConfigurationError, match="optimizer got an empty parameter list"):
        DistributedOptimizer(torch.optim.SGD, [], lr=1.0)
    with pytest.raises(ConfigurationError, match=r"params_rref\[0\]\['params'\]\[0\] must be an RRef"):
        DistributedOptimizer(torch.optim.SGD, [{"params": [make(0)]}], lr=1.0)
    with pytest.raises(ConfigurationError, match=r"params_rref\[1\] must be a dictionary with 'params'"):
        DistributedOptimizer(torch.optim.SGD, [{"params": rpc.RRef(make(0))}, {"lr": 1.0}], lr=1.0)
    for take in (
        lambda one: DistributedOptimizer(torch.optim.SGD, one, lr=1.0),
        lambda one: clip_grad_norm(1, one, 1),
    ):
        with pytest.raises(ConfigurationError, match="must be a list of RRefs, not an RRef"):
            take(rpc.RRef(make(0)))
    with pytest.raises(ConfigurationError, match=r"params_rref\[1\] must be an RRef, not Tensor"):
        DistributedOptimizer(torch.optim.SGD, [rpc.RRef(make(0)), make(1)], lr=1.0)  # type: ignore[list-item]


def test_a_step_outside_its_context_is_an_error(c: Cluster) -> None:
    p = rpc.remote(1, make, (0,))
    optimizer = DistributedOptimizer(torch.optim.SGD, [p], lr=1.0)
    with pytest.raises(RuntimeError, match="Could not find autograd context with id: 12345"):
        optimizer.step(12345)


def test_a_context_that_was_left_is_an_error_though_an_owner_does_not_know_yet(c: Cluster) -> None:
    p = rpc.remote(1, make, (0,))
    optimizer = DistributedOptimizer(torch.optim.SGD, [p], lr=1.0)
    with c.network.hold(MessageType.CLEANUP_AUTOGRAD_CONTEXT_REQ):
        with context() as ctx:
            backward(ctx, [p.to_here().sum()])
        for late in (partial(optimizer.step, ctx), partial(clip_grad_norm, ctx, [p], 1.0)):
            with pytest.raises(AutogradError, match="has been released"):
                late()
        torch.testing.assert_close(p.to_here(), make(0))


def test_others_step_though_an_owner_is_gone(c: Cluster) -> None:
    params = [rpc.remote(to, make, (i,)) for i, to in enumerate([2, 1])]
    optimizer = DistributedOptimizer(torch.optim.SGD, params, lr=1.0)
    with context() as ctx:
        backward(ctx, [sum(p.to_here().sum() for p in params)])
        c.workers[2].close()
        c.workers[0].lose(2, "its process has ended")
        with pytest.raises(PeerLostError, match="worker2"):
            optimizer.step(ctx)
    torch.testing.assert_close(params[1].to_here().detach(), make(1).detach() - 1)


class Refusing(torch.optim.SGD):
    """Never steps."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise LookupError(f"{len(self.param_groups)} groups, no step")


def test_errors_of_several_owners_are_told_of_together(c: Cluster) -> None:
    params = [rpc.remote(to, make, (i,)) for i, to in enumerate([1, 2])]
    optimizer = DistributedOptimizer(Refusing, params, lr=1.0)
    with context() as ctx:
        backward(ctx, [sum(p.to_here().sum() for p in params)])
        with pytest.raises(LookupError, match="worker1") as caught:
            optimizer.step(ctx)
    assert "it failed on 2 owners, also:\non worker2: LookupError" in str(caught.value.__cause__)


@pytest.mark.open_outcomes  # RRefs that are deleted while their fork request is on its way leave one
def test_concurrent_steps_on_shared_parameters_all_count(c: Cluster) -> None:
    params = [rpc.remote(to, make, (to,)) for to in range(3)]
    together = threading.Barrier(4)
    failed: list[BaseException] = []

    def train(rank: int) -> None:
        try:
            with c.acting(rank % 3):
                optimizer = DistributedOptimizer(torch.optim.SGD, params_of[rank], lr=1.0)
                together.wait(10)
                for _ in range(5):
                    with context() as ctx:
                        backward(ctx, [sum(p.to_here().sum() for p in params_of[rank])])
                        optimizer.step(ctx)
        except BaseException as e:
            failed.append(e)

    params_of = {rank: forks_of(c, rank % 3, params) for rank in range(4)}
    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed
    for i, p in enumerate(params):
        torch.testing.assert_close(p.to_here().detach(), make(i).detach() - 20)


class Meanwhile(torch.optim.SGD):
    """In the middle of a step, another trainer uses the optimizer."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        Meanwhile.other.start()
        Meanwhile.other.join(0.2)
        super().step(closure)

    other: threading.Thread


USES: dict[str, Any] = {
    "state_dict": lambda optimizer, _: optimizer.state_dict(),
    "load_state_dict": lambda optimizer, state: optimizer.load_state_dict(state),
    "add_param_group": lambda optimizer, _: optimizer.add_param_group({"params": rpc.remote(1, make, (1,))}),
}


@pytest.mark.parametrize("versions", [False, True])
@pytest.mark.parametrize("use", USES)
def test_what_others_do_with_an_optimizer_waits_for_its_step(c: Cluster, use: str, versions: bool) -> None:
    p = rpc.remote(1, make, (0,))
    optimizer = DistributedOptimizer(Meanwhile, [p], lr=1.0, momentum=0.9, versions=versions)
    before, found = optimizer.state_dict(), []

    def use_it() -> None:
        with c.acting(0):
            found.append(USES[use](optimizer, before))

    Meanwhile.other = threading.Thread(target=use_it)
    with context() as ctx:
        backward(ctx, [p.to_here().sum()])
        optimizer.step(ctx)
    Meanwhile.other.join()
    torch.testing.assert_close(p.to_here().detach(), make(0).detach() - 1)
    assert len(found) == 1
    after = optimizer.state_dict()["worker1"]["state"]
    assert after == {} if use == "load_state_dict" else after[0]["momentum_buffer"].tolist() == [1.0] * 3
    if use == "state_dict":
        assert found[0]["worker1"]["state"].keys() == {0}


def test_a_hook_of_a_step_may_save_the_state(c: Cluster) -> None:
    p, saved = make(0), []
    optimizer = DistributedOptimizer(torch.optim.SGD, [rpc.RRef(p)], lr=1.0, momentum=0.9)
    local = optimizer.remote_optimizers[0].local_value()
    local.optim.register_step_post_hook(lambda *_: saved.append(optimizer.state_dict()))
    with context() as ctx:
        backward(ctx, [p.sum()])
        optimizer.step(ctx)
    assert saved[0]["worker0"]["state"][0]["momentum_buffer"].tolist() == [1.0] * 3


_kept: dict[int, list[rpc.RRef[Tensor]]] = {}


def keep(rank: int, params: list[rpc.RRef[Tensor]]) -> None:
    _kept[rank] = params


def forks_of(c: Cluster, rank: int, params: list[rpc.RRef[Tensor]]) -> list[rpc.RRef[Tensor]]:
    """References to ``params`` that belong to worker ``rank``, as if its program had been given them."""
    rpc.rpc_sync(rank, keep, (rank, params))
    return _kept.pop(rank)


# ---- learning rates by torch's attributes ----------------------------------------------------------------


def make_schedule(local: Any) -> Any:
    """Runs on the owner: a scheduler for the local optimizer."""
    return torch.optim.lr_scheduler.StepLR(local.local_value().optim, step_size=1, gamma=0.1)


def step_schedule(schedule: Any) -> list[float]:
    """Runs on the owner: the learning rates after one step of the scheduler."""
    schedule.local_value().optimizer.step()
    schedule.local_value().step()
    rates: list[float] = schedule.local_value().get_last_lr()
    return rates


def test_schedulers_by_torchs_attributes() -> None:
    with cluster(3) as c, c.acting(0):
        params = [rpc.remote(to, torch.nn.Parameter, (torch.ones(2),)) for to in (1, 2)]
        optimizer = DistributedOptimizer(torch.optim.SGD, params, lr=1.0)
        owners = [local.owner_name() for local in optimizer.remote_optimizers]
        assert owners == ["worker1", "worker2"]
        for local in optimizer.remote_optimizers:
            schedule = rpc.remote(local.owner(), make_schedule, (local,))
            assert rpc.rpc_sync(local.owner(), step_schedule, (schedule,)) == [pytest.approx(0.1)]
