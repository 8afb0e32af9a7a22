"""Private names of ``torch.distributed.rpc`` that torch's own tests and public libraries use.

They are found where torch has them: in :mod:`zmqgrad.rpc` and :mod:`zmqgrad.rpc.api`. Torch's submodules
``backend_registry``, ``constants`` and ``server_process_global_profiler`` have modules of these names here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from zmqgrad.rpc.current import current_worker, current_worker_or_none
from zmqgrad.rpc.futures import RpcFuture
from zmqgrad.rpc.gathering import wait_all
from zmqgrad.rpc.membership.collectives import all_gather, barrier
from zmqgrad.rpc.options import DEFAULT_SHUTDOWN_TIMEOUT

if TYPE_CHECKING:
    from zmqgrad.rpc.worker import Worker

_all_gather = all_gather
_barrier = barrier


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Wait until all workers have called this."""
    barrier(None, timeout)


# ---- futures ----------------------------------------------------------------------------------------------

_thread_local_var = threading.local()


@contextmanager
def _wait_all() -> Iterator[None]:
    """Context that waits, at its end, for the futures that ``rpc_async`` returned inside it."""
    futures = _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            wait_all(futures)
        finally:
            del _thread_local_var.future_list


def note_future(future: RpcFuture[Any]) -> RpcFuture[Any]:
    """Record a future of ``rpc_async`` for :func:`_wait_all`, and return it."""
    futures = getattr(_thread_local_var, "future_list", None)
    if futures is not None:
        futures.append(future)
    return future


# ---- the agent --------------------------------------------------------------------------------------------


def _is_current_rpc_agent_set() -> bool:
    """Whether this process has joined a group."""
    return current_worker_or_none() is not None


# ---- debug state ------------------------------------------------------------------------------------------


def _get_debug_info() -> dict[str, str]:
    """The entries of torch's function of that name: references, agent and autograd."""
    worker = current_worker()
    info = {**rref_debug_info(worker), **agent_debug_info(worker)}
    for collect in worker.hooks.debug.values():
        info.update({name: str(value) for name, value in collect().items() if isinstance(value, int)})
    return info


def _rref_context_get_debug_info() -> dict[str, str]:
    """The entries of torch's function of that name: references."""
    return rref_debug_info(current_worker())


def rref_debug_info(worker: Worker) -> dict[str, str]:
    """The entries of torch's ``_rref_context_get_debug_info``, by its names."""
    counts = worker.references.statistics()
    return {
        "num_owner_rrefs": str(counts["owner_rrefs"]),
        "num_forks": str(counts["forks"]),
        "num_pending_users": str(counts["unconfirmed"]),
        "num_pending_futures": str(sum(1 for call in worker.client.pending.all() if call.makes_value)),
    }


def agent_debug_info(worker: Worker) -> dict[str, str]:
    """The entries of a torch agent's ``get_debug_info``."""
    threads = worker.pool.statistics()
    return {
        "agent.num_pending_requests": str(len(worker.client.pending)),
        "agent.thread_pool_size": str(worker.options.num_worker_threads),
        "agent.num_idle_threads": str(threads["idle"]),
        "agent.client_active_calls": str(len(worker.client.pending)),
        "agent.server_active_calls": str(threads["threads"] - threads["idle"] + threads["queued"]),
    }
