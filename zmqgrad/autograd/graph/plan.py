"""Scheduling of a worker's local graph: which nodes may run when. Pure: no torch, no I/O.

A local graph has several *entries*: the roots, and each send once its gradient has arrived. Every node must
run once, on the sum of all gradients that flow into it, so it waits for exactly the entries that reach it.
Nodes that the same set of entries reaches (a bit mask) form a *group*. A group may run when its entries have
arrived and the groups that feed it have run. Masks grow along edges, so the dependencies have no cycle.

An edge is ``(node, input number)``. A group consumes gradients at its ``incoming`` edges and produces them
at its ``outgoing`` edges. Outgoing edges lead to *leaves* (every group adds to them directly), to *sinks*
(recvs, and leaves that wait for their complete gradient), or to another group. The last are *cut edges*:
the gradients there are partial sums. A sink belongs to a group like any other node; its gradient is complete
when that group has run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(slots=True, eq=False)
class Group:
    """Nodes that the same entries reach. Bit *i* of ``entries`` is set for entry *i*.

    Dictionaries without values are ordered sets. ``outgoing`` numbers the groups that lead to the same edge.
    """

    entries: int
    incoming: dict[Edge, None] = field(default_factory=dict)
    outgoing: dict[Edge, int] = field(default_factory=dict)
    sinks: list[Node] = field(default_factory=list)
    dependents: dict[Group, None] = field(default_factory=dict)
    gradients: dict[Edge, Any] = field(default_factory=dict)
    """Sums of the gradients that have reached the incoming edges so far."""
    pending_groups: int = 0
    """Groups that feed this one and have not run."""
    pending_entries: int = 0
    """Entries that have neither arrived nor been dropped."""
    reached: bool = False
    """Whether any entry has arrived."""
    accumulates: bool = False
    """Whether any edge leads to a leaf that other groups may lead to as well."""
    ran: bool = False

    def __repr__(self) -> str:
        entries = ",".join(map(str, bits(self.entries)))
        return f"<Group {{{entries}}} in={list(self.incoming)} out={list(self.outgoing)}>"


def bits(mask: int) -> Iterable[int]:
    """Yield the numbers of the set bits, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Plan:
    """The groups of a graph, and which of them may run.

    An entry arrives, or is dropped because it never will. Both make groups ready. The caller runs them, in
    any order or at the same time, and reports each by :meth:`finished`. Not thread-safe.
    """

    def __init__(self, graph: Graph, entries: Sequence[Sequence[Edge]]) -> None:
        self.arrived = 0
        self.dropped = 0
        self.groups: dict[int, Group] = {}
        self.sinks = graph.sinks
        self._graph = graph
        self._entries = entries
        self._masks = _reaching_entries(graph, entries)
        # A context may have thousands of entries, so each knows its groups.
        self._groups_of_entry: dict[int, list[Group]] = {}
        self._build_groups()
        self.sources: dict[Edge, int] = {}
        """How many groups lead to an edge, if there are several groups."""
        if len(self.groups) > 1:
            self._number_sources()
        self._waiting_groups = 0  # groups that have been reached and miss entries

    def _build_groups(self) -> None:
        graph, masks, groups, new_group = self._graph, self._masks, self.groups, self._new_group
        for number, edges in enumerate(self._entries):
            for edge in edges:
                entered = masks.get(edge[0], 1 << number)
                group = groups.get(entered) or new_group(entered)
                group.incoming[edge] = None
                if edge[0] in graph.sinks or edge[0] in graph.leaves:
                    group.outgoing[edge] = 0
        for node, leaving in graph.following.items():
            mask = masks.get(node)
            if not mask:
                continue
            group = groups.get(mask) or new_group(mask)
            for edge in leaving:
                target = edge[0]
                target_mask = masks.get(target)  # leaves have none
                if target_mask == mask and target not in graph.sinks:
                    continue  # within the group
                group.outgoing[edge] = 0
                if target_mask is None or target_mask == mask:
                    continue
                next_group = groups.get(target_mask) or new_group(target_mask)
                next_group.incoming[edge] = None
                if next_group not in group.dependents:
                    group.dependents[next_group] = None
                    next_group.pending_groups += 1
                if target in graph.sinks:
                    next_group.outgoing[edge] = 0
        for sink in graph.sinks:
            if sink in masks:
                (groups.get(masks[sink]) or new_group(masks[sink])).sinks.append(sink)

    def _number_sources(self) -> None:
        """Number the groups that lead to the same edge: in this order their gradients are added."""
        leaves, sources = self._graph.leaves, self.sources
        for _, group in sorted(self.groups.items()):
            outgoing = group.outgoing
            for edge in outgoing:
                outgoing[edge] = number = sources.get(edge, 0)
                sources[edge] = number + 1
                if edge[0] in leaves:
                    group.accumulates = True

    def _new_group(self, mask: int) -> Group:
        group = self.groups[mask] = Group(mask)
        for entry in bits(mask):
            self._groups_of_entry.setdefault(entry, []).append(group)
            group.pending_entries += 1
        return group

    def arrive(self, entry: int) -> list[Group]:
        """Record that the gradient of ``entry`` has arrived.

        Returns:
            The groups that may run now.

        Raises:
            ValueError: if it has arrived before, or has been dropped.
        """
        if (self.arrived | self.dropped) >> entry & 1:
            raise ValueError(f"entry {entry} arrived twice, or after it was dropped")
        self.arrived |= 1 << entry
        return self._settle(entry, True)

    def drop(self, entry: int) -> list[Group]:
        """Record that ``entry`` will never arrive. Returns the groups that may run now."""
        if (self.arrived | self.dropped) >> entry & 1:
            return []
        self.dropped |= 1 << entry
        return self._settle(entry, False)

    def finished(self, group: Group) -> list[Group]:
        """Record that ``group`` has run. Returns the groups that may run now."""
        group.ran = True
        ready = []
        for dependent in group.dependents:
            dependent.pending_groups -= 1
            if not dependent.pending_groups and not dependent.pending_entries:
                ready.append(dependent)
        return ready

    def group_of(self, node: Node) -> Group:
        """Return the group of a sink, or of a node in the graph that an entry reaches."""
        return self.groups[self._masks[node]]

    def belongs_to(self, node: Node, group: Group) -> bool:
        """Whether ``group`` runs ``node``, which one of its nodes leads to. False for leaves and sinks.

        The graph leaves out most nodes that only one entry reaches; they belong to the group before them.
        """
        graph = self._graph
        if node in graph.leaves or node in graph.sinks:
            return False
        return self._masks.get(node, group.entries) == group.entries

    def reenters(self, group: Group) -> bool:
        """Whether one outgoing edge of ``group`` leads to the node of another.

        Torch's engine stops at the edges that it has to return gradients for, except where such a node
        leads to another of these edges: it would run that node too early, on a partial sum. For example,
        ``x = w * w`` is sent away and also added to ``w`` locally: from the sum one reaches ``w``, and
        ``x``, through which one reaches ``w`` again.
        """
        following = self._graph.following
        targets = {node for node, _ in group.outgoing}
        seen: set[Node] = set()
        stack = [node for target in targets for node, _ in following.get(target, ())]
        while stack:
            node = stack.pop()
            if node in targets:
                return True
            if node not in seen:
                seen.add(node)
                stack += [next_node for next_node, _ in following.get(node, ())]
        return False

    def _settle(self, entry: int, arrived: bool) -> list[Group]:
        """Stop waiting for ``entry``. Returns the groups that may run now."""
        ready = []
        for group in self._groups_of_entry.get(entry, ()):
            self._waiting_groups -= group.reached and group.pending_entries > 0
            group.pending_entries -= 1
            group.reached |= arrived
            self._waiting_groups += group.reached and group.pending_entries > 0
            if not group.pending_entries and not group.pending_groups:
                ready.append(group)
        return ready

    def waits(self) -> bool:
        """Whether a group that some entry has reached waits for another entry."""
        return self._waiting_groups > 0

    def is_dead(self, group: Group) -> bool:
        """Whether every entry of ``group`` has been dropped."""
        return not group.entries & ~self.dropped

    def describe(self, name: Callable[[int], str] = str) -> str:
        """Return the state of all entries and groups as text; ``name`` names an entry."""
        settled = self.arrived | self.dropped
        used = [i for i, edges in enumerate(self._entries) if edges]  # only one worker has the roots
        lines = [f"{len(used)} entries, {len(self.groups)} groups"]
        for i in used:
            state = "dropped" if self.dropped >> i & 1 else "arrived" if self.arrived >> i & 1 else "expected"
            lines.append(f"  entry {name(i)}: {state}")
        for group in self.groups.values():
            waits = ", ".join(name(i) for i in bits(group.entries & ~settled))
            state = "ran" if group.ran else f"waits for {waits}" if waits else "ready"
            of = ", ".join(name(i) for i in bits(group.entries))
            lines.append(f"  group {{{of}}}: {state}; {len(group.incoming)} in, {len(group.outgoing)} out")
        return "\n".join(lines)


