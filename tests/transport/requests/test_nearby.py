"""The shorter way of one host: taken where it may be, and nobody is worse off where it may not."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.transport.requests.test_requests import PATIENCE, Running
from zmqgrad.errors import ClosedError
from zmqgrad.transport.requests import line as line_module
from zmqgrad.transport.requests import nearby, newcomers
from zmqgrad.transport.requests.client import RequestClient
from zmqgrad.transport.requests.nearby import Nearby, dial_nearby, shown
from zmqgrad.transport.security import keys_of
from zmqgrad.transport.zmtp import GREETING_SIZE, Unpacker, opening
from zmqgrad.wire.messages import StoreGet, StoreValue

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets have names without files on Linux")

UNIX, TCP = socket.AF_UNIX, socket.AF_INET


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    yield made
    made.stop()


def way_of(client: RequestClient) -> int:
    """By which family of addresses ``client`` is connected, after it has asked for something."""
    assert client.request(StoreGet("key", 1.0), PATIENCE) == StoreValue(b"key")
    connection = client._idle[0]._socket
    assert connection is not None
    return connection.family


def asked(server: Running, endpoint: str = "") -> int:
    client = RequestClient(endpoint or server.server.endpoint)
    try:
        return way_of(client)
    finally:
        client.close()


class Relay:
    """A tunnel to ``port``: whoever connects here is carried there. Remembers what went through."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.carried = bytearray()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.open = [self.listener]
        self.threads = [threading.Thread(target=self._accept, daemon=True)]
        self.threads[0].start()

    @property
    def endpoint(self) -> str:
        return f"tcp://{shown(self.listener.getsockname())}"

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.port))
            self.open += [near, far]
            for source, sink in ((near, far), (far, near)):
                self.threads.append(threading.Thread(target=self._carry, args=(source, sink), daemon=True))
                self.threads[-1].start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self.carried += data
                sink.sendall(data)
        except OSError:
            pass
        for each in (source, sink):
            hang_up(each)

    def close(self) -> None:
        for each in self.open:
            hang_up(each)
        for thread in self.threads:
            thread.join(PATIENCE)
        for each in self.open:
            each.close()


def hang_up(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def test_who_is_of_this_host_and_user_comes_by_the_shorter_way(running: Running) -> None:
    assert asked(running) == UNIX


def test_a_tunnel_is_not_gone_around(running: Running) -> None:
    relay = Relay(running.server.port)
    try:
        assert asked(running, relay.endpoint) == TCP
        assert b"key" in relay.carried, "or somebody between could neither see nor stop what is said"
    finally:
        relay.close()


def test_with_a_secret_all_is_encrypted_by_tcp() -> None:
    keys = keys_of("s" * 32)
    running = Running(keys=keys)
    client = RequestClient(running.server.endpoint, keys=keys)
    assert way_of(client) == TCP
    assert len(running.server._newcomers._listeners) == 1
    client.close()
    running.stop()


def test_a_server_without_it_is_reached_by_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Nearby:
        raise PermissionError(1, "no unix sockets in this sandbox")

    monkeypatch.setattr(newcomers, "Nearby", refuse)
    running = Running()
    assert asked(running) == TCP
    running.stop()


def test_a_server_of_another_user_is_reached_by_tcp(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearby, "is_of_this_user", lambda connection: False)
    assert asked(running) == TCP
    assert running.server.malformed == 0, "to come and see is no offence"


def test_a_client_of_another_user_is_turned_away_to_tcp(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it thinks that it belongs: user namespaces can look different from their two sides."""
    monkeypatch.setattr(newcomers, "is_of_this_user", lambda connection: False)
    assert asked(running) == TCP


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="only root can become another user")
def test_the_kernel_tells_users_apart(running: Running) -> None:
    """In a child, as user ids are of the whole process."""
    child = os.fork()
    if not child:
        status = 1
        try:
            os.setuid(65534)
            status = 0 if asked(running) == TCP else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_next_server_at_that_port_has_a_name_of_its_own(running: Running) -> None:
    client = RequestClient(running.server.endpoint)
    assert way_of(client) == UNIX
    running.stop()
    other = Running(running.server.endpoint)
    assert way_of(client) == UNIX
    client.close()
    other.stop()


def test_who_was_turned_away_tries_again_the_next_time(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = RequestClient(running.server.endpoint)
    with monkeypatch.context() as patched:
        patched.setattr(newcomers, "is_of_this_user", lambda connection: False)
        assert way_of(client) == TCP
    running.stop()
    other = Running(running.server.endpoint)
    assert way_of(client) == UNIX
    client.close()
    other.stop()


def test_closing_ends_a_request_there(running: Running) -> None:
    client = RequestClient(running.server.endpoint)
    raised: list[Exception] = []

    def ask() -> None:
        try:
            client.request(StoreGet("park", 60.0), 60.0)
        except ClosedError as e:
            raised.append(e)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    assert running.service.arrived.acquire(timeout=PATIENCE)
    client.close()
    thread.join(PATIENCE)
    assert len(raised) == 1
    assert running.service.gone_clients.acquire(timeout=PATIENCE)


def test_strangers_count_there_as_well(running: Running) -> None:
    invited = told(running)
    with socket.create_connection(("127.0.0.1", running.server.port)) as connection:
        stranger = dial_nearby(told(running, connection), connection)
        assert stranger is not None
        with stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while stranger.recv(1000):
                pass
    assert running.server.malformed == 1
    assert told(running)[:32] == invited[:32]
    assert asked(running) == UNIX


def told(running: Running, connection: socket.socket | None = None) -> bytes:
    """What the server says of the shorter way on ``connection``, or on one that is made for it."""
    if connection is None:
        with socket.create_connection(("127.0.0.1", running.server.port)) as connection:
            return told(running, connection)
    unpacker = Unpacker("ROUTER")
    connection.sendall(opening("DEALER")[:GREETING_SIZE])
    while not unpacker.ready:
        unpacker.feed(connection.recv(1000))
    return unpacker.nearby


@pytest.mark.parametrize(
    "spoil",
    [
        lambda said: b"",
        lambda said: said[:31],
        lambda said: said[:32],
        lambda said: b"0" * 32 + said[32:],  # where nobody listens
        lambda said: b"../../run/docker.sock\0\0\0\0\0\0\0\0\0\0\0" + said[32:],
        lambda said: said + b"0",
        lambda said: said[:32] + b"127.0.0.1:1",
    ],
)
def test_an_invitation_that_is_not_for_us_is_not_followed(
    running: Running, spoil: Callable[[bytes], bytes]
) -> None:
    with socket.create_connection(("127.0.0.1", running.server.port)) as connection:
        said = told(running, connection)
        assert dial_nearby(spoil(said), connection) is None
        reached = dial_nearby(said, connection)
        assert reached is not None
        reached.close()


def test_who_knows_nothing_of_it_is_served(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """As clients of other releases are, and ZeroMQ's own."""
    monkeypatch.setattr(line_module, "dial_nearby", lambda said, connection: None)
    assert asked(running) == TCP
