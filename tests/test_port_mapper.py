"""The port mapper: what it tells to whom, and how it limits strangers."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from zmqgrad.rendezvous import port_mapper
from zmqgrad.rendezvous.port_mapper import GREETING, NONCE, REQUEST, PortMapper, PortMapperClient
from zmqgrad.runtime.clock import Deadline

PATIENCE = 20.0


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    with serving() as (_, found):
        yield found


@contextmanager
def serving() -> Iterator[tuple[PortMapper, tuple[str, int]]]:
    listening = socket.create_server(("127.0.0.1", 0))
    where = listening.getsockname()
    with closing(PortMapper(listening)) as mapper:
        mapper.start()
        yield mapper, where


@contextmanager
def connected(address: tuple[str, int], said: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(address, PATIENCE) as client:
        client.sendall(said)
        yield client


@contextmanager
def asking(address: tuple[str, int]) -> Iterator[PortMapperClient]:
    with connected(address, REQUEST) as client:
        assert client.recv(len(GREETING), socket.MSG_PEEK) == GREETING
        with closing(PortMapperClient(client)) as asks:
            yield asks


def is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(100) == b""
    except ConnectionResetError:
        return True


def read(client: PortMapperClient, key: str) -> str | None:
    return client.read(key, Deadline.after(PATIENCE))


def test_a_client_reads_what_is_published_before_it_asks_and_after() -> None:
    with serving() as (mapper, address):
        mapper.publish("rpc/1", "4001")
        mapper.publish("rpc/2", "4002")
        with asking(address) as client:
            assert read(client, "rpc/2") == "4002"
            later = threading.Timer(0.05, mapper.publish, ("rpc/3", "!4003"))
            later.start()
            assert read(client, "rpc/3") == "!4003"
            later.join()
        mapper.withdraw(["rpc/1", "rpc/3"])
        assert mapper.published() == {"rpc/2": "4002"}


@contextmanager
def forging(reply: bytes, pause: float = 0.0) -> Iterator[tuple[PortMapperClient, threading.Event]]:
    """A client of a server that takes its time for each byte, and whether that has sent all."""
    theirs, ours = socket.socketpair()
    done, stop = threading.Event(), threading.Event()

    def send() -> None:
        with theirs:
            for byte in reply:
                theirs.sendall(bytes([byte]))
                stop.wait(pause)
        done.set()

    thread = threading.Thread(target=send)
    thread.start()
    with closing(PortMapperClient(ours)) as client:
        yield client, done
        stop.set()
        thread.join()


def test_who_sends_byte_by_byte_does_not_delay_the_deadline() -> None:
    with forging(bytes(200), pause=0.1) as (client, done):
        assert client.read("rpc/1", Deadline.after(0.3)) is None
        assert not done.is_set()


def test_a_line_that_is_cut_off_tells_no_port() -> None:
    with forging(GREETING + b"rpc/1=400") as (client, _):
        assert read(client, "rpc/1") is None


def test_a_client_learns_that_it_ends() -> None:
    with serving() as (mapper, address), asking(address) as first, asking(address) as second:
        assert first.read("rpc/1", Deadline.after(0.05)) is None, "it has not ended yet"
        end = threading.Timer(0.05, mapper.close)
        end.start()
        assert read(second, "rpc/1") is None
        second.wait_closed(Deadline.after(PATIENCE))
        end.join()


def test_a_client_of_torch_hears_nothing_until_it_ends() -> None:
    with serving() as (mapper, address):
        mapper.publish("rpc/1", "4001")
        ping = REQUEST.replace(NONCE, os.getpid().to_bytes(4, "little"))
        with connected(address, ping) as client:
            with asking(address) as after:
                assert read(after, "rpc/1") == "4001"
            client.settimeout(0.05)
            with pytest.raises(TimeoutError):
                client.recv(1)
            client.settimeout(PATIENCE)
            mapper.close()
            assert is_closed(client)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(9), REQUEST + b"more"])
def test_what_is_no_request_is_refused(address: tuple[str, int], said: bytes) -> None:
    with connected(address, said) as client:
        while not is_closed(client):
            pass


def test_the_oldest_of_too_many_connections_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_mapper, "MAX_CONNECTIONS", 2)
    with (
        serving() as (mapper, address),
        connected(address) as first,
        connected(address) as second,
        connected(address) as third,
    ):
        assert is_closed(first)
        mapper.publish("rpc/1", "4001")
        with asking(address) as client:
            assert is_closed(second)
            assert read(client, "rpc/1") == "4001"
        third.settimeout(0.05)
        with pytest.raises(TimeoutError):
            third.recv(1)
