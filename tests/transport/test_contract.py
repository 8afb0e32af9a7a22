"""The mailbox contract, over ZeroMQ and in memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue

import pytest
import zmq

from tests.support.waiting import eventually
from tests.transport.contract import KeepsOrder, Kind, MailboxContract
from zmqgrad.runtime.clock import Deadline
from zmqgrad.testing.mailbox import MemoryMailbox
from zmqgrad.testing.network import MemoryNetwork
from zmqgrad.transport.base import Inbound, Mailbox, PeerAddress
from zmqgrad.transport.local import MAX_PACKET_BYTES, LocalConnection, connect
from zmqgrad.transport.local.channels import channel_endpoint
from zmqgrad.transport.local.handshake import PROTOCOL, Hello
from zmqgrad.transport.mailbox import ZmqMailbox
from zmqgrad.transport.security import Keys, load_keys, local_key, secure_client
from zmqgrad.transport.shared_memory.settings import ArenaSettings
from zmqgrad.wire.codec import encode
from zmqgrad.wire.frames import write_session
from zmqgrad.wire.messages import StoreSet

SECRET = "the secret of this job, of 33 bytes"


class InMemory:
    """Mailboxes on one memory network."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()

    def open(self, name: str, worker_id: int) -> Mailbox:
        return MemoryMailbox(self.network, name, worker_id)

    def send_raw(self, mailbox: Mailbox, frames: Sequence[bytes]) -> None:
        self.network.inject(mailbox.endpoints[0], frames)

    def close(self) -> None:
        pass


class OverZmq:
    """Mailboxes on real sockets: ``only`` picks the endpoints by their scheme."""

    def __init__(self, only: str, keys: Keys | None = None, fast_path: bool = True) -> None:
        self._only = only
        self._fast_path = fast_path
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._strangers: dict[str, zmq.Socket[bytes]] = {}
        self._locals: dict[str, LocalConnection] = {}

    def open(self, name: str, worker_id: int) -> Mailbox:
        if self._only == "ipc":
            return ZmqMailbox(name, worker_id, tcp_host=None)
        return TcpAlone(name, worker_id, keys=self._keys, fast_path=self._fast_path)

    def send_raw(self, mailbox: Mailbox, frames: Sequence[bytes]) -> None:
        endpoint = mailbox.endpoints[0]
        if endpoint.startswith("ipc"):
            if endpoint not in self._locals:
                hello = Hello(PROTOCOL, mailbox.incarnation, 9)
                key = local_key(None, b"")
                self._locals[endpoint] = connect(channel_endpoint(endpoint), hello, key, _ignore, eager=True)
            # An empty packet would be the end of the connection, as would be one that is too large.
            self._locals[endpoint].send(frames[0][:MAX_PACKET_BYTES] or b"?")
            return
        if endpoint not in self._strangers:
            stranger = self._strangers[endpoint] = self._context.socket(zmq.DEALER)
            stranger.linger = 0
            if self._keys is not None:
                secure_client(stranger, self._keys)
            stranger.connect(endpoint)
        self._strangers[endpoint].send_multipart(list(frames))

    def close(self) -> None:
        for stranger in (*self._strangers.values(), *self._locals.values()):
            stranger.close()
        self._context.term()


def _ignore(connection: LocalConnection) -> None:
    """A stranger sends little."""


class TcpAlone(ZmqMailbox):
    """As its peers on another host see it."""

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(e for e in super().endpoints if e.startswith("tcp://"))


class TestInMemory(MailboxContract, KeepsOrder):
    @pytest.fixture
    def kind(self) -> Kind:
        return InMemory()


class TestOverIpc(MailboxContract, KeepsOrder):
    @pytest.fixture
    def kind(self) -> Kind:
        return OverZmq("ipc")


class OverArena(OverZmq):
    """Mailboxes that share memory, by which every frame goes."""

    def __init__(self) -> None:
        super().__init__("ipc")

    def open(self, name: str, worker_id: int) -> Mailbox:
        return ZmqMailbox(name, worker_id, tcp_host=None, arena=ArenaSettings(64 << 20, threshold=1))


class TestOverArena(MailboxContract, KeepsOrder):
    @pytest.fixture
    def kind(self) -> Kind:
        return OverArena()


class TestOverTcp(MailboxContract, KeepsOrder):
    @pytest.fixture
    def kind(self) -> Kind:
        return OverZmq("tcp")


