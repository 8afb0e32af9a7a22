"""Futures of calls: in asyncio, in chains, together with others; and calls to many workers."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.waiting import eventually
from zmqgrad import rpc
from zmqgrad.errors import (
    ArgumentTypeError,
    ConfigurationError,
    PeerLostError,
    RpcTimeoutError,
    UnknownWorkerError,
)
from zmqgrad.rpc import gathering
from zmqgrad.rpc.current import current_worker
from zmqgrad.rpc.futures import PythonFuture
from zmqgrad.testing import Cluster, cluster


@pytest.fixture
def trio() -> Iterator[Cluster]:
    with cluster(3) as c:
        yield c


GATES: list[threading.Event] = []


@pytest.fixture
def gate() -> Iterator[int]:
    """The number of an event that :func:`wait_at` waits for; set at the end."""
    event = threading.Event()
    GATES.append(event)
    yield len(GATES) - 1
    event.set()


def wait_at(number: int, value: Any = None) -> Any:
    """Wait until the test lets go."""
    GATES[number].wait(20)
    return value


def fail(text: str) -> None:
    """Raise it."""
    raise KeyError(text)


def where() -> str:
    """Who runs this?"""
    return current_worker().name


# ---- asyncio ---------------------------------------------------------------------------------------------


def test_a_future_can_be_awaited(trio: Cluster) -> None:
    async def program() -> list[Any]:
        one, two = rpc.rpc_async(1, abs, args=(-1,)), rpc.rpc_async(2, abs, args=(-2,))
        chained = rpc.rpc_async(1, abs, args=(-3,)).then(lambda f: f.wait() + 1)
        done = rpc.rpc_async(1, abs, args=(-5,))
        done.wait()
        return [await one, await two, await two, await chained, await done]

    assert asyncio.run(program()) == [1, 2, 2, 4, 5]


def test_the_loop_runs_on_while_a_future_is_awaited(trio: Cluster, gate: int) -> None:
    async def program() -> tuple[Any, list[int]]:
        steps: list[int] = []

        async def other() -> None:
            for n in range(3):
                await asyncio.sleep(0)
                steps.append(n)
            GATES[gate].set()

        async def wait() -> Any:
            return await rpc.rpc_async(1, wait_at, args=(gate, "value"))

        value, _ = await asyncio.gather(wait(), other())
        return value, steps

    assert asyncio.run(program()) == ("value", [0, 1, 2])


def test_errors_and_cancelling_in_asyncio(trio: Cluster, gate: int) -> None:
    async def program() -> None:
        with pytest.raises(KeyError, match="awaited"):
            await rpc.rpc_async(1, fail, args=("awaited",))
        with pytest.raises(RpcTimeoutError):
            await rpc.rpc_async(1, wait_at, args=(gate,), timeout=0.02)
        future = rpc.rpc_async(1, wait_at, args=(gate, 7))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_coroutine(future), 0.02)
        GATES[gate].set()
        assert await future == 7, "to give up waiting gives nothing else up"

    asyncio.run(program())


def exhaust() -> Any:
    return next(iter(()))


def test_an_error_that_asyncio_cannot_take(trio: Cluster) -> None:
    async def program() -> None:
        with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
            await asyncio.wait_for(_coroutine(rpc.rpc_async(1, exhaust)), 20)
        assert isinstance(caught.value.__cause__, StopIteration)

    asyncio.run(program())
    with pytest.raises(StopIteration):
        rpc.rpc_sync(1, exhaust)


async def _coroutine(future: Any) -> Any:
    return await future


def test_a_loop_that_ends_first(trio: Cluster, gate: int) -> None:
    future = rpc.rpc_async(1, wait_at, args=(gate, 3))

    async def program() -> None:
        waiting = asyncio.ensure_future(_coroutine(future))
        await asyncio.sleep(0)
        waiting.cancel()

    asyncio.run(program())
    GATES[gate].set()
    assert future.wait() == 3


# ---- chains ----------------------------------------------------------------------------------------------


def test_chains(trio: Cluster) -> None:
    future = rpc.rpc_async(1, abs, args=(-1,))
    for _ in range(20):
        future = future.then(lambda f: f.wait() + 1)
    assert future.wait() == 21
    nested = rpc.rpc_async(1, abs, args=(-1,)).then(
        lambda f: rpc.rpc_async(2, abs, args=(-f.wait() - 1,)).then(lambda g: g.wait() + 1).wait()
    )
    assert nested.wait() == 3, "a callback may wait for a future that has callbacks"


def test_a_callback_far_down_a_chain_may_wait_for_other_callbacks() -> None:
    done: PythonFuture[int] = PythonFuture()
    done.set_result(1)
    first: PythonFuture[int] = PythonFuture()
    future, waited = first, []
    for _ in range(50):
        future = future.then(lambda f: f.value() + done.then(lambda d: d.value()).wait())
        beside = future.then(lambda f: f.value())
        future.add_done_callback(lambda f, beside=beside: waited.append(beside.wait() - f.value()))
    first.set_result(0)
    assert future.wait() == 50
    assert waited == [0] * 50


@pytest.mark.parametrize("fails", [False, True])
def test_a_chain_may_be_longer_than_the_stack(trio: Cluster, gate: int, fails: bool) -> None:
    """Each callback ran within the one before, and behind the first RecursionError nothing was set."""
    first: Any = rpc.rpc_async(1, wait_at, args=(gate,), timeout=20)
    future = first.then(lambda f: fail("first") if fails else 0)
    seen: list[str] = []
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    for _ in range(sys.getrecursionlimit()):
        future = future.then(lambda f: f.value() + 1)
    variable.set("of the last callback")
    future.add_done_callback(lambda _: seen.append(variable.get()))
    GATES[gate].set()
    if fails:
        with pytest.raises(RuntimeError, match="first"):
            future.wait()
    else:
        assert future.wait() == sys.getrecursionlimit()
    eventually(lambda: seen == ["of the last callback"])


def test_many_callbacks_may_wait_at_once(trio: Cluster) -> None:
    def ask_again(future: Any) -> Any:
        own: Any = torch.futures.Future()
        rpc.rpc_async(2, abs, args=(future.wait(),)).then(lambda g: own.set_result(g.wait()))
        return torch.futures.collect_all([own]).wait()[0].wait()  # none of ours: in C++, unseen by us

    futures = [rpc.rpc_async(1, abs, args=(-n,)).then(ask_again) for n in range(8)]
    assert [f.wait() for f in futures] == list(range(8))


def test_a_callback_behind_collect_all_may_wait(trio: Cluster) -> None:
    both = [rpc.rpc_async(1, abs, args=(-1,)), rpc.rpc_async(2, abs, args=(-2,))]
    gathered = torch.futures.collect_all(both).then(lambda f: rpc.rpc_async(1, len, args=(f.wait(),)).wait())
    with pytest.raises(RuntimeError, match="pickle"):
        gathered.wait()
    again = [rpc.rpc_async(1, abs, args=(-1,)), rpc.rpc_async(2, abs, args=(-2,))]
    total = torch.futures.collect_all(again).then(
        lambda f: rpc.rpc_async(1, sum, args=([g.wait() for g in f.wait()],)).then(lambda h: h.wait()).wait()
    )
    assert total.wait() == 3


def test_errors_in_chains(trio: Cluster) -> None:
    future = rpc.rpc_async(1, fail, args=("first",))
    chained = future.then(lambda f: f.wait())
    with pytest.raises(RuntimeError, match="first") as caught:
        chained.wait()
    assert isinstance(caught.value.__cause__, KeyError)
    done = threading.Event()

    def bad(_: Any) -> None:
        done.set()
        raise ValueError("in a callback")

    ok = rpc.rpc_async(1, abs, args=(-4,))
    ok.add_done_callback(bad)
    assert done.wait(10)
    assert ok.wait() == 4
    for use in (ok.then, ok.add_done_callback):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            use(None)


def test_a_future_of_ones_own() -> None:
    mine: PythonFuture[int] = PythonFuture()
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(mine.then(lambda f: f.wait() + 1).wait()))
    thread.start()
    mine.set_result(1)
    thread.join(10)
    assert got == [2]
    assert "done" in repr(mine)


def test_closing_a_worker_resolves_all_futures(gate: int) -> None:
    with cluster(2) as c:
        future = rpc.rpc_async(1, wait_at, args=(gate,))
        chained = future.then(lambda f: f.wait())
        seen: list[str] = []
        future.add_done_callback(lambda f: seen.append("done"))
        c.workers[0].close()
        with pytest.raises(RuntimeError, match="shut down"):
            future.wait()
        with pytest.raises(RuntimeError, match="shut down"):
            chained.wait()
        assert seen == ["done"]
        GATES[gate].set()


def test_repr_of_a_future(trio: Cluster, gate: int) -> None:
    future = rpc.rpc_async(1, wait_at, args=(gate,))
    assert repr(future) == "<RpcFuture of wait_at on worker 1: pending>"
    GATES[gate].set()
    future.wait()
    assert repr(future) == "<RpcFuture of wait_at on worker 1: done>"


def test_the_future_of_a_call_to_a_lost_worker_raises(trio: Cluster) -> None:
    rref = rpc.remote(1, list)
    rref.to_here()
    trio.workers[0].lose(1, "unplugged")
    future = rpc.rpc_async(1, where)
    with pytest.raises(PeerLostError, match="unplugged"):
        future.wait()
    trio.network.wait_quiet()
    of_a_method = rref.rpc_async().copy()
    with pytest.raises(PeerLostError, match="was lost with worker1"):
        of_a_method.wait()
    with pytest.raises(PeerLostError, match="unplugged"):
        rpc.rpc_sync(1, where)


# ---- many ------------------------------------------------------------------------------------------------


def test_a_broadcast_is_serialized_once(trio: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rpc.wait_all(rpc.broadcast(["worker1", 2], where)) == ["worker1", "worker2"]
    assert rpc.wait_all(rpc.broadcast(None, where)) == ["worker0", "worker1", "worker2"]
    times = 0

    class Counting:
        def __reduce__(self) -> Any:
            nonlocal times
            times += 1
            return list, ()

    big = torch.arange(100_000.0)
    sums = rpc.wait_all(rpc.broadcast([0, 1, 2], total, args=(Counting(), big)))
    assert sums == [big.sum()] * 3
    assert times == 1
    rref = rpc.RRef(5)
    assert rpc.wait_all(rpc.broadcast(None, fetch, kwargs={"rref": rref})) == [5] * 3


def total(_: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Of a tensor."""
    return tensor.sum()


