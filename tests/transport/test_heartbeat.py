"""Peers that end, that are silent, and that cannot be told from the dead at first sight."""

from __future__ import annotations

import errno
import os
import re
import resource
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest

from zmqgrad.errors import ConfigurationError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.service_thread import ServiceThread
from zmqgrad.transport import strangers
from zmqgrad.transport.base import PeerAddress, PeerEnd
from zmqgrad.transport.heartbeat import TOKEN_SIZE, HeartbeatListener, HeartbeatMonitor
from zmqgrad.transport.heartbeat.failure_detector import (
    RETRY_SECONDS,
    FailureDetector,
    LivenessChange,
    LivenessTimeouts,
    Refusals,
    is_on_this_host,
    is_reachable,
)
from zmqgrad.transport.heartbeat.protocol import CHALLENGE_SIZE, NONCE_SIZE, OF_PEER, PROOF_SIZE, prove
from zmqgrad.transport.mailbox import ZmqMailbox
from zmqgrad.wire.messages import Hello

WAIT = 20.0

QUICK = LivenessTimeouts(local=0.03, remote=0.06, frozen=0.0)


class Heard:
    """What a watch tells."""

    def __init__(self) -> None:
        self.lost: list[tuple[int, str]] = []
        self.ended: list[bool] = []
        self.silent: list[tuple[int, bool]] = []
        self.changed = threading.Condition()

    def on_lost(self, peer: int, why: str, ended: bool = False) -> None:
        """A peer is gone; ``ended``: its process has certainly ended."""
        with self.changed:
            self.lost.append((peer, why))
            self.ended.append(ended)
            self.changed.notify_all()

    def on_end(self, end: PeerEnd) -> None:
        """The link to a peer has ended."""
        self.on_lost(end.peer, end.reason)

    def on_suspected(self, peer: int, seconds: float) -> None:
        """A peer is silent, or is not any more."""
        with self.changed:
            self.silent.append((peer, seconds > 0))
            self.changed.notify_all()

    def wait(self, what: Any) -> None:
        """Until that is so."""
        with self.changed:
            assert self.changed.wait_for(what, WAIT), (self.lost, self.silent)

    def wait_connected(self, peer: int) -> None:
        """Wait until ``peer``, which was watched before it replied to anybody, has replied."""
        self.wait(lambda: (peer, True) in self.silent and self.silent[-1] == (peer, False))


class Watch:
    """A worker that watches, and replies at ``listener``."""

    def __init__(
        self, heard: Heard, limits: LivenessTimeouts = QUICK, listener: HeartbeatListener | None = None
    ) -> None:
        self._service = ServiceThread("w")
        self._service.start()
        self._monitor = HeartbeatMonitor(
            "w", listener or a_listener(), self._service, heard.on_lost, heard.on_suspected, limits
        )
        self.watch, self.forget = self._monitor.watch, self._monitor.forget

    def close(self, goodbye: str = "") -> None:
        self._monitor.close(goodbye)
        self._monitor.close()
        assert self._monitor.join(Deadline.after(WAIT))
        self._service.close()
        assert self._service.join(Deadline.after(WAIT)) == []


@contextmanager
def watch(
    heard: Heard, limits: LivenessTimeouts = QUICK, listener: HeartbeatListener | None = None
) -> Iterator[Watch]:
    """As :class:`Watch`."""
    made = Watch(heard, limits, listener)
    try:
        yield made
    finally:
        made.close()


def a_listener() -> HeartbeatListener:
    """At an address of its own."""
    return HeartbeatListener(f"ipc://@zmqgrad-{secrets.token_hex(8)}", "127.0.0.1", key=KEY)


KEY = b"the key of the job"
GREETING_SIZE = TOKEN_SIZE + CHALLENGE_SIZE


# ---- judging ---------------------------------------------------------------------------------------------


