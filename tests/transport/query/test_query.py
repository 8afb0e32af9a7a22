"""Queries and replies over real sockets: many threads on one client, waits, garbage, breaks, ends."""

from __future__ import annotations

import logging
import os
import resource
import select
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
import zmq

from tests.support.relay import Relay, at_random
from tests.support.waiting import eventually
from tests.transport.query.echo import DONE, LOOPBACK, OURS, PATIENCE, THEIRS, Echo, Running, in_thread
from tools.ports import free_port
from zmqgrad.errors import (
    AddressInUseError,
    AuthenticationError,
    ClosedError,
    ConfigurationError,
    ProtocolError,
    TransportError,
)
from zmqgrad.runtime.clock import MONOTONIC, ManualClock
from zmqgrad.runtime.polling import Wakeup
from zmqgrad.transport import local
from zmqgrad.transport.bind_policy import is_loopback
from zmqgrad.transport.query import dealer, pending
from zmqgrad.transport.query.channel import QueryChannel
from zmqgrad.transport.query.client import QueryClient
from zmqgrad.transport.query.dealer import ServerInfo
from zmqgrad.transport.query.server import QueryServer
from zmqgrad.transport.security import Keys, load_keys, secure_client
from zmqgrad.transport.tcp_listener import PAUSE_SECONDS
from zmqgrad.wire.codec import encode
from zmqgrad.wire.messages import (
    Message,
    StoreAdd,
    StoreDone,
    StoreGet,
    StorePing,
    StorePong,
    StoreRefused,
    StoreValue,
)

RELEASE = StoreAdd("", 7)
A = StoreGet("a", 1.0)


@pytest.fixture(params=["plain", "keyed"])
def keys(request: pytest.FixtureRequest) -> Keys | None:
    return OURS if request.param == "keyed" else None


@pytest.fixture(params=["fast path", "tcp"])
def fast_path(request: pytest.FixtureRequest) -> bool:
    if request.param == "fast path" and not local.supported():
        pytest.skip("this system has no SOCK_SEQPACKET")
    return bool(request.param == "fast path")


@pytest.fixture
def running(keys: Keys | None) -> Iterator[Running]:
    made = Running(keys=keys)
    yield made
    made.stop()


@pytest.fixture
def client(running: Running, keys: Keys | None, fast_path: bool) -> Iterator[QueryClient]:
    made = QueryClient(running.server.endpoint, keys=keys, fast_path=fast_path)
    yield made
    made.close()


@pytest.fixture
def plain() -> Iterator[Running]:
    made = Running()
    yield made
    made.stop()


def client_of(running: Running, *, fast_path: bool = False, port: int | None = None) -> QueryClient:
    address = running.server.endpoint if port is None else f"tcp://127.0.0.1:{port}"
    return QueryClient(address, fast_path=fast_path)


# ---- queries and replies ----------------------------------------------------------------------------------


