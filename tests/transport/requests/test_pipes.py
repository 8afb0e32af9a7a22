"""The shortest way of one host: what is small goes by it, all else as before, and nobody is worse off."""

from __future__ import annotations

import io
import os
import select
import socket
import sys
import warnings
from collections.abc import Iterator

import pytest

from tests.transport.requests.test_requests import PATIENCE, Running, in_thread
from zmqgrad.errors import ClosedError, ConfigurationError, ProtocolError
from zmqgrad.runtime.clock import ManualClock
from zmqgrad.transport.requests import pipes
from zmqgrad.transport.requests.client import RequestClient
from zmqgrad.transport.requests.connection import Client
from zmqgrad.transport.requests.pipes import LARGEST
from zmqgrad.transport.requests.short import LOOK_SECONDS, RECENTLY, Asking, eyes
from zmqgrad.transport.requests.whole import write
from zmqgrad.wire.messages import Message, StoreDone, StoreGet, StoreKeys, StorePing, StoreValue

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no such way")


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    yield made
    made.stop()


@pytest.fixture
def client(running: Running) -> Iterator[RequestClient]:
    made = RequestClient(running.server.endpoint)
    assert made.request(StoreGet("first", 1.0), PATIENCE) == StoreValue(b"first")
    assert running.service.gone_clients.acquire(timeout=PATIENCE), "by tcp it only came to ask the way"
    yield made
    made.close()


def short_of(client: RequestClient) -> Asking | None:
    return client._idle[0]._short


def heard_by_pipe(running: Running) -> int:
    return sum(hearing.heard for hearing in running.server._hearings.values())


@pytest.mark.parametrize("size", [0, 1, 100, 199, 200, 230, 255, 256, 257, 1000, 4095, 4096, 4097])
def test_small_questions_and_answers_go_by_pipe(running: Running, client: RequestClient, size: int) -> None:
    before = heard_by_pipe(running), running.server.requests
    key = "x" * size
    assert client.request(StoreGet(key, 1.0), PATIENCE) == StoreValue(key.encode())
    assert running.server.requests == before[1] + 1
    assert heard_by_pipe(running) == before[0] + (size < 220)