def test_a_silent_peer_is_suspected_and_recovers() -> None:
    detector = FailureDetector(3.0, 20.0, now=100.0)
    assert detector.interval == 1.0
    assert [detector.tick(100.0 + n) for n in range(1, 4)] == [
        LivenessChange.NOTHING,
        LivenessChange.NOTHING,
        LivenessChange.SUSPECTED,
    ]
    assert detector.tick(104.0) is LivenessChange.NOTHING, "told once"
    assert detector.on_reply(104.5) is LivenessChange.RECOVERED
    assert detector.on_reply(104.6) is LivenessChange.NOTHING
    told = [detector.tick(104.6 + n) for n in range(1, 22)]
    assert told.index(LivenessChange.SUSPECTED) == 2
    assert told.index(LivenessChange.FROZEN) == 19


def test_without_a_limit_the_frozen_are_never_lost() -> None:
    detector = FailureDetector(3.0, 0.0, now=0.0)
    assert {detector.tick(float(n)) for n in range(1, 1000)} == {
        LivenessChange.NOTHING,
        LivenessChange.SUSPECTED,
    }


def test_a_stopped_monitor_does_not_suspect_its_peers() -> None:
    detector = FailureDetector(3.0, 20.0, now=0.0)
    detector.on_reply(1.0)
    assert detector.tick(5000.0) is LivenessChange.NOTHING, "one interval, whatever the clock says"
    assert detector.tick(5001.0) is LivenessChange.NOTHING
    assert detector.tick(5002.0) is LivenessChange.SUSPECTED
    assert detector.last_reply_at == 1.0


@pytest.mark.parametrize("frozen", [0.001, 1.0, 1.1, 1.9, 2.0])
def test_a_stopped_monitor_does_not_lose_a_healthy_peer_whatever_the_limit(frozen: float) -> None:
    """When it goes on, the reply to its next ping has not arrived yet."""
    detector = FailureDetector(3.0, frozen, now=0.0)
    for now in (0.0, 5000.0, 9000.0):
        detector.on_reply(now)
        assert detector.tick(now + 4000.0) is LivenessChange.NOTHING
    detector.on_reply(13_000.0)
    told = [detector.tick(13_000.0 + n) for n in range(1, 4)]
    assert LivenessChange.FROZEN in told, "but the frozen are lost soon"


def test_silence_counts_anew_after_nothing_could_be_sent() -> None:
    detector = FailureDetector(3.0, 20.0, now=0.0)
    for n in range(1, 100):
        assert detector.tick(float(n)) in (LivenessChange.NOTHING, LivenessChange.SUSPECTED)
        detector.restart(float(n))
    assert detector.silence == 0.0
    assert not detector.suspected


@pytest.mark.parametrize(
    "limits", [LivenessTimeouts(local=0), LivenessTimeouts(remote=-1), LivenessTimeouts(frozen=-1)]
)
def test_invalid_timeouts(limits: LivenessTimeouts) -> None:
    with pytest.raises(ConfigurationError, match="liveness limit"):
        limits.check()


def test_refusals_count_only_while_the_watcher_runs() -> None:
    refusals = Refusals()
    assert refusals.refused(100.0) == 0.0
    assert refusals.refused(100.0 + RETRY_SECONDS) == RETRY_SECONDS
    assert refusals.refused(5000.0) == 3 * RETRY_SECONDS, "it was stopped itself"
    refusals.clear()
    assert refusals.refused(5001.0) == 0.0


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("ipc://@zmqgrad-1", True),
        ("tcp://127.0.0.1:5", True),
        ("heartbeat://127.1.2.3:5/ab", True),
        ("tcp://[::1]:5", True),
        ("tcp://10.0.0.1:5", False),
        ("heartbeat://[2001:db8::1]:5/ab", False),
    ],
)
def test_what_is_on_this_host(endpoint: str, local: bool) -> None:
    assert is_on_this_host(endpoint) is local


