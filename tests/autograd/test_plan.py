"""The plan of a local graph: groups, order, and what waits, against counting paths directly.

Counting paths is a backward pass in numbers: a node passes on, to each node that follows it, the sum of
what came to it. So what a plan gathers at leaves and ends, run group by group, has to be what one
walk over the graph gives.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.autograd.graph import entry_sets
from zmqgrad.autograd.graph.entry_sets import EntrySets
from zmqgrad.autograd.graph.plan import Edge, Graph, Group, Plan


@pytest.fixture(autouse=True, scope="module", params=[1, 256], ids=["small blocks", "one block"])
def block_bits(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test runs with sets of entries that are trees, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry_sets, "BLOCK_BITS", request.param)
        yield


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


def sets(case: Case) -> dict[int, list[int]]:
    """By definition: for each node that is reached, the entries which reach it."""
    result: dict[int, list[int]] = {}
    for number, edges in enumerate(case.entries):
        for node in set().union(*(reached(case.graph, node) for node, _ in edges)):
            result.setdefault(node, []).append(number)
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
        self.sets = sets(case)
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
            assert set(self.plan.entries_of(group)) <= self.settled, "ready before its entries were there"
            assert not group.ran
            self.run(group)
            ready += self.plan.finished(group)

    def run(self, group: Group) -> None:
        """Spread the incoming numbers over the group's own nodes; what leaves is an outgoing edge."""
        arriving: Counter[Edge] = Counter()
        for edge in group.incoming:
            arriving[edge] += self.waiting.pop(edge, 0)
        its = self.plan.entries_of(group)
        mine = {n for n, by in self.sets.items() if by == its and n not in self.graph.leaves}
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
    plan, by_node = Plan(case.graph, case.entries), sets(case)
    inner = {node: by for node, by in by_node.items() if node not in case.graph.leaves}
    held = [plan.entries_of(group) for group in plan.groups]
    assert len(set(map(tuple, held))) == len(held), "two groups for one set of entries"
    assert all(by in held for by in inner.values())
    for node, by in inner.items():
        assert plan.entries_of(plan.group_of(node)) == by
    for group in plan.groups:
        assert len(set(group.incoming)) == len(group.incoming)
        assert len(set(group.outgoing)) == len(group.outgoing)
        assert sorted(group.sinks) == sorted(
            r for r in case.graph.sinks if inner.get(r) == plan.entries_of(group)
        )


@given(cases())
def test_an_outgoing_edge_behind_another_is_found(case: Case) -> None:
    plan = Plan(case.graph, case.entries)
    for group in plan.groups:
        targets = {node for node, _ in group.outgoing}
        behind = [
            reached(case.graph, following)
            for t in targets
            for following, _ in case.graph.following.get(t, ())
        ]
        assert group.reenters == any(nodes & targets for nodes in behind)


@given(cases())
def test_running_groups_as_entries_arrive_sums_what_paths_sum(case: Case) -> None:
    executor = Executor(case)
    for entry in case.order:
        executor.arrive(entry)
    executor.check_order()
    assert all(group.ran for group in executor.plan.groups)
    assert set(executor.ran) == {n for n in executor.sets if n not in case.graph.leaves}
    assert executor.results == paths(case, set(case.order))
    assert not executor.plan.waits()


@given(cases())
def test_a_group_runs_as_soon_as_its_entries_are_there(case: Case) -> None:
    executor = Executor(case)
    for entry in case.order:
        executor.arrive(entry)
        for group in executor.plan.groups:
            assert group.ran == (set(executor.plan.entries_of(group)) <= executor.settled)


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
    assert all(group.ran for group in executor.plan.groups)


@given(cases(), st.integers(0, 5))
def test_a_plan_waits_if_a_reached_group_misses_an_entry(case: Case, count: int) -> None:
    executor = Executor(case)
    here = set(case.order[:count])
    for entry in case.order[:count]:
        executor.arrive(entry)
    inner = [set(by) for node, by in executor.sets.items() if node not in case.graph.leaves]
    expected = {i for by in inner if by & here for i in by - here}
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
    assert (plan.entries_of(first), list(first.outgoing)) == ([0], [(2, 0)])
    assert plan.finished(first) == []
    assert plan.waits()
    (second,) = plan.arrive(1)
    (last,) = plan.finished(second)
    assert (plan.entries_of(last), sorted(last.sinks)) == ([0, 1], [2, 3])
    assert sorted(last.incoming) == [(2, 0), (3, 0)]


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
    assert all(group.ran for group in plan.groups)


def recurrence(size: int) -> tuple[Graph, list[list[Edge]]]:
    """States 0 to ``size`` - 1, each of which leads to the one before it and to a leaf; all are entries."""
    graph = Graph(
        {i: [(i - 1, 0), (-1, 0)] if i else [(-1, 0)] for i in range(size)}, frozenset({-1}), frozenset()
    )
    return graph, [[(i, 0)] for i in range(size)]


def lines_run(action: Callable[[], object]) -> int:
    """How many lines of Python ``action`` runs."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def test_planning_and_running_a_recurrence_takes_linear_time() -> None:
    def run(size: int) -> None:
        plan = Plan(*recurrence(size))
        ready: list[Group] = []
        for entry in range(size):
            ready += plan.arrive(entry)
        order = []
        while ready:
            order += ready
            ready = plan.finished(ready.pop())
        assert [group.starts for group in order] == [[i] for i in reversed(range(size))]
        assert all(group.reenters for group in order[:-1])

    small, large = lines_run(lambda: run(200)), lines_run(lambda: run(1600))
    assert large < 16 * small


@given(st.integers(1, 40), st.lists(st.lists(st.integers(0, 1 << 20), max_size=6), max_size=6))
def test_equal_sets_of_entries_are_one_however_they_were_made(size: int, drawn: list[list[int]]) -> None:
    sets = EntrySets(size)
    made: dict[frozenset[int], entry_sets.EntrySet] = {}
    for numbers in [[], *drawn]:
        wanted = [number % size for number in numbers]
        for order in (wanted, wanted[::-1]):
            found: entry_sets.EntrySet = 0
            for number in order:
                found = sets.union(found, sets.of(number))
            assert list(sets.entries(found)) == sorted(set(wanted))
            assert made.setdefault(frozenset(wanted), found) == found
    for a, b in zip(made, list(made)[1:], strict=False):
        union = sets.union(made[a], made[b])
        assert set(sets.entries(union)) == a | b
        assert (union == made[a]) == (b <= a)
