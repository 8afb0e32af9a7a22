"""References to values of several workers, and calls to all of these values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar, overload

from zmqgrad.errors import RRefError
from zmqgrad.rpc.calls import PendingCall
from zmqgrad.rpc.current import current_worker
from zmqgrad.rpc.groups.future import GroupFuture
from zmqgrad.rpc.groups.sending import GroupCall, OnErrors, SharedCall, check_errors, check_length
from zmqgrad.rpc.membership.worker_info import WorkerInfo, WorkerRecord
from zmqgrad.rpc.options import UNSET_RPC_TIMEOUT
from zmqgrad.rpc.rref.api import RRef
from zmqgrad.rpc.rref.proxies import Proxy, call_method
from zmqgrad.rpc.serialization.context import SerializedPayload
from zmqgrad.rpc.serialization.serializer import serialize_arguments, to_args
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.arguments import as_list
from zmqgrad.wire.messages import RRefFetch

T = TypeVar("T")


class RRefGroup(Sequence[RRef[T]]):
    """References, in the order of the group whose ``remote`` made them. ``r[0]`` is one, ``r[1:]`` a group.

    Args:
        rrefs: the references; those of several groups, for example.

    Example:
        >>> counters = rpc.group("worker*").remote(torch.zeros, args=(1,))
        >>> counters.rpc_sync().add_(2)
        [tensor([2.]), tensor([2.])]
    """

    __slots__ = ("_rrefs",)

    def __init__(self, rrefs: Iterable[RRef[T]]) -> None:
        self._rrefs = tuple(as_list(rrefs, "expected a list of RRefs"))

    def __len__(self) -> int:
        return len(self._rrefs)

    @overload
    def __getitem__(self, index: int) -> RRef[T]: ...
    @overload
    def __getitem__(self, index: slice) -> RRefGroup[T]: ...
    def __getitem__(self, index: int | slice) -> RRef[T] | RRefGroup[T]:
        return RRefGroup(self._rrefs[index]) if isinstance(index, slice) else self._rrefs[index]

    def __repr__(self) -> str:
        return f"<RRefGroup of {', '.join(rref.owner_name() for rref in self._rrefs) or 'nothing'}>"

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT, errors: OnErrors = "raise") -> list[T]:
        """Wait for the values, and return copies of them, also of the one that this worker owns.

        Args:
            timeout: seconds for all together; 0 for no limit; default: the worker's.
            errors: as for ``WorkerGroup.call``.

        Raises:
            GroupError: if some do not arrive, and errors are raised.
        """
        worker = current_worker()

        def request(index: int, owner: WorkerRecord, seconds: float, reply_to: int) -> PendingCall:
            rref = self._rrefs[index]
            if rref.is_owner():
                return worker.call(owner.id, _value, (rref, seconds), None, seconds)
            creation = rref.handle.promise
            if creation is not None:
                creation.result()  # raises if it failed
            worker.references.check_alive(rref.handle, "to_here() on it")
            fetch = RRefFetch(rref.handle.rref_id, seconds)
            return worker.request(
                owner.id,
                fetch,
                seconds=seconds,
                description="to_here",
                keepalive=rref.handle,
                reply_to=reply_to,
            )

        result: list[T] = GroupCall(*self._begin("to_here", timeout, errors), request).send_and_wait()
        return result

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT, errors: OnErrors = "raise") -> Any:
        """A proxy whose methods run on all values, and return the list of results: ``r.rpc_sync().size()``.

        Args:
            timeout: of each call to all of them, in seconds; 0 for no limit; default: the worker's.
            errors: as for ``WorkerGroup.call``.
        """
        return Proxy(self, partial(_call, errors), timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT, errors: OnErrors = "raise") -> Any:
        """As :meth:`rpc_sync`; methods return a ``GroupFuture``.

        Args:
            timeout, errors: as for :meth:`rpc_sync`.
        """
        return Proxy(self, partial(_call_async, errors), timeout)

    def map(
        self,
        method: str,
        args: Iterable[Sequence[Any]],
        timeout: float = UNSET_RPC_TIMEOUT,
        errors: OnErrors = "raise",
    ) -> list[Any]:
        """Call ``method`` of each value with arguments of its own: ``r.map("add", [(x,) for x in items])``.

        Args:
            method: its name.
            args: the positional arguments for each value, in the order of the references.
            timeout, errors: as for :meth:`rpc_sync`.

        Returns:
            The results, in the order of the references.

        Raises:
            ConfigurationError: if ``args`` are for fewer or more values than there are.
            GroupError: if some calls fail, and errors are raised.
            PayloadError: if a call cannot be serialized.
        """
        return self._method(errors, timeout, method, (), {}, list(args)).send_and_wait()

    def map_async(
        self,
        method: str,
        args: Iterable[Sequence[Any]],
        timeout: float = UNSET_RPC_TIMEOUT,
        errors: OnErrors = "raise",
    ) -> GroupFuture[Any]:
        """As :meth:`map`, but returns a future at once.

        Args:
            method, args, timeout, errors: as for :meth:`map`.

        Raises:
            ConfigurationError: if ``args`` are for fewer or more values than there are.
        """
        return GroupFuture(self._method(errors, timeout, method, (), {}, list(args)))

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """As :meth:`rpc_sync`, ``timeout`` included; methods return an ``RRefGroup`` of their results."""
        return Proxy(self, _remote, timeout)

    def _begin(
        self, what: str, timeout: float, errors: OnErrors
    ) -> tuple[Worker, list[WorkerInfo], str, float, OnErrors]:
        check_errors(errors)
        if not self._rrefs:
            raise RRefError(f"{what} was called on an RRefGroup without references")
        worker = current_worker()
        owners = [rref.owner() for rref in self._rrefs]
        return worker, owners, what, worker.resolve_timeout(timeout), errors

    def _method(
        self, errors: OnErrors, timeout: float, name: str, args: Any, kwargs: Any, each: Any = None
    ) -> GroupCall:
        """``each``: the arguments for each value, in place of ``args``."""
        begun = worker, owners, *_ = self._begin(f"method {name}", timeout, errors)
        shared = SharedCall(worker, owners, lambda context: ("", serialize_arguments(args, kwargs, context)))

        def payload_for(owner: WorkerRecord) -> SerializedPayload:
            return shared.to(owner)[1]

        if each is not None:
            check_length(each, owners, self)

        def request(index: int, _: WorkerRecord, left: float, reply_to: int) -> PendingCall:
            rref, made = self._rrefs[index], payload_for if each is None else None
            mine = args if each is None else to_args(each[index])
            return call_method(rref, left, name, mine, kwargs, reply_to=reply_to, serialized=made)

        return GroupCall(*begun, request, shared)


def _call(errors: OnErrors, rrefs: RRefGroup[Any], *method: Any) -> list[Any]:
    return rrefs._method(errors, *method).send_and_wait()


def _call_async(errors: OnErrors, rrefs: RRefGroup[Any], *method: Any) -> GroupFuture[Any]:
    return GroupFuture(rrefs._method(errors, *method))


def _remote(rrefs: RRefGroup[Any], timeout: float, name: str, args: Any, kwargs: Any) -> RRefGroup[Any]:
    rrefs._begin(f"method {name}", timeout, "raise")
    methods: list[Callable[..., Any]] = [getattr(rref.remote(timeout), name) for rref in rrefs]
    return RRefGroup([method(*args, **kwargs) for method in methods])


def _value(rref: RRef[T], seconds: float) -> T:
    return rref._own_value(seconds)
