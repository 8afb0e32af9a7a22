"""Evaluation of a single node of the autograd graph on torch's engine.

Used where the engine cannot stop at the edges it should
(:attr:`~zmqgrad.autograd.graph.plan.Group.reenters`), or would run hooks on partial sums
(:mod:`~zmqgrad.autograd.graph.hooks`); and in anomaly mode, which asks for the node that fails. All that the
engine does around a node happens: hooks of its tensors and of the node, checks, and sums and casts to the
shape and type that the next node expects.

The engine looks at the whole graph behind a node before it runs it. So a node of torch's own without hooks is
called directly, and the engine runs only hooks of its tensors, if any, for which it need not look further.
For all other nodes an internal hook, the last to run, stops the engine by an exception; so the engine does
not free what the node has saved, and :func:`release_saved_tensors` does.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from zmqgrad.autograd.graph.hooks import internal_hook, node_hooks
from zmqgrad.autograd.graph.plan import Edge
from zmqgrad.autograd.graph.recomputation import has_saved_tensor_hooks
from zmqgrad.autograd.graph.undefined import UNDEFINED, zero_placeholders
from zmqgrad.autograd.graph.validation import fit, has_form
from zmqgrad.autograd.torch_internals import (
    LEAF_NODE,
    drop_saved_tensors,
    forward_traceback,
    has_tensor_hooks,
    input_metadata,
    is_python_function,
    run_engine,
)
from zmqgrad.errors import AutogradError

Gradient = torch.Tensor | None


FORWARD_NOTE = "_zmqgrad_forward_note"
"""The attribute of an error with the note of :func:`note_forward`."""


def note_forward(error: Exception, node: Any) -> None:
    """Note at ``error`` the forward call that made ``node``, for the report to the caller of ``backward``."""
    trace, name = forward_traceback(node), type(node).__name__
    note = (
        f"Traceback of the forward call of {name} that caused the error:\n{trace}"
        if trace
        else f"The forward call of {name} is not known: anomaly mode was disabled there."
    )
    setattr(error, FORWARD_NOTE, f"\n{note}")


def has_nan(gradient: Gradient) -> bool:
    """Whether ``gradient`` holds a NaN, and anomaly mode checks for that."""
    if gradient is None or gradient is UNDEFINED or not torch.is_anomaly_check_nan_enabled():
        return False
    values = gradient if gradient.layout is torch.strided else gradient.coalesce().values()
    return bool(values.isnan().any())


def check_nan(node: Any, produced: Sequence[Gradient]) -> None:
    """Check in anomaly mode what ``node`` has produced, as torch's engine does.

    Raises:
        RuntimeError: if a gradient holds a NaN.
    """
    for i, gradient in enumerate(produced):
        if has_nan(gradient):
            error = RuntimeError(f"Function '{type(node).__name__}' returned nan values in its {i}th output.")
            note_forward(error, node)
            raise error


class _Stop(Exception):
    """Stops the engine after the node has run."""


def shared(gradients: Sequence[Gradient]) -> list[bool]:
    """Return for each of ``gradients`` whether anything but this sequence holds it.

    A backward function or a hook may keep it, or return one tensor twice. Torch, too, checks reference
    counts before it uses a gradient in place.
    """
    return list(map(_UNSHARED_COUNT.__lt__, map(sys.getrefcount, gradients)))


_UNSHARED_COUNT = next(map(sys.getrefcount, [object()]))


def evaluate_node(
    node: Any,
    gradients: Sequence[Gradient],
    following: Sequence[Edge],
    retain_graph: bool = False,
    create_graph: bool = False,
) -> list[Gradient]:
    """Compute the gradients of the inputs of ``node`` from those of its outputs.

    Unless ``create_graph``, the calling thread must be in ``torch.no_grad()``.

    Args:
        node: the node.
        gradients: of its outputs; None where it was not reached, or ``UNDEFINED``.
        following: its ``next_functions``, or nothing in place of those that need no gradient.
        retain_graph: keep what it has saved.
        create_graph: record the computation.

    Returns:
        One for each of ``following``: ``UNDEFINED`` where the node produces none; None where nothing follows,
        and everywhere if all ``gradients`` are None.
    """
    if not create_graph and _may_be_called(node, gradients, following):
        return _call(node, gradients, following)
    present = [i for i, g in enumerate(gradients) if g is not None]
    # All of them: a node computes only the gradients that are requested from the engine.
    targets = dict.fromkeys([edge for edge in following if edge[0] is not None])
    if not present or not targets:
        return [None] * len(following)
    defined = {(node, i): g for i in present if (g := gradients[i]) is not None and g is not UNDEFINED}
    produced: Sequence[Gradient]
    if defined:
        produced = _evaluate_alone(node, defined, targets, retain_graph, create_graph)
    elif is_python_function(node):
        with zero_placeholders([(node, i) for i in present]) as placeholders:
            produced = _evaluate_alone(node, placeholders, targets, retain_graph, create_graph)
    else:
        produced = [None] * len(following)
    return [
        UNDEFINED if g is None and e[0] is not None else g for g, e in zip(produced, following, strict=True)
    ]


def _may_be_called(node: Any, gradients: Sequence[Gradient], following: Sequence[Edge]) -> bool:
    """Whether nothing but the own code of ``node`` has to run, on a device without streams."""
    defined = [g for g in gradients if g is not None and g is not UNDEFINED]
    return (
        bool(defined)
        and all([g.is_cpu for g in defined])
        and any([edge[0] is not None for edge in following])
        and not is_python_function(node)
        and not torch.is_anomaly_enabled()
        and not has_saved_tensor_hooks(node)
        and not any(node_hooks(node))
    )


def _call(node: Any, gradients: Sequence[Gradient], following: Sequence[Edge]) -> list[Gradient]:
    given = [None if g is UNDEFINED else g for g in gradients]
    if has_tensor_hooks(node):
        hooked = {(node, i): g for i, g in enumerate(given) if g is not None}
        for (_, i), gradient in zip(hooked, run_engine(hooked, hooked, retain_graph=True), strict=True):
            given[i] = gradient
    returned = node(*given)
    produced: Sequence[Gradient] = returned if isinstance(returned, tuple) else (returned,)
    return [
        None if edge[0] is None else UNDEFINED if gradient is None else _fit(node, i, gradient, edge)
        for i, (gradient, edge) in enumerate(zip(produced, following, strict=True))
    ]


def _fit(node: Any, index: int, gradient: torch.Tensor, edge: Edge) -> torch.Tensor:
    """Return a gradient in the form that the next node expects, like the engine."""
    if type(edge[0]) is not LEAF_NODE and has_form(gradient, input_metadata(*edge)):
        return gradient
    try:
        return fit(gradient, GradientEdge(*edge))
    except RuntimeError as e:
        raise RuntimeError(
            f"Function {node.name()} returned an invalid gradient at index {index} - {e}"
        ) from None


def _evaluate_alone(
    node: Any,
    given: Mapping[Edge, torch.Tensor],
    targets: Iterable[Edge],
    retain_graph: bool,
    create_graph: bool,
) -> list[Gradient]:
    produced: list[Gradient] = []
    own_thread = threading.get_ident()
    on_cpu = all(g.device.type == "cpu" for g in given.values())

    def catch(outputs: Sequence[Gradient], _: Any) -> None:
        if on_cpu and threading.get_ident() != own_thread:
            return  # another pass runs the same node; for other devices the engine has threads of its own
        produced.extend(outputs)
        raise _Stop

    # In anomaly mode the engine would report the stop as an error of the node.
    diagnoses = torch.is_anomaly_enabled()
    with internal_hook(node.register_hook, catch):
        try:
            run_engine(given, targets, retain_graph, create_graph, silent=diagnoses)
        except _Stop:
            pass
        except Exception as e:
            if diagnoses:
                note_forward(e, node)
            raise
        else:
            raise AssertionError(f"torch's engine did not run {node}")
    if diagnoses:
        check_nan(node, produced)
    return produced


def release_saved_tensors(node: Any) -> None:
    """Free what ``node`` has saved, as the engine does without ``retain_graph``. Another run is an error."""
    drop_saved_tensors(node, _raise_freed)


def _raise_freed(_: None) -> torch.Tensor:
    raise AutogradError(
        "Trying to backward through the graph a second time, or to access its saved tensors: the first "
        "pass has freed them. Specify retain_graph=True there if you need a second pass."
    )
