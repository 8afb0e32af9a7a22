"""The mailbox contract, over ZeroMQ and in memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import zmq

from tests.transport.contract import KeepsOrder, Kind, MailboxContract
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.arena.settings import ArenaSettings
from zmqgrad.transport.base import Mailbox
from zmqgrad.transport.mailbox import ZmqMailbox
from zmqgrad.transport.memory import MemoryMailbox, MemoryNetwork


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

    def __init__(self, only: str) -> None:
        self._only = only
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._strangers: dict[str, zmq.Socket[bytes]] = {}

    def open(self, name: str, worker_id: int) -> Mailbox:
        if self._only == "ipc":
            return ZmqMailbox(name, worker_id, tcp_host=None)
        return _TcpAlone(name, worker_id)

    def send_raw(self, mailbox: Mailbox, frames: Sequence[bytes]) -> None:
        endpoint = mailbox.endpoints[0]
        if endpoint not in self._strangers:
            stranger = self._strangers[endpoint] = self._context.socket(zmq.DEALER)
            stranger.linger = 0
            stranger.connect(endpoint)
        self._strangers[endpoint].send_multipart(list(frames))

    def close(self) -> None:
        for stranger in self._strangers.values():
            stranger.close()
        self._context.term()


class _TcpAlone(ZmqMailbox):
    """As its peers on another host see it."""

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(e for e in super().endpoints if e.startswith("tcp://"))


class TestInMemory(MailboxContract, KeepsOrder):
    @pytest.fixture
    def kind(self) -> Kind:
        return InMemory()


class TestOverIpc(MailboxContract):
    @pytest.fixture
    def kind(self) -> Kind:
        return OverZmq("ipc")


class OverArena(OverZmq):
    """Mailboxes that share memory, by which every frame goes as soon as the peer has mapped it."""

    def __init__(self) -> None:
        super().__init__("ipc")

    def open(self, name: str, worker_id: int) -> Mailbox:
        return ZmqMailbox(name, worker_id, tcp_host=None, arena=ArenaSettings(64 << 20, threshold=1))


class TestOverArena(MailboxContract):
    @pytest.fixture
    def kind(self) -> Kind:
        return OverArena()

    # Offers and answers are messages like any other: these two count messages, and would count them, too.
    test_the_tap_sees_both_directions = None  # type: ignore[assignment]
    test_statistics_count_what_went_and_came = None  # type: ignore[assignment]


class TestOverTcp(MailboxContract, KeepsOrder):
    @pytest.fixture
    def kind(self) -> Kind:
        return OverZmq("tcp")


def test_both_addresses_are_published_the_quicker_first() -> None:
    mailbox = ZmqMailbox("w", 1)
    try:
        assert [e.partition("://")[0] for e in mailbox.endpoints] == ["ipc", "tcp", "pulse"]
    finally:
        mailbox.close()
        assert mailbox.join(Deadline.after(10)) == []
