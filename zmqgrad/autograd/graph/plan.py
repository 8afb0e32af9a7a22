"""Scheduling of a worker's local graph: which nodes may run when. Pure: no torch, no I/O.

A local graph has several *entries*: the roots, and each send once its gradient has arrived. Every node must
run once, on the sum of all gradients that flow into it, so it waits for exactly the entries that reach it.
Nodes that the same set of entries reaches form a *group*. A group may run when the entries that *start* in it
have arrived and the groups that feed it have run: those have waited for its other entries. Sets grow along
edges, so the dependencies have no cycle. All work is (nearly) linear in the size of the graph, however many
entries there are.

An edge is ``(node, input number)``. A group consumes gradients at its ``incoming`` edges and produces them
at its ``outgoing`` edges. Outgoing edges lead to *leaves* (every group adds to them directly), to *sinks*
(recvs, and leaves that wait for their complete gradient), or to another group. The last are *cut edges*:
the gradients there are partial sums. A sink belongs to a group like any other node; its gradient is complete
when that group has run.
"""

from __future__ import annotations

import operator
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, filterfalse
from typing import Any

from zmqgrad.autograd.graph.entry_sets import EntrySet, EntrySets

Node = Any
"""Any hashable object: a node of torch's graph; in tests, a number."""

Edge = tuple[Node, int]


@dataclass(slots=True)
class Graph:
    """The part of a local graph that matters for scheduling. Nothing changes it.

    Attributes:
        following: the edges out of each node. Leaves and sinks have none.
        leaves: the nodes that accumulate gradients from any group.
        sinks: the nodes that wait for their complete gradient.
        joint_sinks: the sinks that wait for all entries that reach any of them.
    """

    following: Mapping[Node, Collection[Edge]]
    leaves: Collection[Node]
    sinks: Collection[Node]
    joint_sinks: Collection[Node] = ()


SEARCH_STEPS, SEARCH_STEPS_PER_EDGE = 1000, 8
"""How long all searches for groups that re-enter may take together (:attr:`Group.reenters`)."""


class Group:
    """Nodes that the same entries reach.

    Dictionaries without values are ordered sets. ``outgoing`` numbers the groups that lead to the same edge.
    """

    __slots__ = (
        *("accumulates", "dependents", "entries", "gradients", "incoming", "outgoing", "pending"),
        *("ran", "reached", "reenters", "sinks", "starts", "unsettled"),
    )

    def __init__(self, entries: EntrySet) -> None:
        self.entries = entries
        self.starts: list[int] = []
        """The entries that start in this group, and not only in one before it."""
        self.incoming: dict[Edge, None] = {}
        self.outgoing: dict[Edge, int] = {}
        self.sinks: list[Node] = []
        self.dependents: dict[Group, None] = {}
        self.gradients: dict[Edge, Any] = {}
        """Sums of the gradients that have reached the incoming edges so far."""
        self.pending = 0
        """Entries of ``starts`` that have neither arrived nor been dropped, and groups that feed this one and
        have not run."""
        self.unsettled = 0
        """The same, but a group counts only as long as it misses an entry itself."""
        self.reached = False
        """Whether any entry has arrived."""
        self.accumulates = False
        """Whether any edge leads to a leaf that other groups may lead to as well."""
        self.reenters = False
        """Whether one outgoing edge may lead to the node of another.

        Torch's engine stops at the edges that it has to return gradients for, except where such a node
        leads to another of these edges: it would run that node too early, on a partial sum. For example,
        ``x = w * w`` is sent away and also added to ``w`` locally: from the sum one reaches ``w``, and
        ``x``, through which one reaches ``w`` again.
        """
        self.ran = False

    def is_cut(self, node: Node) -> bool:
        """Whether an edge leads to ``node``: in another group, which waits for more, or a leaf."""
        return node not in self.sinks and any(target is node for target, _ in self.outgoing)

    def __repr__(self) -> str:
        return f"<Group of {self.starts} in={list(self.incoming)} out={list(self.outgoing)}>"


class _Groups(dict[EntrySet, Group]):
    """Groups by the entries that reach them; made when asked for."""

    __slots__ = ()

    def __missing__(self, entries: EntrySet) -> Group:
        group = self[entries] = Group(entries)
        return group


