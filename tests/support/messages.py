"""Messages drawn at random, from what the structs' annotations say of their fields."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from zmqgrad.wire.messages import BY_TYPE, Message

LONGEST = 5
"""Most elements of a sequence: bounds as such have tests of their own."""


def messages() -> st.SearchStrategy[Message]:
    """Any message whatever."""
    return st.sampled_from(list(BY_TYPE.values())).flatmap(messages_of)


@cache
def messages_of(cls: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Instances of ``cls`` with every field drawn."""
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    # Deferred, for a struct may hold others of its kind.
    return st.builds(cls, **{f.name: st.deferred(lambda f=f: _of(f.type)) for f in info.fields})  # type: ignore[misc]


def _at_most(length: int, kind: inspect.StrType | inspect.BytesType | inspect.VarTupleType) -> int:
    return length if kind.max_length is None else min(length, kind.max_length)


def _of(kind: inspect.Type) -> st.SearchStrategy[Any]:
    if isinstance(kind, inspect.StructType):
        return messages_of(kind.cls)
    if isinstance(kind, inspect.UnionType):
        return st.one_of([_of(k) for k in kind.types])
    if isinstance(kind, inspect.VarTupleType):
        size = st.integers(0, _at_most(LONGEST, kind)) | st.just(0)  # most often short: parts hold parts
        return size.flatmap(lambda n: st.tuples(*[_of(kind.item_type)] * n))
    if isinstance(kind, inspect.TupleType):
        return st.tuples(*map(_of, kind.item_types))
    if isinstance(kind, inspect.EnumType):
        return st.sampled_from(list(kind.cls))
    if isinstance(kind, inspect.IntType):
        low = -(1 << 63) if kind.ge is None else kind.ge
        high = (1 << 64) - 1 if kind.le is None else kind.le
        return st.integers(low, high if kind.lt is None else kind.lt - 1)
    if isinstance(kind, inspect.FloatType):
        return st.floats(min_value=kind.ge, allow_nan=False)
    if isinstance(kind, inspect.StrType):
        return st.text(max_size=_at_most(20, kind))
    if isinstance(kind, inspect.BytesType):
        return st.binary(max_size=_at_most(40, kind))
    if isinstance(kind, inspect.BoolType):
        return st.booleans()
    if isinstance(kind, inspect.NoneType):
        return st.none()
    raise TypeError(f"no strategy for {kind}: a field of a new kind needs one here")
