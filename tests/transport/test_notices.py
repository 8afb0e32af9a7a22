"""Notices over real sockets: what is said unasked arrives in order, breaks are told, ends are ends."""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.transport.requests.test_requests import Echo, Running
from tests.transport.test_curve import OURS, THEIRS
from zmqgrad.errors import ClosedError, ProtocolError, SecretError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.notices import NoticeListener
from zmqgrad.transport.requests import outgoing
from zmqgrad.transport.requests.connection import Client
from zmqgrad.transport.requests.server import RequestServer
from zmqgrad.transport.requests.short import Handler
from zmqgrad.transport.security import Keys
from zmqgrad.transport.zmtp import HEAD_ROOM, opening, write_head
from zmqgrad.wire.codec import encode
from zmqgrad.wire.messages import KeyCreated, Message, StoreDone, StoreKeys, StoreListen

PATIENCE = 20.0


class Speaker(Echo):
    """Says what it is told to say, on the connections that were introduced."""

    def __init__(self, running: Running) -> None:
        super().__init__(running.server)
        self.ears: dict[str, Client] = {}
        self.refuses = False
        self._orders: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def handler(self, kind: type[Message]) -> Handler:
        return self.handle

    def handle(self, client: Client, line: int, message_id: int, message: Message) -> None:
        if isinstance(message, StoreListen):
            if not self.refuses:
                self.ears[message.nonce] = client
            answer = StoreKeys(("no",)) if self.refuses else StoreDone()
            self.server.reply(client, message_id, answer)
            return
        super().handle(client, line, message_id, message)

    def settle(self) -> None:
        while not self._orders.empty():
            self.server.notify(list(self.ears.values()), self._orders.get())

    def say(self, *messages: Message) -> None:
        """From another thread; what comes in next makes the server look."""
        for message in messages:
            self._orders.put(message)
        socket.create_connection(("127.0.0.1", self.server.port), PATIENCE).close()


class Speaking(Running):
    """A server that gives notices."""

    def __init__(self, address: str = "tcp://127.0.0.1:*", keys: Keys | None = None) -> None:
        self.keys = keys
        self.server = RequestServer("speaker", address, keys=keys)
        self.speaker = self.service = Speaker(self)
        self.thread = threading.Thread(target=self.server.serve, args=(self.service,), daemon=True)
        self.thread.start()


class Listening:
    """A listener, and what it heard."""

    def __init__(self, address: str, keys: Keys | None = None) -> None:
        self.heard: queue.Queue[Message] = queue.Queue()
        self.breaks = threading.Semaphore(0)
        self.listener = NoticeListener("test", address, keys, introduce, self.heard.put, self.breaks.release)

    def known(self, but_not: str = "") -> str:
        return self.listener.wait_known(Deadline.after(PATIENCE), but_not)

    def close(self) -> None:
        self.listener.close()
        self.listener.close()
        assert self.listener.join(Deadline.after(PATIENCE)) == []
        assert not self.breaks.acquire(blocking=False), "an end is no break"


def introduce(ask: Callable[[Message], Message], name: str) -> None:
    if type(ask(StoreListen(name))) is not StoreDone:
        raise ProtocolError("not welcome")


def notice(n: int, size: int = 0) -> KeyCreated:
    return KeyCreated("k", n + 1, n, bytes(size))


@pytest.fixture(params=[None, OURS], ids=["plain", "keyed"])
def speaking(request: pytest.FixtureRequest) -> Iterator[Speaking]:
    made = Speaking(keys=request.param)
    yield made
    made.stop()


@pytest.fixture
def listening(speaking: Speaking) -> Iterator[Listening]:
    made = Listening(speaking.server.endpoint, speaking.keys)
    yield made
    made.close()


def test_all_that_is_said_arrives_in_order(speaking: Speaking, listening: Listening) -> None:
    """By everybody, whatever its size."""
    other = Listening(speaking.server.endpoint, speaking.keys)
    assert listening.known() != other.known()
    said = [notice(n, size) for n, size in enumerate([0, 1, 300, 70_000, 0, 300_000, 2])]
    speaking.speaker.say(*said)
    for each in (listening, other):
        assert [each.heard.get(timeout=PATIENCE) for _ in said] == said
    other.close()


def test_a_break_is_told_and_the_connection_made_anew() -> None:
    first = Speaking()
    listening = Listening(first.server.endpoint)
    before = listening.known()
    first.stop()
    assert listening.breaks.acquire(timeout=PATIENCE)
    second = Speaking(first.server.endpoint)
    assert listening.known(but_not=before) in second.speaker.ears
    second.speaker.say(notice(1))
    assert listening.heard.get(timeout=PATIENCE) == notice(1)
    assert not listening.breaks.acquire(blocking=False)
    listening.close()
    second.stop()


def test_who_does_not_read_is_hung_up_on(speaking: Speaking, monkeypatch: pytest.MonkeyPatch) -> None:
    """And connects anew: others get all of it."""
    monkeypatch.setattr(outgoing, "MAX_UNREAD", 3)
    stuck, go = Listening(speaking.server.endpoint, speaking.keys), threading.Event()
    stuck.listener._on_notice = lambda message: go.wait(PATIENCE) and None
    name = stuck.known()
    for n in range(10_000):
        speaking.speaker.say(notice(n, 300_000))
        if speaking.speaker.ears[name].closed:
            break
    go.set()
    assert stuck.breaks.acquire(timeout=PATIENCE)
    assert stuck.known(but_not=name)
    stuck.close()


def test_nobody_there_another_secret_not_welcome(speaking: Speaking) -> None:
    address = speaking.server.endpoint
    speaking.speaker.refuses = True
    for keys, error in ((THEIRS, SecretError), (speaking.keys, ProtocolError)):
        listening = Listening(address, keys)
        with pytest.raises(error):
            listening.known()
        listening.close()
    speaking.server.stop()
    nobody = Listening("tcp://127.0.0.1:1")
    with pytest.raises(TimeoutError, match=r"no notices from tcp://127\.0\.0\.1:1"):
        nobody.listener.wait_known(Deadline.after(0.01))
    ended: queue.Queue[bool] = queue.Queue()

    def wait() -> None:
        with pytest.raises(ClosedError):
            nobody.known()
        ended.put(True)

    waits = threading.Thread(target=wait)
    waits.start()
    nobody.close()
    assert ended.get(timeout=PATIENCE)
    waits.join(PATIENCE)
    with pytest.raises(ClosedError):
        nobody.known()


def test_garbage_is_dropped_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """(P5)."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        with caplog.at_level(logging.WARNING, "zmqgrad.transport.notices"):
            listening = Listening(f"tcp://127.0.0.1:{server.getsockname()[1]}")
            connection, _ = server.accept()
            with connection:
                connection.sendall(opening("ROUTER"))
                heard = b""
                while len(heard) < len(opening("DEALER")) + 3:
                    heard += connection.recv(1000)
                done = [bytes(encode(StoreDone(), 0, 1, 1))]
                for body in (*done, b"what?", b"", bytes(encode(notice(1), 0, 1, 0))):
                    connection.sendall(write_head(bytearray(HEAD_ROOM) + body))
                assert listening.heard.get(timeout=PATIENCE) == notice(1)
            assert listening.breaks.acquire(timeout=PATIENCE)
        assert listening.listener.malformed == 2
        assert caplog.text.count("dropped a malformed notice") == 1
        listening.close()