def fetch(rref: Any) -> Any:
    """What it refers to."""
    return rref.to_here()


def test_callbacks_that_cannot_be(trio: Cluster) -> None:
    future = rpc.rpc_async(1, abs, args=(1,))
    add: Any
    for add in (
        *(future.then, future.add_done_callback, rpc.on_join, rpc.on_loss),
        partial(rpc.watch_ref, "name"),
        lambda callback: rpc.subscribe("name", callback=callback),
    ):
        with pytest.raises(ArgumentTypeError, match="A callback must be callable, not 5"):
            add(5)


def test_lists_that_cannot_be(trio: Cluster) -> None:
    future: Any = rpc.rpc_async(1, abs, args=(1,))
    for wait in rpc.wait_all, rpc.as_completed:
        with pytest.raises(ArgumentTypeError, match="expected a list of futures, not the RpcFuture"):
            wait(future)
    with pytest.raises(ArgumentTypeError, match="must be a list of workers, not the str 'worker1'"):
        rpc.broadcast("worker1", where)


def test_a_broadcast_that_cannot_be(trio: Cluster) -> None:
    with pytest.raises(UnknownWorkerError):
        rpc.broadcast(["worker1", "nobody"], where)
    trio.workers[0].lose(1, "unplugged")
    lost, well = rpc.broadcast([1, 2], where)
    assert well.wait() == "worker2"
    with pytest.raises(PeerLostError):
        lost.wait()


