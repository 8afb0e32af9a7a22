"""What an RRef offers beside its value: types, futures, backward passes, errors that say what to do."""

from __future__ import annotations

import gc
import inspect
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.waiting import eventually
from zmqgrad import autograd, rpc
from zmqgrad.errors import (
    AutogradError,
    PayloadError,
    RemoteError,
    RpcTimeoutError,
    RRefError,
    UnknownWorkerError,
)
from zmqgrad.rpc.current import current_worker
from zmqgrad.runtime.clock import Deadline
from zmqgrad.testing import Cluster, cluster
from zmqgrad.wire.messages import MessageType


@pytest.fixture
def trio() -> Iterator[Cluster]:
    with cluster(3) as c:
        yield c


class Counter:
    """Counts, and can be called."""

    def __init__(self) -> None:
        self.n = 0
        self.own = lambda: "of the object"

    def add(self, n: int = 1) -> int:
        """Count."""
        self.n += n
        return self.n

    def __call__(self, n: int) -> int:
        return self.add(n)


def never_made() -> None:
    """Fails."""
    raise KeyError("not made")


@rpc.functions.async_execution
def never() -> Any:
    """It is never set."""
    return torch.futures.Future()


# ---- proxies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", [0, 1])
def test_the_value_itself_can_be_called(trio: Cluster, owner: int) -> None:
    counter = rpc.remote(owner, Counter)
    assert counter.rpc_sync()(2) == 2
    assert counter.rpc_async()(2).wait() == 4
    assert counter.remote()(2).to_here() == 6
    sync = counter.rpc_sync(timeout=5)
    assert [sync.add() for _ in range(3)] == [7, 8, 9], "a proxy can be used again"
    assert "proxy of" in repr(sync)
    assert counter.remote().own().to_here() == "of the object"


@pytest.mark.parametrize("owner", [0, 1])
def test_special_methods_by_name(trio: Cluster, owner: int) -> None:
    numbers = rpc.remote(owner, list, args=([3, 4],))
    assert numbers.rpc_sync().__len__() == 2
    assert numbers.rpc_async().__getitem__(1).wait() == 4
    assert numbers.remote().__add__([5]).to_here() == [3, 4, 5]
    proxy = numbers.rpc_sync()
    assert inspect.unwrap(proxy) is proxy, "what asks any object asks the proxy"


@pytest.mark.parametrize("owner", [0, 1])
def test_a_method_that_is_not_there(trio: Cluster, owner: int) -> None:
    counter = rpc.remote(owner, Counter)
    with pytest.raises(AttributeError, match="has no attribute 'subtract'"):
        counter.rpc_sync().subtract()
    with pytest.raises(AttributeError, match="has no attribute 'subtract'"):
        counter.rpc_async().subtract().wait()
    with pytest.raises(AttributeError, match="has no attribute 'subtract'"):
        counter.remote().subtract()


def test_a_proxy_has_its_timeout_even_before_there_is_a_value(trio: Cluster) -> None:
    rref = rpc.remote(1, never)
    for use in (
        lambda: rref.rpc_sync(timeout=0.02).copy(),
        lambda: rref.rpc_async(timeout=0.02).copy().wait(),
        lambda: rref.remote(timeout=0.02).copy(),
        lambda: rref._get_type(timeout=0.02),
        lambda: rref.to_here(timeout=0.02),
    ):
        with pytest.raises(RpcTimeoutError, match="RPC ran for more than set timeout"):
            use()


# ---- types and futures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", [0, 1])
def test_the_type_is_asked_for_once(trio: Cluster, owner: int) -> None:
    rref = rpc.remote(owner, Counter)
    assert rref._get_type() is Counter
    before = trio.workers[0].counts()[0]
    future = rref._get_type(blocking=False)
    assert future.wait() is Counter
    assert rref._get_type(blocking=False) is future
    assert trio.workers[0].counts()[0] == before


def test_the_type_of_what_could_not_be_made(trio: Cluster) -> None:
    rref = rpc.remote(1, never_made)
    with pytest.raises(KeyError, match="not made"):
        rref._get_type()
    with pytest.raises(KeyError, match="not made"):
        rref._get_type(blocking=False).wait()


def test_a_future_of_the_making(trio: Cluster) -> None:
    with trio.network.hold(MessageType.REMOTE_CALL) as held:
        rref = rpc.remote(1, list)
        future = rref._get_future()
        held.wait()
        assert not future.done()
        assert isinstance(future, torch.futures.Future)
    assert future.wait() is None
    assert rpc.RRef(3)._get_future().done()
    late = rpc.remote(1, never, timeout=0.02)
    with pytest.raises(RpcTimeoutError, match="RPC ran for more than set timeout"):
        late._get_future().wait()
    with pytest.raises(RpcTimeoutError, match="RRef creation via"):
        late.to_here()


