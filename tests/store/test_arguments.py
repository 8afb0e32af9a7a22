"""Keys of any bytes: each has one text, and text that a store tells of can be given back."""

from __future__ import annotations

import os

from hypothesis import example, given
from hypothesis import strategies as st

from zmqgrad.store.arguments import as_key

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
