"""The codec: every message survives the way, and no bytes whatever can do more than be refused."""

from __future__ import annotations

import re
import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.messages import messages, messages_of
from zmqgrad.errors import ProtocolError
from zmqgrad.wire import codec
from zmqgrad.wire import messages as m
from zmqgrad.wire.codec import decode, decode_all, decode_query, encode
from zmqgrad.wire.frames import ENVELOPE_BYTES, ENVELOPE_FORMAT, MAGIC, VERSION, Envelope
from zmqgrad.wire.messages import BY_TYPE, Message

FULL = (1 << 64) - 1


def raw(kind: int, header: bytes) -> bytes:
    """A first frame with a good envelope and this header."""
    return ENVELOPE_FORMAT.pack(MAGIC, VERSION, kind, 1, 2, 3, 0, 0, 0, 0, 0, 0) + header


@pytest.mark.parametrize("cls", BY_TYPE.values(), ids=lambda c: c.__name__)
@settings(max_examples=settings.default.max_examples // 3)  # for each of sixty classes
@given(data=st.data(), source=st.integers(0, 0xFFFF), numbers=st.tuples(*[st.integers(0, FULL)] * 2))
def test_every_message_survives_the_way(
    cls: type[Message], data: st.DataObject, source: int, numbers: tuple[int, int]
) -> None:
    message = data.draw(messages_of(cls))
    frame = encode(message, source, *numbers)
    envelope, again = decode(frame)
    assert envelope == Envelope(cls.TYPE, source, *numbers)
    assert again == message
    assert type(again) is cls
    assert decode_query(frame) == decode_query(bytes(frame)) == (*numbers, message)


@given(messages(), st.integers(0, FULL), st.integers(0, FULL), st.booleans())
def test_the_envelope_tells_what_was_consumed(
    message: Message, requests: int, replies: int, with_manifest: bool
) -> None:
    manifest = m.Manifest() if with_manifest else None
    frame = encode(message, 1, 2, 3, 4, manifest, (requests, replies))
    envelope = Envelope(message.TYPE, 1, 2, 3, 4, requests=requests, replies=replies)
    assert decode_all(frame) == decode_all(bytes(frame)) == (envelope, manifest, message)
    if not with_manifest:
        assert decode(bytes(frame)) == (envelope, message)


@given(messages(), messages_of(m.Manifest), st.integers(0, 255))
def test_a_manifest_travels_before_the_header(message: Message, manifest: m.Manifest, channel: int) -> None:
    frame = encode(message, 1, 2, 3, channel, manifest)
    assert decode_all(frame) == (Envelope(message.TYPE, 1, 2, 3, channel), manifest, message)
    with pytest.raises(ProtocolError, match="manifest to a reader without shared memory"):
        decode(frame)
    assert decode_all(encode(message, 1, 2, 3)) == (Envelope(message.TYPE, 1, 2, 3), None, message)


@given(messages(), messages_of(m.Manifest), st.data())
def test_a_manifest_that_is_cut_or_damaged_is_refused(
    message: Message, manifest: m.Manifest, data: st.DataObject
) -> None:
    frame = encode(message, 1, 2, 3, 0, manifest)
    with pytest.raises(ProtocolError):
        decode_all(frame[: data.draw(st.integers(0, len(frame) - 1))])
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1)):
        frame[place % len(frame)] = value
    try:
        decode_all(frame)
    except ProtocolError:
        return


@given(messages(), st.data())
def test_what_is_cut_short_is_refused(message: Message, data: st.DataObject) -> None:
    frame = encode(message, 1, 2, 3)
    cut = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(ProtocolError):
        decode(frame[:cut])


@given(messages(), st.binary(min_size=1, max_size=20))
def test_trailing_bytes_are_refused(message: Message, more: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(bytes(encode(message, 1, 2, 3)) + more)


@given(messages(), st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=8))
def test_damaged_bytes_raise_nothing_else(message: Message, damage: list[tuple[int, int]]) -> None:
    frame = encode(message, 1, 2, 3)
    for place, value in damage:
        frame[place % len(frame)] = value
    try:
        envelope, again = decode(frame)
    except ProtocolError:
        return
    assert BY_TYPE[m.MessageType(envelope.type)] is type(again)  # another message, but a message
    encode(again, envelope.source, envelope.incarnation, envelope.message_id)


@given(messages(), st.lists(st.tuples(st.integers(0, 100), st.integers(0, 255))), st.integers(0, 1 << 11))
def test_a_query_is_decoded_as_any_message(message: Message, damage: list[tuple[int, int]], end: int) -> None:
    frame = encode(message, 1, 2, 3)
    for place, value in damage:
        frame[place % len(frame)] = value
    data = bytes(frame[:end])
    try:
        envelope, expected = decode(data)
    except ProtocolError as e:
        with pytest.raises(ProtocolError, match=f"^{re.escape(str(e))}$"):
            decode_query(data)
    else:
        assert repr(decode_query(data)) == repr((envelope.incarnation, envelope.message_id, expected))


