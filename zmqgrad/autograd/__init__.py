"""Distributed autograd: one backward pass over a graph that spans workers.

    with context() as context_id:
        loss = rpc.rpc_sync("worker1", layer, args=(x,)).sum()
        backward(context_id, [loss])
        grads = get_gradients(context_id)

Guarantees: gradients equal those of the same program in one process (docs/guarantees.md, P7); each node of a
local graph runs once, on torch's own engine; when ``backward`` returns, no message of the pass is in flight.
Gradients are accumulated in the context, never in ``.grad``.

Start reading with :mod:`~zmqgrad.autograd.send_recv` (what a message adds to the graph), then
:mod:`~zmqgrad.autograd.graph.plan` (which nodes of a local graph may run when);
:mod:`~zmqgrad.autograd.engine` runs passes. RPC does not know autograd: :mod:`~zmqgrad.autograd.forwarding`
registers its hooks with the worker.
"""

from __future__ import annotations

from zmqgrad.autograd.api import backward, context, get_gradients, grad
from zmqgrad.autograd.forwarding import install
from zmqgrad.autograd.inspection import (
    DistAutogradContext,
    _current_context,
    _get_debug_info,
    _get_max_id,
    _init,
    _is_valid_context,
    _new_context,
    _release_context,
    _retrieve_context,
    get_debug_info,
    is_available,
)
from zmqgrad.autograd.replicas import allreduce_gradients
from zmqgrad.autograd.visualize import describe_context, draw_context

__all__ = [
    "DistAutogradContext",
    "_current_context",
    "_get_debug_info",
    "_get_max_id",
    "_init",
    "_is_valid_context",
    "_new_context",
    "_release_context",
    "_retrieve_context",
    "allreduce_gradients",
    "backward",
    "context",
    "describe_context",
    "draw_context",
    "get_debug_info",
    "get_gradients",
    "grad",
    "install",
    "is_available",
]
