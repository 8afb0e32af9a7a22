"""RRef: a reference to a value that lives on another worker (or on this one).

Names, arguments and errors are those of ``torch.distributed.rpc.RRef``. The protocol that keeps the value
alive is in :mod:`zmqgrad.rpc.rref_ledger`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from zmqgrad.errors import RpcTimeoutError, RRefError
from zmqgrad.rpc.calls import PendingCall
from zmqgrad.rpc.current import current_worker
from zmqgrad.rpc.functions import run
from zmqgrad.rpc.futures import RpcFuture
from zmqgrad.rpc.membership import WorkerInfo
from zmqgrad.rpc.options import UNSET_RPC_TIMEOUT
from zmqgrad.rpc.payload import TravelsAsReference, method_reference, pack_arguments, pack_call
from zmqgrad.rpc.references import Handle
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.future import Outcome
from zmqgrad.transport.base import Inbound
from zmqgrad.wire.ids import split_id
from zmqgrad.wire.messages import ExceptionReply, RemoteCall, RRefFetch

T = TypeVar("T")


class RRef(TravelsAsReference, Generic[T]):
    """A reference to ``value``, which the calling worker owns.

    References to values of other workers come from :func:`zmqgrad.rpc.remote` and in messages.

    Args:
        value: what to refer to.
        type_hint: type of the value, for people.
    """

    __slots__ = ("__weakref__", "_worker", "handle")

    def __init__(self, value: T, type_hint: Any = None, devices: Any = None) -> None:
        del devices  # of no meaning on the CPU
        self._worker: Worker = current_worker()
        self.handle: Handle = self._worker.references.own(value)
        self.handle.type_name = _type_name(type_hint if type_hint is not None else type(value))

    @classmethod
    def _of(cls, worker: Worker, handle: Handle) -> RRef[Any]:
        rref: RRef[Any] = cls.__new__(cls)
        rref._worker = worker
        rref.handle = handle
        return rref

    def is_owner(self) -> bool:
        """Does the value live on this worker?"""
        return self.handle.owner == self._worker.id

    def owner(self) -> WorkerInfo:
        """The worker where the value lives."""
        return self._worker.membership.find(self.handle.owner).info

    def owner_name(self) -> str:
        """Its name."""
        return self.owner().name

    def confirmed_by_owner(self) -> bool:
        """Does the owner know of this reference?"""
        return self._worker.references.is_confirmed(self.handle)

    def local_value(self) -> T:
        """The value itself; on the owner only. Waits for it if it is being made.

        Raises:
            RRefError: on any other worker. Others: as making the value raised.
        """
        if not self.is_owner():
            raise RRefError(
                f"Can't call RRef.local_value() on a non-owner: {self} lives on {self.owner_name()}; "
                f"use to_here(), or call a function there"
            )
        return self._own_value(self._worker.seconds(UNSET_RPC_TIMEOUT))

    def _own_value(self, seconds: float) -> T:
        outcome = self.handle.outcome
        assert outcome is not None
        if not outcome.wait_done(seconds or None):
            raise RpcTimeoutError(
                f"RPC ran for more than set timeout ({seconds * 1000:.0f} ms) and will now be marked with an "
                f"error: making the value of {self} on {self._worker.name}"
            )
        result: T = outcome.result()
        return result

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """A copy of the value; on the owner, the value itself. Waits for it.

        Args:
            timeout: seconds; 0 for no limit; default: the worker's.

        Raises:
            RpcTimeoutError: if it does not come in time. Others: as making the value raised.
        """
        seconds = self._worker.seconds(timeout)
        if self.is_owner():
            return self._own_value(seconds)
        if self.handle.outcome is not None:
            self.handle.outcome.result()  # creating it failed: raise that
        self._worker.references.check_alive(self.handle)
        message = RRefFetch(self.handle.rref_id, seconds)
        worker, owner = self._worker, self.handle.owner
        # In no variable: the traceback of its error would make a cycle, and this reference outlive it.
        value: T = worker.open(
            worker.wait(
                worker.request(owner, message, seconds=seconds, what="to_here", keep=self.handle, waits=True)
            )
        )
        return value

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """A stand-in for the value whose methods run on the owner: ``rref.rpc_sync().size()``."""
        return _Proxy(self, _sync, timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """As :meth:`rpc_sync`; methods give a future."""
        return _Proxy(self, _async, timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """As :meth:`rpc_sync`; methods give an RRef to their result."""
        return _Proxy(self, _remote, timeout)

    def __reduce__(self) -> Any:
        raise RRefError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC: "
            "pass it to rpc_sync, rpc_async or remote"
        )

    def __str__(self) -> str:
        rref = _show("GloballyUniqueId", self.handle.rref_id)
        if self.is_owner():
            return f"OwnerRRef({rref})"
        return f"UserRRef(RRefId = {rref}, ForkId = {_show('GloballyUniqueId', self.handle.fork_id)})"

    def __repr__(self) -> str:
        known = "" if self.confirmed_by_owner() else ", not confirmed yet"
        return f"<{self} of {self._worker.membership.name_of(self.handle.owner)}{known}>"


def install_rrefs(worker: Worker) -> None:
    """Let references that arrive at ``worker`` become RRefs."""
    worker.references.make_rref = lambda handle: RRef._of(worker, handle)


def _show(kind: str, value: int) -> str:
    worker, counter = split_id(value)
    return f"{kind}(created_on={worker}, local_id={counter})"


def _type_name(hint: Any) -> str:
    return getattr(hint, "__qualname__", str(hint))


# ---- making a value on another worker -------------------------------------------------------------------


def call_remote(
    worker: Worker, to: object, function: Callable[..., Any], args: Any, kwargs: Any, timeout: Any
) -> RRef[Any]:
    """Have ``to`` run the function and keep its result; gives a reference to it at once.

    If making it fails, or does not end in time, using the reference raises what happened.
    """
    peer = worker.membership.find(to)
    seconds = worker.seconds(timeout)
    reference, packed = pack_call(function, args or (), kwargs or {}, worker.terms(peer))
    references = worker.references
    handle = references.own_later() if peer.id == worker.id else references.refer(peer.id)
    rref = RRef._of(worker, handle)
    message = RemoteCall(reference, packed.payload, handle.rref_id, handle.fork_id, seconds)
    worker.request(
        peer.id, message, packed, seconds, function, keep=handle, settled=lambda o: _created(handle, o)
    )
    return rref


def _created(handle: Handle, answer: Outcome[Inbound]) -> None:
    """Quick, as the receiver's thread may call it."""
    error = answer.error()
    if error is None and isinstance(message := answer.result().message, ExceptionReply):
        error = RRefError(
            f"the value could not be made. On {message.worker}:\n{message.text}\n{message.traceback}"
        )
    if error is not None:
        failed: Outcome[Any] = handle.outcome if handle.outcome is not None else Outcome()
        failed.fail(error)
        handle.outcome = failed
    if handle.fork_id:
        # After a failure as well: the owner may know of it all the same, and has to hear of its end.
        handle.table.confirm(handle.fork_id)