@given(st.sampled_from(list(BY_TYPE)), st.binary(max_size=200))
def test_any_header_raises_nothing_else(kind: int, header: bytes) -> None:
    try:
        _, message = decode(raw(kind, header))
    except ProtocolError:
        return
    assert type(message) is BY_TYPE[m.MessageType(kind)]


@given(st.sampled_from(list(BY_TYPE)), st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), FULL) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
))  # fmt: skip
def test_any_msgpack_raises_nothing_else(kind: int, value: object) -> None:
    try:
        _, message = decode(raw(kind, msgspec.msgpack.encode(value)))
    except ProtocolError:
        return
    assert type(message) is BY_TYPE[m.MessageType(kind)]


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"", "malformed StoreMultiGet from worker 1"),
        (b"\xdd\xff\xff\xff\xff", "malformed"),  # says four billion elements, has none
        (b"\x92\xdd\xff\xff\xff\xff", "length <= 1048576"),
        (b"\x92\x91\xa2\xff\xfe\xcb" + struct.pack("!d", 1.0), "utf-8"),
        (b"\x92\x91\xdb\xff\xff\xff\xffk", "malformed"),
        (b"\x92\x90\xcb" + struct.pack("!d", float("nan")), ">= 0"),
        (b"\x92\x90\xcb" + struct.pack("!d", -1.0), ">= 0"),
        (b"\x92\x90\xa11", r"Expected `float`, got `str` - at `\$\[1\]`"),
        (b"\x93\x90\x01\x01", "at most length 2"),
        (b"\x91\x90", "at least length 2"),
        (b"\x80", "Expected `array`"),
    ],
)
def test_the_error_names_the_defect(header: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        decode(raw(m.MessageType.STORE_MULTI_GET, header))


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(ProtocolError, match="unknown message type 0xbeef from worker 1"):
        decode(raw(0xBEEF, b"\x90"))


def test_no_type_is_known_but_those_that_have_a_name() -> None:
    for number in range(1 << 15):  # the highest bit tells of a manifest
        with pytest.raises(ProtocolError) as caught:
            decode(raw(number, b"\xc1"))  # a byte that msgpack never uses
        assert ("unknown message type" in str(caught.value)) == (number not in BY_TYPE), number


def test_parts_within_parts_without_end_are_refused() -> None:
    """A hundred thousand levels deep: refused before the stack ends, as is saying it ourselves."""
    part = m.TensorDescriptor("f", ())
    one = msgspec.msgpack.encode(part)
    frame = bytes(encode(m.Result(m.Payload(tensors=m.Tensors((part,)))), 1, 2, 3))
    deep = frame.replace(one, (one[:-1] + b"\x91") * 100_000 + one)
    with pytest.raises(ProtocolError, match="recursion"):
        decode(deep)
    for _ in range(100_000):
        part = m.TensorDescriptor("f", (), parts=(part,))
    with pytest.raises(ProtocolError, match="recursion"):
        encode(m.Result(m.Payload(tensors=m.Tensors((part,)))), 1, 2, 3)


@pytest.mark.parametrize(
    "message",
    [m.StoreNumber(1 << 64), m.StoreListKeys("\ud800"), m.StoreNumber(object())],
    ids=["number too large", "no valid text", "no number"],
)
def test_messages_that_cannot_be_encoded_are_refused(message: Message) -> None:
    with pytest.raises(ProtocolError, match=f"cannot encode {type(message).__name__}"):
        encode(message, 1, 2, 3)


@pytest.mark.parametrize(
    "numbers", [(1 << 16, 1, 1), (-1, 1, 1), (1, 1 << 64, 1), (1, 1, 1 << 64), (1, 1, -1)]
)
def test_an_envelope_that_does_not_fit_is_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ProtocolError, match="cannot encode RRefAck"):
        encode(m.RRefAck(), *numbers)


def test_a_frame_that_no_reader_would_take_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_HEADER_BYTES", 1000)
    assert len(encode(m.StoreValue(bytes(900)), 1, 2, 3)) <= 1000
    with pytest.raises(ProtocolError, match="at most 1000"):
        encode(m.StoreValue(bytes(1000)), 1, 2, 3)


def test_a_message_does_not_keep_its_frame_alive() -> None:
    frame = encode(m.StoreSet("key", b"value"), 1, 2, 3)
    _, message = decode(frame)
    frame[ENVELOPE_BYTES:] = bytes(len(frame) - ENVELOPE_BYTES)
    assert message == m.StoreSet("key", b"value")
