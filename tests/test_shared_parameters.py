"""Trainers that share parameters: no step fails, and every gradient is exact for the values that it saw."""

from __future__ import annotations

import contextvars
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from zmqgrad import rpc
from zmqgrad.autograd import backward, context, get_gradients
from zmqgrad.autograd.context import Context
from zmqgrad.autograd.versions import ParameterVersions
from zmqgrad.errors import AutogradError, ConfigurationError
from zmqgrad.optim import DistributedLRScheduler, DistributedOptimizer, clip_grad_norm
from zmqgrad.testing import Cluster, cluster
from zmqgrad.trace import Job, record
from zmqgrad.trace.events import StepTaken


@pytest.fixture
def c() -> Iterator[Cluster]:
    with cluster(3) as made:
        yield made


# ---- what the owner runs ---------------------------------------------------------------------------------


class LateSave(torch.autograd.Function):
    """Saves its inputs after it has used them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        y = x * w
        ctx.save_for_backward(x, w)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x).sum(0)


class Shared(nn.Module):
    """Parameters that torch saves for backward in all ways: themselves, views of them, in functions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.rand(4) + 0.5)
        self.late = nn.Parameter(torch.rand(4) + 0.5)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight  # tied

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x).tanh()) * self.scale.sin()
        late: Tensor = LateSave.apply(x, self.late)  # type: ignore[no-untyped-call]
        result: Tensor = self.last(late * self.scale)
        return result


class Server:
    """Owns the model, and knows what each context has seen of it."""

    def __init__(self) -> None:
        self.model = Shared()
        self.seen: dict[int, list[Tensor]] = {}

    def params(self) -> list[rpc.RRef[Tensor]]:
        return [rpc.RRef(p) for p in self.model.parameters()]

    def forward(self, key: int, x: Tensor) -> Tensor:
        """The output of the model, whose values are noted before and after."""
        before = [p.detach().clone() for p in self.model.parameters()]
        y = self.model(x)
        assert all(map(torch.equal, before, self.model.parameters())), "the values changed within a call"
        self.seen[key] = before
        return y

    def is_exact(self, key: int, x: Tensor, dx: Tensor) -> bool:
        """Whether the gradients in this context equal those of one process at the values that it saw."""
        model, x = Shared(), x.detach().requires_grad_()
        with torch.no_grad():
            for p, value in zip(model.parameters(), self.seen.pop(key), strict=True):
                p.copy_(value)
        model(x).square().sum().backward()
        got = get_gradients(key)
        return all(
            [
                torch.equal(got[p], q.grad)
                for p, q in zip(self.model.parameters(), model.parameters(), strict=True)
            ]
        ) and torch.equal(dx, x.grad)


def make_server() -> Server:
    return Server()


def params_of(server: rpc.RRef[Server]) -> list[rpc.RRef[Tensor]]:
    return server.local_value().params()


def train(server: rpc.RRef[Server], params: list[rpc.RRef[Tensor]], rank: int, steps: int) -> tuple[int, int]:
    """Run a trainer. Returns how many of its gradients were exact, and the largest staleness."""
    optimizer = DistributedOptimizer(torch.optim.SGD, params, lr=0.003, momentum=0.5, versions=True)
    generator = torch.Generator().manual_seed(rank)
    exact, stalest = 0, 0
    for _ in range(steps):
        x = torch.randn(8, 4, generator=generator).requires_grad_()
        with context() as ctx:
            y = server.rpc_sync().forward(ctx, x)
            backward(ctx, [y.square().sum()])
            exact += server.rpc_sync().is_exact(ctx, x.detach(), get_gradients(ctx)[x])
            result = optimizer.step(ctx)
        assert result.applied
        stalest = max(stalest, result.staleness)
    return exact, stalest


@pytest.mark.slow
def test_six_trainers_share_parameters() -> None:
    steps = 10
    with cluster(7) as made, made.acting(0):
        server = rpc.remote(0, make_server)
        futures = [
            rpc.rpc_async(rank, train, (server, params_of(server), rank, steps)) for rank in range(1, 7)
        ]
        results = [future.wait() for future in futures]
        assert [exact for exact, _ in results] == [steps] * 6
        assert max(stalest for _, stalest in results) > 0


# ---- when a step gives new memory ------------------------------------------------------------------------

KEPT: dict[str, Any] = {}


def make_param(*values: float) -> Tensor:
    KEPT["p"] = nn.Parameter(torch.tensor(values, dtype=torch.float64))
    return KEPT["p"]


