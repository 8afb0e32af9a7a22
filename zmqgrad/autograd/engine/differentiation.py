"""The gradients that groups of a local graph produce: one call of torch's engine, or node by node.

The engine stops at the outgoing edges and returns the sums there. It cannot where one of them leads to
another (:attr:`~zmqgrad.autograd.graph.plan.Group.reenters`), and must not where it would run the hooks of a
tensor on a partial sum; in anomaly mode, the node that fails is asked for. Then the nodes run one by one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch

from zmqgrad.autograd.graph.captures import Captures
from zmqgrad.autograd.graph.hooks import hooks_registered
from zmqgrad.autograd.graph.node import Gradient, evaluate_node, release_saved_tensors, shared
from zmqgrad.autograd.graph.plan import Edge, Group, Plan
from zmqgrad.autograd.graph.sums import added
from zmqgrad.autograd.graph.undefined import UNDEFINED, reached, zero_placeholders
from zmqgrad.autograd.graph.walk import GraphWalk
from zmqgrad.autograd.torch_internals import (
    LEAF_NODE,
    cut_at,
    follow_retained,
    has_tensor_hooks,
    is_python_function,
    outputs_of,
    run_engine,
    tensor_hooks,
)
from zmqgrad.wire.messages import PassOptions

Result = tuple[Edge, Gradient, bool]
"""The gradient at an outgoing edge, and whether anything else holds a reference to it."""

_node_of: Callable[[Edge], Any] = operator.itemgetter(0)
_gradient_of: Callable[[Result], Gradient] = operator.itemgetter(1)
_is_none: Callable[[Gradient], bool] = partial(operator.is_, None)
_is_undefined: Callable[[Gradient], bool] = partial(operator.is_, UNDEFINED)


class Differentiation:
    """Computes the gradients of groups of one pass on one worker.

    Args:
        walk: the walk over the graph.
        plan: the plan that was made of it.
        options: how the pass runs.
        captures: what it returns, if leaves accumulate none; receives the gradients that groups pass by.
        hooks: whether any hooks are registered in this process.
    """

    def __init__(
        self, walk: GraphWalk, plan: Plan, options: PassOptions, captures: Captures | None, hooks: bool
    ) -> None:
        self._plan = plan
        self.options = options
        self._captures = captures
        self._hooks = hooks
        if hooks and len(plan.groups) > 1:
            follow_retained()
        self._passed_by = {} if captures is None else self._inner_captures(walk, captures)

    def _inner_captures(self, walk: GraphWalk, captures: Captures) -> dict[Group, list[Edge]]:
        """Return the edges within each group whose gradients the pass returns."""
        found: dict[Group, list[Edge]] = {}
        for node in captures.nodes & walk.edges.keys():
            entry = next(i for i, nodes in enumerate(walk.exclusive) if node in nodes)
            found.setdefault(self._plan.find_group(node, entry), []).extend(captures.edges_at(node))
        return found

    def run(self, groups: Sequence[Group], gradients: dict[Edge, torch.Tensor]) -> list[Result]:
        """Compute the gradients at the outgoing edges of ``groups`` from those at incoming edges.

        Returns:
            For each outgoing edge the gradient: None, or no result, if none of the incoming gradients
            leads there, ``UNDEFINED`` if one does but nothing was produced.
        """
        if not self._hooks and all(map(self._plan.sinks.__contains__, map(_node_of, gradients))):
            return list(zip(gradients, gradients.values(), repeat(False), strict=False))
        if torch.is_anomaly_enabled():  # an error names its node, and carries the forward call that made it
            results = []
            for group in groups:
                own = {edge: gradients[edge] for edge in group.incoming if edge in gradients}
                results += self._node_by_node(group, own)
            return results
        group = groups[0]
        if not group.dependents:
            return self._at_once(groups, gradients)
        with cut_at(group.is_cut):  # before it is asked for hooks
            if group.reenters or self._cuts_at_hooks(group):
                return self._node_by_node(group, gradients)
            return self._at_once(groups, gradients)

    def _at_once(self, groups: Sequence[Group], gradients: dict[Edge, torch.Tensor]) -> list[Result]:
        outgoing: Collection[Edge] = groups[0].outgoing
        if len(groups) > 1:
            outgoing = dict.fromkeys([edge for group in groups for edge in group.outgoing])
        passed_by: Collection[Edge] = ()
        if self._captures is not None:
            passed_by = [edge for group in groups for edge in self._passed_by.get(group, ())]
            outgoing = self._captures.needs(outgoing)
        if any(map(_is_undefined, gradients.values())):
            undefined = [edge for edge, gradient in gradients.items() if gradient is UNDEFINED]
            defined = {edge: g for edge, g in gradients.items() if g is not UNDEFINED}
            with zero_placeholders(reached(undefined, outgoing, is_python_function)) as placeholders:
                results = self._call_engine({**placeholders, **defined}, outgoing, passed_by)
        else:
            results = self._call_engine(gradients, outgoing, passed_by)
        if any(map(_is_none, map(_gradient_of, results))):
            sinks = self._plan.sinks
            missing = [  # a leaf needs no mark, unless it waits for its complete gradient
                edge
                for edge, found, _ in results
                if found is None and (type(edge[0]) is not LEAF_NODE or edge[0] in sinks)
            ]
            ends = reached(gradients, outgoing) if missing else ()
            results += [(edge, UNDEFINED, False) for edge in missing if edge in ends]
        return results

    def _cuts_at_hooks(self, group: Group) -> bool:
        """Whether the engine would run hooks of tensors on partial sums, at edges to other groups."""
        if not hooks_registered():  # by now: what has run may have registered the first
            return False
        own_sinks = set(group.sinks)
        for node, _ in group.outgoing:
            if node in own_sinks:
                continue
            hooked = tensor_hooks(node.variable) if type(node) is LEAF_NODE else has_tensor_hooks(node)
            if hooked:
                return True
        return False

    def _call_engine(
        self,
        gradients: Mapping[Edge, torch.Tensor],
        outgoing: Collection[Edge],
        passed_by: Collection[Edge] = (),
    ) -> list[Result]:
        if not gradients or not (outgoing or passed_by):
            return [(edge, None, False) for edge in outgoing]
        options = self.options
        found = run_engine(
            gradients,
            (*outgoing, *passed_by) if passed_by else outgoing,
            options.retain_graph,
            options.create_graph,
        )
        if self._captures is not None and passed_by:
            for edge, gradient in zip(passed_by, found[len(outgoing) :], strict=True):
                if gradient is not None:
                    self._captures.note(edge, gradient)
            found = found[: len(outgoing)]
        return list(zip(outgoing, found, shared(found), strict=True))

    def _node_by_node(self, group: Group, gradients: dict[Edge, torch.Tensor]) -> list[Result]:
        """As one engine call, where the engine would not stop, or would run hooks on partial sums."""
        at: dict[Edge, torch.Tensor] = dict(gradients)
        retain_graph, create_graph = self.options.retain_graph, self.options.create_graph
        captures = self._captures
        for node in self._members(group):
            incoming = [at.pop((node, i), None) for i in range(outputs_of(node))]
            if all([gradient is None for gradient in incoming]):
                continue  # only entries without a gradient lead here: a later pass may run it
            following = node.next_functions
            if captures is not None:
                following = captures.way(node)
                if not self._passes_by(captures, node, incoming, following):
                    continue
            produced = evaluate_node(node, incoming, following, retain_graph, create_graph)
            if not retain_graph:
                release_saved_tensors(node)
            for gradient, also_held, edge in zip(produced, shared(produced), following, strict=True):
                if gradient is None or edge[0] is None:
                    continue
                present = at.get(edge, UNDEFINED)
                if present is not UNDEFINED:
                    at[edge] = present if gradient is UNDEFINED else added(present, gradient)
                elif also_held and type(edge[0]) is LEAF_NODE and gradient is not UNDEFINED:
                    at[edge] = gradient.clone()
                else:
                    at[edge] = gradient
        results: list[Result] = []
        for sink in group.sinks:
            complete = {edge: g for edge, g in at.items() if edge[0] == sink and g is not UNDEFINED}
            for edge in complete:
                del at[edge]
            if complete:  # the engine runs the hooks of the tensors
                results += self._call_engine(complete, complete)
        return results + [(edge, gradient, False) for edge, gradient in at.items()]

    def _passes_by(
        self, captures: Captures, node: Any, incoming: Sequence[Gradient], following: Sequence[Edge]
    ) -> bool:
        """Note the gradients of the outputs of ``node`` that the pass returns. Returns whether it leads on.

        As in torch's engine, they are those before the hooks of the tensors if it does, and else those after.
        """
        leads_on = any([edge[0] is not None for edge in following])
        passing = {(node, i): g for i, g in enumerate(incoming) if g is not None and g is not UNDEFINED}
        if not leads_on and node in captures.nodes:
            passing = {edge: g for edge, g, _ in self._call_engine(passing, passing) if g is not None}
        for edge, gradient in passing.items():
            captures.note(edge, gradient)
        return leads_on

    def _members(self, group: Group) -> Iterable[Any]:
        """Return the nodes that ``group`` runs, each before those that follow it."""
        belongs_to = self._plan.belongs_to
        seen: set[Any] = set()
        done: dict[Any, None] = {}
        for start, _ in group.incoming:
            todo = [start]
            while todo:
                node = todo[-1]
                if node in seen:
                    done[node] = None  # all that follow it have been done
                    todo.pop()
                elif node is None or not belongs_to(node, group):
                    todo.pop()
                else:
                    seen.add(node)
                    todo += [n for n, _ in node.next_functions if n not in seen]
        return reversed(done.keys())
