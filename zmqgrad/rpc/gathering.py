"""Broadcasting a call to many workers, and waiting for many futures.

rpc.wait_all(rpc.broadcast(["worker1", "worker2"], load, args=(weights,)))

``torch.futures.wait_all`` and ``collect_all`` accept the same futures, but raise an error only when all
of them are done: C++ does not see that a Python future failed. They block in C++, where Ctrl-C cannot
interrupt them and the thread pool does not see that one of its threads waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from zmqgrad.errors import ArgumentTypeError, RpcTimeoutError
from zmqgrad.rpc.current import current_worker
from zmqgrad.rpc.futures import Endings, RpcFuture
from zmqgrad.rpc.groups.future import GroupFuture, in_order
from zmqgrad.rpc.groups.sending import same_for_all
from zmqgrad.rpc.options import UNSET_RPC_TIMEOUT, check_timeout
from zmqgrad.rpc.torch_internals import CppFuture
from zmqgrad.runtime.arguments import as_list
from zmqgrad.runtime.blocking import check_may_wait
from zmqgrad.runtime.clock import Deadline

T = TypeVar("T")
F = TypeVar("F")

logger = logging.getLogger(__name__)

LOG_INTERVAL_SECONDS = 5.0
"""How often :func:`wait_all` logs its progress."""


def broadcast(
    workers: Iterable[object] | None,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> list[RpcFuture[T]]:
    """Run ``func(*args, **kwargs)`` on each of ``workers``.

    The call is serialized once for all of them, unless it has RRefs.

    Args:
        workers: names, ranks or WorkerInfos; None: all workers, this one included.
        func, args, kwargs, timeout: as for ``rpc_async``.

    Returns:
        One future for each worker, in the same order.

    Raises:
        UnknownWorkerError: if one of them does not exist; then no call is sent.
        ArgumentTypeError: if ``workers`` is no list.

    Example:
        >>> rpc.wait_all(rpc.broadcast(["worker0", "worker1"], torch.sqrt, args=(torch.tensor(4.0),)))
        [tensor(2.), tensor(2.)]
    """
    workers = None if workers is None else as_list(workers, "broadcast: workers must be a list of workers")
    worker = current_worker()
    deadline = Deadline.after(worker.resolve_timeout(timeout) or None)
    find = worker.membership.find
    peers = worker.membership.all() if workers is None else [find(w, deadline.timeout()) for w in workers]
    members = [peer.info for peer in peers]
    call = same_for_all(worker, members, (func, args, kwargs), deadline.call_timeout(), "return")
    return list(GroupFuture[T](call).futures)


def wait_all(futures: Iterable[Any], timeout: float = 0.0) -> list[Any]:
    """Wait for all ``futures``, logging the progress from time to time.

    Raises as soon as one of them fails. Ctrl-C interrupts it, and another thread of the pool works meanwhile.

    Args:
        futures: any ``torch.futures.Future``.
        timeout: seconds; 0 for no limit.

    Returns:
        Their results, in order.

    Raises:
        RpcTimeoutError: if they are not done in time.
        ArgumentTypeError: if they are no list, or one of them is not a future.
        Exception: what the first future to fail raised.

    Example:
        >>> futures = [rpc.rpc_async("worker1", pow, args=(2, n)) for n in range(4)]
        >>> rpc.wait_all(futures, timeout=30)
        [1, 2, 4, 8]
    """
    futures = _checked(futures)
    deadline = Deadline.after(check_timeout(timeout) or None)
    endings = Endings(futures)
    if not all(future.done() for future in futures):
        check_may_wait()
    results: dict[int, Any] = {}
    while len(results) < len(futures):
        index = endings.wait(min(LOG_INTERVAL_SECONDS, deadline.left()))
        if index is not None:
            results[index] = futures[index].wait()  # raises if it has failed
            continue
        progress = f"{len(results)} of {len(futures)} calls are done"
        if deadline.passed():
            raise RpcTimeoutError(f"{progress} after {timeout} s")
        logger.warning("%s", progress)
    return [results[index] for index in range(len(futures))]


def as_completed(futures: Iterable[F], timeout: float = 0.0) -> Iterator[F]:
    """Iterate over ``futures`` in the order in which they are done.

    Another thread of the pool works while this waits. A future that has failed is yielded, too: its ``wait``
    raises.

    Args:
        futures: any ``torch.futures.Future``.
        timeout: seconds for all of them; 0 for no limit.

    Returns:
        An iterator. It raises RpcTimeoutError if they are not done in time.

    Raises:
        ArgumentTypeError: if they are no list, or one of them is not a future.

    Example:
        >>> futures = rpc.broadcast(["worker0", "worker1"], abs, args=(-2,))
        >>> [future.wait() for future in rpc.as_completed(futures)]
        [2, 2]
    """
    each, seconds = _checked(futures), check_timeout(timeout)
    return (each[index] for index in in_order(each, seconds))


def _checked(futures: Iterable[F]) -> list[F]:
    each = as_list(futures, "incompatible function arguments: expected a list of futures")
    for future in each:
        if not isinstance(future, CppFuture):
            raise ArgumentTypeError(
                f"incompatible function arguments: {future!r} is not a torch.futures.Future"
            )
    return each