def _reaching_entries(graph: Graph, entries: Sequence[Sequence[Edge]]) -> dict[Node, int]:
    """Return the mask of the entries that reach each node. Leaves have none: they belong to no group."""
    masks: dict[Node, int] = {}
    leaves = graph.leaves
    for number, edges in enumerate(entries):
        for node, _ in edges:
            if node not in leaves:
                masks[node] = masks.get(node, 0) | 1 << number
    for node in _topological_order(graph, entries):
        mask = masks[node]
        for target, _ in graph.following.get(node, ()):
            if target not in leaves:
                masks[target] = masks.get(target, 0) | mask
    joint = masks.keys() & graph.joint_sinks
    union = 0
    for sink in joint:
        union |= masks[sink]
    masks.update(dict.fromkeys(joint, union))
    return masks


def _topological_order(graph: Graph, entries: Sequence[Sequence[Edge]]) -> list[Node]:
    """Return the nodes, except leaves, that any entry reaches, each before those that follow it."""
    done: set[Node] = set(graph.leaves)
    order: list[Node] = []
    for edges in entries:
        for start, _ in edges:
            if start in done:
                continue
            done.add(start)
            stack = [(start, iter(graph.following.get(start, ())))]
            while stack:
                node, rest = stack[-1]
                for target, _ in rest:
                    if target not in done:
                        done.add(target)
                        stack.append((target, iter(graph.following.get(target, ()))))
                        break
                else:
                    order.append(node)
                    stack.pop()
    order.reverse()
    return order
