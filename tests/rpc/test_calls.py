"""Calls over a cluster in memory: to whom, with what, what comes back, and when it does not."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch

from zmqgrad import rpc
from zmqgrad.errors import (
    ConfigurationError,
    FunctionNotFoundError,
    PayloadError,
    RemoteError,
    RpcTimeoutError,
    UnknownWorkerError,
)
from zmqgrad.rpc.current import current_worker
from zmqgrad.rpc.options import RpcBackendOptions
from zmqgrad.testing import Cluster, cluster
from zmqgrad.wire.messages import MessageType

OVER_TIME = "RPC ran for more than set timeout"


@pytest.fixture
def pair() -> Iterator[Cluster]:
    with cluster(2) as c:
        yield c


def where() -> str:
    """Who runs this?"""
    return current_worker().name


def fail(error: BaseException) -> None:
    """Raise it."""
    raise error


@contextmanager
def gate() -> Iterator[int]:
    """The number of an event that :func:`wait_at` waits for; set at the end."""
    number, event = len(GATES), threading.Event()
    GATES.append(event)
    try:
        yield number
    finally:
        event.set()


GATES: list[threading.Event] = []


def wait_at(number: int, value: Any = None) -> Any:
    """Wait until the test lets go."""
    GATES[number].wait(20)
    return value


# ---- to whom, with what ----------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["worker1", 1, rpc.WorkerInfo("worker1", 1), "worker0", 0])
def test_a_worker_is_a_name_a_rank_or_an_info(pair: Cluster, to: Any) -> None:
    name = "worker0" if to in ("worker0", 0) else "worker1"
    assert rpc.rpc_sync(to, where) == name
    assert rpc.rpc_async(to, where).wait() == name
    assert rpc.remote(to, where).to_here() == name


@pytest.mark.parametrize("to", ["nobody", 7, -1, None, 1.5, rpc.WorkerInfo("x", 9)])
def test_an_unknown_worker_is_refused_and_the_known_are_named(pair: Cluster, to: Any) -> None:
    for how in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(UnknownWorkerError):
            how(to, where)
    with pytest.raises(UnknownWorkerError, match=r"worker0 \(0\), worker1 \(1\)"):
        rpc.rpc_sync("nobody", where)


def test_arguments(pair: Cluster) -> None:
    assert rpc.rpc_sync(1, sorted, args=([3, 1, 2],), kwargs={"reverse": True}) == [3, 2, 1]
    assert rpc.rpc_sync(1, dict, kwargs={"a": 1}) == {"a": 1}
    assert torch.equal(rpc.rpc_sync(1, torch.add, args=(torch.ones(2), 1)), torch.full((2,), 2.0))
    one, two = rpc.rpc_sync(1, lambda *a: a, args=(torch.ones(1), torch.zeros(1)))
    assert (one.item(), two.item()) == (1, 0)
    with pytest.raises(PayloadError, match=r"args\[0\] \(list\): TypeError: cannot pickle"):
        rpc.rpc_sync(1, len, args=([threading.Lock()],))


def test_infos_and_timeouts(pair: Cluster) -> None:
    assert rpc.get_worker_info() == rpc.WorkerInfo("worker0", 0)
    assert rpc.get_worker_info("worker1").id == 1
    assert rpc.get_rpc_timeout() == 20.0
    rpc._set_rpc_timeout(timedelta(minutes=1))
    assert rpc.get_rpc_timeout() == 60.0


# ---- errors ----------------------------------------------------------------------------------------------


class OwnError(Exception):
    """Made from two things."""

    def __init__(self, one: int, two: str) -> None:
        super().__init__(f"{one} and {two}")
        self.one = one


class CodedError(LookupError):
    """Made from what has a name, and shows nothing else."""

    def __init__(self, *, code: int) -> None:
        super().__init__()
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code}"


class LockedError(OwnError):
    """Holds what cannot travel."""

    def __init__(self) -> None:
        super().__init__(1, "two")
        self.lock = threading.Lock()


class Unprintable(Exception):
    """Has neither repr nor str."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    __str__ = __repr__


def fail_with_own(kind: type[OwnError] | type[CodedError]) -> None:
    """Its constructor wants other things than its args hold."""
    raise OwnError(1, "two") if kind is OwnError else CodedError(code=3)


class Answer(Exception):
    """Looks up its attributes in what it holds, and raises the wrong error if there is none."""

    def __getattr__(self, name: str) -> Any:
        return {}[name]


