"""Local graphs whose entries meet: plans, carried out on torch's own C++ engine.

A run of a group is one call of ``torch.autograd.grad`` from its incoming edges to its outgoing ones: it
stops at the border and hands back the partial sums. What comes out at a leaf is added to the context; what
comes out at a recv goes on to the worker that it came from.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from zmqgrad.autograd.context import Context
from zmqgrad.autograd.functions import LEAF_NODE, RecvNote
from zmqgrad.autograd.graph.hooks import any_registered
from zmqgrad.autograd.graph.leaves import Leaves, how_leaves_collect, note_replicas
from zmqgrad.autograd.graph.plan import Edge, Group, Plan
from zmqgrad.autograd.graph.single import Gradient, added, let_go, outputs_of, run_engine, run_node, shared
from zmqgrad.autograd.graph.undefined import UNDEFINED, reached
from zmqgrad.autograd.passes.desk import Arrival
from zmqgrad.autograd.passes.local_pass import Entries, LocalPass, Outlet
from zmqgrad.autograd.passes.routes import RoutedPass, find_routes
from zmqgrad.autograd.passes.survey import Reduced, Survey
from zmqgrad.wire.messages import StallReport


def make_pass(
    context: Context, worker: int, retain_graph: bool, roots: Sequence[torch.Tensor] = ()
) -> LocalPass:
    """The part of ``worker`` in a backward pass of ``context``; ``roots`` if they are here."""
    entries = Entries(roots, context.sends())
    leaves = how_leaves_collect()
    # A walk makes many small objects and no garbage; looking for some doubles its time.
    collects = gc.isenabled()
    gc.disable()
    try:
        survey = Survey(entries, leaves)
        routes = find_routes(survey)
        made: LocalPass
        if routes is None:
            made = PlannedPass(context, worker, retain_graph, survey)
        else:
            made = RoutedPass(context, worker, retain_graph, entries, routes, leaves)
        if leaves is Leaves.TOGETHER:
            made.replicas_due = note_replicas(survey.edges)
        return made
    finally:
        if collects:
            gc.enable()


class PlannedPass(LocalPass):
    """A pass with the plan of its local graph, and gradients that wait at edges."""

    def __init__(self, context: Context, worker: int, retain_graph: bool, survey: Survey) -> None:
        super().__init__(context, worker, retain_graph, survey.entries)
        self._hooks = hooks = any_registered()
        self._tick = 0
        reduced = Reduced(survey)
        self._nodes = reduced.nodes
        self._notes = reduced.notes
        self._numbers = reduced.numbers
        self._graph = graph = reduced.graph
        self.plan = Plan(graph, reduced.entries)
        self._stops = graph.leaves if hooks else graph.leaves | graph.ends
        self._gradients: dict[Edge, torch.Tensor] = {}
        self._dropped_by: set[int] = set()  # requests

    def _enter(self, arrivals: Sequence[Arrival], outlet: Outlet) -> None:
        ready: list[Group] = []
        with self._lock:
            for entry, gradients in arrivals:
                ready += self.plan.arrive(entry)
                for edge, gradient in zip(self.plan.entries[entry], gradients, strict=True):
                    self._add(edge, gradient)
            self._tick += 1
        self._run_all(ready, outlet)

    def drop(self, request: int, sends: Sequence[int], outlet: Outlet) -> bool:
        """As :meth:`LocalPass.drop` says."""
        with self._lock:
            if request in self._dropped_by:
                return False
            self._dropped_by.add(request)
            entries = [self._entry_of[send] for send in sends]
            ready = [group for entry in entries for group in self.plan.drop(entry)]
            self._tick += 1
        self._run_all(ready, outlet)
        return True

    def _run_all(self, ready: list[Group], outlet: Outlet) -> None:
        """Run groups, and those that become ready by it."""
        while ready:
            group = ready.pop(0)
            outlet.let_go()
            if not self.plan.is_dead(group):
                for note, complete in self._run(group):
                    outlet.send_on(note, complete)
            with self._lock:
                ready += self.plan.finished(group)

    def _add(self, edge: Edge, gradient: Gradient) -> None:
        if gradient is not None:
            present = self._gradients.get(edge, UNDEFINED)
            if present is UNDEFINED:
                self._gradients[edge] = gradient
            elif gradient is not UNDEFINED:
                self._gradients[edge] = added(present, gradient)

    def _run(self, group: Group) -> list[tuple[RecvNote, list[Gradient]]]:
        """Run ``group``; gives the recvs that are complete now, and their gradients (None: none)."""
        with self._lock:
            inputs = [(e, g) for e in group.incoming if (g := self._gradients.pop(e, None)) is not None]
        results = self._differentiate(group, dict(inputs)) if inputs else {}
        at_recv: dict[int, list[Gradient]] = {}
        whole: list[tuple[Any, torch.Tensor, bool]] = []
        for end in group.ends:
            if end in self._notes:
                at_recv[end] = [None] * self._notes[end].outputs
            elif (gradient := results.pop((end, 0), None)) is not None:
                whole.append((self._nodes[end], gradient, False))
        self._accumulate_all(whole)
        for edge, gradient in results.items():
            number = edge[0]
            if number in self._graph.leaves:
                if gradient is not UNDEFINED:
                    self.context.accumulate(self._nodes[number].variable, gradient)
            elif number in at_recv:
                at_recv[number][edge[1]] = gradient
            else:
                with self._lock:
                    self._add(edge, gradient)
        return [(self._notes[recv], gradients) for recv, gradients in at_recv.items()]

    def _differentiate(self, group: Group, flowing: dict[Edge, torch.Tensor]) -> dict[Edge, torch.Tensor]:
        """From gradients at the group's incoming edges to those at its outgoing ones, on torch's engine.

        Of those that were not reached there are none; ``UNDEFINED`` where nothing came out.
        """
        if self._stops.issuperset(node for node, _ in group.incoming):
            return flowing  # leaves that were sent, and what was received and sent on: nothing on the way
        undefined = any(gradient is UNDEFINED for gradient in flowing.values())
        if undefined or (group.after and self._hooks) or self.plan.runs_through(group):
            return self._node_by_node(group, flowing)
        found = self._through_engine(flowing, group.outgoing)
        if len(found) < len(group.outgoing):
            places = {(e.node, e.output_nr): edge for edge in group.outgoing for e in [self._edge(edge)]}
            for place in reached(map(self._edge, flowing), places):
                found.setdefault(places[place], UNDEFINED)
        return found

    def _through_engine(
        self, flowing: dict[Edge, torch.Tensor], ends: Sequence[Edge]
    ) -> dict[Edge, torch.Tensor]:
        starts = tuple(flowing)
        gradients = run_engine(
            tuple(self._edge(e) for e in starts),
            tuple(flowing[e] for e in starts),
            tuple(self._edge(e) for e in ends),
            self.retain_graph,
        )
        return {
            e: g.clone() if also_held and type(self._nodes[e[0]]) is LEAF_NODE else g
            for e, g, also_held in zip(ends, gradients, shared(gradients), strict=True)
            if g is not None
        }

    def _node_by_node(self, group: Group, flowing: dict[Edge, torch.Tensor]) -> dict[Edge, torch.Tensor]:
        """As the engine would, but for where it would not stop, or run hooks too early."""
        at = {(self._nodes[number], i): gradient for (number, i), gradient in flowing.items()}
        for node in self._members(group):
            gradients = [at.pop((node, i), None) for i in range(outputs_of(node))]
            made = run_node(node, gradients, self.retain_graph)
            if not self.retain_graph:
                let_go(node)
            for gradient, also_held, (following, i) in zip(
                made, shared(made), node.next_functions, strict=True
            ):
                if gradient is None or following is None:
                    continue
                place = following, i
                present = at.get(place, UNDEFINED)
                if present is not UNDEFINED:
                    at[place] = present if gradient is UNDEFINED else added(present, gradient)
                elif also_held and type(following) is LEAF_NODE and gradient is not UNDEFINED:
                    at[place] = gradient.clone()
                else:
                    at[place] = gradient
        flowing = {(self._numbers[node], i): gradient for (node, i), gradient in at.items()}
        for end in group.ends:
            at_end = [e for e, g in flowing.items() if e[0] == end and g is not UNDEFINED]
            complete = {e: flowing.pop(e) for e in at_end}
            if complete:
                flowing.update(self._through_engine(complete, tuple(complete)))  # for the hooks
        return flowing

    def _members(self, group: Group) -> Iterable[Any]:
        """The nodes of ``group``, each before those that follow it; leaves and ends are left out."""
        sinks = self._graph.leaves | self._graph.ends
        outside = {
            node
            for node, number in self._numbers.items()
            if number in sinks or self.plan.entries_of(number) != group.entries
        }
        seen: set[Any] = set()
        done: dict[Any, None] = {}
        for number, _ in group.incoming:
            todo = [self._nodes[number]]
            while todo:
                node = todo[-1]
                if node in seen:
                    done[node] = None  # all that follow it have been done
                    todo.pop()
                elif node is None or node in outside:
                    todo.pop()
                else:
                    seen.add(node)
                    todo += [n for n, _ in node.next_functions if n not in seen]
        return reversed(done.keys())

    def _edge(self, edge: Edge) -> GradientEdge:
        return GradientEdge(self._nodes[edge[0]], edge[1])

    def waiting(self) -> StallReport:
        """Does anything wait that has been reached?"""
        with self._lock:
            return StallReport(self._worker, self._tick, self.plan.waits())

    def _state(self) -> tuple[int, list[tuple[int, list[RecvNote], bool]]]:
        with self._lock:
            arrived, groups = self.plan.arrived, [(g, g.ran) for g in self.plan.groups.values()]
        found = []
        for group, ran in groups:
            notes = [self._notes[end] for end in group.ends if end in self._notes]
            found.append((group.entries, notes, ran))
        return arrived, found

    def describe(self) -> str:
        """The plan as text."""
        with self._lock:
            return self.plan.describe(self._entry_name)
