"""One backward pass on one worker: gradients enter at the roots and at sends, and leave at leaves and recvs.

What lies between is for two classes to say: :mod:`~zmqgrad.autograd.passes.routes` where no two entries meet,
which is most graphs, and :mod:`~zmqgrad.autograd.passes.engine` where they do; a walk over the graph finds
out which (:mod:`~zmqgrad.autograd.passes.survey`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import GradientEdge

from zmqgrad.autograd.context import Context
from zmqgrad.autograd.functions import RecvNote, Send, Start, edge_of, start_of
from zmqgrad.autograd.graph.hooks import node_hooks, run_post_accumulate_hooks, run_prehooks
from zmqgrad.autograd.graph.leaves import accumulate_by_nodes, replicas_feared
from zmqgrad.autograd.graph.plan import bits
from zmqgrad.autograd.graph.single import Gradient
from zmqgrad.autograd.graph.undefined import UNDEFINED
from zmqgrad.autograd.passes.desk import Arrival, Desk
from zmqgrad.autograd.profiling import SEND_NAME, profiled
from zmqgrad.errors import AutogradError
from zmqgrad.rpc.profiling import profiled_anywhere
from zmqgrad.wire.ids import show_id
from zmqgrad.wire.messages import ReachabilityReport, StallReport


class Outlet(Protocol):
    """Takes what leaves at recvs."""

    def send_on(self, note: RecvNote, gradients: Sequence[Gradient]) -> None:
        """The gradients of a recv are complete, and go to its send: at once, or with others."""

    def let_go(self) -> None:
        """More is about to be run: what has waited long enough for others goes now."""


class Entries:
    """Where gradients enter: at the roots, then at each of the sends."""

    __slots__ = ("sends", "starts")

    def __init__(self, roots: Sequence[torch.Tensor], sends: list[Send]) -> None:
        self.sends = sends
        self.starts: list[Sequence[Start]] = [list(map(start_of, roots))]
        self.starts += [send.starts for send in sends]

    def edges(self) -> list[Sequence[GradientEdge]]:
        """The starts, leaves included, as edges of the graph."""
        return [list(map(edge_of, starts)) for starts in self.starts]


class FlowView(NamedTuple):
    """A group: the sends that it waits for (0: the roots), the recvs it leads to, and whether it has run."""

    enter: list[int]
    leave: list[tuple[int, int]]
    ran: bool


class PassView(NamedTuple):
    """A pass on one worker as it stands: a copy that can travel."""

    worker: int
    name: str
    sends: list[tuple[int, int, str]]
    arrived: list[int]
    started: bool
    flows: list[FlowView]
    text: str


class LocalPass(ABC):
    """One backward pass on one worker. Entry 0 are the roots, entry i + 1 is send i."""

    def __init__(self, context: Context, worker: int, retain_graph: bool, entries: Entries) -> None:
        self.context = context
        self.retain_graph = retain_graph
        self.desk = Desk()
        self.replicas_due: list[Any] = []
        """Replicas that average their gradients once the leaves have them."""
        self._worker = worker
        self._lock = threading.Lock()  # guards what has arrived, and the gradients that wait
        self._starts: Sequence[Sequence[Start]] = entries.starts
        self._sends = entries.sends
        self._entry_of = {send.autograd_id: i + 1 for i, send in enumerate(self._sends)}

    def start(self, gradients: Sequence[torch.Tensor], outlet: Outlet) -> None:
        """Enter at the roots. Runs what becomes ready in the calling thread."""
        self._enter([(0, gradients)], outlet)

    def check(self, arrivals: Sequence[Arrival]) -> None:
        """May gradients for these sends come here?

        Raises:
            AutogradError: if there is no such send, or its gradients do not fit it.
        """
        for autograd_id, gradients in arrivals:
            entry = self._entry_of.get(autograd_id)
            if entry is None:
                raise AutogradError(
                    f"context {show_id(self.context.id)} has no send {show_id(autograd_id)} on worker "
                    f"{self._worker}: gradients came for tensors that were never sent"
                )
            if len(gradients) != len(self._starts[entry]):
                raise AutogradError(
                    f"{len(gradients)} gradients came for the {len(self._starts[entry])} tensors of send "
                    f"{show_id(autograd_id)}"
                )

    def arrive(self, arrivals: Sequence[Arrival], outlet: Outlet) -> None:
        """Enter at sends that have been checked, each once. Runs what becomes ready in the calling thread."""
        entered = [(self._entry_of[send], gradients) for send, gradients in arrivals]
        if profiled_anywhere():
            with profiled(SEND_NAME):
                self._enter(entered, outlet)
        else:
            self._enter(entered, outlet)

    @abstractmethod
    def _enter(self, arrivals: Sequence[Arrival], outlet: Outlet) -> None:
        """The gradients of entries are there."""

    @abstractmethod
    def drop(self, request: int, sends: Sequence[int], outlet: Outlet) -> bool:
        """Nothing will arrive for ``sends``. Runs what becomes ready in the calling thread.

        False if ``request`` has come before: nothing is done.
        """

    @abstractmethod
    def waiting(self) -> StallReport:
        """Does anything wait that has been reached?"""

    @abstractmethod
    def _state(self) -> tuple[int, list[tuple[int, list[RecvNote], bool]]]:
        """What has arrived, and for each group its entries, its recvs, and whether it has run."""

    @abstractmethod
    def describe(self) -> str:
        """Entries and groups as text: who waits for what."""

    def reach(self, starts_here: bool) -> ReachabilityReport:
        """What leads where. ``starts_here``: the roots are here, whether or not they have been entered."""
        arrived, groups = self._state()
        size = len(self._sends) // 8 + 1
        return ReachabilityReport(
            self._worker,
            tuple((send.autograd_id, send.peer, send.describe()) for send in self._sends),
            (arrived | starts_here).to_bytes(size, "little"),
            tuple(
                (entries.to_bytes(size, "little"), tuple((r.autograd_id, r.peer) for r in recvs))
                for entries, recvs, ran in groups
                if not ran and (recvs or entries & (entries - 1))  # else nothing depends on it
            ),
        )

    def view(self, name: str) -> PassView:
        """This pass as it stands, for people; ``name`` is the worker's."""
        arrived, groups = self._state()
        sends = [(send.autograd_id, send.peer, send.describe()) for send in self._sends]
        flows = []
        for entries, recvs, ran in groups:
            enter = [0 if not i else sends[i - 1][0] for i in bits(entries)]
            flows.append(FlowView(enter, [(r.autograd_id, r.peer) for r in recvs], ran))
        got = [send for i, (send, _, _) in enumerate(sends) if arrived >> (i + 1) & 1]
        return PassView(self._worker, name, sends, got, bool(arrived & 1), flows, self.describe())

    def _accumulate_all(self, whole: Sequence[tuple[Any, torch.Tensor, bool]]) -> None:
        """Whole gradients of leaves, by their nodes, which may have hooks; those of the tensors have run.

        ``UNDEFINED`` where nothing came. With each gradient, whether others hold it as well.
        """
        if whole and replicas_feared():
            there = [(node, gradient) for node, gradient, _ in whole if gradient is not UNDEFINED]
            if there:
                nodes, gradients = [node for node, _ in there], [gradient for _, gradient in there]
                accumulate_by_nodes(self.context, nodes, gradients, self.replicas_due)
            whole = [each for each in whole if each[1] is UNDEFINED]
        for node, gradient, also_held in whole:
            self._accumulate(node, None if gradient is UNDEFINED else gradient, also_held)

    def _accumulate(self, node: Any, gradient: Gradient, shared: bool) -> None:
        leaf = node.variable
        before, after = node_hooks(node)
        bent = run_prehooks(before, gradient)
        if bent is None:
            total = self.context.gradient(leaf)
        else:
            total = self.context.accumulate(leaf, bent, shared or bent is not gradient)
        if leaf._post_accumulate_grad_hooks:  # the engine runs them where nothing came, too
            self.context.replace(leaf, run_post_accumulate_hooks(leaf, total))
        for hook in after:
            hook((), (bent,))

    def _entry_name(self, entry: int) -> str:
        if not entry:
            return "roots"
        send = self._sends[entry - 1]
        return f"send {show_id(send.autograd_id)} to worker {send.peer} ({send.describe()})"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of context {show_id(self.context.id)}: {self.describe()}>"
