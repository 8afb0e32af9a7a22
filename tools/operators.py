"""Compares the outputs and gradients of torch's operators across a call with those of one process, exactly.

    python -m tools.operators [--every N] [--samples N] [NAME ...]

Torch lists its operators, with sample inputs, for its own tests (``op_db``). Each is called on another worker
with tensors that were sent, and applied here to tensors that another worker has returned.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db

from zmqgrad import rpc
from zmqgrad.autograd import backward, context, get_gradients
from zmqgrad.testing import Cluster, cluster

Outputs = list[Tensor]
Gradients = list[Tensor | None]


LEFT_OUT = {"as_strided.partial_views": "reads memory around its tensor, which is not sent"}
"""Operators whose samples cannot be sent, by name."""

UNREPEATABLE = {"linalg.lstsq": 1e-12, "linalg.lstsq.grad_oriented": 1e-12}
"""Operators that differ in one process, by where their memory lies; each with a tolerance."""


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}".rstrip(".")


def differentiable() -> list[Any]:
    """The operators with gradients in float64 or float32."""
    return [
        op
        for op in op_db
        if name_of(op) not in LEFT_OUT
        and op.supports_autograd
        and {torch.float64, torch.float32} & op.supported_backward_dtypes("cpu")
    ]


class Case:
    """One sample of an operator: its arguments, of which the ``leaves`` require grad."""

    def __init__(self, op: Any, sample: Any) -> None:
        self._op = op
        arguments, self._spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self._arguments = [t.detach() if isinstance(t, Tensor) else t for t in arguments]
        self._differentiable = [
            i for i, t in enumerate(arguments) if isinstance(t, Tensor) and t.requires_grad
        ]
        self._process: Callable[[Any], Any] = sample.output_process_fn_grad

    def leaves(self) -> list[Tensor]:
        """New leaves, with the strides of the sample's."""
        return [self._arguments[i].clone().requires_grad_() for i in self._differentiable]

    def apply(self, leaves: Sequence[Tensor]) -> Outputs:
        """The outputs of the operator that have a history."""
        arguments = [t.clone() if isinstance(t, Tensor) else t for t in self._arguments]
        for i, leaf in zip(self._differentiable, leaves, strict=True):
            arguments[i] = leaf
        first, args, kwargs = pytree.tree_unflatten(arguments, self._spec)
        torch.manual_seed(7)  # some operators draw random numbers
        outputs = pytree.tree_leaves(self._process(self._op.op(first, *args, **kwargs)))
        return [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]


def loss_of(outputs: Outputs) -> Tensor:
    """A scalar in which every element has a weight of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for t in outputs:
        t = t.to_dense() if t.layout is not torch.strided else t
        t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
        weights = torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype).reshape(t.shape)
        total = total + (t * weights).sum()
    return total


HELD: dict[str, Any] = {}
"""What the workers, all of this process, find without its being sent."""


def apply_there(leaves: list[Tensor]) -> Outputs:
    outputs: Outputs = HELD["case"].apply(leaves)
    return outputs


def return_leaves() -> list[Tensor]:
    leaves: list[Tensor] = HELD["leaves"]
    return leaves


def in_one_process(case: Case) -> tuple[Outputs, Gradients]:
    leaves = case.leaves()
    outputs = case.apply(leaves)
    loss_of(outputs).backward()  # type: ignore[no-untyped-call]
    return outputs, [leaf.grad for leaf in leaves]


def called_remotely(case: Case, c: Cluster) -> tuple[Outputs, Gradients]:
    HELD["case"], leaves = case, case.leaves()
    with context() as ctx:
        outputs = rpc.rpc_sync(1, apply_there, (leaves,))
        backward(ctx, [loss_of(outputs)])
        return outputs, [get_gradients(ctx).get(leaf) for leaf in leaves]


def applied_to_received(case: Case, c: Cluster) -> tuple[Outputs, Gradients]:
    HELD["leaves"] = leaves = case.leaves()
    with context() as ctx:
        outputs = case.apply(rpc.rpc_sync(1, return_leaves))
        backward(ctx, [loss_of(outputs)])
        with c.acting(1):
            return outputs, [get_gradients(ctx).get(leaf) for leaf in leaves]


def difference(
    ours: Sequence[Tensor | None], expected: Sequence[Tensor | None], tolerance: float = 0.0
) -> str:
    """How the two differ in a value, a type or a shape; empty if they do not."""
    for i, (mine, its) in enumerate(zip(ours, expected, strict=True)):
        if (mine is None) != (its is None):
            return f"{i}: {mine} instead of {its}"
        if mine is None or its is None:
            continue
        if (mine.layout, mine.dtype, mine.shape) != (its.layout, its.dtype, its.shape):
            return f"{i}: {mine.layout, mine.dtype, mine.shape}, not {its.layout, its.dtype, its.shape}"
        mine, its = (t.detach() for t in (mine, its))
        mine, its = (t.to_dense() if t.layout is not torch.strided else t for t in (mine, its))
        if not torch.allclose(mine, its, rtol=tolerance, atol=tolerance, equal_nan=True):
            return f"{i}: they differ by up to {(mine - its).abs().max()}"
    return ""


def cases(op: Any, count: int) -> Iterator[Case]:
    """The first ``count`` samples of ``op`` whose outputs have a history."""
    dtype = torch.float64 if torch.float64 in op.supported_backward_dtypes("cpu") else torch.float32
    torch.manual_seed(1)
    made = (Case(op, sample) for sample in op.sample_inputs("cpu", dtype, requires_grad=True))
    return itertools.islice((case for case in made if case.apply(case.leaves())), count)


def compare(op: Any, count: int, c: Cluster) -> list[str]:
    """Compare ``op`` on up to ``count`` samples. Returns what differs, or why nothing could be compared."""
    wrong: list[str] = []
    number, tolerance = 0, UNREPEATABLE.get(name_of(op), 0.0)
    for number, case in enumerate(cases(op, count), 1):
        outputs, gradients = in_one_process(case)
        expected = [*outputs, *gradients]
        for way in (called_remotely, applied_to_received):
            try:
                outputs, gradients = way(case, c)
                differs = difference([*outputs, *gradients], expected, tolerance)
            except Exception as e:  # an operator may raise anything
                differs = f"{type(e).__name__}: {e}"
            if differs:
                wrong.append(f"sample {number}, {way.__name__}: {differs}")
    return wrong if number else ["no sample has a history"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns 1 if any operator is not exact."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="operators; all if none is named")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take one in N operators")
    parser.add_argument("--samples", type=int, default=8, metavar="N", help="samples of each, at most")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # of operators that are deprecated
    seen: Counter[str] = Counter()
    with cluster(2) as c:
        for op in differentiable()[:: chosen.every]:
            if chosen.names and op.name not in chosen.names:
                continue
            wrong = compare(op, chosen.samples, c)
            seen["not exact" if wrong else "exact"] += 1
            for line in wrong:
                print(f"{name_of(op)}: {line}", flush=True)
    print(f"{seen['exact']} operators exact, {seen['not exact']} not")
    return 1 if seen["not exact"] or not seen else 0


if __name__ == "__main__":
    sys.exit(main())
