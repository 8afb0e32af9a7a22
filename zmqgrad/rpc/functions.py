"""Functions whose value comes later: ``@async_execution``, as in ``torch.distributed.rpc.functions``.

    @rpc.functions.async_execution
    def add_there(to, x, y):
        return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda f: f.wait() + 1)

The callee runs such a function like any other, but it must return a ``torch.futures.Future``; the caller is
answered when that is set, and no engine thread waits for it. Futures themselves never travel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from zmqgrad.errors import OperatorError, RpcError
from zmqgrad.runtime.future import Promise

__all__ = ["async_execution"]

F = TypeVar("F", bound=Callable[..., Any])

MARK = "_wrapped_async_rpc_function"
"""Torch's own decorator leaves the same mark, so functions that it has decorated work here as well."""


def async_execution(fn: F) -> F:
    """Let ``fn``, which returns a future, run asynchronously where it is called remotely.

    With ``staticmethod`` or ``classmethod`` this must be the inner decorator.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    setattr(wrapper, MARK, fn)
    return wrapper  # type: ignore[return-value]


class Later:
    """What a call gave that is not there yet."""

    __slots__ = ("future",)

    def __init__(self, future: torch._C.Future[Any]) -> None:
        self.future = future

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call it as soon as the future is done, in the thread that makes it so."""
        # The method of torch's own class: what torch makes itself (``collect_all``) lacks that of Python's.
        torch._C.Future.add_done_callback(self.future, lambda _: callback())

    def value(self) -> Any:
        """The value of the future, which must be done.

        Raises:
            what was set instead.
        """
        return self.future.wait()

    def into(self, outcome: Promise[Any]) -> Promise[Any]:
        """``outcome``, set to what the future, which must be done, holds."""
        try:
            outcome.set_result(self.value())
        except BaseException as e:
            outcome.set_exception(e)
        return outcome


def run(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``function(*args, **kwargs)``; a :class:`Later` if the function is asynchronous.

    Raises:
        RpcError: if an asynchronous function returns something else than a future.
        OperatorError: if a torch operator does not take the arguments.
    """
    try:
        value = function(*args, **kwargs)
    except TypeError as e:
        if torch.jit._builtins._find_builtin(function) is None:  # type: ignore[no-untyped-call]
            raise
        raise OperatorError(
            f"Overloaded torch operator invoked from Python failed to match any schema: {e}"
        ) from e
    if getattr(function, MARK, None) is None:
        return value
    if not isinstance(value, torch._C.Future):
        raise RpcError(
            f"Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
            f"but {getattr(function, '__qualname__', function)} returned {type(value)}"
        )
    return Later(value)
