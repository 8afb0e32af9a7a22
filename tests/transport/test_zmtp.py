"""ZMTP by itself, cut into pieces of any size; libzmq as the other end is in requests/test_requests.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.errors import ProtocolError
from zmqgrad.transport.zmtp import HEAD_ROOM, LARGE, Unpacker, opening, write_head
from zmqgrad.wire.frames import MAX_HEADER


def message(body: bytes) -> bytes:
    return bytes(write_head(bytearray(HEAD_ROOM) + body))


def several(*frames: bytes) -> bytes:
    heads = [b"\x01" + bytes([len(frame)]) + frame for frame in frames[:-1]]
    return b"".join(heads) + message(frames[-1])


def feed(unpacker: Unpacker, data: bytes) -> list[bytes | None]:
    """As a socket does, for large frames too."""
    found: list[bytes | None] = []

    def take(frames: list[bytes | memoryview | None]) -> None:
        found.extend(None if frame is None else bytes(frame) for frame in frames)

    while data:
        if unpacker.large is None:
            take(unpacker.feed(data))
            break
        room = unpacker.room
        size = min(len(room), len(data))
        room[:size] = data[:size]
        take(unpacker.filled(size))
        data = data[size:]
    return found


SIZES = st.sampled_from([0, 1, 2, 255, 256, 1000, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE])


@given(
    st.lists(st.one_of(SIZES, st.none()), max_size=6),
    st.lists(st.integers(1, 2 * LARGE), max_size=20),
    st.booleans(),
)
def test_what_was_sent_arrives_however_it_is_cut(
    sizes: list[int | None], cuts: list[int], ping: bool
) -> None:
    expected: list[bytes | None] = []
    data = opening("DEALER")
    for n, size in enumerate(sizes):
        expected.append(None if size is None else bytes([n]) * size)
        data += several(b"a", b"", b"b" * 200) if size is None else message(bytes([n]) * size)
        data += b"\x04\x0b\x04PING\x00\x00abcd" if ping else b""
    unpacker, found = Unpacker("DEALER"), []
    for cut in [*cuts, len(data)]:
        found += feed(unpacker, data[:cut])
        data = data[cut:]
    assert found == expected
    assert unpacker.ready
    assert bytes(unpacker.answers) == b"\x04\x09\x04PONGabcd" * (len(sizes) if ping else 0)


def test_byte_by_byte() -> None:
    unpacker, found = Unpacker("ROUTER"), []
    for byte in opening("ROUTER") + message(b"x" * 300) + message(b"") + message(b"y"):
        found += feed(unpacker, bytes([byte]))
    assert found == [b"x" * 300, b"", b"y"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", r"first bytes are b'GET / HTTP/1\.1.*does not speak ZMTP"),
        (b"\x16\x03\x01\x02\x00\x01", "does not speak ZMTP"),
        (b"\xff" + bytes(8) + b"\x7e" + bytes(54), "does not speak ZMTP"),
        (opening("DEALER")[:10] + b"\x01" + opening("DEALER")[11:], "version 1 of ZMTP"),
        (opening("DEALER").replace(b"NULL", b"CURV"), r"wants the mechanism b'CURV'"),
        (opening("SUB"), r"the other end is a SUB socket \(expected DEALER\)"),
        (opening("DEALER")[:64] + message(b"x"), "a message before READY"),
        (opening("DEALER")[:64] + message(b"x" * LARGE), "a message before READY"),
        (opening("DEALER") + b"\x08\x00", "a frame cannot begin with 0x08"),
        (opening("DEALER") + b"\x05\x00", "a frame cannot begin with 0x05"),
        (opening("DEALER") + b"\x02" + (MAX_HEADER + 1).to_bytes(8, "big"), r"a frame of \d+ bytes"),
        (opening("DEALER") + b"\x06" + (1 << 20).to_bytes(8, "big"), r"a frame of \d+ bytes"),
        (opening("DEALER")[:64] + b"\x04\x09\x05ERROR\x02no", "the other end refused: no"),
    ],
)
def test_what_is_not_ours(data: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        feed(Unpacker("DEALER"), data)


@given(st.binary(max_size=300), st.booleans())
def test_no_bytes_do_harm(data: bytes, after_opening: bool) -> None:
    unpacker = Unpacker("DEALER")
    try:
        feed(unpacker, (opening("DEALER") if after_opening else b"") + data)
    except ProtocolError:
        return