# ---- over sockets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_peer_that_ends_is_lost(kind: str) -> None:
    a, b = ZmqMailbox("a", 0), ZmqMailbox("b", 1)
    arrived = threading.Event()
    heard = Heard()
    endpoints = [e for e in b.endpoints if e.startswith((kind, "heartbeat"))]
    try:
        a.start(lambda inbound: None, lambda peer: PeerAddress(endpoints, b.incarnation), None, heard.on_end)
        b.start(
            lambda inbound: arrived.set(),
            lambda peer: PeerAddress(
                [e for e in a.endpoints if e.startswith((kind, "heartbeat"))], a.incarnation
            ),
            None,
            heard.on_end,
        )
        a.send(1, Hello("a"), 1)
        assert arrived.wait(WAIT)
        assert not heard.lost
        b.close()
        assert b.join(Deadline.after(WAIT)) == []
        heard.wait(lambda: heard.lost)
        [(peer, why)] = heard.lost
        assert peer == 1
        refused = r", as 127\.0\.0\.1:\d+ refuses connections \(last heard of .*" if kind == "tcp" else ".*"
        assert re.match(rf"its process has ended{refused}", why)
    finally:
        for mailbox in (a, b):
            mailbox.close()
            assert mailbox.join(Deadline.after(WAIT)) == []


def test_only_peers_that_nothing_was_sent_to_are_unmonitored() -> None:
    mailboxes = [ZmqMailbox(f"w{n}", n) for n in range(4)]
    heard = Heard()
    addresses = [PeerAddress(mailbox.endpoints, mailbox.incarnation) for mailbox in mailboxes]
    try:
        for mailbox in mailboxes:
            mailbox.start(lambda inbound: None, addresses.__getitem__, None, heard.on_end)
        own = mailboxes[0]
        for peer in (1, 2, 3):
            own.monitor(peer)
        own.send(2, Hello("w0"), 1)
        own.unmonitor(1)
        own.unmonitor(2)
        for mailbox in mailboxes[1:]:
            mailbox.close()
            assert mailbox.join(Deadline.after(WAIT)) == []
        heard.wait(lambda: len(heard.lost) == 2)
        assert {peer for peer, why in heard.lost} == {2, 3}, heard.lost
    finally:
        for mailbox in mailboxes:
            mailbox.close()
            assert mailbox.join(Deadline.after(WAIT)) == []


@pytest.mark.parametrize("kind", ["ipc", "heartbeat"])
def test_a_silent_peer_is_suspected_until_it_replies(kind: str) -> None:
    """Its kernel takes the connection, as that of a stopped process does; then it goes on."""
    heard = Heard()
    other = a_listener()
    address = other.endpoint if kind == "heartbeat" else name_of(other)
    assert address is not None
    with watch(heard) as watching:
        watching.watch(7, address)
        heard.wait(lambda: (7, True) in heard.silent)
        assert not heard.lost
        goes_on = Watch(heard, LivenessTimeouts(), other)
        heard.wait(lambda: (7, False) in heard.silent)
        assert not heard.lost
        goes_on.close()
        heard.wait(lambda: heard.lost)
        assert heard.lost[0][1].startswith("its process has ended")
        assert heard.ended == [True]


@pytest.mark.parametrize("kind", ["ipc", "heartbeat"])
def test_a_peer_that_leaves_says_so_to_those_that_only_monitor_it(kind: str) -> None:
    """No message ever passed between the two, so there is no other connection on which to say it."""
    heard = Heard()
    other = a_listener()
    address = other.endpoint if kind == "heartbeat" else name_of(other)
    assert address is not None
    with watch(heard) as watching:
        watching.watch(7, address)
        heard.wait(lambda: (7, True) in heard.silent)
        leaves = Watch(heard, LivenessTimeouts(), other)
        heard.wait_connected(7)
        leaves.close("it has left the group")
        heard.wait(lambda: heard.lost)
        assert heard.lost == [(7, "it has left the group")]


