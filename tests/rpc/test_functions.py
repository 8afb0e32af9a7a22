"""``async_execution``: the caller is answered when the future that the function returned is set."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from zmqgrad import autograd, rpc
from zmqgrad.errors import RpcError, RpcTimeoutError
from zmqgrad.rpc.current import current_worker
from zmqgrad.rpc.options import RpcBackendOptions
from zmqgrad.testing import Cluster, cluster


@pytest.fixture
def trio() -> Iterator[Cluster]:
    with cluster(3) as c:
        yield c


def call_sync(to: Any, function: Callable[..., Any], *args: Any) -> Any:
    """By ``rpc_sync``."""
    return rpc.rpc_sync(to, function, args=args)


def call_async(to: Any, function: Callable[..., Any], *args: Any) -> Any:
    """By ``rpc_async``."""
    return rpc.rpc_async(to, function, args=args).wait()


def call_remote(to: Any, function: Callable[..., Any], *args: Any) -> Any:
    """By ``remote``."""
    return rpc.remote(to, function, args=args).to_here()


def add(x: Any, y: Any) -> Any:
    """Plain."""
    return x + y


@rpc.functions.async_execution
def add_at(to: int, x: Any, y: Any) -> Any:
    """The future of another call."""
    return rpc.rpc_async(to, add, args=(x, y))


@rpc.functions.async_execution
def add_chained(to: int, x: Any, y: Any) -> Any:
    """The future of many steps."""
    future = rpc.rpc_async(to, add, args=(x, 0))
    for _ in range(y):
        future = future.then(lambda f: f.wait() + 1)
    return future


@rpc.functions.async_execution
def add_set(to: int, x: Any, y: Any) -> Any:
    """A future of torch's own, set in a callback."""
    future: Any = torch.futures.Future()
    rpc.rpc_async(to, add, args=(x, y)).add_done_callback(lambda f: future.set_result(f.wait()))
    return future


@rpc.functions.async_execution
def add_gathered(to: int, x: Any, y: Any) -> Any:
    """What torch makes of several futures."""
    parts = [rpc.rpc_async(to, add, args=(x, 0)), rpc.rpc_async(to, add, args=(y, 0))]
    return torch.futures.collect_all(parts).then(lambda all_: sum(f.wait() for f in all_.wait()))


@rpc.functions.async_execution
def add_nested(to: int, x: Any, y: Any) -> Any:
    """The future of another asynchronous function."""
    return rpc.rpc_async(to, add_at, args=(current_worker().id, x, y))


@rpc.functions.async_execution
def add_at_once(to: int, x: Any, y: Any) -> Any:
    """A future that is done already."""
    future: Any = torch.futures.Future()
    future.set_result(x + y)
    return future


class Adder:
    """The same as methods."""

    @staticmethod
    @rpc.functions.async_execution
    def static(to: int, x: Any, y: Any) -> Any:
        """Of no instance."""
        return rpc.rpc_async(to, add, args=(x, y))

    @classmethod
    @rpc.functions.async_execution
    def of_class(cls, to: int, x: Any, y: Any) -> Any:
        """Of the class."""
        assert cls is Adder
        return rpc.rpc_async(to, add, args=(x, y))

    @rpc.functions.async_execution
    def bound(self, to: int, x: Any, y: Any) -> Any:
        """Of an instance."""
        assert type(self) is Adder
        return rpc.rpc_async(to, add, args=(x, y))


FUNCTIONS = [
    add_at,
    add_chained,
    add_set,
    add_gathered,
    add_nested,
    add_at_once,
    Adder.static,
    Adder.of_class,
    Adder().bound,
]


@pytest.mark.parametrize("how", [call_sync, call_async, call_remote])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__qualname__)
def test_the_caller_gets_the_result_of_the_future(trio: Cluster, how: Any, function: Any) -> None:
    assert how(1, function, 2, 3, 4) == 7
    assert how(1, function, 1, 3, 4) == 7, "the callee calls itself"
    assert how(0, function, 2, 3, 4) == 7, "the caller calls itself"


@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize("name", ["static", "of_class", "bound"])
def test_methods_of_a_reference(trio: Cluster, owner: int, name: str) -> None:
    adder = rpc.remote(owner, Adder)
    assert getattr(adder.rpc_sync(), name)(2, 3, 4) == 7
    assert getattr(adder.rpc_async(), name)(2, 3, 4).wait() == 7
    assert getattr(adder.remote(), name)(2, 3, 4).to_here() == 7


@rpc.functions.async_execution
def no_future() -> int:
    """Wrong."""
    return 1


@rpc.functions.async_execution
def raises() -> Any:
    """Before there is a future."""
    raise KeyError("early")


@rpc.functions.async_execution
def fails_later() -> Any:
    """The future fails."""
    future: Any = torch.futures.Future()
    future.set_exception(KeyError("late"))
    return future


@rpc.functions.async_execution
def unsendable() -> Any:
    """The future's value cannot travel."""
    future: Any = torch.futures.Future()
    future.set_result(threading.Lock())
    return future


@pytest.mark.parametrize("how", [call_sync, call_async, call_remote])
def test_errors(trio: Cluster, how: Any) -> None:
    with pytest.raises(
        RpcError, match=r"decorated with @rpc\.async_function must return a torch\.futures\.Future object"
    ):
        how(1, no_future)
    with pytest.raises(KeyError, match="early"):
        how(1, raises)
    with pytest.raises(KeyError, match="late"):
        how(1, fails_later)
    with pytest.raises(RpcError, match="lock"):
        how(1, unsendable)
    assert how(1, add, 1, 2) == 3


@rpc.functions.async_execution
def never() -> Any:
    """It is never set."""
    return torch.futures.Future()


def test_a_future_that_is_never_set_is_a_timeout(trio: Cluster) -> None:
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync(1, never, timeout=0.05)
    rref = rpc.remote(1, never, timeout=0.05)
    with pytest.raises(RpcTimeoutError):
        rref.to_here(timeout=0.1)


WAITING: list[Any] = []


@rpc.functions.async_execution
def meet(number: int) -> Any:
    """Everybody is answered once ``number`` have called."""
    future: Any = torch.futures.Future()
    WAITING.append(future)
    if len(WAITING) == number:
        waiting, WAITING[:] = list(WAITING), []
        for each in waiting:
            each.set_result(number)
    return future


def test_no_engine_thread_waits() -> None:
    with cluster(2, RpcBackendOptions(rpc_timeout=20.0, num_worker_threads=1)) as c:
        futures = [rpc.rpc_async(1, meet, args=(30,)) for _ in range(29)]
        c.network.wait_quiet()
        assert c.workers[1].pool.statistics()["threads"] <= 2
        assert rpc.rpc_sync(1, meet, args=(30,)) == 30
        assert torch.futures.wait_all(futures) == [30] * 29


def test_gradients_go_through(trio: Cluster) -> None:
    x = torch.ones(3, requires_grad=True)
    for function in (add_at, add_chained, add_nested):
        with autograd.context() as context_id:
            y = rpc.rpc_sync(1, function, args=(2, x * 2, 1))
            autograd.backward(context_id, [y.sum()])
            assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((3,), 2.0))


def test_torchs_own_decorator_is_understood(trio: Cluster) -> None:
    assert rpc.rpc_sync(1, decorated_by_torch, args=(2, 3, 4)) == 7


def decorated_by_torch(to: int, x: Any, y: Any) -> Any:
    """As in a program that imports torch's ``functions``."""
    return rpc.rpc_async(to, add, args=(x, y))


decorated_by_torch._wrapped_async_rpc_function = decorated_by_torch  # type: ignore[attr-defined]