def test_wait_all_stops_at_a_failure_of_any_kind_of_future(trio: Cluster, gate: int) -> None:
    endless = rpc.rpc_async(1, wait_at, args=(gate, "late"))
    mine: PythonFuture[int] = PythonFuture()
    with pytest.raises(KeyError, match="early"):
        rpc.wait_all([mine, endless, rpc.rpc_async(2, fail, args=("early",))])
    with pytest.raises(RuntimeError, match="when running the callback: KeyError: 'early'"):
        rpc.wait_all([mine, endless, rpc.rpc_async(1, abs, args=(1,)).then(lambda f: fail("early"))])
    for kind in FUTURES:
        failed = kind()
        failed.set_exception(OSError(2, "no such future"))
        with pytest.raises(FileNotFoundError, match="no such future"):
            rpc.wait_all([endless, failed])
    mine.set_result(1)
    GATES[gate].set()
    plain: torch.futures.Future[int] = torch.futures.Future()
    plain.set_result(2)
    assert rpc.wait_all([mine, endless, plain, plain]) == [1, "late", 2, 2]
    with pytest.raises(AssertionError, match="not an Exception"):
        mine.set_exception("text")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="incompatible"):
        rpc.wait_all([endless, 3])


FUTURES: list[Any] = [torch.futures.Future, PythonFuture]
"""Torch's own future, which shows what ours must do."""


