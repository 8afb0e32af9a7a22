"""What people write in a stage, against the same in one process: each function here and on another worker.

Every stage takes ``x`` and ``w``, two 4 x 4 matrices, and gives a tensor, or several in whatever they like.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

from zmqgrad import rpc
from zmqgrad.autograd import backward, context, get_gradients
from zmqgrad.autograd.engine import differentiation, executor
from zmqgrad.testing import Cluster, cluster

Stage = Callable[[Tensor, Tensor], Any]
STAGES: dict[str, Stage] = {}


def stage(function: Stage) -> Stage:
    STAGES[function.__name__] = function
    return function


class TwoOfThree(torch.autograd.Function):
    """The middle output cannot be differentiated; the last may not be used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        where = x > 0
        ctx.mark_non_differentiable(where)
        return x * w, where, x + w

    @staticmethod
    def backward(ctx: Any, to_product: Tensor | None, _: None, to_sum: Tensor | None) -> Any:
        x, w = ctx.saved_tensors
        to_x, to_w = (to_sum, to_sum) if to_sum is not None else (0, 0)
        if to_product is not None:
            to_x, to_w = to_x + to_product * w, to_w + to_product * x
        return to_x, to_w


class OnlyFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return x * 2 + w

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 2, None


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 3


@stage
def outputs_of_which_one_cannot_be_differentiated(x: Tensor, w: Tensor) -> Any:
    return TwoOfThree.apply(x, w)


@stage
def one_of_three_outputs(x: Tensor, w: Tensor) -> Any:
    return TwoOfThree.apply(x, w)[0]


@stage
def no_gradient_for_one_input(x: Tensor, w: Tensor) -> Any:
    return OnlyFirst.apply(x, w)


@stage
def a_function_that_writes_to_its_input(x: Tensor, w: Tensor) -> Any:
    return InPlace.apply(x * 1) * w


@stage
def a_penalty_on_gradients(x: Tensor, w: Tensor) -> Any:
    y = (x @ w).tanh().sum()
    (inner,) = torch.autograd.grad(y, x, create_graph=True)
    return y + inner.square().sum()


@stage
def a_gradient_of_its_own(x: Tensor, w: Tensor) -> Any:
    """Differentiates something for itself, and gives what it found as a constant."""
    with torch.enable_grad():
        probe = x.detach().requires_grad_()
        (inner,) = torch.autograd.grad((probe * probe).sum(), probe)
    return x * inner + w


@stage
def checkpoints(x: Tensor, w: Tensor) -> Any:
    y = torch.utils.checkpoint.checkpoint(lambda t: (t @ w).sin(), x, use_reentrant=False)
    return torch.utils.checkpoint.checkpoint(lambda t: (t * w).exp(), y, use_reentrant=False)


@stage
def saved_tensors_elsewhere(x: Tensor, w: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return (x @ w).exp() * w


@stage
def complex_numbers(x: Tensor, w: Tensor) -> Any:
    z = torch.complex(x, w)
    return torch.fft.ifft(torch.fft.fft(z) * z.conj()).abs()


@stage
def complex_outputs(x: Tensor, w: Tensor) -> Any:
    return torch.complex(x, w) * torch.complex(w, x), torch.view_as_real(torch.complex(x, x * w))


@stage
def mixed_types(x: Tensor, w: Tensor) -> Any:
    return (x.float() * w).to(torch.float32) + w.half().float(), x.bfloat16()


@stage
def autocast(x: Tensor, w: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(x.float(), w.float()).relu()


@stage
def layers(x: Tensor, w: Tensor) -> Any:
    torch.manual_seed(1)
    made = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.3)).double()
    return made(x) @ F.softmax(w, -1)


@stage
def convolution(x: Tensor, w: Tensor) -> Any:
    return F.conv2d(x[None, None], w[None, None, :3, :3], padding=1), F.avg_pool2d(w[None], 2)


@stage
def recurrence(x: Tensor, w: Tensor) -> Any:
    torch.manual_seed(1)
    cell = nn.LSTM(4, 4).double()
    out, (h, c) = cell(x @ w)
    return {"out": out, "state": (h, c)}


@stage
def in_place_in_many_ways(x: Tensor, w: Tensor) -> Any:
    y = x * 1
    y[1:3].mul_(w[1:3])
    y.view(16)[::2].add_(1)
    y.index_put_((torch.tensor([0]),), w[:1])
    y.masked_fill_(w > 0.5, 0.0)
    z = torch.empty(4, 4, dtype=x.dtype)
    z[:2] = y[2:]
    z[2:].copy_(w[:2])
    return y, z.relu_()


@stage
def views_and_shapes(x: Tensor, w: Tensor) -> Any:
    parts = torch.cat([x.t(), w.flip(0)]).unbind(1)
    return torch.stack(parts).expand(2, 4, 8), x.unfold(0, 2, 1), torch.einsum("ij,kj->ik", x, w).diagonal()


@stage
def gathering(x: Tensor, w: Tensor) -> Any:
    values, order = x.sort(dim=1)
    return values.gather(1, order), w[order[:, 0]], torch.where(x > 0, w, x), x.cumsum(0), order


@stage
def linear_algebra(x: Tensor, w: Tensor) -> Any:
    a = x @ x.t() + 4 * torch.eye(4, dtype=x.dtype)
    return torch.linalg.solve(a, w), torch.linalg.cholesky(a), torch.logdet(a)


