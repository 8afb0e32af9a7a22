"""One backward pass on one worker, carried out on torch's own C++ engine.

Gradients enter at the roots and at sends. The plan says which groups of the local graph may run. Groups run
by one call of the engine, from their incoming edges to their outgoing ones: it stops there and returns the
sums. Those at leaves are added to the context, those at recvs go to the worker that the tensors came from,
and those at cut edges wait for the next group.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import count
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch
from msgspec.structs import replace
from torch.autograd.graph import GradientEdge

from zmqgrad.autograd.context import Context, Part
from zmqgrad.autograd.engine.differentiation import Differentiation
from zmqgrad.autograd.engine.graph_task import PassTask
from zmqgrad.autograd.engine.termination import ROOTS
from zmqgrad.autograd.engine.work_queue import Arrival, WorkQueue
from zmqgrad.autograd.graph.accumulate import (
    AccumulateMode,
    accumulate_by_nodes,
    accumulate_mode,
    check_not_sharded,
    find_replicas,
    may_have_replicas,
)
from zmqgrad.autograd.graph.captures import Captures
from zmqgrad.autograd.graph.hooks import (
    hooks_registered,
    node_hooks,
    run_hooks_with_grad,
    run_prehooks,
)
from zmqgrad.autograd.graph.node import (
    Gradient,
    has_nan,
    note_forward,
)
from zmqgrad.autograd.graph.plan import Edge, Group, Plan
from zmqgrad.autograd.graph.recomputation import recomputes
from zmqgrad.autograd.graph.sums import OF_ENTRIES, OF_GROUPS, OrderedSum, Place
from zmqgrad.autograd.graph.undefined import UNDEFINED
from zmqgrad.autograd.graph.validation import fit, matches
from zmqgrad.autograd.graph.walk import GraphWalk, condense
from zmqgrad.autograd.profiling import SEND_NAME, profiled
from zmqgrad.autograd.send_recv import EdgeOrLeaf, RecvMetadata, Send
from zmqgrad.autograd.torch_internals import (
    as_graph_task,
    post_accumulate_hooks,
)
from zmqgrad.errors import AutogradError
from zmqgrad.rpc.profiling import profiled_anywhere
from zmqgrad.wire.ids import show_id
from zmqgrad.wire.messages import GroupReport, PassOptions, ReachabilityReport, StallReport

_autograd_id: Callable[[Send], int] = attrgetter("autograd_id")


class GradientSink(Protocol):
    """Receives the gradients that leave the local graph at recvs."""

    def send_gradients(self, recv: RecvMetadata, gradients: Sequence[Gradient]) -> None:
        """Send the complete gradients of a recv, at once or together with others."""

    def flush_if_late(self) -> None:
        """Send what has waited long enough for other gradients. Called before more is run."""


class _Arguments:
    """The sink of a pass that leads only to the arguments of a checkpointed call."""

    def send_gradients(self, recv: RecvMetadata, gradients: Sequence[Gradient]) -> None:
        assert recv.arguments_of is not None
        recv.arguments_of().receive(gradients)

    def flush_if_late(self) -> None:
        """There is nothing to send."""


class GroupSnapshot(NamedTuple):
    """A group: the sends that it waits for (0: the roots), the recvs it leads to, and whether it has run."""

    entries: list[int]
    recvs: list[tuple[int, int]]
    ran: bool


class PassSnapshot(NamedTuple):
    """The state of a pass on one worker, as a value that can be sent."""

    worker: int
    name: str
    sends: list[tuple[int, int, str]]
    arrived: list[int]
    started: bool
    groups: list[GroupSnapshot]
    text: str


class LocalPass:
    """One backward pass on one worker. Entry 0 is the roots, entry *i* + 1 is send *i*.

    Args:
        context: the context of the pass.
        worker: the id of this worker.
        options: whether to keep saved tensors for another pass, for example.
        roots: the roots, if the pass began on this worker.
        inputs: the tensors of this worker whose gradients the pass returns, if leaves accumulate none.
        sends: what the worker has sent, as far as the pass may lead through it; None: all that no
            recomputation has sent.
        pass_id: the id of the pass, where gradients are to be computed.
    """

    def __init__(
        self,
        context: Context,
        worker: int,
        options: PassOptions,
        roots: Sequence[torch.Tensor] = (),
        inputs: Sequence[torch.Tensor] | Captures = (),
        sends: Sequence[Send] | None = None,
        pass_id: int = 0,
    ) -> None:
        self.context = context
        if context.keeps_graphs:
            options = replace(options, retain_graph=True)
        self.options = options
        if options.create_graph:
            context.has_history = True
        self.queue = WorkQueue()
        self.abandoned = False
        """Whether the pass has failed or ended: no further group runs, and what one computes is dropped."""
        self._worker = worker
        self._sends = context.sends() if sends is None else sends
        self.captures: Captures | None = None
        """What the pass returns."""
        if not options.accumulate:
            self.captures = inputs if isinstance(inputs, Captures) else Captures(inputs)
            repeats = context.computes_again
            self._sends = self.captures.find_ways(roots, self._sends, context.id, repeats)
        self._entry_of = dict(zip((ROOTS, *map(_autograd_id, self._sends)), count(), strict=False))
        self._hooks = hooks_registered()
        # Guards the plan with its gradients, and the three below. A signal handler may look while it is held.
        self._lock = threading.RLock()
        self._version = 0
        self._handled_drops: set[int] = set()
        mode = accumulate_mode(self._hooks) if options.accumulate else AccumulateMode.HOOKED
        # The walk makes many small objects and no garbage; collecting would double its time.
        collects = gc.isenabled()
        try:
            if collects:  # else another thread walks: it collects again as soon as that one has ended
                gc.disable()
            walk = GraphWalk(roots, self._sends, mode, self.captures)
            self._plan = Plan(condense(walk), walk.entries)
        finally:
            if collects:
                gc.enable()
        if mode is AccumulateMode.JOINT:
            check_not_sharded(walk.waiting_leaves)
            find_replicas(walk.edges)
        self._starts, self._numbers = walk.starts, walk.numbers
        self._adds_in_order = bool(options.origin) or walk.starts_at_leaves
        self._task = PassTask(self._starts, self._plan)
        self._differentiation = Differentiation(walk, self._plan, options, self.captures, self._hooks)
        self._id = pass_id
        self._recvs: dict[Any, RecvMetadata] = walk.recvs
        if (captures := self.captures) is not None:
            self._recvs = {
                node: recv
                for node, recv in walk.recvs.items()
                if node not in captures.ends and captures.leads_on(recv)
            }

    @cached_property
    def recomputes(self) -> bool:
        """Whether parts of the forward pass are computed again, so that only one thread may run groups."""
        edges = [start for entry in self._starts for start in entry if isinstance(start, GradientEdge)]
        return recomputes([edge.node for edge in edges])

    def requests_to(self, worker: int) -> tuple[int, ...]:
        """Return the requests that this pass has sent, or may send, to ``worker``."""
        return tuple([recv.autograd_id for recv in self._recvs.values() if recv.peer == worker])

    @property
    def leads_away(self) -> bool:
        """Whether its graph leads to recvs, apart from the arguments of a checkpointed call."""
        return any(recv.arguments_of is None for recv in self._recvs.values())

    def keep_graph(self) -> None:
        """Keep from now on what is saved: a worker before this one does."""
        self.options = replace(self.options, retain_graph=True)
        self._differentiation.options = self.options

    def origin_of(self, worker: int, call: int) -> tuple[int, ...]:
        """Return the origin of an inner pass for a checkpointed call, as of ``PassOptions``."""
        return *(self.options.origin or (self._id,)), worker, call

    def run_inside(self, outer: LocalPass, gradients: Sequence[torch.Tensor]) -> None:
        """Run the whole pass, which does not lead away, in the calling thread, as a part of ``outer``.

        Args:
            outer: the pass that leads through a checkpointed call.
            gradients: of the roots.
        """
        sink = _Arguments()
        try:
            with torch.no_grad():  # in which the engine runs hooks
                self.start(gradients, sink)
                self.drop(0, (), sink)
        finally:
            self.context.close_inner_pass(self._id)
        if outer.captures is not None and self.captures is not None:
            _, *way, number = self.options.origin
            outer.captures.merge(self.captures, (tuple(way), number))

    def checkpoint(self, autograd_id: int) -> Any:
        """Return the checkpointed call whose results have this recv; None if other workers made it."""
        entry = self._entry_of.get(autograd_id)
        return None if entry is None else self._sends[entry - 1].checkpoint

    def abandon(self) -> None:
        """Stop the pass on this worker as soon as the groups that run now are done."""
        self.abandoned = True
        self.queue.abandon()

    def start(self, gradients: Sequence[torch.Tensor], sink: GradientSink) -> None:
        """Enter at the roots. Runs the groups that become ready in the calling thread."""
        self._enter([(ROOTS, gradients)], sink)

    def check(self, arrivals: Sequence[Arrival], source: int) -> None:
        """Check that gradients, which worker ``source`` has sent, belong to sends of this pass.

        Raises:
            AutogradError: if there is no such send to that worker, or the number of gradients is wrong.
        """
        for autograd_id, gradients in arrivals:
            entry = self._entry_of.get(autograd_id, ROOTS)
            if entry == ROOTS:
                raise AutogradError(
                    f"context {show_id(self.context.id)} has no send {show_id(autograd_id)} on worker "
                    f"{self._worker}: gradients came for tensors that were never sent"
                )
            if self._sends[entry - 1].peer != source:
                raise AutogradError(
                    f"gradients for send {show_id(autograd_id)} came from worker {source}, which has not got "
                    f"its tensors"
                )
            if len(gradients) != len(self._starts[entry]):
                raise AutogradError(
                    f"{len(gradients)} gradients came for the {len(self._starts[entry])} tensors of send "
                    f"{show_id(autograd_id)}"
                )

    def arrive(self, arrivals: Sequence[Arrival], sink: GradientSink) -> None:
        """Enter at sends, which must have been checked; each only once. Runs the groups that become ready."""
        if torch.is_anomaly_enabled():
            self._check_nan(arrivals)
        if profiled_anywhere():
            with profiled(SEND_NAME):
                self._enter(arrivals, sink)
        else:
            self._enter(arrivals, sink)

    def drop(self, request: int, sends: Sequence[int], sink: GradientSink) -> bool:
        """Continue without gradients for ``sends``. Runs the groups that become ready.

        Without ``sends``, the pass has come to its end: calls the callbacks that were queued in it.

        Returns:
            False if ``request`` is a repetition, which is ignored.
        """
        with self._lock:
            if request in self._handled_drops:
                return False
            self._handled_drops.add(request)
            ready = [group for send in sends for group in self._plan.drop(self._entry_of[send])]
            self._version += 1
        self._run_ready(ready, sink)
        if not sends:
            self._task.run_callbacks()
        return True

    def _enter(self, arrivals: Sequence[Arrival], sink: GradientSink) -> None:
        ready: list[Group] = []
        at_leaves: list[Part] = []
        with self._lock:
            for autograd_id, gradients in arrivals:
                entry = self._entry_of[autograd_id]
                starts = zip(self._starts[entry], self._numbers[entry], gradients, strict=True)
                for index, (start, number, gradient) in enumerate(starts):
                    if gradient is None:
                        self._task.note_absent(entry, index)
                        continue
                    if gradient is not UNDEFINED and not matches(gradient, start):
                        gradient = self._fit(entry, gradient, start)
                    if isinstance(start, GradientEdge):
                        self._add((start[0], start[1]), gradient, (OF_ENTRIES, number))
                    elif gradient is not UNDEFINED and self.captures is None:
                        at_leaves.append((start, gradient, False, (OF_ENTRIES, number)))
                ready += self._plan.arrive(entry)
            self._version += 1
            if at_leaves:
                self._accumulate_parts(at_leaves)
        if ready:
            self._run_ready(ready, sink)

    def _fit(self, entry: int, gradient: torch.Tensor, start: EdgeOrLeaf) -> torch.Tensor:
        """Return a gradient in the form that its tensor requires.

        Raises:
            AutogradError: if it does not fit; names the worker that sent it, the message and the tensor.
        """
        try:
            return fit(gradient, start)
        except RuntimeError as e:
            index = next(i for i, each in enumerate(self._starts[entry]) if each is start)
            peer, place = self._sends[entry - 1].peer, self._place_of(entry, index)
            raise AutogradError(
                f"worker {peer} returned an invalid gradient at index {index} - {e}; {place}"
            ) from None

    def _place_of(self, entry: int, index: int) -> str:
        """Describe which tensor a gradient is for."""
        send = self._sends[entry - 1]
        return (
            f"it is for tensor {index} of the {len(send.edges)} that worker {self._worker} sent to it in "
            f"message {show_id(send.autograd_id)} ({send.describe()})"
        )

    def _check_nan(self, arrivals: Sequence[Arrival]) -> None:
        """Check in anomaly mode what has arrived: leaves do not check it, and a function would be blamed.

        Raises:
            RuntimeError: if a gradient holds a NaN; names the worker, the message and the call.
        """
        for autograd_id, gradients in arrivals:
            entry = self._entry_of[autograd_id]
            for index, (start, gradient) in enumerate(zip(self._starts[entry], gradients, strict=True)):
                if not has_nan(gradient):
                    continue
                peer, place = self._sends[entry - 1].peer, self._place_of(entry, index)
                error = RuntimeError(f"worker {peer} returned nan values as a gradient; {place}")
                if isinstance(start, GradientEdge):
                    note_forward(error, start.node)
                raise error

    def _add(self, edge: Edge, gradient: torch.Tensor, place: Place) -> None:
        """Add ``gradient`` at an incoming edge of a group. The caller holds the lock."""
        gradients = self._plan.group_of(edge[0]).gradients
        total = gradients.get(edge)
        if total is None:
            total = gradients[edge] = OrderedSum()
        if gradient is not UNDEFINED:
            total.add(place, gradient)

    def _run_ready(self, ready: list[Group], sink: GradientSink) -> None:
        """Run groups, and those that become ready by that.

        One engine call runs groups that lead to recvs only. Those that lead to the same leaf run one by one:
        their sum must not depend on which of them were ready. So do groups with dependents, as the engine
        might not stop at a cut edge (:attr:`Group.reenters`).
        """
        with as_graph_task(self._task):
            while ready and not self.abandoned:
                sink.flush_if_late()
                batch, later = ready, []
                if len(ready) > 1:
                    batch = [group for group in ready if not (group.dependents or group.accumulates)]
                    later = [group for group in ready if group.dependents or group.accumulates]
                if not batch:
                    batch.append(later.pop(0))
                self._run(batch, sink)
                with self._lock:
                    ready = later + self._plan.finished(*batch)

    def _run(self, groups: Sequence[Group], sink: GradientSink) -> None:
        recvs, leaves, captures = self._recvs, self._plan.leaves, self.captures
        gradients: dict[Edge, torch.Tensor] = {}
        at_recv: dict[Any, list[Gradient]] = {}
        waiting: set[Any] = set()
        live: list[Group] = []
        for group in groups:
            if not group.reached:
                continue  # every entry was dropped
            live.append(group)
            for edge, total in group.gradients.items():
                found = total.total()
                gradients[edge] = UNDEFINED if found is None else found
            group.gradients = {}
            for node in group.sinks:
                if node in recvs:
                    at_recv[node] = [None] * recvs[node].outputs
                else:
                    waiting.add(node)
        at_leaves: list[Part] = []
        complete: list[tuple[Any, torch.Tensor, bool]] = []
        results = self._differentiation.run(live, gradients) if gradients else ()
        if self.abandoned:
            return
        for edge, gradient, also_held in results:
            if gradient is None:
                continue
            node = edge[0]
            if node in leaves:
                if gradient is UNDEFINED:
                    continue
                if self._adds_in_order or edge in self._plan.common:
                    place = OF_GROUPS, live[0].outgoing[edge]
                    at_leaves.append((node.variable, gradient, also_held, place))
                else:
                    self._accumulate_only(node, gradient, also_held)
                continue
            if captures is not None and gradient is not UNDEFINED and node in self._plan.sinks:
                captures.note(edge, gradient)
            if node in at_recv:
                at_recv[node][edge[1]] = gradient
            elif node in waiting:
                complete.append((node, gradient, also_held))
            else:
                with self._lock:
                    self._add(edge, gradient, (OF_GROUPS, live[0].outgoing[edge]))
        if at_leaves:
            self._accumulate_parts(at_leaves)
        if complete and captures is None:
            self._accumulate_all(complete)
        for node, at_outputs in at_recv.items():
            sink.send_gradients(recvs[node], self._hooked(node, at_outputs) if self._hooks else at_outputs)

    def _accumulate_only(self, node: Any, gradient: torch.Tensor, shared: bool) -> None:
        """Add the only gradient of a leaf in this pass."""
        leaf = node.variable
        if post_accumulate_hooks(leaf):  # registered since the pass began, or the leaf would wait
            self._accumulate(node, gradient, shared)
        else:
            self.context.accumulate(leaf, gradient, shared)

    def _accumulate_parts(self, parts: Sequence[Part]) -> None:
        """Add gradients to leaves, each at its place in the order."""
        if origin := self.options.origin:
            self.context.accumulate_of_call(parts, self._id, origin)
        else:
            self.context.accumulate_parts(parts, self._id)

    def _accumulate_all(self, complete: Sequence[tuple[Any, torch.Tensor, bool]]) -> None:
        """Accumulate the complete gradients of leaves that waited for them, and run the hooks of their nodes.

        The hooks of the tensors have run. A gradient is ``UNDEFINED`` if nothing was produced.
        """
        if may_have_replicas():
            defined = [(node, gradient) for node, gradient, _ in complete if gradient is not UNDEFINED]
            if defined:
                nodes, gradients = [node for node, _ in defined], [gradient for _, gradient in defined]
                accumulate_by_nodes(
                    self.context, nodes, gradients, self._task.replicas_due, self.options.create_graph
                )
            complete = [each for each in complete if each[1] is UNDEFINED]
        for node, gradient, also_held in complete:
            self._accumulate(node, None if gradient is UNDEFINED else gradient, also_held)

    def _accumulate(self, node: Any, gradient: Gradient, shared: bool) -> None:
        leaf = node.variable
        before, after = node_hooks(node)
        (hooked_grad,) = run_prehooks(before, (gradient,))

        def accumulate() -> Gradient:
            present = self.context.gradient(leaf)  # with what others have added in order
            if hooked_grad is None:
                return present
            return self.context.accumulate(leaf, hooked_grad, shared or hooked_grad is not gradient)

        if after or post_accumulate_hooks(leaf):  # the engine runs them without a gradient, too
            replace = functools.partial(self.context.replace, leaf)
            run_hooks_with_grad(leaf, accumulate, after, hooked_grad, replace)
        else:
            accumulate()

    def _hooked(self, node: Any, gradients: list[Gradient]) -> list[Gradient]:
        """Run the hooks of a recv itself; those of the tensors have run. Returns the gradients they leave."""
        before, after = node_hooks(node)
        if not (before or after) or all(gradient is None for gradient in gradients):
            return gradients
        current = run_prehooks(before, tuple([None if g is UNDEFINED else g for g in gradients]))
        for hook in after:
            hook((), current)
        pairs = zip(gradients, current, strict=True)
        return [UNDEFINED if new is None and old is not None else new for old, new in pairs]

    def is_running(self) -> bool:
        """Whether this worker is handling gradients of the pass, or waits for more of them."""
        if self.queue.is_consumed():
            return True
        with self._lock:
            return self._plan.waits()

    def waiting(self) -> StallReport:
        """Report whether a group that has been reached waits for another entry."""
        with self._lock:
            return StallReport(self._worker, self._version, self._plan.waits(), bool(self._task.callbacks))

    def _recvs_of(self, group: Group) -> tuple[tuple[int, int], ...]:
        """Return the recvs of ``group``: the autograd id and the worker of each."""
        recvs = [self._recvs[node] for node in group.sinks if node in self._recvs]
        return tuple([(recv.autograd_id, recv.peer) for recv in recvs])

    def reach(self, starts_here: bool) -> ReachabilityReport:
        """Report which entries lead to which recvs. ``starts_here``: this worker has the roots."""
        plan = self._plan
        with self._lock:
            arrived = plan.arrived | ({0} if starts_here else set())
            left = [(group, group.reached) for group in plan.groups if not group.ran]
        index = {group: i for i, (group, _) in enumerate(left)}
        mask = bytearray(len(self._sends) // 8 + 1)
        for entry in arrived:
            mask[entry // 8] |= 1 << entry % 8
        return ReachabilityReport(
            self._worker,
            tuple((send.autograd_id, send.peer, send.describe()) for send in self._sends),
            bytes(mask),
            tuple(
                GroupReport(
                    tuple(group.starts),
                    tuple([index[dependent] for dependent in group.dependents]),
                    self._recvs_of(group),
                    reached,
                )
                for group, reached in left
            ),
        )

    def snapshot(self, name: str) -> PassSnapshot:
        """Return the state of this pass; ``name`` is the worker's."""
        plan = self._plan
        with self._lock:
            arrived, groups = set(plan.arrived), [(group, group.ran) for group in plan.groups]
        sends = [(send.autograd_id, send.peer, send.describe()) for send in self._sends]
        snapshots = []
        for group, ran in groups:
            entered = [0 if not i else sends[i - 1][0] for i in plan.entries_of(group)]
            snapshots.append(GroupSnapshot(entered, list(self._recvs_of(group)), ran))
        got = [send for i, (send, _, _) in enumerate(sends, 1) if i in arrived]
        return PassSnapshot(self._worker, name, sends, got, 0 in arrived, snapshots, self.describe())

    def describe(self) -> str:
        """Return the state of all entries and groups as text."""
        with self._lock:
            return self._plan.describe(self._entry_name)

    def _entry_name(self, entry: int) -> str:
        if not entry:
            return "roots"
        send = self._sends[entry - 1]
        return f"send {show_id(send.autograd_id)} to worker {send.peer} ({send.describe()})"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of context {show_id(self.context.id)}: {self.describe()}>"
