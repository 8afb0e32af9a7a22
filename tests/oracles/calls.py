"""Calls: arguments, results, exceptions, names, timeouts, and asynchronous functions."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, NoReturn

import torch

from tests.oracles.implementation import rpc
from tests.oracles.outcome import attempt
from tests.oracles.scenario import AFTER, BEFORE, scenario

TIMED_OUT = "RPC ran for more than set timeout"


def combine(a: Any, b: Any = 10, *rest: Any, scale: Any = 1) -> Any:
    """Add its arguments."""
    return (a + b + sum(rest)) * scale


def echo(*args: Any, **kwargs: Any) -> Any:
    """Return its arguments."""
    return args, kwargs


def same(value: Any) -> Any:
    """Return ``value``."""
    return value


def raise_it(kind: type[BaseException], *args: Any) -> NoReturn:
    """Raise ``kind(*args)``."""
    raise kind(*args)


def block(seconds: float) -> float:
    """Take ``seconds``."""
    threading.Event().wait(seconds)
    return seconds


def forward(to: str, function: Any, args: Any) -> Any:
    """Call ``function`` on another worker."""
    return rpc.rpc_sync(to, function, args=args)


class CustomError(Exception):
    """Made from a text."""


class DerivedError(CustomError, ValueError):
    """Has two bases."""


class PairError(Exception):
    """Cannot be made from one text."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Counter:
    """A class with methods of all kinds."""

    total = 100

    def __init__(self, start: int = 0) -> None:
        self.n = start

    def add(self, n: int) -> int:
        """Count."""
        self.n += n
        return self.n

    @staticmethod
    def static(n: int) -> int:
        """Return n + 1."""
        return n + 1

    @classmethod
    def of_class(cls, n: int) -> int:
        """Return n + the total of the class."""
        return cls.total + n

    def __call__(self, n: int) -> int:
        return self.n * n


# ---- arguments and results --------------------------------------------------------------------------------


@scenario()
def positional_and_keyword_arguments() -> Any:
    return [
        rpc.rpc_sync("worker1", combine, args=(1,)),
        rpc.rpc_sync("worker1", combine, args=(1, 2, 3, 4)),
        rpc.rpc_sync("worker1", combine, args=(1,), kwargs={"b": 2, "scale": 3}),
        rpc.rpc_sync("worker1", combine, kwargs={"a": 5}),
        rpc.rpc_async("worker1", combine, args=(1,), kwargs={"b": 2}).wait(),
        rpc.remote("worker1", combine, args=(1,), kwargs={"b": 2}).to_here(),
        rpc.rpc_sync("worker1", echo),
        rpc.rpc_sync("worker1", echo, (1, "two"), {"three": 3}),
        rpc.rpc_sync("worker1", echo, [1, 2]),
        rpc.rpc_sync("worker1", echo, range(2)),
        rpc.rpc_sync("worker1", echo, deque([1, 2])),
    ]


@scenario()
def wrong_arguments_of_the_function() -> Any:
    return [
        attempt(lambda: rpc.rpc_sync("worker1", combine), "missing 1 required positional argument: 'a'"),
        attempt(lambda: rpc.rpc_sync("worker1", combine, kwargs={"c": 1}), "unexpected keyword argument 'c'"),
        attempt(lambda: rpc.rpc_sync("worker1", combine, args=("a", 1)), "can only concatenate str"),
        attempt(lambda: rpc.rpc_sync("worker1", same, kwargs={1: 2})),
    ]


@scenario()
def functions_that_are_none() -> Any:
    return [
        attempt(lambda: rpc.rpc_sync("worker1", None)),
        attempt(lambda: rpc.rpc_sync("worker1", 5)),
        attempt(lambda: rpc.rpc_async("worker1", "combine").wait()),
    ]


@scenario()
def a_single_tensor_as_args() -> Any:
    return attempt(lambda: rpc.rpc_sync("worker1", same, args=torch.ones(1)))


@scenario()
def destinations() -> Any:
    info = rpc.get_worker_info("worker1")
    return [rpc.rpc_sync(to, combine, args=(1,)) for to in ("worker1", 1, info, "worker0", 0)]