@pytest.mark.parametrize("kind", FUTURES)
def test_torchs_functions_raise_the_first_error_in_order(kind: Any) -> None:
    futures = [kind() for _ in range(4)]
    gathered = torch.futures.collect_all(futures)
    chained = gathered.then(lambda f: [g.wait() for g in f.wait()])
    futures[3].set_exception(KeyError("set first"))
    futures[2].set_exception(OSError(2, "no such future"))
    futures[1].set_result(1)
    assert not gathered.done(), "it waits for all"
    futures[0].set_result(0)
    for wait in gathered.wait, gathered.value, lambda: torch.futures.wait_all(futures):
        with pytest.raises(FileNotFoundError, match="no such future"):
            wait()
    with pytest.raises(RuntimeError, match=r"FileNotFoundError.*no such future"):
        chained.wait()


@pytest.mark.parametrize("kind", FUTURES)
def test_torchs_functions_return_the_results(kind: Any) -> None:
    futures = [kind(), kind()]
    gathered = torch.futures.collect_all(futures)
    chained = gathered.then(lambda f: [g.wait() for g in f.value()])
    for value, future in enumerate(futures):
        future.set_result(value)
    assert torch.futures.wait_all(futures) == [g.wait() for g in gathered.wait()] == chained.wait() == [0, 1]
    with pytest.raises(TypeError, match="incompatible"):
        torch.futures.collect_all([futures[0], 3])


def test_collect_all_and_wait_all_of_torch_raise_errors_of_calls(trio: Cluster) -> None:
    calls = [rpc.rpc_async(1, where), rpc.rpc_async(2, fail, args=("remote",))]
    with pytest.raises(KeyError, match="remote"):
        torch.futures.wait_all(calls)
    with pytest.raises(KeyError, match="remote"):
        torch.futures.collect_all(calls).wait()


def test_importing_rpc_leaves_torchs_functions_alone() -> None:
    assert torch.futures.wait_all.__module__ == torch.futures.collect_all.__module__ == "torch.futures"


