"""Graphs in which no two entries meet: each has a route of its own, and needs to wait for no other.

That is so in most pipelines, and wherever a tensor goes one way. A route is one call of torch's engine, from
the entry to the leaves and recvs that it leads to, and finding it is a walk and nothing else. Leaves may be
shared: they collect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import starmap
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from zmqgrad.autograd.context import Context
from zmqgrad.autograd.functions import LEAF_NODE, RecvNote
from zmqgrad.autograd.graph.leaves import Leaves
from zmqgrad.autograd.graph.single import Gradient, added, run_engine, shared
from zmqgrad.autograd.graph.undefined import UNDEFINED, calls_user, reached, stood_in_for
from zmqgrad.autograd.passes.local_pass import Entries, LocalPass, SendOn
from zmqgrad.autograd.passes.survey import Survey
from zmqgrad.wire.messages import Waiting


class Route:
    """Where one entry leads: edges at leaves and recvs, and the recvs."""

    __slots__ = ("ends", "recvs", "ways")

    def __init__(
        self, ends: dict[tuple[Any, int], None], recvs: dict[Any, RecvNote], edges: Sequence[GradientEdge]
    ) -> None:
        self.ends = tuple(starmap(GradientEdge, ends))
        self.recvs = recvs
        """The recvs' nodes, and where their gradients go."""
        self.ways = False
        """Is there any node on the way, or do leaves and received tensors travel on as they are?"""
        for edge in edges:
            if type(edge.node) is not LEAF_NODE and edge.node not in recvs:
                self.ways = True


def find_routes(survey: Survey) -> list[Route] | None:
    """The route of each entry; None if two of them meet, be it at leaves that wait for both."""
    if survey.met:
        return None
    routes = []
    for edges, ends in zip(survey.starts, survey.ends, strict=True):
        recvs = {node: survey.notes[node] for node, _ in ends if node in survey.notes}
        routes.append(Route(ends, recvs, edges))
    return routes


class RoutedPass(LocalPass):
    """A pass in which no two entries meet."""

    def __init__(
        self,
        context: Context,
        worker: int,
        retain_graph: bool,
        entries: Entries,
        routes: list[Route],
        leaves: Leaves,
    ) -> None:
        super().__init__(context, worker, retain_graph, entries)
        self._routes = routes
        self._hooks = leaves is not Leaves.PLAIN
        self._arrived = 0
        if self._hooks:
            self._starts = entries.edges()

    def _enter(self, entry: int, gradients: Sequence[Gradient], send_on: SendOn) -> bool:
        with self._lock:
            if self._arrived >> entry & 1:
                return False
            self._arrived |= 1 << entry
        flowing: dict[GradientEdge, torch.Tensor] = {}
        undefined: list[GradientEdge] = []
        for start, gradient in zip(self._starts[entry], gradients, strict=True):
            if gradient is None:
                continue
            if gradient is UNDEFINED:
                if isinstance(start, GradientEdge):
                    undefined.append(start)
            elif isinstance(start, GradientEdge):
                present = flowing.get(start)
                flowing[start] = gradient if present is None else added(present, gradient)
            else:
                self.context.accumulate(start, gradient)
        route = self._routes[entry]
        at_recv: dict[Any, list[Gradient]] = {
            recv: [None] * note.outputs for recv, note in route.recvs.items()
        }
        whole: list[tuple[Any, torch.Tensor, bool]] = []
        nothing = bool(undefined)
        for edge, gradient, also_held in self._run(route, flowing, undefined):
            node = edge.node
            if node in at_recv:
                at_recv[node][edge.output_nr] = gradient
                nothing |= gradient is None
            elif gradient is not None and self._hooks:
                whole.append((node, gradient, also_held))
            elif gradient is not None:
                self.context.accumulate(node.variable, gradient, also_held)
        self._accumulate_all(whole)
        if nothing:
            places = {(e[0], e[1]) for e in route.ends if e[0] in at_recv}
            for node, number in reached([*flowing, *undefined], places):
                if at_recv[node][number] is None:
                    at_recv[node][number] = UNDEFINED
        for recv, complete in at_recv.items():
            send_on(route.recvs[recv], complete)
        return True

    def _run(
        self, route: Route, flowing: dict[GradientEdge, torch.Tensor], undefined: list[GradientEdge]
    ) -> Iterable[tuple[Any, Gradient, bool]]:
        """What comes out at the ends of ``route``, and whether others hold it as well."""
        if undefined:
            return self._run_partly(route, flowing, undefined)
        if not flowing:
            return ()
        if not route.ways and not self._hooks:
            return ((edge, gradient, False) for edge, gradient in flowing.items())
        found = run_engine(tuple(flowing), tuple(flowing.values()), route.ends, self.retain_graph)
        return zip(route.ends, found, shared(found), strict=True)

    def _run_partly(
        self, route: Route, flowing: dict[GradientEdge, torch.Tensor], undefined: list[GradientEdge]
    ) -> Iterable[tuple[Any, Gradient, bool]]:
        ends = {(e[0], e[1]) for e in route.ends}
        with stood_in_for(reached(undefined, ends, calls_user)) as stand_ins:
            return list(self._run(route, {**stand_ins, **flowing}, []))

    def drop(self, request: int, sends: Sequence[int], send_on: SendOn) -> bool:
        """Nothing waits for another entry here, so nothing becomes ready."""
        return True

    def waiting(self) -> Waiting:
        """Nothing does."""
        return Waiting(self._worker, 0)

    def _state(self) -> tuple[int, list[tuple[int, list[RecvNote], bool]]]:
        arrived = self._arrived
        routes = enumerate(self._routes)
        return arrived, [(1 << i, list(r.recvs.values()), bool(arrived >> i & 1)) for i, r in routes]

    def describe(self) -> str:
        """Entries, whether they have arrived, and where they lead."""
        lines = [f"{len(self._routes)} entries that do not meet"]
        for i, route in enumerate(self._routes):
            state = "arrived" if self._arrived >> i & 1 else "expected"
            lines.append(f"  entry {self._entry_name(i)}: {state}; to {len(route.ends)} ends")
        return "\n".join(lines)
