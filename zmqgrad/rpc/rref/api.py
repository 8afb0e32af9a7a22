"""RRef: a reference to a value that lives on another worker (or on this one).

Names, arguments and errors are those of ``torch.distributed.rpc.RRef``. The protocol that keeps the value
alive is in :mod:`zmqgrad.rpc.rref.protocol`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import torch

from zmqgrad.errors import NotInitializedError, RpcTimeoutError, RRefError
from zmqgrad.rpc.calls import refuse_in_library
from zmqgrad.rpc.current import current_worker_or_none
from zmqgrad.rpc.futures import PythonFuture
from zmqgrad.rpc.in_flight import time_left_for_calls
from zmqgrad.rpc.membership.worker_info import WorkerInfo, WorkerRecord
from zmqgrad.rpc.options import UNSET_RPC_TIMEOUT
from zmqgrad.rpc.profiling import caller_range
from zmqgrad.rpc.raising import result_of
from zmqgrad.rpc.remote_errors import describe_exception, rebuild_exception
from zmqgrad.rpc.rref import proxies
from zmqgrad.rpc.rref.handle import Handle
from zmqgrad.rpc.serialization.context import SerializedByReference, SerializedPayload
from zmqgrad.rpc.serialization.serializer import serialize_call
from zmqgrad.rpc.torch_internals import PyRRef
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.blocking import check_may_wait
from zmqgrad.runtime.future import Promise
from zmqgrad.transport.base import Inbound
from zmqgrad.wire.ids import split_id
from zmqgrad.wire.messages import ExceptionReply, RemoteCall, RRefFetch, RRefForkRequest
from zmqgrad.wire.tensors.streams import wait_for_default_streams

T = TypeVar("T")


class RRef(SerializedByReference, Generic[T]):
    """A reference to ``value``, which the calling worker owns.

    References to values of other workers come from :func:`zmqgrad.rpc.remote` and in messages.

    Args:
        value: the value.
        type_hint: the type of the value, for display.
        devices: ignored; for compatibility with torch.

    Example:
        >>> rref = rpc.RRef(torch.ones(2))
        >>> rref.is_owner(), rref.owner_name()
        (True, 'worker0')
        >>> rpc.rpc_sync("worker1", lambda there: there.to_here() + 1, args=(rref,))
        tensor([2., 2.])
    """

    __slots__ = ("__weakref__", "_worker", "handle")

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Torch's class, so that libraries which test ``isinstance(x, PyRRef)`` recognise references.

        ``type(self)``, which pickle, copy and pybind11 use, is this class.
        """
        return PyRRef

    def __init__(self, value: T, type_hint: Any = None, devices: Any = None) -> None:
        del devices
        worker = current_worker_or_none()
        if worker is None:
            raise NotInitializedError(
                "Current RPC agent is not set! Did you initialize the RPC framework "
                "(e.g. by calling `rpc.init_rpc`)? Call init_rpc first."
            )
        refuse_in_library("RRef")
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
        """Whether this worker owns the value."""
        return self.handle.owner == self._worker.id

    def owner(self) -> WorkerInfo:
        """The worker that owns the value."""
        return self._worker.membership.record(self.handle.owner).info

    def owner_name(self) -> str:
        """The name of the owner."""
        return self.owner().name

    def confirmed_by_owner(self) -> bool:
        """Whether the owner has registered this reference.

        A reference that arrived in a message is being registered; this waits until it has been.
        """
        references = self._worker.references
        if not references.is_confirmed(self.handle) and self.handle.creation is None:
            self._confirm()
        return references.is_confirmed(self.handle)

    def _confirm(self) -> None:
        """Wait until the owner has registered this reference."""
        worker, handle = self._worker, self.handle
        request = RRefForkRequest(handle.rref_id, handle.fork_id)
        worker.wait(
            worker.request(
                handle.owner, request, seconds=worker.default_timeout, description="RRefForkRequest"
            )
        )
        worker.references.confirm(handle.fork_id)

    def local_value(self) -> T:
        """The value itself, on the owner only. Waits until it has been created.

        Inside a served call it waits as long as the caller of that does; elsewhere without limit, as torch.

        Raises:
            RRefError: if this worker is not the owner.
            RpcTimeoutError: if it is not created within the time of the call that is served.
            Exception: the error of its creation.
        """
        if not self.is_owner():
            rref, fork = _show(self.handle.rref_id), _show(self.handle.fork_id)
            raise RRefError(
                f"For UserRRef(rref_id={rref}, fork_id={fork}), can't call localValue() on user "
                f"{self._worker.membership.own.info}. Call it on owner {self.owner()}, or use to_here()"
            )
        return self._own_value(max(1e-6, time_left_for_calls()))  # 0 would mean no limit

    def _own_value(self, seconds: float) -> T:
        promise = self.handle.promise
        assert promise is not None
        if not promise.done():
            check_may_wait()
        if not promise.wait_done(seconds or None):
            raise RpcTimeoutError(
                f"RPC ran for more than set timeout ({seconds * 1000:.0f} ms) and will now be marked with an "
                f"error: making the value of {self} on {self._worker.name}"
            )
        error = promise.exception()
        if error is not None and not isinstance(error, Exception):
            # A SystemExit of the function that should have made it must not end this thread.
            raise rebuild_exception(describe_exception(error, repr(self.owner())))
        result: T = result_of(promise)
        wait_for_default_streams((result,))
        if (notify := self._worker.hooks.on_local_value) is not None:
            notify(result)
        return result

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Wait for the value and return a copy of it; on the owner, the value itself.

        Args:
            timeout: seconds; 0 for no limit; default: the worker's.

        Raises:
            RpcTimeoutError: if it does not arrive in time.
            PeerLostError: if the owner is lost.
            Exception: the error of its creation.
        """
        seconds = self._worker.resolve_timeout(timeout)
        if self.is_owner():
            return self._own_value(seconds)
        if self.handle.promise is not None:
            result_of(self.handle.promise)  # raises if its creation failed
        self._worker.references.check_alive(self.handle, "to_here() on it")
        message = RRefFetch(self.handle.rref_id, seconds)
        worker, owner = self._worker, self.handle.owner
        # Not in a variable: the traceback of an error would form a cycle that keeps this reference alive.
        value: T = worker.decode(
            worker.send_and_wait(
                lambda: worker.request(
                    owner, message, seconds=seconds, description="to_here", keepalive=self.handle, waits=True
                )
            )
        )
        return value

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """A proxy of the value whose methods run on the owner: ``rref.rpc_sync().size()``.

        For type checkers it is the value, so that they check the arguments of the method, and know its
        result. It has methods only.

        Args:
            timeout: of each call in seconds; 0 for no limit; default: the worker's.
        """
        return cast("T", proxies.Proxy(self, proxies.sync, timeout))

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """As :meth:`rpc_sync`, ``timeout`` included; methods return a future."""
        return proxies.Proxy(self, proxies.asynchronous, timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """As :meth:`rpc_sync`, ``timeout`` included; methods return an RRef to their result."""
        return proxies.Proxy(self, proxies.remote, timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run the backward pass from the value, a scalar tensor, on its owner.

        Args:
            dist_autograd_ctx_id: the distributed autograd context that accumulates the gradients; -1, on the
                owner only: a local pass, which accumulates into ``.grad``.
            retain_graph: keep the graph for another pass.

        Raises:
            RRefError: if the value is not a tensor, or a user passes no context.
            Exception: as ``torch.autograd.backward`` or ``zmqgrad.autograd.backward`` raise.
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
            worker.ask(self.handle.owner, _backward, (self, dist_autograd_ctx_id, retain_graph))

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """The class of the value, or with ``blocking=False`` a future of it. It is requested once.

        Raises:
            RpcTimeoutError: if it does not arrive in time.
            Exception: the error of the creation of the value.
        """
        known = self.handle.value_type
        if known is None or (blocking and not known.done()) or (known.done() and _failed(known)):
            known = self.handle.value_type = self._request_type(timeout)
        return known.wait() if blocking else known

    def _request_type(self, timeout: float) -> PythonFuture[Any]:
        worker, owner = self._worker, self.handle.owner
        if self.is_owner():
            known: PythonFuture[Any] = PythonFuture()
            known.set_result(type(self._own_value(worker.resolve_timeout(timeout))))
            return known
        with caller_range("async", worker, owner, _rref_typeof_on_owner):
            return worker.future(worker.call(owner, _rref_typeof_on_owner, (self,), None, timeout))

    def _get_future(self) -> PythonFuture[Any]:
        """A future (of None) that is done when the owner has created the value, or has failed to."""
        creation = self.handle.creation
        if creation is not None:
            return self._worker.replies.future_of(creation)
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
    """Make references that arrive at ``worker`` RRefs."""
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
    """Runs on the owner of ``rref``."""
    root = rref.local_value()
    if not isinstance(root, torch.Tensor):
        raise RRefError(f"RRef should contain a tensor for .backward(), not {type(root).__name__}")
    if context_id == -1:
        root.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        return
    backward = rref._worker.hooks.backward
    if backward is None:
        raise RRefError("this worker has no distributed autograd")
    backward(context_id, root, retain_graph)


def _type_name(hint: Any) -> str:
    return getattr(hint, "__qualname__", str(hint))


# ---- creating a value on another worker -------------------------------------------------------------------


def call_remote(
    worker: Worker,
    to: object,
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    timeout: Any,
    call_for: Callable[[WorkerRecord], tuple[str, SerializedPayload]] | None = None,
) -> RRef[Any]:
    """Send a remote call to ``to``, which keeps the result, and return a reference to it at once.

    If the call fails or times out, using the reference raises the error. ``call_for`` returns the call as the
    owner gets it; None: it is serialized here.

    Raises:
        UnknownWorkerError, PayloadError, PeerLostError: if the call cannot be sent.
    """
    refuse_in_library("remote")
    seconds = worker.resolve_timeout(timeout)
    peer = worker.membership.find_here(to)
    if peer is None:
        peer, seconds = worker.client.find_peer(to, seconds)
    if call_for is None:
        reference, serialized = serialize_call(function, args, kwargs, worker.contexts.for_calls(peer))
    else:
        reference, serialized = call_for(peer)
    references = worker.references
    handle = references.own_later() if peer.id == worker.id else references.reference(peer.id)
    rref = RRef._of(worker, handle)
    message = RemoteCall(reference, serialized.payload, handle.rref_id, handle.fork_id, seconds)
    try:
        call = worker.request(
            peer.id,
            message,
            serialized,
            seconds,
            function,
            keepalive=handle,
            on_done=lambda o: _created(handle, o),
        )
    except BaseException:
        references.abort_remote(handle)
        raise
    handle.creation = call.promise
    if call.promise.done():
        _forget_if_made(handle, call.promise)  # the reply arrived before the assignment
    return rref


def _forget_if_made(handle: Handle, reply: Promise[Inbound]) -> None:
    """Drop the reply unless creation failed."""
    if reply.exception() is None and not isinstance(reply.result().message, ExceptionReply):
        handle.creation = None


_TIMED_OUT = f"{RpcTimeoutError.__module__}.{RpcTimeoutError.__qualname__}"


def _created(handle: Handle, reply: Promise[Inbound]) -> None:
    """Handle the reply of a remote call. Must be quick: the receiver's thread may run it."""
    error = reply.exception()
    if isinstance(error, RpcTimeoutError):
        error = RpcTimeoutError(
            f"RRef creation via rpc.remote() timed out, so there may be no value: {error}"
        )
    if error is None and isinstance(message := reply.result().message, ExceptionReply):
        text = f"On {message.worker}:\n{message.text}\n{message.traceback}"
        # The callee may notice the timeout first; the error is the same on both sides.
        kind = RpcTimeoutError if message.kind == _TIMED_OUT else RRefError
        error = kind(f"RRef creation via rpc.remote() failed. {text}")
    _forget_if_made(handle, reply)
    if error is not None:
        failed: Promise[Any] = handle.promise if handle.promise is not None else Promise()
        failed.set_exception(error)
        handle.promise = failed
    if handle.fork_id:
        # After a failure as well: the owner may have registered it and must be notified of its deletion.
        handle.table.confirm(handle.fork_id)
