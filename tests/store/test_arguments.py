"""Keys of any bytes: each has one text, and text that a store tells of can be given back."""

from __future__ import annotations

import os

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zmqgrad.errors import ConfigurationError
from zmqgrad.store.arguments import as_key, as_keys
from zmqgrad.wire.messages import MAX_KEY

keys = st.one_of(st.binary(max_size=12), st.text(max_size=6).map(str.encode))


@given(keys, keys)
@example(b"\x80", "\U0010ff80".encode())
@example(b"\xed\xb2\x80", b"\x80")
def test_other_bytes_are_another_key(one: bytes, other: bytes) -> None:
    assert (as_key(one) == as_key(other)) == (one == other)
    assert as_key(as_key(one)) == as_key(one)
    assert as_key(os.fsdecode(one)) == as_key(one), "as the name of a file"
    assert as_key(b"p/" + one) == "p/" + as_key(one), "a view finds the same key as the store beneath"
    as_key(one).encode()


@given(st.text(st.characters(max_codepoint=0x10FF7F, exclude_categories=["Cs"]), max_size=8))
def test_text_and_its_bytes_are_the_same_key(text: str) -> None:
    assert as_key(text) == as_key(text.encode()) == as_key(bytearray(text.encode())) == text


@given(st.lists(keys | st.text(max_size=6), max_size=5))
def test_as_keys_equals_as_key_for_each(several: list[bytes | str]) -> None:
    assert as_keys(several) == tuple(map(as_key, several))


def test_one_bad_key_among_good_ones_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=f"a key of {MAX_KEY + 1} characters"):
        as_keys(["a", "b" * (MAX_KEY + 1)])
    with pytest.raises(TypeError, match="a key must be a str, not int"):
        as_keys(["a", 1])
