"""Warns of local passes that leave out what flows through calls.

``torch.autograd.grad``, ``torch.autograd.functional`` and ``backward(inputs=...)`` visit only what leads to
their inputs on this worker. A received tensor does not, so torch's engine never reaches it and cannot object,
as it does in ``Tensor.backward()``: the result would silently be a part of the gradient, or zeros.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from zmqgrad.autograd.context import active_context
from zmqgrad.autograd.graph.plan import Edge
from zmqgrad.autograd.graph.undefined import reached
from zmqgrad.autograd.send_recv import RECV_NODE, EdgeOrLeaf, edge_of, edge_or_leaf, recv_metadata
from zmqgrad.autograd.torch_internals import is_of_transform, watch_engine


def install() -> None:
    """Check all local passes of this process from now on."""
    watch_engine(_check)


def _check(outputs: Sequence[EdgeOrLeaf], inputs: Sequence[EdgeOrLeaf]) -> None:
    context = active_context()
    sends = context.sends() if context is not None else ()
    if not sends:
        return
    ends = _edges(inputs)
    if not reached(_edges(outputs), ends, _is_recv):
        return
    if reached([edge_of(place)[:2] for send in sends for place in send.edges], ends):
        warnings.warn(
            "torch.autograd.grad, torch.autograd.functional and backward(inputs=...) work on one worker "
            "only: their gradients lack what flows through calls to other workers. Call "
            "zmqgrad.autograd.grad(context_id, outputs, inputs), or backward(context_id, roots)",
            stacklevel=5,
        )


def _edges(places: Sequence[EdgeOrLeaf]) -> set[Edge]:
    found: set[Edge] = set()
    for place in places:
        if isinstance(place, torch.Tensor) and place.requires_grad:
            if place.is_leaf and is_of_transform(place):
                continue  # it exists in the transform only, so it was not sent; it may have no node
            place = edge_of(edge_or_leaf(place))
        if isinstance(place, GradientEdge):
            found.add((place[0], place[1]))
    return found


def _is_recv(node: Any) -> bool:
    return type(node) is RECV_NODE and recv_metadata(node) is not None