@pytest.mark.parametrize("size", [LARGEST - 100, LARGEST - 40, LARGEST, LARGEST + 1, 70_000, 1_000_000])
def test_what_is_large_goes_by_the_connection(
    running: Running, client: RequestClient, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.request(StoreGet("x" * min(size, 60_000), 1.0), PATIENCE)
    value = bytes(range(256)) * (size // 256 + 1)
    monkeypatch.setattr(
        running.service, "_answer_parked", lambda _: _reply_all(running, StoreValue(value[:size]))
    )
    wait = in_thread(lambda: client.request(StoreGet("park", 60.0), PATIENCE))
    assert running.service.arrived.acquire(timeout=PATIENCE)
    assert client.request(StorePing(""), PATIENCE) == StoreDone()
    assert wait.wait(PATIENCE) == StoreValue(value[:size])
    assert client.request(StoreGet("a", 1.0), PATIENCE) == StoreValue(b"a")


def _reply_all(running: Running, answer: StoreValue) -> None:
    for client, number in running.service.parked:
        running.server.reply(client, number, answer)
    running.service.parked.clear()
    running.service.waits_for.clear()


@pytest.mark.parametrize(
    "said",
    [
        b"\0",
        b"\0\1",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(write(StoreGet("k", 1.0), 1, 1))[:-1],
        bytes(write(StoreGet("k", 1.0), 1, 1)) * 2,
        bytes(write(StoreGet("k" * 300, 1.0), 1, 1)) + b"x",
    ],
)
def test_garbage_by_pipe_is_counted(running: Running, client: RequestClient, said: bytes) -> None:
    """(P5): and who sent it is hung up on, as nobody knows where his next question begins."""
    short = short_of(client)
    assert short is not None
    short._write(said)
    assert running.service.gone_clients.acquire(timeout=PATIENCE)
    assert running.server.malformed == 1
    assert client.request(StoreGet("a", 1.0), PATIENCE) == StoreValue(b"a")


def test_what_cannot_be_understood_is_said_by_pipe(client: RequestClient) -> None:
    for key in ("k", "k" * 500):
        answer = client.request(StoreGet(key, -1.0), PATIENCE)
        assert isinstance(answer, StoreKeys)
        assert "malformed StoreGet" in answer.keys[0]


def test_who_closes_his_pipes_is_served_without(running: Running, client: RequestClient) -> None:
    client._idle[0]._close_pipes()
    assert client.request(StoreGet("a", 1.0), PATIENCE) == StoreValue(b"a")
    assert len(client._lines) == 1
    other = RequestClient(running.server.endpoint)
    assert other.request(StoreGet("b", 1.0), PATIENCE) == StoreValue(b"b")
    other.close()


def test_who_reads_no_answers_is_hung_up_on(running: Running, client: RequestClient) -> None:
    line = client._idle[0]
    assert line._short is not None
    question = bytes(write(StoreGet("x" * 150, 1.0), 1, 1))
    look = select.poll()
    look.register(line.fileno(), select.POLLIN)
    while not look.poll(0):
        try:
            line._short._write(question)
        except BrokenPipeError:
            break
    assert running.service.gone_clients.acquire(timeout=PATIENCE)
    assert client.request(StoreGet("a", 1.0), PATIENCE) == StoreValue(b"a")


def test_an_answer_to_something_else_is_refused(
    running: Running, client: RequestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mumble(client: Client, number: int, answer: Message) -> None:
        assert client.pipe is not None
        client.pipe(b"\0\3abc")

    monkeypatch.setattr(running.server, "reply", mumble)
    with pytest.raises(ProtocolError, match="no answer to question"):
        client.request(StoreGet("a", 1.0), PATIENCE)


def test_the_server_gives_pipes_to_some(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes, "MOST", 2)
    clients = [RequestClient(running.server.endpoint) for _ in range(3)]
    for client in clients:
        assert client.request(StoreGet("a", 1.0), PATIENCE) == StoreValue(b"a")
        assert running.service.gone_clients.acquire(timeout=PATIENCE)
    assert [short_of(client) is not None for client in clients] == [True, True, False]
    clients[0].close()
    assert running.service.gone_clients.acquire(timeout=PATIENCE)
    late = RequestClient(running.server.endpoint)
    assert late.request(StoreGet("a", 1.0), PATIENCE) == StoreValue(b"a")
    assert short_of(late) is not None
    for client in (*clients, late):
        client.close()


def test_where_descriptors_are_few_most_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes.resource, "getrlimit", lambda which: (40, 40))
    assert [pipes.has_room(there) for there in (0, 4, 5)] == [True, True, False]
    monkeypatch.setattr(pipes.resource, "getrlimit", lambda which: (pipes.resource.RLIM_INFINITY,) * 2)
    assert [pipes.has_room(there) for there in (5, pipes.MOST)] == [True, False]


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_system_without_pipes_to_give_costs_nothing_else(
    running: Running, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    asked: list[None] = []
    make = os.pipe

    def refuse() -> tuple[int, int]:
        asked.append(None)
        if len(asked) == fails_at:
            raise OSError(24, "Too many open files")
        return make()

    monkeypatch.setattr(pipes.os, "pipe", refuse)
    before = len(os.listdir("/proc/self/fd"))
    client = RequestClient(running.server.endpoint)
    assert client.request(StoreGet("a", 1.0), PATIENCE) == StoreValue(b"a")
    assert short_of(client) is None
    assert len(asked) == fails_at
    client.close()
    for _ in range(2):  # it came by tcp first
        assert running.service.gone_clients.acquire(timeout=PATIENCE)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_client_without_descriptors_left_does_without(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system then gives fewer than were sent."""
    receive = socket.recv_fds

    def receive_fewer(connection: socket.socket, size: int, most: int, flags: int) -> tuple[object, ...]:
        return receive(connection, size, most - 1, flags)

    monkeypatch.setattr(pipes.socket, "recv_fds", receive_fewer)
    client = RequestClient(running.server.endpoint)
    assert client.request(StoreGet("a", 1.0), PATIENCE) == StoreValue(b"a")
    assert short_of(client) is None
    assert client.request(StoreGet("b", 1.0), PATIENCE) == StoreValue(b"b")
    client.close()


def test_a_fork_lets_go_of_them(running: Running, client: RequestClient) -> None:
    short = short_of(client)
    assert short is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that forking beside threads is risky
        child = os.fork()
    if not child:
        os._exit(0 if all(end.closed for end in short._ends) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.request(StoreGet("a", 1.0), PATIENCE) == StoreValue(b"a")


def test_a_closed_client_asks_nothing_by_pipe(client: RequestClient) -> None:
    client.close()
    with pytest.raises(ClosedError):
        client.request(StoreGet("a", 1.0), PATIENCE)


def test_who_has_asked_just_now_looks_and_others_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, says = os.pipe()
    hears, questions = os.pipe()
    looks: list[object] = []
    clock = ManualClock()
    here, there = socket.socketpair()
    with here, there, open(says, "wb", buffering=0) as server, open(hears, "rb"):
        asking = Asking((io.FileIO(answers, "rb"), io.FileIO(questions, "wb")), here, clock)
        monkeypatch.setattr(asking, "_look", lambda poll: looks.append(poll) or poll(0))

        def ask(number: int) -> int:
            server.write(write(StoreDone(), 0, number))
            assert asking.ask(StoreGet("key", 1.0), 0, number, PATIENCE) == StoreDone()
            return len(looks)

        assert ask(1) == 0
        clock.advance(RECENTLY / 2)
        assert ask(2) == 1
        clock.advance(RECENTLY)
        assert ask(3) == 1
        asking.close()


@pytest.mark.parametrize(
    ("said", "seconds"), [("", LOOK_SECONDS), ("0", 0.0), ("100", 1e-4), ("9999", LOOK_SECONDS)]
)
def test_for_how_long_they_look(said: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZMQGRAD_LOOK_US", said)
    assert eyes().seconds == pytest.approx(seconds)


def test_a_malformed_time_to_look_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZMQGRAD_LOOK_US", "soon")
    with pytest.raises(ConfigurationError, match="ZMQGRAD_LOOK_US"):
        Running()
