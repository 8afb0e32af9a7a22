"""The plan of a local graph: groups, order, and what waits, against counting paths directly.

Counting paths is a backward pass in numbers: a node passes on, to each node that follows it, the sum of
what came to it. So what a plan gathers at leaves and ends, run group by group, has to be what one
walk over the graph gives.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.autograd.graph.plan import Edge, Graph, Group, Plan, bits


@dataclass(frozen=True)
class Case:
    """A graph, where it is entered, and an order in which the entries arrive."""

    graph: Graph
    entries: tuple[tuple[Edge, ...], ...]
    order: tuple[int, ...]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Nodes numbered along their edges, so that there is no cycle; then shuffled, as numbers mean nothing."""
    size = draw(st.integers(1, 12))
    kinds = draw(st.lists(st.sampled_from("nnnlr"), min_size=size, max_size=size))
    following: list[list[Edge]] = []
    for node, kind in enumerate(kinds):
        later = st.integers(node + 1, size - 1) if node + 1 < size else st.nothing()
        edges = st.lists(st.tuples(later, st.integers(0, 1)), max_size=4 if node + 1 < size else 0)
        following.append(draw(edges) if kind == "n" else [])
    names = draw(st.permutations(range(size)))
    renamed: dict[Any, list[Edge]] = {node: [] for node in range(size)}
    for node, edges in enumerate(following):
        renamed[names[node]] = [(names[target], number) for target, number in edges]
    graph = Graph(
        renamed,
        frozenset(names[n] for n, kind in enumerate(kinds) if kind == "l"),
        frozenset(names[n] for n, kind in enumerate(kinds) if kind == "r"),
    )
    edge = st.tuples(st.integers(0, size - 1), st.integers(0, 1))
    entries = draw(st.lists(st.lists(edge, min_size=1, max_size=3).map(tuple), min_size=1, max_size=5))
    return Case(graph, tuple(entries), tuple(draw(st.permutations(range(len(entries))))))


def reached(graph: Graph, start: int) -> set[int]:
    """Nodes on a way from ``start``, itself included."""
    found, todo = {start}, [start]
    while todo:
        for target, _ in graph.following.get(todo.pop(), ()):
            if target not in found:
                found.add(target)
                todo.append(target)
    return found


def masks(case: Case) -> dict[int, int]:
    """By definition: for each node that is reached, the entries which reach it."""
    result: Counter[int] = Counter()
    for number, edges in enumerate(case.entries):
        for node in set().union(*(reached(case.graph, node) for node, _ in edges)):
            result[node] |= 1 << number
    return result


def paths(case: Case, live: set[int]) -> Counter[Edge]:
    """What comes to each edge into a leaf or a recv, if entry i brings i + 1 to each of its edges."""
    graph = case.graph
    sums: Counter[Edge] = Counter()
    todo = [(edge, i + 1) for i in live for edge in case.entries[i]]
    while todo:
        (node, number), value = todo.pop()
        sums[node, number] += value
        todo += [(edge, value) for edge in graph.following.get(node, ())]
    return Counter({e: v for e, v in sums.items() if e[0] in {*graph.leaves, *graph.sinks}})


