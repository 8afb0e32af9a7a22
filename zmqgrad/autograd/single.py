"""One node of the autograd graph, run by itself, as the engine would run it.

Used where the engine cannot be told to stop (:mod:`~zmqgrad.autograd.border`). What the engine does around
a node is done here as well: hooks of its tensors run once, on the whole gradient; what comes out is summed
to the shape, and cast to the type, that the next node was made with; a Python function gets zeros for
gradients that do not exist. Hooks of the node itself (``Node.register_hook``) do not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

Gradient = torch.Tensor | None


def run_node(node: Any, gradients: Sequence[Gradient]) -> list[Gradient]:
    """What ``node`` makes of the ``gradients`` of its outputs: one for each of ``node.next_functions``."""
    if all(g is None for g in gradients):
        return [None] * len(node.next_functions)
    with torch.no_grad():
        gradients = [_through_hooks(node, i, g) for i, g in enumerate(gradients)]
        given = _run_python(node, gradients) if isinstance(node, BackwardCFunction) else node(*gradients)
        if not isinstance(given, (tuple, list)):
            given = (given,)
        return [
            None if following is None or g is None else _fit(g, following._input_metadata[number])
            for g, (following, number) in zip(given, node.next_functions, strict=True)
        ]


def outputs_of(node: Any) -> int:
    """How many outputs ``node`` has, each with a gradient of its own."""
    return len(node._input_metadata)


def _through_hooks(node: Any, number: int, gradient: Gradient) -> Gradient:
    """``gradient``, as the hooks of the tensor leave it: the engine runs them where it hands it back."""
    if gradient is None:
        return None
    edge = GradientEdge(node, number)
    (seen,) = torch.autograd.grad((edge,), (edge,), (gradient,), retain_graph=True, allow_unused=True)
    return seen


def _run_python(node: Any, gradients: Sequence[Gradient]) -> list[Gradient]:
    """A ``torch.autograd.Function``: its backward answers for each argument of forward, tensor or not."""
    filled = [
        torch.zeros(tuple(m.shape), dtype=m.dtype, device=m.device) if g is None else g
        for g, m in zip(gradients, node._input_metadata, strict=True)
    ]
    answers = node.apply(*filled)
    if not isinstance(answers, (tuple, list)):
        answers = (answers,)
    wanted = iter([a for a, needed in zip(answers, node.needs_input_grad, strict=False) if needed])
    return [None if following is None else next(wanted) for following, _ in node.next_functions]


def _fit(gradient: torch.Tensor, made_with: Any) -> torch.Tensor:
    """``gradient`` in the shape and type of the tensor that it is for."""
    if tuple(gradient.shape) != tuple(made_with.shape):
        gradient = gradient.sum_to_size(tuple(made_with.shape))
    if gradient.is_complex() and not made_with.dtype.is_complex:
        gradient = gradient.real
    return gradient.to(made_with.dtype) if gradient.dtype != made_with.dtype else gradient
