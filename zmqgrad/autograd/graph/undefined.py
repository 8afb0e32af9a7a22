"""Gradients that a part of the graph was asked for and did not give.

A backward function may give None for an input. What lies before that input runs all the same, as in one
process: torch's own nodes make nothing of nothing, but a ``torch.autograd.Function`` is called, with zeros
unless it has said ``set_materialize_grads(False)``. So an edge that was reached and at which nothing came
out is told apart from one that was not reached: the first is :data:`UNDEFINED`, the second None. On its way
to another worker it stays so.

The engine takes no undefined gradients from outside. Where such a function waits for one it is given a
stand-in, which a hook takes away before the function runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from zmqgrad.autograd.graph.hooks import our_hook

UNDEFINED = torch.empty(0, device="cpu")
"""Stands for a gradient that is there and nothing; told by ``is``. It never gets into the engine."""

Place = tuple[Any, int]
"""A node, and the number of an output of it."""


def calls_user(node: Any) -> bool:
    """Is ``node`` a function of Python, which is called with whatever comes?"""
    return isinstance(node, torch._C._FunctionBase)


def reached(
    starts: Iterable[GradientEdge], ends: Collection[Place], stop: Callable[[Any], bool] | None = None
) -> set[Place]:
    """Those of ``ends`` that one comes to from ``starts``, without going through any of them.

    With ``stop``: instead, where one comes to a node of that kind first.
    """
    found: set[Place] = set()
    seen: set[Any] = set()
    todo: list[Place] = [(edge[0], edge[1]) for edge in starts]
    while todo:
        place = todo.pop()
        node = place[0]
        if place in ends:
            if stop is None:
                found.add(place)
        elif stop is not None and stop(node):
            found.add(place)
        elif node is not None and node not in seen:
            seen.add(node)
            todo += [(following, number) for following, number in node.next_functions]
    return found


@contextmanager
def stood_in_for(places: Iterable[Place]) -> Iterator[Mapping[GradientEdge, torch.Tensor]]:
    """Inside it, what the engine may be given at ``places`` of functions to have them called with nothing."""
    given: dict[GradientEdge, torch.Tensor] = {}
    with ExitStack() as stack:
        for node, number in places:
            form = node._input_metadata[number]
            given[GradientEdge(node, number)] = torch.zeros(form.shape, dtype=form.dtype, device=form.device)
        ours = {id(tensor) for tensor in given.values()}

        def take_away(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
            return tuple(None if id(g) in ours else g for g in gradients)

        for node in {edge[0] for edge in given}:
            stack.enter_context(our_hook(node.register_prehook, take_away))
        yield given
