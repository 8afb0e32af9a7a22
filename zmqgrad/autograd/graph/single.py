"""One node of the autograd graph, run by itself on torch's engine, and stopped before anything follows.

Used where the engine cannot be told to stop (:mod:`~zmqgrad.autograd.graph.border`), or would run hooks on
parts of sums where it does (:mod:`~zmqgrad.autograd.graph.hooks`). What the engine does around a node it
does here too: hooks of its tensors and of the node itself, checks, sums to the shape and casts to the type
that the next node was made with. It is stopped by an exception in a hook of ours, the last that runs; so
the engine does not free what the node has saved, and :func:`let_go` does.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from zmqgrad.autograd.graph.hooks import our_hook
from zmqgrad.autograd.graph.undefined import UNDEFINED, calls_user, stood_in_for
from zmqgrad.errors import AutogradError

Gradient = torch.Tensor | None


class _Stop(Exception):
    """The node has run."""


def run_engine(
    starts: tuple[GradientEdge, ...],
    gradients: tuple[torch.Tensor, ...],
    ends: tuple[GradientEdge, ...],
    retain_graph: bool,
) -> Sequence[Gradient]:
    """What ``torch.autograd.grad`` does, without its preparations.

    Those load sympy at the first call (half a second in every process) and take as long as the engine needs
    for a small graph; what they check and fill in, we know.
    """
    if _engine is None:
        return torch.autograd.grad(starts, ends, gradients, retain_graph=retain_graph, allow_unused=True)
    found: Sequence[Gradient] = _engine(
        starts, gradients, retain_graph, False, ends, True, accumulate_grad=False
    )
    return found


def added(present: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The sum of two gradients, as the engine forms it: torch adds sparse to dense, not dense to sparse."""
    if present.layout is not torch.strided and gradient.layout is torch.strided:
        return gradient + present
    return present + gradient


def run_nodes(nodes: Sequence[GradientEdge], gradients: Sequence[torch.Tensor]) -> None:
    """Run the nodes of leaves themselves: they add to ``.grad``."""
    if _engine is None:
        torch.autograd.backward(tuple(nodes), tuple(gradients))
    else:
        _engine(tuple(nodes), tuple(gradients), False, False, (), True, accumulate_grad=True)


def shared(gradients: Sequence[Gradient]) -> list[bool]:
    """For each of ``gradients``: does anything hold it but this sequence, once?

    A backward function or a hook may have kept it, or give one tensor twice. Torch looks at reference counts
    as well before it makes a gradient its own.
    """
    return [count > _ALONE for count in map(sys.getrefcount, gradients)]


_ALONE = next(map(sys.getrefcount, [object()]))

_engine: Callable[..., Any] | None = getattr(
    getattr(torch.autograd.Variable, "_execution_engine", None), "run_backward", None
)


def run_node(node: Any, gradients: Sequence[Gradient], retain_graph: bool = False) -> list[Gradient]:
    """What ``node`` makes of the ``gradients`` of its outputs: one for each of ``node.next_functions``.

    ``UNDEFINED`` where it makes nothing of them; None where nothing follows, and if nothing comes to it.
    """
    came = [i for i, g in enumerate(gradients) if g is not None]
    # All of them: a node makes nothing for what the engine has not been asked for.
    onward = {e: GradientEdge(*e) for e in node.next_functions if e[0] is not None}
    if not came or not onward:
        return [None] * len(node.next_functions)
    given = {GradientEdge(node, i): g for i in came if (g := gradients[i]) is not None and g is not UNDEFINED}
    if given:
        made = _run_alone(node, given, onward, retain_graph)
    elif calls_user(node):
        with stood_in_for([(node, i) for i in came]) as stand_ins:
            made = _run_alone(node, stand_ins, onward, retain_graph)
    else:
        made = [None] * len(node.next_functions)
    followed = [following is not None for following, _ in node.next_functions]
    return [UNDEFINED if g is None and f else g for g, f in zip(made, followed, strict=True)]


def _run_alone(
    node: Any,
    given: Mapping[GradientEdge, torch.Tensor],
    onward: Mapping[Any, GradientEdge],
    retain_graph: bool,
) -> list[Gradient]:
    made: list[Gradient] = []
    us = threading.get_ident()
    on_cpu = all(g.device.type == "cpu" for g in given.values())

    def catch(outputs: Sequence[Gradient], _: Any) -> None:
        if on_cpu and threading.get_ident() != us:
            return  # another pass runs the same node; on other devices the engine uses threads of its own
        made.extend(outputs)
        raise _Stop

    with our_hook(node.register_hook, catch):
        try:
            run_engine(tuple(given), tuple(given.values()), tuple(onward.values()), retain_graph)
        except _Stop:
            return made
    raise AssertionError(f"torch's engine did not run {node}")


def let_go(node: Any) -> None:
    """Free what ``node`` has saved, as the engine does without ``retain_graph``; another run is an error.

    What is packed already (by ``saved_tensors_hooks``, as checkpoints are) stays until the graph goes.
    """
    kind: Any = type(node)
    for name in _saved_names(kind):
        try:
            found = getattr(node, name)
        except RuntimeError:
            continue  # freed before, by another pass
        for saved in found if isinstance(found, (tuple, list)) else (found,):
            # None, freed or packed: torch has no way to ask, but refuses.
            with contextlib.suppress(RuntimeError):
                saved.register_hooks(_freed, _refuse)


@functools.lru_cache(maxsize=4096)
def _saved_names(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _freed(_: torch.Tensor) -> None:
    """Keeps nothing of a saved tensor."""


def _refuse(_: None) -> torch.Tensor:
    raise AutogradError(
        "Trying to backward through the graph a second time, or to look at what it has saved: that was "
        "freed by the first pass. Say retain_graph=True there, if there is to be a second."
    )


def outputs_of(node: Any) -> int:
    """How many outputs ``node`` has, each with a gradient of its own."""
    return len(node._input_metadata)
