"""The short way to write and to read says what the long way says, or nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.messages import messages
from zmqgrad.errors import ProtocolError
from zmqgrad.transport.requests.whole import read, write
from zmqgrad.transport.zmtp import HEAD_ROOM, Unpacker, opening, write_head
from zmqgrad.wire.codec import decode, encode
from zmqgrad.wire.messages import Message, StoreAdd, StoreGet, StoreSet, StoreValue

NUMBERS = st.integers(0, (1 << 64) - 1)
SIZES = st.sampled_from([0, 1, 200, 224, 225, 226, 227, 255, 256, 70_000])


def read_the_long_way(data: bytes) -> tuple[int, int, Message] | None:
    """What an unpacker at rest makes of ``data``, if that is one message of which all is well."""
    unpacker = Unpacker("DEALER")
    unpacker.feed(opening("DEALER"))
    try:
        frames = unpacker.feed(data)
        if unpacker.large is not None:
            room = unpacker.room
            assert not len(room), "it is all there"
            frames = unpacker.filled(0)
        if len(frames) != 1 or frames[0] is None or not unpacker.at_rest:
            return None
        envelope, message = decode(frames[0])
    except ProtocolError:
        return None
    return envelope.incarnation, envelope.message_id, message


@given(messages() | SIZES.map(lambda n: StoreValue(bytes(n))) | SIZES.map(lambda n: StoreSet("k", bytes(n))),
       NUMBERS, NUMBERS)  # fmt: skip
def test_a_message_is_written_as_ever_and_read_again(message: Message, line: int, number: int) -> None:
    data = write(message, line, number)
    assert data == write_head(encode(message, 0, line, number, room=HEAD_ROOM))
    assert read(bytes(data)) == (line, number, message)


def test_messages_of_all_lengths_are_read_again() -> None:
    """That of 514 bytes, too, which fits its head as well if that is taken for a short one."""
    for length in range(1024):
        message = StoreValue(bytes(length))
        assert read(bytes(write(message, 1, 2))) == (1, 2, message), length


@given(messages(), st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=4), st.data())
def test_damaged_bytes_are_left_to_who_can_tell(
    message: Message, damage: list[tuple[int, int]], data: st.DataObject
) -> None:
    said = bytearray(write(message, 1, 2))
    for place, value in damage:
        said[place % len(said)] = value
    cut = data.draw(st.integers(0, len(said)))
    for candidate in (bytes(said), bytes(said[:cut]), bytes(said) + bytes(said[:cut])):
        found = read(candidate)
        if found is not None:
            assert found == read_the_long_way(candidate)


GET, SET = bytes(write(StoreGet("a", 1.0), 1, 2)), bytes(write(StoreSet("a", bytes(300)), 1, 2))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00\x00",
        b"GET / HTTP/1.1\r\n\r\n" + bytes(40),
        GET * 2,
        GET[:-1],
        b"\x01" + GET[1:],  # more frames follow
        b"\x04" + GET[1:],  # a command
        b"\x03" + SET[1:],
        GET.replace(b"zg\x01\x00", b"zg\x02\x00"),
        GET.replace(b"zg\x01\x00", b"zg\x01\x01"),  # a lane
    ],
)
def test_what_is_no_single_message_is_not_read(data: bytes) -> None:
    assert read(data) is None


@pytest.mark.parametrize("message", [StoreGet("half \ud800", 1.0), StoreAdd("k", 1 << 70)])
def test_what_cannot_be_written_is_said_as_ever(message: Message) -> None:
    with pytest.raises(ProtocolError) as long_way:
        encode(message, 0, 1, 2)
    with pytest.raises(ProtocolError) as short_way:
        write(message, 1, 2)
    assert str(short_way.value) == str(long_way.value)
