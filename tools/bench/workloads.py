"""What two workers do for each other: worker 0 measures, worker 1 serves.

A workload prepares itself on worker 0, and gives the function to be timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tools.bench.processes import Place
from tools.bench.sides import Side, here, take
from tools.bench.timing import Budget, seconds_of

KB, MB = 1 << 10, 1 << 20
SIZES = (64, KB, 16 * KB, 64 * KB, MB, 4 * MB, 16 * MB, 64 * MB, 256 * MB)
"""Of tensors, in bytes."""

Work = Callable[[], object]

FLOOD = 1000
FAN_OUT = 64
STATES, STATE_WIDTH = 8000, 8
"""Of a recurrence."""

BRANCH_STEPS, BRANCH_SIDE = 20, 256
"""A heavy branch: so many products of square matrices."""
OTHER = "worker1"


@dataclass(frozen=True)
class Workload:
    """Something to be timed, ``per`` units in one go. ``limit``: what the machine would take at least."""

    name: str
    says: str
    prepare: Callable[[Side], Work]
    per: int = 1
    limit: str = ""


def size_name(size: int) -> str:
    """``64B``, ``16KB``, ``256MB``."""
    for unit, name in ((MB, "MB"), (KB, "KB")):
        if size >= unit:
            return f"{size // unit}{name}"
    return f"{size}B"


def _limit(size: int) -> str:
    """What a call with a tensor of ``size`` takes at least: large ones must be copied once."""
    return "round_trip" if size < MB else f"copy_{size_name(size)}"


# ---- what runs on worker 1 -------------------------------------------------------------------------------


def nothing() -> None:
    """An empty call."""


def same(x: Any) -> Any:
    """Back where it came from."""
    return x


def drop(x: Any) -> None:
    """A tensor one way."""


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Something to differentiate."""
    return a * b


def heavy(x: torch.Tensor) -> torch.Tensor:
    """Much to differentiate."""
    for _ in range(BRANCH_STEPS):
        x = torch.tanh(x @ x)
    return x.sum()


def to_and_fro(depth: int, x: torch.Tensor) -> torch.Tensor:
    """Nested calls: ``depth`` more, between the two workers."""
    rpc = here().rpc
    if depth == 0:
        return x * 2
    there = OTHER if rpc.get_worker_info().name == "worker0" else "worker0"
    answer: torch.Tensor = rpc.rpc_sync(there, to_and_fro, args=(depth - 1, x))
    return answer + 1


class Layer(torch.nn.Module):
    """A part of a model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One step of it."""
        return torch.relu(self.linear(x))

    def references(self) -> list[Any]:
        """Its parameters, for an optimizer elsewhere."""
        return [here().rpc.RRef(parameter) for parameter in self.parameters()]


# ---- what worker 0 does ----------------------------------------------------------------------------------


def _call(function: Callable[..., object], *args: object) -> Callable[[Side], Work]:
    return lambda side: lambda: side.rpc.rpc_sync(OTHER, function, args=args)


def _flood(side: Side) -> Work:
    def flood() -> None:
        for future in [side.rpc.rpc_async(OTHER, nothing) for _ in range(FLOOD)]:
            future.wait()

    return flood


