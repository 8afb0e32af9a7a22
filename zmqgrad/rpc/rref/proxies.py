"""Proxies of the value of an RRef, whose methods run on the owner.

    rref.rpc_sync().size()     rref.rpc_async().size()     rref.remote().view(1, 4)
    rref.rpc_sync()(x)         calls the value itself

The first two send the call at once: if the value has no such method, the call raises AttributeError. The
third would raise it only when its result is fetched; so it checks the class of the value first, which is
requested once and cached.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from zmqgrad.errors import PeerLostError
from zmqgrad.rpc.calls import PendingCall
from zmqgrad.rpc.functions import check_result
from zmqgrad.rpc.membership.worker_info import WorkerRecord
from zmqgrad.rpc.profiling import caller_range
from zmqgrad.rpc.serialization.context import SerializedPayload
from zmqgrad.rpc.serialization.naming import method_reference
from zmqgrad.rpc.serialization.serializer import serialize_arguments

if TYPE_CHECKING:
    from zmqgrad.rpc.rref.api import RRef


_NOT_FORWARDED = frozenset(
    f"__{name}__"
    for name in (
        *("copy", "deepcopy", "getstate", "setstate", "getnewargs", "getnewargs_ex", "wrapped", "signature"),
        *("array", "array_interface", "array_struct", "cuda_array_interface", "torch_function", "dlpack"),
    )
)
"""Attributes that copy, pickle, inspect, numpy and torch look up on any object: not forwarded."""


class Proxy:
    """A proxy of the value of an RRef, or of several. Its attributes are methods that run on the owner."""

    __slots__ = ("_invoke", "_rref", "_timeout")

    def __init__(self, rref: Any, invoke: Callable[..., Any], timeout: float) -> None:
        self._rref = rref
        self._invoke = invoke
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in _NOT_FORWARDED:
            raise AttributeError(name)

        def method(*args: Any, **kwargs: Any) -> Any:
            return self._invoke(self._rref, self._timeout, name, args, kwargs)

        return method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the value itself."""
        return self._invoke(self._rref, self._timeout, "__call__", args, kwargs)

    def __repr__(self) -> str:
        return f"<proxy of {self._rref!r}>"


def sync(rref: RRef[Any], timeout: float, name: str, args: Any, kwargs: Any) -> Any:
    """Call method ``name`` of the value and return its result."""
    worker = rref._worker
    with caller_range("sync", worker, rref.handle.owner, name):
        return worker.decode(
            worker.send_and_wait(partial(call_method, rref, timeout, name, args, kwargs, True))  # it waits
        )


def asynchronous(rref: RRef[Any], timeout: float, name: str, args: Any, kwargs: Any) -> Any:
    """Call method ``name`` of the value and return a future of its result, or of the loss of its owner."""
    worker = rref._worker
    try:
        with caller_range("async", worker, rref.handle.owner, name):
            return worker.future(call_method(rref, timeout, name, args, kwargs))
    except PeerLostError as e:
        return worker.replies.failed_future(e)


def remote(rref: RRef[Any], timeout: float, name: str, args: Any, kwargs: Any) -> Any:
    """Call method ``name`` of the value and return an RRef to its result.

    Raises:
        AttributeError: if the value has no such method.
    """
    if not hasattr(rref._get_type(timeout), name):
        worker, seconds = (
            rref._worker,
            rref._worker.resolve_timeout(timeout),
        )  # the instance may have it
        owner = rref.handle.owner
        worker.ask(owner, _check_attribute, (rref, seconds, name), timeout)
    content = (rref, rref._worker.resolve_timeout(timeout), name, args, kwargs)
    with caller_range("remote", rref._worker, rref.handle.owner, name):
        return rref._call_there(call_own_method, content, timeout)


def call_method(
    rref: RRef[Any],
    timeout: float,
    name: str,
    args: Any,
    kwargs: Any,
    waits: bool = False,
    reply_to: int = 0,
    serialized: Callable[[WorkerRecord], SerializedPayload] | None = None,
) -> PendingCall:
    """Sends a call of method ``name`` of the value.

    Args:
        waits, reply_to: as for :meth:`zmqgrad.rpc.client.Client.request`.
        serialized: returns the arguments as the owner gets them; None: they are serialized here.
    """
    worker = rref._worker
    seconds = worker.resolve_timeout(timeout)
    if rref.is_owner():
        return worker.call(
            worker.id, call_own_method, (rref, seconds, name, args, kwargs), None, timeout, waits
        )
    worker.references.check_alive(rref.handle, f"method {name} on it")
    peer = worker.membership.record(rref.handle.owner)
    if serialized is None:
        payload = serialize_arguments(args, kwargs, worker.contexts.for_calls(peer))
    else:
        payload = serialized(peer)
    reference = method_reference(rref.handle.rref_id, name)
    return worker.request_call(
        peer.id, reference, payload, seconds, f"method {name}", rref.handle, waits, reply_to=reply_to
    )


def _check_attribute(rref: RRef[Any], seconds: float, name: str) -> None:
    """Raise AttributeError if the value has no attribute ``name``. Runs on the owner."""
    getattr(rref._own_value(seconds), name)


def call_own_method(rref: RRef[Any], seconds: float, name: str, args: Any, kwargs: Any) -> Any:
    """Call method ``name`` of the value. Runs on the owner."""
    method = getattr(rref._own_value(seconds), name)
    return check_result(method, method(*args, **kwargs))
