"""Ranges of calls in ``torch.profiler``, such as ``rpc_sync#function(worker0 -> worker1)``.

On the caller a range covers the work of the calling thread: for ``rpc_sync`` the whole call, for
``rpc_async`` and ``remote`` the sending. On the callee ``rpc_serve#...`` covers the function. A profiler
records the thread that started it, and engine threads only with
``experimental_config=_ExperimentalConfig(profile_all_threads=True)``.

Served calls can also be profiled by :mod:`zmqgrad.rpc.server_process_global_profiler`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.profiler import record_function

from zmqgrad.rpc.calls import describe
from zmqgrad.rpc.torch_internals import operator_name
from zmqgrad.rpc.torch_internals import profiled_anywhere as profiled_anywhere
from zmqgrad.rpc.torch_internals import profiled_here as profiled_here
from zmqgrad.runtime.blocking import thread_state
from zmqgrad.transport import tap

if TYPE_CHECKING:
    from zmqgrad.rpc.core import WorkerCore

served_by: list[Any] = []
"""The active profiles of served calls."""

record_served: Callable[[], Any] = nullcontext
"""Returns a range that records for these profiles. Set when the first of them starts."""


def caller_range(how: str, worker: WorkerCore, to: object, what: Any) -> Any:
    """A range for a call that ``worker`` makes, if it is profiled; ``how`` is sync, async or remote."""
    if not profiled_here():
        return thread_state.nothing
    callee = worker.membership.find(to).name
    return record_function(f"rpc_{how}#{_name(what)}({worker.name} -> {callee})")


def _name(what: Any) -> str:
    """The name of a function, as torch's RPC shows it in profiles."""
    if isinstance(what, torch.jit.ScriptFunction):
        return str(what.qualified_name)
    return operator_name(what) or describe(what)


def callee_range(worker: WorkerCore, source: int, what: Any, traceparent: str = "") -> Any:
    """A range for a function that ``worker`` runs for worker ``source``, if it is profiled.

    Args:
        traceparent: the span of the caller; if it has one, the range is a span as well.
    """
    if not traceparent or tap.spans is None:
        is_profiled = served_by or profiled_anywhere()
        return _profiled_callee(worker, source, what) if is_profiled else thread_state.nothing
    caller = worker.membership.name_of(source)
    return _both(
        tap.spans.serve(traceparent, describe(what), caller, worker.name),
        _profiled_callee(worker, source, what),
    )


@contextmanager
def _both(span: AbstractContextManager[object], profiled: Any) -> Iterator[None]:
    with span, profiled:
        yield


def _profiled_callee(worker: WorkerCore, source: int, what: Any) -> Any:
    if not profiled_anywhere():
        return record_served() if served_by else thread_state.nothing
    caller = worker.membership.name_of(source)
    return record_function(f"rpc_serve#{describe(what)}({caller} -> {worker.name})")
