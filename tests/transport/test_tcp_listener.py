"""Tcp addresses of libzmq's sockets: how many strangers are let in, and what happens without descriptors."""

from __future__ import annotations

import logging
import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
import zmq

from tests.support.waiting import eventually
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import StoreServer, TCPStore
from zmqgrad.transport import tcp_listener
from zmqgrad.transport.base import Inbound, PeerAddress
from zmqgrad.transport.mailbox import ZmqMailbox
from zmqgrad.transport.reader import BURST, Reader
from zmqgrad.transport.security import ZapAuthenticator, load_keys, secure_client, secure_server
from zmqgrad.transport.sockets import (
    ACCEPTED,
    DISCONNECTED,
    SocketEvent,
    SocketMonitor,
    connection_fd,
    set_up,
)
from zmqgrad.transport.tcp_listener import TcpListener
from zmqgrad.wire.messages import StorePing

SECRET = "the secret of this job, of 33 bytes"
KEYS = load_keys(SECRET)
MAX_SILENT = 8


class Jobs(Reader):
    """Leaves its jobs to the test."""

    def __init__(self) -> None:
        super().__init__("listening", lambda: None)
        self.jobs: list[Callable[[], object]] = []
        self.again: list[Callable[[], object]] = []

    def call_later(self, seconds: float, work: Callable[[], object]) -> None:
        self.jobs.append(work)

    def call_again(self, work: Callable[[], object]) -> None:
        self.again.append(work)


class Listening:
    """A ROUTER with a secret, read by the test."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        assert KEYS is not None
        self.reader = Jobs()
        self.jobs = self.reader.jobs
        self.zap = ZapAuthenticator(self.context, KEYS, self.reader)
        self.router = self.context.socket(zmq.ROUTER)
        set_up(self.router)
        secure_server(self.router, KEYS)
        self.listener = TcpListener(self.router, "tcp://127.0.0.1:*", self.reader, secured=True)
        self.port = self.listener.port

    def silent(self) -> int:
        self.zap.read()
        self.listener.read()
        return self.listener.silent

    def receive(self) -> bytes | None:
        self.silent()
        if not self.router.poll(10):
            return None
        *_, frame = self.router.recv_multipart(copy=False)
        self.listener.hear(connection_fd(frame))
        return frame.bytes

    def stranger(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 5)

    def member(self) -> zmq.Socket[bytes]:
        assert KEYS is not None
        dealer = self.context.socket(zmq.DEALER)
        dealer.linger = 0
        secure_client(dealer, KEYS)
        dealer.connect(self.listener.endpoint)
        dealer.send(b"hello")
        return dealer

    def close(self) -> None:
        self.reader.close()
        self.context.destroy(linger=0)


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listening]:
    monkeypatch.setattr(tcp_listener, "MAX_SILENT", MAX_SILENT)
    made = Listening()
    yield made
    made.close()


def test_of_too_many_strangers_the_oldest_are_cut(
    listening: Listening, caplog: pytest.LogCaptureFixture
) -> None:
    """Members stay, and get in at any time."""
    member = listening.member()
    eventually(listening.receive, lambda data: data == b"hello")
    with ExitStack() as crowd:
        strangers = [crowd.enter_context(listening.stranger()) for _ in range(3 * MAX_SILENT)]
        eventually(lambda: (listening.silent(), is_cut(strangers[2 * MAX_SILENT - 1]))[1])
        assert listening.silent() == MAX_SILENT
        assert all(map(is_cut, strangers[: 2 * MAX_SILENT]))
        assert not any(map(is_cut, strangers[2 * MAX_SILENT :]))
        newcomer = listening.member()
        eventually(listening.receive, lambda data: data == b"hello")
        member.send(b"still here")
        eventually(listening.receive, lambda data: data == b"still here")
    eventually(listening.silent, lambda n: n == 0)
    assert not listening.jobs
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        f"{listening.listener.endpoint}: too many connections have sent nothing; closed the oldest"
    ]
    member.close()
    newcomer.close()


def test_strangers_do_not_fill_the_log(listening: Listening, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever reaches the port of a bulk channel may try passwords, as often as he can."""
    asking = listening.context.socket(zmq.DEALER)
    asking.connect("inproc://zeromq.zap.01")
    for number in range(99):
        attempt = [
            b"",
            b"1.0",
            b"%d" % number,
            b"zmqgrad",
            b"192.0.2.66",
            b"",
            b"PLAIN",
            b"zmqgrad",
            b"guess",
        ]
        asking.send_multipart(attempt)
        listening.zap.read()
        assert asking.recv_multipart()[3] == b"400"
    asking.close()
    listening.zap.close()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "refused 192.0.2.66, which has not the job's key", "strangers", "strangers",
    ]  # fmt: skip


