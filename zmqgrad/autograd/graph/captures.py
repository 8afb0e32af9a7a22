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
from zmqgrad.autograd.send_recv import (
    RECV_NODE,
    EdgeOrLeaf,
    RecvMetadata,
    Send,
    edge_of,
    edge_or_leaf,
    recv_metadata,
)

_NEVER = 1 << 64
"""More than any autograd id."""


def _edges(places: Iterable[EdgeOrLeaf]) -> Iterable[Edge]:
    return [edge_of(place)[:2] for place in places]


class Captures:
    """The gradients of ``inputs``, which require grad, as far as the pass has produced them.

    ``all_here``: whether no other worker has inputs of the pass.
    """

    def __init__(self, inputs: Sequence[torch.Tensor] = (), all_here: bool = False) -> None:
        self._all_here = all_here
        self._back_from = 0  # the first send through which gradients may come back to an input
        self._context_id = 0
        self._leading: set[Any] = set()
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

    def find_ways(
        self, roots: Iterable[torch.Tensor], sends: Sequence[Send], context_id: int, repeats: bool
    ) -> Sequence[Send]:
        """Find what leads to an input; nothing else runs then, or is freed, as in one process.

        What arrived here before the first tensor was sent that an input lies behind does not depend on that:
        gradients that leave there do not come back.

        Args:
            roots: the roots of the pass, if they are on this worker.
            sends: what this worker has sent.
            context_id: of the pass.
            repeats: whether the pass may make calls again.

        Returns:
            The sends through which gradients may come back: all, or none.
        """
        self._context_id = context_id
        if self._all_here and not repeats and not any([send.checkpoint is not None for send in sends]):
            seen: set[Any] = set()
            self._back_from = next(
                (
                    send.autograd_id
                    for send in sorted(sends)
                    if reached(_edges(send.edges), (), self.nodes.__contains__, seen)
                ),
                _NEVER,
            )
            if self._back_from == _NEVER:
                sends = ()
        before: dict[Any, list[Any]] = {}
        todo = [
            node
            for places in (map(edge_or_leaf, roots), *[s.edges for s in sends])
            for node, _ in _edges(places)
        ]
        found = dict.fromkeys(todo)
        while todo:
            node = todo.pop()
            for following, _ in () if node in self.ends else node.next_functions:
                if following is not None:
                    if following not in found:
                        found[following] = None
                        todo.append(following)
                    before.setdefault(following, []).append(node)
        todo = [node for node in found if node in self.nodes or self._leads_away(node)]
        while todo:
            node = todo.pop()
            if node not in self._leading:
                self._leading.add(node)
                todo += before.get(node, ())
        return sends

    def _leads_away(self, node: Any) -> bool:
        recv = recv_metadata(node) if type(node) is RECV_NODE else None
        return recv is not None and self.leads_on(recv)

    def leads_on(self, recv: RecvMetadata) -> bool:
        """Whether gradients that leave at ``recv`` may come to an input."""
        is_other = recv.arguments_of is not None or recv.context_id != self._context_id
        return self._back_from < _NEVER and (is_other or recv.sent_before >= self._back_from)

    def needs(self, edges: Iterable[Any]) -> Sequence[Any]:
        """Return those of ``edges`` that lead to an input."""
        return [edge for edge in edges if edge[0] in self._leading]

    def way(self, node: Any) -> Sequence[Edge]:
        """Return the ``next_functions`` of ``node``, with no node in place of those on no way to an input."""
        return [edge if edge[0] in self._leading else (None, 0) for edge in node.next_functions]

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
