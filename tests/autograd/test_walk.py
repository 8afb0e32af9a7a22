"""The survey of a graph against reachability by search, and what of the graph is left for a plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zmqgrad.autograd.graph.accumulate import AccumulateMode
from zmqgrad.autograd.graph.plan import Plan
from zmqgrad.autograd.graph.walk import GraphWalk, condense
from zmqgrad.autograd.send_recv import Send, edge_of, edge_or_leaf, record_send
from zmqgrad.autograd.torch_internals import LEAF_NODE

STEPS: list[Callable[[Tensor, Tensor], list[Tensor]]] = [
    lambda a, b: [a * b],
    lambda a, b: [a.sin()],
    lambda a, b: [t.expand(2) for t in (a + b).split(1)],
]


def drawn(rng: random.Random) -> tuple[list[Tensor], list[Send]]:
    """A tensor made of others, of which a few have been sent."""
    made = [torch.ones(2, requires_grad=True) for _ in range(3)]
    for _ in range(rng.randrange(1, 40)):
        a, b = rng.choice(made[-8:]), rng.choice(made)
        made += rng.choice(STEPS)(a, b)
    sends = [
        record_send(i + 1, 1, rng.choices(made, k=rng.randrange(1, 4)), "f") for i in range(rng.randrange(5))
    ]
    root = made[-1].sum()
    return [root], sends


def reached_from(starts: Any) -> set[Any]:
    seen: set[Any] = set()
    todo = [edge.node for edge in starts]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [n for n, _ in node.next_functions]
    return seen


@pytest.mark.parametrize("seed", range(100))
def test_entries_wait_for_one_another_exactly_where_several_come(seed: int) -> None:
    roots, sends = drawn(random.Random(seed))
    edges = [[edge_of(edge_or_leaf(root)) for root in roots], *(map(edge_of, send.edges) for send in sends)]
    reach = [reached_from(starts) for starts in edges]
    inner = {node for nodes in reach for node in nodes if type(node) is not LEAF_NODE}
    walk = GraphWalk(roots, sends, AccumulateMode.IMMEDIATE)
    counts = {node: [i for i, nodes in enumerate(reach) if node in nodes] for node in inner}
    assert bool(walk.overlaps) == any(len(entries) > 1 for entries in counts.values())
    graph = condense(walk)
    plan = Plan(graph, walk.entries)
    kept = {*graph.following, *(node for edges in walk.entries for node, _ in edges)}
    for node in kept:
        assert plan.entries_of(plan.group_of(node)) == counts[node]
    assert {node for node, by in counts.items() if len(by) > 1} <= kept
    # Each group leaves by the edges that lead from its nodes to others, and runs its own nodes.
    for group in plan.groups:
        its = {node for node, by in counts.items() if by == plan.entries_of(group)}
        leaving = {(n, i) for node in its for n, i in node.next_functions if n is not None and n not in its}
        assert set(group.outgoing) == leaving
        assert all(plan.belongs_to(node, group) for node in its)
        assert not any(plan.belongs_to(node, group) for node, _ in leaving)
    assert sorted(map(plan.entries_of, plan.groups)) == sorted(map(list, set(map(tuple, counts.values()))))


def test_exclusive_nodes_are_left_out() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 1
    sends = [record_send(1, 1, [y], "f")]
    for _ in range(1000):
        y = y.sin()
    graph = condense(GraphWalk([y.sum()], sends, AccumulateMode.IMMEDIATE))
    assert len(graph.following) == 2  # the sum and the product
    assert len(graph.leaves) == 1
