"""RRef: a reference to a value that lives on another worker (or on this one).

Names, arguments and errors are those of ``torch.distributed.rpc.RRef``. The protocol that keeps the value
alive is in :mod:`zmqgrad.rpc.references.ledger`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from zmqgrad.errors import NotInitializedError, RpcTimeoutError, RRefError
from zmqgrad.rpc.current import current_worker_or_none
from zmqgrad.rpc.futures import PythonFuture
from zmqgrad.rpc.groups.identity import WorkerInfo
from zmqgrad.rpc.options import UNSET_RPC_TIMEOUT
from zmqgrad.rpc.packing.packing import pack_call
from zmqgrad.rpc.packing.terms import TravelsAsReference
from zmqgrad.rpc.profiling import caller_range, profiled_here
from zmqgrad.rpc.references import proxies
from zmqgrad.rpc.references.handle import Handle
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.future import Promise
from zmqgrad.transport.base import Inbound
from zmqgrad.wire.ids import split_id
from zmqgrad.wire.messages import ExceptionReply, RemoteCall, RRefFetch
from zmqgrad.wire.tensors.streams import follow

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
        worker = current_worker_or_none()
        if worker is None:
            raise NotInitializedError(
                "Current RPC agent is not set! Did you initialize the RPC framework "
                "(e.g. by calling `rpc.init_rpc`)? Call init_rpc first."
            )
        self._worker: Worker = worker
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
        return self._worker.membership.record(self.handle.owner).info

    def owner_name(self) -> str:
        """Its name."""
        return self.owner().name

    def confirmed_by_owner(self) -> bool:
        """Does the owner know of this reference?

        One that came in a message is being told to the owner; this waits until it has been.
        """
        references = self._worker.references
        if not references.is_confirmed(self.handle) and self.handle.creation is None:
            references.confirm_now(self.handle)
        return references.is_confirmed(self.handle)

    def local_value(self) -> T:
        """The value itself; on the owner only. Waits for it if it is being made.

        Raises:
            RRefError: on any other worker. Others: as making the value raised.
        """
        if not self.is_owner():
            rref, fork = _show(self.handle.rref_id), _show(self.handle.fork_id)
            raise RRefError(
                f"For UserRRef(rref_id={rref}, fork_id={fork}), can't call localValue() on user "
                f"{self._worker.membership.own.info}. Call it on owner {self.owner()}, or use to_here()"
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
        follow((result,))
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
        self._worker.references.check_alive(self.handle, "to_here() on it")
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
        return proxies.Proxy(self, proxies.sync, timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """As :meth:`rpc_sync`; methods give a future."""
        return proxies.Proxy(self, proxies.asynchronous, timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """As :meth:`rpc_sync`; methods give an RRef to their result."""
        return proxies.Proxy(self, proxies.remote, timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run the backward pass from the value, a tensor of one element, on its owner.

        Args:
            dist_autograd_ctx_id: the distributed autograd context that takes the gradients; -1, on the owner
                only: a local pass, whose gradients go to ``.grad``.
            retain_graph: keep the graph for another pass.

        Raises:
            RRefError: if the value is no tensor, or there is no context on a user.
            Anything else: as ``torch.autograd.backward`` or ``zmqgrad.autograd.backward`` raise.
        """
        if self.is_owner():
            _backward(self, dist_autograd_ctx_id, retain_graph)
        elif dist_autograd_ctx_id == -1:
            raise RRefError(
                "User RRefs require 'dist_autograd_ctx_id' to be specified: enter zmqgrad.autograd.context() "
                "and give the id that it gives"
            )
        else:
            worker = self._worker
            worker.open(
                worker.wait(
                    worker.call(self.handle.owner, _backward, (self, dist_autograd_ctx_id, retain_graph))
                )
            )

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """The class of the value, or with ``blocking=False`` a future of it. Its owner is asked once.

        Raises:
            RpcTimeoutError: if it does not come in time. Others: as making the value raised.
        """
        known = self.handle.value_type
        if known is None or (blocking and not known.done()) or (known.done() and _failed(known)):
            known = self.handle.value_type = self._ask_type(timeout)
        return known.wait() if blocking else known

    def _ask_type(self, timeout: float) -> PythonFuture[Any]:
        worker, owner = self._worker, self.handle.owner
        if self.is_owner():
            known: PythonFuture[Any] = PythonFuture()
            known.set_result(type(self._own_value(worker.seconds(timeout))))
            return known
        if profiled_here():
            with caller_range("async", worker, owner, _rref_typeof_on_owner):
                return worker.future(worker.call(owner, _rref_typeof_on_owner, (self,), None, timeout))
        return worker.future(worker.call(owner, _rref_typeof_on_owner, (self,), None, timeout))

    def _get_future(self) -> PythonFuture[Any]:
        """A future that is done when the owner has made the value (of None), or has failed to."""
        creation = self.handle.creation
        if creation is not None:
            return self._worker.future_of(creation)
        made: PythonFuture[Any] = PythonFuture()
        made.set_result(None)
        return made

    def _call_there(self, function: Callable[..., Any], args: Any, timeout: float) -> RRef[Any]:
        return call_remote(self._worker, self.handle.owner, function, args, None, timeout)

    def __reduce__(self) -> Any:
        raise RRefError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC: "
            "pass it to rpc_sync, rpc_async or remote"
        )

    def __str__(self) -> str:
        rref = _show(self.handle.rref_id)
        if self.is_owner():
            return f"OwnerRRef({rref})"
        return f"UserRRef(RRefId = {rref}, ForkId = {_show(self.handle.fork_id)})"

    def __repr__(self) -> str:
        known = "" if self._worker.references.is_confirmed(self.handle) else ", not confirmed yet"
        return f"<{self} of {self._worker.membership.name_of(self.handle.owner)}{known}>"


