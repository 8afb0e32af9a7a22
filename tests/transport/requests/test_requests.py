"""Questions and answers over real sockets: many threads on one client, parked requests, garbage, ends."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
import zmq

from zmqgrad.errors import (
    AddressInUseError,
    ClosedError,
    ConfigurationError,
    ProtocolError,
    TransportError,
)
from zmqgrad.runtime.clock import MONOTONIC, Clock, Deadline, ManualClock
from zmqgrad.runtime.future import Outcome
from zmqgrad.transport.exposure import is_loopback
from zmqgrad.transport.requests.client import MAX_IDLE, RequestClient
from zmqgrad.transport.requests.connection import Client
from zmqgrad.transport.requests.server import RequestServer
from zmqgrad.transport.requests.short import Handler
from zmqgrad.transport.security import Keys, keys_of
from zmqgrad.wire.codec import encode
from zmqgrad.wire.messages import Message, StoreDone, StoreGet, StoreKeys, StorePing, StoreValue

PATIENCE = 20.0
LOOPBACK = "tcp://127.0.0.1:*"


class Echo:
    """Answers a ``get`` with its key; parks those of ``park`` until a ping; refuses by time what waits."""

    def __init__(self, server: RequestServer) -> None:
        self.server = server
        self.parked: list[tuple[Client, int]] = []
        self.waits_for: list[float] = []
        self.arrived = threading.Semaphore(0)
        self.gone_clients = threading.Semaphore(0)

    def handler(self, kind: type[Message]) -> Handler:
        return self.handle

    def handle(self, client: Client, line: int, message_id: int, message: Message) -> None:
        match message:
            case StoreGet("park", timeout):
                self.parked.append((client, message_id))
                self.waits_for.append(MONOTONIC.now() + timeout)
                self.server.wake_by(self.waits_for[-1])
                self.arrived.release()
            case StoreGet("fail"):
                raise LookupError("a fault of the service")
            case StoreGet(key):
                self.server.reply(client, message_id, StoreValue(key.encode()))
            case StorePing():
                self._answer_parked(b"released")
                self.server.reply(client, message_id, StoreDone())

    def _answer_parked(self, value: bytes) -> None:
        for client, message_id in self.parked:
            self.server.reply(client, message_id, StoreValue(value))
        self.parked.clear()
        self.waits_for.clear()

    def unwelcome(self, client: Client, message_id: int, limit: int) -> None:
        self.server.reply(client, message_id, StoreKeys((f"limit {limit}",)))

    def gone(self, client: Client) -> None:
        self.gone_clients.release()

    def settle(self) -> None:
        pass

    def misunderstood(self, client: Client, message_id: int, why: str) -> None:
        self.server.reply(client, message_id, StoreKeys((why,)))

    def do_due(self, now: float) -> float:
        if min(self.waits_for, default=math.inf) <= now:
            self._answer_parked(b"too late")
        return min(self.waits_for, default=math.inf)

    def stopping(self) -> None:
        self._answer_parked(b"stopping")


class Running:
    """A server, its service and its thread."""

    def __init__(self, address: str = LOOPBACK, keys: Keys | None = None) -> None:
        self.server = RequestServer("echo", address, keys=keys)
        self.service = Echo(self.server)
        self.thread = threading.Thread(target=self.server.serve, args=(self.service,), daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.server.stop()
        self.server.stop()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    yield made
    made.stop()


@pytest.fixture
def client(running: Running) -> Iterator[RequestClient]:
    made = RequestClient(running.server.endpoint)
    yield made
    made.close()


def in_thread(call: Callable[[], Message]) -> Outcome[Message]:
    outcome: Outcome[Message] = Outcome()

    def work() -> None:
        try:
            outcome.set(call())
        except BaseException as e:
            outcome.fail(e)

    threading.Thread(target=work, daemon=True).start()
    return outcome


def test_an_answer_comes_back(client: RequestClient) -> None:
    for key in ("a", "b", "x" * 50_000):
        assert client.request(StoreGet(key, 1.0), PATIENCE) == StoreValue(key.encode())


def test_many_threads_get_their_own_answers(client: RequestClient) -> None:
    def ask(name: str) -> Message:
        for n in range(50):
            answer = client.request(StoreGet(f"{name}.{n}", 1.0), PATIENCE)
            assert answer == StoreValue(f"{name}.{n}".encode())
        return StoreDone()

    outcomes = [in_thread(lambda name=str(i): ask(name)) for i in range(12)]  # type: ignore[misc]
    assert [outcome.wait(PATIENCE) for outcome in outcomes] == [StoreDone()] * 12
    assert len(client._idle) <= MAX_IDLE


def test_parked_requests_are_in_nobodys_way(running: Running, client: RequestClient) -> None:
    parked = [in_thread(lambda: client.request(StoreGet("park", 60.0), PATIENCE)) for _ in range(3)]
    for _ in parked:
        assert running.service.arrived.acquire(timeout=PATIENCE)
    assert client.request(StoreGet("a", 1.0), PATIENCE) == StoreValue(b"a")
    assert not any(wait.done() for wait in parked)
    assert client.request(StorePing(""), PATIENCE) == StoreDone()
    assert [wait.wait(PATIENCE) for wait in parked] == [StoreValue(b"released")] * 3


def test_the_service_is_called_when_something_is_due(client: RequestClient) -> None:
    assert client.request(StoreGet("park", 0.01), PATIENCE) == StoreValue(b"too late")


def test_a_late_answer_meets_no_later_question(running: Running) -> None:
    clock = ManualClock()
    with RequestClientContext(running.server.endpoint, clock=clock) as client:
        late = in_thread(lambda: client.request(StoreGet("park", 60.0), 0.02))
        assert running.service.arrived.acquire(timeout=PATIENCE)
        clock.advance(1.0)
        with pytest.raises(TimeoutError, match=r"127\.0\.0\.1"):
            late.wait(PATIENCE)
        assert client.request(StorePing(""), PATIENCE) == StoreDone(), "which answers the parked one, too"
        assert client.request(StoreGet("a", 1.0), PATIENCE) == StoreValue(b"a")


def test_an_answer_to_a_client_that_has_gone_is_counted(running: Running, client: RequestClient) -> None:
    gone = RequestClient(running.server.endpoint)
    wait = in_thread(lambda: gone.request(StoreGet("park", 60.0), PATIENCE))
    assert running.service.arrived.acquire(timeout=PATIENCE)
    gone.close()
    with pytest.raises(ClosedError):
        wait.wait(PATIENCE)
    (its_request,) = running.service.parked
    for _ in range(1000):  # libzmq notices at some time that it has gone
        running.service.parked = [its_request]
        client.request(StorePing(""), PATIENCE)
        if running.server.undeliverable:
            return
    pytest.fail("answers to a client that has gone are never counted")


class RequestClientContext:
    """A client for the length of a ``with``."""

    def __init__(self, address: str, keys: Keys | None = None, clock: Clock = MONOTONIC) -> None:
        self._client = RequestClient(address, keys=keys, clock=clock)

    def __enter__(self) -> RequestClient:
        return self._client

    def __exit__(self, *exc: object) -> None:
        self._client.close()


def test_no_server_costs_the_deadline_and_no_more() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
    with RequestClientContext(f"tcp://127.0.0.1:{port}") as client, pytest.raises(TimeoutError):
        client.request(StoreGet("a", 1.0), 0.02)


def test_a_server_that_comes_later_is_found() -> None:
    first = Running()
    address = first.server.endpoint
    with RequestClientContext(address) as client:
        assert client.request(StoreGet("a", 1.0), PATIENCE) == StoreValue(b"a")
        first.stop()
        waits = in_thread(lambda: client.request(StoreGet("b", 1.0), PATIENCE))
        second = Running(address)
        assert waits.wait(PATIENCE) == StoreValue(b"b")
        second.stop()


def test_a_stopping_server_has_a_last_word() -> None:
    running = Running()
    with RequestClientContext(running.server.endpoint) as client:
        waits = in_thread(lambda: client.request(StoreGet("park", 60.0), PATIENCE))
        assert running.service.arrived.acquire(timeout=PATIENCE)
        running.stop()
        assert waits.wait(PATIENCE) == StoreValue(b"stopping")


def test_a_server_that_never_served_stops() -> None:
    server = RequestServer("idle", LOOPBACK)
    server.stop()
    server.serve(Echo(server))


def test_closing_the_client_ends_what_waits(running: Running) -> None:
    client = RequestClient(running.server.endpoint)
    waits = [in_thread(lambda: client.request(StoreGet("park", 60.0), PATIENCE)) for _ in range(3)]
    for _ in waits:
        assert running.service.arrived.acquire(timeout=PATIENCE)
    client.close()
    client.close()
    for wait in waits:
        with pytest.raises(ClosedError, match="closed"):
            wait.wait(PATIENCE)
    with pytest.raises(ClosedError, match="closed"):
        client.request(StoreGet("a", 1.0), PATIENCE)


def test_ctrl_c_ends_a_wait(running: Running, client: RequestClient) -> None:
    main = threading.get_ident()
    interrupted = threading.Event()

    def interrupt() -> None:
        running.service.arrived.acquire(timeout=PATIENCE)
        # More than once: a signal just before the wait begins is seen at its end only.
        while not interrupted.is_set():
            signal.pthread_kill(main, signal.SIGINT)
            interrupted.wait(0.5)

    def once(number: int, frame: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, once)
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            client.request(StoreGet("park", 60.0), PATIENCE)
    finally:
        interrupted.set()
        thread.join(PATIENCE)
        signal.signal(signal.SIGINT, before)
    assert client.request(StoreGet("a", 1.0), PATIENCE) == StoreValue(b"a")


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"GET / HTTP/1.1"],
        [b"zg" + b"\xff" * 40],
        [b"zg\x01" + b"\0" * 21],
        [bytes(encode(StoreGet("k", 1.0), 0, 1, 1))[:-3]],
        [bytes(encode(StoreGet("k", 1.0), 0, 1, 1)), b"and one more", b"and another"],
    ],
    ids=["empty", "http", "version", "type", "cut", "frames"],
)
def test_garbage_is_counted_and_logged_once(
    running: Running, client: RequestClient, frames: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """(P5): and the server goes on."""
    with (
        caplog.at_level(logging.WARNING, "zmqgrad.transport.requests.server"),
        zmq.Context() as context,
        context.socket(zmq.DEALER) as stranger,
    ):
        stranger.linger = 0
        stranger.rcvtimeo = int(PATIENCE * 1000)
        stranger.connect(running.server.endpoint)
        for _ in range(3):
            stranger.send_multipart(frames)
        stranger.send(encode(StoreGet("after", 1.0), 0, 1, 7))
        while b"after" not in stranger.recv():  # what was malformed and ours is answered, too
            pass
    assert running.server.malformed == 3
    assert caplog.text.count("dropped a malformed") == 1
    assert client.request(StoreGet("a", 1.0), PATIENCE) == StoreValue(b"a")


def test_a_client_of_ours_is_told_that_it_was_not_understood(client: RequestClient) -> None:
    answer = client.request(StoreGet("k", -1.0), PATIENCE)
    assert isinstance(answer, StoreKeys)
    assert "malformed StoreGet" in answer.keys[0]


def test_a_fault_of_the_service_is_logged(client: RequestClient, caplog: pytest.LogCaptureFixture) -> None:
    unanswered = in_thread(lambda: client.request(StoreGet("fail", 1.0), PATIENCE))
    limit, pause = Deadline.after(PATIENCE), threading.Event()
    while "LookupError: a fault of the service" not in caplog.text and not limit.passed():
        pause.wait(0.001)  # nothing tells when a line is logged
    assert "LookupError: a fault of the service" in caplog.text
    assert client.request(StoreGet("a", 1.0), PATIENCE) == StoreValue(b"a")
    assert not unanswered.done()
    client.close()
    with pytest.raises(ClosedError):
        unanswered.wait(PATIENCE)


def test_an_answer_that_is_none_of_ours() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.linger = 0
        port = server.bind_to_random_port("tcp://127.0.0.1")
        with RequestClientContext(f"tcp://127.0.0.1:{port}") as client:
            for reply in (b"what?", bytes(encode(StoreDone(), 0, 1, 999))):
                waits = in_thread(lambda: client.request(StoreGet("a", 1.0), PATIENCE))
                server.send_multipart([server.recv_multipart()[0], reply])
                with pytest.raises(ProtocolError):
                    waits.wait(PATIENCE)


def test_a_port_in_use_is_named(running: Running) -> None:
    with pytest.raises(AddressInUseError, match=f"{running.server.endpoint}.*Choose another port"):
        RequestServer("second", running.server.endpoint)


def test_an_address_that_is_none() -> None:
    with pytest.raises(TransportError, match=r"cannot listen on tcp://127\.0\.0\.1:x"):
        RequestServer("nowhere", "tcp://127.0.0.1:x")


def test_nothing_but_loopback_without_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZMQGRAD_ALLOW_INSECURE", raising=False)
    with pytest.raises(ConfigurationError, match=r"without a secret.*ZMQGRAD_ALLOW_INSECURE=1"):
        RequestServer("open", "tcp://*:*")
    RequestServer("keyed", "tcp://*:*", keys=keys_of("a secret of twenty-odd bytes")).stop()
    monkeypatch.setenv("ZMQGRAD_ALLOW_INSECURE", "1")
    running = Running("tcp://*:*")
    with RequestClientContext(f"tcp://127.0.0.1:{running.server.port}") as client:
        assert client.request(StoreGet("a", 1.0), PATIENCE) == StoreValue(b"a")
    running.stop()


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("[::1]", True),
        ("*", False),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("localhost.example.org", False),
        ("[::]", False),
    ],
)
def test_what_loopback_is(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback


def test_a_fork_cannot_use_the_client(client: RequestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    client.request(StoreGet("a", 1.0), PATIENCE)
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    lines = list(client._idle)
    client.forget_lines()  # as in a real one (tests/store/test_tcp_store.py)
    with pytest.raises(ClosedError, match=f"belongs to process {pid}"):
        client.request(StoreGet("a", 1.0), PATIENCE)
    monkeypatch.undo()
    client._idle.extend(lines)
