"""Whether a backward pass computes a part of the forward pass again, as ``torch.utils.checkpoint`` does.

A recomputation that draws random numbers (dropout) sets torch's global generators for a while, so no other
one may run at the same time. Its saved tensors have hooks; so have those of ``save_on_cpu``, which are taken
for recomputations, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zmqgrad.autograd.torch_internals import saved_tensors
from zmqgrad.autograd.versions import unpack


def recomputes(nodes: Iterable[Any]) -> bool:
    """Returns whether any of ``nodes`` of torch's graph, or a node that is reached from them, recomputes."""
    seen, todo = set[Any](), list(nodes)
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if has_saved_tensor_hooks(node):
            return True
        todo.extend([following for following, _ in node.next_functions])
    return False


def _is_foreign(hook: Any) -> bool:
    return hook not in (None, unpack)


def has_saved_tensor_hooks(node: Any) -> bool:
    """Return whether hooks of the program unpack any tensor that ``node`` has saved."""
    for saved in saved_tensors(node):
        # Older versions of torch do not tell.
        if saved is not None and _is_foreign(getattr(saved, "unpack_hook", "unknown")):
            return True
    return False