def test_strangers_that_connect_faster_than_they_are_counted_keep_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads of the program may leave the one that reads little time."""

    class Crowd(SocketMonitor):
        comes = False

        def read(self) -> Iterator[SocketEvent]:
            yield from super().read()
            for number in range(10_000 * self.comes):
                yield SocketEvent((ACCEPTED, DISCONNECTED)[number % 2], 1 << 30)
            assert not self.comes, "others have no turn"

    monkeypatch.setattr(tcp_listener, "SocketMonitor", Crowd)
    reader = Jobs()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        listener = TcpListener(router, "tcp://127.0.0.1:*", reader, secured=False)
        monkeypatch.setattr(Crowd, "comes", True)
        assert not listener.read()
        assert reader.again == [listener.read]
        monkeypatch.setattr(Crowd, "comes", False)
        reader.close()


def test_a_member_whose_message_overtakes_the_news_of_its_connection_is_no_stranger(
    listening: Listening,
) -> None:
    with ExitStack() as crowd:
        for _ in range(2 * BURST):
            crowd.enter_context(listening.stranger())
        member = listening.member()
        while not listening.router.poll(10):
            listening.zap.read()
        identity, frame = listening.router.recv_multipart(copy=False)
        listening.listener.hear(connection_fd(frame))
        assert listening.reader.again, "there were fewer events than one burst"
        while not listening.listener.read():
            pass
        for _ in range(2 * MAX_SILENT):
            crowd.enter_context(listening.stranger())
            eventually(listening.silent, lambda n: n == MAX_SILENT)
        member.send(b"still here")
        while not listening.router.poll(10):
            listening.silent()
        assert listening.router.recv_multipart() == [identity.bytes, b"still here"]
    member.close()


def test_those_who_try_passwords_without_end_leave_others_their_turn(listening: Listening) -> None:
    with listening.context.socket(zmq.DEALER) as asking:
        asking.linger = 0
        asking.connect("inproc://zeromq.zap.01")
        for _ in range(2 * BURST):
            asking.send_multipart([b"", b"1.0", b"1", b"zmqgrad", b"", b"", b"PLAIN", b"zmqgrad", b"guess"])
        listening.zap.read()
        for _ in range(2):
            for _ in range(BURST):
                assert asking.recv_multipart()[3] == b"400"
            assert not asking.poll(0)
            listening.reader.again.pop()()


def is_cut(stranger: socket.socket) -> bool:
    """Returns whether the other end has closed the connection."""
    stranger.setblocking(False)
    try:
        while stranger.recv(1000):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_without_descriptors_strangers_are_cut_first(
    listening: Listening, caplog: pytest.LogCaptureFixture
) -> None:
    member = listening.member()
    eventually(listening.receive, lambda data: data == b"hello")
    with ExitStack() as crowd:
        crowd.enter_context(listening.stranger())
        eventually(listening.silent, lambda n: n == 1)
        newcomer = crowd.enter_context(socket.socket())
        with all_descriptors_used():
            newcomer.connect(("127.0.0.1", listening.port))
            eventually(lambda: (listening.silent(), "no more file descriptors; closed" in caplog.text)[1])
        assert not listening.jobs, "the address was not given up"
        member.send(b"still here")
        eventually(listening.receive, lambda data: data == b"still here")
    member.close()


def test_members_are_no_strangers(listening: Listening, caplog: pytest.LogCaptureFixture) -> None:
    members = []
    for _ in range(3):
        members += [listening.member() for _ in range(MAX_SILENT)]
        for _ in range(MAX_SILENT):
            eventually(listening.receive, lambda data: data == b"hello")
        assert listening.silent() == 0
    assert "closed the oldest" not in caplog.text
    for member in members:
        member.close()


def test_refused_connections_are_forgotten(listening: Listening) -> None:
    """libzmq reports no failed handshake of a peer that does not speak its protocol at all."""
    for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(100), b""):
        with ExitStack() as crowd:
            strangers = [crowd.enter_context(listening.stranger()) for _ in range(MAX_SILENT)]
            for stranger in strangers:
                stranger.sendall(data)
            if data:
                eventually(lambda: all(map(is_cut, strangers)))  # noqa: B023
        eventually(listening.silent, lambda n: n == 0)
    member = listening.member()
    eventually(listening.receive, lambda data: data == b"hello")
    member.close()


# ---- without descriptors ----------------------------------------------------------------------------------


@contextmanager
def no_descriptor() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextmanager
def all_descriptors_used() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used: list[int] = []
    try:
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
        with suppress(OSError):
            while True:
                used.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in used:
            os.close(fd)


def run_out(port: int, caplog: pytest.LogCaptureFixture) -> None:
    """Connects to ``port`` while this process has no descriptor left, until the listener says so."""
    caplog.clear()
    with socket.socket() as newcomer:
        with no_descriptor():
            newcomer.connect(("127.0.0.1", port))
            eventually(lambda: "no more file descriptors" in caplog.text)
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port))


@pytest.mark.slow
def test_a_worker_without_descriptors_keeps_its_port(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp_listener, "PAUSE_SECONDS", 0.1)
    caplog.set_level(logging.DEBUG, tcp_listener.__name__)
    arrived: list[Inbound] = []
    mailboxes = [ZmqMailbox(f"w{i}", i, keys=KEYS, fast_path=False) for i in range(2)]

    def resolve(peer: int) -> PeerAddress:
        return PeerAddress(mailboxes[peer].endpoints, mailboxes[peer].incarnation)

    for mailbox in mailboxes:
        mailbox.start(arrived.append, resolve)
    try:
        address = next(e for e in mailboxes[1].endpoints if e.startswith("tcp:"))
        mailboxes[0].send(1, StorePing("before"), 0)
        eventually(lambda: arrived)
        run_out(int(address.rpartition(":")[2]), caplog)
        mailboxes[0].send(1, StorePing("after"), 0)
        expected = [StorePing("before"), StorePing("after")]
        eventually(lambda: [inbound.message for inbound in arrived], lambda got: got == expected)
    finally:
        for mailbox in mailboxes:
            mailbox.close()
        for mailbox in mailboxes:
            assert mailbox.join(Deadline.after(20)) == []


@pytest.mark.slow
def test_a_publisher_without_descriptors_keeps_its_port(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp_listener, "PAUSE_SECONDS", 0.1)
    caplog.set_level(logging.DEBUG, tcp_listener.__name__)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = StoreServer("tcp://127.0.0.1:*", watch_port=port, secret=SECRET)
    try:
        run_out(port, caplog)
        seen: list[bytes | None] = []
        with TCPStore("127.0.0.1", server.port, secret=SECRET) as store:
            store.watch_key("key", lambda old, new: seen.append(new))
            store.set("key", "value")
            eventually(lambda: seen, lambda got: got == [b"value"])
    finally:
        server.close()
