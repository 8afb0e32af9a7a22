"""The walk over a worker's local graph at the start of a pass, and the condensed graph for its plan.

Most nodes are reached by one entry only. The walk records which entry reached a node first, and where another
entry reaches such a node: the *overlaps*. Only the nodes behind overlaps matter for scheduling. So the
condensed graph holds these, and of the *exclusive nodes* of an entry only those where it starts, with the
edges that leave them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, count, islice
from operator import itemgetter
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from zmqgrad.autograd.graph.accumulate import AccumulateMode
from zmqgrad.autograd.graph.captures import Captures
from zmqgrad.autograd.graph.hooks import has_hooks
from zmqgrad.autograd.graph.plan import Edge, Graph
from zmqgrad.autograd.send_recv import (
    RECV_NODE,
    EdgeOrLeaf,
    RecvMetadata,
    Send,
    edge_of,
    edge_or_leaf,
    recv_metadata,
)
from zmqgrad.autograd.torch_internals import LEAF_NODE

FREED_TOGETHER = 8192
"""Torch frees nodes that have Python objects, as all have after a walk, one within the other: some 40,000 of
them overflow the stack. So a node where gradients enter holds every so many of those behind it, which are
freed after it, the nearest first (a list frees its last item first)."""

_FREED_LATER = "zmqgrad_freed_later"


class GraphWalk:
    """The local graph, as seen from its entries. Entry 0 is the roots, entry *i* + 1 is ``sends[i]``.

    Nodes are torch's own objects.

    Args:
        roots: the roots of the pass, if they are on this worker.
        sends: what this worker has sent in the context.
        mode: how leaves accumulate their gradients.
        captures: what the pass returns, if no leaf accumulates; then other leaves are left out.
    """

    def __init__(
        self,
        roots: Sequence[torch.Tensor],
        sends: Sequence[Send],
        mode: AccumulateMode,
        captures: Captures | None = None,
    ) -> None:
        self.mode = mode
        self._immediate = mode is AccumulateMode.IMMEDIATE
        self._captures = captures
        self._ends: Collection[Any] = () if captures is None else captures.ends
        self.edges: dict[Any, Sequence[Any]] = {}
        """The nodes that entries reach, except leaves and recvs, with the edges out of each."""
        self.exclusive: list[dict[Any, Sequence[Any]]] = []
        """For each entry, the nodes of ``edges`` that it reached first."""
        self.recvs: dict[Any, RecvMetadata] = {}
        self.waiting_leaves: set[Any] = set()
        """Leaves, and other ends of a pass, that wait for their complete gradient."""
        self.overlaps: dict[Any, None] = {}  # ordered: gradients are added in an order that follows from it
        """Nodes where an entry met another one."""
        self.boundary: list[dict[Edge, None]] = []
        """For each entry, the edges to leaves and recvs out of its ``exclusive`` nodes."""
        self.starts: list[list[EdgeOrLeaf]] = []
        """For each entry, where its gradients enter: an edge, or a leaf that does not wait."""
        self.numbers: list[list[int]] = []
        """For each of ``starts``, how many before it are the same edge or leaf."""
        self.starts_at_leaves = False
        """Whether any of ``starts`` is a leaf."""
        self._same_starts: defaultdict[Any, Iterator[int]] = defaultdict(count)
        self.entries: list[list[Edge]] = []
        """For each entry, the edges among its ``starts``."""
        self._has_hooks = _CachedHooks().__getitem__
        self._owner: dict[Any, int] = {}  # the first entry that reached a recv or a waiting leaf
        self._enter(0, map(edge_or_leaf, roots))
        for number, send in enumerate(sends, 1):
            self._enter(number, send.edges)

    def _enter(self, number: int, places: Iterable[EdgeOrLeaf]) -> None:
        """Add entry ``number``, whose gradients enter at ``places``, and walk on from there."""
        immediate, same, ends = self._immediate, self._same_starts, self._ends
        starts: list[EdgeOrLeaf] = []
        numbers: list[int] = []
        entries: list[Edge] = []
        todo: list[Any] = []
        for place in places:
            edge = place if isinstance(place, GradientEdge) else None if immediate else edge_of(place)
            if edge is not None:
                node: Any = edge[0]
                kind = type(node)
                if kind is not LEAF_NODE or self._must_wait(number, node):
                    entry = node, edge[1]
                    entries.append(entry)
                    starts.append(edge)
                    numbers.append(next(same[entry]))
                    if not (
                        kind is LEAF_NODE
                        or (kind is RECV_NODE and self._note_recv(number, node))
                        or (ends and self._note_end(number, node))
                    ):
                        todo.append(node)
                    continue
                place = node.variable
            starts.append(place)
            numbers.append(next(same[id(place)]))
            self.starts_at_leaves = True
        self.starts.append(starts)
        self.numbers.append(numbers)
        self.entries.append(entries)
        own: dict[Any, Sequence[Any]] = {}
        boundary: dict[Edge, None] = {}
        for node in todo:
            before = len(own)
            self._walk(number, [node], own, boundary)
            if len(own) - before > FREED_TOGETHER:
                node.metadata[_FREED_LATER] = list(islice(own, before, None))[::FREED_TOGETHER][:0:-1]
        self.edges.update(own)
        self.exclusive.append(own)
        self.boundary.append(boundary)

    def _walk(
        self, number: int, todo: list[Any], own: dict[Any, Sequence[Any]], boundary: dict[Edge, None]
    ) -> None:
        known, leaf_node, recv_node = self.edges, LEAF_NODE, RECV_NODE
        needs = None if self._captures is None else self._captures.needs
        immediate, ends = self._immediate, self._ends
        while todo:
            node = todo.pop()
            while node not in own:  # this loop visits the whole graph: each dictionary access counts
                if node in known:
                    self.overlaps[node] = None
                    break
                following = node.next_functions
                own[node] = following = following if needs is None else needs(following)
                onward = None
                for edge in following:
                    target = edge[0]
                    kind = type(target)
                    if kind is leaf_node:
                        boundary[edge] = None
                        if not immediate:
                            self._must_wait(number, target)
                    elif target is None:
                        continue
                    elif (kind is recv_node and self._note_recv(number, target)) or (
                        ends and self._note_end(number, target)
                    ):
                        boundary[edge] = None
                    elif onward is None:
                        onward = target
                    else:
                        todo.append(target)
                if onward is None:
                    break
                node = onward

    def _note_recv(self, number: int, node: Any) -> bool:
        """Whether ``node``, a ``RECV_NODE`` that entry ``number`` reaches, is a recv of this package."""
        if node not in self.recvs:
            metadata = recv_metadata(node)
            if metadata is None:
                return False
            self.recvs[node] = metadata
            self._owner[node] = number
        elif self._owner[node] != number:
            self.overlaps[node] = None
        return True

    def _must_wait(self, number: int, node: Any) -> bool:
        """Whether the leaf ``node``, which entry ``number`` reaches, waits for its complete gradient."""
        if self._captures is not None:
            if node not in self._captures.nodes:
                return False
        elif self.mode is not AccumulateMode.JOINT and not self._has_hooks(node):
            return False
        self._note_waiting(number, node)
        return True

    def _note_end(self, number: int, node: Any) -> bool:
        """Whether the pass stops at ``node``, no leaf, which entry ``number`` reaches."""
        if node not in self._ends:
            return False
        self._note_waiting(number, node)
        return True

    def _note_waiting(self, number: int, node: Any) -> None:
        self.waiting_leaves.add(node)
        if self._owner.setdefault(node, number) != number:
            self.overlaps[node] = None


class _CachedHooks(dict[Any, bool]):
    """Whether the leaf of a node has hooks, which is probed once: many edges lead to a weight."""

    def __missing__(self, node: Any) -> bool:
        found = self[node] = has_hooks(node)
        return found


def condense(walk: GraphWalk) -> Graph:
    """Return the graph of a walk without most exclusive nodes."""
    shared = _shared_nodes(walk) if walk.overlaps else {}
    boundary = _exits(walk, shared) if shared else walk.boundary
    following: dict[Any, Collection[Edge]] = {}
    for edges, own, leaving in zip(walk.entries, walk.exclusive, boundary, strict=True):
        for node, _ in edges:
            if node in own and node not in shared:
                following[node] = leaving  # one node represents all exclusive nodes of its entry
                break
    for node in shared:
        following[node] = [edge for edge in walk.edges.get(node, ()) if edge[0] is not None]
    waiting = walk.waiting_leaves
    targets = set(map(itemgetter(0), chain.from_iterable(following.values())))
    return Graph(
        following,
        leaves=targets.difference(shared, walk.recvs, waiting),
        sinks={**walk.recvs, **dict.fromkeys(waiting)},
        joint_sinks=waiting if walk.mode is AccumulateMode.JOINT else (),
    )


def _exits(walk: GraphWalk, shared: Collection[Any]) -> list[dict[Edge, None]]:
    """Return for each entry the edges from its exclusive nodes to leaves, recvs and shared nodes."""
    outside = {node for boundary in walk.boundary for node, _ in boundary}.union(shared)
    return [
        dict.fromkeys(
            [
                edge
                for node, following in exclusive.items()
                for edge in following
                if edge[0] in outside and node not in shared
            ]
        )
        for exclusive in walk.exclusive
    ]


def _shared_nodes(walk: GraphWalk) -> dict[Any, None]:
    """Return the nodes that several entries reach: the overlaps, and the nodes behind them."""
    edges, waiting = walk.edges, walk.waiting_leaves
    shared = dict(walk.overlaps)
    todo = list(shared)
    while todo:
        for node, _ in edges.get(todo.pop(), ()):
            if node not in shared and (node in edges or node in walk.recvs or node in waiting):
                shared[node] = None
                todo.append(node)
    return shared