class Plan:
    """The groups of a graph, and which of them may run.

    An entry arrives, or is dropped because it never will. Both make groups ready. The caller runs them, in
    any order or at the same time, and reports each by :meth:`finished`. Not thread-safe.
    """

    def __init__(self, graph: Graph, entries: Sequence[Sequence[Edge]]) -> None:
        self.arrived: set[int] = set()
        self.dropped: set[int] = set()
        self.leaves, self.sinks = graph.leaves, graph.sinks
        self._graph = graph
        self._entries = entries
        self._sets = EntrySets(len(entries))
        self._reached_by = _reaching_entries(graph, entries, self._sets)
        self._groups = _Groups()
        self._starting_in: list[Collection[Group]] = []  # for each entry, the groups that it starts in
        self._build_groups()
        self.common: Collection[Edge] = ()
        """The edges that several groups lead to."""
        if len(self._groups) > 1:
            self._number_sources()
            if any([group.dependents for group in self.groups]):
                self._find_reentries()
        self._waiting_groups = 0  # groups that have been reached and miss entries

    @property
    def groups(self) -> Collection[Group]:
        """All groups."""
        return self._groups.values()

    def _build_groups(self) -> None:
        graph, reached_by, groups = self._graph, self._reached_by, self._groups
        leaves, sinks = graph.leaves, graph.sinks
        for number, edges in enumerate(self._entries):
            starting: dict[Group, None] = {}
            for edge in edges:
                node = edge[0]
                group = groups[reached_by.get(node) or self._sets.of(number)]  # leaves have none
                group.incoming[edge] = None
                if node in sinks or node in leaves:
                    group.outgoing[edge] = 0
                starting[group] = None
            self._starting_in.append(starting)
            for group in starting:
                group.starts.append(number)
                group.pending += 1
        for node, leaving in graph.following.items():
            entries = reached_by.get(node)
            if not entries:
                continue
            group = groups[entries]
            outgoing = group.outgoing
            for edge in leaving:
                target = edge[0]
                if target in leaves:
                    outgoing[edge] = 0
                elif (onward := reached_by[target]) != entries:
                    outgoing[edge] = 0
                    next_group = groups[onward]
                    next_group.incoming[edge] = None
                    if next_group not in group.dependents:
                        group.dependents[next_group] = None
                        next_group.pending += 1
                    if target in sinks:
                        next_group.outgoing[edge] = 0
                elif target in sinks:
                    outgoing[edge] = 0  # others lead to nodes of the group
        for sink in sinks:
            if sink in reached_by:
                groups[reached_by[sink]].sinks.append(sink)
        for group in groups.values():
            group.unsettled = group.pending

    def _number_sources(self) -> None:
        """Number the groups that lead to the same edge: in this order their gradients are added."""
        counts: defaultdict[Edge, Iterator[int]] = defaultdict(count)
        is_leaf = self._graph.leaves.__contains__
        for group in self.groups:
            edges = group.outgoing
            group.accumulates = any(map(is_leaf, map(_node_of, edges)))
            group.outgoing = dict(zip(edges, map(next, map(counts.__getitem__, edges)), strict=True))
        self.common = {edge for edge, number in counts.items() if next(number) > 1}

    def _find_reentries(self) -> None:
        """Set :attr:`Group.reenters` of all groups.

        If the searches take too long, groups without an answer count as re-entering, which is slower to
        run, but right.
        """
        following, reached_by = self._graph.following, self._reached_by
        fed_by: dict[Node, EntrySet | None] = {}  # the group before a node; None if there are several
        edges = 0
        for node, leaving in following.items():
            group = reached_by.get(node)
            edges += len(leaving)
            for target, _ in leaving if group is not None else ():
                if fed_by.setdefault(target, group) != group:
                    fed_by[target] = None
        steps = SEARCH_STEPS + SEARCH_STEPS_PER_EDGE * edges
        for each in self.groups:
            if not each.dependents:
                continue
            # What lies behind its targets is of other groups, so it can be entered again only from these.
            again = {node for node, _ in each.outgoing if fed_by.get(node, each.entries) != each.entries}
            seen: set[Node] = set()
            todo = deque({node: None for node, _ in each.outgoing} if again else ())
            while todo and not each.reenters:
                for target, _ in following.get(todo.popleft(), ()):
                    steps -= 1
                    if target in again or steps < 0:
                        each.reenters = True
                        break
                    if target not in seen:
                        seen.add(target)
                        todo.append(target)

    def arrive(self, entry: int) -> list[Group]:
        """Record that the gradient of ``entry`` has arrived.

        Returns:
            The groups that may run now.

        Raises:
            ValueError: if it has arrived before, or has been dropped.
        """
        if entry in self.arrived or entry in self.dropped:
            raise ValueError(f"entry {entry} arrived twice, or after it was dropped")
        self.arrived.add(entry)
        return self._settle(entry, True)

    def drop(self, entry: int) -> list[Group]:
        """Record that ``entry`` will never arrive. Returns the groups that may run now."""
        if entry in self.arrived or entry in self.dropped:
            return []
        self.dropped.add(entry)
        return self._settle(entry, False)

    def finished(self, *groups: Group) -> list[Group]:
        """Record that ``groups`` have run. Returns the groups that may run now."""
        ready = []
        for group in groups:
            group.ran = True
            for dependent in group.dependents:
                dependent.pending -= 1
                if not dependent.pending:
                    ready.append(dependent)
        return ready

    def group_of(self, node: Node) -> Group:
        """Return the group of a sink, or of a node in the graph that an entry reaches."""
        return self._groups[self._reached_by[node]]

    def entries_of(self, group: Group) -> list[int]:
        """Return all entries that reach ``group``, in order. They may be many: do not ask for each group."""
        return list(self._sets.entries(group.entries))

    def find_group(self, node: Node, entry: int) -> Group:
        """Return the group that runs ``node``, which ``entry`` reaches first.

        The graph leaves out most nodes that only one entry reaches.
        """
        return self._groups[self._reached_by.get(node) or self._sets.of(entry)]

    def belongs_to(self, node: Node, group: Group) -> bool:
        """Whether ``group`` runs ``node``, which one of its nodes leads to. False for leaves and sinks.

        The graph leaves out most nodes that only one entry reaches; they belong to the group before them.
        """
        graph = self._graph
        if node in graph.leaves or node in graph.sinks:
            return False
        return self._reached_by.get(node, group.entries) == group.entries

    def _settle(self, entry: int, arrived: bool) -> list[Group]:
        """Stop waiting for ``entry``. Returns the groups that may run now."""
        starting = self._starting_in[entry]
        ready = []
        for group in starting:
            group.pending -= 1
            if not group.pending:
                ready.append(group)
        todo = list(starting)
        while todo:  # these miss one entry less; those behind one for which it was the last do, too
            group = todo.pop()
            group.unsettled -= 1
            if not group.unsettled:
                if group.reached:
                    self._waiting_groups -= 1
                todo += group.dependents
        todo = list(starting) if arrived else []
        while todo:  # an entry of these, and so of all groups behind them, has arrived
            group = todo.pop()
            if not group.reached:
                group.reached = True
                if group.unsettled:
                    self._waiting_groups += 1
                todo += group.dependents
        return ready

    def waits(self) -> bool:
        """Whether a group that some entry has reached waits for another entry."""
        return self._waiting_groups > 0

    def describe(self, name: Callable[[int], str] = str) -> str:
        """Return the state of all entries and groups as text; ``name`` names an entry."""
        used = [i for i, edges in enumerate(self._entries) if edges]  # only one worker has the roots
        lines = [f"{len(used)} entries, {len(self._groups)} groups"]
        for i in used:
            state = "dropped" if i in self.dropped else "arrived" if i in self.arrived else "expected"
            lines.append(f"  entry {name(i)}: {state}")
        for group in self.groups:
            entries = self.entries_of(group)
            waits = ", ".join(name(i) for i in entries if i not in self.arrived and i not in self.dropped)
            state = "ran" if group.ran else f"waits for {waits}" if waits else "ready"
            of = ", ".join(map(name, entries))
            lines.append(f"  group {{{of}}}: {state}; {len(group.incoming)} in, {len(group.outgoing)} out")
        return "\n".join(lines)