def test_repr_of_references(trio: Cluster) -> None:
    mine, theirs = rpc.RRef(1), rpc.remote(1, list)
    assert str(mine) == "OwnerRRef(GloballyUniqueId(created_on=0, local_id=0))"
    assert str(theirs) == (
        "UserRRef(RRefId = GloballyUniqueId(created_on=0, local_id=1), "
        "ForkId = GloballyUniqueId(created_on=0, local_id=2))"
    )
    assert "of worker1" in repr(theirs)
    assert (mine.owner_name(), theirs.owner_name()) == ("worker0", "worker1")
    assert (mine.is_owner(), theirs.is_owner()) == (True, False)
    assert theirs.owner() == rpc.get_worker_info("worker1")
    with pytest.raises(
        RRefError,
        match=r"can't call localValue\(\) on user WorkerInfo\(id=0, name=worker0\)\. Call it on owner",
    ):
        theirs.local_value()


def confirmed(rref: Any) -> bool:
    """Runs on the worker that received the reference."""
    return rref.confirmed_by_owner()


def test_a_received_reference_is_confirmed(trio: Cluster) -> None:
    rref = rpc.remote(1, list)
    assert [rpc.rpc_sync(to, confirmed, (rref,)) for to in (0, 1, 2)] == [True] * 3
    rref.to_here()
    rref._get_future().wait()
    assert rref.confirmed_by_owner()


# ---- errors of values ------------------------------------------------------------------------------------


def use(rref: Any) -> str:
    """Use it, which fails, in a frame that holds another reference, which leads to it."""
    held = rpc.remote(1, here, args=(rref,))
    with pytest.raises(KeyError):
        rref.to_here()
    with pytest.raises(KeyError):
        held.to_here()
    return held.owner_name()


def here(rref: Any) -> Any:
    """Its value."""
    return rref.to_here()


def fail_with(error: BaseException, rref: Any = None) -> None:
    """Fails, while its frame holds ``rref``, as does that of what led to it."""
    try:
        fail_first(rref)
    except ValueError as e:
        raise error from e


def fail_first(rref: Any) -> None:
    """As above."""
    raise ValueError


def test_errors_of_values_keep_nothing_alive(trio: Cluster) -> None:
    for owner in 0, 1, 2:
        assert use(rpc.remote(owner, never_made)) == "worker1"
        other = rpc.remote(1, never_made)
        use(rpc.remote(owner, fail_with, args=(KeyError(), other)))
        use(rpc.remote(owner, here, args=(other,)))
    del other
    gc.collect()
    eventually(
        lambda: [w.references.statistics() for w in trio.workers],
        lambda found: not any(sum(each.values()) for each in found),
    )


@pytest.mark.parametrize("owner", [0, 1])
def test_the_error_of_a_value_is_raised_again_and_again(trio: Cluster, owner: int) -> None:
    rref = rpc.remote(owner, fail_with, args=(ZeroDivisionError("why"),))
    seen: list[str] = []
    for _ in range(3):
        with pytest.raises(ZeroDivisionError) as caught:
            rref.to_here()
        shown = "".join(traceback.format_exception(caught.value))
        seen.append(shown)
        assert all(part in shown for part in ("ValueError", "in fail_first", "in fail_with"))
    assert seen[0] == seen[1] == seen[2], "without the frames of those who asked before"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_an_own_value_that_was_not_made_ends_no_thread(trio: Cluster, error: BaseException) -> None:
    rref = rpc.remote(0, fail_with, args=(error,))
    for how in rref.to_here, rref.local_value, lambda: rref.remote().foo().to_here():
        with pytest.raises(RemoteError, match=rf"builtins.{type(error).__name__} cannot be rebuilt here"):
            how()


class Slow:
    """Made by a call that takes longer than the default timeout."""

    gate = threading.Event()

    def __init__(self) -> None:
        assert self.gate.wait(60)

    def number(self) -> int:
        """Five."""
        return 5


def number_of(rref: Any) -> int:
    """That of a value of this worker."""
    return int(rref.local_value().number())


@pytest.mark.parametrize("timeout", [0, 60])
@pytest.mark.parametrize(
    "ask",
    [
        lambda rref, timeout: rref.rpc_async(timeout=timeout).number(),
        lambda rref, timeout: rpc.rpc_async(1, number_of, args=(rref,), timeout=timeout),
        lambda rref, timeout: rref._get_type(timeout=timeout, blocking=False),
        lambda rref, timeout: rpc.remote(1, number_of, (rref,), timeout=timeout).rpc_async(0).__int__(),
    ],
)
def test_a_call_waits_for_the_value_as_long_as_its_own_timeout_allows(ask: Any, timeout: float) -> None:
    Slow.gate.clear()
    with cluster(2, rpc.RpcBackendOptions(rpc_timeout=0.01)):
        future = ask(rpc.remote(1, Slow, timeout=0), timeout)
        rpc.rpc_sync(1, time.sleep, args=(0.1,), timeout=0)  # so the default timeout is over
        Slow.gate.set()
        assert future.wait() in (5, Slow)