def _tensor(function: Callable[..., object], size: int) -> Callable[[Side], Work]:
    def prepare(side: Side) -> Work:
        x = torch.rand(size // 4)
        return lambda: side.rpc.rpc_sync(OTHER, function, args=(x,))

    return prepare


def _many_tensors(side: Side) -> Work:
    tensors = [torch.rand(KB) for _ in range(100)]
    return lambda: side.rpc.rpc_sync(OTHER, same, args=(tensors,))


def _reference(side: Side) -> Work:
    x = torch.ones(8)
    return lambda: side.rpc.remote(OTHER, same, args=(x,)).to_here()


def _pair(side: Side) -> Work:
    a, b = (torch.rand(3, 3, requires_grad=True) for _ in range(2))

    def pass_once() -> None:
        with side.autograd.context() as context_id:
            loss = side.rpc.rpc_sync(OTHER, product, args=(a, b)).sum()
            side.autograd.backward(context_id, [loss])

    return pass_once


def _chain(side: Side) -> Work:
    layer = side.rpc.remote(OTHER, torch.nn.Linear, args=(64, 64))
    x = torch.rand(32, 64, requires_grad=True)

    def pass_once() -> None:
        with side.autograd.context() as context_id:
            y = x
            for _ in range(10):
                y = layer.rpc_sync().forward(y)
            side.autograd.backward(context_id, [y.sum()])

    return pass_once


def fan_out(side: Side) -> Work:
    """The backward pass through many calls."""
    w = torch.rand(8, 8, requires_grad=True)

    def backward() -> float:
        with side.autograd.context() as context_id:
            asked = [side.rpc.rpc_async(OTHER, product, args=(w, w)) for _ in range(FAN_OUT)]
            loss = torch.stack([answer.wait() for answer in asked]).sum()
            return seconds_of(lambda: side.autograd.backward(context_id, [loss]))

    return backward


def _recurrence(side: Side) -> Work:
    w = (torch.rand(STATE_WIDTH, STATE_WIDTH) / STATE_WIDTH).requires_grad_()
    xs = torch.rand(STATES, STATE_WIDTH)

    def backward() -> float:
        with side.autograd.context() as context_id:
            h, asked = torch.zeros(STATE_WIDTH), []
            for x in xs:
                h = torch.tanh(w @ h + x)
                asked.append(side.rpc.rpc_async(OTHER, product, args=(h, x)))
            loss = torch.stack([answer.wait() for answer in asked]).sum()
            return seconds_of(lambda: side.autograd.backward(context_id, [loss]))

    return backward


def branches(count: int) -> Callable[[Side], Work]:
    """The backward pass of so many heavy branches."""

    def prepare(side: Side) -> Work:
        xs = [(torch.rand(BRANCH_SIDE, BRANCH_SIDE) / BRANCH_SIDE).requires_grad_() for _ in range(count)]

        def backward() -> float:
            with side.autograd.context() as context_id:
                asked = [side.rpc.rpc_async(OTHER, heavy, args=(x,)) for x in xs]
                loss = torch.stack([answer.wait() for answer in asked]).sum()
                return seconds_of(lambda: side.autograd.backward(context_id, [loss]))

        return backward

    return prepare


def _train_step(side: Side) -> Work:
    layers = [side.rpc.remote(OTHER, Layer, args=(512,)) for _ in range(2)]
    head = torch.nn.Linear(512, 10)
    parameters = [p for layer in layers for p in layer.rpc_sync().references()]
    parameters += [side.rpc.RRef(p) for p in head.parameters()]
    optimizer = side.optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.01)
    x, labels = torch.rand(256, 512), torch.randint(0, 10, (256,))

    def step() -> None:
        with side.autograd.context() as context_id:
            y = x
            for layer in layers:
                y = layer.rpc_sync().forward(y)
            loss = torch.nn.functional.cross_entropy(head(y), labels)
            side.autograd.backward(context_id, [loss])
            optimizer.step(context_id)

    return step


ONE = torch.ones(1)

WORKLOADS: tuple[Workload, ...] = (
    Workload("call", "an empty call", _call(nothing), limit="round_trip"),
    Workload("call_tensor", "a call with one number, and back", _call(same, ONE), limit="round_trip"),
    Workload("call_builtin", "torch.add of two numbers", _call(torch.add, ONE, ONE), limit="round_trip"),
    Workload("flood", f"one of {FLOOD} empty calls under way at once", _flood, per=FLOOD),
    Workload("nested", "six calls within one another", _call(to_and_fro, 6, torch.ones(4))),
    *[Workload(f"send_{size_name(s)}", "a tensor there", _tensor(drop, s), limit=_limit(s)) for s in SIZES],
    *[
        Workload(f"echo_{size_name(s)}", "a tensor there and back", _tensor(same, s), limit=_limit(s))
        for s in SIZES
    ],
    Workload("many_tensors", "a hundred tensors of 4 KB there and back", _many_tensors),
    Workload("reference", "make a value there, fetch it, let it go", _reference),
    Workload("autograd_pair", "forward and backward through one call", _pair),
    Workload("autograd_chain", "forward and backward through ten calls", _chain),
    Workload("fan_out", f"backward alone, through {FAN_OUT} calls of one context", fan_out),
    Workload("recurrence", f"backward alone, through {STATES} states, each sent in a call", _recurrence),
    Workload("branches_1", "backward alone, of one heavy branch on the other worker", branches(1)),
    Workload("branches_2", "backward alone, of two independent ones: as long, with two cores", branches(2)),
    Workload("train_step", "two remote layers of width 512, backward and SGD", _train_step),
)


def run_workloads(place: Place, side_name: str, names: list[str], budget: Budget) -> dict[str, float]:
    """In each of two workers: measure workloads ``names``; worker 0 gives seconds for one unit of each."""
    torch.set_num_threads(1)
    side = take(side_name)
    side.rpc.init_rpc(f"worker{place.rank}", rank=place.rank, world_size=place.count)
    found: dict[str, float] = {}
    if place.rank == 0:
        for workload in WORKLOADS:
            if workload.name in names:
                place.say(workload.name)
                torch.manual_seed(0)
                found[workload.name] = budget.median(workload.prepare(side)) / workload.per
    side.rpc.shutdown()
    return found
