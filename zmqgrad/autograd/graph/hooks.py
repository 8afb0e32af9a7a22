"""Hooks run once, on the whole gradient, as in one process.

Torch's engine runs the hooks of a tensor wherever it hands its gradient back, which at a border
(:mod:`~zmqgrad.autograd.graph.plan`) is a part of a sum. It does not tell whether a node has any. So as
soon as a hook has been registered anywhere in this process, groups with borders are run node by node
(:mod:`~zmqgrad.autograd.graph.node`), and a leaf with hooks waits for all that reaches it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

_lock = threading.Lock()  # guards the number
_ours = 0


def hooks_registered() -> bool:
    """Has anybody but us registered a hook in this process? Torch counts the handles that it gives out."""
    return getattr(RemovableHandle, "next_id", -1) != _ours


@contextmanager
def internal_hook(register: Callable[[Any], RemovableHandle], hook: Any) -> Iterator[None]:
    """Inside it, ``hook`` is registered, behind the hooks of others. It counts as none."""
    handle = _register(register, hook)
    try:
        yield
    finally:
        handle.remove()


def permanent_internal_hook(register: Callable[[Any], RemovableHandle], hook: Any) -> None:
    """From now on ``hook`` is registered, for as long as its node lives. It counts as none."""
    _register(register, hook)


def _register(register: Callable[[Any], RemovableHandle], hook: Any) -> RemovableHandle:
    global _ours
    with _lock:
        _ours += 1
    return register(hook)


def has_hooks(node: Any) -> bool:
    """Does anything run when a gradient comes to the leaf that ``node`` stands for?"""
    leaf = node.variable
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks) or any(node_hooks(node))


Hooks = list[Callable[..., Any]]


def node_hooks(node: Any) -> tuple[Hooks, Hooks]:
    """What has been registered on ``node`` itself: to run before it, and after it.

    A node does not show its hooks. A handle does: it knows the dictionary that its hook is in.
    """
    found: list[Hooks] = []
    for register in (node.register_prehook, node.register_hook):
        handle = _register(register, _nothing)
        among = handle.hooks_dict_ref()
        handle.remove()
        found.append([hook for hook in (among or {}).values() if hook is not _nothing])
    return found[0], found[1]


def _nothing(*_: Any) -> None:
    """Looks for others."""


def run_prehooks(hooks: Hooks, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """What ``hooks``, to run before a node of one gradient, make of it; None: there is none.

    Raises:
        TypeError: if one gives anything but None or a tuple of one.
        RuntimeError: if one makes a gradient of none, as torch has it.
    """
    flowing = gradient
    for hook in hooks:
        given = hook((flowing,))
        if given is None:
            continue
        if not isinstance(given, tuple) or len(given) != 1:
            raise TypeError(f"a hook before a leaf must give None or a tuple of one gradient, not {given!r}")
        if flowing is None and given[0] is not None:
            raise RuntimeError(
                "can't replace a None gradient with a non-None value: so a hook before a leaf did"
            )
        (flowing,) = given
    return flowing


_grad_lock = threading.RLock()
"""One borrower of ``.grad`` at a time in this process: passes, and optimizers, may share parameters."""


def grad_lock() -> threading.RLock:
    """To be held by who borrows ``.grad``, for longer than one loan lasts."""
    return _grad_lock


@contextmanager
def swapped_grads(
    tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> Iterator[None]:
    """Inside it, ``.grad`` of ``tensors`` are ``gradients``; afterwards they are as before."""
    with _grad_lock:
        before = [t.grad for t in tensors]
        try:
            for t, gradient in zip(tensors, gradients, strict=True):
                t.grad = gradient
            yield
        finally:
            for t, gradient in zip(tensors, before, strict=True):
                t.grad = gradient


def run_post_accumulate_hooks(leaf: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Show ``gradient`` as ``leaf.grad`` to the hooks; gives what they leave there."""
    with swapped_grads((leaf,), (gradient,)):
        for hook in list((leaf._post_accumulate_grad_hooks or {}).values()):
            hook(leaf)
        return leaf.grad
