"""Which part of a local graph may run when. Pure: numbers in, numbers out; no torch.

A local graph is entered at several places and times: at the roots, and at each send when its gradient
arrives. These are its *entries*. Every node must run once, with the sum of all that flows into it, so it
has to wait for the entries that can reach it, and for no others. Nodes with the same set of such entries
(a bit mask here) form a *group*; a group may run as soon as its entries have arrived and the groups before
it have run. Sets grow along edges, so the groups before one have smaller sets, and no cycle can arise.

Edges are ``(node, input number)``. A group takes gradients at its ``incoming`` edges, stops at its
``outgoing`` ones, and what arrives there waits for the next group, or is a result: *leaves* collect from any
group as it runs; *ends* (recvs, and leaves with hooks) are nodes like others, but the last on their way, and
what has been gathered at them is complete when their own group has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from zmqgrad.autograd.graph.border import runs_through

T = TypeVar("T")

Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Graph:
    """``following[n]`` are the edges out of node ``n``. ``leaves`` and ``ends`` have none that count.

    ``order``, if it is known: all nodes, each before those that follow it. ``together``: ends that wait for
    all that reaches any of them.
    """

    following: Sequence[Sequence[Edge]]
    leaves: frozenset[int]
    ends: frozenset[int]
    order: Sequence[int] | None = None
    together: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class Group:
    """Nodes that the same entries reach. ``entries`` is a bit mask, bit *i* for entry *i*."""

    entries: int
    incoming: list[Edge] = field(default_factory=list)
    outgoing: list[Edge] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    before: int = 0  # groups that have to run first and have not
    missing: int = 0  # entries that have neither arrived nor been dropped
    reached: bool = False  # has any entry arrived?
    after: list[Group] = field(default_factory=list)
    ran: bool = False

    def __repr__(self) -> str:
        entries = ",".join(map(str, bits(self.entries)))
        return f"<Group {{{entries}}} in={self.incoming} out={self.outgoing}>"


def bits(mask: int) -> Iterable[int]:
    """The numbers of the bits that are set, from the lowest."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Plan:
    """Groups of a graph with the given entries, and what of them is ready.

    Entries arrive, or are dropped (they never will); either makes groups ready, which the caller runs in
    the order given and reports by :meth:`finished`.
    """

    def __init__(self, graph: Graph, entries: Sequence[Sequence[Edge]]) -> None:
        self.entries: list[Sequence[Edge]] = [tuple(edges) for edges in entries]
        self.arrived = 0
        self.dropped = 0
        self.groups: dict[int, Group] = {}
        self._graph = graph
        self._masks = _reach(graph, self.entries)
        self._build(graph, self._masks)
        # A context may have thousands of entries: what one of them changes is found without a look at all.
        self._of_entry: list[list[Group]] = [[] for _ in self.entries]
        for found in self.groups.values():
            for entry in bits(found.entries):
                self._of_entry[entry].append(found)
                found.missing += 1
        self._held_up = 0  # groups that have been reached and miss entries

    def _build(self, graph: Graph, masks: Sequence[int]) -> None:
        group = self._group
        add = _Adder()
        for number, edges in enumerate(self.entries):
            for edge in edges:
                node = edge[0]
                home = group(1 << number if node in graph.leaves else masks[node])
                add(home.incoming, edge)
                if node in graph.leaves or node in graph.ends:
                    add(home.outgoing, edge)
        for node, edges in enumerate(graph.following):
            mask = masks[node]
            for edge in edges if mask else ():
                target = edge[0]
                if masks[target] == mask and target not in graph.ends:
                    continue  # within the group; leaves have no mask
                home = group(mask)
                add(home.outgoing, edge)
                if masks[target] == mask or target in graph.leaves:
                    continue
                following = group(masks[target])
                add(following.incoming, edge)
                if add(home.after, following):
                    following.before += 1
                if target in graph.ends:
                    add(following.outgoing, edge)
        for end in graph.ends:
            if masks[end]:
                group(masks[end]).ends.append(end)

    def _group(self, mask: int) -> Group:
        found = self.groups.get(mask)
        if found is None:
            found = self.groups[mask] = Group(mask)
        return found

    def arrive(self, entry: int) -> list[Group]:
        """The gradient of ``entry`` is there. Gives the groups that may run now.

        Raises:
            ValueError: if it was there before, or has been dropped.
        """
        if (self.arrived | self.dropped) >> entry & 1:
            raise ValueError(f"entry {entry} arrived twice, or after it was dropped")
        self.arrived |= 1 << entry
        return self._settle(entry, True)

    def drop(self, entry: int) -> list[Group]:
        """``entry`` will never arrive. Gives the groups that may run now."""
        if (self.arrived | self.dropped) >> entry & 1:
            return []
        self.dropped |= 1 << entry
        return self._settle(entry, False)

    def finished(self, group: Group) -> list[Group]:
        """``group`` has run. Gives the groups that may run now."""
        group.ran = True
        ready = []
        for following in group.after:
            following.before -= 1
            if self._may_run(following):
                ready.append(following)
        return ready

    def runs_through(self, group: Group) -> bool:
        """Would torch's engine run through a border of ``group`` to another of its targets?"""
        return runs_through(self._graph, group.outgoing)

    def entries_of(self, node: int) -> int:
        """The mask of the entries that reach ``node``; 0 for leaves."""
        return self._masks[node]

    def _settle(self, entry: int, arrived: bool) -> list[Group]:
        """``entry`` is missed no more. Gives the groups that may run now."""
        ready = []
        for group in self._of_entry[entry]:
            self._held_up -= group.reached and group.missing > 0
            group.missing -= 1
            group.reached |= arrived
            self._held_up += group.reached and group.missing > 0
            if self._may_run(group):
                ready.append(group)
        return ready

    def _may_run(self, group: Group) -> bool:
        return not group.ran and not group.before and not group.missing

    def waits(self) -> bool:
        """Does a group that some entry has reached wait for another entry?"""
        return self._held_up > 0

    def stalled(self) -> list[int]:
        """Entries that have not arrived and hold up a group that some other entry has reached."""
        missing = 0
        for group in self.groups.values():
            if not group.ran and group.entries & self.arrived:
                missing |= group.entries & ~(self.arrived | self.dropped)
        return list(bits(missing))

    def is_dead(self, group: Group) -> bool:
        """Has every entry of ``group`` been dropped?"""
        return not group.entries & ~self.dropped

    def describe(self, name: Callable[[int], str] = str) -> str:
        """Entries and groups as text: who waits for what."""
        settled = self.arrived | self.dropped
        entered = [i for i, edges in enumerate(self.entries) if edges]  # the roots are on one worker only
        lines = [f"{len(entered)} entries, {len(self.groups)} groups"]
        for i in entered:
            state = "dropped" if self.dropped >> i & 1 else "arrived" if self.arrived >> i & 1 else "expected"
            lines.append(f"  entry {name(i)}: {state}")
        for group in self.groups.values():
            waits = ", ".join(name(i) for i in bits(group.entries & ~settled))
            state = "ran" if group.ran else f"waits for {waits}" if waits else "ready"
            of = ", ".join(name(i) for i in bits(group.entries))
            lines.append(f"  group {{{of}}}: {state}; {len(group.incoming)} in, {len(group.outgoing)} out")
        return "\n".join(lines)