@scenario()
def plain_values_return_unchanged() -> Any:
    values = [
        None,
        True,
        1,
        2**70,
        1.5,
        1j,
        "täxt\n",
        b"\0\xff",
        (),
        [1, [2]],
        {"a": {1: 2}},
        {1, 2},
        range(3),
        int,
    ]
    return [rpc.rpc_sync("worker1", same, args=(value,)) for value in values]


@scenario()
def torch_operators() -> Any:
    x = torch.ones(2, 2)
    return [
        rpc.rpc_sync("worker1", torch.add, args=(x, 1)),
        rpc.rpc_sync("worker1", torch.add, args=(x, x), kwargs={"alpha": 3}),
        rpc.rpc_async("worker1", torch.mul, args=(x, 2)).wait(),
        rpc.remote("worker1", torch.sum, args=(x,)).to_here(),
        attempt(
            lambda: rpc.rpc_sync("worker1", torch.add, args=(x, "x")),
            "Overloaded torch operator invoked from Python failed to",
        ),
        attempt(lambda: rpc.rpc_sync("worker1", torch.mm, args=(x, torch.ones(3, 3)))),
    ]


@scenario()
def an_operator_that_returns_several_tensors() -> Any:
    return type(rpc.rpc_sync("worker1", torch.split, args=(torch.ones(2), 1)))


@scenario()
def methods() -> Any:
    return [
        rpc.rpc_sync("worker1", Counter.static, args=(1,)),
        rpc.rpc_sync("worker1", Counter.of_class, args=(1,)),
        rpc.rpc_sync("worker1", Counter(5).add, args=(1,)),
        rpc.rpc_sync("worker1", Counter(5), args=(3,)),
        rpc.rpc_sync("worker1", Counter.add, args=(Counter(7), 1)),
        rpc.rpc_sync("worker1", Counter, args=(1,)).n,
        rpc.rpc_sync("worker1", len, args=([1, 2],)),
        rpc.rpc_sync("worker1", "a-b".split, args=("-",)),
    ]


@scenario()
def a_lambda() -> Any:
    return attempt(lambda: rpc.rpc_sync("worker1", lambda: 5))


@scenario()
def a_lambda_as_argument() -> Any:
    return attempt(lambda: rpc.rpc_sync("worker1", same, args=(lambda: 5,))())


@scenario()
def a_local_function() -> Any:
    def local(n: int) -> int:
        return n + 1

    return attempt(lambda: rpc.rpc_sync("worker1", local, args=(1,)))


@scenario()
def an_argument_that_cannot_be_pickled() -> Any:
    return [
        attempt(
            lambda: rpc.rpc_sync("worker1", same, args=(threading.Lock(),)),
            "cannot pickle '_thread.lock' object",
        ),
        attempt(lambda: rpc.rpc_async("worker1", same, args=(threading.Lock(),)), "cannot pickle"),
        attempt(lambda: rpc.remote("worker1", same, args=(threading.Lock(),)), "cannot pickle"),
    ]


@scenario()
def a_result_that_cannot_be_pickled() -> Any:
    return attempt(lambda: rpc.rpc_sync("worker1", threading.Lock), "cannot pickle '_thread.lock' object")


@scenario()
def a_result_of_self_is_a_copy() -> Any:
    original = [1, torch.ones(1)]
    result = rpc.rpc_sync("worker0", same, args=(original,))
    return result is original, result


@scenario()
def a_tensor_sent_to_self_is_a_copy() -> Any:
    x = torch.ones(2)
    y = rpc.rpc_sync("worker0", same, args=(x,))
    x.add_(1)
    return y


# ---- tensors ----------------------------------------------------------------------------------------------


def describe(tensor: torch.Tensor) -> Any:
    """Describe a tensor where it arrived."""
    return (
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.storage_offset(),
        tensor.is_contiguous(),
        tensor.is_leaf,
    )