def cube(p: rpc.RRef[Tensor]) -> Tensor:
    return p.local_value() ** 3


def square(p: rpc.RRef[Tensor]) -> Tensor:
    return p.local_value() ** 2


def values_of(p: rpc.RRef[Tensor]) -> list[float]:
    values: list[float] = p.local_value().tolist()
    return values


def sgd(*params: rpc.RRef[Tensor], **options: Any) -> DistributedOptimizer:
    return DistributedOptimizer(torch.optim.SGD, params, **{"lr": 0.5, "versions": True, **options})


def test_a_step_alone_stays_in_place(c: Cluster) -> None:
    p = rpc.remote(1, make_param, (2.0,))
    optimizer = sgd(p)
    address = KEPT["p"].data_ptr()
    for expected in (-4.0, -28.0):
        with context() as ctx:
            backward(ctx, [rpc.rpc_sync(1, cube, (p,)).sum()])
            result = optimizer.step(ctx)
            assert (result.staleness, result.applied, result.loss) == (0, True, None)
            assert values_of_remote(p) == [expected]
    assert KEPT["p"].data_ptr() == address


class Asks(torch.optim.SGD):
    """Asks for the values here while it steps, by way of another worker."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        KEPT["asked"] = rpc.rpc_sync(2, values_of_remote, (rpc.RRef(KEPT["p"]),))


def test_a_step_may_wait_for_a_call_that_reads(c: Cluster) -> None:
    p = rpc.remote(1, make_param, (2.0,))
    optimizer = DistributedOptimizer(Asks, [p], lr=0.5, versions=True)
    with context() as ctx:
        backward(ctx, [rpc.rpc_sync(1, cube, (p,)).sum()])
        assert optimizer.step(ctx).applied
        assert values_of_remote(p) == [-4.0]
    assert KEPT.pop("asked") == [2.0]


def values_of_remote(p: rpc.RRef[Tensor]) -> list[float]:
    return rpc.rpc_sync(1, values_of, (p,))


def test_a_call_has_ended_to_read_when_its_caller_has_the_reply(
    c: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a step that the caller takes then would not be seen by its next call."""
    p = rpc.remote(1, make_param, (2.0,))
    optimizer = sgd(p)
    replied = threading.Event()
    early: list[bool] = []
    end = ParameterVersions.end_reading

    def wait_and_end(versions: ParameterVersions, reading: Any) -> None:
        early.append(replied.wait(0.2))
        end(versions, reading)

    monkeypatch.setattr(ParameterVersions, "end_reading", wait_and_end)
    with context():
        rpc.rpc_async(1, cube, (p,)).then(lambda _: replied.set()).wait()
    assert early[0] is False
    assert optimizer.param_groups


def make_params(count: int, size: int) -> list[rpc.RRef[Tensor]]:
    return [rpc.RRef(nn.Parameter(torch.zeros(size))) for _ in range(count)]


