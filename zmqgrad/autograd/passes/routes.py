"""Graphs in which no two entries meet: each has a route of its own, and needs to wait for no other.

That is so in most pipelines, and wherever a tensor goes one way. A route is one call of torch's engine, from
the entry to the leaves and recvs that it leads to, and finding it is a walk and nothing else. Leaves may be
shared: they collect.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from zmqgrad.autograd.context import Context
from zmqgrad.autograd.functions import LEAF_NODE, RecvNote
from zmqgrad.autograd.graph.leaves import Leaves
from zmqgrad.autograd.graph.single import Gradient, added, run_engine, shared
from zmqgrad.autograd.graph.undefined import UNDEFINED, calls_user, reached, stood_in_for
from zmqgrad.autograd.passes.desk import Arrival
from zmqgrad.autograd.passes.local_pass import Entries, LocalPass, Outlet
from zmqgrad.autograd.passes.survey import Survey
from zmqgrad.wire.messages import StallReport

Result = tuple[GradientEdge, Gradient, bool]
"""What came out at an end, and whether others hold it as well."""


class Route:
    """Where one entry leads: edges at leaves and recvs, and the recvs."""

    __slots__ = ("ends", "recvs", "ways")

    def __init__(
        self, ends: dict[tuple[Any, int], None], recvs: dict[Any, RecvNote], edges: Sequence[GradientEdge]
    ) -> None:
        self.ends = tuple(itertools.starmap(GradientEdge, ends))
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

    def _enter(self, arrivals: Sequence[Arrival], outlet: Outlet) -> None:
        with self._lock:
            for entry, _ in arrivals:
                self._arrived |= 1 << entry
        together: list[Route] = []
        flowing: dict[GradientEdge, torch.Tensor] = {}
        for entry, gradients in arrivals:
            route = self._routes[entry]
            if route.ways and not any([gradient is UNDEFINED for gradient in gradients]):
                together.append(route)
                self._gather(entry, gradients, flowing)
            else:
                outlet.let_go()
                self._run_alone(entry, gradients, outlet)
        if together:
            outlet.let_go()
            self._hand_out(together, self._run(together, flowing), flowing, outlet)

    def _gather(
        self, entry: int, gradients: Sequence[Gradient], flowing: dict[GradientEdge, torch.Tensor]
    ) -> list[GradientEdge]:
        """Add the ``gradients`` of an entry to what flows in, those of leaves to the context.

        Gives the edges at which nothing comes in.
        """
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
        return undefined

    def _run(self, routes: Sequence[Route], flowing: dict[GradientEdge, torch.Tensor]) -> Iterable[Result]:
        """What comes out at the ends of ``routes``, which torch's engine runs at once."""
        if not flowing:
            return ()
        ends = routes[0].ends
        if len(routes) > 1:
            ends = tuple(dict.fromkeys(itertools.chain.from_iterable([route.ends for route in routes])))
        found = run_engine(tuple(flowing), tuple(flowing.values()), ends, self.retain_graph)
        return zip(ends, found, shared(found), strict=True)

    def _run_alone(self, entry: int, gradients: Sequence[Gradient], outlet: Outlet) -> None:
        """An entry with nothing on its way, or where nothing comes in at some edges."""
        flowing: dict[GradientEdge, torch.Tensor] = {}
        undefined = self._gather(entry, gradients, flowing)
        route = self._routes[entry]
        results: Iterable[Result] = ()
        if not route.ways and not self._hooks:
            results = zip(flowing, flowing.values(), itertools.repeat(False), strict=False)
        elif undefined:
            ends = {(e[0], e[1]) for e in route.ends}
            with stood_in_for(reached(undefined, ends, calls_user)) as stand_ins:
                results = list(self._run([route], {**stand_ins, **flowing}))
        else:
            results = self._run([route], flowing)
        self._hand_out([route], results, [*flowing, *undefined], outlet, bool(undefined))

    def _hand_out(
        self,
        routes: Sequence[Route],
        results: Iterable[Result],
        came: Iterable[GradientEdge],
        outlet: Outlet,
        nothing: bool = False,
    ) -> None:
        """Give leaves and recvs what came out at the ends of ``routes``, where it ``came`` in at those edges.

        ``nothing``: at some of them came nothing.
        """
        at_recv: dict[Any, list[Gradient]] = {
            recv: [None] * note.outputs for route in routes for recv, note in route.recvs.items()
        }
        whole: list[tuple[Any, torch.Tensor, bool]] = []
        for edge, gradient, also_held in results:
            node: Any = edge.node
            if node in at_recv:
                at_recv[node][edge.output_nr] = gradient
                nothing |= gradient is None
            elif self._hooks:
                nothing |= gradient is None
                if gradient is not None:
                    whole.append((node, gradient, also_held))
            elif gradient is not None:
                self.context.accumulate(node.variable, gradient, also_held)
        if nothing:
            given = {node for node, *_ in whole}
            places = {(e[0], e[1]) for route in routes for e in route.ends}
            for node, number in reached(came, places):
                if node not in at_recv:
                    if self._hooks and node not in given:
                        whole.append((node, UNDEFINED, False))
                elif at_recv[node][number] is None:
                    at_recv[node][number] = UNDEFINED
        self._accumulate_all(whole)
        for route in routes:
            for recv, note in route.recvs.items():
                outlet.send_on(note, at_recv[recv])

    def drop(self, request: int, sends: Sequence[int], outlet: Outlet) -> bool:
        """Nothing waits for another entry here, so nothing becomes ready."""
        return True

    def waiting(self) -> StallReport:
        """Nothing does."""
        return StallReport(self._worker, 0)

    def _state(self) -> tuple[int, list[tuple[int, list[RecvNote], bool]]]:
        arrived = self._arrived
        return arrived, [(1 << i, list(r.recvs.values()), bool(arrived >> i & 1)) for i, r in self._entered()]

    def _entered(self) -> list[tuple[int, Route]]:
        """The entries, without the roots where there are none."""
        return [(i, route) for i, route in enumerate(self._routes) if self._starts[i]]

    def describe(self) -> str:
        """Entries, whether they have arrived, and where they lead."""
        entered = self._entered()
        lines = [f"{len(entered)} entries that do not meet"]
        for i, route in entered:
            state = "arrived" if self._arrived >> i & 1 else "expected"
            lines.append(f"  entry {self._entry_name(i)}: {state}; to {len(route.ends)} ends")
        return "\n".join(lines)
