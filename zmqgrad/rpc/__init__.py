"""Calls and references: ``torch.distributed.rpc``'s public names, over any mailbox.

Guarantees: a call's function runs at most once, and exactly once while both processes live; every future is
resolved (P3); user code never runs in the receiver's thread; nested calls cannot starve the engine pool; R1
to R3 of :mod:`~zmqgrad.rpc.references.ledger`.

Start with :mod:`~zmqgrad.rpc.worker` (what happens to a call), then :mod:`~zmqgrad.rpc.references.ledger`.
Who takes part is in :mod:`~zmqgrad.rpc.groups`. Upper floors take part through
:mod:`~zmqgrad.rpc.dispatch`; :mod:`~zmqgrad.rpc.serialization` has the only pickle.

Threads of a worker: the engine's, which read messages, run functions and carry on backward passes (at most
``num_worker_threads`` of them at work, and four more that stand by at the mailbox); a timekeeper; and those
of its mailbox and of its store. Who calls reads the answer itself.
"""

from __future__ import annotations

import zmqgrad.interop  # noqa: F401  process groups of torch meet by zmq:// from now on
from zmqgrad.rpc import backend_registry, constants, functions
from zmqgrad.rpc.api import (
    _get_debug_info,
    _is_current_rpc_agent_set,
    _rref_context_get_debug_info,
    _set_rpc_timeout,
    get_debug_info,
    get_rpc_timeout,
    get_stats,
    get_worker_info,
    get_worker_infos,
    init_rpc,
    is_available,
    on_join,
    on_loss,
    remote,
    rpc_async,
    rpc_sync,
    set_rpc_timeout,
    shutdown,
    wait_for_workers,
)
from zmqgrad.rpc.backend_registry import (
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from zmqgrad.rpc.futures import RpcFuture
from zmqgrad.rpc.gathering import broadcast, wait_all
from zmqgrad.rpc.groups.identity import WorkerInfo
from zmqgrad.rpc.groups.meeting import all_gather, barrier
from zmqgrad.rpc.options import BackendType, RpcBackendOptions, TensorPipeRpcBackendOptions
from zmqgrad.rpc.rref import RRef
from zmqgrad.rpc.server_process_global_profiler import _server_process_global_profile
from zmqgrad.rpc.serving import cancelled, time_left

PyRRef = RRef

__all__ = [
    "BackendType",
    "BackendValue",
    "PyRRef",
    "RRef",
    "RpcBackendOptions",
    "RpcFuture",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "_get_debug_info",
    "_is_current_rpc_agent_set",
    "_rref_context_get_debug_info",
    "_server_process_global_profile",
    "_set_rpc_timeout",
    "all_gather",
    "backend_registered",
    "backend_registry",
    "barrier",
    "broadcast",
    "cancelled",
    "constants",
    "construct_rpc_backend_options",
    "functions",
    "get_debug_info",
    "get_rpc_timeout",
    "get_stats",
    "get_worker_info",
    "get_worker_infos",
    "init_backend",
    "init_rpc",
    "is_available",
    "on_join",
    "on_loss",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "set_rpc_timeout",
    "shutdown",
    "time_left",
    "wait_all",
    "wait_for_workers",
]
