"""Random programs over several workers, as data, and two ways to run them.

:func:`programs` draws one, :func:`gradients_here` runs it in this process with plain torch (the oracle), and
:func:`gradients_over_rpc` runs it as its driver, with zmqgrad, over whatever workers there are. Both give
the gradient of each parameter, in one order.

A program is a body that the driver runs; a body is a list of steps, and a step may be a call that has another
worker run a body. All values are 2 x 2 matrices of float64 with entries of at most about 1, so that
nothing overflows however often they are multiplied. A step names values by position, and a position that is
too large wraps around: a program from which any step is taken away is a program still, which is what makes
examples shrink.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
import torch.utils.checkpoint
from hypothesis import strategies as st
from torch import Tensor

from zmqgrad import rpc
from zmqgrad.autograd import backward, context, get_gradients
from zmqgrad.autograd import grad as dist_grad

SIDE = 2
HOWS = ("sync", "async", "remote")
GROUP_HOWS = (*HOWS, "map", "map_async")

# ---- programs as data -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Op:
    """An operation of the worker that runs the body."""

    name: str
    a: int
    b: int


@dataclass(frozen=True)
class InPlace:
    """As ``Op``, on the memory of ``a`` if that came in a message, is used first here, and has no alias."""

    name: str
    a: int
    b: int


@dataclass(frozen=True)
class Hook:
    """A hook on value ``a`` of those that operations of this body gave; it bends the gradient."""

    a: int


@dataclass(frozen=True)
class Quiet:
    """Something is made of value ``a`` under no_grad: a constant."""

    a: int


@dataclass(frozen=True)
class Rows:
    """Rows of a table, whose gradient is sparse, or ``dense``; a parameter, copied where it does not live."""

    number: int
    dense: bool = False


@dataclass(frozen=True)
class Leaf:
    """A parameter: itself on its own worker, elsewhere a copy that to_here brings."""

    number: int


@dataclass(frozen=True)
class Layer:
    """A module is applied, by a method call through its RRef."""

    number: int
    a: int
    how: str


@dataclass(frozen=True)
class Call:
    """Worker ``to`` runs ``body`` on copies of ``args``. What it returns is waited for where it is used.

    ``quiet``: under no_grad, so that constants come back.
    """

    to: int
    how: str
    args: tuple[int, ...]
    body: Body
    quiet: bool = False


@dataclass(frozen=True)
class GroupCall:
    """Workers ``to`` run ``body`` on copies of ``args``, by one group call.

    By ``map``, each has arguments of its own: the next one is first.
    """

    to: tuple[int, ...]
    how: str
    args: tuple[int, ...]
    body: Body

    def args_of(self, member: int) -> list[int]:
        """The positions of the arguments of a member, by its number in the group."""
        shift = member % len(self.args) if self.args and self.how.startswith("map") else 0
        return [*range(shift, len(self.args)), *range(shift)]


@dataclass(frozen=True)
class AllLayers:
    """All modules are applied to value ``a``, by one method call of their references."""

    a: int
    how: str


@dataclass(frozen=True)
class Body:
    """Steps, and the values to return. ``fold``: values that nothing uses are added to the first of these."""

    steps: tuple[Step, ...]
    returns: tuple[int, ...]
    fold: bool = True


Step = Op | InPlace | Hook | Quiet | Rows | Leaf | Layer | Call | GroupCall | AllLayers


@dataclass(frozen=True, repr=False)
class Program:
    """``leaves``, ``layers`` and ``tables`` are the workers on which parameters and modules live.

    ``passes``: for each backward pass, the roots it starts from; None: one, from all of them. All but the
    last retain the graph; ``at_once``: all do, and run in threads. ``contexts``: so many threads run the
    program at a time, on the same parameters, each in a context of its own.
    """

    workers: int
    driver: int
    leaves: tuple[int, ...]
    layers: tuple[int, ...]
    body: Body
    roots: int = 1
    tables: tuple[int, ...] = ()
    passes: tuple[tuple[int, ...], ...] | None = None
    at_once: bool = False
    contexts: int = 1
    leaf_hooks: tuple[str, ...] = ()

    def __repr__(self) -> str:
        head = f"Program on {self.workers} workers, leaves on {self.leaves}, layers on {self.layers}:"
        lines = [f"  worker{self.driver}, with v0 = leaf 0, backward from {self.roots} roots:"]
        if self.tables:
            lines.insert(0, f"  tables on {self.tables}")
        if self.leaf_hooks:
            lines.insert(0, f"  hooks of leaves: {self.leaf_hooks}")
        if self.passes is not None:
            lines[-1] += f" {self.passes}{' at once' if self.at_once else ''}"
        if self.contexts > 1:
            lines[-1] += f" in {self.contexts} contexts at a time"
        _show(self, self.body, 1, lines, "    ")
        return "\n".join([head, *lines])


class _Multi(torch.autograd.Function):
    """Two tensors, and what is none; for ``y`` there is a gradient only if the product is used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, by: float) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)
        ctx.by = by
        return x * y * by, "text", x * by, 3

    @staticmethod
    def backward(ctx: Any, product: Tensor | None, _: Any, scaled: Tensor | None, __: Any) -> Any:
        x, y = ctx.saved_tensors
        to_x = None if scaled is None else scaled * ctx.by
        if product is None:
            return to_x, None, None
        through = product * y * ctx.by
        return through if to_x is None else to_x + through, product * x * ctx.by, None


