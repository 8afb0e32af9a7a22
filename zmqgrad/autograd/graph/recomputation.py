"""Whether a backward pass computes a part of the forward pass again, as ``torch.utils.checkpoint`` does.

A recomputation that draws random numbers (dropout) sets torch's global generators for a while, so no other
one may run at the same time. Its saved tensors have hooks; so have those of ``save_on_cpu``, which are taken
for recomputations, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from zmqgrad.autograd.versions import unpack

_SAVED: dict[type, tuple[str, ...]] = {}
"""The names of the attributes that are saved tensors, by type of node."""


def recomputes(nodes: Iterable[Any], checks: Callable[[Any], bool] | None = None) -> bool:
    """Returns whether any of ``nodes`` of torch's graph, or a node that is reached from them, recomputes.

    ``checks`` tells a hook of saved tensors that does; None: all hooks of the program do.
    """
    seen, todo = set[Any](), list(nodes)
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if has_saved_tensor_hooks(node, checks or _is_foreign):
            return True
        todo.extend([following for following, _ in node.next_functions])
    return False


def _is_foreign(hook: Any) -> bool:
    return hook not in (None, unpack)


def has_saved_tensor_hooks(node: Any, checks: Callable[[Any], bool] = _is_foreign) -> bool:
    """Return whether hooks for which ``checks`` holds unpack any tensor that ``node`` has saved."""
    for name in _saved_tensors(type(node)):
        try:
            saved = getattr(node, name)
        except RuntimeError:
            continue  # it has run already, and nothing is saved any more
        for each in saved if isinstance(saved, (tuple, list)) else (saved,):
            # Older versions of torch do not tell.
            if each is not None and checks(getattr(each, "unpack_hook", "unknown")):
                return True
    return False


def _saved_tensors(kind: type) -> tuple[str, ...]:
    if kind not in _SAVED:
        _SAVED[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
    return _SAVED[kind]