class _Adder:
    """Adds to lists what is not in them yet; tells whether it was new. A list may hold thousands of edges."""

    def __init__(self) -> None:
        self._known: set[tuple[int, object]] = set()

    def __call__(self, to: list[T], item: T) -> bool:
        key = id(to), item
        if key in self._known:
            return False
        self._known.add(key)
        to.append(item)
        return True


def _reach(graph: Graph, entries: Sequence[Sequence[Edge]]) -> list[int]:
    """For each node, the entries that reach it. Leaves get none: they belong to no group."""
    masks = [0] * len(graph.following)
    for number, edges in enumerate(entries):
        for node, _ in edges:
            if node not in graph.leaves:
                masks[node] |= 1 << number
    leaves = graph.leaves
    for node in _topological(graph, entries) if graph.order is None else graph.order:
        mask = masks[node]
        for target, _ in graph.following[node]:
            if target not in leaves:
                masks[target] |= mask
    union = 0
    for end in graph.together:
        union |= masks[end]
    for end in graph.together:
        masks[end] = union
    return masks


def _topological(graph: Graph, entries: Sequence[Sequence[Edge]]) -> list[int]:
    """Nodes that any entry reaches, each before those that follow it."""
    done = [False] * len(graph.following)
    order: list[int] = []
    for edges in entries:
        for start, _ in edges:
            if done[start]:
                continue
            done[start] = True
            stack = [(start, iter(graph.following[start]))]
            while stack:
                node, rest = stack[-1]
                for target, _ in rest:
                    if not done[target]:
                        done[target] = True
                        stack.append((target, iter(graph.following[target])))
                        break
                else:
                    order.append(node)
                    stack.pop()
    order.reverse()
    return order
