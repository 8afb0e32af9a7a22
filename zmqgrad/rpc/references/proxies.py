"""Stand-ins for the value of an RRef: their methods run where the value lives.

    rref.rpc_sync().size()     rref.rpc_async().size()     rref.remote().view(1, 4)
    rref.rpc_sync()(x)         calls the value itself

The first two ask the owner at once: a method that the value does not have is an AttributeError of the call.
The third would hide that until its result is fetched; so it looks at the value's class first, which is asked
for once and remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zmqgrad.rpc.calls import PendingCall
from zmqgrad.rpc.functions import run
from zmqgrad.rpc.profiling import caller_range, profiled_here
from zmqgrad.rpc.serialization.naming import method_reference
from zmqgrad.rpc.serialization.serializer import serialize_arguments

if TYPE_CHECKING:
    from zmqgrad.rpc.rref import RRef

How = Callable[["RRef[Any]", float, str, Any, Any], Any]


_OF_THE_PROXY = frozenset(
    f"__{name}__"
    for name in (
        *("copy", "deepcopy", "getstate", "setstate", "getnewargs", "getnewargs_ex", "wrapped", "signature"),
        *("array", "array_interface", "array_struct", "cuda_array_interface", "torch_function", "dlpack"),
    )
)
"""What copy, pickle, inspect, numpy and torch ask any object for: the value over there is not meant."""


class Proxy:
    """Stands for the value of an RRef; attributes are methods that run on its owner."""

    __slots__ = ("_how", "_rref", "_timeout")

    def __init__(self, rref: RRef[Any], how: How, timeout: float) -> None:
        self._rref = rref
        self._how = how
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in _OF_THE_PROXY:
            raise AttributeError(name)

        def method(*args: Any, **kwargs: Any) -> Any:
            return self._how(self._rref, self._timeout, name, args, kwargs)

        return method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the value itself."""
        return self._how(self._rref, self._timeout, "__call__", args, kwargs)

    def __repr__(self) -> str:
        return f"<proxy of {self._rref!r}>"


def sync(rref: RRef[Any], timeout: float, name: str, args: Any, kwargs: Any) -> Any:
    """Call method ``name`` of the value; gives its result."""
    worker = rref._worker
    if profiled_here():
        with caller_range("sync", worker, rref.handle.owner, name):
            return worker.open(worker.wait(_ask(rref, timeout, name, args, kwargs)))
    return worker.open(worker.wait(_ask(rref, timeout, name, args, kwargs, waits=True)))


def asynchronous(rref: RRef[Any], timeout: float, name: str, args: Any, kwargs: Any) -> Any:
    """The same; gives a future of it."""
    if profiled_here():
        with caller_range("async", rref._worker, rref.handle.owner, name):
            return rref._worker.future(_ask(rref, timeout, name, args, kwargs))
    return rref._worker.future(_ask(rref, timeout, name, args, kwargs))


def remote(rref: RRef[Any], timeout: float, name: str, args: Any, kwargs: Any) -> Any:
    """The same; gives an RRef to it.

    Raises:
        AttributeError: if the value has no such method.
    """
    if not hasattr(rref._get_type(timeout), name):
        worker, seconds = rref._worker, rref._worker.seconds(timeout)  # perhaps the object itself has it
        owner = rref.handle.owner
        worker.open(worker.wait(worker.call(owner, _look_up, (rref, seconds, name), None, timeout)))
    content = (rref, rref._worker.seconds(timeout), name, args, kwargs)
    return rref._call_there(call_own_method, content, timeout)


def _ask(
    rref: RRef[Any], timeout: float, name: str, args: Any, kwargs: Any, waits: bool = False
) -> PendingCall:
    worker = rref._worker
    seconds = worker.seconds(timeout)
    if rref.is_owner():
        return worker.call(
            worker.id, call_own_method, (rref, seconds, name, args, kwargs), None, timeout, waits
        )
    worker.references.check_alive(rref.handle, f"method {name} on it")
    peer = worker.membership.record(rref.handle.owner)
    packed = serialize_arguments(args, kwargs, worker.terms(peer))
    reference = method_reference(rref.handle.rref_id, name)
    return worker.request_call(peer.id, reference, packed, seconds, f"method {name}", rref.handle, waits)


def _look_up(rref: RRef[Any], seconds: float, name: str) -> None:
    """On the owner."""
    getattr(rref._own_value(seconds), name)


def call_own_method(rref: RRef[Any], seconds: float, name: str, args: Any, kwargs: Any) -> Any:
    """On the owner."""
    return run(getattr(rref._own_value(seconds), name), args, kwargs)