def twice(params: list[rpc.RRef[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    values = [each.local_value() for each in params]
    return values, [each * 1 for each in values]


@rpc.functions.async_execution
def twice_by_a_future(params: list[rpc.RRef[Tensor]]) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(twice(params))
    return future


def sum_of(params: list[rpc.RRef[Tensor]]) -> Tensor:
    return torch.cat([each.local_value() for each in params]).sum()


@pytest.mark.parametrize("function", [twice, twice_by_a_future])
@pytest.mark.parametrize(("count", "size"), [(1, 10_000), (8, 1000)])
def test_a_step_before_the_reply_is_sent_does_not_change_it(
    c: Cluster, monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], count: int, size: int
) -> None:
    """Parameters so large are copied when the reply is sent, when the call does not read any more."""
    params = rpc.rpc_sync(1, make_params, (count, size))
    optimizer = sgd(*params)
    rpc.rpc_sync(2, keep, (params,))
    end = ParameterVersions.end_reading
    steps: list[Any] = []

    def step() -> None:
        mine = KEPT.pop("forks")
        with context() as ctx:
            backward(ctx, [rpc.rpc_sync(1, sum_of, (mine,))])
            steps.append(sgd(*mine).step(ctx))

    def end_and_step(versions: ParameterVersions, reading: Any) -> None:
        end(versions, reading)
        if "forks" in KEPT:
            in_thread(c, 2, step)

    monkeypatch.setattr(ParameterVersions, "end_reading", end_and_step)
    with context():
        first, second = rpc.rpc_sync(1, function, (params,))
        assert all(map(torch.equal, first, second))
        assert [result.applied for result in steps] == [True]
        assert rpc.rpc_sync(1, sum_of, (params,)).item() == -0.5 * count * size
    assert optimizer.param_groups


@pytest.mark.parametrize("owner", [0, 1])
def test_a_context_may_go_on_after_its_own_step(c: Cluster, owner: int) -> None:
    """With another pass over what it has saved; also if the parameter is on its own worker."""
    p = rpc.remote(owner, make_param, (2.0,))
    optimizer = sgd(p)
    with context() as ctx:
        first, second = (rpc.rpc_sync(owner, cube, (p,)) if owner else cube(p) for _ in range(2))
        backward(ctx, [first.sum()], retain_graph=True)
        optimizer.step(ctx)  # to -4
        backward(ctx, [first.sum()])
        backward(ctx, [second.sum()])
        gradient = get_gradients(ctx)[KEPT["p"]] if not owner else rpc.rpc_sync(1, gradient_of, (ctx,))
        assert gradient.tolist() == [3 * 12.0]
    assert KEPT["p"].tolist() == [-4.0]


def gradient_of(context_id: int) -> Tensor:
    return get_gradients(context_id)[KEPT["p"]]


def in_thread(c: Cluster, rank: int, run: Callable[[], None]) -> None:
    """Run a trainer of another worker to its end."""
    failed: list[BaseException] = []

    def act() -> None:
        try:
            with c.acting(rank):
                run()
        except BaseException as e:
            failed.append(e)

    thread = threading.Thread(target=act)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


def step_of_another(
    c: Cluster, *params: rpc.RRef[Tensor], weights: tuple[float, ...] = (1.0,), lr: float = 0.5
) -> Any:
    """A whole iteration of worker 2, from forks of its own. Returns the result of its step."""
    rpc.rpc_sync(2, keep, (params,))
    results: list[Any] = []

    def iterate() -> None:
        mine = KEPT.pop("forks")
        optimizer = sgd(*mine, lr=lr)
        with context() as ctx:
            squares = [rpc.rpc_sync(each.owner(), square, (each,)).sum() for each in mine]
            backward(ctx, [sum(weight * each for weight, each in zip(weights, squares, strict=True))])
            results.append(optimizer.step(ctx))

    in_thread(c, 2, iterate)
    gc.collect()
    return results[0]


def keep(params: tuple[rpc.RRef[Tensor], ...]) -> None:
    KEPT["forks"] = params


@pytest.mark.parametrize("owner", [0, 1])
def test_what_a_context_has_saved_stays_while_others_step(c: Cluster, owner: int) -> None:
    p = rpc.remote(owner, make_param, (2.0,))
    optimizer = sgd(p)
    before = KEPT["p"]
    with context() as ctx:
        y = rpc.rpc_sync(owner, cube, (p,)) if owner else cube(p)
        assert step_of_another(c, p).staleness == 0  # to 2 - 0.5 * 4 = 0
        # A thread that is in a context on the owner reads, unless it waits in this library.
        assert KEPT["p"].tolist() == [0.0 if owner else 2.0]
        backward(ctx, [y.sum()])
        result = optimizer.step(ctx)  # 0 - 0.5 * 12: the gradient at 2
        assert result.staleness == 1
        assert result.owners == {f"worker{owner}": (1, True)}
    assert KEPT["p"] is before
    assert before.tolist() == [-6.0]
    assert before.grad is None


def by_constant(p: rpc.RRef[Tensor], x: Tensor, constant: str) -> Tensor:
    """The parameter as a constant, in memory that it has now."""
    value = p.local_value()
    factors = {"detach": value.detach(), "view": value.detach().view(-1), "data": value.data}
    return factors[constant] * x


@pytest.mark.parametrize("constant", ["detach", "view", "data"])
def test_a_constant_that_a_context_has_saved_stays_while_others_step(c: Cluster, constant: str) -> None:
    p = rpc.remote(1, make_param, (2.0,))
    optimizer = sgd(p)
    x = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    with context() as ctx:
        for _ in range(2):
            y = rpc.rpc_sync(1, by_constant, (p, x, constant))
            step_of_another(c, p)  # to 0, where it stays
            backward(ctx, [y.sum()])
            assert get_gradients(ctx)[x].tolist() == [2.0]
    with context() as ctx:
        y = rpc.rpc_sync(1, by_constant, (p, x, constant))
        rpc.rpc_sync(1, change, (p,))
        if constant != "data":
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                backward(ctx, [y.sum()])
    assert optimizer.param_groups


def test_what_is_saved_outside_of_contexts_is_noticed_as_in_torch(c: Cluster) -> None:
    """Torch saves the parameter itself, which has new memory by now: without a check, a wrong gradient."""
    p = rpc.remote(1, make_param, (2.0,))
    optimizer = sgd(p)  # parameters are shared while there is one
    outside = KEPT["p"] ** 3
    with context() as ctx:
        y = rpc.rpc_sync(1, cube, (p,))
        step_of_another(c, p)
        backward(ctx, [y.sum()])
        assert rpc.rpc_sync(1, gradient_of, (ctx,)).tolist() == [12.0]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outside.sum().backward()
    del optimizer


class Wrapping(Tensor):
    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.ones(2)


def test_a_parameter_without_memory_of_its_own_cannot_be_shared() -> None:
    """What it is made of would stay as it is, so a step would be lost."""
    param = Tensor._make_wrapper_subclass(Wrapping, (2,), requires_grad=True)  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="type Wrapping has no memory of its own"):
        ParameterVersions().share(param)


def test_what_is_saved_stays_shared_when_its_optimizer_goes() -> None:
    versions, param = ParameterVersions(), nn.Parameter(torch.tensor([2.0]))
    first = versions.share(param)
    with versions.reading(fresh=False):
        y = param**3
    del first
    with versions.stepping(Context(1), [versions.share(param)]) as (memory,):
        memory.sub_(1)
    y.sum().backward()
    assert param.tolist() == [1.0]
    assert param.grad is not None
    assert param.grad.tolist() == [12.0]


class Noticed(nn.Parameter):
    """A parameter that tells when its memory is asked for."""

    on_asked: Callable[[], None] = staticmethod(lambda: None)

    def untyped_storage(self) -> torch.UntypedStorage:
        type(self).on_asked()
        return super().untyped_storage()


def test_a_parameter_is_known_though_it_is_shared_while_another_thread_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions, first, second = ParameterVersions(), Noticed(torch.ones(1)), nn.Parameter(torch.tensor([2.0]))
    shared = [versions.share(first)]
    other = threading.Thread(target=lambda: shared.append(versions.share(second)))

    def share_second() -> None:
        if other.ident is None:
            other.start()
            other.join(0.1)  # it may have to wait for this thread

    x = torch.ones(1, requires_grad=True)
    with versions.reading(fresh=False):
        monkeypatch.setattr(Noticed, "on_asked", staticmethod(share_second))
        assert (x * torch.ones(1)).requires_grad  # it saves the constant
        other.join()
        y = x * second.detach()
    with versions.stepping(Context(1), [versions.share(second)]) as (memory,):
        memory.sub_(1)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0]


