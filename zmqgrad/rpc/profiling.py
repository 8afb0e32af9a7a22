"""Calls in ``torch.profiler``: a range ``rpc_sync#function(worker0 -> worker1)`` around each.

On the caller a range spans what the calling thread does: for ``rpc_sync`` the whole call, for ``rpc_async``
and ``remote`` the sending. On the callee ``rpc_serve#...`` spans the function. A profiler records the thread
that started it; engine threads show where it was told to record all
(``experimental_config=_ExperimentalConfig(profile_all_threads=True)``).

While no profiler is active, a call pays for two looks at a flag, and one whether what is served is profiled
(:mod:`zmqgrad.rpc.server_process_global_profiler`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import profiler

from zmqgrad.rpc.calls import describe

if TYPE_CHECKING:
    from zmqgrad.rpc.core import WorkerCore

_profiler_enabled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


served_by: list[Any] = []
"""Profiles of what this process runs for others, while they are active."""

record_served: Callable[[], Any] = nullcontext
"""Gives a range that records for these; set by whoever adds the first of them."""


def profiled_here() -> bool:
    """May a profiler record the calling thread? (The one that records all sets no flag of the thread.)"""
    return profiler._is_profiler_enabled or _profiler_enabled()


def profiled_anywhere() -> bool:
    """Does a profiler record any thread of this process?"""
    return profiler._is_profiler_enabled


def serving_is_profiled() -> bool:
    """Does anybody record what this process runs for others?"""
    return profiler._is_profiler_enabled or bool(served_by)


def caller_range(how: str, worker: WorkerCore, to: object, what: Any) -> Any:
    """A range for a call that ``worker`` makes; ``how`` is sync, async or remote."""
    callee = worker.membership.find(to).name
    return profiler.record_function(f"rpc_{how}#{describe(what)}({worker.name} -> {callee})")


def callee_range(worker: WorkerCore, source: int, what: Any) -> Any:
    """A range for a function that ``worker`` runs for another."""
    if served_by and not profiler._is_profiler_enabled:
        return record_served()
    caller = worker.membership.name_of(source)
    return profiler.record_function(f"rpc_serve#{describe(what)}({caller} -> {worker.name})")