class Frozen(ValueError):
    """Nothing can be set."""

    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError(f"{name} cannot be set")


class Fixed(ValueError):
    """Always has the same arguments."""

    @property
    def args(self) -> Any:  # type: ignore[override]
        return ("fixed",)


class Selective(ValueError):
    """Shows what it holds, which cannot travel."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __str__(self) -> str:
        return f"holds {type(self.lock).__name__}"


def fail_with_locked() -> None:
    """Holds it as an attribute."""
    raise LockedError


def fail_with_lock() -> None:
    """Holds it as an argument."""
    raise LookupError("locked:", threading.Lock())


def fail_with_rref() -> None:
    """Holds what travels in calls and results only."""
    raise LookupError(rpc.RRef(1))


def fail_with_file() -> None:
    """Its class is pickled in a way of its own, with what it holds."""
    error = FileNotFoundError(2, "nothing there")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


def fail_with_selective() -> None:
    """Cannot be shown without what it holds."""
    raise Selective


def fail_unprintably() -> None:
    """Nothing can be said of it."""
    raise Unprintable


class Exits(Exception):
    """Ends the thread that pickles it, or wants its text."""

    def __reduce__(self) -> Any:
        raise SystemExit

    def __str__(self) -> str:
        raise SystemExit


def fail_and_exit() -> None:
    """Nothing can be done with it."""
    raise Exits


class Closed(Exception):
    """Has no attributes for anybody."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class Private(ValueError):
    """Tells nobody its arguments."""

    @property
    def args(self) -> Any:  # type: ignore[override]
        raise RuntimeError("private")


def fail_closed() -> None:
    """Not even the traceback can be asked for."""
    raise Closed


def fail_privately() -> None:
    """The arguments cannot be asked for."""
    raise Private("so")


class ExitsWhereItIsRead(Exception):
    """Ends the thread that reads it, unless that is the one which has sent it, to see whether it can be."""

    def __reduce__(self) -> Any:
        return exit_in_other_thread, (threading.get_ident(),)


def exit_in_other_thread(ident: int) -> Exception:
    if threading.get_ident() != ident:
        raise SystemExit
    return ExitsWhereItIsRead()


def fail_with_exit_where_it_is_read() -> None:
    """Ends the caller."""
    raise ExitsWhereItIsRead


def fail_with_baggage() -> None:
    """Holds what cannot travel."""
    error = ValueError("with baggage")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


@pytest.mark.parametrize(
    "error",
    [ValueError("so"), KeyError("key"), OSError(2, "nothing there"), ZeroDivisionError(), StopIteration(3)],
)
def test_an_exception_keeps_its_type_and_names_its_origin(pair: Cluster, error: Exception) -> None:
    for how in (
        rpc.rpc_sync,
        lambda *a, **k: rpc.rpc_async(*a, **k).wait(),
        lambda *a, **k: rpc.remote(*a, **k).to_here(),
    ):
        with pytest.raises(type(error)) as caught:
            how("worker1", fail, args=(error,))
        told = f"{caught.value}\n{caught.value.__cause__}"
        assert "worker1" in told
        assert "in fail" in told, "the traceback over there"
        assert type(error).__name__ in told


def fail_with_much(kind: type[Exception]) -> None:
    error = kind("too large:", torch.arange(300_000))
    error.also = torch.zeros(300_000)  # type: ignore[attr-defined]
    raise error


@pytest.mark.parametrize("kind", [ValueError, KeyError, StopIteration, LookupError])
def test_an_exception_that_holds_too_much_keeps_its_type(pair: Cluster, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        rpc.rpc_sync(1, fail_with_much, args=(kind,))
    told = f"{caught.value}\n{caught.value.__cause__}"
    assert "worker1" in told
    assert "too large:" in told
    assert "in fail_with_much" in told
    assert vars(caught.value) == {}


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (fail_with_locked, LockedError),
        (fail_with_baggage, ValueError),
        (fail_with_lock, LookupError),
        (fail_with_rref, LookupError),
        (fail_with_file, FileNotFoundError),
    ],
)
def test_an_exception_keeps_its_type_without_what_cannot_be_sent(
    pair: Cluster, function: Any, kind: type[Exception]
) -> None:
    future = rpc.rpc_async(1, function)
    for ask in (lambda: rpc.rpc_sync(1, function), future.wait, rpc.remote(1, function).to_here):
        with pytest.raises(kind, match=f"in {function.__name__}"):
            ask()


