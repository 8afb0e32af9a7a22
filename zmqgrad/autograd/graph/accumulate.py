"""How leaves accumulate gradients, also where DistributedDataParallel (DDP) has hooks on their nodes.

DDP averages the gradients of replicas by C++ hooks on the nodes of their parameters, which Python cannot see,
and reads ``.grad`` of all of them once the last hook has run. So in a process that belongs to a process
group, and may hold a replica, all leaves of a pass wait for one another. Then their own nodes accumulate them
in one run of the engine, with ``.grad`` swapped for the gradients of the context.
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

from zmqgrad.autograd.context import Context
from zmqgrad.autograd.graph.hooks import permanent_internal_hook, swapped_grads
from zmqgrad.autograd.torch_internals import (
    all_reduce,
    fully_sharded_parameters,
    graph_task,
    mark_postponed,
    postpones_all_reduce,
    replica_of,
    run_leaf_nodes,
    tensor_hooks,
)
from zmqgrad.errors import AutogradError


class AccumulateMode(enum.Enum):
    """When leaves accumulate their gradients in a pass."""

    IMMEDIATE = "as soon as any group produces a gradient"
    HOOKED = "leaves with hooks wait for their complete gradient"
    JOINT = "all leaves wait until all gradients are complete"


def accumulate_mode(hooks: bool) -> AccumulateMode:
    """Return the mode that this process requires. ``hooks``: whether any hooks may be registered."""
    if may_have_replicas():
        return AccumulateMode.JOINT
    return AccumulateMode.HOOKED if hooks else AccumulateMode.IMMEDIATE


def may_have_replicas() -> bool:
    """Whether a parameter in this process may belong to a DDP replica."""
    return _HAS_PROCESS_GROUPS and torch.distributed.is_initialized()


def check_not_sharded(nodes: Iterable[Any]) -> None:
    """Check that none of ``nodes`` belongs to a parameter under ``fully_shard`` (FSDP2).

    Raises:
        AutogradError: if one does. FSDP2 takes gradients from ``.grad`` when a local pass ends: it would find
            none, and train nothing.
    """
    sharded = fully_sharded_parameters()
    if sharded and any(id(node.variable) in sharded for node in nodes):
        raise AutogradError(
            "a parameter under fully_shard (FSDP2) is part of the graph of a context, which cannot train it: "
            "use DistributedDataParallel for this stage, or a process group and allreduce_gradients"
        )


_HAS_PROCESS_GROUPS = torch.distributed.is_available()

_replicas: weakref.WeakSet[Any] = weakref.WeakSet()  # that may have unused parameters
_replicas_lock = threading.Lock()


def find_replicas(nodes: Iterable[Any]) -> None:
    """Find the replicas that may have unused parameters among the nodes of a graph, before it runs.

    The pass that runs such a node notes in its graph task that the replica must average once all leaves have
    their gradients. That may be a later one.
    """
    for node in nodes:
        replica = replica_of(node)
        if replica is not None:
            with _replicas_lock:
                _replicas.add(replica)
            if postpones_all_reduce(replica):
                permanent_internal_hook(node.register_prehook, _PostponeAllReduce(replica))


class _PostponeAllReduce:
    """A prehook of the node of a static-graph replica: postpones its all-reduce in its first pass."""

    def __init__(self, replica: Any) -> None:
        self._replica = weakref.ref(replica)

    def __call__(self, _: Any) -> None:
        replica, task = self._replica(), graph_task()
        if replica is not None and task is not None and postpones_all_reduce(replica):
            mark_postponed(replica)
            task.replicas_due.append(replica)


def accumulate_by_nodes(
    context: Context,
    nodes: Sequence[Any],
    gradients: Sequence[torch.Tensor],
    due: list[Any],
    create_graph: bool = False,
) -> None:
    """Accumulate the gradients of leaves by running their nodes; the hooks of the tensors have run before.

    Then the replicas in ``due`` average theirs.
    """
    leaves = _with_unused([node.variable for node in nodes])
    with swapped_grads(leaves, [None] * len(leaves)), _without_tensor_hooks(leaves):
        present = context.gradients()  # only now: another pass of the context may have waited for its turn
        with torch.enable_grad():  # an earlier pass may have left a history
            for leaf in leaves:
                leaf.grad = present[leaf].clone() if leaf in present else None
        run_leaf_nodes(nodes, gradients, create_graph)
        while due:
            all_reduce(due.pop())
        for leaf in leaves:
            context.replace(leaf, _unaliased(leaf.grad))


def _with_unused(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``leaves`` and all parameters of their replicas."""
    found = dict.fromkeys(leaves)
    with _replicas_lock:
        replicas = list(_replicas)
    for replica in replicas:
        params = [p for p in replica.parameters() if p.requires_grad]
        if not found.keys().isdisjoint(params):
            found.update(dict.fromkeys(params))
    return list(found)


def _unaliased(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return ``gradient``, or a copy if it is a view of a larger buffer, which DDP reuses."""
    if gradient is None or gradient.layout is not torch.strided:
        return gradient
    whole = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
    return gradient if whole else gradient.clone()


@contextmanager
def _without_tensor_hooks(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Disable the hooks of these tensors in the calling thread: they have run."""
    own_thread = threading.get_ident()
    with ExitStack() as stack:
        for leaf in leaves:
            hooks = tensor_hooks(leaf)
            if hooks:
                stack.callback(hooks.update, dict(hooks))
                # For other devices the engine has threads of its own, which all passes share.
                thread = own_thread if leaf.device.type == "cpu" else None
                hooks.update({key: _except_in(hook, thread) for key, hook in hooks.items()})
        yield


def _except_in(hook: Callable[[torch.Tensor], Any], thread: int | None) -> Callable[[torch.Tensor], Any]:
    """Return ``hook`` with no effect in ``thread`` (None: in any thread)."""
    return lambda gradient: None if thread in (None, threading.get_ident()) else hook(gradient)
