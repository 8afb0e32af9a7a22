"""The same call to many workers, and the wait for many answers.

rpc.wait_all(rpc.broadcast(["worker1", "worker2"], load, args=(weights,)))

Once this module was imported, ``torch.futures.wait_all`` and ``collect_all`` stop at the first of our futures
to fail, too, and Ctrl-C interrupts what waits for them.
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
from zmqgrad.rpc.futures import PythonFuture, RpcFuture, alarmed
from zmqgrad.rpc.options import UNSET_RPC_TIMEOUT, check_timeout
from zmqgrad.rpc.packing.packing import pack_call
from zmqgrad.rpc.packing.terms import Packed
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.future import Promise

logger = logging.getLogger(__name__)

SAY_EVERY = 5.0
"""Seconds of waiting after which a log line tells how many answers have come, again and again."""


def broadcast(
    workers: Iterable[object] | None,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> list[RpcFuture[Any]]:
    """Run ``func(*args, **kwargs)`` on each of ``workers`` (None: on all, this one too); gives their futures.

    What is sent is prepared once, not for each, unless it holds RRefs. Arguments and errors are those of
    ``rpc_async``; if one cannot be called because nobody has that name, none is.
    """
    worker = current_worker()
    deadline = Deadline.after(worker.seconds(timeout) or None)
    find = worker.membership.find
    peers = worker.membership.all() if workers is None else [find(w, deadline.timeout()) for w in workers]
    seconds = 0.0 if deadline.timeout() is None else max(1e-6, deadline.left())  # 0 would be no limit
    prepared: dict[bool, tuple[str, Packed]] = {}
    futures: list[RpcFuture[Any]] = []
    for peer in peers:
        terms = worker.terms(peer)
        ready = None if terms.devices else prepared.get(terms.main_by_reference)
        if ready is None:
            ready = pack_call(func, args, kwargs, terms)
            if not (ready[1].payload.forks or terms.devices):  # those are for one worker alone
                prepared[terms.main_by_reference] = ready
        try:
            futures.append(worker.future(worker.request_call(peer.id, *ready, seconds, func)))
        except PeerLostError as e:
            futures.append(worker.failed(e))
    return futures


def wait_all(futures: Iterable[Any], timeout: float = 0.0) -> list[Any]:
    """The results of all ``futures``, in order; while it waits, a log line tells how far they are.

    Like ``torch.futures.wait_all``, it does not wait for the others once one has failed; unlike that, it can
    be given ``timeout`` seconds (0: no limit).

    Raises:
        what the first of them to fail raised. RpcTimeoutError: if they are not there in time.
    """
    futures = list(futures)
    deadline = Deadline.after(check_timeout(timeout) or None)
    with _first_failure(futures) as outcome:
        while not outcome.wait_done(min(SAY_EVERY, deadline.left())):
            said = f"{sum(future.done() for future in futures)} of {len(futures)} calls are done"
            if deadline.passed():
                raise RpcTimeoutError(f"{said} after {timeout} s")
            logger.warning("%s", said)
        return _results(futures, outcome)


@contextmanager
def _first_failure(futures: list[Any]) -> Iterator[Promise[Any]]:
    """Gives an outcome that is set to the first of ``futures`` to fail, or to None once all are done."""
    collected = _collect_in_torch(futures)  # raises where there is something else among them
    outcome: Promise[Any] = Promise()
    torch._C.Future.add_done_callback(collected, lambda _: outcome.set_result(None))
    with alarmed([future for future in futures if isinstance(future, PythonFuture)], outcome):
        yield outcome


def _results(futures: list[Any], outcome: Promise[Any]) -> list[Any]:
    failed = outcome.result()
    if failed is not None:
        failed.wait()  # raises
    return [future.wait() for future in futures]


# Torch waits in C++, deaf to Ctrl-C, and no future that is made in Python counts as failed there, so its own
# functions would wait for the others first. What holds none of ours goes to them.
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
    """At its end, what ``rpc_async`` gave inside it is waited for (torch has it, by this name)."""
    futures = _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            wait_all(futures)
        finally:
            del _thread_local_var.future_list


def note_future(future: RpcFuture[Any]) -> RpcFuture[Any]:
    """``future``, which ``rpc_async`` is about to give."""
    noted = getattr(_thread_local_var, "future_list", None)
    if noted is not None:
        noted.append(future)
    return future
