"""One walk over the graph that a worker holds, from all entries of a pass: who comes where, and who meets.

Most nodes are reached from one entry only. So the walk notes whose each node is, and where an entry comes to
a node of another one; what lies behind such places is shared, and only that takes a plan. Of all that one
entry has for itself, the plan knows the nodes where it starts and the edges that lead out (:class:`Reduced`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.autograd.graph import GradientEdge

from zmqgrad.autograd.functions import LEAF_NODE, RECV_NODE, RecvNote, note_of
from zmqgrad.autograd.graph.hooks import has_hooks
from zmqgrad.autograd.graph.leaves import Leaves
from zmqgrad.autograd.graph.plan import Edge, Graph
from zmqgrad.autograd.passes.local_pass import Entries


class Survey:
    """What the walk finds. Nodes are torch's own, and entries are counted as in ``Entries``."""

    def __init__(self, entries: Entries, leaves: Leaves) -> None:
        self.entries = entries
        self.leaves = leaves
        self.walked: list[dict[Any, Sequence[Any]]] = []
        """By entry: the nodes that it came to first, leaves and recvs aside, and the edges out of each."""
        self.edges: dict[Any, Sequence[Any]] = {}
        """Those of all entries."""
        self.owner: dict[Any, int] = {}
        """The first entry that came to each recv, and to each leaf that waits."""
        self.notes: dict[Any, RecvNote] = {}
        """The recvs."""
        self.waiting: set[Any] = set()
        """Leaves that wait for all that reaches them."""
        self.meets: dict[Any, int] = {}
        """Nodes that another entry came to, and the mask of those that did."""
        self.met = False
        """Has any entry to wait for another one?"""
        self.starts: list[list[GradientEdge]] = []
        """Of each entry; leaves that wait for nobody are left out."""
        self.ends: list[dict[tuple[Any, int], None]] = []
        """The edges at leaves and recvs that each entry came to, if it met no other."""
        for number, starts in enumerate(entries.starts if leaves is Leaves.PLAIN else entries.edges()):
            edges = [start for start in starts if isinstance(start, GradientEdge)]  # leaves lead nowhere
            self.starts.append(edges)
            self.ends.append(self._walk(number, edges))
        self.met = self.met or bool(self.meets)

    def _walk(self, number: int, starts: Sequence[GradientEdge]) -> dict[tuple[Any, int], None]:
        before, leaf_node, recv_node = self.edges, LEAF_NODE, RECV_NODE
        plain = self.leaves is Leaves.PLAIN
        mine: dict[Any, Sequence[Any]] = {}
        ends: dict[tuple[Any, int], None] = {}
        todo: list[Any] = [start[0] for start in starts if not self._ends_at(number, start, ends)]
        while todo:
            node = todo.pop()
            while node not in mine:  # this is the walk over the whole graph: every look-up counts
                if node in before:
                    self._meet(number, node)
                    break
                mine[node] = following = node.next_functions
                onward = None
                for edge in following:
                    reached = edge[0]
                    kind = type(reached)
                    if kind is leaf_node:
                        ends[edge] = None
                        if not plain:
                            self._come_to_leaf(number, reached)
                    elif reached is None or (kind is recv_node and self._ends_at(number, edge, ends)):
                        continue
                    elif onward is None:
                        onward = reached
                    else:
                        todo.append(reached)
                if onward is None:
                    break
                node = onward
        self.walked.append(mine)
        if len(self.entries.starts) == 1:
            self.edges = mine
        else:
            before.update(mine)
        return ends

    def _meet(self, number: int, node: Any) -> None:
        self.meets[node] = self.meets.get(node, 0) | 1 << number

    def _ends_at(self, number: int, edge: Any, ends: dict[tuple[Any, int], None]) -> bool:
        """Is ``edge`` one of a leaf or a recv? Then it is one of ``ends``."""
        node = edge[0]
        if type(node) is LEAF_NODE:
            if self.leaves is not Leaves.PLAIN:
                self._come_to_leaf(number, node)
        elif type(node) is RECV_NODE and (note := self.notes.get(node) or note_of(node)) is not None:
            self.notes[node] = note
            if self.owner.setdefault(node, number) != number:
                self._meet(number, node)
        else:
            return False
        ends[node, edge[1]] = None
        return True

    def _come_to_leaf(self, number: int, node: Any) -> None:
        if self.leaves is Leaves.TOGETHER:
            self.met |= self.owner.setdefault(LEAF_NODE, number) != number
        elif not has_hooks(node):
            return
        self.waiting.add(node)
        if self.owner.setdefault(node, number) != number:
            self._meet(number, node)


class Reduced:
    """The graph of a survey for a plan: what several entries reach, and for each entry what leads there."""

    def __init__(self, survey: Survey) -> None:
        self.nodes: list[Any] = []
        self.numbers: dict[Any, int] = {}
        self._survey = survey
        shared = _shared(survey)
        starts = survey.entries.edges()
        exits = self._exits(shared)
        # Each before those that follow it: where entries start, what is shared, and what nothing follows.
        mine = [[e[0] for e in edges if e[0] in survey.edges and e[0] not in shared] for edges in starts]
        for node in (*(node for nodes in mine for node in nodes), *shared):
            self._number(node)
        following: list[list[Edge]] = [[] for _ in self.nodes]
        for nodes, leaving in zip(mine, exits, strict=True):
            if nodes:  # any one of them stands for all that its entry has for itself
                following[self.numbers[nodes[0]]] = [(self._number(node), i) for node, i in leaving]
        for node in shared:
            onward = [(self._number(n), i) for n, i in survey.edges.get(node, ()) if n is not None]
            following[self.numbers[node]] = onward
        self.entries = [[(self._number(e[0]), e[1]) for e in edges] for edges in starts]
        following += [[] for _ in range(len(self.nodes) - len(following))]
        numbers = self.numbers
        self.notes = {numbers[node]: note for node, note in survey.notes.items() if node in numbers}
        waiting = frozenset(numbers[node] for node in survey.waiting if node in numbers)
        leaves = frozenset(i for i, node in enumerate(self.nodes) if type(node) is LEAF_NODE) - waiting
        together = waiting if survey.leaves is Leaves.TOGETHER else frozenset()
        order = range(len(self.nodes))
        self.graph = Graph(following, leaves, waiting.union(self.notes), order, together)

    def _number(self, node: Any) -> int:
        number = self.numbers.get(node)
        if number is None:
            number = self.numbers[node] = len(self.nodes)
            self.nodes.append(node)
        return number

    def _exits(self, shared: dict[Any, None]) -> list[dict[tuple[Any, int], None]]:
        """For each entry, the edges that leave what it has for itself: to leaves, recvs, what is shared."""
        survey = self._survey
        outside = {node for ends in survey.ends for node, _ in ends}.union(shared)
        return [
            dict.fromkeys(
                [
                    edge
                    for node, following in mine.items()
                    for edge in following
                    if edge[0] in outside and node not in shared
                ]
            )
            for mine in survey.walked
        ]


def _shared(survey: Survey) -> dict[Any, None]:
    """The nodes that several entries reach, each before those that follow it."""
    edges, owner = survey.edges, survey.owner
    seen: set[Any] = set()
    done: dict[Any, None] = {}
    for start in survey.meets:
        todo = [start]
        while todo:
            node = todo[-1]
            if node in seen:
                done[node] = None  # all that follow it have been done
                todo.pop()
            else:
                seen.add(node)
                todo += [n for n, _ in edges.get(node, ()) if (n in edges or n in owner) and n not in seen]
    return dict.fromkeys(reversed(done))
