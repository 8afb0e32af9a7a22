"""Collectives over named workers: ``all_gather`` and ``barrier``.

All participants make the same call. The one whose name sorts first is the root: it gathers the values by an
asynchronous function, which replies when the last value has arrived, or when a participant is lost. It goes
on itself when the others have their replies: it may be about to leave, and nothing is sent after that. A
sequence number per set of participants distinguishes successive collectives. A set consists of ids, not of
names: a worker that has the name of one that has left has made none of its collectives.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from zmqgrad.errors import RpcError, RpcTimeoutError, TransportError, UnknownWorkerError
from zmqgrad.rpc.current import current_worker
from zmqgrad.rpc.functions import async_execution
from zmqgrad.rpc.futures import PythonFuture
from zmqgrad.rpc.in_flight import InFlightRequest, served
from zmqgrad.rpc.membership.worker_info import check_names
from zmqgrad.rpc.options import UNSET_RPC_TIMEOUT
from zmqgrad.runtime.clock import Deadline

if TYPE_CHECKING:
    from zmqgrad.rpc.worker import Worker

_EXTENSION = "collectives"


def all_gather(
    value: Any, workers: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Gather a value from each of several workers, on all of them. Returns when all have called this.

    Args:
        value: of this worker.
        workers: the names of the participants; None: all workers, in a group of fixed size also those that
            are lost: survivors that learned of a loss at different times would wait for different workers.
        timeout: seconds; 0 for no limit; default: that of calls.

    Returns:
        the values, by worker name.

    Raises:
        RpcTimeoutError: if not all have called this within ``timeout``. The sequence numbers of workers that
            call later no longer match.
        UnknownWorkerError: if a name is unknown, or this worker is not a participant.
        ArgumentTypeError: if ``workers`` is no list of names.
        PeerLostError: if a participant has died, or dies before all have called this.

    Example:
        >>> rpc.all_gather(0.5, workers=["worker0"])  # None: all workers of the group
        {'worker0': 0.5}
    """
    worker = current_worker()
    names = sorted(set(_all(worker) if workers is None else check_names(workers, "workers")))
    if worker.name not in names:
        raise UnknownWorkerError(f"{worker.name} is not one of the participants: {', '.join(names)}")
    deadline = Deadline.after(worker.resolve_timeout(timeout) or None)
    ids = tuple(worker.membership.find(name, deadline.timeout()).id for name in names)
    collectives = _collectives(worker)
    number = collectives.next_number(ids)
    try:
        call = worker.call(ids[0], _contribute, (ids, number, worker.name, value), None, timeout)
        try:
            gathered: dict[str, Any] = worker.decode(worker.wait(call))
        except RpcTimeoutError as e:
            raise RpcTimeoutError(
                f"timed out in _all_gather after {call.timeout:.2f} seconds, "
                f"waiting for all of {', '.join(names)}{collectives.missing((ids, number), names)}: {e}"
            ) from e
    finally:  # also if there was no call: what is kept for this number is given back
        if worker.id == ids[0]:
            worker.server.in_flight.wait_ended(collectives.replying((ids, number)), deadline)
    return gathered