@scenario()
def tensors_of_all_kinds() -> Any:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = [
        base[1],
        torch.tensor(2.5),
        torch.empty(0),
        torch.empty(2, 0, 3),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.tensor([1.5], dtype=torch.bfloat16),
        torch.tensor([1.5], dtype=torch.half),
        torch.arange(3, dtype=torch.uint8),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.eye(2).to_sparse(),
        torch.ones(2, 2).conj(),
        torch.tensor([1 + 2j]).conj().resolve_conj(),
    ]
    return [rpc.rpc_sync("worker1", same, args=(t,)) for t in tensors]


@scenario()
def shapes_of_views() -> Any:
    base = torch.arange(12.0).reshape(3, 4)
    views = [
        base[1],
        base[:, 1],
        base.t(),
        base[::2, ::2],
        torch.ones(1).expand(3),
        base.as_strided((2, 2), (1, 2)),
    ]
    return [tuple(rpc.rpc_sync("worker1", same, args=(v,)).shape) for v in views]


@scenario()
def values_of_views() -> Any:
    base = torch.arange(12.0).reshape(3, 4)
    views = [
        base[1],
        base[:, 1],
        base.t(),
        base[::2, ::2],
        torch.ones(1).expand(3),
        base.as_strided((2, 2), (1, 2)),
    ]
    return [rpc.rpc_sync("worker1", same, args=(v,)).tolist() for v in views]


@scenario()
def strides_of_a_transposed_tensor() -> Any:
    return rpc.rpc_sync("worker1", describe, args=(torch.arange(6.0).reshape(2, 3).t(),))


@scenario()
def strides_of_a_column() -> Any:
    return rpc.rpc_sync("worker1", describe, args=(torch.arange(6.0).reshape(2, 3)[:, 1],))


@scenario()
def two_views_of_one_tensor() -> Any:
    base = torch.zeros(4)
    one, other = rpc.rpc_sync("worker1", same, args=([base[:2], base],))
    one.add_(1)
    return other.tolist()


@scenario()
def one_tensor_twice() -> Any:
    x = torch.zeros(2)
    one, other = rpc.rpc_sync("worker1", same, args=([x, x],))
    return one is other


@scenario()
def a_tensor_that_requires_grad_without_a_context() -> Any:
    x = torch.ones(2, requires_grad=True)
    y = rpc.rpc_sync("worker1", same, args=(x,))
    z = rpc.rpc_sync("worker1", same, args=(x * 2,))
    return y.requires_grad, y.is_leaf, z.requires_grad, z.is_leaf


@scenario()
def modules_are_copied() -> Any:
    module = torch.nn.Linear(2, 1)
    with torch.no_grad():
        module.weight.fill_(2.0)
        module.bias.fill_(1.0)
    copy = rpc.rpc_sync("worker1", same, args=(module,))
    return [
        rpc.rpc_sync("worker1", module, args=(torch.ones(1, 2),)).detach(),
        copy.state_dict(),
        type(copy.weight).__name__,
        copy.weight.is_leaf,
    ]


# ---- exceptions -------------------------------------------------------------------------------------------


def both_ways(*args: Any) -> list[Any]:
    """Raise in a call that waits and in one that does not."""
    return [
        attempt(lambda: rpc.rpc_sync("worker1", raise_it, args=args), "the text"),
        attempt(lambda: rpc.rpc_async("worker1", raise_it, args=args).wait(), "the text"),
    ]


@scenario()
def types_of_exceptions() -> Any:
    return [both_ways(kind, "the text") for kind in (ValueError, RuntimeError, DerivedError)]


@scenario()
def types_of_other_exceptions() -> Any:
    kinds = (KeyError, AssertionError, StopIteration, OSError, AttributeError, CustomError)
    calls = [rpc.rpc_async("worker1", raise_it, args=(kind, "the text")) for kind in kinds]
    return tuple(attempt(call.wait, "the text") for call in calls)


@scenario()
def types_of_exceptions_in_rrefs() -> Any:
    kinds = (ValueError, RuntimeError, KeyError, AssertionError, CustomError, DerivedError)
    rrefs = [rpc.remote("worker1", raise_it, args=(kind, "the text")) for kind in kinds]
    return [attempt(rref.to_here, "the text") for rref in rrefs]