_node_of: Callable[[Edge], Node] = operator.itemgetter(0)


def _reaching_entries(
    graph: Graph, entries: Sequence[Sequence[Edge]], sets: EntrySets
) -> dict[Node, EntrySet]:
    """Return the set of the entries that reach each node. Leaves have none: they belong to no group."""
    reached_by: dict[Node, EntrySet] = {}
    leaves, union, following = graph.leaves, sets.union, graph.following
    for number, edges in enumerate(entries):
        alone = sets.of(number) if edges else 0
        for node, _ in edges:
            if node not in leaves:
                reached_by[node] = union(reached_by[node], alone) if node in reached_by else alone
    for node in _topological_order(graph, entries):
        passed_on = reached_by[node]
        for target in filterfalse(leaves.__contains__, map(_node_of, following[node])):
            reached_by[target] = union(reached_by[target], passed_on) if target in reached_by else passed_on
    if graph.joint_sinks:
        joint = reached_by.keys() & graph.joint_sinks
        together: EntrySet = 0
        for sink in joint:
            together = union(together, reached_by[sink])
        reached_by.update(dict.fromkeys(joint, together))
    return reached_by


def _topological_order(graph: Graph, entries: Sequence[Sequence[Edge]]) -> list[Node]:
    """Return the nodes with edges that any entry reaches, each before those that follow it."""
    following = graph.following
    inner = following.keys() - graph.leaves
    if inner.isdisjoint(map(_node_of, chain.from_iterable(following.values()))):  # often: nothing is shared
        return list(filter(inner.__contains__, dict.fromkeys(map(_node_of, chain.from_iterable(entries)))))
    done: set[Node] = set()
    order: list[Node] = []
    for edges in entries:
        for start, _ in edges:
            if start in done or start not in inner:
                continue
            done.add(start)
            stack = [(start, iter(following[start]))]
            while stack:
                node, rest = stack[-1]
                for target, _ in rest:
                    if target in inner and target not in done:
                        done.add(target)
                        stack.append((target, iter(following[target])))
                        break
                else:
                    order.append(node)
                    stack.pop()
    order.reverse()
    return order