def change(p: rpc.RRef[Tensor]) -> None:
    with torch.no_grad():
        p.local_value().mul_(2)


def changed_input(p: rpc.RRef[Tensor]) -> Tensor:
    inner = p.local_value() * 1
    result = inner * inner
    inner.add_(1)
    return result


def test_changes_of_the_program_are_noticed_as_in_torch(c: Cluster) -> None:
    p = rpc.remote(1, make_param, (2.0,))
    optimizer = sgd(p)  # parameters are shared while there is one
    with context() as ctx:
        y = rpc.rpc_sync(1, cube, (p,))
        rpc.rpc_sync(1, change, (p,))
        with pytest.raises(
            RuntimeError, match=r"modified by an inplace operation.*DoubleTensor.*expected version 0"
        ):
            backward(ctx, [y.sum()])
    with context() as ctx:
        y = rpc.rpc_sync(1, cube, (p,))
        rpc.rpc_sync(1, change, (p,))
        step_of_another(c, p)  # new memory does not hide it
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            backward(ctx, [y.sum()])
    with context() as ctx:
        y = rpc.rpc_sync(1, changed_input, (p,))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            backward(ctx, [y.sum()])
    del optimizer


def make_tied() -> Tensor:
    whole = torch.tensor([2.0, 3.0, 4.0], dtype=torch.float64)
    KEPT["tied"] = [nn.Parameter(whole[:2]), nn.Parameter(whole[1:])]
    return KEPT["tied"][0]


def other_tied() -> Tensor:
    return KEPT["tied"][1]


