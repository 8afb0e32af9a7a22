"""Private names of ``torch.distributed.rpc`` that torch's own tests and public libraries use.

They are found where torch has them: in :mod:`zmqgrad.rpc` and :mod:`zmqgrad.rpc.api`. Torch's submodules
``backend_registry``, ``constants`` and ``server_process_global_profiler`` have modules of these names here.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from zmqgrad.errors import NotInitializedError
from zmqgrad.rpc.current import current_worker, current_worker_or_none
from zmqgrad.rpc.futures import RpcFuture
from zmqgrad.rpc.gathering import wait_all
from zmqgrad.rpc.membership.collectives import all_gather, barrier
from zmqgrad.rpc.membership.worker_info import WorkerInfo
from zmqgrad.rpc.options import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT

if TYPE_CHECKING:
    from zmqgrad.rpc.worker import Worker

P = ParamSpec("P")
R = TypeVar("R")

# ---- collectives ------------------------------------------------------------------------------------------


def _all_gather(
    obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Gather ``obj`` from each worker, on all of them; None or an empty set of names means all workers."""
    return all_gather(obj, set(worker_names or ()) or None, timeout)


def _barrier(worker_names: Iterable[str]) -> None:
    """Wait until the named workers have called this; an empty set means all workers."""
    barrier(set(worker_names) or None)


class AllGatherStates:
    """What one collective has gathered, for libraries that write collectives of their own.

    Attributes:
        gathered_objects: the values by worker name.
        proceed_signal: set when ``gathered_objects`` is complete.
    """

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()


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


class Agent:
    """The worker of this process, with those methods of a torch agent that libraries call."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        """Name and id of the worker of that name or id; of this one by default."""
        membership = self._worker.membership
        return membership.own.info if worker is None else membership.find(worker).info

    def get_worker_infos(self) -> list[WorkerInfo]:
        """All known members of the group, this worker included, sorted by id."""
        records = self._worker.membership.all()
        return sorted((record.info for record in records), key=lambda info: info.id)

    def get_debug_info(self) -> dict[str, str]:
        """Counts of threads and calls, by torch's names."""
        return agent_debug_info(self._worker)

    def _get_device_map(self, dst: WorkerInfo) -> dict[torch.device, torch.device]:
        """The device map of this worker for ``dst``; empty if there is none."""
        names = self._worker.membership.own.device_maps.get(dst.name, {})
        return {torch.device(here): torch.device(there) for here, there in names.items()}


def _get_current_rpc_agent() -> Agent:
    """The agent of this process.

    Raises:
        NotInitializedError: if this process has not joined a group.
    """
    worker = current_worker_or_none()
    if worker is None:
        raise NotInitializedError(
            "Current RPC agent is not set! Did you initialize the RPC framework "
            "(e.g. by calling `rpc.init_rpc`)?"
        )
    return Agent(worker)


def _require_initialized(func: Callable[P, R]) -> Callable[P, R]:
    """Decorator: calls of ``func`` raise ``NotInitializedError`` unless this process has joined a group."""

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        current_worker()
        return func(*args, **kwargs)

    return wrapper


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
