"""How gradients come to leaves; and those with hooks that Python does not see: of DistributedDataParallel.

It averages the gradients of replicas by hooks in C++ on the nodes of their parameters, which torch shows to
nobody, and looks at ``.grad`` of all of them when the last has run. So wherever this process is in a process
group, and may hold a replica, the leaves of a worker wait for one another in a pass, and are accumulated by
their own nodes in one run of the engine, with ``.grad`` lent to them.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed
from torch.autograd.graph import GradientEdge

from zmqgrad.autograd.context import Context
from zmqgrad.autograd.graph.hooks import any_registered, grads_lent, lending, our_hook_for_good
from zmqgrad.autograd.graph.single import run_nodes
from zmqgrad.autograd.graph.undefined import calls_user


class Leaves(enum.Enum):
    """How leaves collect their gradients in a pass."""

    PLAIN = "from any group, as it runs"
    HOOKED = "those with hooks wait for all that reaches them"
    TOGETHER = "all wait for all that reaches any of them"


def how_leaves_collect() -> Leaves:
    """What has to be feared in this process, as it is now."""
    if replicas_feared():
        return Leaves.TOGETHER
    return Leaves.HOOKED if any_registered() else Leaves.PLAIN


def replicas_feared() -> bool:
    """May a parameter in this process be that of a replica?"""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


_replicas: weakref.WeakSet[Any] = weakref.WeakSet()  # whose parameters may be unused; guarded by `lending`


def note_replicas(nodes: Iterable[Any]) -> list[Any]:
    """Look for replicas whose parameters may be unused among the nodes of a graph that is to be run.

    Gives a list to which those are added, as their nodes run, whose averages have to be asked for once the
    leaves have their gradients.
    """
    due: list[Any] = []
    for node in nodes:
        known_by = getattr(node, "ddp_weakref", None) if calls_user(node) else None
        replica = None if known_by is None else known_by()
        if replica is not None:
            with lending():
                _replicas.add(replica)
            if replica.static_graph and not replica._static_graph_delay_allreduce_enqueued:
                our_hook_for_good(node.register_prehook, _Postponing(replica, due))
    return due


class _Postponing:
    """A hook before the node of a replica: has it leave out what it does in its first pass."""

    def __init__(self, replica: Any, due: list[Any]) -> None:
        self._replica = weakref.ref(replica)
        self._due = due

    def __call__(self, _: Any) -> None:
        replica = self._replica()
        if replica is not None and not replica._static_graph_delay_allreduce_enqueued:
            replica._static_graph_delay_allreduce_enqueued = True
            self._due.append(replica)


def accumulate_by_nodes(
    context: Context, nodes: Sequence[Any], gradients: Sequence[torch.Tensor], due: list[Any]
) -> None:
    """Add to the gradients of the leaves of ``nodes`` as torch would; hooks of the tensors have run.

    Then the replicas in ``due`` average theirs.
    """
    with lending():
        leaves = _with_unused([node.variable for node in nodes])
        present = context.gradients()
        before = [present[leaf].clone() if leaf in present else None for leaf in leaves]
        with grads_lent(leaves, before), _silent(leaves):
            run_nodes([GradientEdge(node, 0) for node in nodes], gradients)
            while due:
                due.pop().reducer._delay_all_reduce()
            for leaf in leaves:
                context.replace(leaf, _alone(leaf.grad))


def _with_unused(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``leaves``, and all parameters of the replicas that any of them belongs to. To be called `lending`."""
    found = dict.fromkeys(leaves)
    for replica in list(_replicas):
        params = [p for p in replica.parameters() if p.requires_grad]
        if not found.keys().isdisjoint(params):
            found.update(dict.fromkeys(params))
    return list(found)


def _alone(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """``gradient``, copied if it is a part of something larger, which others use again."""
    if gradient is None or gradient.layout is not torch.strided:
        return gradient
    whole = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
    return gradient if whole else gradient.clone()


@contextmanager
def _silent(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside it, hooks of these tensors do not run in the calling thread: they have already."""
    us = threading.get_ident()
    with ExitStack() as stack:
        for leaf in leaves:
            hooks = leaf._backward_hooks
            if hooks:
                stack.callback(hooks.update, dict(hooks))
                # On other devices the engine uses threads of its own, for all passes.
                thread = us if leaf.device.type == "cpu" else None
                hooks.update({key: _elsewhere(hook, thread) for key, hook in hooks.items()})
        yield


def _elsewhere(hook: Callable[[torch.Tensor], Any], thread: int | None) -> Callable[[torch.Tensor], Any]:
    """``hook``, but in ``thread`` (None: in any) it does nothing."""
    return lambda gradient: None if thread in (None, threading.get_ident()) else hook(gradient)
