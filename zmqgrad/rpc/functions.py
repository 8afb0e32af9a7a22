"""Functions that return a future: ``@async_execution``, as in ``torch.distributed.rpc.functions``.

    @rpc.functions.async_execution
    def add_there(to, x, y):
        return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda f: f.wait() + 1)

The callee runs such a function like any other, but it must return a ``torch.futures.Future``; the reply
is sent when that is set, and no engine thread waits for it. Futures themselves are never sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from zmqgrad.errors import OperatorError, RpcError
from zmqgrad.rpc.calls import describe
from zmqgrad.rpc.raising import copy_exception
from zmqgrad.rpc.serialization.scripts import scripted_name
from zmqgrad.rpc.torch_internals import CppFuture, operator_name
from zmqgrad.runtime.future import Promise

__all__ = ["async_execution"]

F = TypeVar("F", bound=Callable[..., Any])

MARK = "_wrapped_async_rpc_function"
"""The attribute that torch's own decorator sets, so functions decorated by torch work here as well."""


def async_execution(fn: F) -> F:
    """Let ``fn``, which returns a future, run asynchronously where it is called remotely.

    With ``staticmethod`` or ``classmethod`` this must be the inner decorator.

    Args:
        fn: a function that returns a ``torch.futures.Future``.

    Returns:
        The decorated function; called locally, it behaves like ``fn``.

    Example:
        >>> @rpc.functions.async_execution
        ... def add_there(to, x, y):  # worker1 runs this, and no thread of it waits for the sum
        ...     return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda done: done.wait() * 2)
        >>> rpc.rpc_sync("worker1", add_there, args=("worker0", torch.ones(2), 1))
        tensor([4., 4.])
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    if isinstance(fn, torch.jit.ScriptFunction):  # wraps() has copied the names of that class
        wrapper.__module__, wrapper.__qualname__ = scripted_name(fn)
    setattr(wrapper, MARK, fn)
    return wrapper  # type: ignore[return-value]


class DeferredResult:
    """The result of an asynchronous function, which may not be done yet."""

    __slots__ = ("future",)

    def __init__(self, future: CppFuture[Any]) -> None:
        self.future = future

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the future is done, in the thread that sets it."""
        # The method of the C++ class: futures made in C++ (``collect_all``) lack that of the Python class.
        CppFuture.add_done_callback(self.future, lambda _: callback())

    def value(self) -> Any:
        """The value of the future, which must be done.

        Raises:
            Exception: the error that was set.
        """
        return self.future.wait()

    def resolve(self, promise: Promise[Any]) -> Promise[Any]:
        """Set ``promise`` to the result of the future, which must be done, and return it."""
        try:
            promise.set_result(self.value())
        except BaseException as e:
            promise.set_exception(copy_exception(e))  # whose traceback would refer to the future
        return promise


def check_result(function: Callable[..., Any], value: Any) -> Any:
    """Return ``value``, which ``function`` returned; as a :class:`DeferredResult` if that is asynchronous.

    Raises:
        RpcError: if an asynchronous function returned something other than a future.
    """
    if getattr(function, MARK, None) is None:
        return value
    if not isinstance(value, CppFuture):
        raise RpcError(
            f"Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
            f"but {describe(function)} returned {type(value)}"
        )
    return DeferredResult(value)


def check_operator(function: Callable[..., Any], error: TypeError) -> None:
    """Check that ``error``, which ``function`` raised, is not that of a torch operator.

    Raises:
        OperatorError: if it is, in the words of torch's RPC.
    """
    if operator_name(function):
        raise OperatorError(
            f"Overloaded torch operator invoked from Python failed to match any schema: {error}"
        ) from error