class Executor:
    """Runs groups on numbers, as the engine does on tensors, and checks each as it comes."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.graph = case.graph
        self.plan = Plan(case.graph, case.entries)
        self.masks = masks(case)
        self.waiting: Counter[Edge] = Counter()
        self.results: Counter[Edge] = Counter()
        self.ran: list[int] = []  # nodes, in order
        self.settled: set[int] = set()

    def arrive(self, entry: int) -> None:
        for edge in self.case.entries[entry]:
            self.waiting[edge] += entry + 1
        self.settled.add(entry)
        self.run_all(self.plan.arrive(entry))

    def drop(self, entry: int) -> None:
        self.settled.add(entry)
        self.run_all(self.plan.drop(entry))

    def run_all(self, ready: list[Group]) -> None:
        while ready:
            group = ready.pop(0)
            assert set(bits(group.entries)) <= self.settled, "ready before its entries were there"
            assert not group.ran
            self.run(group)
            ready += self.plan.finished(group)

    def run(self, group: Group) -> None:
        """Spread the incoming numbers over the group's own nodes; what leaves is an outgoing edge."""
        arriving: Counter[Edge] = Counter()
        for edge in group.incoming:
            arriving[edge] += self.waiting.pop(edge, 0)
        mine = {n for n, mask in self.masks.items() if mask == group.entries and n not in self.graph.leaves}
        for node in sorted(mine, key=lambda n: -len(reached(self.graph, n))):
            self.ran.append(node)
            total = sum(v for (n, _), v in arriving.items() if n == node)
            for edge in self.graph.following.get(node, ()):
                arriving[edge] += total
        for edge, value in arriving.items():
            node = edge[0]
            if node in mine and node not in self.graph.sinks:
                continue
            assert edge in group.outgoing, "a gradient would be lost at the border"
            if node in self.graph.leaves or node in group.sinks:
                self.results[edge] += value
            else:
                self.waiting[edge] += value
        assert set(group.sinks) == mine & set(self.graph.sinks)

    def check_order(self) -> None:
        """Each node ran after all nodes before it that are ever to run."""
        at = {node: i for i, node in enumerate(self.ran)}
        assert len(at) == len(self.ran), "a node ran twice"
        for node, i in at.items():
            for target, _ in self.graph.following.get(node, ()):
                assert target in self.graph.leaves or target not in at or i < at[target]


@given(cases())
def test_groups_hold_every_reached_node_once_and_by_definition(case: Case) -> None:
    plan, by_node = Plan(case.graph, case.entries), masks(case)
    inner = {node: mask for node, mask in by_node.items() if node not in case.graph.leaves}
    assert set(inner.values()) <= {g.entries for g in plan.groups.values()}
    for group in plan.groups.values():
        assert len(set(group.incoming)) == len(group.incoming)
        assert len(set(group.outgoing)) == len(group.outgoing)
        assert sorted(group.sinks) == sorted(r for r in case.graph.sinks if inner.get(r) == group.entries)


@given(cases())
def test_an_outgoing_edge_behind_another_is_found(case: Case) -> None:
    plan = Plan(case.graph, case.entries)
    for group in plan.groups.values():
        targets = {node for node, _ in group.outgoing}
        behind = [
            reached(case.graph, following)
            for t in targets
            for following, _ in case.graph.following.get(t, ())
        ]
        assert plan.reenters(group) == any(nodes & targets for nodes in behind)


@given(cases())
def test_running_groups_as_entries_arrive_sums_what_paths_sum(case: Case) -> None:
    executor = Executor(case)
    for entry in case.order:
        executor.arrive(entry)
    executor.check_order()
    assert all(group.ran for group in executor.plan.groups.values())
    assert set(executor.ran) == {n for n in executor.masks if n not in case.graph.leaves}
    assert executor.results == paths(case, set(case.order))
    assert not executor.plan.waits()


@given(cases())
def test_a_group_runs_as_soon_as_its_entries_are_there(case: Case) -> None:
    executor = Executor(case)
    for entry in case.order:
        executor.arrive(entry)
        for group in executor.plan.groups.values():
            assert group.ran == (set(bits(group.entries)) <= executor.settled)


@given(cases(), st.sets(st.integers(0, 4)))
def test_dropped_entries_contribute_nothing(case: Case, dropped: set[int]) -> None:
    executor = Executor(case)
    for entry in case.order:
        if entry in dropped:
            executor.drop(entry)
        else:
            executor.arrive(entry)
    executor.check_order()
    live = set(case.order) - dropped
    assert {e: v for e, v in executor.results.items() if v} == dict(paths(case, live))
    assert all(group.ran for group in executor.plan.groups.values())