@stage
def sparse_product(x: Tensor, w: Tensor) -> Any:
    return torch.sparse.mm((x.detach() > 0).to(x.dtype).to_sparse(), w) * x


@stage
def sparse_rows(x: Tensor, w: Tensor) -> Any:
    bags = F.embedding_bag(torch.tensor([0, 1, 1, 3]), w, torch.tensor([0, 2]), sparse=True, mode="sum")
    return bags, F.embedding(torch.tensor([1, 1, 2]), x, sparse=True)


@stage
def the_same_twice(x: Tensor, w: Tensor) -> Any:
    return x, x, w * x, x.view(4, 4)


@stage
def nothing_of_one_input(x: Tensor, w: Tensor) -> Any:
    return x.sin()


@stage
def regions_without_grad(x: Tensor, w: Tensor) -> Any:
    with torch.no_grad():
        scale = x.norm()
        w2 = w * scale
    with torch.inference_mode():
        shift = float(x.mean())
    return x / scale + w2 * w + shift, w2


@stage
def hooks_in_a_stage(x: Tensor, w: Tensor) -> Any:
    x = x * 1  # in one process, what was received is the caller's own tensor
    y = x * w
    y.register_hook(lambda g: g.clamp(max=0.5))
    x.register_hook(lambda g: g * 3)
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda gradients: (gradients[0] + 1,))
    z = y.exp()
    assert z.grad_fn is not None
    z.grad_fn.register_hook(lambda made, _: tuple(m * 2 for m in made))
    return z


@stage
def what_requires_grad_is_changed(x: Tensor, w: Tensor) -> Any:
    y = x.detach().requires_grad_()
    local = (y * 3).sum()
    local.backward()
    assert y.grad is not None
    return x * y.grad, (w * 2).detach(), w.clone().requires_grad_(True)


@stage
def scalars_and_empties(x: Tensor, w: Tensor) -> Any:
    return x.sum(), w[:0], torch.zeros(0, 3, dtype=x.dtype), x[0, 0]


class Pair(NamedTuple):
    one: Tensor
    two: Tensor


@dataclasses.dataclass
class Bundle:
    tensors: list[Tensor]
    name: str


@stage
def structures(x: Tensor, w: Tensor) -> Any:
    return [Pair(x * 2, w), Bundle([x @ w, w.t()], "bundle"), {"deep": {"er": (x,)}}, None, 3]


@stage
def many_nodes(x: Tensor, w: Tensor) -> Any:
    for _ in range(200):
        x = (x * w).tanh() + x
    return x


# ---- against one process --------------------------------------------------------------------------------


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, Bundle):
        value = value.tensors
    return [t for part in value for t in tensors_in(part)] if isinstance(value, (list, tuple)) else []


def loss_of(value: Any, x: Tensor, w: Tensor, beside: bool) -> Tensor:
    found = [t for t in tensors_in(value) if t.requires_grad]
    total = sum(((i + 1) * t.abs().double() * 0.1).sum() for i, t in enumerate(found))
    return total + (x.sin() * w).sum() if beside else total  # type: ignore[return-value]


def leaves() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(7)
    x, w = torch.rand(2, 4, 4, generator=random, dtype=torch.float64) - 0.4
    return x.clone().requires_grad_(), w.clone().requires_grad_()


def run_stage(name: str, x: Tensor, w: Tensor) -> Any:
    return STAGES[name](x, w)


def relay_stage(name: str, x: Tensor, w: Tensor) -> Any:
    """The stage on worker 2; ``x`` goes through here, and on, and so does what comes back."""
    return rpc.rpc_sync(2, run_stage, (name, x * 1, w))


@pytest.fixture
def c() -> Iterator[Cluster]:
    with cluster(3) as made:
        yield made


def dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


@pytest.mark.parametrize("way", ["there", "relayed", "self", "beside", "node by node"])
def test_stages_have_the_gradients_of_one_process(
    c: Cluster, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "node by node":
        monkeypatch.setattr(executor, "hooks_registered", lambda *_: True)
        monkeypatch.setattr(differentiation, "has_tensor_hooks", lambda *_: True)
    beside = way in ("beside", "node by node")
    wrong = []
    for name, function in STAGES.items():
        x, w = leaves()
        y, v = x * 1, w * 1  # what is sent are no leaves, as a stage may not write to leaves
        torch.autograd.backward([loss_of(function(y, v), y, v, beside)])
        expected = [x.grad, w.grad]
        x, w = leaves()
        try:
            with context() as ctx:
                y, v = x * 1, w * 1
                if way == "relayed":
                    got = rpc.rpc_sync(1, relay_stage, (name, y, v))
                else:
                    got = rpc.rpc_sync(0 if way == "self" else 1, run_stage, (name, y, v))
                backward(ctx, [loss_of(got, y, v, beside)])
                gradients = get_gradients(ctx)
                for tensor, gradient in zip((x, w), expected, strict=True):
                    assert (tensor in gradients) == (gradient is not None)
                    if gradient is not None:
                        torch.testing.assert_close(
                            dense(gradients[tensor]), dense(gradient), rtol=1e-9, atol=1e-12
                        )
        except Exception as e:
            wrong.append(f"{name}: {type(e).__name__}: {e}")
    assert not wrong, "\n\n".join(wrong)
