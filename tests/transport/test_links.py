"""Links: which of a peer's addresses is used, and what happens without file descriptors."""

from __future__ import annotations

import itertools
import os
import re
import resource
import secrets
import socket
import sys
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
import zmq

from tests.support.interpreter import run_python
from tests.support.signals import called_within, ends
from tests.transport.contract import Office, acquire, office_of
from tests.transport.test_contract import OverZmq
from zmqgrad.errors import ClosedError, TransportError, UnknownPeerError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.base import Inbound, PeerAddress, PeerEnd
from zmqgrad.transport.bind_policy import bind_tcp
from zmqgrad.transport.local import unix_name
from zmqgrad.transport.local.channels import channel_endpoint
from zmqgrad.transport.local.descriptors import abstract_endpoint, named_process
from zmqgrad.transport.mailbox import ZmqMailbox
from zmqgrad.wire.messages import Call, Hello, Payload

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="addresses without a file are Linux's")

NOBODY = 65534


class Known:
    """Mailbox 0, which sends to mailbox 1 at the addresses that a test states."""

    def __init__(self) -> None:
        self.near, self.far = ZmqMailbox("near", 0), ZmqMailbox("far", 1)
        self.arrived: SimpleQueue[Inbound] = SimpleQueue()
        self.ipc, self.tcp = self.far.endpoints[:2]
        self.addresses: tuple[str, ...] = ()
        self.near.start(lambda _: None, lambda peer: PeerAddress(self.addresses, self.far.incarnation))
        self.far.start(self.arrived.put, lambda peer: PeerAddress(self.near.endpoints, self.near.incarnation))

    def send(self, *addresses: str) -> str:
        """Send a message to one of ``addresses``. Returns the scheme of the one that was used."""
        self.addresses = addresses
        self.near.send(1, Hello("x"), 1)
        assert self.arrived.get(timeout=20).message == Hello("x")
        channel = acquire(self.near, 1)
        if channel is None:
            return "tcp"
        channel.release([channel])
        return "ipc"

    def close(self) -> None:
        for mailbox in (self.near, self.far):
            mailbox.close()
        for mailbox in (self.near, self.far):
            assert mailbox.join(Deadline.after(20)) == []


@pytest.fixture
def known() -> Iterator[Known]:
    made = Known()
    yield made
    made.close()


def nobody() -> str:
    """An address on this host at which nobody listens."""
    return f"ipc://@zmqgrad-test-{secrets.token_hex(8)}"


def test_a_local_address_is_preferred_if_somebody_listens_there(known: Known) -> None:
    assert known.send(known.ipc, known.tcp) == "ipc"


def test_tcp_is_used_if_nobody_listens_at_the_local_address(known: Known) -> None:
    """As on another host, or in another container."""
    assert known.send(nobody(), known.tcp) == "tcp"


def test_heartbeats_are_no_address_for_messages(known: Known) -> None:
    assert known.send("heartbeat://127.0.0.1:9/00", known.tcp) == "tcp"


@pytest.mark.parametrize(
    "address", [nobody(), "heartbeat://127.0.0.1:9/00", "memory://1"], ids=["ipc", "heartbeat", "memory"]
)
def test_a_peer_that_cannot_be_reached(known: Known, address: str) -> None:
    known.addresses = (address,)
    if address.startswith("memory"):
        with pytest.raises(TransportError):
            known.near.send(1, Hello("x"), 1)
        return
    with pytest.raises(UnknownPeerError, match="can be reached"):
        known.near.send(1, Hello("x"), 1)
    assert known.send(known.ipc) == "ipc"


