"""The tensors whose gradients a pass returns, as ``torch.autograd.grad`` does, instead of accumulating any.

A leaf or a received tensor is a sink of the plan, so its gradient is known once its group has run. For a
tensor in between, torch's engine returns the gradient that it passes by, after the hooks of the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from zmqgrad.autograd.graph.plan import Edge
from zmqgrad.autograd.graph.sums import OrderedSum, Place, added
from zmqgrad.autograd.send_recv import edge_of, edge_or_leaf
from zmqgrad.autograd.torch_internals import LEAF_NODE


class Captures:
    """The gradients of ``inputs``, which require grad, as far as the pass has produced them."""

    def __init__(self, inputs: Sequence[torch.Tensor] = ()) -> None:
        self._edges: list[Edge] = []
        self._added: dict[Edge, OrderedSum] = {}  # by inner passes
        for tensor in inputs:
            node, number = edge_of(edge_or_leaf(tensor))[:2]
            self._edges.append((node, number))
        self._found: dict[Edge, torch.Tensor | None] = dict.fromkeys(self._edges)
        self.nodes = {node for node, _ in self._edges}
        """The nodes that receive these gradients."""

    def needs(self, edges: Iterable[Any]) -> Sequence[Any]:
        """Return ``edges`` without those to leaves that are no inputs."""
        return [edge for edge in edges if type(edge[0]) is not LEAF_NODE or edge[0] in self.nodes]

    def edges_at(self, node: Any) -> list[Edge]:
        """Return the edges to ``node`` whose gradients are returned."""
        return [edge for edge in self._found if edge[0] is node]

    def note(self, edge: Edge, gradient: torch.Tensor) -> None:
        """Keep the complete gradient at ``edge``, if it is to be returned."""
        if edge in self._found:
            self._found[edge] = gradient

    def gradients(self) -> list[torch.Tensor | None]:
        """Return the gradient of each input; None where there is none."""
        return [self._sum(edge) for edge in self._edges]

    def _sum(self, edge: Edge) -> torch.Tensor | None:
        found, parts = self._found[edge], self._added.get(edge)
        inner = None if parts is None else parts.total()
        return inner if found is None else found if inner is None else added(found, inner)

    def again(self) -> Captures:
        """Return captures of the same inputs, for an inner pass."""
        inner = Captures()
        inner._edges, inner.nodes = self._edges, self.nodes
        inner._found = dict.fromkeys(self._edges)
        return inner

    def merge(self, inner: Captures, place: Place) -> None:
        """Add what an inner pass has found, for the call at ``place``."""
        for edge, gradient in inner._found.items():
            if gradient is not None:
                self._added.setdefault(edge, OrderedSum()).add(place, gradient)
