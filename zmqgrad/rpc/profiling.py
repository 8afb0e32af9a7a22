"""Calls in ``torch.profiler``: a range ``rpc_sync#function(worker0 -> worker1)`` around each.

On the caller a range spans what the calling thread does: for ``rpc_sync`` the whole call, for ``rpc_async``
and ``remote`` the sending. On the callee ``rpc_serve#...`` spans the function. A profiler records the thread
that started it; engine threads show where it was told to record all
(``experimental_config=_ExperimentalConfig(profile_all_threads=True)``).

While no profiler is active, a call costs two checks of a flag, and one whether served calls are profiled
(:mod:`zmqgrad.rpc.server_process_global_profiler`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch.autograd.profiler import record_function

from zmqgrad.rpc.calls import describe
from zmqgrad.rpc.torch_internals import profiled_anywhere as profiled_anywhere
from zmqgrad.rpc.torch_internals import profiler_enabled_here

if TYPE_CHECKING:
    from zmqgrad.rpc.core import WorkerCore

_NOT_PROFILED = nullcontext()

served_by: list[Any] = []
"""The active profiles of served calls."""

record_served: Callable[[], Any] = nullcontext
"""Returns a range that records for these profiles; set together with the first of them."""


def profiled_here() -> bool:
    """Whether a profiler may record the calling thread. (One for all threads sets no flag of the thread.)"""
    return profiled_anywhere() or profiler_enabled_here()


def caller_range(how: str, worker: WorkerCore, to: object, what: Any) -> Any:
    """A range for a call that ``worker`` makes, if it is profiled; ``how`` is sync, async or remote."""
    if not profiled_here():
        return _NOT_PROFILED
    callee = worker.membership.find(to).name
    return record_function(f"rpc_{how}#{describe(what)}({worker.name} -> {callee})")


def callee_range(worker: WorkerCore, source: int, what: Any) -> Any:
    """A range for a function that ``worker`` runs for worker ``source``, if it is profiled."""
    if not profiled_anywhere():
        return record_served() if served_by else _NOT_PROFILED
    caller = worker.membership.name_of(source)
    return record_function(f"rpc_serve#{describe(what)}({caller} -> {worker.name})")