def test_a_peer_that_is_silent_for_too_long_is_lost() -> None:
    heard = Heard()
    other = a_listener()
    with watch(heard, QUICK._replace(frozen=0.1)) as watching:
        watching.watch(7, name_of(other))
        heard.wait(lambda: heard.lost)
        assert heard.silent == [(7, True)]
        assert "though it exists" in heard.lost[0][1]
        assert heard.ended == [False]
    other.close()


def name_of(listener: HeartbeatListener) -> str:
    """Where it listens on this host."""
    name = listener.sockets[0].getsockname()
    return f"ipc://@{name[1:].decode()}"


def test_another_process_at_the_same_port_is_another() -> None:
    heard = Heard()
    with watch(heard) as watching, socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        watching.watch(7, f"heartbeat://127.0.0.1:{port}/{'ab' * TOKEN_SIZE}")
        guest, _ = listening.accept()
        guest.send(bytes(TOKEN_SIZE))
        heard.wait(lambda: heard.lost)
        assert heard.lost[0][1].startswith(f"another process listens at heartbeat://127.0.0.1:{port} now")
        guest.close()


def test_many_foreign_connections_do_not_exclude_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of too many connections is closed; a peer connects again, and is not considered dead."""
    most = 3
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2 * most, 2 * most))  # half of them are for peers
    heard, others = Heard(), Heard()
    listener = a_listener()
    address = listener.sockets[1].getsockname()
    assert listener.endpoint is not None
    with watch(heard) as watching:
        watching.watch(7, listener.endpoint)
        heard.wait(lambda: heard.silent)
        with watch(others, listener=listener):
            heard.wait_connected(7)
            crowd = [socket.create_connection(address, WAIT) for _ in range(9)]
            for stranger in crowd:
                stranger.settimeout(WAIT)
                assert len(stranger.recv(GREETING_SIZE, socket.MSG_WAITALL)) == GREETING_SIZE
            for stranger in crowd[:-1]:
                assert not stranger.recv(1)
            heard.wait(lambda: heard.silent[-1] == (7, False))  # the peer was not excluded
            for stranger in crowd:
                stranger.close()
            assert not heard.lost


@pytest.mark.parametrize("data", [b"", b"half of"])
def test_a_foreign_connection_is_closed_in_time(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "HANDSHAKE_SECONDS", 0.02)
    listener = a_listener()
    address = listener.sockets[1].getsockname()
    with watch(Heard(), listener=listener), socket.create_connection(address, WAIT) as stranger:
        assert len(stranger.recv(GREETING_SIZE, socket.MSG_WAITALL)) == GREETING_SIZE
        stranger.send(data)
        assert not stranger.recv(1)


@pytest.mark.parametrize("kind", ["ipc", "heartbeat"])
def test_a_process_that_does_not_know_the_key_is_not_answered(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    listener = a_listener()
    family = socket.AF_UNIX if kind == "ipc" else socket.AF_INET
    address = listener.sockets[kind != "ipc"].getsockname()
    with watch(Heard(), listener=listener):
        for key, replies in ((b"another key", False), (KEY, True)):
            with socket.socket(family) as stranger:
                stranger.settimeout(WAIT)
                stranger.connect(address)
                greeting = stranger.recv(GREETING_SIZE, socket.MSG_WAITALL)
                nonce = secrets.token_bytes(NONCE_SIZE)
                for byte in nonce + prove(key, OF_PEER, greeting, nonce):  # however it arrives
                    stranger.send(bytes([byte]))
                assert bool(stranger.recv(1)) is replies
    assert len([r for r in caplog.records if "does not know the key of this job" in r.message]) == 1


def test_an_impostor_does_not_pass_for_a_peer() -> None:
    """Another process has the name of one that has ended, and sends what it has seen of it."""
    heard = Heard()
    with watch(heard) as watching, socket.socket(socket.AF_UNIX) as listening:
        name = f"@zmqgrad-{secrets.token_hex(8)}"
        listening.bind(f"\0{name[1:]}")
        listening.listen()
        watching.watch(7, f"ipc://{name}")
        guest, _ = listening.accept()
        guest.send(bytes(GREETING_SIZE))
        proven = guest.recv(NONCE_SIZE + PROOF_SIZE, socket.MSG_WAITALL)
        guest.send(proven[NONCE_SIZE:])
        heard.wait(lambda: heard.lost)
        assert heard.lost[0][1].startswith("another process listens at")
        guest.close()


def test_a_host_that_accepts_no_connection_is_lost_as_unreachable() -> None:
    heard = Heard()
    with watch(heard) as watching, socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)  # beyond what waits to be accepted, its kernel says nothing at all
        address = listening.getsockname()
        others = [socket.socket() for _ in range(4)]
        for other in others:
            other.setblocking(False)
            other.connect_ex(address)
        watching.watch(7, f"heartbeat://127.0.0.1:{address[1]}/{'ab' * TOKEN_SIZE}")
        heard.wait(lambda: heard.lost)
        assert heard.lost[0][1].startswith("its host is out of reach")
        for other in others:
            other.close()


def test_a_worker_without_descriptors_loses_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """It cannot connect, for which its peer is not to blame; it watches as soon as it can."""
    heard, other = Heard(), a_listener()
    opened = socket.socket
    tried = SimpleQueue[None]()

    def refuse(*args: int, **kwargs: int) -> socket.socket:
        if threading.current_thread().name == "w-service":
            tried.put(None)
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(*args, **kwargs)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch, watch(heard, QUICK._replace(frozen=0.05)) as watching:
        patch.setattr(socket, "socket", refuse)
        watching.watch(7, name_of(other))
        for _ in range(20):
            tried.get(timeout=WAIT)
        assert not heard.lost
        assert not heard.silent
        assert "cannot watch worker 7: [Errno 24] Too many open files" in caplog.text
        patch.undo()
        heard.wait(lambda: heard.lost)
        assert "though it exists" in heard.lost[0][1]
    other.close()


def test_a_connection_that_breaks_is_opened_again() -> None:
    heard = Heard()
    with watch(heard) as watching, socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.settimeout(WAIT)
        watching.watch(7, f"heartbeat://127.0.0.1:{listening.getsockname()[1]}/{'ab' * TOKEN_SIZE}")
        for _ in range(3):
            guest, _ = listening.accept()
            guest.send(b"\xab" * TOKEN_SIZE)
            guest.close()
        assert not heard.lost


def test_a_peer_that_is_forgotten_may_end() -> None:
    heard = Heard()
    first, second = a_listener(), a_listener()
    with watch(heard) as watching:
        watching.watch(1, name_of(first))
        watching.forget(1)
        watching.watch(2, name_of(second))
        heard.wait(lambda: (2, True) in heard.silent)  # so the orders have been read
        first.close()
        second.close()
        heard.wait(lambda: heard.lost)
        assert [peer for peer, _ in heard.lost] == [2]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_does_not_keep_its_parent_alive() -> None:
    """The kernel keeps a connection open while any process has it: also one that a fork has by accident."""
    heard, other = Heard(), Heard()
    listener = a_listener()
    with watch(heard) as watching:
        watching.watch(7, name_of(listener))
        heard.wait(lambda: heard.silent)
        watched = Watch(other, LivenessTimeouts(), listener)
        heard.wait_connected(7)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)  # until the test is over
            os._exit(0)
        try:
            watched.close()
            heard.wait(lambda: heard.lost)
        finally:
            os.close(reading)
            os.close(writing)
            os.waitpid(child, 0)


def test_is_reachable_finds_listeners() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        endpoint = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        assert is_reachable(endpoint)
        assert is_reachable(endpoint.replace("tcp", "heartbeat") + "/abcd")
    assert not is_reachable(endpoint)
    assert not is_reachable(endpoint.replace("tcp", "heartbeat") + "/abcd")
    assert not is_reachable("ipc://@zmqgrad-nobody-is-here")
    assert is_reachable("memory://3")  # cannot be told: not held against it
