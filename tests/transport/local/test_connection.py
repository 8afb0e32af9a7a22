"""Local connections: packets and descriptors arrive whole, once and in order; strangers are refused."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import resource
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pytest

from tests.support.waiting import eventually
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport import local
from zmqgrad.transport.local import MAX_PACKET_BYTES, LocalConnection, LocalListener
from zmqgrad.transport.local import connection as local_connection
from zmqgrad.transport.local.connection import (
    ANNOUNCEMENT,
    LARGE,
    MAX_DESCRIPTORS,
    Offer,
    send_with_gil,
)
from zmqgrad.transport.local.handshake import PROTOCOL, Hello, proven, welcome
from zmqgrad.transport.local.listener import ACCEPT_BACKLOG, MAX_HANDSHAKES
from zmqgrad.transport.strangers import HANDSHAKE_SECONDS

pytestmark = pytest.mark.skipif(not local.supported(), reason="the fast path is Linux's")

WAIT = 20.0
JOB = b"job"
HELLO = Hello(PROTOCOL, 7)


class Site:
    """A listener, read by the test."""

    def __init__(self) -> None:
        self.endpoint = local.abstract_endpoint("test")
        self.poll = select.poll()
        self.accepted: list[LocalConnection] = []
        self.accepts = True
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.late: list[tuple[float, Callable[[], None]]] = []  # for connections without a hello
        self.listener = LocalListener(
            self.endpoint,
            self.poll,
            JOB,
            7,
            lambda seconds, job: (self.late if seconds == HANDSHAKE_SECONDS else self.later).append(
                (seconds, job)
            ),
            on_opened=lambda connection: self.accept(connection),
        )
        self.arrived: list[tuple[bytes, LocalConnection]] = []
        self.backlogged: list[LocalConnection] = []
        self.opened: list[LocalConnection] = []

    @property
    def packets(self) -> list[bytes]:
        """What has arrived, without the ends of connections."""
        return [packet for packet, _ in self.arrived if packet]

    @property
    def ends(self) -> list[LocalConnection]:
        """The connections whose end has arrived."""
        return [connection for packet, connection in self.arrived if not packet]

    def accept(self, connection: LocalConnection) -> bool:
        self.accepted.append(connection)
        return self.accepts

    def read(self, milliseconds: int = 0) -> None:
        """Read what is there, or comes within that time."""
        ready = self.poll.poll(milliseconds)
        while ready:
            for number, _ in ready:
                self.arrived += self.listener.read(number)
            ready = self.poll.poll(0)

    def connect(self, job: bytes = JOB, incarnation: int = 7, *, eager: bool = False) -> LocalConnection:
        hello = Hello(PROTOCOL, incarnation, 3, 33)
        connection = local.connect(self.endpoint, hello, job, self.backlogged.append, eager=eager)
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
        self.forget()

    def forget(self) -> None:
        """Drop all connections: their descriptors that were not taken are closed."""
        for kept in (self.opened, self.accepted, self.arrived, self.backlogged):
            kept.clear()  # type: ignore[attr-defined]
        gc.collect()


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


@pytest.mark.parametrize("size", [1, 2, 255, 256, 4096, MAX_PACKET_BYTES - 1, MAX_PACKET_BYTES])
@pytest.mark.parametrize("keep_gil", [False, True])
def test_a_packet_arrives_whole(site: Site, size: int, keep_gil: bool) -> None:
    # Of one byte, ANNOUNCEMENT and LARGE are the connection's own.
    connection, packet = site.ready(), b"x" + os.urandom(size - 1)
    for each in (packet, bytearray(packet)):
        connection.send(each, keep_gil=keep_gil)
    site.read()
    assert site.packets == [packet, packet]
    assert (connection.sent, connection.sent_bytes) == (2, 2 * size)


@pytest.mark.parametrize("accepted", [False, True])
def test_connections_that_continue_one_another_are_read_in_order(site: Site, accepted: bool) -> None:
    """Nothing is read before the sender has closed them all."""
    connection, count = site.ready() if accepted else site.connect(eager=True), 0
    for number in range(1, 6):
        while not connection.backlog():
            connection.send(b"%d" % count)
            count += 1
        hello = Hello(PROTOCOL, 7, 3, 33, number)
        following = local.connect(site.endpoint, hello, JOB, site.backlogged.append, eager=True)
        site.opened.append(following)
        switched: list[int] = []
        connection.continue_by(following, switched.append)
        with pytest.raises(OSError, match="Bad file descriptor"):
            connection.send(b"too late")
        assert len(switched) == 1
        assert following.ahead == (number - 1 if accepted else number)
        connection = following
    connection.close()
    while not site.ends:
        site.read(1000)
    assert site.packets == [b"%d" % n for n in range(count)]
    assert len(site.accepted) == 6
    assert site.ends == site.accepted[-1:]
    assert not site.listener.connections


def test_a_connection_is_welcome_once_those_before_it_were_read(site: Site) -> None:
    first = site.ready()
    first.send(b"1")
    hello = Hello(PROTOCOL, 7, 3, 33, 1)
    following = local.connect(site.endpoint, hello, JOB, site.backlogged.append, eager=True)
    site.opened.append(following)
    following.send(b"2")
    site.read()
    assert site.packets == [b"1"]
    assert not following.is_ready()
    first.continue_by(following, lambda fd: None)
    site.read()
    assert following.is_ready()
    assert site.packets == [b"1", b"2"]


def test_a_connection_is_known_before_its_peer_may_use_it(site: Site) -> None:
    """What its owner does not know of, the end of the peer would overtake."""
    ready: list[bool] = []
    connection = site.connect()
    site.accept = lambda _: ready.append(connection.is_ready()) or True  # type: ignore[method-assign, func-returns-value]
    site.read()
    assert ready == [False]
    assert connection.is_ready()


def test_whether_another_listens_is_unknown_without_descriptors(site: Site) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    nobody = local.abstract_endpoint("nobody")
    assert not local.is_listening(nobody)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        assert local.is_listening(nobody)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connections_continue_one_another_however_their_events_are_ordered(site: Site) -> None:
    connection, sent = site.ready(), [b"%d" % number for number in range(4)]
    connection.send(sent[0])
    for number in range(1, 4):
        hello = Hello(PROTOCOL, 7, 3, 33, number)
        following = local.connect(site.endpoint, hello, JOB, site.backlogged.append, eager=True)
        site.opened.append(following)
        connection.continue_by(following, lambda fd: None)
        following.send(sent[number])
        connection = following
    connection.close()
    known = {fd for fd, _ in site.poll.poll(0)}
    (listening,) = known - site.listener.connections.keys()
    for _ in range(3):
        site.listener.read(listening)
    for fd, _ in reversed(site.poll.poll(0)):
        if fd not in known:
            site.arrived += site.listener.read(fd)
    while not site.ends:
        site.read(1000)
    assert site.packets == sent
    assert len(site.ends) == 1


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


def test_no_packet_is_queued_of_which_an_interrupt_keeps_others_from_hearing(site: Site) -> None:
    """Nobody would flush it, nor what is queued behind it."""

    def interrupted(_: LocalConnection) -> None:
        raise KeyboardInterrupt

    connection = local.connect(site.endpoint, HELLO, JOB, interrupted, eager=True)
    site.opened.append(connection)
    for send in (connection.send, lambda packet: connection.send_all([packet], [])):
        with suppress(KeyboardInterrupt):
            while connection.backlog() == 0:
                send(bytes(1000))
        assert connection.backlog() == 0


@pytest.mark.parametrize("eager", [False, True])
def test_packets_wait_until_the_connection_is_accepted(site: Site, eager: bool) -> None:
    """A listener of another job would take them for its own; eager ones go at once, behind the hello."""
    connection = site.connect(eager=eager)
    for n in range(5):
        connection.send(b"%d" % n)
    connection.send_all([b"5", b"6"], [])
    assert connection.backlog() == (0 if eager else 7)
    site.read()
    assert site.packets == ([b"%d" % n for n in range(7)] if eager else [])
    assert connection.is_ready()
    assert connection.flush()
    connection.send(b"7")
    site.read()
    assert site.packets == [b"%d" % n for n in range(8)]
    assert connection.sent == 7


def test_an_owner_may_refuse_a_connection(site: Site) -> None:
    site.accepts = False
    eager = site.connect(eager=True)
    eager.send(b"early")
    site.read()
    assert site.arrived == []
    assert [connection.fd for connection in site.accepted] == [-1]
    with pytest.raises(OSError, match=r"pipe|reset"):
        eager.send(b"late")
    site.accepts = True
    assert site.ready().is_ready()


def test_the_listener_learns_who_has_connected(site: Site) -> None:
    site.ready()
    (accepted,) = site.accepted
    assert (accepted.hello.source, accepted.hello.incarnation) == (3, 33)


# ---- descriptors -----------------------------------------------------------------------------------------


class Files:
    """Numbered files in memory, as segments to be offered."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def offer(self, number: int) -> Offer:
        def make() -> tuple[bytes, int]:
            fd = os.memfd_create("zmqgrad-test")
            os.write(fd, b"%d" % number)
            self.made.append(number)
            return b"file %d" % number, fd

        return Offer(number, make)