def test_parameters_that_share_memory_go_on_to_share_it(c: Cluster) -> None:
    """And both are stepped, as in one process."""
    first = rpc.remote(1, make_tied)
    first.to_here()  # made
    second = rpc.remote(1, other_tied)
    optimizer = sgd(first, second, lr=0.25)
    with context() as ctx:
        y = rpc.rpc_sync(1, cube, (first,))
        step_of_another(c, first, second, weights=(1.0, 1.0), lr=0.25)
        a, b = KEPT["tied"]
        assert a.tolist() == [1.0, 0.0]  # 3 - 0.25 * 6 - 0.25 * 6
        assert b.tolist() == [0.0, 2.0]
        assert a.data_ptr() + 8 == b.data_ptr()
        backward(ctx, [y.sum()])  # at 2 and 3
        optimizer.step(ctx)
        assert a.tolist() == [1.0 - 3.0, 0.0 - 6.75]
        assert b.tolist() == [0.0 - 6.75, 2.0]


@pytest.mark.parametrize("view", [torch.conj, lambda x: x.conj().imag])
def test_views_that_conjugate_or_negate_go_on_to_share_memory(view: Callable[[Tensor], Tensor]) -> None:
    whole = torch.tensor([1 + 2j, 3 - 4j])
    first, second = nn.Parameter(whole), nn.Parameter(view(whole))
    versions = ParameterVersions()
    with versions.reading(fresh=False):
        y = first * first
    with versions.stepping(Context(1), list(map(versions.share, (first, second)))) as (memory, _):
        memory.mul_(2)
    assert torch.equal(first, torch.tensor([2 + 4j, 6 - 8j]))
    assert torch.equal(second, view(first))
    assert y.requires_grad


# ---- what is computed again ------------------------------------------------------------------------------


def scaled(p: rpc.RRef[Tensor], x: Tensor) -> Tensor:
    return p.local_value() ** 2 * x


