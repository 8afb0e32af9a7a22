"""Tensors anywhere in a value, through bytes: values, who is whom, and who shares memory with whom."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.rpc.serialization.deserializer import deserialize, deserialize_call, deserialize_tensors
from zmqgrad.rpc.serialization.serializer import serialize, serialize_call
from zmqgrad.wire.lazy_frame import materialize
from zmqgrad.wire.messages import Payload

DTYPES = [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16]
SIZES = [0, 1, 3, 100, 5000, 20_000]


@st.composite
def pools(draw: st.DrawFn) -> list[torch.Tensor]:
    """Tensors of which some are the same, some windows on others, some learn, and some have gaps."""
    pool: list[torch.Tensor] = []
    for i in range(draw(st.integers(1, 12))):
        size, dtype = draw(st.sampled_from(SIZES)), draw(st.sampled_from(DTYPES))
        t = (torch.arange(size) + i).to(dtype)
        look = draw(st.integers(0, 7))
        if look == 0 and size % 2 == 0:
            t = t.view(2, -1).t()
        elif look == 1:
            t = t[::3]
        elif look == 2 and dtype.is_floating_point:
            t = t.requires_grad_()
        elif look < 5 and pool and pool[-1].dim() == 1 and not pool[-1].requires_grad:
            t = pool[-1][len(pool[-1]) // 3 :]
        pool.append(t)
    return pool


@st.composite
def nested(draw: st.DrawFn) -> Any:
    pool = draw(pools())
    tensor = st.sampled_from(pool)
    flat = st.lists(tensor, max_size=12) | st.lists(tensor, max_size=12).map(tuple)
    leaf = (
        tensor
        | flat
        | st.dictionaries(st.text(max_size=3), tensor, max_size=9)
        | st.integers()
        | st.just(pool)
    )
    return draw(st.recursive(leaf, lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner)))


def leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves(each)


def shape_of(value: Any) -> Any:
    """All but the tensors."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.requires_grad
    if isinstance(value, (list, tuple)):
        return type(value), [shape_of(each) for each in value]
    if isinstance(value, dict):
        return [(k, shape_of(each)) for k, each in value.items()]
    return value


def who_is_whom(tensors: list[torch.Tensor]) -> list[int]:
    first: dict[int, int] = {}
    return [first.setdefault(id(t), i) for i, t in enumerate(tensors)]


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.numel() or not other.numel():
        return False

    def span(t: torch.Tensor) -> tuple[int, int]:
        reach = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        return t.data_ptr(), t.data_ptr() + reach * t.itemsize

    (begin, end), (other_begin, other_end) = span(one), span(other)
    return begin < other_end and other_begin < end


def through_bytes(payload: Payload, frames: list[Any]) -> tuple[Payload, list[bytearray]]:
    there = msgspec.msgpack.decode(msgspec.msgpack.encode(payload), type=Payload)
    return there, [bytearray(materialize(f)) for f in frames]


def as_result(value: Any) -> Any:
    packed = serialize(value)
    payload, frames = through_bytes(packed.payload, packed.frames)
    return deserialize(payload, frames, deserialize_tensors(payload, frames))


def as_argument(value: Any) -> Any:
    reference, packed = serialize_call(shape_of, (value,), {"more": 1})
    payload, frames = through_bytes(packed.payload, packed.frames)
    tensors = deserialize_tensors(payload, frames)
    _, (got,), kwargs = deserialize_call(reference, payload, frames, tensors)
    assert kwargs == {"more": 1}
    return got


def as_arguments(value: Any) -> Any:
    reference, packed = serialize_call(shape_of, (value, 1, value), None)
    payload, frames = through_bytes(packed.payload, packed.frames)
    tensors = deserialize_tensors(payload, frames)
    _, (got, _, again), _ = deserialize_call(reference, payload, frames, tensors)
    assert again is got or not isinstance(value, (torch.Tensor, list, dict))
    return got


@given(nested(), st.sampled_from([as_result, as_argument, as_arguments]))
def test_values_arrive_equal_and_share_no_more_memory_than_before(value: Any, way: Any) -> None:
    got = way(value)
    sent, there = list(leaves(value)), list(leaves(got))
    assert shape_of(got) == shape_of(value)
    assert all(map(torch.equal, there, sent))
    assert who_is_whom(there) == who_is_whom(sent)
    for i, j in itertools.combinations(range(len(there)), 2):
        if there[i] is not there[j] and overlap(there[i], there[j]):
            assert overlap(sent[i], sent[j])
    before = [t.detach().clone() for t in sent]
    for t in there:
        with torch.no_grad():
            t.zero_()
    assert all(map(torch.equal, sent, before))