# Python 3.13 says so when it looks for the notes of one.
@pytest.mark.filterwarnings("ignore:Exception ignored in PyObject_HasAttrString")
@pytest.mark.parametrize("kind", [Answer, Frozen, Fixed])
def test_an_exception_whose_attributes_fail_is_raised_all_the_same(
    pair: Cluster, kind: type[Exception]
) -> None:
    future = rpc.rpc_async(1, fail, args=(kind("so"),))
    made = rpc.remote(1, fail, args=(kind("so"),))
    for ask in (lambda: rpc.rpc_sync(1, fail, args=(kind("so"),)), future.wait, future.wait, made.to_here):
        raised, told = None, ""
        try:
            ask()
        except Exception as e:  # not by pytest, which asks it for more
            raised, told = type(e), f"{BaseException.__str__(e)}\n{e.__cause__}"
        assert raised is kind
        assert "in fail" in told


def test_an_exception_that_cannot_be_rebuilt_is_a_remote_error(pair: Cluster) -> None:
    with pytest.raises(RemoteError, match="in fail_with_selective"):
        rpc.rpc_sync(1, fail_with_selective)


def test_an_exception_without_a_text_keeps_its_type(pair: Cluster) -> None:
    with pytest.raises(Unprintable):
        rpc.rpc_sync(1, fail_unprintably)


def test_an_exception_that_ends_the_thread_which_sends_it_is_a_remote_error(pair: Cluster) -> None:
    check_is_remote_error(fail_and_exit)


def check_is_remote_error(function: Any) -> None:
    for ask in (
        lambda: rpc.rpc_sync(1, function, timeout=20),
        lambda: rpc.rpc_async(1, function, timeout=20).wait(),
        lambda: rpc.remote(1, function, timeout=20).to_here(timeout=20),
    ):
        with pytest.raises(RemoteError, match=f"in {function.__name__}"):
            ask()


@pytest.mark.parametrize("function", [fail_closed, fail_with_exit_where_it_is_read])
def test_an_exception_that_can_be_asked_for_nothing_or_read_nowhere_is_a_remote_error(
    pair: Cluster, function: Any
) -> None:
    check_is_remote_error(function)


def test_an_exception_whose_arguments_cannot_be_asked_for_keeps_its_type(pair: Cluster) -> None:
    future = rpc.rpc_async(1, fail_privately)
    for ask in (lambda: rpc.rpc_sync(1, fail_privately), future.wait, rpc.remote(1, fail_privately).to_here):
        with pytest.raises(Private, match="in fail_privately"):
            ask()


@pytest.mark.parametrize(
    ("kind", "holds"), [(OwnError, {"one": 1}), (CodedError, {"code": 3})], ids=["two things", "by name"]
)
def test_an_exception_is_rebuilt_though_its_constructor_wants_more(
    pair: Cluster, kind: Any, holds: dict[str, Any]
) -> None:
    future = rpc.rpc_async(1, fail_with_own, args=(kind,))
    seen = []
    for ask in (lambda: rpc.rpc_sync(1, fail_with_own, args=(kind,)), future.wait, future.wait):
        with pytest.raises(kind) as caught:
            ask()
        assert vars(caught.value).items() >= holds.items()
        assert "in fail_with_own" in f"{caught.value}\n{caught.value.__cause__}"
        seen.append(caught.value)
    assert seen[1] is not seen[2], "each has a traceback of its own"


def fail_with_errors_inside(sequence: type) -> None:
    """Raises an error with others, in a list or tuple, whose constructors want more."""
    kind = getattr(builtins, "ExceptionGroup", ValueError)  # new in Python 3.11
    raise kind("several", sequence([CodedError(code=3), OwnError(1, "two"), kind("more", [KeyError("x")])]))


@pytest.mark.parametrize("sequence", [list, tuple])
def test_an_exception_keeps_the_exceptions_inside(pair: Cluster, sequence: type) -> None:
    with pytest.raises(Exception, match="several") as caught:
        rpc.rpc_sync("worker1", fail_with_errors_inside, (sequence,))
    assert type(caught.value) is getattr(builtins, "ExceptionGroup", ValueError)
    coded, own, more = caught.value.args[1]
    assert (type(coded), coded.code, type(own), own.one) == (CodedError, 3, OwnError, 1)
    assert [(type(e), e.args) for e in more.args[1]] == [(KeyError, ("x",))]