class TestOverTcpWithoutFastPath(MailboxContract, KeepsOrder):
    """As on macOS: everything goes through libzmq."""

    @pytest.fixture
    def kind(self) -> Kind:
        return OverZmq("tcp", fast_path=False)


class TestOverCurve(MailboxContract, KeepsOrder):
    @pytest.fixture
    def kind(self) -> Kind:
        return OverZmq("tcp", load_keys(SECRET))


def test_processes_without_the_secret_can_neither_send_nor_receive() -> None:
    """P4 of docs/guarantees.md: their messages are not even decoded, and nothing is sent to them."""
    ours, theirs = load_keys(SECRET), load_keys("another secret of some length")
    assert ours is not None
    assert theirs is not None
    kind, arrived = OverZmq("tcp", ours), SimpleQueue[Inbound]()
    mailbox = kind.open("ours", 1)
    others = [ZmqMailbox("s", 7, keys=keys) for keys in (None, theirs, theirs._replace(server=ours.server))]
    try:
        mailbox.start(arrived.put, lambda peer: PeerAddress(others[0].endpoints[1:2]))
        for other in others:
            other.start(lambda inbound: None, lambda peer: PeerAddress(mailbox.endpoints))
            other.send(1, StoreSet("stranger", b""), 1)
        kind.send_raw(mailbox, [bytes(encode(StoreSet("one of ours", b""), 9, 1, 1))])
        message = arrived.get(timeout=20).message
        assert isinstance(message, StoreSet)
        assert message.key == "one of ours"
        mailbox.send(7, StoreSet("secret", b""), 1)  # to the first of them, who has no secret
        kind.send_raw(mailbox, [bytes(encode(StoreSet("last", b""), 9, 1, 1))])
        assert arrived.get(timeout=20).message == StoreSet("last", b"")
        assert arrived.empty()
        assert mailbox.statistics()["malformed"] == 0
        assert [other.statistics()["messages_received"] for other in others] == [0, 0, 0]
    finally:
        for each in (mailbox, *others):
            each.close()
            assert each.join(Deadline.after(20)) == []
        kind.close()


@pytest.mark.parametrize("only", ["ipc", "tcp"])
def test_a_message_under_the_name_of_another_worker_does_not_count_for_that(only: str) -> None:
    """Else the next message of that worker were dropped as a repetition, or its credit were wrong."""
    kind = OverZmq(only)
    victim, other = kind.open("victim", 1), kind.open("other", 2)
    arrived, returned = SimpleQueue[Inbound](), SimpleQueue[Inbound]()
    addresses = {n: PeerAddress(box.endpoints, box.incarnation) for n, box in ((1, victim), (2, other))}
    try:
        victim.start(arrived.put, addresses.__getitem__)
        other.start(returned.put, addresses.__getitem__)
        kind.send_raw(victim, [bytes(encode(StoreSet("own name", b""), 9, 1, 1))])
        assert arrived.get(timeout=20).message == StoreSet("own name", b"")
        forged = encode(StoreSet("another name", bytes(2000)), 2, other.incarnation, 1)
        write_session(forged, 1, 0, 0)
        kind.send_raw(victim, [bytes(forged)])
        eventually(lambda: victim.statistics()["malformed"], lambda malformed: malformed == 1)
        other.send(1, StoreSet("first", b""), 1)
        assert arrived.get(timeout=20).message == StoreSet("first", b"")
        victim.send(2, StoreSet("back", b""), 1)
        assert returned.get(timeout=20).envelope.requests == 0
    finally:
        for each in (victim, other):
            each.close()
            assert each.join(Deadline.after(20)) == []
        kind.close()


def test_two_threads_may_end_a_mailbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them may have been told to hurry."""
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    for _ in range(10):
        mailbox, both = ZmqMailbox("w", 1), threading.Barrier(2)
        mailbox.close()

        def join(mailbox: ZmqMailbox = mailbox, both: threading.Barrier = both) -> None:
            both.wait()
            mailbox.join(Deadline.after(20))

        threads = [threading.Thread(target=join) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed


def test_both_addresses_are_published_the_quicker_first() -> None:
    mailbox = ZmqMailbox("w", 1)
    try:
        assert [e.partition("://")[0] for e in mailbox.endpoints] == ["ipc", "tcp", "heartbeat"]
    finally:
        mailbox.close()
        assert mailbox.join(Deadline.after(10)) == []
