"""Hooks of tensors and nodes, which run once, on the complete gradient, as in one process.

Torch's engine runs the hooks of a tensor wherever it returns its gradient, which at a cut edge
(:mod:`~zmqgrad.autograd.graph.plan`) is a partial sum. So a group runs node by node if a tensor at one of its
cut edges has hooks (:mod:`~zmqgrad.autograd.graph.node`), and a leaf with hooks waits for its complete
gradient. Torch does not show which hooks a node has: nodes are probed for their own hooks once any node of
this process has had one, and tensors mark their nodes when hooks are registered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from zmqgrad.autograd.torch_internals import (
    Hooks,
    hook_handles_made,
    hooks_beside,
    node_hook_handles_made,
    post_accumulate_hooks,
    tensor_hooks,
)
from zmqgrad.runtime.blocking import blocking_section

# An internal hook is registered and counted under this lock, under which a pass also compares the counts: a
# hook that was counted but not yet registered would make up for one of the program. Reentrant, as registering
# a hook may collect garbage, and finalizers of the program run any code.
_lock = threading.RLock()
_internal_hooks = 0
_internal_node_hooks = 0


def hooks_registered() -> bool:
    """Whether any but internal hooks were ever registered in this process."""
    with _lock:
        return _internal_hooks != hook_handles_made()


def node_hooks_registered() -> bool:
    """Whether any but internal hooks of nodes, not of tensors or modules, were ever registered here."""
    with _lock:
        return _internal_node_hooks != node_hook_handles_made()


@contextmanager
def internal_hook(register: Callable[[Any], RemovableHandle], hook: Any) -> Iterator[None]:
    """Register ``hook`` temporarily, after the existing hooks. :func:`hooks_registered` ignores it."""
    handle = _register(register, hook)
    try:
        yield
    finally:
        handle.remove()


def permanent_internal_hook(register: Callable[[Any], RemovableHandle], hook: Any) -> None:
    """Register ``hook`` for the lifetime of its node. :func:`hooks_registered` ignores it."""
    _register(register, hook)


def _register(register: Callable[[Any], RemovableHandle], hook: Any) -> RemovableHandle:
    global _internal_hooks, _internal_node_hooks
    with _lock:
        handle = register(hook)
        _internal_hooks += 1
        _internal_node_hooks += 1
    return handle


def has_hooks(node: Any) -> bool:
    """Whether a gradient that arrives at the leaf of ``node`` runs any hook."""
    leaf = node.variable
    return bool(tensor_hooks(leaf) or post_accumulate_hooks(leaf)) or any(node_hooks(node))


def node_hooks(node: Any) -> tuple[Hooks, Hooks]:
    """Return the prehooks and the hooks of ``node`` itself."""
    if not node_hooks_registered():
        return [], []
    found: list[Hooks] = []
    for register in (node.register_prehook, node.register_hook):
        handle = _register(register, _probe)
        found.append([hook for hook in hooks_beside(handle) if hook is not _probe])
        handle.remove()
    return found[0], found[1]


def _probe(*_: Any) -> None:
    """A hook without effect, whose handle leads to the others."""


Gradients = tuple[torch.Tensor | None, ...]


def run_prehooks(hooks: Hooks, gradients: Gradients) -> Gradients:
    """Run the prehooks of a node that the engine does not run: of a leaf or a recv.

    Args:
        hooks: the prehooks.
        gradients: the gradients of its outputs; None for one that is undefined.

    Returns:
        The gradients that the hooks have left.

    Raises:
        TypeError: if a hook returns anything but None or a tuple of as many gradients.
        RuntimeError: if a hook replaces an undefined gradient, as in torch.
    """
    current = gradients
    for hook in hooks:
        returned = hook(current)
        if returned is None:
            continue
        if not isinstance(returned, tuple) or len(returned) != len(gradients):
            count = "one gradient" if len(gradients) == 1 else f"{len(gradients)} gradients"
            raise TypeError(f"this hook before a node must return None or a tuple of {count}: {returned!r}")
        if any(old is None and new is not None for old, new in zip(current, returned, strict=True)):
            raise RuntimeError("a hook before a node can't replace a None gradient with a non-None value")
        current = returned
    return current


_turns_lock = threading.RLock()
_turns = threading.Condition(_turns_lock)
_holders: dict[
    int, int
] = {}  # the thread whose gradients are in `.grad`, by id of the leaf; guarded by `_turns_lock`


@contextmanager
def swapped_grads(leaves: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> Iterator[None]:
    """Set ``.grad`` of ``leaves`` to ``gradients``, and restore the former values on exit.

    Waits until no other thread has swapped any of them. No lock is held then, as hooks of the program run in
    it, which may take long or begin other passes: only those that run hooks of the same leaves wait. A swap
    within one of the same thread is restored first.
    """
    thread, ids = threading.get_ident(), {id(leaf) for leaf in leaves}

    def is_free() -> bool:
        return all([_holders.get(each, thread) == thread for each in ids])

    with _turns_lock:
        if not is_free():
            with blocking_section():  # the hook that holds them may need a thread of this pool
                _turns.wait_for(is_free)
        ids.difference_update(_holders)
        _holders.update(dict.fromkeys(ids, thread))
    before = [leaf.grad for leaf in leaves]
    try:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        yield
    finally:
        for leaf, gradient in zip(leaves, before, strict=True):
            leaf.grad = gradient
        with _turns_lock:
            for each in ids:
                del _holders[each]
            _turns.notify_all()


def run_hooks_with_grad(
    leaf: torch.Tensor,
    accumulate: Callable[[], torch.Tensor | None],
    after: Hooks,
    gradient: torch.Tensor | None,
    replace: Callable[[torch.Tensor | None], object],
) -> None:
    """Run the hooks that find the sum of all gradients in ``leaf.grad``, as in one process.

    Only one thread at a time does this for a leaf: what hooks leave would replace what another pass adds.

    Args:
        leaf: the leaf; its post-accumulate hooks run.
        accumulate: adds the gradient of this pass to that of the context, and returns the sum.
        after: the hooks of the leaf's node. An optimizer that steps in the backward pass is one.
        gradient: what this pass adds.
        replace: called with what the hooks have left in ``leaf.grad``.
    """
    with swapped_grads((leaf,), (None,)):
        leaf.grad = accumulate()
        for hook in post_accumulate_hooks(leaf):
            hook(leaf)
        for hook in after:
            hook((), (gradient,))
        replace(leaf.grad)
