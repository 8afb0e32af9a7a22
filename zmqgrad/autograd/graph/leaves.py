"""How gradients come to leaves; and those with hooks that Python does not see: of DistributedDataParallel.

It averages the gradients of replicas by hooks in C++ on the nodes of their parameters, which torch shows to
nobody, and looks at ``.grad`` of all of them when the last has run. So wherever this process is in a process
group, and may hold a replica, the leaves of a worker wait for one another in a pass, and are accumulated by
their own nodes in one run of the engine, with ``.grad`` lent to them.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed
from torch.autograd.graph import GradientEdge

from zmqgrad.autograd.context import Context
from zmqgrad.autograd.graph.hooks import any_registered, grads_lent, lending
from zmqgrad.autograd.graph.single import run_nodes


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


def accumulate_by_nodes(context: Context, nodes: Sequence[Any], gradients: Sequence[torch.Tensor]) -> None:
    """Add to the gradients of the leaves of ``nodes`` as torch would; hooks of the tensors have run."""
    leaves = [node.variable for node in nodes]
    with lending():
        present = context.gradients()
        before = [present[leaf].clone() if leaf in present else None for leaf in leaves]
        with grads_lent(leaves, before), _silent(leaves):
            run_nodes([GradientEdge(node, 0) for node in nodes], gradients)
            for leaf in leaves:
                context.replace(leaf, _alone(leaf.grad))


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