def install_rrefs(worker: Worker) -> None:
    """Let references that arrive at ``worker`` become RRefs."""
    worker.references.make_rref = lambda handle: RRef._of(worker, handle)


def _show(value: int) -> str:
    worker, counter = split_id(value)
    return f"GloballyUniqueId(created_on={worker}, local_id={counter - 1})"  # torch counts from 0


def _failed(future: PythonFuture[Any]) -> bool:
    try:
        future.wait()
    except Exception:
        return True
    return False


def _rref_typeof_on_owner(rref: RRef[Any]) -> type:
    return type(rref.local_value())


def _backward(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    """On the owner."""
    root = rref.local_value()
    if not isinstance(root, torch.Tensor):
        raise RRefError(f"RRef should contain a tensor for .backward(), not {type(root).__name__}")
    if context_id == -1:
        root.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        return
    backward = rref._worker.doors.backward
    if backward is None:
        raise RRefError("this worker has no distributed autograd")
    backward(context_id, root, retain_graph)


def _type_name(hint: Any) -> str:
    return getattr(hint, "__qualname__", str(hint))


# ---- making a value on another worker -------------------------------------------------------------------


def call_remote(
    worker: Worker, to: object, function: Callable[..., Any], args: Any, kwargs: Any, timeout: Any
) -> RRef[Any]:
    """Have ``to`` run the function and keep its result; gives a reference to it at once.

    If making it fails, or does not end in time, using the reference raises what happened.
    """
    seconds = worker.seconds(timeout)
    peer = worker.membership.find_here(to)
    if peer is None:
        peer, seconds = worker.locate(to, seconds)
    reference, packed = pack_call(function, args, kwargs, worker.terms(peer))
    references = worker.references
    handle = references.own_later() if peer.id == worker.id else references.refer(peer.id)
    rref = RRef._of(worker, handle)
    message = RemoteCall(reference, packed.payload, handle.rref_id, handle.fork_id, seconds)
    try:
        call = worker.request(
            peer.id, message, packed, seconds, function, keep=handle, settled=lambda o: _created(handle, o)
        )
    except BaseException:
        references.unasked(handle)
        raise
    handle.creation = call.outcome
    if call.outcome.done():
        _forget_if_made(handle, call.outcome)  # it came before it was noted
    return rref


def _forget_if_made(handle: Handle, answer: Promise[Inbound]) -> None:
    """Only a failure is worth keeping the answer."""
    if answer.exception() is None and not isinstance(answer.result().message, ExceptionReply):
        handle.creation = None


_TIMED_OUT = f"{RpcTimeoutError.__module__}.{RpcTimeoutError.__qualname__}"


def _created(handle: Handle, answer: Promise[Inbound]) -> None:
    """Quick, as the receiver's thread may call it."""
    error = answer.exception()
    if isinstance(error, RpcTimeoutError):
        error = RpcTimeoutError(
            f"RRef creation via rpc.remote() timed out, so there may be no value: {error}"
        )
    if error is None and isinstance(message := answer.result().message, ExceptionReply):
        told = f"On {message.worker}:\n{message.text}\n{message.traceback}"
        # The callee may notice first that time is over; it is the same error, whoever was first.
        kind = RpcTimeoutError if message.kind == _TIMED_OUT else RRefError
        error = kind(f"RRef creation via rpc.remote() failed. {told}")
    _forget_if_made(handle, answer)
    if error is not None:
        failed: Promise[Any] = handle.outcome if handle.outcome is not None else Promise()
        failed.set_exception(error)
        handle.outcome = failed
    if handle.fork_id:
        # After a failure as well: the owner may know of it all the same, and has to hear of its end.
        handle.table.confirm(handle.fork_id)
