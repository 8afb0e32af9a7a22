"""Arguments and results without a pickle: what comes out is what a pickle would have made of it."""

from __future__ import annotations

import enum
import math
import pickle
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from zmqgrad.errors import ProtocolError
from zmqgrad.rpc.packing.packing import pack, pack_arguments
from zmqgrad.rpc.packing.plain import decode_arguments, decode_value, encode_arguments, encode_value
from zmqgrad.rpc.packing.unpacking import unpack, unpack_call
from zmqgrad.wire.messages import PayloadFormat

TENSORS = [torch.ones(2), torch.zeros(3)]
BIG = st.integers(-(1 << 70), 1 << 70)
PLAIN = st.none() | st.booleans() | BIG | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
ARGUMENT = PLAIN | st.sampled_from(TENSORS)
KEYWORDS = st.dictionaries(st.text(max_size=3), ARGUMENT, max_size=3)


def same(a: Any, b: Any) -> bool:
    """Are they of one type, and alike? Tensors have to be the same one."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return type(a) is type(b) and bool(a == b)


@given(st.lists(ARGUMENT, max_size=6), KEYWORDS)
def test_arguments_come_as_they_went(args: list[Any], kwargs: dict[str, Any]) -> None:
    encoded = encode_arguments(args, kwargs)
    if encoded is None:
        assert any(type(v) is int and v.bit_length() > 63 for v in (*args, *kwargs.values()))
        return
    data, tensors = encoded
    assert len(tensors) == len({id(v) for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)})
    there_args, there_kwargs = decode_arguments(data, tensors)
    assert len(args) == len(there_args)
    assert all(map(same, args, there_args))
    assert list(kwargs) == list(there_kwargs)
    assert all(map(same, kwargs.values(), there_kwargs.values()))


@given(PLAIN)
def test_results_come_as_they_went(value: Any) -> None:
    packed = pack(value)
    assert same(unpack(packed.payload, packed.frames, []), pickle.loads(pickle.dumps(value)))


@pytest.mark.parametrize(
    "value",
    [TENSORS, tuple(TENSORS), {"a": TENSORS[0], "": TENSORS[1]}, TENSORS[:1]],
    ids=["list", "tuple", "dict", "one"],
)
def test_containers_of_tensors_need_no_pickle(value: Any) -> None:
    for before in ([], [1, "x"], [torch.ones(4)]):
        encoded = encode_arguments([*before, value], {"more": [torch.ones(5)]})
        assert encoded is not None
        (*_, got), kwargs = decode_arguments(*encoded)
        assert type(kwargs["more"]) is list
        assert type(got) is type(value)
        if isinstance(value, dict):
            assert list(got) == list(value)
            got, value = list(got.values()), list(value.values())
        assert len(got) == len(value)
        assert all(map(same, got, value))


X = torch.ones(1)


@pytest.mark.parametrize(
    "args",
    [
        ([X, X],),
        (X, [X]),
        (TENSORS, TENSORS),
        (TENSORS, {"a": TENSORS[0]}),
        ([],),
        ({},),
        ([X, 1],),
        ([[X]],),
        ({1: X},),
    ],
)
def test_containers_that_only_a_pickle_understands(args: tuple[Any, ...]) -> None:
    """Who is whom must be the same there: not everything of that can be said without a pickle."""
    packed = pack_arguments(args, {})
    assert packed.payload.format is PayloadFormat.PICKLE
    content = unpack(packed.payload, packed.frames, list(packed.tensors))
    there, _ = unpack_call("m:f", packed.payload, content)[1:]
    assert repr(there) == repr(args)


def test_a_tensor_after_the_container_that_it_is_in() -> None:
    packed = pack_arguments(([X], X), {})
    assert len(packed.tensors) == 1
    content = unpack(packed.payload, packed.frames, [torch.ones(1)])
    (there, again), _ = unpack_call("m:f", packed.payload, content)[1:]
    assert there[0] is again


class Color(enum.IntEnum):
    """Looks like a number, and is none of the types that go without a pickle."""

    RED = 1


class Name(str):
    """Nor is this."""


@pytest.mark.parametrize("value", [Color.RED, Name("x"), [1], (1,), {"a": 1}, 1 << 64, "\ud800", 1j])
def test_all_else_is_pickled(value: Any) -> None:
    assert encode_value(value) is None
    assert encode_arguments((value,), {}) is None
    packed = pack_arguments((value, 1), {})
    assert packed.payload.format is PayloadFormat.PICKLE
    content = unpack(packed.payload, packed.frames, [])
    (there, _), _ = unpack_call("m:f", packed.payload, content)[1:]
    assert same(value, there)


@given(st.binary(max_size=40))
@example(b"\xa1\xff")  # text that is no UTF-8
@example(b"\x93\x91\xa1\xff\x90\x90")  # as an argument
@example(b"\x91" * 100_000)  # containers too deep
def test_garbage_is_refused(data: bytes) -> None:
    for decode in (decode_value, lambda data: decode_arguments(data, TENSORS)):
        try:
            decode(data)
        except ProtocolError:
            pass


@pytest.mark.parametrize(
    ("values", "names", "places"),
    [
        ([1], ["a", "b"], []),
        ([None], [], [0]),
        ([None], [], [1, 0, 0, 1]),
        ([None], [], [0, 0, 2, 1]),
        ([None], [], [-1, 0, 0, 1]),
        ([None], [], [0, 0, 0, 0]),
        ([None], [], [0, 1, 0, 3]),
        ([None], [], [0, 1, 1, 2]),
        ([None], [], [0, 4, 0, 2]),
        ([None], [], [0, 3, 0, 2]),
        ([["a"]], [], [0, 3, 0, 2]),
        ([["a", "a"]], [], [0, 3, 0, 2]),
        ([["a", 1]], [], [0, 3, 0, 2]),
        ([["a", ["b"]]], [], [0, 3, 0, 2]),
    ],
)
def test_what_does_not_fit_is_refused(values: Any, names: Any, places: Any) -> None:

    with pytest.raises(ProtocolError):
        decode_arguments(msgspec.msgpack.encode((values, names, places)), TENSORS)