class _OneOfTwo(torch.autograd.Function):
    """Gives no gradient for its second input, and is called with zeros where none comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return (x + y) / 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / 2, None


class _Generous(torch.autograd.Function):
    """Gives gradients whether or not they are wanted."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return (x - y) / 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / 2, -gradient / 2


def _checkpointed(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    made: Tensor = torch.utils.checkpoint.checkpoint(lambda x, y: (x * y).sin(), a, b, use_reentrant=False)
    return (made,)


def _written(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """A tensor of its own, a view of which is written to."""
    made = a * 1
    made[:1].mul_(b[:1])
    return (made,)


def _custom(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    product, _, scaled, _ = _Multi.apply(a, b, 0.5)
    return product, scaled


_OPS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {
    "add": lambda a, b: ((a + b) / 2,),
    "mul": lambda a, b: (a * b,),
    "matmul": lambda a, b: (a @ b / SIDE,),
    "sin": lambda a, b: (a.sin(),),
    "mean": lambda a, b: (a.mean().expand(SIDE, SIDE),),
    "transposed": lambda a, b: (a.t(),),
    "column": lambda a, b: (a[:, 1:].expand(SIDE, SIDE),),
    "chunk": lambda a, b: tuple(part.expand(SIDE, SIDE) for part in a.chunk(SIDE)),
    "unbind": lambda a, b: tuple(part.expand(SIDE, SIDE) for part in a.unbind(1)),
    "constant": lambda a, b: (torch.linspace(-0.7, 0.9, SIDE * SIDE, dtype=a.dtype).view(SIDE, SIDE),),
    "detach": lambda a, b: (a.detach().cos(),),
    "custom": _custom,
    "one of two": lambda a, b: (_OneOfTwo.apply(a, b),),
    "generous": lambda a, b: (_Generous.apply(a, b),),
    "checkpoint": _checkpointed,
    "written": _written,
    "complex": lambda a, b: ((torch.complex(a, b) * torch.complex(b, a).conj()).abs() / 2,),
}
_DOUBLE = ("chunk", "unbind", "custom")
_UNARY = ("sin", "mean", "transposed", "column", "chunk", "unbind")
_MAKE = ("add", "mul", "matmul", "sin")
_UNDIFFERENTIABLE = ("constant", "detach")
_IN_PLACE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "mul_": (lambda a, b: a.mul_(b), lambda a, b: a * b),
    "half_": (lambda a, b: a.mul_(0.5), lambda a, b: a * 0.5),
    "tanh_": (lambda a, b: a.tanh_(), lambda a, b: a.tanh()),
    "lerp_": (lambda a, b: a.lerp_(b, 0.3), lambda a, b: a.lerp(b, 0.3)),
}

_UNARY_IN_PLACE = ("half_", "tanh_")


@st.composite
def programs(
    draw: st.DrawFn,
    workers: int,
    all_used: bool = True,
    hooks: bool = False,
    rich: bool = False,
    groups: bool = False,
) -> Program:
    """A program for ``workers`` workers.

    ``all_used``: each remote result reaches a root, as FAST needs. ``rich``: several passes and contexts,
    regions without grad, sparse gradients; with ``hooks``, also hooks of leaves. ``groups``: at
    least one group call.
    """
    homes = st.integers(0, workers - 1)
    program = Program(
        workers=workers,
        driver=draw(homes),
        leaves=tuple(draw(st.lists(homes, min_size=1, max_size=4))),
        layers=tuple(draw(st.lists(homes, max_size=2))),
        body=draw(
            _bodies(
                homes, 2 if groups else 3, st.just(True) if all_used else st.booleans(), hooks, rich, groups
            )
        ),
        roots=draw(st.integers(1, 3)),
    )
    if groups:  # one at least
        args = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)
        inner = _bodies(homes, 1, st.booleans(), hooks, rich, groups)
        first = draw(_group_calls(homes, args, inner))
        program = replace(program, body=replace(program.body, steps=(first, *program.body.steps)))
    if not rich:
        return program
    some = st.lists(st.integers(0, 2), min_size=1, max_size=2).map(tuple)
    at_once = draw(st.booleans())
    kinds = LEAF_HOOKS if not at_once else LEAF_HOOKS[:-1]  # the last depends on the order of passes
    return replace(
        program,
        tables=tuple(draw(st.lists(homes, max_size=2))),
        passes=tuple(draw(st.lists(some, min_size=1, max_size=3))),
        at_once=at_once,
        contexts=draw(st.integers(1, 3)),
        leaf_hooks=tuple(draw(st.sampled_from(kinds)) for _ in program.leaves) if hooks else (),
    )


def _bodies(
    homes: st.SearchStrategy[int],
    depth: int,
    folds: st.SearchStrategy[bool],
    hooks: bool,
    rich: bool,
    groups: bool = False,
) -> st.SearchStrategy[Body]:
    value = st.integers(0, 7)
    kinds: list[st.SearchStrategy[Any]] = [
        st.builds(Op, st.sampled_from(list(_OPS)), value, value),
        st.builds(InPlace, st.sampled_from(list(_IN_PLACE)), value, value),
        st.builds(Leaf, value),
        st.builds(Layer, value, value, st.sampled_from(HOWS)),
    ]
    if hooks:
        kinds += [st.builds(Op, st.sampled_from(_MAKE), value, value), st.builds(Hook, value)] * 3
    if rich:
        kinds += [st.builds(Quiet, value), st.builds(Rows, value, st.booleans())]
    if groups:
        kinds += [st.builds(AllLayers, value, st.sampled_from(HOWS))] * 2
    if depth:
        args = st.lists(value, max_size=3).map(tuple)
        inner = _bodies(homes, depth - 1, folds, hooks, rich, groups)
        if groups:
            kinds += [_group_calls(homes, args, inner)] * 4
        kinds += [st.builds(Call, homes, st.sampled_from(HOWS), args, inner)] * 3
        if rich:
            kinds.append(st.builds(Call, homes, st.sampled_from(HOWS), args, inner, st.just(True)))
    returns = st.lists(value, min_size=1, max_size=3).map(tuple)
    return st.builds(Body, st.lists(st.one_of(kinds), max_size=6 if hooks else 4).map(tuple), returns, folds)


def _group_calls(
    homes: st.SearchStrategy[int],
    args: st.SearchStrategy[tuple[int, ...]],
    inner: st.SearchStrategy[Body],
) -> st.SearchStrategy[GroupCall]:
    members = st.lists(homes, min_size=1, max_size=4, unique=True).map(tuple)
    return st.builds(GroupCall, members, st.sampled_from(GROUP_HOWS), args, inner)


def _show(program: Program, body: Body, count: int, lines: list[str], indent: str) -> None:
    """Append ``body`` to ``lines``, with the positions as they come out."""

    def v(*positions: int) -> str:
        return ", ".join(f"v{p % count}" for p in positions)

    if not count:
        lines.append(f"{indent}v0 = constant")
        count = 1
    for step in body.steps:
        made = f"v{count}"
        if isinstance(step, Op):
            outputs = 2 if step.name in _DOUBLE else 1
            what = f"{step.name}({v(step.a) if step.name in _UNARY else v(step.a, step.b)})"
            lines.append(f"{indent}{', '.join(f'v{count + i}' for i in range(outputs))} = {what}")
            count += outputs
        elif isinstance(step, InPlace):
            with_what = "" if step.name in _UNARY_IN_PLACE else v(step.b)
            lines.append(f"{indent}{v(step.a)}.{step.name}({with_what})")
        elif isinstance(step, Hook):
            lines.append(f"{indent}hook on made value {step.a}, counted round")
        elif isinstance(step, Quiet):
            lines.append(f"{indent}{made} = constant made of {v(step.a)}")
            count += 1
        elif isinstance(step, Rows):
            if program.tables:
                how = ", dense" if step.dense else ""
                lines.append(f"{indent}{made} = rows of table {step.number % len(program.tables)}{how}")
                count += 1
        elif isinstance(step, Leaf):
            lines.append(f"{indent}{made} = leaf {step.number % len(program.leaves)}")
            count += 1
        elif isinstance(step, Layer):
            if program.layers:
                which = f"layer {step.number % len(program.layers)} ({step.how})"
                lines.append(f"{indent}{made} = {which} of {v(step.a)}")
                count += 1
        elif isinstance(step, AllLayers):
            made = ", ".join(f"v{count + i}" for i in range(len(program.layers)))
            lines.append(f"{indent}{made or 'nothing'} = all layers ({step.how}) of {v(step.a)}")
            count += len(program.layers)
        elif isinstance(step, GroupCall):
            number = len(step.to) * len(step.body.returns)
            made = ", ".join(f"v{count + i}" for i in range(number))
            lines.append(
                f"{indent}{made} = group of {step.to} ({step.how}) with {v(*step.args) or 'nothing'}:"
            )
            _show(program, step.body, len(step.args), lines, indent + "    ")
            count += number
        else:
            made = ", ".join(f"v{count + i}" for i in range(len(step.body.returns)))
            how = f"{step.how}, no_grad" if step.quiet else step.how
            lines.append(f"{indent}{made} = worker{step.to} ({how}) with {v(*step.args) or 'nothing'}:")
            _show(program, step.body, len(step.args), lines, indent + "    ")
            count += len(step.body.returns)
    fold = " + what is unused" if body.fold else ""
    lines.append(f"{indent}return {v(*body.returns)}{fold}")


# ---- running a body -------------------------------------------------------------------------------------

Get = Callable[[], Tensor]
"""Gives a value, when it is there."""


class World(Protocol):
    """What a body needs of the worker that runs it."""

    def leaf(self, number: int) -> tuple[Tensor, bool]:
        """A parameter, and whether it came in a message."""
        ...

    def table(self, number: int) -> Tensor | None:
        """A table; None if there are none."""
        ...

    def layer(self, step: Layer, x: Tensor) -> Get | None:
        """What a module makes of ``x``; None if there are no modules."""
        ...

    def call(self, step: Call, args: list[Tensor]) -> tuple[list[Get], bool]:
        """What a call returns, and whether that comes in a message."""
        ...

    def group_call(self, step: GroupCall, args: list[Tensor]) -> list[Get]:
        """What a group call returns: of all members, one after another."""
        ...

    def all_layers(self, step: AllLayers, x: Tensor) -> list[Get]:
        """What all modules make of ``x``."""
        ...

    in_place: bool
    """Do in-place steps in place, where they may be?"""


class _Value:
    """A value of a body while it runs."""

    def __init__(self, get: Get, received: bool, made: bool = False) -> None:
        self.made = made  # a tensor of its own, no view
        self._get: Get | None = get
        self._tensor: Tensor | None = None
        self.received = received
        self.used = False  # by something that differentiates
        self.touched = False

    def get(self) -> Tensor:
        if self._get is not None:
            self._tensor, self._get = self._get(), None
        assert self._tensor is not None
        return self._tensor

    def use(self, differentiably: bool = True) -> Tensor:
        self.touched = True
        self.used |= differentiably
        return self.get()

    def replace(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def shares_memory_with(self, other: _Value) -> bool:
        # Waits for a result that is still on its way: two results of one call may be one tensor.
        return self.get().untyped_storage().data_ptr() == other.get().untyped_storage().data_ptr()


def run_body(body: Body, world: World, values: list[_Value]) -> list[Tensor]:
    """Run ``body``, which begins with ``values``; gives what it returns."""
    values = values or [_Value(lambda: _constant(), False)]

    def at(position: int) -> _Value:
        return values[position % len(values)]

    for step in body.steps:
        if isinstance(step, Op):
            wanted = step.name not in _UNDIFFERENTIABLE
            a = at(step.a).use(wanted)
            b = a if step.name in _UNARY else at(step.b).use(wanted)
            values += _there(_OPS[step.name](a, b), False, made=step.name in _MAKE)
        elif isinstance(step, InPlace):
            _in_place(step, at(step.a), at(step.b), values, world)
        elif isinstance(step, Hook):
            made = [v for v in values if v.made and v.get().requires_grad]
            if made:
                made[step.a % len(made)].get().register_hook(_bend)
        elif isinstance(step, Quiet):
            a = at(step.a).use(False)  # waits, if it is not there yet, before
            with torch.no_grad():
                values += _there([a.cos()], False)
        elif isinstance(step, Rows):
            table = world.table(step.number)
            if table is not None:
                rows = torch.nn.functional.embedding(torch.tensor([2, 0]), table, sparse=not step.dense)
                values += _there([rows], False)
        elif isinstance(step, Leaf):
            tensor, received = world.leaf(step.number)
            values += _there([tensor], received)
        elif isinstance(step, Layer):
            applied = world.layer(step, at(step.a).get())
            if applied is not None:
                at(step.a).use()
                values.append(_Value(applied, False))
        elif isinstance(step, AllLayers):
            applications = world.all_layers(step, at(step.a).get())
            if applications:
                at(step.a).use()
                values += [_Value(get, world.in_place) for get in applications]
        elif isinstance(step, GroupCall):
            gets = world.group_call(step, [at(i).use() for i in step.args])
            values += [_Value(get, world.in_place) for get in gets]
        else:
            args = [at(i).use(not step.quiet) for i in step.args]
            with torch.set_grad_enabled(not step.quiet):
                gets, received = world.call(step, args)
            values += [_Value(_quietly(get, received) if step.quiet else get, received) for get in gets]
    for value in values:
        value.get()
    returned = [at(i).use() for i in body.returns]
    unused = [v.get() for v in values if not v.used]
    if body.fold and unused:
        returned[0] = sum(unused, returned[0]) / (1 + len(unused))
    return returned


def _in_place(step: InPlace, target: _Value, other: _Value, values: list[_Value], world: World) -> None:
    in_place, fresh = _IN_PLACE[step.name]
    tensor = target.get()
    distinct = other is not target
    b = tensor
    if step.name not in _UNARY_IN_PLACE:
        b = other.use() if distinct else fresh(tensor, tensor)
    aliases = [v for v in values if v is not target and target.shares_memory_with(v)]
    alone = 0 not in tensor.stride() and not aliases
    distinct = distinct or step.name in _UNARY_IN_PLACE
    if world.in_place and target.received and not target.touched and distinct and alone:
        target.replace(in_place(tensor, b))
    else:
        target.replace(fresh(tensor, b))
    target.used = False  # whatever used what was there before
    # In place or not: what is there now, and the memory it shared before, may be what an operation has saved.
    for value in (target, *aliases):
        value.touched = True


def _constant() -> Tensor:
    return torch.tensor([[0.3, -0.8], [0.6, 0.9]], dtype=torch.float64)


def _quietly(get: Get, received: bool) -> Get:
    def quiet() -> Tensor:
        with torch.no_grad():
            tensor = get()
        assert not (received and tensor.requires_grad)
        return tensor.detach()  # what was made here, by remote(), has kept its history

    return quiet


def _there(tensors: Sequence[Tensor], received: bool, made: bool = False) -> list[_Value]:
    return [_Value(lambda t=t: t, received, made) for t in tensors]  # type: ignore[misc]


def _roots(program: Program, world: World) -> list[Tensor]:
    """Run the program up to its roots."""
    returned = run_body(program.body, world, _there([world.leaf(0)[0]], False))
    weights = torch.tensor([[0.5, 0.3], [-0.7, 0.9]], dtype=torch.float64)
    shares = [returned[i :: program.roots] for i in range(program.roots)]
    roots = [(sum(share) * weights * (i + 1)).sum() for i, share in enumerate(shares) if share]
    return [r for r in roots if r.requires_grad]


def _starts(program: Program, roots: Sequence[Tensor]) -> list[list[Tensor]]:
    """The roots of each pass."""
    if not roots:
        return []
    if program.passes is None:
        return [list(roots)]
    return [[roots[i % len(roots)] for i in chosen] for chosen in program.passes]


# ---- parameters and modules -----------------------------------------------------------------------------


LEAF_HOOKS = ("", "tensor", "before", "after", "post")


def make_leaf(number: int, hook: str = "") -> Tensor:
    """Parameter ``number``, the same wherever it is made, with a hook that bends its gradient."""
    random = torch.Generator().manual_seed(number)
    leaf = torch.rand(SIDE, SIDE, generator=random, dtype=torch.float64) * 1.8 - 0.9
    leaf.requires_grad_()
    if hook == "tensor":
        leaf.register_hook(_bend)
    elif hook == "post":
        leaf.register_post_accumulate_grad_hook(_halve)
    elif hook:
        node: Any = torch.autograd.graph.get_gradient_edge(leaf).node
        if hook == "before":
            node.register_prehook(lambda gradients: (_bend(gradients[0]),))
        else:
            leaf.register_hook(lambda gradient: _bend(gradient, torch.sin))
            node.register_hook(lambda made, gradients: None)
        leaf.node = node  # type: ignore[attr-defined]
    return leaf


def _bend(gradient: Tensor | None, by: Callable[[Tensor], Tensor] = torch.tanh) -> Tensor | None:
    """A hook gets None if a custom function has returned None for the gradient."""
    return None if gradient is None else by(gradient)


def _halve(leaf: Tensor) -> None:
    assert leaf.grad is not None
    leaf.grad = leaf.grad / 2


def make_table(number: int) -> Tensor:
    """Table ``number``, the same wherever it is made."""
    random = torch.Generator().manual_seed(300 + number)
    return (torch.rand(3, SIDE, generator=random, dtype=torch.float64) - 0.5).requires_grad_()


def make_layer(number: int) -> torch.nn.Module:
    """Module ``number``, the same wherever it is made."""
    module = torch.nn.Sequential(torch.nn.Linear(SIDE, SIDE, dtype=torch.float64), torch.nn.Tanh())
    with torch.no_grad():
        module[0].weight.copy_(make_leaf(100 + number))
        module[0].bias.copy_(make_leaf(200 + number)[0])
    return module


def leaves_of(holder: Tensor | torch.nn.Module) -> list[Tensor]:
    """The tensors that gradients are wanted for."""
    return [holder] if isinstance(holder, Tensor) else list(holder.parameters())


Gradients = list[Tensor | None]


# ---- in this process ------------------------------------------------------------------------------------


class _Here:
    """One process, plain torch: the oracle. Calls are calls, and nothing is done in place."""

    in_place = False

    def __init__(self, program: Program) -> None:
        self.leaves = [make_leaf(i, _hook(program, i)) for i in range(len(program.leaves))]
        self.layers = [make_layer(i) for i in range(len(program.layers))]
        self.tables = [make_table(i) for i in range(len(program.tables))]

    def leaf(self, number: int) -> tuple[Tensor, bool]:
        return self.leaves[number % len(self.leaves)], False

    def table(self, number: int) -> Tensor | None:
        return self.tables[number % len(self.tables)] if self.tables else None

    def layer(self, step: Layer, x: Tensor) -> Get | None:
        if not self.layers:
            return None
        y = self.layers[step.number % len(self.layers)](x)
        return lambda: y

    def call(self, step: Call, args: list[Tensor]) -> tuple[list[Get], bool]:
        returned = run_body(step.body, self, _there(args, False))
        if step.quiet:  # what comes back as it went is a tensor with its history here
            returned = [t.detach() for t in returned]
        return [lambda t=t: t for t in returned], False  # type: ignore[misc]

    def group_call(self, step: GroupCall, args: list[Tensor]) -> list[Get]:
        made: list[Tensor] = []
        for member in range(len(step.to)):
            made += run_body(step.body, self, _there([args[i] for i in step.args_of(member)], False))
        return [lambda t=t: t for t in made]  # type: ignore[misc]

    def all_layers(self, step: AllLayers, x: Tensor) -> list[Get]:
        made = [layer(x) for layer in self.layers]
        return [lambda y=y: y for y in made]  # type: ignore[misc]


def gradients_here(program: Program) -> Gradients:
    """The gradients of all parameters, of plain torch."""
    world = _Here(program)
    for roots in (starts := _starts(program, _roots(program, world))):
        torch.autograd.backward(roots, retain_graph=roots is not starts[-1])
    return [
        leaf.grad for holder in [*world.leaves, *world.layers, *world.tables] for leaf in leaves_of(holder)
    ]


# ---- over workers ---------------------------------------------------------------------------------------


class _OverRpc:
    """The worker that the calling thread acts for, with references to what the program's workers hold."""

    in_place = True

    def __init__(self, *holders: Sequence[rpc.RRef[Any]], checkpoint: bool = False) -> None:
        self.holders = holders
        self.checkpoint = checkpoint  # calls, except those by remote; their arguments may not be changed
        self.leaves, self.layers, self.tables = holders

    def leaf(self, number: int) -> tuple[Tensor, bool]:
        rref = self.leaves[number % len(self.leaves)]
        return (rref.local_value(), False) if rref.is_owner() else (rref.to_here(), True)

    def table(self, number: int) -> Tensor | None:
        if not self.tables:
            return None
        rref = self.tables[number % len(self.tables)]
        table: Tensor = rref.local_value() if rref.is_owner() else rref.to_here()
        return table

    def layer(self, step: Layer, x: Tensor) -> Get | None:
        if not self.layers:
            return None
        rref = self.layers[step.number % len(self.layers)]
        if step.how == "sync":
            y = rref.rpc_sync().forward(x)
            return lambda: y
        if step.how == "async":
            future = rref.rpc_async().forward(x)
            return lambda: future.wait()
        made = rref.remote().forward(x)
        return lambda: made.to_here()

    def call(self, step: Call, args: list[Tensor]) -> tuple[list[Get], bool]:
        checkpoint = self.checkpoint
        sent = (step.body, self.holders, args, not step.quiet and not checkpoint, checkpoint)
        if step.how == "sync":
            if checkpoint:
                returned = rpc.checkpoint(step.to, serve, *sent)
            else:
                returned = rpc.rpc_sync(step.to, serve, args=sent)
            return [lambda t=t: t for t in _as_list(returned)], True  # type: ignore[misc]
        wait: Callable[[], Any]
        if step.how == "async":
            future = (
                rpc.checkpoint_async(step.to, serve, *sent)
                if checkpoint
                else rpc.rpc_async(step.to, serve, args=sent)
            )
            wait, received = future.wait, True
        else:
            rref = rpc.remote(step.to, serve, args=sent)
            wait, received = rref.to_here, not rref.is_owner()
        once: list[list[Tensor]] = []

        def get(i: int) -> Tensor:
            if not once:
                once.append(_as_list(wait()))
            return once[0][i]

        return [lambda i=i: get(i) for i in range(len(step.body.returns))], received  # type: ignore[misc]

    def group_call(self, step: GroupCall, args: list[Tensor]) -> list[Get]:
        group, number = rpc.group(step.to), len(step.body.returns)
        sent = (step.body, self.holders, args, True, False)
        each = [
            (step.body, self.holders, [args[i] for i in step.args_of(member)], True, False)
            for member in range(len(step.to))
        ]
        wait: Callable[[], list[Any]]
        if step.how == "sync":
            returned = group.call(serve, sent)
            wait = lambda: returned  # noqa: E731
        elif step.how == "map":
            mapped = group.map(serve, each)
            wait = lambda: mapped  # noqa: E731
        elif step.how == "async":
            wait = group.call_async(serve, sent).wait
        elif step.how == "map_async":
            wait = group.map_async(serve, each).wait
        else:
            wait = group.remote(serve, sent).to_here
        return _when_asked(wait, len(step.to), number)

    def all_layers(self, step: AllLayers, x: Tensor) -> list[Get]:
        layers: rpc.RRefGroup[Any] = rpc.RRefGroup(self.layers)
        if not layers:
            return []
        wait: Callable[[], list[Any]]
        if step.how == "sync":
            returned = layers.rpc_sync().forward(x)
            wait = lambda: returned  # noqa: E731
        elif step.how == "async":
            wait = layers.rpc_async().forward(x).wait
        else:
            wait = layers.remote().forward(x).to_here
        return _when_asked(wait, len(layers), 1)


def _when_asked(wait: Callable[[], list[Any]], members: int, number: int) -> list[Get]:
    """What ``wait`` returns for each of the members: ``number`` tensors, one after another."""
    once: list[list[Tensor]] = []

    def get(i: int) -> Tensor:
        if not once:
            once.append([tensor for returned in wait() for tensor in _as_list(returned)])
        return once[0][i]

    return [lambda i=i: get(i) for i in range(members * number)]  # type: ignore[misc]


def serve(
    body: Body, holders: Any, args: list[Tensor], recorded: bool, checkpoint: bool
) -> Tensor | tuple[Tensor, ...]:
    """Runs where a call goes to. Tensors of one that was not recorded are leaves: nothing in place there."""
    returned = run_body(body, _OverRpc(*holders, checkpoint=checkpoint), _there(args, recorded))
    return returned[0] if len(returned) == 1 else tuple(returned)


def _as_list(returned: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [returned] if isinstance(returned, Tensor) else list(returned)


def gradients_of(context_id: int, holder: rpc.RRef[Any]) -> Gradients:
    """Runs where parameters live: their gradients in a context."""
    gradients = get_gradients(context_id)
    return [gradients.get(leaf) for leaf in leaves_of(holder.local_value())]


def gradients_by_checkpoints(program: Program, mode: str = "auto") -> Gradients:
    """As :func:`gradients_over_rpc`, by checkpointed calls."""
    return gradients_over_rpc(program, mode, True)


def gradients_over_rpc(program: Program, mode: str = "auto", checkpoint: bool = False) -> Gradients:
    """The gradients of all parameters, of zmqgrad. To be called as the program's driver.

    Where the program runs in several contexts at a time, all have the same gradients.
    """
    holders = _holders(program)
    found = at_once(program.contexts, lambda _: _in_a_context(program, holders, mode, checkpoint))
    for other in found[1:]:
        assert_same(other, found[0])
    return found[0]


def _holders(program: Program) -> list[list[rpc.RRef[Any]]]:
    return [
        [rpc.remote(home, make_leaf, args=(i, _hook(program, i))) for i, home in enumerate(program.leaves)],
        [rpc.remote(home, make_layer, args=(i,)) for i, home in enumerate(program.layers)],
        [rpc.remote(home, make_table, args=(i,)) for i, home in enumerate(program.tables)],
    ]


def _all_gradients(context_id: int, holders: list[list[rpc.RRef[Any]]]) -> Gradients:
    asked = [rpc.rpc_async(r.owner(), gradients_of, (context_id, r)) for some in holders for r in some]
    return [gradient for answer in asked for gradient in answer.wait()]


def _hook(program: Program, leaf: int) -> str:
    return program.leaf_hooks[leaf] if program.leaf_hooks else ""


def _in_a_context(
    program: Program, holders: list[list[rpc.RRef[Any]]], mode: str, checkpoint: bool = False
) -> Gradients:
    with context() as context_id:
        starts = _starts(program, _roots(program, _OverRpc(*holders, checkpoint=checkpoint)))

        def differentiate(i: int) -> None:
            last = i == len(starts) - 1 and not program.at_once
            backward(context_id, starts[i], retain_graph=not last, mode=mode)

        if program.at_once:
            at_once(len(starts), differentiate)
        else:
            for i in range(len(starts)):
                differentiate(i)
        return _all_gradients(context_id, holders)


Grad = Callable[[Sequence[Tensor], Sequence[Any]], Sequence[Tensor | None]]
"""Gives the gradients of roots with respect to parameters, which may be used or not, with their history."""


def _higher(roots: Sequence[Tensor], leaves: Sequence[Any], grad: Grad) -> tuple[Gradients, list[Tensor]]:
    """First and second derivatives, and what third ones begin with."""
    found: Gradients = []
    for _ in range(2):
        if roots:
            gradients = grad(roots, leaves)
            found += gradients
            roots = [(g * g).sum() for g in gradients if g is not None and g.requires_grad]
    return found, list(roots)


def higher_here(program: Program) -> Gradients:
    """The first and second derivatives by the leaves, and the third ones by all parameters, of torch."""
    world = _Here(program)

    def grad(roots: Sequence[Tensor], leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return torch.autograd.grad(roots, leaves, create_graph=True, allow_unused=True)

    found, roots = _higher(_roots(program, world), world.leaves, grad)
    if roots:
        torch.autograd.backward(roots)
    holders = [*world.leaves, *world.layers, *world.tables]
    return [*found, *(leaf.grad for holder in holders for leaf in leaves_of(holder))]


def higher_over_rpc(program: Program, mode: str = "auto") -> Gradients:
    """As :func:`higher_here`, of zmqgrad."""
    holders = _holders(program)
    with context() as context_id:

        def grad(roots: Sequence[Tensor], leaves: Sequence[Any]) -> Sequence[Tensor | None]:
            return dist_grad(context_id, roots, leaves, create_graph=True, allow_unused=True, mode=mode)

        found, roots = _higher(_roots(program, _OverRpc(*holders)), holders[0], grad)
        if roots:
            backward(context_id, roots, mode=mode)
        return [*found, *_all_gradients(context_id, holders)]


T = TypeVar("T")


def at_once(count: int, run: Callable[[int], T]) -> list[T]:
    """``run(i)`` for each ``i`` below ``count``, in threads that act as the calling one does."""
    if count == 1:
        return [run(0)]
    with ThreadPoolExecutor(max(count, 1), "at-once") as pool:
        return [f.result() for f in [pool.submit(copy_context().run, run, i) for i in range(count)]]


def assert_same(ours: Gradients, expected: Gradients) -> None:
    """Both give gradients for the same parameters, and equal ones but for the order of sums."""
    assert [g is not None for g in ours] == [g is not None for g in expected]
    for mine, its in zip(ours, expected, strict=True):
        if mine is not None and its is not None:
            assert mine.is_sparse == its.is_sparse
            mine, its = (t.to_dense() if t.is_sparse else t for t in (mine, its))
            torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-12, equal_nan=True)