@scenario()
def the_text_of_an_exception_names_the_worker_and_the_place() -> Any:
    return attempt(
        lambda: rpc.rpc_sync("worker1", raise_it, args=(ValueError, "the text")),
        "On WorkerInfo(id=1, name=worker1):",
        "ValueError('the text')",
        "Traceback (most recent call last)",
        "in raise_it",
    )


@scenario()
def an_exception_that_cannot_be_made_from_a_text() -> Any:
    return attempt(lambda: rpc.rpc_sync("worker1", raise_it, args=(PairError, "one", "two")), "one and two")


@scenario()
def exceptions_without_a_text() -> Any:
    return [
        attempt(lambda: rpc.rpc_sync("worker1", raise_it, args=(ValueError,)), "ValueError()"),
    ]


@scenario()
def the_text_of_an_exception_with_two_arguments() -> Any:
    return attempt(lambda: rpc.rpc_sync("worker1", raise_it, args=(ValueError, 1, 2)), "On WorkerInfo")


@scenario()
def an_exception_in_a_nested_call() -> Any:
    return attempt(
        lambda: rpc.rpc_sync("worker1", forward, args=("worker2", raise_it, (ValueError, "deep"))),
        "deep",
        "worker1",
        "worker2",
    )


@scenario()
def an_exception_in_a_call_back_to_the_caller() -> Any:
    return attempt(
        lambda: rpc.rpc_sync("worker1", forward, args=("worker0", raise_it, (ValueError, "back"))), "back"
    )


@scenario()
def an_exception_in_a_call_to_self() -> Any:
    return attempt(lambda: rpc.rpc_sync("worker0", raise_it, args=(ValueError, "own")), "own")


@scenario()
def an_exception_while_unpickling() -> Any:
    return attempt(lambda: rpc.rpc_sync("worker1", same, args=(Unreadable(),)), "cannot be read")


class Unreadable:
    """Pickles well and does not unpickle."""

    def __reduce__(self) -> Any:
        return raise_it, (ValueError, "cannot be read")


@scenario()
def a_remote_exception_leaves_the_worker_usable() -> Any:
    attempt(lambda: rpc.rpc_sync("worker1", raise_it, args=(ValueError,)))
    return rpc.rpc_sync("worker1", combine, args=(1,))


# ---- unknown workers --------------------------------------------------------------------------------------


@scenario()
def unknown_workers() -> Any:
    return [
        attempt(lambda: rpc.rpc_sync("nobody", combine, args=(1,))),
        attempt(lambda: rpc.rpc_async("nobody", combine, args=(1,))),
        attempt(lambda: rpc.remote("nobody", combine, args=(1,))),
        attempt(lambda: rpc.rpc_sync(7, combine, args=(1,))),
        attempt(lambda: rpc.rpc_sync(-1, combine, args=(1,))),
        attempt(lambda: rpc.get_worker_info("nobody")),
    ]


@scenario()
def destinations_of_the_wrong_type() -> Any:
    return [
        attempt(lambda: rpc.rpc_sync(1.5, combine, args=(1,))),
        attempt(lambda: rpc.rpc_sync(None, combine, args=(1,))),
        attempt(lambda: rpc.rpc_sync(b"worker1", combine, args=(1,))),
    ]


@scenario()
def worker_infos() -> Any:
    own, other = rpc.get_worker_info(), rpc.get_worker_info("worker1")
    return [
        (own.name, own.id, str(own)),
        (other.name, other.id, repr(other)),
        own == rpc.get_worker_info("worker0"),
        own == other,
        rpc.rpc_sync("worker2", rpc.get_worker_info).name,
        rpc.rpc_sync("worker1", same, args=(other,)) == other,
        type(rpc.get_worker_info("worker2").id),
    ]


@scenario()
def worker_infos_are_hashable() -> Any:
    return attempt(lambda: len({rpc.get_worker_info(), rpc.get_worker_info("worker0")}))


# ---- timeouts ---------------------------------------------------------------------------------------------