@pytest.mark.skipif(not local.supported(), reason="the fast path is Linux's")
def test_a_query_is_sent_while_the_fast_path_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the ping waits there for the server, if that has told where the fast path is."""
    monkeypatch.setattr(pending, "REPEAT_SECONDS", (600.0,))
    running = Running("tcp://0.0.0.0:*", keys=OURS)
    try:  # by an address of this host that does not tell the client where the fast path is
        with closing(QueryClient(f"tcp://127.0.0.2:{running.server.port}", keys=OURS)) as client:
            for key in ("first", "second", "third"):
                assert client.request(StoreGet(key, 1.0), PATIENCE) == StoreValue(key.encode())
    finally:
        running.stop()


def test_a_query_gets_its_reply(client: QueryClient) -> None:
    for key in ("a", "b", "x" * 50_000, "c"):
        assert client.request(StoreGet(key, 1.0), PATIENCE) == StoreValue(key.encode())


def test_large_replies_to_small_queries(client: QueryClient) -> None:
    for size in (1, 16 << 10, 17 << 10, 2, 4 << 20, 3):
        assert client.request(StoreGet(f"large {size}", 1.0), PATIENCE) == StoreValue(bytes(size))


def test_many_threads_get_their_own_replies(client: QueryClient) -> None:
    def ask(name: str) -> Message:
        for n in range(50):
            reply = client.request(StoreGet(f"{name}.{n}", 1.0), PATIENCE)
            assert reply == StoreValue(f"{name}.{n}".encode())
        return DONE

    outcomes = [in_thread(lambda name=str(i): ask(name)) for i in range(12)]  # type: ignore[misc]
    assert [outcome.wait(PATIENCE) for outcome in outcomes] == [DONE] * 12


@pytest.mark.skipif(not local.supported(), reason="the fast path is Linux's")
def test_a_client_that_closes_opens_no_connection(plain: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is about to send finds that the fast path has ended, and must not take another one."""
    closed = threading.Event()

    def check_open() -> None:
        if closed.is_set():
            raise ClosedError("closed")

    info, closing_of_client = ServerInfo(plain.server.endpoint, None), Wakeup()
    with closing(QueryChannel(info, True, closing_of_client, check_open, MONOTONIC)) as channel:
        for _ in range(3):
            assert channel.request(A, PATIENCE) == StoreValue(b"a")
        assert info.local is not None
        monkeypatch.setattr("zmqgrad.transport.query.channel.DealerConnection", lambda *_: pytest.fail("tcp"))
        closed.set()
        closing_of_client.set()
        channel.hang_up()
        with pytest.raises(ClosedError):
            channel.request(A, PATIENCE)


def test_a_channel_that_is_no_longer_used_leaves_the_fast_path_to_others(plain: Running) -> None:
    if not local.supported():
        pytest.skip("this system has no SOCK_SEQPACKET")
    with closing(client_of(plain, fast_path=True)) as client:
        assert client.request(A, PATIENCE) == StoreValue(b"a")
        client.request(A, PATIENCE)
        with pytest.raises(TimeoutError):
            client.request(StoreGet("park", 60.0), 0.1)
        assert client.server.local == plain.server.local


def test_blocked_queries_do_not_delay_others(running: Running, client: QueryClient) -> None:
    parked = [in_thread(lambda: client.request(StoreGet("park", 60.0), PATIENCE)) for _ in range(3)]
    for _ in parked:
        assert running.service.arrived.acquire(timeout=PATIENCE)
    assert client.request(A, PATIENCE) == StoreValue(b"a")
    assert not any(wait.done() for wait in parked)
    client.request(RELEASE, PATIENCE)
    assert [wait.wait(PATIENCE) for wait in parked] == [StoreValue(b"released")] * 3


def test_the_service_is_called_when_something_is_due(client: QueryClient) -> None:
    assert client.request(StoreGet("park", 0.01), PATIENCE) == StoreValue(b"too late")


def test_a_late_reply_is_not_matched_with_a_later_query(running: Running, client: QueryClient) -> None:
    client.clock = clock = ManualClock()
    late = in_thread(lambda: client.request(StoreGet("park", 60.0), 0.3))
    assert running.service.arrived.acquire(timeout=PATIENCE)
    clock.advance(0.5)
    with pytest.raises(TimeoutError, match=r"no reply from tcp://127\.0\.0\.1"):
        late.wait(PATIENCE)
    client.request(RELEASE, PATIENCE)  # which replies to the parked one, too
    assert client.request(A, PATIENCE) == StoreValue(b"a")


@pytest.mark.slow
def test_a_query_that_waits_is_repeated(running: Running, client: QueryClient) -> None:
    """So the server need not notice that a client is gone: it forgets what is not repeated."""
    waits = in_thread(lambda: client.request(StoreGet("park", 60.0), PATIENCE))
    for _ in range(2):
        assert running.service.arrived.acquire(timeout=PATIENCE)
    assert len(set(running.service.received)) == 1, "with the same client and number"
    client.request(RELEASE, PATIENCE)
    assert waits.wait(PATIENCE) == StoreValue(b"released")