def test_failed_futures_are_garbage_like_any_other(trio: Cluster) -> None:
    def waited() -> weakref.ref[Any]:
        future = rpc.rpc_async(1, fail, args=("waited for",))
        with pytest.raises(KeyError, match="waited for"):
            future.wait()
        return weakref.ref(future)

    def chained() -> weakref.ref[Any]:
        future = rpc.rpc_async(1, abs, args=(-1,)).then(lambda f: fail("in a callback"))
        with pytest.raises(RuntimeError, match=r"KeyError.*in a callback") as caught:
            future.wait()
        assert "fail" in str(getattr(caught.value, "__notes__", "")), "where it was raised"
        return weakref.ref(future)

    def gathered() -> weakref.ref[Any]:
        futures = [rpc.rpc_async(n, fail, args=("one of many",)) for n in (0, 1, 2)]
        with pytest.raises(KeyError):
            torch.futures.wait_all(futures)
        with pytest.raises(KeyError):
            torch.futures.collect_all(futures).wait()
        return weakref.ref(futures[2])

    for future in waited(), chained(), gathered():
        gone = threading.Event()
        weakref.finalize(target, gone.set) if (target := future()) is not None else gone.set()
        del target
        # The engine thread that settled it may hold it for a moment more.
        assert any(gc.collect() >= 0 and gone.wait(0.1) for _ in range(100))