@scenario()
def a_call_that_takes_too_long() -> Any:
    return [
        attempt(lambda: rpc.rpc_sync("worker1", block, args=(0.4,), timeout=0.1), TIMED_OUT, "(100 ms)"),
        attempt(lambda: rpc.rpc_async("worker1", block, args=(0.4,), timeout=0.1).wait(), TIMED_OUT),
        attempt(lambda: rpc.remote("worker1", block, args=(0.4,), timeout=0.1).to_here(timeout=1.0)),
        attempt(lambda: rpc.remote("worker1", block, args=(0.4,)).to_here(timeout=0.1), TIMED_OUT),
        rpc.rpc_sync("worker1", combine, args=(1,)),
    ]


@scenario()
def a_call_to_self_that_takes_too_long() -> Any:
    return attempt(lambda: rpc.rpc_sync("worker0", block, args=(0.4,), timeout=0.1), TIMED_OUT)


@scenario()
def the_default_timeout() -> Any:
    before = rpc.get_rpc_timeout()
    rpc._set_rpc_timeout(0.1)
    try:
        return [
            before,
            rpc.get_rpc_timeout(),
            attempt(lambda: rpc.rpc_sync("worker1", block, args=(0.4,)), TIMED_OUT),
            attempt(lambda: rpc.rpc_async("worker1", block, args=(0.4,)).wait(), TIMED_OUT),
            rpc.rpc_sync("worker1", block, args=(0.3,), timeout=2),
            rpc.rpc_sync("worker1", block, args=(0.3,), timeout=0),
        ]
    finally:
        rpc._set_rpc_timeout(before)


@scenario()
def a_timeout_in_a_nested_call() -> Any:
    return attempt(lambda: rpc.rpc_sync("worker1", forward_in, args=("worker2", 0.1, 0.4)), TIMED_OUT)


def forward_in(to: str, timeout: float, seconds: float) -> Any:
    """Call ``block`` with a timeout."""
    return rpc.rpc_sync(to, block, args=(seconds,), timeout=timeout)


@scenario()
def timeouts_of_the_wrong_type() -> Any:
    return [
        attempt(lambda: rpc.rpc_sync("worker1", combine, args=(1,), timeout="1")),
        attempt(lambda: rpc.rpc_sync("worker1", combine, args=(1,), timeout=None)),
        attempt(lambda: rpc._set_rpc_timeout("1")),
    ]


@scenario()
def a_timeout_that_means_the_default() -> Any:
    return rpc.rpc_sync("worker1", combine, args=(1,), timeout=-1)


@scenario()
def a_negative_timeout() -> Any:  # of what takes longer than torch takes to notice
    return attempt(lambda: rpc.rpc_sync("worker1", block, (0.5,), timeout=-5.0))


@scenario()
def a_negative_default_timeout() -> Any:
    before = rpc.get_rpc_timeout()
    try:
        return attempt(lambda: rpc._set_rpc_timeout(-5.0))
    finally:
        rpc._set_rpc_timeout(before)


@scenario()
def a_timeout_that_is_an_int() -> Any:
    return [
        rpc.rpc_sync("worker1", combine, args=(1,), timeout=5),
        rpc.rpc_sync("worker1", block, (0.0,), timeout=1),
    ]


@scenario()
def a_timeout_that_is_a_bool() -> Any:
    return attempt(lambda: rpc.rpc_sync("worker1", combine, args=(1,), timeout=True))


# ---- futures ----------------------------------------------------------------------------------------------


@scenario()
def callbacks_of_futures() -> Any:
    seen: list[Any] = []
    called = threading.Event()

    def note(future: Any) -> None:
        seen.append(future.wait())
        called.set()

    future = rpc.rpc_async("worker1", combine, args=(1,))
    future.add_done_callback(note)
    called.wait(10)
    chained = future.then(lambda f: f.wait() + 1).then(lambda f: [f.wait()])
    return [
        isinstance(future, torch._C.Future),
        future.wait(),
        future.wait(),
        future.value(),
        future.done(),
        chained.wait(),
        seen,
    ]