def test_a_process_without_descriptors_says_so(known: Known) -> None:
    known.addresses = (known.ipc, known.tcp)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(
            TransportError, match=r"cannot connect to worker 1 at ipc://@.*: .*Too many open files"
        ):
            known.near.send(1, Hello("x"), 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert known.send(known.ipc, known.tcp) == "ipc"


def test_another_process_at_the_address_is_not_sent_to(known: Known) -> None:
    """A number and an address may be used again; the incarnation tells."""
    ends: SimpleQueue[PeerEnd] = SimpleQueue()
    other = ZmqMailbox("other", 2)
    try:
        other.start(lambda _: None, lambda peer: PeerAddress((known.ipc,), 12345), on_end=ends.put)
        other.send(1, Hello("for the former process"), 1)
        assert ends.get(timeout=20).peer == 1
        assert known.arrived.empty()
    finally:
        other.close()
        assert other.join(Deadline.after(20)) == []


ALMOST_WITHOUT = """
import os, resource, sys
from zmqgrad.errors import TransportError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.mailbox import ZmqMailbox
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
used = len(os.listdir("/proc/self/fd")) - 1
for free in range(0, 60, 3):
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + free, hard))
    try:
        mailbox = ZmqMailbox("w0", 0)
        mailbox.close()
        assert mailbox.join(Deadline.after(10)) == []
        print("opened")
    except TransportError as e:
        print("refused", e)
"""


@pytest.mark.processes
def test_a_mailbox_opens_all_its_sockets_or_none() -> None:
    """libzmq aborts the process if it has a few descriptors, but not enough."""
    lines = run_python(ALMOST_WITHOUT, timeout=60.0).splitlines()
    assert [line.split()[0] for line in lines] == sorted((line.split()[0] for line in lines), reverse=True)
    assert lines[-1] == "opened"
    assert re.fullmatch("refused w0 cannot open its sockets: .*", lines[0])


def test_nothing_is_bound_without_descriptors() -> None:
    """libzmq would abort the process: it cannot list the network interfaces."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(TransportError, match=r"cannot listen on tcp://.*: Too many open files"):
                bind_tcp(router, "tcp://127.0.0.1:*", secured=False)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert bind_tcp(router, "tcp://127.0.0.1:*", secured=False).startswith("tcp://127.0.0.1:")


def test_an_endpoint_names_its_process() -> None:
    assert named_process(abstract_endpoint("test")) == os.getpid()
    assert named_process("ipc://@zmqgrad-test-4194305-00") == 4194305
    assert named_process("ipc:///tmp/zmqgrad-1/socket") == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")
def test_a_peer_of_another_user_is_reached_by_tcp(known: Known) -> None:
    """It would take the connection, and hang up as soon as it saw whose it is."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        name = nobody()
        listening.bind(unix_name(channel_endpoint(name)))
        os.seteuid(NOBODY)
        try:
            listening.listen()
        finally:
            os.seteuid(0)
        assert known.send(name, known.tcp) == "tcp"


def test_peers_of_another_user_use_tcp(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert known.send(known.ipc, known.tcp) == "tcp"


# ---- by tcp ----------------------------------------------------------------------------------------------


def test_the_end_of_one_peer_leaves_the_large_messages_of_others_alone() -> None:
    """All of them pass the same socket on their last way."""
    office = Office(OverZmq("tcp"))
    try:
        a, b, c = (office.open(n, ends=True) for n in range(3))
        call = Call("f", Payload())
        for n in range(3):
            b.mailbox.send(0, call, n, [bytes(4 << 20)])
        assert b.mailbox.flush(Deadline.after(20))
        b.mailbox.close("it leaves")
        assert a.take_until_end(1) == ([0, 1, 2], "it leaves")
        for n in range(3):
            c.mailbox.send(0, call, n, [bytes(4 << 20)])
            inbound = a.events.get(timeout=20)
            assert isinstance(inbound, Inbound)
            assert (inbound.envelope.source, inbound.envelope.message_id) == (2, n)
            del inbound
    finally:
        office.close()


@pytest.mark.parametrize("way", ["ipc", "tcp"])
def test_a_reader_that_fails_ends_all_links(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """No other thread would read, and who waits for a reply would wait for ever."""
    arrived: list[Inbound] = []
    ends: SimpleQueue[PeerEnd] = SimpleQueue()

    def on_idle() -> None:
        if arrived:
            raise MemoryError("no memory for a batch")

    with office_of(OverZmq(way)) as office:
        box = office.open(0, start=False)
        others = [office.open(n, ends=True) for n in (1, 2)]
        box.mailbox.start(arrived.append, office.resolve, on_end=ends.put, on_idle=on_idle)
        for other in others:
            box.mailbox.send(other.mailbox.worker_id, Hello("x"), 1)
            assert isinstance(other.events.get(timeout=20), Inbound)
        others[0].mailbox.send(0, Hello("x"), 1)
        ended = [ends.get(timeout=20) for _ in others]
        assert {end.peer for end in ended} == {1, 2}
        assert all("w0 can receive nothing more: MemoryError" in end.reason for end in ended)
        for other in others:
            end = other.events.get(timeout=20)
            assert isinstance(end, PeerEnd)
            assert "can receive nothing more" in end.reason, "they are told why"
        assert "w0-receiver: reading has failed" in caplog.text
        with pytest.raises(ClosedError, match="can receive nothing more"):
            box.mailbox.send(1, Hello("x"), 2)


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_signal_handler_may_send_to_another_worker_at_any_moment_of_the_first_message(kind: str) -> None:
    """A lock that its own thread held made it wait for ever."""

    def at_every_moment() -> None:
        for number in itertools.count(1):
            with office_of(OverZmq(kind)) as office:
                a, b, c = (office.open(worker_id) for worker_id in range(3))
                sent = called_within(
                    lambda: a.mailbox.send(1, Hello("one"), 1),  # noqa: B023
                    lambda: a.mailbox.send(2, Hello("two"), 2),  # noqa: B023
                    number,
                )
                assert b.take()[0].message == Hello("one")
                if not sent:
                    return
                assert c.take()[0].message == Hello("two")

    assert ends(at_every_moment)