def test_the_time_of_a_call_that_waits_for_a_value_is_limited(trio: Cluster) -> None:
    for ask in (lambda r: r.rpc_sync(0.1).number(), lambda r: rpc.rpc_sync(1, number_of, (r,), timeout=0.1)):
        with pytest.raises(RpcTimeoutError):
            ask(rpc.remote(1, never, timeout=0))


def test_a_worker_that_ends_ends_the_wait_for_a_value_that_nobody_else_refers_to(trio: Cluster) -> None:
    rref = rpc.remote(1, never, timeout=0.01)
    rpc.rpc_async(1, rpc.RRef.local_value, args=(rref,), timeout=0)
    del rref
    owner = trio.workers[1]
    eventually(lambda: owner.references.statistics()["forks"] == 0)
    owner.close()
    assert owner.join(Deadline.after(20)) == []


# ---- backward --------------------------------------------------------------------------------------------


def double_sum(x: torch.Tensor) -> torch.Tensor:
    """A scalar that depends on x."""
    return (x * 2).sum()


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_a_backward_pass_from_where_the_value_is(trio: Cluster, owner: int) -> None:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.remote(owner, double_sum, args=(x,))
        loss.backward(context_id, retain_graph=True)
        loss.backward(context_id)
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((3,), 4.0))
    assert x.grad is None


def test_a_local_backward_pass(trio: Cluster) -> None:
    x = torch.ones(3, requires_grad=True)
    loss = rpc.RRef(double_sum(x))
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(x.grad, torch.full((3,), 4.0))


def test_backward_passes_that_cannot_be(trio: Cluster) -> None:
    with pytest.raises(RuntimeError, match="does not require grad and does not have a grad_fn"):
        rpc.RRef(torch.ones(3)).backward()
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        rpc.RRef(torch.ones(3, requires_grad=True)).backward()
    with pytest.raises(AutogradError, match="Could not find autograd context with id: 100"):
        rpc.RRef(torch.ones(3, requires_grad=True).sum()).backward(100)
    with pytest.raises(RRefError, match=r"RRef should contain a tensor for \.backward\(\)"):
        rpc.RRef("text").backward()
    with pytest.raises(RRefError, match="User RRefs require 'dist_autograd_ctx_id' to be specified"):
        rpc.remote(1, torch.ones, args=(3,)).backward()
    with autograd.context() as context_id:
        with pytest.raises(RRefError, match=r"RRef should contain a tensor for \.backward\(\)"):
            rpc.remote(1, list).backward(context_id)
        with pytest.raises(AutogradError, match="requires_grad not set on"):
            rpc.RRef(torch.ones(1)).backward(context_id)


# ---- bad input -------------------------------------------------------------------------------------------


def where() -> str:
    """Who runs this?"""
    return current_worker().name


@pytest.mark.parametrize("how", [rpc.rpc_sync, rpc.rpc_async, rpc.remote])
def test_arguments_that_cannot_be(trio: Cluster, how: Any) -> None:
    for args in (5, "abc", b"abc", torch.ones(2), {1: 2}, iter([])):
        with pytest.raises(PayloadError, match=r"args must be a tuple of arguments.*args=\(x,\)"):
            how(1, where, args=args)
    for kwargs in (5, [("a", 1)], {1: 2}):
        with pytest.raises(PayloadError, match="kwargs must be a dict"):
            how(1, where, kwargs=kwargs)
    for function in (None, 5, "name"):
        with pytest.raises(PayloadError, match="a remote call needs a function"):
            how(1, function)
    with pytest.raises(UnknownWorkerError, match="could not find destination"):
        how("nobody", where)
    assert rpc.rpc_sync(1, where) == "worker1", "both go on"


class Rebuilt:
    """Is rebuilt from one number on the worker that unpickles it."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.unsendable = (i for i in range(n))

    def __reduce__(self) -> Any:
        return Rebuilt, (self.n,)


def read(value: Any) -> Any:
    """Its number, and itself."""
    return value.n, value


def test_classes_with_their_own_serialization(trio: Cluster) -> None:
    n, value = rpc.rpc_sync(1, read, (Rebuilt(7),))
    assert (n, value.n, type(value)) == (7, 7, Rebuilt)


def test_generators_and_futures_cannot_be_sent(trio: Cluster) -> None:
    with pytest.raises(PayloadError, match="it runs here and cannot be copied; send a list"):
        rpc.rpc_sync(1, list, args=((i for i in range(3)),))
    with pytest.raises(PayloadError, match="send a list"):
        rpc.rpc_sync(1, iterate)
    with pytest.raises(PayloadError, match="Can not pickle torch"):
        rpc.rpc_sync(1, torch.futures.Future)


def iterate() -> Any:
    """A generator."""
    yield 1
