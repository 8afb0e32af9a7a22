"""The same call to many workers, and the wait for many answers.

rpc.wait_all(rpc.broadcast(["worker1", "worker2"], load, args=(weights,)))
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from zmqgrad.errors import PeerLostError, RpcTimeoutError
from zmqgrad.rpc.current import current_worker
from zmqgrad.rpc.futures import RpcFuture
from zmqgrad.rpc.options import UNSET_RPC_TIMEOUT, check_timeout
from zmqgrad.rpc.payload import Packed, pack_call
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.future import Outcome

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
    peers = [worker.membership.find(to) for to in workers] if workers is not None else worker.membership.all()
    seconds = worker.seconds(timeout)
    prepared: dict[bool, tuple[str, Packed]] = {}
    futures: list[RpcFuture[Any]] = []
    for peer in peers:
        terms = worker.terms(peer)
        ready = prepared.get(terms.main_by_reference)
        if ready is None:
            ready = pack_call(func, args, kwargs, terms)
            if not ready[1].payload.forks:  # a fork is for one worker alone
                prepared[terms.main_by_reference] = ready
        try:
            futures.append(worker.future(worker.request_call(peer.id, *ready, seconds, func)))
        except PeerLostError as e:
            futures.append(worker.failed(e))
    return futures


def wait_all(futures: Iterable[Any], timeout: float = 0.0) -> list[Any]:
    """The results of all ``futures``, in order; while it waits, a log line tells how far they are.

    Unlike ``torch.futures.wait_all``, it does not wait for the others once one has failed, can be
    interrupted, and can be given ``timeout`` seconds (0: no limit).

    Raises:
        what the first of them to fail raised. RpcTimeoutError: if they are not there in time.
    """
    futures = list(futures)
    deadline = Deadline.after(check_timeout(timeout) or None)
    awaited = _Awaited(len(futures))
    for number, future in enumerate(futures):
        future.add_done_callback(partial(awaited.done, number))
    while not awaited.outcome.wait_done(min(SAY_EVERY, deadline.left())):
        said = f"{len(futures) - len(awaited.left)} of {len(futures)} calls are done"
        if deadline.passed():
            raise RpcTimeoutError(f"{said} after {timeout} s")
        logger.warning("%s", said)
    awaited.outcome.result()
    return [future.wait() for future in futures]


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


class _Awaited:
    """Set once all are done, or one has failed."""

    def __init__(self, count: int) -> None:
        self.outcome: Outcome[None] = Outcome()
        self.left = set(range(count))
        self._lock = threading.Lock()  # guards left
        if not count:
            self.outcome.set(None)

    def done(self, number: int, future: Any) -> None:
        try:
            future.wait()
        except Exception as e:
            self.outcome.fail(e)
        with self._lock:
            self.left.discard(number)
            finished = not self.left
        if finished:
            self.outcome.set(None)