def descriptors() -> list[str]:
    """The descriptors of this process that are files of :class:`Files`."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that lists them
            if "zmqgrad-test" in os.readlink(f"/proc/self/fd/{name}"):
                found.append(name)
    return found


@pytest.fixture
def files(site: Site) -> Iterator[Files]:
    yield Files()
    site.close()
    assert descriptors() == []


def content(fd: int) -> bytes:
    """What is in the file ``fd``, which this closes."""
    found = os.pread(fd, 100, 0)
    os.close(fd)
    return found


def test_descriptors_arrive_in_order_before_what_needs_them(site: Site, files: Files) -> None:
    connection = site.ready()
    (accepted,) = site.accepted
    for n in range(20):
        connection.send_all([b"uses %d" % n], [files.offer(n), files.offer(n // 2)])
        connection.send(b"small")
    while len(site.packets) < 60:
        site.read(1000)
    assert [p for p in site.packets if p.startswith(b"file")] == [b"file %d" % n for n in range(20)]
    for n in range(20):
        assert site.packets.index(b"file %d" % n) < site.packets.index(b"uses %d" % n)
    assert files.made == list(range(20)), "each is sent once"
    assert [content(accepted.descriptors.popleft()) for _ in range(20)] == [b"%d" % n for n in range(20)]


def test_a_packet_with_two_descriptors_breaks_the_connection(
    site: Site, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    """It looks much as if this process had no descriptor left, which would pass."""
    connection = site.ready()
    (accepted,) = site.accepted
    two = [files.offer(n).make()[1] for n in range(2)]
    connection._socket.send(ANNOUNCEMENT)
    socket.send_fds(connection._socket, [b"both"], two)
    for fd in two:
        os.close(fd)
    site.read()
    assert site.ends == [accepted]
    assert "no more file descriptors" not in caplog.text


def test_descriptors_wait_with_their_packets(site: Site, files: Files) -> None:
    connection = site.connect()
    for n in range(3):
        connection.send_all([b"x"], [files.offer(n)])
    site.read()
    assert connection.is_ready()
    assert connection.flush()
    site.read()
    (accepted,) = site.accepted
    assert site.packets == [b"file 0", b"x", b"file 1", b"x", b"file 2", b"x"]
    assert [content(fd) for fd in accepted.descriptors] == [b"0", b"1", b"2"]
    accepted.descriptors.clear()


def test_descriptors_that_nobody_takes_are_closed(site: Site, files: Files) -> None:
    waiting = site.connect()  # in its queue
    waiting.send_all([b"x"], [files.offer(1)])
    waiting.close()
    dropped = site.ready()  # received, and not taken
    dropped.send_all([b"x"], [files.offer(2)])
    site.read()
    site.listener.drop(site.accepted[-1])
    unread = site.ready()  # in the kernel
    unread.send_all([b"x"], [files.offer(3)])
    site.listener.close()
    for closed in (waiting, unread):
        with pytest.raises(OSError, match=r"closed|pipe|reset"):
            closed.send_all([b"x"], [files.offer(4)])
    assert files.made == [1, 2, 3, 4, 4]
    del dropped
    site.close()
    assert descriptors() == []


def test_a_descriptor_that_cannot_be_made_sends_nothing(site: Site) -> None:
    def make() -> tuple[bytes, int]:
        raise OSError(24, "Too many open files")

    connection = site.ready()
    with pytest.raises(OSError, match="Too many"):
        connection.send_all([b"x"], [Offer(1, make)])
    connection.send(b"after")
    site.read()
    assert site.packets == [b"after"]


def test_a_descriptor_that_cannot_be_sent_is_closed(site: Site, files: Files) -> None:
    connection = site.ready()
    site.listener.drop(site.accepted[0])
    with pytest.raises(BrokenPipeError):
        connection.send_all([b"x"], [files.offer(1)])
    closed = site.connect()
    closed.close()
    with pytest.raises(OSError, match="closed"):
        closed.send_all([b"x"], [files.offer(2)])
    assert files.made == [1, 2]


def test_an_announcement_without_a_descriptor_does_no_harm(
    site: Site, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender may be interrupted in between, or the kernel may refuse to send more descriptors."""
    connection = site.ready()
    transmit = LocalConnection._transmit

    def interrupted(self: LocalConnection, packet: bytes, fd: int) -> None:
        if fd >= 0:
            raise OSError(errno.ETOOMANYREFS, "too many descriptors are on their way")
        transmit(self, packet, fd)

    with monkeypatch.context() as patched:
        patched.setattr(LocalConnection, "_transmit", interrupted)
        for _ in range(2):
            with pytest.raises(OSError, match="too many"):
                connection.send_all([b"x"], [files.offer(1)])
    connection.send(b"small")
    connection.send_all([b"y"], [files.offer(1)])
    site.read()
    assert site.packets == [b"small", b"file 1", b"y"]
    (accepted,) = site.accepted
    assert content(accepted.descriptors.popleft()) == b"1"