def scaled_by_constant(p: rpc.RRef[Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        factor = p.local_value() ** 2
    return factor * x * x


def by_checkpoint(function: Callable[..., Tensor], p: rpc.RRef[Tensor], x: Tensor) -> Tensor:
    found: Tensor = torch.utils.checkpoint.checkpoint(function, p, x, use_reentrant=False)
    return found


def call_checkpointed(by_torch: bool, function: Callable[..., Tensor], *args: Any) -> Tensor:
    found: Tensor = (
        rpc.rpc_sync(1, by_checkpoint, (function, *args)) if by_torch else rpc.checkpoint(1, function, *args)
    )
    return found


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("function", [scaled, scaled_by_constant])
def test_nothing_is_computed_again_with_other_values(
    c: Cluster, by_torch: bool, function: Callable[..., Tensor]
) -> None:
    """Also if a parameter is a constant there. Steps of other parameters do not matter."""
    p, other = rpc.remote(1, make_param, (2.0,)), rpc.remote(1, make_constant, (1,))
    optimizer = sgd(p)
    x = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    with context() as ctx:
        y = call_checkpointed(by_torch, function, p, x)
        step_of_another(c, other)
        backward(ctx, [y.sum()])
        assert get_gradients(ctx)[x].tolist() == [4.0 if function is scaled else 24.0]
        y = call_checkpointed(by_torch, function, p, x)
        step_of_another(c, p)
        with pytest.raises(AutogradError, match=r"another trainer .* has changed a parameter of"):
            backward(ctx, [y.sum()])
    assert optimizer.param_groups


@pytest.mark.parametrize("by_torch", [False, True])
def test_nothing_is_computed_again_with_the_values_of_an_own_step(c: Cluster, by_torch: bool) -> None:
    p = rpc.remote(1, make_param, (2.0,))
    optimizer = sgd(p, lr=0.25)
    x = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    with context() as ctx:
        first, second = (call_checkpointed(by_torch, scaled, p, x) for _ in range(2))
        backward(ctx, [first.sum()])
        optimizer.step(ctx)  # to 2 - 0.25 * 12
        with pytest.raises(AutogradError, match="has changed a parameter of"):
            backward(ctx, [second.sum()])
        backward(ctx, [call_checkpointed(by_torch, scaled, p, x).sum()])
        assert get_gradients(ctx)[x].tolist() == [4.0 + 1.0]


def test_nothing_is_computed_again_with_other_values_though_its_optimizer_has_gone() -> None:
    versions, param = ParameterVersions(), nn.Parameter(torch.tensor([2.0]))
    first = versions.share(param)
    x = torch.ones(1, requires_grad=True)
    with versions.reading(fresh=False):
        y: Any = torch.utils.checkpoint.checkpoint(lambda x: x * param, x, use_reentrant=False)
    del first
    with versions.stepping(Context(1), [versions.share(param)]) as (memory,):
        memory.sub_(1)
    with pytest.raises(AutogradError, match="has changed a parameter of"):
        y.backward()


class StepBefore(torch.autograd.Function):
    """Lets another trainer step before its gradient goes on, once the pass has begun on the owner."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        assert KEPT["begun"].wait(20)
        KEPT["step"]()
        return gradient


def pass_on(x: Tensor) -> Tensor:
    found: Tensor = StepBefore.apply(x)  # type: ignore[no-untyped-call]
    return found


def hooked_square(p: rpc.RRef[Tensor]) -> Tensor:
    y = p.local_value() ** 2
    y.register_hook(lambda _: KEPT["begun"].set())
    return y


def test_a_step_during_the_pass_is_noticed_by_what_is_computed_again(c: Cluster) -> None:
    p = rpc.remote(1, make_param, (2.0,))
    p.to_here()
    other = rpc.remote(1, make_constant, (1,))
    optimizer = sgd(p)
    KEPT["begun"] = threading.Event()
    x = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    with context() as ctx:
        first = rpc.rpc_sync(1, hooked_square, (other,))
        second = rpc.rpc_sync(2, pass_on, (call_checkpointed(True, scaled, p, x),))
        outside = contextvars.Context()
        KEPT["step"] = lambda: outside.run(step_of_param, c, p)
        with pytest.raises(AutogradError, match=r"another trainer .* has changed a parameter of"):
            backward(ctx, [first.sum() + second.sum()])
    assert optimizer.param_groups


def step_of_param(c: Cluster, p: rpc.RRef[Tensor]) -> None:
    in_thread(c, 0, lambda: step_of_another(c, p))


def cube_saved_by_hooks(p: rpc.RRef[Tensor]) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return p.local_value() ** 3


def test_what_hooks_of_the_program_save_stays_while_others_step(c: Cluster) -> None:
    p = rpc.remote(1, make_param, (2.0,))
    optimizer = sgd(p)
    with context() as ctx:
        y = rpc.rpc_sync(1, cube_saved_by_hooks, (p,))
        step_of_another(c, p)
        backward(ctx, [y.sum()])
        assert rpc.rpc_sync(1, gradient_of, (ctx,)).tolist() == [12.0]
    assert optimizer.param_groups


# ---- readers ---------------------------------------------------------------------------------------------

GATE = [threading.Event(), threading.Event()]


def read_twice(p: rpc.RRef[Tensor], waits: bool) -> tuple[float, float]:
    """Read before and after a wait: of this library, or one that it knows nothing of."""
    first = p.local_value().item()
    GATE[0].set()
    rpc.rpc_sync(0, wait_for_gate) if waits else wait_for_gate()
    return first, p.local_value().item()


def wait_for_gate() -> None:
    assert GATE[1].wait(20)


@pytest.mark.parametrize("waits", [False, True])
def test_a_call_sees_one_version_except_across_waits(c: Cluster, waits: bool) -> None:
    p = rpc.remote(1, make_param, (2.0,))
    optimizer = sgd(p)  # parameters are shared while there is one
    for gate in GATE:
        gate.clear()
    with context():
        reading = rpc.rpc_async(1, read_twice, (p, waits))
        assert GATE[0].wait(20)
        step_of_another(c, p)
        seen = values_of_remote(p)
        assert seen == ([0.0] if waits else [2.0]), "published if nobody reads"
        GATE[1].set()
        assert reading.wait() == (2.0, 0.0 if waits else 2.0)
    assert rpc.rpc_sync(1, values_of, (p,)) == [0.0]
    del optimizer


# ---- staleness -------------------------------------------------------------------------------------------


def test_a_step_that_is_too_old_is_not_taken(c: Cluster) -> None:
    p = rpc.remote(1, make_param, (1.0,))
    optimizers = {limit: sgd(p, lr=0.125, max_staleness=limit) for limit in (0, 1, None)}
    with context() as ctx:
        backward(ctx, [rpc.rpc_sync(1, cube, (p,)).sum()])
        step_of_another(c, p)  # to 0
        refused = optimizers[0].step(ctx)
        assert (refused.staleness, refused.applied) == (1, False)
        assert values_of_remote(p) == [0.0]
        assert optimizers[1].step(ctx).applied
        assert values_of_remote(p) == [-0.375]
        again = optimizers[0].step(ctx)
        assert (again.staleness, again.applied) == (0, True), "what is newer than its own step counts"
    for limit, options in ((-1, {}), (1, {"versions": False})):
        with pytest.raises(
            ConfigurationError, match="max_staleness must be at least 0, and needs versions=True"
        ):
            sgd(p, max_staleness=limit, **options)


def read_until_told(p: rpc.RRef[Tensor]) -> float:
    return read_twice(p, waits=False)[0]


def read_in_a_context(p: rpc.RRef[Tensor]) -> None:
    with context():
        rpc.rpc_sync(1, read_until_told, (p,))


def test_an_own_step_that_is_not_published_is_not_one_of_others(c: Cluster) -> None:
    """Another call reads meanwhile, but nobody else steps."""
    p = rpc.remote(1, make_param, (1.0,))
    optimizer = sgd(p, lr=0.125, max_staleness=0)
    for gate in GATE:
        gate.clear()
    reading = rpc.rpc_async(2, read_in_a_context, (p,))
    assert GATE[0].wait(20)
    try:
        with context() as ctx:
            for _ in range(2):
                backward(ctx, [rpc.rpc_sync(1, square, (p,)).sum()])
                result = optimizer.step(ctx)
                assert (result.staleness, result.applied) == (0, True)
    finally:
        GATE[1].set()
        reading.wait()
    assert KEPT["p"].tolist() == [1.0 - 0.25 - 0.5]


def test_the_trace_tells_the_staleness(tmp_path: Path) -> None:
    with record(tmp_path), cluster(3) as c, c.acting(0):
        p = rpc.remote(1, make_param, (1.0,))
        strict = sgd(p, max_staleness=0)
        with context() as ctx:
            backward(ctx, [rpc.rpc_sync(1, cube, (p,)).sum()])
            step_of_another(c, p)
            strict.step(ctx)
        del p, strict
        gc.collect()
    steps = [each.event for each in Job(tmp_path).events() if isinstance(each.event, StepTaken)]
    assert [(step.staleness, step.applied) for step in steps] == [(0, True), (1, False)]
    assert steps[1].context == ctx


# ---- groups, closures, scaled losses ---------------------------------------------------------------------


@pytest.mark.slow
def test_closures_and_schedules(c: Cluster) -> None:
    p = rpc.remote(1, make_param, (2.0,))
    for versions in (True, False):
        optimizer = sgd(p, versions=versions, lr=1.0)
        schedule = DistributedLRScheduler(optimizer, torch.optim.lr_scheduler.StepLR, step_size=1)
        with context() as ctx:

            def closure(ctx: int = ctx) -> float:
                loss = rpc.rpc_sync(1, square, (p,)).sum()
                backward(ctx, [loss])
                return loss.item()

            result = optimizer.step(ctx, closure)
            assert (result.loss if versions else result) == 4.0
        schedule.step()
        assert schedule.get_last_lr() == {"worker1": [0.1]}
    assert KEPT["p"].tolist() == [2.0]  # to -2 and back


@pytest.mark.parametrize("versions", [False, True])
def test_groups_are_added_and_changed_on_all_owners(c: Cluster, versions: bool) -> None:
    local = [torch.nn.Parameter(torch.full((2,), float(n), dtype=torch.float64)) for n in range(3)]
    reference = torch.optim.SGD([local[0]], lr=1.0, momentum=0.9)
    params = [rpc.remote(to, make_constant, (n,)) for n, to in enumerate([1, 1, 2])]
    optimizer = sgd(params[0], lr=1.0, momentum=0.9, versions=versions)
    reference.add_param_group({"params": local[1:], "lr": 0.5})
    optimizer.add_param_group({"params": params[1:], "lr": 0.5})
    for step in range(3):
        for groups in (reference.param_groups, optimizer.param_groups):
            groups[1]["lr"] = 0.1 * (step + 1)
        assert [group["lr"] for group in optimizer.param_groups] == [g["lr"] for g in reference.param_groups]
        reference.zero_grad()
        torch.stack(list(local)).sin().sum().backward()
        reference.step()
        with context() as ctx:
            backward(ctx, [torch.stack([p.to_here() for p in params]).sin().sum()])
            optimizer.step(ctx)
    for p, expected in zip(params, local, strict=True):
        assert torch.equal(p.to_here(), expected)
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        optimizer.add_param_group({"params": params[0]})
    with pytest.raises(ConfigurationError, match=r"\['params'\]\[0\] must be an RRef"):
        optimizer.add_param_group({"params": [local[0]]})


def make_product() -> Tensor:
    return make_constant(1) * 2


@pytest.mark.parametrize("further", [False, True])
def test_a_group_that_an_owner_refuses_is_on_no_owner(c: Cluster, further: bool) -> None:
    """Otherwise the owners would have different numbers of groups, and set an option of different ones."""
    params = [rpc.remote(to, make_constant, (1,)) for to in (1, 1, 2, 2)]
    optimizer = sgd(params[0], *(() if further else [params[2]]), lr=1.0)
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        optimizer.add_param_group({"params": [params[1], rpc.remote(2, make_product)]})
    optimizer.add_param_group({"params": [params[1], params[3]]})
    optimizer.param_groups[1]["lr"] = 0.5
    for local in optimizer.remote_optimizers:
        assert [group["lr"] for group in local.rpc_sync().options()] == [1.0, 0.5]


def test_options_are_set_by_any_method_of_a_dictionary(c: Cluster) -> None:
    optimizer = sgd(*(rpc.remote(to, make_constant, (1,)) for to in (1, 2)), lr=1.0)
    (group,) = optimizer.param_groups
    group.update({"lr": 0.5}, momentum=0.9)
    group |= {"weight_decay": 0.1}
    assert group.setdefault("initial_lr", 2.0) == 2.0
    assert group.setdefault("lr", 3.0) == 0.5
    for local in optimizer.remote_optimizers:
        options = local.rpc_sync().options()[0]
        assert [options[n] for n in ("lr", "momentum", "weight_decay", "initial_lr")] == [0.5, 0.9, 0.1, 2.0]


def make_constant(value: int) -> Tensor:
    return torch.nn.Parameter(torch.full((2,), float(value), dtype=torch.float64))


@pytest.mark.parametrize("unscales", [False, True], ids=["step", "unscale_"])
def test_scaled_losses_equal_those_of_one_process(c: Cluster, unscales: bool) -> None:
    """With one infinite gradient: that step is skipped on all owners, and the scale is halved."""
    local = [make_float(n) for n in range(2)]
    reference, here = torch.optim.SGD(local, lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    params = [rpc.remote(to, make_float, (n,)) for n, to in enumerate([1, 2])]
    optimizer = DistributedOptimizer(torch.optim.SGD, params, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for factor in (1.0, float("inf"), 2.0):
        reference.zero_grad()
        here.scale((local[0] * local[1] * factor).sum()).backward()
        if unscales:
            here.unscale_(reference)
            torch.nn.utils.clip_grad_norm_(local, 0.5)
        here.step(reference)
        here.update()
        with context() as ctx:
            a, b = (p.to_here() for p in params)
            backward(ctx, [scaler.scale((a * b * factor).sum())])
            if unscales:
                scaler.unscale_(optimizer)  # type: ignore[arg-type]
                clip_grad_norm(ctx, params, 0.5)
            scaler.step(optimizer, ctx)  # type: ignore[arg-type]
            scaler.update()
        assert scaler.get_scale() == here.get_scale()
        for p, expected in zip(params, local, strict=True):
            torch.testing.assert_close(p.to_here(), expected)
    assert scaler.get_scale() == 512.0
    with pytest.raises(AutogradError, match="inside 'with context\\(\\)'"):
        scaler.unscale_(optimizer)  # type: ignore[arg-type]


def test_a_scaler_works_where_floats_are_double_by_default(c: Cluster) -> None:
    p = rpc.remote(1, make_float, (1,))
    optimizer = DistributedOptimizer(torch.optim.SGD, [p], lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with context() as ctx:
            backward(ctx, [scaler.scale(p.to_here().sum())])
            scaler.step(optimizer, ctx)  # type: ignore[arg-type]
    finally:
        torch.set_default_dtype(before)
    assert p.to_here().tolist() == [2.0, 2.0]


def test_a_scaler_leaves_parameters_of_a_refused_group_alone(c: Cluster) -> None:
    params = [rpc.remote(1, make_float, (n,)) for n in range(2)]
    first, second = (DistributedOptimizer(torch.optim.SGD, [p], lr=0.5) for p in params)
    with pytest.raises(ValueError, match="more than one parameter group"):
        first.add_param_group({"params": params})
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with context() as ctx:
        backward(ctx, [scaler.scale(sum(p.to_here().sum() for p in params))])  # type: ignore[arg-type]
        for optimizer in (first, second):
            scaler.step(optimizer, ctx)  # type: ignore[arg-type]
    assert [p.to_here().tolist() for p in params] == [[1.0] * 2, [2.0] * 2]


def make_float(value: int) -> Tensor:
    return torch.nn.Parameter(torch.full((2,), value + 1.5))