def test_a_traceback_begins_with_the_function_that_was_called(pair: Cluster) -> None:
    with pytest.raises(KeyError) as caught:
        rpc.rpc_sync(1, {}.__getitem__, args=("k",))
    assert caught.value.args == ("k",)
    with pytest.raises(KeyError) as caught:
        rpc.rpc_sync(1, fail, args=(KeyError("k"),))
    lines = str(caught.value.__cause__).splitlines()
    assert "in fail" in lines[lines.index("Traceback (most recent call last):") + 1]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_exceptions_that_would_end_a_process_do_not(pair: Cluster, error: BaseException) -> None:
    with pytest.raises(RemoteError, match=type(error).__name__):
        rpc.rpc_sync(1, fail, args=(error,))
    assert rpc.rpc_sync(1, where) == "worker1"


class Bomb:
    """Goes off where it is unpickled."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return fail, (self.error,)


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), ValueError("3")])
def test_values_that_go_off_end_nothing_either(pair: Cluster, error: BaseException) -> None:
    for how in (
        lambda: rpc.rpc_sync(1, Bomb, args=(error,)),
        lambda: rpc.rpc_async(1, Bomb, args=(error,)).wait(),
        lambda: rpc.rpc_async(1, Bomb, args=(error,)).then(lambda done: done.wait()).wait(),
        lambda: torch.futures.wait_all([rpc.rpc_async(1, Bomb, args=(error,)) for _ in range(50)]),
        lambda: rpc.remote(1, Bomb, args=(error,)).to_here(),
        lambda: rpc.rpc_sync(1, where, args=(Bomb(error),)),
    ):
        with pytest.raises(PayloadError, match=f"cannot rebuild a value.*{type(error).__name__}"):
            how()
    assert rpc.rpc_sync(1, where) == "worker1"


def test_ctrl_c_while_a_reply_is_decoded_leaves_no_future_pending(pair: Cluster) -> None:
    future = rpc.rpc_async(1, Bomb, args=(KeyboardInterrupt(),))
    # Either is right: this thread decodes the reply, and is interrupted, or another thread has decoded it.
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        future.wait()
    with pytest.raises(RuntimeError, match="KeyboardInterrupt was raised while the reply"):
        future.wait()


def test_texts_that_cannot_be_encoded_and_huge_ones(pair: Cluster) -> None:
    with pytest.raises(ValueError, match="udcff"):
        rpc.rpc_sync(1, fail, args=(ValueError("a bad name: \udcff"),))
    with pytest.raises(ValueError, match="worker1") as caught:
        rpc.rpc_sync(1, fail, args=(ValueError(b"x" * (8 << 20)),))
    assert len(str(caught.value)) < 1 << 20


class Proxy:
    """A value whose class cannot be asked for, as that of some proxies whose target has gone."""

    @property
    def __class__(self) -> Any:
        raise KeyError("the target")


def type_of(rref: rpc.RRef[Any]) -> str:
    return type(rref.local_value()).__name__


def test_a_reference_to_a_value_whose_class_cannot_be_asked_for(pair: Cluster) -> None:
    assert rpc.rpc_sync(1, type_of, args=(rpc.remote(1, Proxy),), timeout=10) == "Proxy"


def test_a_result_that_cannot_be_sent_raises_at_the_caller(pair: Cluster) -> None:
    with pytest.raises(PayloadError, match=r"cannot serialize the result of .*lock.* \(lock\)"):
        rpc.rpc_sync(1, threading.Lock)
    lock = rpc.remote(1, threading.Lock)
    with pytest.raises(PayloadError, match="lock"):
        lock.to_here()
    assert lock.rpc_sync().locked() is False, "the value itself is there"


def test_a_function_that_is_not_there(pair: Cluster) -> None:
    here_only.__module__ = "no_such_module"
    here_only.__qualname__ = "here_only"
    with pytest.MonkeyPatch.context() as patch:
        import sys
        import types

        module = types.ModuleType("no_such_module")
        module.here_only = here_only  # type: ignore[attr-defined]
        patch.setitem(sys.modules, "no_such_module", module)
        with pair.network.hold(MessageType.CALL) as held:
            future = rpc.rpc_async(1, here_only)
            held.wait()
            patch.delitem(sys.modules, "no_such_module")
        with pytest.raises(FunctionNotFoundError, match="no_such_module"):
            future.wait()


def here_only() -> None:
    """In a module that comes and goes."""


def test_a_torch_operator_that_does_not_take_the_arguments(pair: Cluster) -> None:
    """With torch this is a RuntimeError of the caller; of the operator itself, a TypeError."""
    said = "Overloaded torch operator invoked from Python failed to match any schema: add"
    for call in (
        lambda: rpc.rpc_sync(1, torch.add),
        lambda: rpc.rpc_async(1, torch.add, kwargs={"bogus": 1}).wait(),
        lambda: rpc.remote(1, torch.add, args=("a", "b")).to_here(),
    ):
        for kind in (RuntimeError, TypeError):
            with pytest.raises(kind, match=said):
                call()
    with pytest.raises(TypeError, match="no keyword") as caught:
        rpc.rpc_sync(1, len, kwargs={"bogus": 1})
    assert type(caught.value) is TypeError, "of others, as it is"


# ---- timeouts --------------------------------------------------------------------------------------------


def test_each_kind_of_wait_times_out(pair: Cluster) -> None:
    with gate() as g:
        slow = rpc.remote(1, wait_at, args=(g, "value"))
        owned = rpc.remote(0, wait_at, args=(g, "value"))
        for wait in (
            lambda: rpc.rpc_sync(1, wait_at, args=(g,), timeout=0.01),
            lambda: rpc.rpc_async(1, wait_at, args=(g,), timeout=0.01).wait(),
            lambda: slow.to_here(timeout=0.01),
            lambda: owned.to_here(timeout=0.01),
            lambda: slow.rpc_sync(timeout=0.01).upper(),
            lambda: slow.rpc_async(timeout=0.01).upper().wait(),
            lambda: rpc.rpc_sync(1, wait_at, args=(g,), timeout=timedelta(milliseconds=10)),
        ):
            with pytest.raises(RpcTimeoutError, match=OVER_TIME):
                wait()
    assert slow.to_here() == owned.to_here() == "value"


def test_a_remote_call_that_timed_out_raises_when_the_reference_is_used(pair: Cluster) -> None:
    with gate() as g:
        rref = rpc.remote(1, wait_at, args=(g,), timeout=0.01)
        with pytest.raises(RpcTimeoutError, match=OVER_TIME):
            rref.to_here(timeout=0.05)


def test_the_default_timeout(pair: Cluster) -> None:
    rpc._set_rpc_timeout(0.01)
    with gate() as g:
        with pytest.raises(RpcTimeoutError, match=r"10 ms.*wait_at on worker1"):
            rpc.rpc_sync(1, wait_at, args=(g,))
        unlimited = rpc.rpc_async(1, wait_at, args=(g, 5), timeout=0)
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_async(1, wait_at, args=(g,)).wait()
        assert not unlimited.done()
    assert unlimited.wait() == 5
    rpc._set_rpc_timeout(0)
    assert rpc.rpc_sync(1, where) == "worker1"


@pytest.mark.parametrize("timeout", [-2, -0.5, float("nan"), "1", None, True])
def test_timeouts_that_cannot_be(pair: Cluster, timeout: Any) -> None:
    for use in (
        lambda: rpc.rpc_sync(1, where, timeout=timeout),
        lambda: rpc.rpc_async(1, where, timeout=timeout),
        lambda: rpc.remote(1, where, timeout=timeout),
        lambda: rpc.remote(1, list).to_here(timeout=timeout),
        lambda: rpc.remote(1, list).rpc_sync(timeout=timeout).copy(),
        lambda: rpc._set_rpc_timeout(timeout),
        lambda: RpcBackendOptions(rpc_timeout=timeout),
    ):
        with pytest.raises(ConfigurationError, match="timeout"):
            use()


def test_a_lost_reply_is_a_timeout_and_a_late_one_is_ignored(pair: Cluster) -> None:
    for fault in pair.network.drop, pair.network.hold:
        with fault(MessageType.RESULT) as reply:
            future = rpc.rpc_async(1, where, timeout=1.0)
            reply.wait()  # else its timeout might pass before it runs
            with pytest.raises(RpcTimeoutError, match=OVER_TIME):
                future.wait()
    with pair.network.duplicate(MessageType.RESULT):
        assert [rpc.rpc_sync(1, abs, args=(-n,)) for n in range(5)] == [0, 1, 2, 3, 4]
    pair.network.wait_quiet()
    assert pair.workers[0].is_idle()


# ---- nested ----------------------------------------------------------------------------------------------


def bounce(depth: int) -> int:
    """Call back and forth."""
    if depth == 0:
        return 0
    me = current_worker().id
    return 1 + rpc.rpc_sync((me + 1) % 2, bounce, args=(depth - 1,))


def bounce_by_reference(depth: int) -> int:
    """The same by references."""
    if depth == 0:
        return 0
    me = current_worker().id
    return 1 + rpc.remote((me + 1) % 2, bounce_by_reference, args=(depth - 1,)).to_here()


def fan(depth: int, size: int) -> int:
    """Call everybody, oneself too, who do the same."""
    if depth == 0:
        return 1
    return sum(rpc.wait_all([rpc.rpc_async(w, fan, args=(depth - 1, size)) for w in range(size)]))


@pytest.mark.parametrize("threads", [1, 2])
def test_nested_calls_cannot_starve_the_pool(threads: int) -> None:
    with cluster(2, RpcBackendOptions(rpc_timeout=20.0, num_worker_threads=threads)):
        assert bounce(20) == 20
        assert bounce_by_reference(10) == 10
        assert fan(3, 2) == 8


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_all_to_all_from_many_threads(threads: int) -> None:
    with cluster(3, RpcBackendOptions(rpc_timeout=30.0, num_worker_threads=threads)) as c:
        results: list[int] = []

        def run(rank: int) -> None:
            with c.acting(rank):
                results.append(fan(2, 3) + bounce(4))

        all_threads = [threading.Thread(target=run, args=(n % 2,)) for n in range(12)]
        for t in all_threads:
            t.start()
        for t in all_threads:
            t.join(40)
        assert results == [13] * 12


# ---- futures ---------------------------------------------------------------------------------------------


def test_futures_are_torchs(pair: Cluster) -> None:
    futures = [rpc.rpc_async(n % 2, abs, args=(-n,)) for n in range(6)]
    assert all(isinstance(f, torch.futures.Future) for f in futures)
    assert torch.futures.wait_all(futures) == list(range(6))
    assert [f.wait() for f in torch.futures.collect_all(futures).wait()] == list(range(6))
    assert futures[0].done()
    assert futures[3].value() == 3


def test_wait_all_raises_the_error_of_a_call(pair: Cluster) -> None:
    with pytest.raises(ValueError, match="one of them"):
        torch.futures.wait_all(
            [rpc.rpc_async(1, where), rpc.rpc_async(1, fail, args=(ValueError("one of them"),))]
        )


def test_callbacks(pair: Cluster) -> None:
    chained = rpc.rpc_async(1, abs, args=(-2,)).then(lambda f: f.wait() + 1).then(lambda f: f.wait() * 10)
    assert chained.wait() == 30
    with pytest.raises(RuntimeError, match="in the callback"):
        rpc.rpc_async(1, where).then(lambda f: fail(ValueError("in the callback"))).wait()
    seen: list[str] = []
    called = threading.Event()
    future = rpc.rpc_async(1, where)
    future.add_done_callback(lambda f: (seen.append(f.wait()), called.set()))
    assert called.wait(10)
    assert seen == ["worker1"]
    assert rpc.rpc_sync(1, where) == "worker1"


def test_a_callback_may_call(pair: Cluster) -> None:
    assert rpc.rpc_async(1, where).then(lambda f: f.wait()).wait() == "worker1"
    chained = rpc.rpc_async(1, where).then(lambda f: bounce(3))
    assert chained.wait() == 3


def test_many_threads_wait_for_one_future(pair: Cluster) -> None:
    with gate() as g:
        future = rpc.rpc_async(1, wait_at, args=(g, 5))
        got: list[int] = []
        threads = [threading.Thread(target=lambda: got.append(future.wait())) for _ in range(5)]
        for t in threads:
            t.start()
    for t in threads:
        t.join(10)
    assert got == [5] * 5


# ---- what the callee logs --------------------------------------------------------------------------------


def fail_as(text: str) -> None:
    """Raise an error."""
    raise ValueError(text)


def test_a_failure_that_repeats_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    with cluster(2):
        for _ in range(30):
            with pytest.raises(ValueError, match="always"):
                rpc.rpc_sync(1, fail_as, args=("always",))
        with pytest.raises(ValueError, match="once"):
            rpc.rpc_sync(1, fail_as, args=("once",))
    logged = [r.getMessage() for r in caplog.records if r.name == "zmqgrad.rpc.server"]
    assert sum("in fail_as" in text and "always" in text for text in logged) == 1
    assert sum("in fail_as" in text and "once" in text for text in logged) == 1
    counts = [text for text in logged if "logged once" in text]
    assert ["10 times so far" in counts[0], "30 times in total" in counts[1], len(counts)] == [True, True, 2]