def test_announcements_without_end_leave_others_their_turn(site: Site) -> None:
    noisy, quiet = site.ready(), site.ready()
    for _ in range(200):
        noisy._socket.send(ANNOUNCEMENT)
    noisy.send(b"noisy")
    quiet.send(b"quiet")
    site.read()
    assert site.packets == [b"quiet", b"noisy"]


def test_descriptors_without_end_break_the_connection(site: Site, files: Files) -> None:
    connection, sent = site.ready(), 0
    with suppress(BrokenPipeError, ConnectionResetError):
        while sent < 2 * MAX_DESCRIPTORS:
            connection.send_all([b"x"], [files.offer(sent)])
            sent += 1
            site.read()
    assert MAX_DESCRIPTORS <= sent < 2 * MAX_DESCRIPTORS
    assert site.ends == site.accepted


def test_a_reader_without_descriptors_reads_later(
    site: Site, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel would drop what is in the packet; so it stays there until this process has a descriptor."""
    connection = site.ready()
    (accepted,) = site.accepted
    connection.send(b"before")
    connection.send_all([b"x"], [files.offer(1)])
    taken: list[int] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        site.read()
        site.read()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)
    assert site.packets == [b"before"]
    assert "no more file descriptors" in caplog.text
    [(seconds, job)] = site.later
    assert seconds > 0
    job()
    site.read(1000)
    assert site.packets == [b"before", b"file 1", b"x"]
    assert content(accepted.descriptors.popleft()) == b"1"


# ---- ends ------------------------------------------------------------------------------------------------


def test_what_has_arrived_is_read_before_the_end(site: Site) -> None:
    connection = site.ready()
    (accepted,) = site.accepted
    for n in range(50):
        connection.send(b"%d" % n)
    accepted.stop_receiving()
    with pytest.raises(OSError, match=r"pipe|reset"):
        connection.send(b"late")
    site.read()
    assert site.packets == [b"%d" % n for n in range(50)]
    assert site.ends == [accepted]
    assert site.arrived[-1] == (b"", accepted)
    assert site.listener.connections == {}


def test_what_a_peer_sent_that_left_before_it_was_accepted_is_read(site: Site) -> None:
    connection = site.connect(eager=True)
    for n in range(5):
        connection.send(b"%d" % n)
    connection.close()
    site.read()
    assert site.packets == [b"%d" % n for n in range(5)]
    assert site.ends == site.accepted != []
    assert site.listener.connections == {}


def test_a_listener_that_stops_returns_what_is_to_be_read(site: Site) -> None:
    connections = [site.ready() for _ in range(3)]
    for connection in connections:
        connection.send(b"last")
    assert len(site.listener.stop()) == 3
    assert not site.listener.is_open
    deadline = Deadline.after(WAIT)
    for accepted in site.accepted:
        while accepted not in site.ends:
            site.arrived += site.listener.read(accepted.fd)
            assert not deadline.passed()
    assert site.packets == [b"last"] * 3
    assert site.ends == site.accepted


@pytest.mark.parametrize("says_hello", [True, False])
def test_a_listener_that_stops_opens_nothing_that_nobody_reads(site: Site, says_hello: bool) -> None:
    """The end of a link waits for all of its connections."""
    connection = site.ready()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as late:
        late.connect(local.unix_name(site.endpoint))
        site.read()  # it is accepted, and has said nothing
        if says_hello:
            late.send(proven(JOB, site.endpoint, HELLO))
            late.send(b"last")
        left = site.listener.stop()
        connection.close()
        for accepted in left:
            while accepted not in site.ends:
                site.arrived += site.listener.read(accepted.fd)
    assert site.accepted == left
    assert site.packets == [b"last"] * says_hello


def test_a_reply_is_read_though_its_sender_left_packets_unread(site: Site, files: Files) -> None:
    """The kernel reports ECONNRESET before what is queued, to whoever receives or sends next."""
    connection = site.ready()
    (accepted,) = site.accepted
    connection.send(b"unread")
    accepted.send(b"reply")
    accepted.send_all([b"x"], [files.offer(1)])
    accepted.close()
    assert [connection.receive() for _ in range(4)] == [b"reply", b"file 1", b"x", b""]
    assert content(connection.descriptors.popleft()) == b"1"


def test_a_listener_that_closes_resets_nobody(site: Site) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(local.unix_name(site.endpoint))
        first = proven(JOB, site.endpoint, HELLO)
        peer.send(first)
        site.read()
        peer.send(b"unread")
        site.accepted[0].send(b"reply")
        site.listener.close()
        assert [peer.recv(100) for _ in range(3)] == [welcome(JOB, first), b"reply", b""]


def test_what_one_connection_could_not_send_is_sent_by_another(site: Site, files: Files) -> None:
    """As when a reply channel is closed before it has accepted a connection."""
    main, other = site.ready(), site.connect()
    other.send(b"first")
    other.send_all([b"x"], [files.offer(1)])
    main.adopt(other.give_up())
    for packet in (b"late", b"y" * MAX_PACKET_BYTES):
        with pytest.raises(OSError, match="closed"):
            other.send(packet)
    site.read()
    assert site.packets == [b"first", b"file 1", b"x"]
    assert content(site.accepted[0].descriptors.popleft()) == b"1"
    main.close()
    third = site.connect()
    third.send_all([b"x"], [files.offer(2)])
    main.adopt(third.give_up())  # neither does any harm, nor keeps the descriptor


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


# ---- who is let in ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("job", "incarnation"), [(b"another", 7), (JOB, 8), (b"", 0)])
def test_a_process_of_another_job_is_refused(
    site: Site, job: bytes, incarnation: int, caplog: pytest.LogCaptureFixture
) -> None:
    connection = site.connect(job, incarnation)
    site.read()
    with pytest.raises(OSError, match="another job"):
        connection.is_ready()
    why = "was meant for another process" if job == JOB else "does not know the key of this job"
    assert why in caplog.text
    assert site.ready().is_ready()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100,
        msgspec.msgpack.encode(HELLO),
        b"\0" * 32 + msgspec.msgpack.encode(HELLO),
        proven(JOB, "ipc://@zmqgrad-another", HELLO),
        proven(b"", "ipc://@zmqgrad-test", HELLO),
        b"x" * 10_000,
    ],
)
def test_a_foreign_protocol_is_refused(site: Site, said: bytes) -> None:
    with stranger_at(site) as stranger:
        stranger.send(said)
        site.read()
        assert stranger.recv(100) == b""
    assert site.accepted == []
    assert site.ready().is_ready()


@pytest.mark.parametrize("content", [["zmqgrad-local-1", 7], [PROTOCOL], [PROTOCOL, 7, 0, 0, 0, "more"], 7])
def test_another_version_is_refused(site: Site, content: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with stranger_at(site) as stranger:
        stranger.send(proven(JOB, site.endpoint, content))  # type: ignore[arg-type]
        site.read()
        assert stranger.recv(100) == b""
    assert site.accepted == []


def stranger_at(site: Site) -> socket.socket:
    """A connected socket that has sent nothing."""
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(local.unix_name(site.endpoint))
    return stranger


def test_a_proof_is_of_no_use_elsewhere(site: Site) -> None:
    """Who reads the first packet at one endpoint cannot connect to another one by it."""
    other = Site()
    first = proven(JOB, other.endpoint, HELLO)
    for at, reply in ((other, welcome(JOB, first)), (site, b"")):
        with stranger_at(at) as stranger:
            stranger.send(first)
            at.read()
            assert stranger.recv(100) == reply
    other.listener.close()


def test_silent_connections_are_bounded(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    silent = [stranger_at(site) for _ in range(3 * MAX_HANDSHAKES)]
    first = proven(JOB, site.endpoint, HELLO)
    silent[1].send(first)  # late, but before it is among too many
    site.read()
    for stranger in silent:
        stranger.setblocking(False)
    closed = [stranger for stranger in silent if has_ended(stranger)]
    assert len(closed) == 2 * MAX_HANDSHAKES - 1
    assert silent[1].recv(100) == welcome(JOB, first)
    assert len(caplog.records) == 3  # the first, the tenth, the hundredth
    assert site.ready().is_ready()
    for stranger in silent:
        stranger.close()


def test_a_connection_without_a_hello_is_closed_in_time(site: Site) -> None:
    with stranger_at(site) as silent, stranger_at(site) as patient:
        silent.setblocking(False)
        first = proven(JOB, site.endpoint, HELLO)
        site.read()
        for _ in range(2):
            ((_, job),) = site.late
            site.late.clear()
            job()
            if not has_ended(silent):
                patient.send(first)
            site.read()
        assert has_ended(silent)
        assert patient.recv(100) == welcome(JOB, first)
        assert site.late == []


def test_a_peer_gets_in_while_strangers_fill_the_limit(site: Site) -> None:
    """Here a thread connects again and again, and another process of the job connects in between."""
    first = proven(JOB, site.endpoint, HELLO)
    code = (
        "import socket,sys; s=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET); s.connect(sys.argv[1]); "
    )
    code += (
        "print(flush=True); input(); s.send(bytes.fromhex(sys.argv[2])); print(s.recv(100).hex(), flush=True)"
    )
    name = local.unix_name(site.endpoint)
    command = [sys.executable, "-c", code.replace("sys.argv[1]", repr(name)), "", first.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        peer.stdout.readline()  # it has connected, and is slow to say hello
        strangers = [stranger_at(site) for _ in range(3 * MAX_HANDSHAKES)]
        site.read()
        peer.stdin.write("\n")
        peer.stdin.flush()
        site.read(20_000)
        assert peer.stdout.readline().strip() == welcome(JOB, first).hex()
    for stranger in strangers:
        stranger.close()


def test_strangers_that_connect_as_fast_as_they_are_refused_keep_no_thread() -> None:
    """Here the next one connects while the one before is accepted."""
    endpoint, waiting = local.abstract_endpoint("test"), select.poll()
    connected = 0

    class Polls:
        def register(self, fd: int, mask: int) -> None:
            nonlocal connected
            waiting.register(fd, mask)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.setblocking(False)
                connected += stranger.connect_ex(local.unix_name(endpoint)) == 0
            assert connected <= 2 * ACCEPT_BACKLOG

        def unregister(self, fd: int) -> None:
            waiting.unregister(fd)

    listener = LocalListener(endpoint, Polls(), JOB, 7, lambda seconds, job: None)
    peer = local.connect(endpoint, HELLO, JOB, lambda _: None)
    listener.accept_pending()
    assert peer.is_ready()  # it was there before
    assert connected > MAX_HANDSHAKES
    peer.close()
    listener.close()


def test_a_connection_closed_before_its_hello_is_made_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strangers of many processes may fill the limit between the two steps of connecting."""
    opens = socket.socket.connect
    tries: list[str] = []

    def connect(self: socket.socket, address: str) -> None:
        opens(self, address)
        tries.append(address)
        if len(tries) < 3:
            self.shutdown(socket.SHUT_RDWR)  # as if the listener did

    monkeypatch.setattr(socket.socket, "connect", connect)
    assert site.ready().is_ready()
    assert len(tries) == 3


def test_a_process_that_was_stopped_while_it_connected_learns_that_the_listener_has_ended(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = local_connection.is_same_user

    def stopped(connected: socket.socket) -> bool:
        site.listener.close()
        time.sleep(0.02)  # for longer than it may wait: no event marks that
        return checks(connected)

    monkeypatch.setattr(local_connection, "is_same_user", stopped)
    with pytest.raises(ConnectionRefusedError):
        local.connect(site.endpoint, HELLO, JOB, site.backlogged.append, waits=0.01)


@pytest.mark.parametrize("caught", [True, False])
def test_a_signal_while_the_listener_is_busy_does_no_harm(caught: bool) -> None:
    """Python takes a ``connect`` that a signal has interrupted for successful."""
    endpoint = local.abstract_endpoint("test")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening, ExitStack() as others:
        listening.bind("\0" + endpoint.removeprefix("ipc://@"))
        listening.listen(1)
        listening.settimeout(WAIT)
        for _ in range(2):
            others.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)).connect(
                listening.getsockname()
            )
        child = os.fork()
        if not child:
            try:
                signal.signal(signal.SIGUSR1, lambda *_: None)
                connection = local.connect(endpoint, HELLO, JOB, lambda _: None)
                os._exit(connection.fd < 0)
            finally:
                os._exit(2)
        eventually(lambda: state_of(child), lambda state: state == "S", WAIT)  # it waits to be queued
        for number in (signal.SIGUSR1,) if caught else (signal.SIGSTOP, signal.SIGCONT):
            os.kill(child, number)
            stopped = number == signal.SIGSTOP
            eventually(lambda: state_of(child), lambda state: (state == "T") == stopped, WAIT)  # noqa: B023
        for _ in range(3):
            others.enter_context(listening.accept()[0])
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def has_ended(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(100, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False


def test_an_impostor_gets_nothing(backlogged: list[LocalConnection]) -> None:
    """Another process has the name of one that has ended: it is sent a proof, which it cannot return."""
    ended, impostor_pid = subprocess.Popen(["true"]), os.getpid()
    ended.wait()
    endpoint = local.abstract_endpoint("test").replace(f"-{impostor_pid}-", f"-{ended.pid}-")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as impostor:
        impostor.bind(local.unix_name(endpoint))
        impostor.listen()
        connection = local.connect(endpoint, HELLO, JOB, backlogged.append, eager=True)
        connection.send(b"a call")
        accepted, _ = impostor.accept()
        first = accepted.recv(1000)
        assert first == proven(JOB, endpoint, HELLO)
        accepted.setblocking(False)
        with pytest.raises(BlockingIOError):
            accepted.recv(1000)
        accepted.send(welcome(b"another key", first))
        with pytest.raises(ConnectionRefusedError, match="another job or process"):
            connection.is_ready()
        accepted.close()
    connection.close()


@pytest.mark.parametrize("pid", [0, 7])
def test_nothing_is_sent_early_to_a_process_that_is_not_named(
    site: Site, pid: int, backlogged: list[LocalConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports process 0 for one of another namespace."""
    unnamed = f"ipc://@zmqgrad-{secrets.token_hex(8)}"
    listener = LocalListener(unnamed, site.poll, JOB, 7, lambda seconds, job: None)
    monkeypatch.setattr(local_connection, "credentials", lambda _: (pid, os.getuid(), 0))
    for endpoint in (unnamed, site.endpoint):
        connection = local.connect(endpoint, HELLO, JOB, backlogged.append, eager=True)
        connection.send(b"a call")
        assert connection.backlog() == 1
        connection.close()
    listener.close()


@pytest.fixture
def backlogged() -> list[LocalConnection]:
    return []


def test_a_packet_that_is_too_large_ends_its_connection_alone(site: Site) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(local.unix_name(site.endpoint))
        first = proven(JOB, site.endpoint, HELLO)
        stranger.send(first)
        site.read()
        assert stranger.recv(100) == welcome(JOB, first)
        stranger.send(b"x" * (MAX_PACKET_BYTES + 1))
        site.read()
        assert stranger.recv(100) == b""
    assert len(site.ends) == 1
    assert site.packets == []


def test_large_messages_come_in_order_with_others(site: Site) -> None:
    connection = site.ready()
    sent = [bytes([n]) * size for n, size in enumerate((2, 1 << 20, 3, MAX_PACKET_BYTES + 1, 4, 5 << 20))]
    for message in sent:
        (connection.send if len(message) < MAX_PACKET_BYTES else connection.send_large)(message)
    site.read()
    [accepted] = site.accepted
    got = [accepted.take_large(5 << 20) if p == LARGE else p for p in site.packets]
    assert got == sent


def test_a_large_message_must_be_memory_of_a_size_that_is_allowed(site: Site) -> None:
    connection = site.ready()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(local.unix_name(site.endpoint))
        stranger.send(proven(JOB, site.endpoint, HELLO))
        stranger.send(LARGE)  # without a descriptor
        site.read()
        _, accepted = site.accepted
        with pytest.raises(OSError, match="without its memory"):
            accepted.take_large(100)
        reader, writer = os.pipe()  # to read it would block
        may_shrink, may_be_written, empty, sparse = (
            os.memfd_create(name, os.MFD_ALLOW_SEALING) for name in "abcd"
        )
        os.ftruncate(sparse, 1 << 40)
        for fd, seals in (
            (may_shrink, fcntl.F_SEAL_WRITE),
            (may_be_written, fcntl.F_SEAL_SHRINK),
            (empty, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE),
            (sparse, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE),
        ):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        for fd, error in (
            (reader, "Invalid argument"),
            (may_shrink, "may change"),
            (may_be_written, "may change"),
            (empty, "0 bytes"),
            (sparse, "at most 100"),
        ):
            stranger.send(ANNOUNCEMENT)
            socket.send_fds(stranger, [LARGE], [fd])
            site.read()
            with pytest.raises(OSError, match=error):
                accepted.take_large(100)
        for fd in (reader, writer, may_shrink, may_be_written, empty, sparse):
            os.close(fd)
    connection.send_large(b"x" * 101)
    site.read()
    with pytest.raises(OSError, match="101 bytes"):
        site.accepted[0].take_large(100)


def test_large_messages_that_were_not_sent_leave_no_descriptor(site: Site) -> None:
    before = len(os.listdir("/proc/self/fd"))
    connection = site.connect()  # not accepted: all wait
    for _ in range(10):
        connection.send_large(bytes(100_000))
    assert connection.backlog() == 20
    connection.close()
    with pytest.raises(OSError, match="closed"):
        connection.send_large(bytes(100_000))
    site.read()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_peer_that_hangs_up_is_forgotten(site: Site) -> None:
    connection = site.ready()
    connection.send(b"last")
    connection.close()
    site.read()
    site.read()
    assert site.packets == [b"last"]
    assert site.listener.connections == {}
    assert len(site.ends) == 1


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
        local.connect(f"ipc://@zmqgrad-{secrets.token_hex(8)}", HELLO, JOB, lambda _: None)


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
        local.connect(f"{site.endpoint}-theirs", HELLO, JOB, lambda _: None)
    stranger.close()
    theirs.close()
