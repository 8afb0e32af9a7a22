"""The survey of a graph against reachability by search, and what of the graph is left for a plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zmqgrad.autograd.functions import LEAF_NODE, record_send
from zmqgrad.autograd.graph.leaves import Leaves
from zmqgrad.autograd.graph.plan import Plan, bits
from zmqgrad.autograd.passes.local_pass import Entries
from zmqgrad.autograd.passes.survey import Reduced, Survey

STEPS: list[Callable[[Tensor, Tensor], list[Tensor]]] = [
    lambda a, b: [a * b],
    lambda a, b: [a.sin()],
    lambda a, b: [t.expand(2) for t in (a + b).split(1)],
]


def drawn(rng: random.Random) -> Entries:
    """A tensor made of others, of which a few have been sent."""
    made = [torch.ones(2, requires_grad=True) for _ in range(3)]
    for _ in range(rng.randrange(1, 40)):
        a, b = rng.choice(made[-8:]), rng.choice(made)
        made += rng.choice(STEPS)(a, b)
    sends = [
        record_send(i + 1, 1, rng.choices(made, k=rng.randrange(1, 4)), "f") for i in range(rng.randrange(5))
    ]
    root = made[-1].sum()
    return Entries([root], sends)


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
    entries = drawn(random.Random(seed))
    reach = [reached_from(starts) for starts in entries.edges()]
    inner = {node for nodes in reach for node in nodes if type(node) is not LEAF_NODE}
    survey = Survey(entries, Leaves.PLAIN)
    counts = {node: [i for i, nodes in enumerate(reach) if node in nodes] for node in inner}
    assert survey.met == any(len(entries) > 1 for entries in counts.values())
    reduced = Reduced(survey)
    plan = Plan(reduced.graph, reduced.entries)
    for node, number in reduced.numbers.items():
        if node in inner:
            assert list(bits(plan.entries_of(number))) == counts[node]
    assert {node for node, by in counts.items() if len(by) > 1} <= reduced.numbers.keys()
    # Each group leaves by the edges that lead from its nodes to others.
    for group in plan.groups.values():
        its = {node for node, by in counts.items() if by == list(bits(group.entries))}
        leaving = {(n, i) for node in its for n, i in node.next_functions if n is not None and n not in its}
        sent_leaves = {(reduced.nodes[n], i) for n, i in group.incoming if n in reduced.graph.leaves}
        assert {(reduced.nodes[n], i) for n, i in group.outgoing} == leaving | sent_leaves


def test_what_one_entry_has_for_itself_is_left_out() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 1
    entries = [record_send(1, 1, [y], "f")]
    for _ in range(1000):
        y = y.sin()
    reduced = Reduced(Survey(Entries([y.sum()], entries), Leaves.PLAIN))
    assert len(reduced.nodes) == 3  # the sum, the product, and the leaf
