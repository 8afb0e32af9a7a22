"""Every decoder over the kept corpus, and over bytes at random: a typed error, or none; and little memory.

``make fuzz`` searches further, guided by coverage, and keeps what failed; put that into the corpus.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).with_name("corpus")
MAX_MEMORY_BYTES = 8 << 20
"""What a decoder may allocate for an input of the corpus, none of which is larger than a few kB."""

VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip
INPUTS = st.one_of(
    st.binary(max_size=300),
    VALUES.map(msgspec.msgpack.encode),
    VALUES.map(repr).map(str.encode),
    st.tuples(st.binary(max_size=2), VALUES.map(msgspec.msgpack.encode)).map(b"".join),
    st.lists(st.binary(max_size=60).map(lambda b: bytes([len(b)]) + b), max_size=4).map(b"".join),
)


@pytest.mark.parametrize("name", TARGETS)
@given(data=INPUTS)
def test_any_bytes_give_a_typed_error(name: str, data: bytes) -> None:
    TARGETS[name](data)


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_gives_typed_errors_in_little_memory(name: str) -> None:
    inputs = [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
    assert inputs, f"tests/fuzz/corpus/{name} is empty"
    for data in inputs:
        TARGETS[name](data)  # the first time, caches fill
        tracemalloc.start()
        TARGETS[name](data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MAX_MEMORY_BYTES, f"{peak} bytes for {data[:60]!r}"


def test_the_corpus_has_no_other_targets() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
