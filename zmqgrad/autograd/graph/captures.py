"""The tensors whose gradients a pass returns, as ``torch.autograd.grad`` does, instead of accumulating any.

A leaf or a received tensor is a sink of the plan, so its gradient is known once its group has run. For a
tensor in between, torch's engine returns the gradient that it passes by, after the hooks of the tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from zmqgrad.autograd.graph.plan import Edge
from zmqgrad.autograd.graph.sums import OrderedSum, Place, added
from zmqgrad.autograd.graph.undefined import reached
from zmqgrad.autograd.send_recv import Send, edge_of, edge_or_leaf
from zmqgrad.autograd.torch_internals import LEAF_NODE


class Captures:
    """The gradients of ``inputs``, which require grad, as far as the pass has produced them.

    ``all_here``: whether no other worker has inputs of the pass.
    """

    def __init__(self, inputs: Sequence[torch.Tensor] = (), all_here: bool = False) -> None:
        self._all_here = all_here
        self.leads_away = True
        """Whether gradients go to other workers, from which they may come back to an input."""
        self._edges: list[Edge] = []
        self._added: dict[Edge, OrderedSum] = {}  # by inner passes
        for tensor in inputs:
            node, number = edge_of(edge_or_leaf(tensor))[:2]
            self._edges.append((node, number))
        self._found: dict[Edge, torch.Tensor | None] = dict.fromkeys(self._edges)
        self.nodes = {node for node, _ in self._edges}
        """The nodes that receive these gradients."""
        self.ends: Collection[Any] = self.nodes if all_here and len(self.nodes) == 1 else ()
        """The nodes at which the pass stops: behind the only input there is no other."""

    def stay_here(self, sends: Iterable[Send]) -> bool:
        """Do not let the pass lead away if nothing that was sent depends on an input. Returns whether so.

        As in one process, nothing behind the inputs runs then, or is freed.
        """
        if self._all_here and not any([send.checkpoint is not None for send in sends]):
            starts = [edge_of(place)[:2] for send in sends for place in send.edges]
            self.leads_away = bool(reached(starts, (), self.nodes.__contains__))
        return not self.leads_away

    def sinks(self, edges: Collection[Edge]) -> Collection[Edge]:
        """Return those of ``edges``, out of a group, at which the pass wants gradients."""
        return edges if self.leads_away else [edge for edge in edges if edge[0] in self.nodes]

    def needs(self, edges: Iterable[Any]) -> Sequence[Any]:
        """Return ``edges`` without those to leaves that are no inputs."""
        return [edge for edge in edges if type(edge[0]) is not LEAF_NODE or edge[0] in self.nodes]

    def ways(self, nodes: Sequence[Any], ends: Collection[Edge]) -> dict[Any, list[Edge]]:
        """Return the edges out of ``nodes``, without those on no way to an input or to one of ``ends``.

        Args:
            nodes: those of a group, each before those that follow it.
            ends: the edges out of the group.

        Returns:
            For each node its ``next_functions``, with no node in place of those that are left out.
        """
        ends, lead_on = self.sinks(ends), set(self.nodes)
        found: dict[Any, list[Edge]] = {}
        for node in reversed(nodes):
            found[node] = [e if e in ends or e[0] in lead_on else (None, 0) for e in node.next_functions]
            if any([edge[0] is not None for edge in found[node]]):
                lead_on.add(node)
        return found

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