def test_a_client_within_the_host_leaves_tcp(plain: Running) -> None:
    if not local.supported():
        pytest.skip("this system has no SOCK_SEQPACKET")
    with closing(client_of(plain, fast_path=True)) as client:
        for _ in range(3):
            client.request(A, PATIENCE)
        assert plain.server.clients == 1
        eventually(lambda: connections_to(plain.server.port), lambda connections: connections == 0)
        client.request(StoreGet("large 100000", 1.0), PATIENCE)
        client.request(StoreGet("k" * 60_000, 1.0), PATIENCE)
        assert (plain.server.clients, connections_to(plain.server.port)) == (1, 0)
    eventually(lambda: plain.server.clients, lambda clients: clients == 0)


def connections_to(port: int) -> int:
    """How many tcp connections of this host to ``port`` are open."""
    with open("/proc/net/tcp") as table:
        lines = [line.split() for line in table][1:]
    return sum(line[2].endswith(f":{port:04X}") and line[3] == "01" for line in lines)


# ---- servers that come and go -----------------------------------------------------------------------------


def test_without_a_server_queries_time_out_at_their_deadline(keys: Keys | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    with (
        closing(QueryClient(f"tcp://127.0.0.1:{port}", keys=keys)) as client,
        pytest.raises(TimeoutError),
    ):
        client.request(A, 0.02)


def test_a_server_that_starts_later_is_found(keys: Keys | None, fast_path: bool) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    first = Running(address, keys=keys)
    with closing(QueryClient(address, keys=keys, fast_path=fast_path)) as client:
        for _ in range(3):
            assert client.request(A, PATIENCE) == StoreValue(b"a")
        first.stop()
        waits = in_thread(lambda: client.request(StoreGet("b", 1.0), PATIENCE))
        second = Running(address, keys=keys)
        assert waits.wait(PATIENCE) == StoreValue(b"b")
        second.stop()


def test_a_parked_query_moves_to_the_next_server(fast_path: bool) -> None:
    """At once, when it is there: a server that was killed says nothing."""
    address = f"tcp://127.0.0.1:{free_port()}"
    first = Running(address)
    first.service.stopping = lambda: None  # type: ignore[method-assign]
    with closing(QueryClient(address, fast_path=fast_path)) as client:
        waits = in_thread(lambda: client.request(StoreGet("park", 60.0), PATIENCE))
        assert first.service.arrived.acquire(timeout=PATIENCE)
        first.stop()
        second = Running(address)
        assert second.service.arrived.acquire(timeout=PATIENCE)
        client.request(RELEASE, PATIENCE)
        assert waits.wait(PATIENCE) == StoreValue(b"released")
        second.stop()


def test_a_stopping_server_can_reply(keys: Keys | None, fast_path: bool) -> None:
    running = Running(keys=keys)
    with closing(QueryClient(running.server.endpoint, keys=keys, fast_path=fast_path)) as client:
        waits = in_thread(lambda: client.request(StoreGet("park", 60.0), PATIENCE))
        assert running.service.arrived.acquire(timeout=PATIENCE)
        running.stop()
        assert waits.wait(PATIENCE) == StoreValue(b"stopping")


class Gate(ManualClock):
    """A clock at which those who ask for the time wait while it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.open.set()

    def now(self) -> float:
        self.open.wait(PATIENCE)
        return super().now()


@pytest.mark.skipif(not local.supported(), reason="the fast path is Linux's")
def test_a_reply_is_received_though_the_query_is_repeated_meanwhile(
    plain: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server stops with one repetition unread, and then the client sends another before it reads on."""
    monkeypatch.setattr(pending, "REPEAT_SECONDS", (0.1,))
    clock, service = Gate(), plain.service

    def stopping() -> None:
        ((route, _, _),) = service.parked
        assert isinstance(route, local.LocalConnection)
        while not select.select([route.fd], [], [], 0.05)[0]:
            clock.advance(0.1)
        clock.open.clear()
        clock.advance(0.1)
        plain.server.reply(route, pending.PING_ID, StorePong("", ""))
        Echo.stopping(service)

    service.stopping = stopping  # type: ignore[method-assign]
    with closing(QueryClient(plain.server.endpoint, clock=clock)) as client:
        client.request(A, PATIENCE)
        waits = in_thread(lambda: client.request(StoreGet("park", 60.0), 1e5))
        assert service.arrived.acquire(timeout=PATIENCE)
        plain.stop()
        clock.open.set()
        assert waits.wait(PATIENCE) == StoreValue(b"stopping")


def test_a_server_that_never_served_stops(plain: Running) -> None:
    server = QueryServer("idle", LOOPBACK)
    server.stop()
    server.serve(plain.service)


# ---- connections that break -------------------------------------------------------------------------------


def test_a_broken_connection_costs_a_repetition(plain: Running) -> None:
    with Relay(plain.server.port) as relay, closing(client_of(plain, port=relay.port)) as client:
        assert client.request(A, PATIENCE) == StoreValue(b"a")
        waits = in_thread(lambda: client.request(StoreGet("park", 60.0), PATIENCE))
        for _ in range(3):
            assert plain.service.arrived.acquire(timeout=PATIENCE)
            relay.cut()
        assert plain.service.arrived.acquire(timeout=PATIENCE)
        client.request(RELEASE, PATIENCE)
        assert waits.wait(PATIENCE) == StoreValue(b"released")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_connections_that_break_at_random(running: Running, keys: Keys | None, seed: int) -> None:
    with (
        Relay(running.server.port) as relay,
        closing(QueryClient(f"tcp://127.0.0.1:{relay.port}", keys=keys, fast_path=False)) as client,
    ):
        client.request(A, PATIENCE)
        relay.fate = at_random(0.1, seed)
        for n in range(200):
            assert client.request(StoreGet(f"{n}", 1.0), PATIENCE) == StoreValue(f"{n}".encode())
        assert relay.cuts > 10


@pytest.mark.slow
def test_a_connection_that_leads_nowhere_is_replaced(plain: Running) -> None:
    """As through a NAT that has forgotten it: nothing comes back, and nothing is reset."""
    with Relay(plain.server.port) as relay, closing(client_of(plain, port=relay.port)) as client:
        assert client.request(A, PATIENCE) == StoreValue(b"a")
        relay.swallow()
        assert client.request(A, PATIENCE) == StoreValue(b"a")


def test_an_undeliverable_reply_is_counted(plain: Running) -> None:
    with Relay(plain.server.port) as relay, closing(client_of(plain)) as other:
        gone = client_of(plain, port=relay.port)
        wait = in_thread(lambda: gone.request(StoreGet("park", 60.0), PATIENCE))
        assert plain.service.arrived.acquire(timeout=PATIENCE)
        gone.close()
        with pytest.raises(ClosedError):
            wait.wait(PATIENCE)
        eventually(lambda: plain.server.clients, lambda clients: clients == 0)
        other.request(RELEASE, PATIENCE)
        assert plain.server.undeliverable == 1


# ---- the end ----------------------------------------------------------------------------------------------


def test_closing_the_client_ends_waiting_queries(running: Running, client: QueryClient) -> None:
    client.request(A, PATIENCE)
    waits = [in_thread(lambda: client.request(StoreGet("park", 60.0), PATIENCE)) for _ in range(3)]
    for _ in waits:
        assert running.service.arrived.acquire(timeout=PATIENCE)
    client.close()
    client.close()
    for wait in waits:
        with pytest.raises(ClosedError, match="closed"):
            wait.wait(PATIENCE)
    with pytest.raises(ClosedError, match="closed"):
        client.request(A, PATIENCE)


def test_ctrl_c_ends_a_wait(running: Running, client: QueryClient) -> None:
    client.request(A, PATIENCE)
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
    assert client.request(A, PATIENCE) == StoreValue(b"a")


def test_a_fork_cannot_use_the_client(client: QueryClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one stands in tests/store/test_tcp_store.py."""
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    with pytest.raises(ClosedError, match=f"belongs to process {pid}"):
        client.request(A, PATIENCE)


# ---- strangers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"GET / HTTP/1.1"],
        [b"zg" + b"\xff" * 60],
        [b"zg\x02" + b"\0" * 45],
        [bytes(encode(StoreGet("k", 1.0), 0, 1, 1))[:-3]],
        [bytes(encode(StoreGet("k", 1.0), 0, 1, 1)), b"and one more", b"and another"],
    ],
    ids=["empty", "http", "version", "type", "cut", "frames"],
)
def test_garbage_is_counted_and_logged_once(
    running: Running,
    keys: Keys | None,
    frames: list[bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """P5 of docs/guarantees.md: the server continues."""
    with (
        caplog.at_level(logging.WARNING, "zmqgrad.transport.query"),
        zmq.Context() as context,
        context.socket(zmq.DEALER) as stranger,
    ):
        stranger.linger = 0
        stranger.rcvtimeo = int(PATIENCE * 1000)
        if keys is not None:
            secure_client(stranger, keys)
        stranger.connect(running.server.endpoint)
        for _ in range(3):
            stranger.send_multipart(frames)
        stranger.send(encode(StoreGet("after", 1.0), 0, 1, 7))
        while b"after" not in stranger.recv():  # what was malformed and ours gets a reply, too
            pass
    assert running.server.malformed == 3
    assert caplog.text.count("dropped a malformed query from 127.0.0.1") == 1


def test_foreign_protocols_on_the_port_are_counted(plain: Running, caplog: pytest.LogCaptureFixture) -> None:
    garbage = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\xff" + b"\0" * 8 + b"\x7f\x03\x00" + b"PLAIN".ljust(20, b"\0") + b"\0" * 32,
        b"",
    ]
    with closing(client_of(plain)) as client:
        for data in garbage:
            with socket.create_connection(("127.0.0.1", plain.server.port), PATIENCE) as stranger:
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
                try:
                    while stranger.recv(1000):
                        pass
                except ConnectionResetError:
                    pass  # it closed before it had read everything
            assert client.request(A, PATIENCE) == StoreValue(b"a")
        eventually(lambda: plain.server.malformed, lambda malformed: malformed >= len(garbage) - 1)
        assert client.request(A, PATIENCE) == StoreValue(b"a")
    assert caplog.text.count("dropped a malformed query from tcp") == 1, "not a line for each"


def test_a_malformed_query_is_refused_with_the_reason(client: QueryClient) -> None:
    reply = client.request(StoreGet("k", -1.0), PATIENCE)
    assert isinstance(reply, StoreRefused)
    assert "malformed StoreGet" in reply.text


def test_a_fault_of_the_service_is_logged(client: QueryClient, caplog: pytest.LogCaptureFixture) -> None:
    unanswered = in_thread(lambda: client.request(StoreGet("fail", 1.0), PATIENCE))
    eventually(lambda: caplog.text, lambda text: "LookupError: a fault of the service" in text)
    assert client.request(A, PATIENCE) == StoreValue(b"a")
    assert not unanswered.done()
    client.close()
    with pytest.raises(ClosedError):
        unanswered.wait(PATIENCE)


@pytest.mark.parametrize("reply", [b"what?", bytes(encode(StoreDone(), 0, 1, 999))])
def test_a_reply_that_is_none_of_ours(reply: bytes) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.linger = 0
        port = server.bind_to_random_port("tcp://127.0.0.1")
        with closing(QueryClient(f"tcp://127.0.0.1:{port}")) as client:
            waits = in_thread(lambda: client.request(A, PATIENCE))
            server.send_multipart([server.recv_multipart()[0], reply])
            with pytest.raises(ProtocolError):
                waits.wait(PATIENCE)


@pytest.mark.parametrize(("ours", "theirs"), [(OURS, None), (None, OURS), (OURS, THEIRS)])
def test_a_client_learns_at_once_that_it_has_another_secret(ours: Keys | None, theirs: Keys | None) -> None:
    running = Running(keys=theirs)
    with (
        closing(QueryClient(running.server.endpoint, keys=ours)) as client,
        pytest.raises(AuthenticationError),
    ):
        client.request(A, PATIENCE)
    assert running.service.received == []
    running.stop()


def test_a_query_that_times_out_says_that_the_secret_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the handshakes are: one that was cut off is enough to find out."""
    monkeypatch.setattr(dealer, "MAX_CUT_HANDSHAKES", 10**9)
    running = Running(keys=THEIRS)
    with (
        closing(QueryClient(running.server.endpoint, keys=OURS)) as client,
        pytest.raises(AuthenticationError),
    ):
        client.request(A, 2.0)
    running.stop()


@pytest.mark.parametrize("attempt", range(4))
def test_a_secret_that_is_refused_before_the_first_message_is_sent(
    monkeypatch: pytest.MonkeyPatch, attempt: int
) -> None:
    """As under load: in about half of the attempts the connection has ended when the client first sends."""
    running = Running(keys=None)

    def after_the_refusal(size: int) -> str:
        eventually(lambda: running.server.malformed)
        threading.Event().wait(0.3)  # the client's own I/O thread follows soon, and tells nobody
        return "0" * size

    monkeypatch.setattr(dealer.secrets, "token_hex", after_the_refusal)
    with (
        closing(QueryClient(running.server.endpoint, keys=OURS)) as client,
        pytest.raises(AuthenticationError),
    ):
        client.request(A, PATIENCE)
    running.stop()


def test_a_relay_without_a_server_is_not_taken_for_another_secret(plain: Running) -> None:
    """It closes connections as a server with another secret does; the store may be about to start."""
    with Relay(plain.server.port) as relay:
        relay.refusing = True
        with (
            closing(QueryClient(f"tcp://127.0.0.1:{relay.port}", keys=OURS)) as client,
            pytest.raises(TimeoutError, match="cut off during the handshake"),
        ):
            client.request(A, 2.0)


def test_a_client_begins_with_a_ping(plain: Running) -> None:
    """A server that is about to close does not reply to pings, so clients that come find the next one."""
    with closing(client_of(plain)) as known, closing(client_of(plain)) as client:
        assert isinstance(known.request(StorePing(""), PATIENCE), StorePong)
        plain.server.refuses_newcomers = True
        with pytest.raises(TimeoutError):
            client.request(StorePing(""), 0.1)
        assert client.request(A, PATIENCE) == StoreValue(b"a")
        assert isinstance(known.request(StorePing(""), PATIENCE), StorePong)


@pytest.mark.skipif(not local.supported(), reason="the fast path is Linux's")
def test_a_newcomer_of_this_host_comes_by_no_port(caplog: pytest.LogCaptureFixture) -> None:
    """It knows the unix socket by its key; one that is about to close sends it to the next server."""
    keys = load_keys("a secret of twenty-odd bytes")
    running = Running(keys=keys)
    with closing(QueryClient(running.server.endpoint, keys=keys)) as known:
        assert known.request(A, PATIENCE) == StoreValue(b"a")
        running.server.refuses_newcomers = True
        with closing(QueryClient(running.server.endpoint, keys=keys)) as late:
            with pytest.raises(TimeoutError):
                late.request(StorePing(""), 0.1)
            assert known.request(A, PATIENCE) == StoreValue(b"a")
            running.server.refuses_newcomers = False
            assert late.request(A, PATIENCE) == StoreValue(b"a")
    running.stop()


@pytest.mark.skipif(not local.supported(), reason="the fast path is Linux's")
def test_a_newcomer_accepted_before_is_not_admitted_by_its_second_ping(plain: Running) -> None:
    """A channel begins with a ping of its own, before the query, which is a ping as well."""
    with closing(client_of(plain, fast_path=True)) as late:
        late.server.local = plain.server.local  # with its incarnation, so that the listener accepts it
        plain.server.refuses_newcomers = True
        with pytest.raises(TimeoutError):
            late.request(StorePing(""), 0.1)
        plain.server.refuses_newcomers = False
        assert isinstance(late.request(StorePing(""), PATIENCE), StorePong)


@pytest.mark.skipif(not local.supported(), reason="the fast path is Linux's")
def test_a_server_that_ends_does_not_wait_for_a_newcomer_that_it_refuses(plain: Running) -> None:
    """Which waits for the next server there, until this one has ended."""
    with closing(client_of(plain, fast_path=True)) as late:
        late.server.local = plain.server.local
        plain.server.refuses_newcomers = True
        with pytest.raises(TimeoutError):
            late.request(StorePing(""), 0.1)
        assert plain.server.clients == 0
        plain.server.stop(10 * PATIENCE)
        plain.stop()


@pytest.mark.slow
@pytest.mark.parametrize("address", [LOOPBACK, "tcp://*:*", "a descriptor"])
def test_a_server_out_of_file_descriptors_keeps_its_port(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It accepts nobody for a while, and no other process can listen there meanwhile."""
    monkeypatch.setenv("ZMQGRAD_ALLOW_INSECURE", "1")
    clock, given = ManualClock(), None
    if address == "a descriptor":
        address, given = bound_descriptor()
    running = Running(address, clock=clock, listen_fd=given)
    port = running.server.port
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    for _ in range(2):
        caplog.clear()
        with socket.socket() as newcomer, caplog.at_level(logging.DEBUG, "zmqgrad.transport"):
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            try:
                newcomer.connect(("127.0.0.1", port))
                eventually(lambda: "no more file descriptors" in caplog.text)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for _ in range(200):
            with pytest.raises(OSError, match="in use"):
                socket.create_server(("127.0.0.1", port))
        clock.advance(PAUSE_SECONDS)
        with closing(client_of(running, port=port)) as client:
            assert client.request(A, PATIENCE) == StoreValue(b"a")
    running.stop()
    with socket.create_server(("127.0.0.1", port)):
        pass


def bound_descriptor() -> tuple[str, int]:
    """An address, and the descriptor of a socket that is bound to it as a user may: without any option."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{bound.getsockname()[1]}", bound.detach()


def test_the_port_of_a_descriptor_is_free_when_the_server_has_ended_its_connections() -> None:
    address, given = bound_descriptor()
    running = Running(address, listen_fd=given, fast_path=False)
    port = running.server.port
    with closing(client_of(running, port=port)) as client:
        assert client.request(A, PATIENCE) == StoreValue(b"a")
        running.stop()
        with socket.create_server(("127.0.0.1", port)):
            pass


# ---- addresses --------------------------------------------------------------------------------------------


def test_a_port_in_use_is_named(plain: Running) -> None:
    with pytest.raises(AddressInUseError, match=f"{plain.server.endpoint}.*Choose another port"):
        QueryServer("second", plain.server.endpoint)


def test_a_malformed_address() -> None:
    with pytest.raises(TransportError, match=r"cannot listen on tcp://127\.0\.0\.1:x"):
        QueryServer("nowhere", "tcp://127.0.0.1:x")


def test_without_a_secret_only_loopback_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZMQGRAD_ALLOW_INSECURE", raising=False)
    with pytest.raises(ConfigurationError, match=r"without a secret.*ZMQGRAD_ALLOW_INSECURE=1"):
        QueryServer("open", "tcp://*:*")
    QueryServer("keyed", "tcp://*:*", keys=load_keys("a secret of twenty-odd bytes")).stop()
    monkeypatch.setenv("ZMQGRAD_ALLOW_INSECURE", "1")
    running = Running("tcp://*:*")
    with closing(QueryClient(f"tcp://127.0.0.1:{running.server.port}")) as client:
        assert client.request(A, PATIENCE) == StoreValue(b"a")
    running.stop()


def test_ipv6(keys: Keys | None) -> None:
    try:
        running = Running("tcp://[::1]:*", keys=keys)
    except TransportError as e:
        pytest.skip(f"no IPv6 here: {e}")
    assert running.server.endpoint.startswith("tcp://[::1]:")
    with closing(QueryClient(running.server.endpoint, keys=keys)) as client:
        assert client.request(A, PATIENCE) == StoreValue(b"a")
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
def test_is_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback
