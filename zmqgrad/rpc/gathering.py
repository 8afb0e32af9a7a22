"""Broadcasting a call to many workers, and waiting for many futures.

rpc.wait_all(rpc.broadcast(["worker1", "worker2"], load, args=(weights,)))

Importing this module replaces ``torch.futures.wait_all`` and ``collect_all``: in C++, torch does not see that
one of our futures has failed, and would wait for the others first. The replacements return at the first
failure, as torch documents it, and Ctrl-C interrupts them. Calls without our futures go to torch unchanged.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from zmqgrad.errors import PeerLostError, RpcTimeoutError
from zmqgrad.rpc.current import current_worker
from zmqgrad.rpc.futures import PythonFuture, RpcFuture, watch_failures
from zmqgrad.rpc.options import UNSET_RPC_TIMEOUT, check_timeout
from zmqgrad.rpc.serialization.context import SerializedPayload
from zmqgrad.rpc.serialization.serializer import serialize_call
from zmqgrad.rpc.torch_internals import CppFuture
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.future import Promise

logger = logging.getLogger(__name__)

LOG_INTERVAL_SECONDS = 5.0
"""How often :func:`wait_all` logs its progress."""


def broadcast(
    workers: Iterable[object] | None,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> list[RpcFuture[Any]]:
    """Run ``func(*args, **kwargs)`` on each of ``workers``.

    The call is serialized once for all of them, unless it has RRefs.

    Args:
        workers: names, ranks or WorkerInfos; None: all workers, this one included.
        func, args, kwargs, timeout: as for ``rpc_async``.

    Returns:
        One future for each worker, in the same order.

    Raises:
        UnknownWorkerError: if one of them does not exist; then no call is sent.
    """
    worker = current_worker()
    deadline = Deadline.after(worker.resolve_timeout(timeout) or None)
    find = worker.membership.find
    peers = worker.membership.all() if workers is None else [find(w, deadline.timeout()) for w in workers]
    seconds = 0.0 if deadline.timeout() is None else max(1e-6, deadline.left())  # 0 would be no limit
    prepared: dict[bool, tuple[str, SerializedPayload]] = {}
    futures: list[RpcFuture[Any]] = []
    for peer in peers:
        terms = worker.contexts.for_calls(peer)
        ready = None if terms.devices else prepared.get(terms.main_by_reference)
        if ready is None:
            ready = serialize_call(func, args, kwargs, terms)
            if not (ready[1].payload.forks or terms.devices):  # those are for one worker alone
                prepared[terms.main_by_reference] = ready
        try:
            futures.append(worker.future(worker.request_call(peer.id, *ready, seconds, func)))
        except PeerLostError as e:
            futures.append(worker.replies.failed_future(e))
    return futures


def wait_all(futures: Iterable[Any], timeout: float = 0.0) -> list[Any]:
    """Wait for all ``futures``, logging the progress from time to time.

    Like ``torch.futures.wait_all``, it returns as soon as one of them fails.

    Args:
        futures: any ``torch.futures.Future``.
        timeout: seconds; 0 for no limit.

    Returns:
        Their results, in order.

    Raises:
        RpcTimeoutError: if they are not done in time.
        Exception: what the first future to fail raised.
    """
    futures = list(futures)
    deadline = Deadline.after(check_timeout(timeout) or None)
    with _first_failure(futures) as outcome:
        while not outcome.wait_done(min(LOG_INTERVAL_SECONDS, deadline.left())):
            progress = f"{sum(future.done() for future in futures)} of {len(futures)} calls are done"
            if deadline.passed():
                raise RpcTimeoutError(f"{progress} after {timeout} s")
            logger.warning("%s", progress)
        return _results(futures, outcome)


@contextmanager
def _first_failure(futures: list[Any]) -> Iterator[Promise[Any]]:
    """An outcome that is set to the first of ``futures`` that fails, or to None once all are done."""
    collected = _collect_in_torch(futures)  # raises if one of them is not a future
    outcome: Promise[Any] = Promise()
    CppFuture.add_done_callback(collected, lambda _: outcome.set_result(None))
    with watch_failures([future for future in futures if isinstance(future, PythonFuture)], outcome):
        yield outcome


def _results(futures: list[Any], outcome: Promise[Any]) -> list[Any]:
    failed = outcome.result()
    if failed is not None:
        failed.wait()  # raises
    return [future.wait() for future in futures]


_wait_in_torch = torch.futures.wait_all
_collect_in_torch = torch.futures.collect_all


@functools.wraps(_wait_in_torch)
def _wait_all_early(futures: list[Any]) -> list[Any]:
    if not any(isinstance(future, PythonFuture) for future in futures):
        return _wait_in_torch(futures)
    with _first_failure(futures) as outcome:
        outcome.wait_done()
        return _results(futures, outcome)


@functools.wraps(_collect_in_torch)
def _collect_all_early(futures: list[Any]) -> torch.futures.Future[Any]:
    if not any(isinstance(future, PythonFuture) for future in futures):
        return _collect_in_torch(futures)
    collected: PythonFuture[list[Any]] = PythonFuture()
    watch = ExitStack()
    outcome = watch.enter_context(_first_failure(futures))

    def settle(_: object) -> None:
        watch.close()
        try:
            _results(futures, outcome)
        except Exception as e:
            collected.set_exception(e)
        else:
            collected.set_result(list(futures))

    outcome.add_done_callback(settle)
    return collected


torch.futures.wait_all = _wait_all_early
torch.futures.collect_all = _collect_all_early


_thread_local_var = threading.local()


@contextmanager
def _wait_all() -> Iterator[None]:
    """Waits, at its end, for the futures that ``rpc_async`` returned inside it (torch's private name)."""
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
