"""The envelope: what is written is read again, and nothing else is."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.errors import ProtocolError
from zmqgrad.wire import frames
from zmqgrad.wire.frames import (
    ENVELOPE_BYTES,
    ENVELOPE_FORMAT,
    MAGIC,
    VERSION,
    Envelope,
    read_envelope,
    write_session,
)

envelopes = st.builds(
    Envelope,
    st.integers(0, 0xFFFF),
    st.integers(0, 0xFFFF),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, 0xFF),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, (1 << 64) - 1),
)


def written(envelope: Envelope, header: bytes = b"") -> bytearray:
    """The first frame that has this envelope and header."""
    frame = bytearray(ENVELOPE_BYTES) + header
    ENVELOPE_FORMAT.pack_into(frame, 0, MAGIC, VERSION, *envelope)
    return frame


@given(envelopes, st.binary(max_size=30))
def test_what_is_written_is_read(envelope: Envelope, header: bytes) -> None:
    frame = written(envelope, header)
    assert read_envelope(frame) == envelope
    assert read_envelope(bytes(frame)) == envelope
    assert read_envelope(memoryview(frame)) == envelope
    assert frame[ENVELOPE_BYTES:] == header


def test_the_layout_is_the_one_drawn() -> None:
    """Byte for byte as the module's docstring draws it: a change here needs a new version."""
    envelope = Envelope(
        0x1234,
        0x5678,
        0x0102030405060708,
        0x1112131415161718,
        0x9A,
        requests=0x5152535455565758,
        replies=0x6162636465666768,
    )
    frame = written(envelope)
    first = "7a 67 04 12 34 56 78 01 02 03 04 05 06 07 08 11 12 13 14 15 16 17 18 9a"
    last = eights(0x51, 0x61)
    assert frame.hex(" ") == first + " 00" * 24 + last
    write_session(frame, 0x2122232425262728, 0x3132333435363738, 0x4142434445464748)
    assert frame.hex(" ") == first + eights(0x21, 0x31, 0x41) + last
    assert ENVELOPE_BYTES == 64


def eights(*starts: int) -> str:
    """Eight bytes in ascending order from each of ``starts``, in hexadecimal."""
    return "".join(f" {n:02x}" for start in starts for n in range(start, start + 8))


@given(st.binary(max_size=ENVELOPE_BYTES - 1))
def test_what_is_too_short_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"first frame of {len(frame)} bytes"):
        read_envelope(frame)


def test_what_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = written(Envelope(1, 2, 3, 4), bytes(100))
    monkeypatch.setattr(frames, "MAX_HEADER_BYTES", 100)
    with pytest.raises(ProtocolError, match="first frame of 164 bytes"):
        read_envelope(frame)


@given(st.binary(min_size=ENVELOPE_BYTES, max_size=200).filter(lambda b: not b.startswith(b"zg")))
def test_foreign_bytes_are_recognized(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="does not speak zmqgrad"):
        read_envelope(frame)


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_version_is_refused_with_both_named(version: int) -> None:
    frame = written(Envelope(1, 2, 3, 4))
    frame[2] = version
    with pytest.raises(ProtocolError, match=f"version {version}, this side speaks 4"):
        read_envelope(frame)


def test_a_number_that_does_not_fit_is_not_written() -> None:
    with pytest.raises(struct.error):
        written(Envelope(1, 1 << 16, 3, 4))
