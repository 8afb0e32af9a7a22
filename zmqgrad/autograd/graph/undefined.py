"""Undefined gradients: an edge was reached, but no gradient was produced there.

A backward function may return None for an input. As in one process, the nodes before that input run
nevertheless: torch's own nodes return nothing, but a ``torch.autograd.Function`` is called, with zeros unless
it has called ``set_materialize_grads(False)``. So :data:`UNDEFINED` marks an edge that was reached without a
gradient, and None an edge that was not reached. Messages between workers keep the difference.

The engine accepts no undefined gradients from outside. A function that expects one gets a placeholder
instead, which a hook removes before the function runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from zmqgrad.autograd.graph.hooks import internal_hook
from zmqgrad.autograd.graph.plan import Edge
from zmqgrad.autograd.torch_internals import zeros_for

UNDEFINED = torch.empty(0, device="cpu")
"""Sentinel for a gradient that was produced but is None. Compare with `is`. It never enters the engine."""


def reached(
    starts: Iterable[Edge],
    ends: Collection[Edge],
    stop: Callable[[Any], bool] | None = None,
    seen: set[Any] | None = None,
) -> set[Edge]:
    """Return those of ``ends`` that ``starts`` lead to; the search does not go beyond any of ``ends``.

    With ``stop``, return instead the first edges that lead to nodes for which ``stop`` holds. ``seen``: nodes
    that have been searched, to which this one adds.
    """
    found: set[Edge] = set()
    seen = set() if seen is None else seen
    todo = list(starts)
    while todo:
        edge = todo.pop()
        node = edge[0]
        if edge in ends:
            if stop is None:
                found.add(edge)
        elif stop is not None and stop(node):
            found.add(edge)
        elif node is not None and node not in seen:
            seen.add(node)
            todo += node.next_functions
    return found


@contextmanager
def zero_placeholders(edges: Iterable[Edge]) -> Iterator[Mapping[Edge, torch.Tensor]]:
    """Make zeros for edges into Python functions, which those functions receive as undefined gradients."""
    placeholders: dict[Edge, torch.Tensor] = {}
    with ExitStack() as stack:
        for node, number in edges:
            placeholders[node, number] = zeros_for(node, number)
        ours = {id(tensor) for tensor in placeholders.values()}

        def remove(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
            return tuple(None if id(g) in ours else g for g in gradients)

        for node in {node for node, _ in placeholders}:
            stack.enter_context(internal_hook(node.register_prehook, remove))
        yield placeholders
