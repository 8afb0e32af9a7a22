"""Groups of workers, and the calls to all members of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar, overload

from zmqgrad.errors import UnknownWorkerError
from zmqgrad.rpc.api import rpc_async, rpc_sync
from zmqgrad.rpc.calls import PendingCall
from zmqgrad.rpc.current import current_worker
from zmqgrad.rpc.futures import RpcFuture
from zmqgrad.rpc.groups.future import GroupFuture
from zmqgrad.rpc.groups.rrefs import RRefGroup
from zmqgrad.rpc.groups.sending import (
    GroupCall,
    OnErrors,
    SharedCall,
    check_errors,
    check_length,
    same_for_all,
    send_call,
)
from zmqgrad.rpc.membership.worker_info import WorkerInfo, WorkerRecord
from zmqgrad.rpc.options import UNSET_RPC_TIMEOUT
from zmqgrad.rpc.rref.api import RRef, call_remote
from zmqgrad.rpc.serialization.serializer import serialize_call
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.arguments import as_list

T = TypeVar("T")

WILDCARDS = "*?["

_EXPECTED = "a group is made of names, ranks, WorkerInfos or a pattern such as 'trainer*'"

_Begun = tuple[Worker, tuple[WorkerInfo, ...], float]
"""The caller, the members, and the timeout."""


class WorkerGroup(Sequence[WorkerInfo]):
    """Some workers, in an order. :func:`group` makes one.

    It is a sequence of ``WorkerInfo``: ``g[0]`` is a worker, ``g[1:]`` a group. ``"trainer1" in g`` accepts
    names, ranks and WorkerInfos. ``g | h`` has the members of both, each once.

    Members that a pattern has selected are those present workers whose names match when the group is used, in
    the order of their ranks. All others are fixed, as are those of a slice.

    A group can be sent to other workers.

    Example:
        >>> workers = rpc.group("worker*")
        >>> [info.name for info in workers]
        ['worker0', 'worker1']
        >>> workers.choose(pow, args=(2, 3))  # on the worker with the fewest pending calls
        8
        >>> workers.remote(dict, kwargs={"step": 7}).to_here()
        [{'step': 7}, {'step': 7}]
    """

    __slots__ = ("_terms", "_turn")

    def __init__(self, terms: Iterable[str | WorkerInfo]) -> None:
        self._terms = tuple(terms)  # patterns, and workers
        self._turn = 0  # of choose(): workers with equal load take turns

    # ---- members ----------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[WorkerInfo, ...]:
        """The members, as they are now."""
        present: list[WorkerInfo] = []
        if any(isinstance(term, str) for term in self._terms):
            everyone = current_worker().membership.all()
            present = sorted((record.info for record in everyone), key=lambda info: info.id)
        found: dict[int, WorkerInfo] = {}
        for term in self._terms:
            matching = [i for i in present if fnmatchcase(i.name, term)] if isinstance(term, str) else [term]
            for info in matching:
                found.setdefault(info.id, info)
        return tuple(found.values())

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[WorkerInfo]:
        return iter(self.members)

    @overload
    def __getitem__(self, index: int) -> WorkerInfo: ...
    @overload
    def __getitem__(self, index: slice) -> WorkerGroup: ...
    def __getitem__(self, index: int | slice) -> WorkerInfo | WorkerGroup:
        return WorkerGroup(self.members[index]) if isinstance(index, slice) else self.members[index]

    def __contains__(self, worker: object) -> bool:
        return any(worker in (info, info.name, info.id) for info in self.members)

    def __or__(self, other: WorkerGroup) -> WorkerGroup:
        return WorkerGroup(self._terms + other._terms) if isinstance(other, WorkerGroup) else NotImplemented

    def __repr__(self) -> str:
        return (
            f"<WorkerGroup {', '.join(t if isinstance(t, str) else t.name for t in self._terms) or 'empty'}>"
        )

    # ---- calls ------------------------------------------------------------------------------------------

    def call(
        self,
        func: Callable[..., T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = UNSET_RPC_TIMEOUT,
        errors: OnErrors = "raise",
    ) -> list[T]:
        """Run ``func(*args, **kwargs)`` on each member, and return the results in the order of the members.

        The call is serialized once. Members on this host read large tensors from the same memory; one that
        writes to it has its own from then on. Arguments are given as to ``rpc_sync``, so that those of
        ``func`` can have any name.

        Args:
            func: any callable, as for ``rpc_sync``.
            args: positional arguments.
            kwargs: keyword arguments.
            timeout: seconds for all members together; 0 for no limit; default: the worker's.
            errors: "raise": wait for all members, then raise one error if some have failed. "return": return
                the error of such a member in place of its result.

        Raises:
            GroupError: if members failed, died, or did not reply in time (``GroupTimeoutError`` if that is
                all): it has the errors and the results by name.
            UnknownWorkerError: if the group has no members.
            PayloadError: if the call cannot be serialized.
        """
        return self._call(func, args, kwargs, timeout, errors).send_and_wait()

    def call_async(
        self,
        func: Callable[..., T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = UNSET_RPC_TIMEOUT,
        errors: OnErrors = "raise",
    ) -> GroupFuture[T]:
        """As :meth:`call`, but returns a future at once, which can also be iterated ``as_completed``.

        You must not change tensors in ``args`` before it is done, as for ``rpc_async``.

        Args:
            func, args, kwargs, timeout, errors: as for :meth:`call`.

        Raises:
            UnknownWorkerError, PayloadError: if the call cannot be made.
        """
        return GroupFuture(self._call(func, args, kwargs, timeout, errors))

    def _call(self, func: Any, args: Any, kwargs: Any, timeout: float, errors: OnErrors) -> GroupCall:
        worker, members, seconds = self._begin(timeout, errors)
        return same_for_all(worker, members, (func, args, kwargs), seconds, errors)

    def map(
        self,
        func: Callable[..., T],
        args: Iterable[Sequence[Any]],
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = UNSET_RPC_TIMEOUT,
        errors: OnErrors = "raise",
    ) -> list[T]:
        """As :meth:`call`, with arguments of its own for each member: ``g.map(f, [(x,) for x in parts])``.

        Args:
            func: any callable, as for ``rpc_sync``.
            args: the positional arguments of each member, in the order of the members.
            kwargs: keyword arguments, the same for all.
            timeout, errors: as for :meth:`call`.

        Raises:
            ConfigurationError: if ``args`` are for fewer or more members than there are.
            GroupError, UnknownWorkerError, PayloadError: as for :meth:`call`.
        """
        return self._map(func, args, kwargs, timeout, errors).send_and_wait()

    def map_async(
        self,
        func: Callable[..., T],
        args: Iterable[Sequence[Any]],
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = UNSET_RPC_TIMEOUT,
        errors: OnErrors = "raise",
    ) -> GroupFuture[T]:
        """As :meth:`map`, but returns a future at once, as :meth:`call_async`.

        Args:
            func, args, kwargs, timeout, errors: as for :meth:`map`.

        Raises:
            ConfigurationError, UnknownWorkerError, PayloadError: if the call cannot be made.
        """
        return GroupFuture(self._map(func, args, kwargs, timeout, errors))

    def _map(
        self, func: Any, args: Iterable[Sequence[Any]], kwargs: Any, timeout: float, errors: OnErrors
    ) -> GroupCall:
        worker, members, seconds = self._begin(timeout, errors)
        whats = [(func, each, kwargs) for each in as_list(args, "map: args must be a list of tuples")]
        check_length(whats, members, self)

        def request(index: int, peer: WorkerRecord, left: float, reply_to: int) -> PendingCall:
            call = serialize_call(*whats[index], worker.contexts.for_calls(peer))
            return send_call(worker, peer, call, left, reply_to, whats[index])

        return GroupCall(worker, members, func, seconds, errors, request)

    def remote(
        self,
        func: Callable[..., T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> RRefGroup[T]:
        """Run ``func(*args, **kwargs)`` on each member, which keeps the result.

        Args:
            func, args, kwargs, timeout: as for ``rpc.remote``.

        Returns:
            References to the results, at once. Using one whose creation failed raises the error.

        Raises:
            UnknownWorkerError, PayloadError, PeerLostError: if the call cannot be made.
        """
        worker, members, _ = self._begin(timeout)
        shared = SharedCall(worker, members, partial(serialize_call, func, args, kwargs))
        made: list[RRef[T]] = []
        try:
            for member in members:
                made.append(call_remote(worker, member.id, func, args, kwargs, timeout, shared.to))
            return RRefGroup(made)
        finally:
            shared.release([p for rref in made if (p := rref.handle.creation) is not None])

    def _begin(self, timeout: float, errors: OnErrors = "raise") -> _Begun:
        """The members, at least one. In a dynamic group one may have joined that is not known here yet."""
        check_errors(errors)
        worker = current_worker()
        membership, seconds, members = worker.membership, worker.resolve_timeout(timeout), self.members
        if not members and self._terms and membership.update_from_store is not None:
            membership.update_from_store(seconds or None)
            members = self.members
        if members:
            return worker, members, seconds
        known = ", ".join(f"{r.name} ({r.id})" for r in sorted(membership.all(), key=lambda r: r.id))
        raise UnknownWorkerError(
            f"{self!r} has no members, so nothing can be called on it: no present worker has such a name. "
            f"The workers are {known}; rpc.wait_for_workers waits for others"
        )

    # ---- one member -------------------------------------------------------------------------------------

    def choose(
        self,
        func: Callable[..., T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> T:
        """Return the result of ``func(*args, **kwargs)`` on the member with the fewest pending calls of this
        worker.

        Members with equally many take turns. Lost members are not chosen.

        Args:
            func, args, kwargs, timeout: as for ``rpc_sync``.

        Raises:
            UnknownWorkerError: if the group has no members.
            Exception: as ``rpc_sync``.
        """
        return rpc_sync(self._choose(timeout), func, args, kwargs, timeout)

    def choose_async(
        self,
        func: Callable[..., T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> RpcFuture[T]:
        """As :meth:`choose`, but returns a future at once, as ``rpc_async``.

        Args:
            func, args, kwargs, timeout: as for ``rpc_async``.

        Raises:
            UnknownWorkerError: if the group has no members.
        """
        return rpc_async(self._choose(timeout), func, args, kwargs, timeout)

    def _choose(self, timeout: float) -> WorkerInfo:
        worker, members, _ = self._begin(timeout)
        present = {peer.id for peer in worker.membership.all()}
        members = tuple(member for member in members if member.id in present) or members
        load = Counter(call.peer for call in worker.client.pending.all())
        self._turn += 1
        first = self._turn % len(members)
        return min(members[first:] + members[:first], key=lambda member: load[member.id])


def group(workers: str | int | WorkerInfo | Iterable[str | int | WorkerInfo]) -> WorkerGroup:
    """A group of workers, to call all of them at once.

    Args:
        workers: a name, a rank or a WorkerInfo; or a pattern of names with ``*``, ``?`` or ``[...]``, whose
            members follow joins and losses; or several of these.

    Returns:
        The members in the given order, each once. It may be empty; but it cannot be called then.

    Raises:
        UnknownWorkerError: if there is no worker of a name or rank.
        ArgumentTypeError: if ``workers`` are none of these.

    Example:
        >>> rpc.group("worker*").call(pow, args=(2, 3))
        [8, 8]
        >>> rpc.group(["worker1", 0]).map(pow, [(2, 3), (2, 4)])
        [8, 16]
    """
    if isinstance(workers, WorkerGroup):
        return workers
    several = [workers] if isinstance(workers, (str, int, WorkerInfo)) else workers
    membership = current_worker().membership
    terms: list[str | WorkerInfo] = []
    for worker in as_list(several, _EXPECTED):
        if isinstance(worker, str) and any(c in worker for c in WILDCARDS):
            terms.append(worker)
        else:
            terms.append(membership.find(worker).info)
    return WorkerGroup(terms)