@scenario()
def the_future_that_a_callback_gets() -> Any:
    future = rpc.rpc_async("worker1", combine, args=(1,))
    return future.then(lambda f: f is future).wait()


@scenario()
def callbacks_that_fail() -> Any:
    future = rpc.rpc_async("worker1", combine, args=(1,))
    failed = future.then(lambda f: raise_it(CustomError, "in a callback"))
    return [
        attempt(failed.wait, "CustomError: in a callback"),
        attempt(failed.then(lambda f: f.wait()).wait, "in a callback"),
        attempt(failed.then(lambda f: "went on").wait),
        attempt(lambda: future.add_done_callback(lambda f: raise_it(ValueError, "is logged"))),
        attempt(lambda: future.then(None), "incompatible function arguments"),
        attempt(lambda: future.add_done_callback(5), "incompatible function arguments"),
    ]


@scenario()
def futures_of_failed_calls() -> Any:
    future = rpc.rpc_async("worker1", raise_it, args=(ValueError, "the text"))
    return [
        attempt(future.wait, "the text"),
        attempt(future.wait, "the text"),
        attempt(future.value, "the text"),
        future.done(),
        attempt(future.then(lambda f: f.wait()).wait, "the text"),
        attempt(future.then(lambda f: f.done()).wait),
    ]


@scenario()
def the_class_of_futures() -> Any:
    return isinstance(rpc.rpc_async("worker1", combine, args=(1,)), torch.futures.Future)


@scenario()
def futures_that_are_not_done() -> Any:
    future = rpc.rpc_async("worker1", block, args=(0.2,))
    return [future.done(), attempt(future.value), future.wait(), future.done()]


@scenario()
def futures_set_by_hand() -> Any:
    future = rpc.rpc_async("worker1", combine, args=(1,))
    future.wait()
    return [
        attempt(lambda: future.set_result(5)),
        future.wait(),
    ]


@scenario()
def an_exception_set_by_hand() -> Any:
    future = rpc.rpc_async("worker1", combine, args=(1,))
    future.wait()
    return attempt(lambda: future.set_exception(ValueError("late"))), future.wait()


@scenario()
def many_futures_at_once() -> Any:
    def good() -> list[Any]:
        return [rpc.rpc_async("worker1", combine, args=(n,)) for n in range(3)]

    bad = rpc.rpc_async("worker1", raise_it, args=(ValueError, "one of many"))
    collected = torch.futures.collect_all(good())
    return [
        torch.futures.wait_all(good()),
        [f.wait() for f in collected.wait()],
        attempt(lambda: torch.futures.wait_all([*good(), bad]), "one of many"),
        attempt(lambda: torch.futures.collect_all([*good(), bad]).wait(), "one of many"),
        torch.futures.wait_all([]),
    ]


@scenario()
def a_context_that_waits_for_all() -> Any:
    seen = []
    with rpc.api._wait_all():
        future = rpc.rpc_async("worker1", block, args=(0.1,))
    seen.append(future.done())

    def fails() -> None:
        with rpc.api._wait_all():
            rpc.rpc_async("worker1", raise_it, args=(ValueError, "waited for"))

    seen.append(attempt(fails, "waited for"))
    return seen


# ---- functions that return futures ------------------------------------------------------------------------


@rpc.functions.async_execution
def chain(to: str, n: int) -> Any:
    """Add on another worker, without a thread that waits."""
    return rpc.rpc_async(to, combine, args=(n,)).then(lambda f: f.wait() * 2)


@rpc.functions.async_execution
def chain_that_fails(to: str) -> Any:
    """Fail in a callback."""
    return rpc.rpc_async(to, combine, args=(1,)).then(lambda f: raise_it(CustomError, "in the chain"))


@rpc.functions.async_execution
def fails_at_once() -> Any:
    """Fail before there is a future."""
    raise ValueError("at once")


@rpc.functions.async_execution
def fails_later(to: str) -> Any:
    """Return the future of a call that fails."""
    return rpc.rpc_async(to, raise_it, args=(ValueError, "later"))


@rpc.functions.async_execution
def no_future() -> int:
    """Return something else."""
    return 5


