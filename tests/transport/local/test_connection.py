"""Connections of the fast path: packets arrive whole, once and in order; strangers are refused."""

from __future__ import annotations

import os
import secrets
import select
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from tests.support.waiting import eventually
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport import local
from zmqgrad.transport.local import MAX_PACKET_BYTES, LocalConnection, LocalListener
from zmqgrad.transport.local.connection import PROTOCOL, WELCOME, Hello, send_with_gil
from zmqgrad.transport.local.writer import BacklogWriter

pytestmark = pytest.mark.skipif(not local.supported(), reason="the fast path is Linux's")

WAIT = 20.0
JOB = b"job"


class Site:
    """A listener, read by the test."""

    def __init__(self) -> None:
        self.endpoint = f"ipc://@zmqgrad-test-{secrets.token_hex(8)}"
        self.poll = select.poll()
        self.ended: list[LocalConnection] = []
        self.listener = LocalListener(self.endpoint, self.poll, JOB, 7, on_closed=self.ended.append)
        self.packets: list[bytes] = []
        self.backlogged: list[LocalConnection] = []
        self.opened: list[LocalConnection] = []

    def read(self, milliseconds: int = 0) -> None:
        """Read what is there, or comes within that time."""
        ready = self.poll.poll(milliseconds)
        while ready:
            for number, _ in ready:
                self.packets += self.listener.read(number)
            ready = self.poll.poll(0)

    def connect(self, job: bytes = JOB, incarnation: int = 7) -> LocalConnection:
        connection = local.connect(self.endpoint, job, incarnation, self.backlogged.append)
        self.opened.append(connection)
        return connection

    def ready(self) -> LocalConnection:
        """A connection that was accepted."""
        connection = self.connect()
        assert not connection.is_ready()
        self.read()
        assert connection.is_ready()
        return connection

    def close(self) -> None:
        for connection in self.opened:
            connection.close()
            connection.close()
        self.listener.close()
        self.listener.close()


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


@pytest.mark.parametrize("size", [1, 2, 255, 256, 4096, MAX_PACKET_BYTES - 1, MAX_PACKET_BYTES])
@pytest.mark.parametrize("keep_gil", [False, True])
def test_a_packet_arrives_whole(site: Site, size: int, keep_gil: bool) -> None:
    connection, packet = site.ready(), os.urandom(size)
    for each in (packet, bytearray(packet)):
        connection.send(each, keep_gil=keep_gil)
    site.read()
    assert site.packets == [packet, packet]
    assert (connection.sent, connection.sent_bytes) == (2, 2 * size)


def test_both_ends_can_send(site: Site) -> None:
    connection = site.ready()
    connection.send(b"question")
    site.read()
    (other,) = site.listener.connections.values()
    other.send(b"reply")
    assert connection.receive() == b"reply"
    with pytest.raises(BlockingIOError):
        connection.receive()


def test_packets_of_several_connections_do_not_mix(site: Site) -> None:
    connections = [site.ready() for _ in range(5)]
    for n in range(40):
        for i, connection in enumerate(connections):
            connection.send(b"%d %d" % (i, n))
    while len(site.packets) < 200:
        site.read(1000)
    for i in range(5):
        own = [p for p in site.packets if p.startswith(b"%d " % i)]
        assert own == [b"%d %d" % (i, n) for n in range(40)]


def test_what_the_kernel_does_not_accept_waits_in_order(site: Site) -> None:
    """Thousands of packets to a peer that does not read: none is lost or reordered, and no sender blocks."""
    connection, count = site.ready(), 0
    while connection.backlog() < 1000:
        connection.send(b"%d" % count, keep_gil=bool(count % 2))
        count += 1
    assert site.backlogged == [connection], "told once"
    assert count > 1000
    assert not connection.flush()
    while len(site.packets) < count:
        site.read()
        connection.flush()
    assert site.packets == [b"%d" % n for n in range(count)]
    assert connection.backlog() == 0
    connection.send(b"after")
    site.read()
    assert site.packets[-1] == b"after"


def test_a_writer_flushes_what_waits(site: Site) -> None:
    writer = BacklogWriter("w")
    connections = [local.connect(site.endpoint, JOB, 7, writer.add) for _ in range(3)]
    site.read()
    assert all(connection.is_ready() for connection in connections)
    for n in range(3000):
        for i, connection in enumerate(connections):
            connection.send(b"%d %d" % (i, n))
    deadline = Deadline.after(WAIT)
    while len(site.packets) < 9000:
        site.read(100)
        assert not deadline.passed()
    for i in range(3):
        own = [p for p in site.packets if p.startswith(b"%d " % i)]
        assert own == [b"%d %d" % (i, n) for n in range(3000)]
    writer.close()
    writer.close()
    assert writer.join(Deadline.after(WAIT)) == []
    writer.add(connections[0])
    for connection in connections:
        connection.close()