# ---- calling methods of the value -----------------------------------------------------------------------


class _Proxy:
    """Stands for the value of an RRef; attributes are methods that run on its owner."""

    def __init__(self, rref: RRef[Any], how: Callable[..., Any], timeout: float) -> None:
        self._rref = rref
        self._how = how
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # copy, pickle and inspect ask for these; the owner is not meant

        def method(*args: Any, **kwargs: Any) -> Any:
            return self._how(self._rref, self._timeout, name, args, kwargs)

        return method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the value itself."""
        return self._how(self._rref, self._timeout, "__call__", args, kwargs)

    def __repr__(self) -> str:
        return f"<proxy of {self._rref!r}>"


def _ask(
    rref: RRef[Any], timeout: float, name: str, args: Any, kwargs: Any, waits: bool = False
) -> PendingCall:
    worker = rref._worker
    peer = worker.membership.find(rref.handle.owner)
    seconds = worker.seconds(timeout)
    if rref.is_owner():
        return worker.call(peer, _call_own_method, (rref, seconds, name, args, kwargs), None, timeout, waits)
    worker.references.check_alive(rref.handle)
    packed = pack_arguments(args, kwargs, worker.terms(peer))
    reference = method_reference(rref.handle.rref_id, name)
    return worker.request_call(peer.id, reference, packed, seconds, f"method {name}", rref.handle, waits)


def _call_own_method(rref: RRef[Any], seconds: float, name: str, args: Any, kwargs: Any) -> Any:
    return run(getattr(rref._own_value(seconds), name), args, kwargs)


def _sync(rref: RRef[Any], timeout: float, name: str, args: Any, kwargs: Any) -> Any:
    worker = rref._worker
    return worker.open(worker.wait(_ask(rref, timeout, name, args, kwargs, waits=True)))


def _async(rref: RRef[Any], timeout: float, name: str, args: Any, kwargs: Any) -> RpcFuture[Any]:
    return rref._worker.future(_ask(rref, timeout, name, args, kwargs))


def _remote(rref: RRef[Any], timeout: float, name: str, args: Any, kwargs: Any) -> RRef[Any]:
    worker = rref._worker
    content = (rref, worker.seconds(timeout), name, args, kwargs)
    return call_remote(worker, rref.handle.owner, _call_own_method, content, None, timeout)
