"""Arguments and results without functions: they arrive as a pickle would make them, tensors by identity."""

from __future__ import annotations

import enum
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.rpc.serialization.deserializer import deserialize, deserialize_call
from zmqgrad.rpc.serialization.serializer import serialize, serialize_arguments
from zmqgrad.wire.messages import PayloadFormat

TENSORS = [torch.ones(2), torch.zeros(3)]
BIG = st.integers(-(1 << 70), 1 << 70)
ATOMS = st.none() | st.booleans() | BIG | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
ARGUMENT = ATOMS | st.sampled_from(TENSORS)
KEYWORDS = st.dictionaries(st.text(max_size=3), ARGUMENT, max_size=3)


def same(a: Any, b: Any) -> bool:
    """Are they of one type, and alike? Tensors have to be the same one."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return type(a) is type(b) and bool(a == b)


def arrive(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Arguments as the callee gets them, with the very tensors that were sent."""
    sent = serialize_arguments(args, kwargs)
    _, got, named = deserialize_call("m:f", sent.payload, sent.frames, list(sent.tensors))  # type: ignore[arg-type]
    return got, named


@given(st.lists(ARGUMENT, max_size=6), KEYWORDS)
def test_arguments_come_as_they_went(args: list[Any], kwargs: dict[str, Any]) -> None:
    sent = serialize_arguments(tuple(args), kwargs)
    values = (*args, *kwargs.values())
    assert len(sent.tensors) == len({id(v) for v in values if isinstance(v, torch.Tensor)})
    there, named = arrive(tuple(args), kwargs)
    assert len(args) == len(there)
    assert all(map(same, args, there))
    assert list(kwargs) == list(named)
    assert all(map(same, kwargs.values(), named.values()))


@given(ATOMS)
def test_results_come_as_they_went(value: Any) -> None:
    sent = serialize(value)
    assert same(deserialize(sent.payload, sent.frames, []), pickle.loads(pickle.dumps(value)))  # type: ignore[arg-type]


X = torch.ones(1)


@pytest.mark.parametrize(
    "args",
    [
        ([X, X],),
        (X, [X]),
        (TENSORS, TENSORS),
        (TENSORS, {"a": TENSORS[0]}),
        (tuple(TENSORS), {"a": TENSORS[0], "": TENSORS[1]}),
        ([],),
        ({},),
        ([X, 1],),
        ([[X]],),
        ({1: X},),
    ],
)
def test_containers_keep_identities(args: tuple[Any, ...]) -> None:
    there, _ = arrive(args, {})
    assert repr(there) == repr(args)
    first = args[0]
    if len(args) == 2 and args[1] is first:
        assert there[1] is there[0]


def test_a_tensor_after_the_container_that_it_is_in() -> None:
    assert len(serialize_arguments(([X], X), {}).tensors) == 1
    there, again = arrive(([X], X), {})[0]
    assert there[0] is again


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((), {}, PayloadFormat.NONE),
        ((X,), {}, PayloadFormat.TENSORS),
        ((X, TENSORS[0], X), {}, PayloadFormat.TENSORS),
        ((X, 1), {}, PayloadFormat.PICKLE),
        ((X,), {"x": X}, PayloadFormat.PICKLE),
    ],
)
def test_arguments_that_are_all_tensors_need_no_pickle(
    args: tuple[Any, ...], kwargs: dict[str, Any], expected: PayloadFormat
) -> None:
    assert serialize_arguments(args, kwargs).payload.format is expected
    there, named = arrive(args, kwargs)
    assert all(map(same, args, there))
    assert len(there) == len(args)
    assert list(named) == list(kwargs)


class Color(enum.IntEnum):
    """Looks like a number."""

    RED = 1


class Name(str):
    """Looks like text."""


@pytest.mark.parametrize("value", [Color.RED, Name("x"), [1], (1,), {"a": 1}, 1 << 64, "\ud800", 1j])
def test_values_keep_their_type(value: Any) -> None:
    (there, _), _ = arrive((value, 1), {})
    assert same(value, there)