@rpc.functions.async_execution
def already_done(value: Any) -> Any:
    """Return a future that is done."""
    future: Any = torch.futures.Future()
    future.set_result(value)
    return future


@rpc.functions.async_execution
def set_to_an_exception() -> Any:
    """Return a future with an exception."""
    future: Any = torch.futures.Future()
    future.set_exception(ValueError("was set"))
    return future


@rpc.functions.async_execution
def never_done() -> Any:
    """Return a future that nobody sets."""
    return torch.futures.Future()


@rpc.functions.async_execution
def of_several(names: list[str]) -> Any:
    """Return the sum of results of several workers."""
    futures = [rpc.rpc_async(name, combine, args=(1,)) for name in names]
    return torch.futures.collect_all(futures).then(lambda all_: sum(f.wait() for f in all_.wait()))


class AsyncMethods:
    """Asynchronous methods of all kinds."""

    base = 100

    @staticmethod
    @rpc.functions.async_execution
    def static(to: str, n: int) -> Any:
        """Static."""
        return rpc.rpc_async(to, combine, args=(n,))

    @classmethod
    @rpc.functions.async_execution
    def of_class(cls, to: str, n: int) -> Any:
        """Of the class."""
        return rpc.rpc_async(to, combine, args=(n, cls.base))

    @rpc.functions.async_execution
    def bound(self, to: str, n: int) -> Any:
        """Of the object."""
        return rpc.rpc_async(to, combine, args=(n, self.base))


@scenario()
def asynchronous_functions() -> Any:
    return [
        rpc.rpc_sync("worker1", chain, args=("worker2", 1)),
        rpc.rpc_async("worker1", chain, args=("worker2", 1)).wait(),
        rpc.remote("worker1", chain, args=("worker2", 1)).to_here(),
        rpc.rpc_sync("worker1", chain, args=("worker1", 1)),
        rpc.rpc_sync("worker1", chain, args=("worker0", 1)),
        rpc.rpc_sync("worker0", chain, args=("worker1", 1)),
        rpc.rpc_sync("worker1", already_done, args=([1, torch.ones(1)],)),
        rpc.rpc_sync("worker1", of_several, args=(["worker0", "worker1", "worker2"],)),
        chain("worker1", 1).wait(),
        chain.__name__,
    ]


@scenario()
def asynchronous_methods() -> Any:
    return [
        rpc.rpc_sync("worker1", AsyncMethods.static, args=("worker2", 1)),
        rpc.rpc_sync("worker1", AsyncMethods.of_class, args=("worker2", 1)),
        rpc.rpc_sync("worker1", AsyncMethods().bound, args=("worker2", 1)),
        rpc.rpc_async("worker1", AsyncMethods.static, args=("worker2", 1)).wait(),
        rpc.remote("worker1", AsyncMethods.of_class, args=("worker2", 1)).to_here(),
        rpc.remote("worker1", AsyncMethods).rpc_sync().bound("worker2", 1),
        rpc.remote("worker1", AsyncMethods).rpc_async().static("worker2", 1).wait(),
        rpc.remote("worker1", AsyncMethods).remote().of_class("worker2", 1).to_here(),
    ]


@scenario()
def asynchronous_functions_that_fail() -> Any:
    def calls(function: Any, *args: Any) -> list[Any]:
        return [
            lambda: rpc.rpc_sync("worker1", function, args=args),
            lambda: rpc.rpc_async("worker1", function, args=args).wait(),
        ]

    return [
        [attempt(c, "in the chain") for c in calls(chain_that_fails, "worker2")],
        [attempt(c, "at once") for c in calls(fails_at_once)],
        [attempt(c, "must return a torch.futures.Future object") for c in calls(no_future)],
        attempt(lambda: rpc.remote("worker1", fails_at_once).to_here(), "at once"),
        attempt(
            lambda: rpc.remote("worker1", no_future).to_here(), "must return a torch.futures.Future object"
        ),
    ]


@scenario()
def an_asynchronous_function_whose_call_fails() -> Any:
    return attempt(lambda: rpc.rpc_sync("worker1", fails_later, args=("worker2",)), "later", "worker2")