@given(cases(), st.integers(0, 5))
def test_a_plan_waits_if_a_reached_group_misses_an_entry(case: Case, count: int) -> None:
    executor = Executor(case)
    here = set(case.order[:count])
    for entry in case.order[:count]:
        executor.arrive(entry)
    inner = [mask for node, mask in executor.masks.items() if node not in case.graph.leaves]
    expected = {i for mask in inner if set(bits(mask)) & here for i in set(bits(mask)) - here}
    assert executor.plan.waits() == bool(expected)


@given(cases(), st.integers(0, 5))
def test_dropping_missing_entries_finishes_the_pass(case: Case, count: int) -> None:
    executor = Executor(case)
    here = set(case.order[:count])
    for entry in case.order[:count]:
        executor.arrive(entry)
    for entry in case.order[count:]:
        if executor.plan.waits():
            executor.drop(entry)
    assert not executor.plan.waits()
    assert {e: v for e, v in executor.results.items() if v} == dict(paths(case, here))


def chain(*lengths: int) -> Graph:
    """Node 0 leads to 1, and so on; the last is a leaf."""
    size = sum(lengths)
    return Graph({n: [(n + 1, 0)] for n in range(size - 1)}, {size - 1}, frozenset())


def test_an_entry_that_arrives_twice_is_an_error() -> None:
    plan = Plan(chain(3), [[(0, 0)]])
    plan.arrive(0)
    with pytest.raises(ValueError, match="entry 0 arrived twice"):
        plan.arrive(0)


def test_an_entry_that_arrives_though_it_was_dropped_is_an_error() -> None:
    plan = Plan(chain(3), [[(0, 0)], [(0, 0)]])
    plan.drop(1)
    with pytest.raises(ValueError, match="entry 1 arrived twice, or after it was dropped"):
        plan.arrive(1)


def test_a_leaf_that_is_an_entry_itself() -> None:
    plan = Plan(Graph({}, frozenset({0}), frozenset()), [[(0, 0)], [(0, 0)]])
    for entry in (1, 0):
        (group,) = plan.arrive(entry)
        assert list(group.incoming) == list(group.outgoing) == [(0, 0)]
        plan.finished(group)


def test_ends_that_wait_together_are_of_one_group() -> None:
    """Node 0 leads to end 2 and node 1 to end 3; each of them is entered on its own."""
    following = {0: [(2, 0)], 1: [(3, 0)]}
    plan = Plan(
        Graph(following, frozenset(), frozenset({2, 3}), joint_sinks=frozenset({2, 3})), [[(0, 0)], [(1, 0)]]
    )
    (first,) = plan.arrive(0)
    assert (first.entries, list(first.outgoing)) == (0b01, [(2, 0)])
    assert plan.finished(first) == []
    assert plan.waits()
    (second,) = plan.arrive(1)
    (last,) = plan.finished(second)
    assert (last.entries, sorted(last.sinks), sorted(last.incoming)) == (0b11, [2, 3], [(2, 0), (3, 0)])


def test_describe_names_missing_entries() -> None:
    plan = Plan(chain(3), [[(0, 0)], [(1, 0)]])
    plan.finished(plan.arrive(0)[0])
    text = plan.describe(lambda i: ("roots", "send")[i])
    assert "entry roots: arrived" in text
    assert "entry send: expected" in text
    assert "group {roots}: ran" in text
    assert "group {roots, send}: waits for send" in text


def test_a_long_chain_with_many_entries_is_planned_without_recursion(rng: random.Random) -> None:
    size = 3000
    entries = [[(rng.randrange(size - 1), 0)] for _ in range(50)]
    plan = Plan(chain(size), [[(0, 0)], *entries])
    ready = plan.arrive(0)
    for entry in range(1, 51):
        ready += plan.arrive(entry)
    while ready:
        ready += plan.finished(ready.pop())
    assert all(group.ran for group in plan.groups.values())
