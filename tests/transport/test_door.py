"""The receiver's door: small messages of this host, read without libzmq, beside all else at the ROUTER."""

from __future__ import annotations

import socket as sockets
from collections.abc import Iterator

import pytest

from tests.transport.contract import Box, Office, content, office_of
from tests.transport.test_contract import OverZmq
from zmqgrad.transport.door import door_address, unix_address
from zmqgrad.transport.zmtp import opening
from zmqgrad.wire.codec import encode
from zmqgrad.wire.messages import Hello


@pytest.fixture
def office() -> Iterator[Office]:
    with office_of(OverZmq("ipc")) as opened:
        yield opened


@pytest.fixture
def stranger() -> Iterator[sockets.socket]:
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as opened:
        opened.settimeout(20)
        yield opened


def knock(stranger: sockets.socket, box: Box) -> None:
    """Connect to the door of ``box``, and hear what it says first."""
    stranger.connect(unix_address(door_address(box.mailbox.endpoints[0])))
    expected = len(opening("DEALER"))
    while expected:
        expected -= len(stranger.recv(expected))


def frame(message_id: int) -> bytes:
    """A message as it travels."""
    message = bytes(encode(Hello("x"), 7, 1, message_id))
    return bytes([0, len(message)]) + message


def test_a_message_comes_in_pieces_or_several_at_once(office: Office, stranger: sockets.socket) -> None:
    box = office.open(0)
    knock(stranger, box)
    for byte in opening("DEALER") + frame(1):
        stranger.sendall(bytes([byte]))
    stranger.sendall(frame(2) + frame(3))
    assert [i.envelope.message_id for i in box.take(3)] == [1, 2, 3]


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", opening("ROUTER"), frame(1)])
def test_who_speaks_another_language_is_sent_away(
    office: Office, stranger: sockets.socket, said: bytes
) -> None:
    a, b = office.pair()
    knock(stranger, a)
    stranger.sendall(said.ljust(200, b"\1"))
    assert stranger.recv(1) == b""
    b.mailbox.send(0, Hello("x"), 2)
    assert a.take()[0].envelope.message_id == 2


def test_garbage_in_a_message_is_counted_and_dropped(office: Office, stranger: sockets.socket) -> None:
    box = office.open(0)
    knock(stranger, box)
    stranger.sendall(opening("DEALER") + b"\0\5trash" + frame(4))
    assert box.take()[0].envelope.message_id == 4
    assert box.mailbox.statistics()["malformed"] == 1


def test_what_comes_by_the_door_and_at_the_router_is_all_read(office: Office) -> None:
    a, b = office.pair()
    count = 500
    for message_id in range(1, count + 1):
        b.mailbox.send(0, Hello("x"), message_id, [b"by socket"] if message_id % 2 else ())
    arrived = a.take(count)
    assert sorted(i.envelope.message_id for i in arrived) == list(range(1, count + 1))
    assert all(content(i) == ([b"by socket"] if i.envelope.message_id % 2 else []) for i in arrived)


def test_where_there_can_be_no_door_all_comes_at_the_router(
    office: Office, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("zmqgrad.transport.mailbox.door_address", lambda endpoint, number=0: "ipc:///no/such")
    a, b = office.pair()
    assert "cannot listen at ipc:///no/such" in caplog.text
    for message_id in (1, 2, 3):
        b.mailbox.send(0, Hello("x"), message_id)
    assert [i.envelope.message_id for i in a.take(3)] == [1, 2, 3]