@scenario()
def a_future_that_is_set_to_an_exception() -> Any:
    return attempt(lambda: rpc.rpc_sync("worker1", set_to_an_exception), "was set")


@scenario()
def an_asynchronous_function_that_never_ends() -> Any:
    return attempt(lambda: rpc.rpc_sync("worker1", never_done, timeout=0.1), TIMED_OUT)


def reversed_order() -> type:
    """Make a class whose decorators are in the wrong order."""

    class Reversed:
        @rpc.functions.async_execution
        @staticmethod
        def static(n: int) -> Any:
            return n

    return Reversed


@scenario()
def decorators_in_the_wrong_order() -> Any:
    return attempt(lambda: reversed_order().__name__)


# ---- calls within calls -----------------------------------------------------------------------------------


def ping_pong(left: int) -> int:
    """Call back and forth between two workers."""
    if left == 0:
        return 0
    other = "worker1" if rpc.get_worker_info().name == "worker0" else "worker0"
    return 1 + int(rpc.rpc_sync(other, ping_pong, args=(left - 1,)))


@scenario()
def calls_within_calls() -> Any:
    return [
        rpc.rpc_sync("worker1", ping_pong, args=(6,)),
        rpc.rpc_sync("worker1", forward, args=("worker2", combine, (1,))),
        rpc.rpc_sync("worker1", forward, args=("worker1", combine, (1,))),
        rpc.rpc_sync("worker0", forward, args=("worker0", combine, (1,))),
    ]


# ---- before and after -------------------------------------------------------------------------------------


def outside() -> list[Any]:
    """Use the API while there is no group."""
    return [
        attempt(lambda: rpc.rpc_sync("worker1", combine, args=(1,)), "RPC has not been initialized. Call"),
        attempt(lambda: rpc.rpc_async("worker1", combine, args=(1,)), "RPC has not been initialized. Call"),
        attempt(lambda: rpc.remote("worker1", combine, args=(1,)), "RPC has not been initialized. Call"),
        attempt(lambda: rpc.get_worker_info(), "RPC has not been initialized. Call"),
        attempt(lambda: rpc.shutdown(), "RPC has not been initialized. Call"),
        attempt(lambda: rpc.get_rpc_timeout()),
        attempt(lambda: rpc._set_rpc_timeout(5)),
        rpc._is_current_rpc_agent_set(),
    ]


@scenario(BEFORE)
def before_init_rpc() -> Any:
    return outside()


@scenario(AFTER)
def after_shutdown() -> Any:
    return outside()


@scenario(BEFORE)
def an_rref_before_init_rpc() -> Any:
    return attempt(lambda: rpc.RRef(1))


@scenario(AFTER)
def an_rref_after_shutdown() -> Any:
    return attempt(lambda: rpc.RRef(1))


@scenario(AFTER)
def wrong_arguments_of_init_rpc() -> Any:
    return [
        attempt(lambda: rpc.init_rpc("worker0", backend="tensorpipe", rank=0, world_size=1)),
        attempt(lambda: rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=5)),
        attempt(lambda: rpc.init_rpc("a name", rank=0, world_size=1)),
        attempt(lambda: rpc.init_rpc("", rank=0, world_size=1)),
        attempt(
            lambda: rpc.TensorPipeRpcBackendOptions(num_worker_threads=0),
            "num_worker_threads must be positive",
        ),
        attempt(lambda: rpc.TensorPipeRpcBackendOptions(num_worker_threads="x")),
        attempt(lambda: rpc.TensorPipeRpcBackendOptions(rpc_timeout="x")),
        rpc._is_current_rpc_agent_set(),
    ]


@scenario()
def init_rpc_twice() -> Any:
    return attempt(lambda: rpc.init_rpc("worker0", rank=0, world_size=3))


@scenario()
def the_defaults_of_the_options() -> Any:
    options = rpc.TensorPipeRpcBackendOptions()
    return [
        options.rpc_timeout,
        options.init_method,
        options.num_worker_threads,
        options.device_maps,
        options.devices,
    ]
