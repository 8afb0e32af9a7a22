"""Functions by value: they do on the callee what they do here, with what they hold at each call."""

from __future__ import annotations

import json as data_format
import marshal
import types
import xml
import xml.etree.ElementTree
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from zmqgrad.rpc.api import rpc_sync
from zmqgrad.rpc.gathering import broadcast
from zmqgrad.testing import Cluster, cluster
from zmqgrad.wire.messages import Call


@pytest.fixture
def pair() -> Iterator[Cluster]:
    with cluster(2) as made:
        yield made


def run(function: Callable[..., Any], *args: Any) -> Any:
    return rpc_sync("worker1", function, args=args)


FACTOR = 7


def adder(k: int) -> Callable[[int], int]:
    return lambda x: x + k


def counter() -> Callable[[], int]:
    count = 0

    def next_one() -> int:
        nonlocal count
        count += 1
        return count

    return next_one


def factorial_of() -> Callable[[int], int]:
    def factorial(n: int):  # type: ignore[no-untyped-def]
        return 1 if n < 2 else n * factorial(n - 1)

    return factorial


def functions() -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """One of each kind, with arguments."""
    held = [1, 2]

    def annotated(x: int, y: float = 0.5) -> float:
        return x + y

    def documented(x, y=3, *rest, scale=2, **named):  # type: ignore[no-untyped-def]
        """What it says."""
        return (x + y) * scale, rest, sorted(named)

    def uses_classes(x):  # type: ignore[no-untyped-def]
        class Local:
            value = x

        return Local.value, [i * FACTOR for i in range(x)]

    def imports_inside(x):  # type: ignore[no-untyped-def]
        import math

        return math.sqrt(x)

    def generates(n):  # type: ignore[no-untyped-def]
        return list((lambda: (yield from range(n)))())

    return [
        (lambda: 5, ()),
        (lambda x, y=2: x * y, (3,)),
        (lambda x: torch.relu(x).sum().item(), (torch.tensor([-1.0, 2.0]),)),
        (lambda x: data_format.loads(x), ("[1]",)),
        (lambda: xml.etree.ElementTree.fromstring("<a/>").tag, ()),
        (lambda x: x * FACTOR, (2,)),
        (lambda: held, ()),
        (lambda: [len(held), min(held), print.__name__], ()),
        (adder(4), (1,)),
        (factorial_of(), (5,)),
        (annotated, (2,)),
        (documented, (1, 2, 3)),
        (uses_classes, (3,)),
        (imports_inside, (16.0,)),
        (generates, (3,)),
        (types.FunctionType((lambda: __name__).__code__, {"__name__": "elsewhere"}), ()),
    ]


def test_functions_sent_by_value_behave_the_same(pair: Cluster) -> None:
    for function, args in functions():
        expected = function(*args)
        for _ in range(3):
            assert run(function, *args) == expected, function


def test_a_function_keeps_its_names(pair: Cluster) -> None:
    def names(f: Any) -> tuple[Any, ...]:
        return f.__name__, f.__qualname__, f.__module__, f.__doc__, f.__defaults__, f.__annotations__

    for function, _ in functions():
        assert run(names, function) == names(function)


def test_captured_state_is_sent_with_each_call(pair: Cluster) -> None:
    held, number, default = [1], 1, [1]
    cell = lambda: number  # noqa: E731
    reader = lambda x=default: (held, number, x, cell())  # noqa: E731
    assert run(reader) == ([1], 1, [1], 1)
    held.append(2)
    default.append(2)
    number = 2
    assert run(reader) == ([1, 2], 2, [1, 2], 2)
    assert [run(adder(k), 1) for k in (1, 5, 1)] == [2, 6, 2]


def test_modules_are_those_of_the_moment(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = lambda: data_format.__name__  # noqa: E731
    assert run(parse) == "json"
    monkeypatch.setitem(globals(), "data_format", marshal)
    assert run(parse) == "marshal"
    monkeypatch.setitem(globals(), "data_format", types.SimpleNamespace(__name__="no module"))
    assert run(parse) == "no module"


def test_writes_to_captured_state_stay_within_a_call(pair: Cluster) -> None:
    count = counter()
    assert [run(count) for _ in range(3)] == [1, 1, 1]
    assert count() == 1

    def set_global() -> bool:
        global _never_set
        before = "_never_set" in globals()
        _never_set = 1
        return before

    assert [run(set_global) for _ in range(2)] == [False, False]
    assert "_never_set" not in globals()


def test_functions_in_arguments_and_results(pair: Cluster) -> None:
    again = run(lambda fs: [f for f in fs] + fs[:1], [adder(1), adder(2)])
    assert again[0] is again[2]
    assert [f(1) for f in again] == [2, 3, 2]


def test_a_broadcast_is_packed_once_and_understood_by_all() -> None:
    with cluster(3) as made:
        k = 2
        for _ in range(2):
            futures = broadcast(["worker1", "worker2"], lambda x: x + k, args=(1,))
            assert [f.wait() for f in futures] == [3, 3]
        names = [p.message for p in made.network.history if isinstance(p.message, Call)]
        assert len(names) == 4