def barrier(workers: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> None:
    """Return when all of ``workers`` have called this.

    Args:
        workers: names, including this worker's; None: as :func:`all_gather`.
        timeout: seconds; 0 for no limit; default: that of calls.

    Raises:
        Exception: as :func:`all_gather`.

    Example:
        >>> rpc.barrier(workers=["worker0"], timeout=30)  # None: all workers of the group
    """
    all_gather(None, workers, timeout)


def _all(worker: Worker) -> list[str]:
    membership = worker.membership
    return [r.name for r in (membership.all_known() if membership.world_size else membership.all())]


@async_execution
def _contribute(ids: tuple[int, ...], number: int, name: str, value: Any) -> PythonFuture[dict[str, Any]]:
    """Runs on the root."""
    return _collectives(current_worker()).contribute((ids, number), name, value)


_Key: TypeAlias = "tuple[tuple[int, ...], int]"
"""The ids of the participants of a collective, and its number."""


class _Contribution(NamedTuple):
    value: Any
    result: PythonFuture[Any]
    request: InFlightRequest | None


class _Collectives:
    """The collectives of one worker: its sequence numbers, and the values gathered so far as root."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lock = threading.Lock()  # guards all below
        # Kept when a participant is lost: those that learn of it later count on, and what it sent may arrive.
        self._numbers: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)
        self._open: dict[_Key, dict[str, _Contribution]] = {}
        self._replying: dict[_Key, list[InFlightRequest]] = {}

    def next_number(self, ids: tuple[int, ...]) -> int:
        """Sequence number of the next collective of these participants."""
        with self._lock:
            number = next(self._numbers[ids])
            if ids[0] == self._worker.id:
                self._replying[ids, number] = []
            return number

    def contribute(self, key: _Key, name: str, value: Any) -> PythonFuture[Any]:
        """Add the value of ``name``; the future is set when the last value has arrived."""
        future: PythonFuture[Any] = PythonFuture()
        with self._lock:
            gathered = self._open.setdefault(key, {})
            gathered[name] = _Contribution(value, future, served())
            first, last = len(gathered) == 1, len(gathered) == len(key[0])
            if last:
                self._end(key)
        if last:
            values = {each: gathered[each].value for each in sorted(gathered)}
            for contribution in gathered.values():
                contribution.result.set_result(values)
        elif first:
            try:
                self._monitor(key[0])
            except (RpcError, TransportError) as e:  # one of them has left before this worker knew it
                self._fail(key, e)
        return future

    def missing(self, key: _Key, names: Iterable[str]) -> str:
        """Which of the participants have contributed nothing, as text; empty if only the root knows that."""
        with self._lock:
            gathered = self._open.get(key, {})
        late = ", ".join(name for name in names if name not in gathered)
        return f" ({late} did not call it)" if gathered and late else ""

    def _monitor(self, ids: Iterable[int]) -> None:
        """Make sure that the loss of a participant is noticed here, also if it has happened before."""
        worker = self._worker
        for peer in ids:
            if peer != worker.id:
                if peer not in worker.lost:
                    worker.mailbox.monitor(peer)
                if peer in worker.lost:
                    self.on_lost(peer)

    def on_lost(self, peer: int) -> None:
        """Fail the collectives that wait for a lost participant, or whose result it no longer gets."""
        with self._lock:
            failed = [key for key in self._open if peer in key[0]]
        for key in failed:
            names = ", ".join(map(self._worker.membership.name_of, key[0]))
            self._fail(key, self._worker.loss_of(peer, f"a collective of {names}"))

    def _fail(self, key: _Key, error: Exception) -> None:
        with self._lock:
            gathered = self._end(key)
        for contribution in gathered.values():
            contribution.result.set_exception(error)

    def _end(self, key: _Key) -> dict[str, _Contribution]:
        """End a collective; the lock is held. Returns the contributions to it, the first time only."""
        gathered = self._open.pop(key, {})
        if gathered and key in self._replying:  # else the root has given up
            self._replying[key] = [c.request for c in gathered.values() if c.request is not None]
        return gathered

    def replying(self, key: _Key) -> list[InFlightRequest]:
        """The requests by which the participants of a collective that has ended get its result."""
        with self._lock:
            return self._replying.pop(key, [])


def _collectives(worker: Worker) -> _Collectives:
    found: _Collectives | None = worker.hooks.extensions.get(_EXTENSION)
    if found is None:
        made = _Collectives(worker)
        found = worker.hooks.extensions.setdefault(_EXTENSION, made)
        if found is made:
            worker.hooks.peer_lost.append(lambda peer, _: made.on_lost(peer))
            for peer in list(worker.lost):  # perhaps since another thread has found this
                made.on_lost(peer)
    return found