class Untold(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise ValueError


class Noted(RuntimeError):
    """An error whose notes are none."""

    def __init__(self) -> None:
        super().__init__("when running the callback: Noted")
        self.__notes__ = 5  # type: ignore[assignment]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, Untold, Noted])
def test_a_chain_ends_however_its_callback_fails(trio: Cluster, error: type[BaseException]) -> None:
    def exits(_: object) -> None:
        raise error

    chained = rpc.rpc_async(1, abs, args=(-1,)).then(exits)
    ended = threading.Event()
    chained.add_done_callback(lambda _: ended.set())
    assert ended.wait(20)
    with pytest.raises(RuntimeError, match=f"when running the callback: {error.__name__}"):
        chained.wait()


def test_an_error_that_cannot_be_copied_is_raised_itself() -> None:
    class Odd(Exception):
        def __new__(cls, one: int, two: int) -> Any:
            return super().__new__(cls)

        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    class Odder(Exception):
        def __reduce__(self) -> Any:
            return str, ("not even an error",)

    circular = ValueError("its own cause")
    circular.__cause__ = circular
    endless: PythonFuture[int] = PythonFuture()
    endless.set_exception(circular)
    with pytest.raises(ValueError, match="its own cause"):
        endless.wait()
    for error in (Odd(1, 2), Odder("odder")):
        future: PythonFuture[int] = PythonFuture()
        future.set_exception(error)
        with pytest.raises(type(error)) as caught:
            future.wait()
        assert caught.value is error


def test_wait_all(trio: Cluster, gate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rpc.wait_all([]) == []
    endless = rpc.rpc_async(1, wait_at, args=(gate, "late"))
    with pytest.raises(KeyError, match="early"):
        rpc.wait_all([endless, rpc.rpc_async(2, fail, args=("early",))])
    first = rpc.rpc_async(2, where)
    first.wait()
    with pytest.raises(RpcTimeoutError, match=r"1 of 2 calls are done after 0.05 s"):
        rpc.wait_all([first, endless], timeout=0.05)
    with pytest.raises(ConfigurationError, match="timeout"):
        rpc.wait_all([endless], timeout=-3)
    monkeypatch.setattr(gathering, "LOG_INTERVAL_SECONDS", 0.01)
    opener = threading.Thread(target=lambda: (told.wait(10), GATES[gate].set()))
    told = threading.Event()
    monkeypatch.setattr(gathering.logger, "warning", lambda *a: told.set())
    opener.start()
    assert rpc.wait_all([endless, torch.futures.collect_all([endless])])[0] == "late"
    opener.join(10)
    assert told.is_set(), "it tells how far it is"


def waits_for_a_future(thread: int) -> bool:
    """Whether it does, by the innermost line of Python that it is at."""
    code = sys._current_frames()[thread].f_code
    return code.co_name == "wait" and "future" in code.co_filename


def interrupt_soon(interrupted: threading.Event, gate: int) -> threading.Thread:
    """Press Ctrl-C in this thread once it waits, and open the gate in 10 s, so that a deaf wait ends, too."""

    def interrupt(main: int) -> None:
        eventually(lambda: waits_for_a_future(main))
        signal.pthread_kill(main, signal.SIGINT)
        if not interrupted.wait(10):
            GATES[gate].set()

    return threading.Thread(target=interrupt, args=(threading.get_ident(),))


@pytest.mark.parametrize("method", ["add_done_callback", "then"])
def test_ctrl_c_in_a_callback_that_runs_at_once_reaches_its_caller(trio: Cluster, method: str) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with trio.acting(0):
        future = rpc.rpc_async("worker1", pow, args=(2, 3))
        assert future.wait() == 8
        with pytest.raises(KeyboardInterrupt):
            getattr(future, method)(interrupt)


def test_ctrl_c_interrupts_wait_all(trio: Cluster, gate: int) -> None:
    endless = rpc.rpc_async(1, wait_at, args=(gate,))
    interrupted = threading.Event()
    helper = interrupt_soon(interrupted, gate)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        rpc.wait_all([endless])
    late = endless.done()
    interrupted.set()
    helper.join(10)
    assert not late


DECODING = threading.Event()


def rebuild_slowly(number: int) -> str:
    """Is what a value of :class:`Slow` becomes."""
    DECODING.set()
    GATES[number].wait(20)
    return "rebuilt"


class Slow:
    """Takes long to unpickle."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return rebuild_slowly, (self.number,)


def test_ctrl_c_interrupts_a_wait_while_another_thread_decodes_the_reply(trio: Cluster, gate: int) -> None:
    DECODING.clear()
    slow = rpc.rpc_async(1, Slow, args=(gate,))
    assert DECODING.wait(10)
    interrupted = threading.Event()
    helper = interrupt_soon(interrupted, gate)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        slow.wait()
    late = slow.done()
    interrupted.set()
    helper.join(10)
    assert not late
    GATES[gate].set()
    assert slow.wait() == "rebuilt"


def test_a_future_that_is_done_keeps_its_result(trio: Cluster) -> None:
    future = rpc.rpc_async(1, abs, args=(-5,))
    future.wait()
    with pytest.raises(RuntimeError, match="completed"):
        future.set_exception(ValueError("too late"))
    assert future.wait() == 5


# ---- the state of the thread that adds a callback --------------------------------------------------------

SETTING: contextvars.ContextVar[str] = contextvars.ContextVar("setting", default="none")


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("how", ["then", "add_done_callback"])
def test_callbacks_run_with_the_state_of_the_thread_that_added_them(how: str, done: bool) -> None:
    """As those of asyncio; and in the same grad mode, whether the future is done or not."""
    future, seen = PythonFuture[int](), []

    def note(_: object) -> None:
        seen.append((SETTING.get(), torch.is_grad_enabled()))
        SETTING.set("changed by a callback")

    if done:
        future.set_result(1)
    token = SETTING.set("of the adder")
    with torch.no_grad():
        getattr(future, how)(note)
    assert SETTING.get() == "of the adder"
    SETTING.reset(token)
    getattr(future, how)(note)
    if not done:
        thread = threading.Thread(target=future.set_result, args=(1,))
        thread.start()
        thread.join(10)
    assert seen == [("of the adder", False), ("none", True)]
    assert SETTING.get() == "none"
    assert torch.is_grad_enabled()


@rpc.functions.async_execution
def ask_in_a_callback(number: int) -> Any:
    return rpc.rpc_async(2, wait_at, (number,)).then(lambda f: (rpc.time_left(), where()))


def leave_a_callback(number: int) -> None:
    """Its caller has its reply before the callback runs."""
    LEFT.append(rpc.rpc_async(2, wait_at, (number,)).then(lambda f: (rpc.time_left(), where())))


LEFT: list[Any] = []


def test_a_callback_knows_the_time_left_of_the_call_that_waits_for_it(trio: Cluster, gate: int) -> None:
    limited = rpc.rpc_async(1, ask_in_a_callback, (gate,), timeout=15)
    rpc.rpc_sync(1, leave_a_callback, (gate,), timeout=15)
    GATES[gate].set()
    left, worker = limited.wait()
    assert 0 < left <= 15
    assert worker == "worker1"
    assert LEFT.pop().wait() == (float("inf"), "worker1")
