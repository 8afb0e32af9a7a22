"""Remote calls and remote references, with the public names of ``torch.distributed.rpc``.

A worker (:mod:`~zmqgrad.rpc.worker`) has a client, which sends requests and decodes their replies, a server,
which runs incoming requests in engine threads (:mod:`~zmqgrad.rpc.callee`), and a table of RRefs, whose
lifetimes :mod:`~zmqgrad.rpc.rref.protocol` decides. :mod:`~zmqgrad.rpc.membership` joins and leaves groups,
:mod:`~zmqgrad.rpc.serialization` serializes values, and upper layers use :mod:`~zmqgrad.rpc.hooks`.

Guarantees: P1 to P3 and R1 to R3 of docs/guarantees.md; user code never runs in the thread that reads
messages; calls that wait inside other calls cannot use up the engine threads.
"""

from __future__ import annotations

import zmqgrad.interop  # noqa: F401  registers zmq:// with torch.distributed
from zmqgrad.rpc import backend_registry, constants, functions
from zmqgrad.rpc.api import (
    AllGatherStates,
    _get_current_rpc_agent,
    _get_debug_info,
    _is_current_rpc_agent_set,
    _rref_context_get_debug_info,
    _set_rpc_timeout,
    checkpoint,
    checkpoint_async,
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
from zmqgrad.rpc.gathering import as_completed, broadcast, wait_all
from zmqgrad.rpc.groups.future import GroupFuture
from zmqgrad.rpc.groups.group import WorkerGroup, group
from zmqgrad.rpc.groups.rrefs import RRefGroup
from zmqgrad.rpc.in_flight import cancelled, time_left
from zmqgrad.rpc.membership.collectives import all_gather, barrier
from zmqgrad.rpc.membership.worker_info import WorkerInfo
from zmqgrad.rpc.names import get_ref, remove_ref, watch_ref
from zmqgrad.rpc.options import BackendType, RpcBackendOptions, TensorPipeRpcBackendOptions, removed
from zmqgrad.rpc.publishing import publish
from zmqgrad.rpc.rref.api import RRef
from zmqgrad.rpc.server_process_global_profiler import _server_process_global_profile
from zmqgrad.rpc.subscribing import PublishedTensors, Subscription, subscribe

PyRRef = RRef


def __getattr__(name: str) -> object:
    if name == "ProcessGroupRpcBackendOptions":
        raise removed(f"rpc.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AllGatherStates",
    "BackendType",
    "BackendValue",
    "GroupFuture",
    "PublishedTensors",
    "PyRRef",
    "RRef",
    "RRefGroup",
    "RpcBackendOptions",
    "RpcFuture",
    "Subscription",
    "TensorPipeRpcBackendOptions",
    "WorkerGroup",
    "WorkerInfo",
    "_get_current_rpc_agent",
    "_get_debug_info",
    "_is_current_rpc_agent_set",
    "_rref_context_get_debug_info",
    "_server_process_global_profile",
    "_set_rpc_timeout",
    "all_gather",
    "as_completed",
    "backend_registered",
    "backend_registry",
    "barrier",
    "broadcast",
    "cancelled",
    "checkpoint",
    "checkpoint_async",
    "constants",
    "construct_rpc_backend_options",
    "functions",
    "get_debug_info",
    "get_ref",
    "get_rpc_timeout",
    "get_stats",
    "get_worker_info",
    "get_worker_infos",
    "group",
    "init_backend",
    "init_rpc",
    "is_available",
    "on_join",
    "on_loss",
    "publish",
    "register_backend",
    "remote",
    "remove_ref",
    "rpc_async",
    "rpc_sync",
    "set_rpc_timeout",
    "shutdown",
    "subscribe",
    "time_left",
    "wait_all",
    "wait_for_workers",
    "watch_ref",
]
