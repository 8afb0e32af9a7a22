"""Peers that end, that are silent, and that cannot be told from the dead at first sight."""

from __future__ import annotations

import os
import re
import resource
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from zmqgrad.errors import ConfigurationError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.base import PeerAddress
from zmqgrad.transport.heartbeat import SUFFIX, TOKEN_SIZE, HeartbeatListener, HeartbeatMonitor
from zmqgrad.transport.heartbeat.failure_detector import (
    RETRY_SECONDS,
    FailureDetector,
    LivenessChange,
    LivenessTimeouts,
    Refusals,
    is_on_this_host,
    is_reachable,
)
from zmqgrad.transport.mailbox import ZmqMailbox
from zmqgrad.wire.messages import Hello

WAIT = 20.0

QUICK = LivenessTimeouts(local=0.03, remote=0.06, frozen=0.0)


class Heard:
    """What a watch tells."""

    def __init__(self) -> None:
        self.lost: list[tuple[int, str]] = []
        self.silent: list[tuple[int, bool]] = []
        self.changed = threading.Condition()

    def on_lost(self, peer: int, why: str) -> None:
        """A peer is gone."""
        with self.changed:
            self.lost.append((peer, why))
            self.changed.notify_all()

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


@contextmanager
def watch(
    heard: Heard, limits: LivenessTimeouts = QUICK, listener: HeartbeatListener | None = None
) -> Iterator[HeartbeatMonitor]:
    """A worker that watches, and replies at ``listener``."""
    made = HeartbeatMonitor("w", listener or a_listener(), heard.on_lost, heard.on_suspected, limits)
    try:
        yield made
    finally:
        made.close()
        assert made.join(Deadline.after(WAIT)) == []


def a_listener() -> HeartbeatListener:
    """At an address of its own."""
    return HeartbeatListener(f"ipc://@zmqgrad-{secrets.token_hex(8)}", "127.0.0.1")


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
    assert detector.tick(5000.0) is LivenessChange.NOTHING, "two intervals, whatever the clock says"
    assert detector.tick(5001.0) is LivenessChange.SUSPECTED
    assert detector.last_reply_at == 1.0


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
        a.start(lambda inbound: None, lambda peer: PeerAddress(endpoints, b.incarnation), None, heard.on_lost)
        b.start(
            lambda inbound: arrived.set(),
            lambda peer: PeerAddress(a.endpoints, a.incarnation),
            None,
            heard.on_lost,
        )
        a.send(1, Hello("a"), 1)
        assert arrived.wait(WAIT)
        assert not heard.lost
        b.close()
        assert b.join(Deadline.after(WAIT)) == []
        heard.wait(lambda: heard.lost)
        [(peer, why)] = heard.lost
        assert peer == 1
        refused = "" if kind == "ipc" else r", as 127\.0\.0\.1:\d+ refuses connections"
        assert re.match(rf"its process has ended{refused} \(last heard of ", why)
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
            mailbox.start(lambda inbound: None, addresses.__getitem__, None, heard.on_lost)
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
        goes_on = HeartbeatMonitor("o", other, heard.on_lost, heard.on_suspected, LivenessTimeouts())
        heard.wait(lambda: (7, False) in heard.silent)
        assert not heard.lost
        goes_on.close()
        assert goes_on.join(Deadline.after(WAIT)) == []
        heard.wait(lambda: heard.lost)
        assert heard.lost[0][1].startswith("its process has ended")


def test_a_peer_that_is_silent_for_too_long_is_lost() -> None:
    heard = Heard()
    other = a_listener()
    with watch(heard, QUICK._replace(frozen=0.1)) as watching:
        watching.watch(7, name_of(other))
        heard.wait(lambda: heard.lost)
        assert heard.silent == [(7, True)]
        assert "though it exists" in heard.lost[0][1]
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
                assert len(stranger.recv(TOKEN_SIZE, socket.MSG_WAITALL)) == TOKEN_SIZE
            for stranger in crowd[: -most + 1]:  # the last of them makes room for the peer, which is back
                assert not stranger.recv(1)
            for stranger in crowd:
                stranger.close()
            assert not heard.lost


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
        watched = HeartbeatMonitor("o", listener, other.on_lost, other.on_suspected, LivenessTimeouts())
        heard.wait_connected(7)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)  # until the test is over
            os._exit(0)
        try:
            watched.close()
            assert watched.join(Deadline.after(WAIT)) == []
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
    assert not is_reachable(f"ipc://@zmqgrad-nobody-is-here{SUFFIX}")
    assert is_reachable("memory://3")  # cannot be told: not held against it