def test_the_writer_drops_the_backlog_of_a_closed_peer(site: Site) -> None:
    writer = BacklogWriter("w")
    gone = local.connect(site.endpoint, JOB, 7, writer.add)
    site.read()
    assert gone.is_ready()
    while not gone.backlog():
        gone.send(b"x" * MAX_PACKET_BYTES)
    site.listener.close()
    eventually(gone.backlog, lambda backlog: not backlog, WAIT)
    with pytest.raises(OSError, match=r"pipe|reset|descriptor"):
        gone.send(b"y")
    writer.close()
    assert writer.join(Deadline.after(WAIT)) == []


def test_threads_that_send_at_once_keep_their_own_order(site: Site) -> None:
    connection = site.ready()
    start = threading.Barrier(5)

    def send(i: int) -> None:
        start.wait(WAIT)
        for n in range(1000):
            connection.send(b"%d %d" % (i, n))

    threads = [threading.Thread(target=send, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    start.wait(WAIT)
    deadline = Deadline.after(WAIT)
    while len(site.packets) < 4000:
        site.read(1)
        connection.flush()
        assert not deadline.passed()
    for thread in threads:
        thread.join(WAIT)
    for i in range(4):
        own = [p for p in site.packets if p.startswith(b"%d " % i)]
        assert own == [b"%d %d" % (i, n) for n in range(1000)]


# ---- who is let in
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("job", "incarnation"), [(b"another", 7), (JOB, 8), (b"", 0)])
def test_a_process_of_another_job_is_refused(
    site: Site, job: bytes, incarnation: int, caplog: pytest.LogCaptureFixture
) -> None:
    connection = site.connect(job, incarnation)
    site.read()
    with pytest.raises(OSError, match="another job"):
        connection.is_ready()
    assert "refused a connection that was meant for another job or process" in caplog.text
    assert site.ready().is_ready()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100,
        msgspec.msgpack.encode(["zmqgrad-local-0", JOB, 7]),
        msgspec.msgpack.encode([PROTOCOL, JOB]),
        msgspec.msgpack.encode(Hello(PROTOCOL, JOB, 7)) + b"?",
        b"x" * 10_000,
    ],
)
def test_a_foreign_protocol_is_refused(site: Site, said: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(local.unix_name(site.endpoint))
        stranger.send(said)
        site.read()
        assert stranger.recv(100) == b""
    assert site.ready().is_ready()


def test_a_packet_that_is_too_large_ends_its_connection_alone(site: Site) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(local.unix_name(site.endpoint))
        stranger.send(msgspec.msgpack.encode(Hello(PROTOCOL, JOB, 7)))
        site.read()
        assert stranger.recv(100) == WELCOME
        stranger.send(b"x" * (MAX_PACKET_BYTES + 1))
        site.read()
        assert stranger.recv(100) == b""
    assert len(site.ended) == 1
    assert site.packets == []


def test_a_peer_that_hangs_up_is_forgotten(site: Site) -> None:
    connection = site.ready()
    connection.send(b"last")
    connection.close()
    site.read()
    site.read()
    assert site.packets == [b"last"]
    assert site.listener.connections == {}
    assert len(site.ended) == 1


def test_a_client_that_closes_before_accept_leaves_nothing(site: Site) -> None:
    for _ in range(3):
        site.connect().close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(local.unix_name(site.endpoint))
        site.read()
        site.read()
        assert site.listener.connections == {}
        assert site.ready().is_ready()


def test_no_listener() -> None:
    with pytest.raises(OSError, match="refused"):
        local.connect(f"ipc://@zmqgrad-{secrets.token_hex(8)}", JOB, 7, lambda _: None)


def test_the_listener_can_end_a_connection(site: Site) -> None:
    connection = site.ready()
    (accepted,) = site.listener.connections.values()
    site.listener.drop(accepted)
    site.listener.drop(accepted)
    assert connection.receive() == b""
    with pytest.raises(OSError, match=r"pipe|reset|descriptor"):
        connection.send(b"x")


def test_sending_to_a_closed_peer_raises(site: Site) -> None:
    connection = site.ready()
    site.listener.close()
    for keep_gil in (False, True):
        with pytest.raises(OSError, match=r"pipe|reset"):
            connection.send(b"x", keep_gil=keep_gil)
    with pytest.raises(OSError, match="descriptor"):
        send_with_gil(-1, b"x")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")
def test_a_process_of_another_user_is_refused_by_both_ends(site: Site) -> None:
    os.seteuid(65534)
    try:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(local.unix_name(site.endpoint))
        theirs = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.bind(local.unix_name(f"{site.endpoint}-theirs"))
        theirs.listen()
    finally:
        os.seteuid(0)
    site.read()
    assert stranger.recv(10) == b""
    with pytest.raises(PermissionError, match="another user"):
        local.connect(f"{site.endpoint}-theirs", JOB, 7, lambda _: None)
    stranger.close()
    theirs.close()
