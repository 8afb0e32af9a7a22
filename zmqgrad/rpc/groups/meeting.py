"""Workers that wait for each other: ``all_gather`` and ``barrier``, by names.

All of them call the same; the one whose name comes first gathers what they bring, by an asynchronous call
that is answered when the last has come. Calls of the same workers are told apart by their order.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from zmqgrad.errors import RpcTimeoutError, UnknownWorkerError
from zmqgrad.rpc.current import current_worker
from zmqgrad.rpc.functions import async_execution
from zmqgrad.rpc.futures import PythonFuture
from zmqgrad.rpc.options import UNSET_RPC_TIMEOUT
from zmqgrad.runtime.clock import Deadline

if TYPE_CHECKING:
    from zmqgrad.rpc.worker import Worker

_EXTENSION = "meetings"


def all_gather(
    value: Any, workers: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """What each of ``workers`` (names; None: all) brings, by name. Returns when all have called this.

    Raises:
        RpcTimeoutError: if they have not within ``timeout``; who came late stands in another meeting then.
        UnknownWorkerError: if a name is of no worker, or this one is not among them.
        PeerLostError: if the one that gathers is gone.
    """
    worker = current_worker()
    names = tuple(sorted({r.name for r in worker.membership.all()} if workers is None else set(workers)))
    if worker.name not in names:
        raise UnknownWorkerError(f"{worker.name} is none of the workers that shall meet: {', '.join(names)}")
    deadline = Deadline.after(worker.seconds(timeout) or None)
    for name in names:
        worker.membership.find(name, deadline.timeout())
    number = _meetings(worker).number(names)
    call = worker.call(names[0], _bring, (names, number, worker.name, value), None, timeout)
    try:
        gathered: dict[str, Any] = worker.open(worker.wait(call))
    except RpcTimeoutError as e:
        raise RpcTimeoutError(
            f"timed out in _all_gather after {call.timeout:.2f} seconds, "
            f"waiting for all of {', '.join(names)}: {e}"
        ) from e
    return gathered


def barrier(workers: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> None:
    """Returns when all of ``workers`` (names; None: all) have called this.

    Raises:
        as :func:`all_gather`.
    """
    all_gather(None, workers, timeout)


@async_execution
def _bring(names: tuple[str, ...], number: int, name: str, value: Any) -> PythonFuture[dict[str, Any]]:
    """On the one that gathers."""
    return _meetings(current_worker()).bring((names, number), name, value)


class _Meetings:
    """What has been brought so far, on the one that gathers; and how often this worker has met whom."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._numbers: defaultdict[tuple[str, ...], Iterator[int]] = defaultdict(itertools.count)
        self._open: dict[tuple[tuple[str, ...], int], dict[str, tuple[Any, PythonFuture[Any]]]] = {}

    def number(self, names: tuple[str, ...]) -> int:
        """The how-manieth meeting of these it is."""
        with self._lock:
            return next(self._numbers[names])

    def bring(self, meeting: tuple[tuple[str, ...], int], name: str, value: Any) -> PythonFuture[Any]:
        """``name`` brings ``value``; the future is set when the last has come."""
        future: PythonFuture[Any] = PythonFuture()
        with self._lock:
            brought = self._open.setdefault(meeting, {})
            brought[name] = value, future
            if len(brought) < len(meeting[0]):
                return future
            del self._open[meeting]
        values = {each: brought[each][0] for each in meeting[0]}
        for _, waiting in brought.values():
            waiting.set_result(values)
        return future


def _meetings(worker: Worker) -> _Meetings:
    found: _Meetings = worker.doors.extensions.setdefault(_EXTENSION, _Meetings())
    return found
