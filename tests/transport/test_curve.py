"""CURVE: by itself, cut into pieces, tampered with; with libzmq at the other end; strangers at a server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from tests.transport.requests.test_requests import RequestClientContext, Running
from zmqgrad.errors import ClosedError, ProtocolError, SecretError
from zmqgrad.transport.curve import Curve, CurveCaller, CurveListener
from zmqgrad.transport.requests.client import RequestClient
from zmqgrad.transport.security import Keys, keys_of
from zmqgrad.transport.zap import Doorkeeper, key_caller, key_listener
from zmqgrad.transport.zmtp import GREETING_SIZE, HEAD_ROOM, LARGE, command, opening, write_head
from zmqgrad.wire.codec import decode, encode
from zmqgrad.wire.messages import StoreGet, StoreValue

PATIENCE = 20.0


def made_of(secret: str) -> Keys:
    keys = keys_of(secret)
    assert keys is not None
    return keys


OURS = made_of("the secret of this job, of 33 bytes")
THEIRS = made_of("the secret of another job, of 40 bytes")
HALF = Keys(OURS.listener, THEIRS.caller)  # one who has come to know the listener's public key, and no more


def feed(end: Curve, data: bytes) -> list[bytes | None]:
    """As a socket does, for large frames too."""
    found: list[bytes | None] = []
    while data:
        if end.large is None:
            found += end.feed(data)  # type: ignore[arg-type]
            break
        room = end.room
        size = min(len(room), len(data))
        room[:size] = data[:size]
        found += end.filled(size)  # type: ignore[arg-type]
        data = data[size:]
    return found


def taken(end: Curve) -> bytes:
    said = bytes(end.answers)
    end.answers.clear()
    return said


def packed(end: Curve, body: bytes) -> bytes:
    return bytes(end.pack(bytearray(HEAD_ROOM) + body))


def ends(caller: Keys = OURS, listener: Keys = OURS) -> tuple[CurveCaller, CurveListener]:
    return CurveCaller(caller, "DEALER", "ROUTER"), CurveListener(listener, "ROUTER", "DEALER")


def met(caller: Keys = OURS, listener: Keys = OURS) -> tuple[CurveCaller, CurveListener, list[bytes]]:
    """Both ends after the handshake, and what the caller said in it."""
    one, other = ends(caller, listener)
    said = [one.opening()]
    feed(one, other.opening())
    while said[-1]:
        try:
            feed(other, said[-1])
        finally:
            heard = taken(other)
            if heard:
                feed(one, heard)
        said.append(taken(one))
    assert one.ready
    assert other.ready
    return one, other, said


# ---- by itself --------------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from([0, 1, 200, 239, 240, 1000, LARGE - 30, LARGE, 3 * LARGE]), max_size=5),
    st.lists(st.integers(1, 2 * LARGE), max_size=20),
    st.booleans(),
)
def test_what_was_sent_arrives_however_it_is_cut(sizes: list[int], cuts: list[int], back: bool) -> None:
    caller, listener, _ = met()
    sender, receiver = (listener, caller) if back else (caller, listener)
    bodies = [bytes([n]) * size for n, size in enumerate(sizes, 1)]
    data = b"".join(packed(sender, body) for body in bodies)
    assert not any(body in data for body in bodies if len(body) > 20)
    found: list[bytes | None] = []
    for cut in [*cuts, len(data)]:
        found += feed(receiver, data[:cut])
        data = data[cut:]
    assert found == bodies


def test_the_handshake_byte_by_byte() -> None:
    caller, listener = ends()
    to_listener, to_caller = caller.opening(), listener.opening()
    while to_listener or to_caller:
        for byte in to_listener:
            feed(listener, bytes([byte]))
        for byte in to_caller:
            feed(caller, bytes([byte]))
        to_listener, to_caller = taken(caller), taken(listener)
    assert caller.ready
    assert listener.ready


@pytest.mark.parametrize(("caller", "listener"), [(THEIRS, OURS), (OURS, THEIRS), (HALF, OURS), (OURS, HALF)])
def test_who_has_another_secret_is_told_so_and_nothing_else(caller: Keys, listener: Keys) -> None:
    one, other = ends(caller, listener)
    with pytest.raises(SecretError, match="another secret"):  # noqa: PT012 (whichever step it is)
        feed(other, one.opening())
        feed(one, other.opening() + taken(other))
        feed(other, taken(one))
    with pytest.raises(SecretError, match="another secret"):
        feed(one, (b"" if one._greeted else other.opening()) + taken(other))
    assert not one.ready
    assert not other.ready


@given(st.integers(0, 700), st.integers(0, 7), st.booleans())
def test_a_changed_bit_is_noticed(byte: int, bit: int, by_listener: bool) -> None:
    """In the handshake, it ends there; in what follows, at the message in which it is."""
    caller, listener = ends()
    spoken = {caller: 0, listener: 0}

    def carry(data: bytes, sender: Curve, receiver: Curve) -> list[bytes | None]:
        at = byte - spoken[sender]
        spoken[sender] += len(data)
        if (sender is listener) == by_listener and 0 <= at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
        return feed(receiver, data)

    found: dict[Curve, list[bytes | None]] = {caller: [], listener: []}
    whole = [b"%d" % n for n in range(8)]
    try:
        carry(caller.opening(), caller, listener)
        carry(listener.opening(), listener, caller)
        while (from_caller := taken(caller)) + (from_listener := taken(listener)):
            carry(from_caller, caller, listener)
            carry(from_listener, listener, caller)
        for sender, receiver in ((caller, listener), (listener, caller)):
            if sender.ready:
                found[receiver] = carry(b"".join(packed(sender, body) for body in whole), sender, receiver)
    except ProtocolError:
        return
    for heard in found.values():
        assert heard == whole[: len(heard)], "what was sent, or less"
    hello = GREETING_SIZE + len(command(b"HELLO", b""))
    unread = byte < GREETING_SIZE or (not by_listener and byte in range(hello + 2, hello + 74))  # mere filler
    unsaid = byte >= spoken[listener if by_listener else caller]
    assert unread or unsaid or found != {caller: whole, listener: whole}


def test_what_was_recorded_cannot_be_said_again() -> None:
    caller, listener, said = met()
    first, second = packed(caller, b"add 1"), packed(caller, b"add 2")
    assert feed(listener, first) == [b"add 1"]
    with pytest.raises(ProtocolError, match="said again"):
        feed(listener, first)
    _, fresh, _ = met()
    with pytest.raises(ProtocolError, match="changed on its way"):
        feed(fresh, second)
    another = ends()[1]
    feed(another, said[0])  # which is welcomed, but whoever replays it cannot read that
    with pytest.raises(ProtocolError, match="does not follow from our WELCOME"):
        feed(another, said[1])
    with pytest.raises(ProtocolError, match="changed on its way"):
        feed(caller, packed(caller, b"mirrored"))


@pytest.mark.parametrize(
    "data",
    [
        write_head(bytearray(HEAD_ROOM) + b"in the clear"),
        b"\x01\x01a" + bytes(write_head(bytearray(HEAD_ROOM) + b"b")),
        command(b"PING", b"\0\0"),
        command(b"READY", b""),
        command(b"HELLO", bytes(194)),
        write_head(bytearray(HEAD_ROOM) + b"\x07MESSAGE" + b"\xff" * 8),
        write_head(bytearray(HEAD_ROOM) + b"\x07MESSAGE" + b"\xff" * 60),
    ],
)
def test_nothing_is_taken_in_the_clear(data: bytes) -> None:
    _, listener, _ = met()
    with pytest.raises(ProtocolError):
        feed(listener, bytes(data))


@given(st.binary(max_size=300), st.sampled_from([b"", b"HELLO", b"INITIATE", b"READY", b"WELCOME", b"ERROR"]))
def test_no_bytes_do_harm(data: bytes, name: bytes) -> None:
    for welcomed in (False, True):
        for end, other in (ends(), ends()[::-1]):
            begin = end.opening() if isinstance(end, CurveCaller) else other.opening()
            try:
                if welcomed and isinstance(end, CurveListener):
                    feed(end, begin)
                feed(end, command(name, data) if name else data)
            except ProtocolError:
                pass
            assert not end.ready


# ---- libzmq at the other end ------------------------------------------------------------------------------


class Library:
    """Sockets of libzmq, and what belongs to them."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def open(self, kind: int) -> zmq.Socket[bytes]:
        made = self.context.socket(kind)
        made.linger = 0
        made.rcvtimeo = int(PATIENCE * 1000)
        self._sockets.append(made)
        return made

    def listen(self) -> tuple[zmq.Socket[bytes], str]:
        """A ROUTER for those who have our keys, and where it listens."""
        Doorkeeper("test", self.context, OURS)
        router = self.open(zmq.ROUTER)
        key_listener(router, OURS)
        return router, f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"

    def close(self) -> None:
        for made in self._sockets:
            made.close()
        self.context.term()


@pytest.fixture
def library() -> Iterator[Library]:
    made = Library()
    yield made
    made.close()


def test_libzmq_asks_our_server(library: Library) -> None:
    running = Running(keys=OURS)
    dealer = library.open(zmq.DEALER)
    key_caller(dealer, OURS)
    dealer.connect(running.server.endpoint)
    for n, size in enumerate((1, 300, LARGE + 5, 4 * LARGE)):
        dealer.send(encode(StoreGet("k" * min(size, 60_000), 1.0), 0, 1, n))
        assert decode(dealer.recv())[1] == StoreValue(b"k" * min(size, 60_000))
    running.stop()


def test_our_client_asks_libzmq(library: Library) -> None:
    router, endpoint = library.listen()

    def answer() -> None:
        for _ in range(3):
            whose, frame = router.recv_multipart()
            envelope, query = decode(frame)
            assert isinstance(query, StoreGet)
            value = StoreValue(query.key.encode() * 3000)
            router.send_multipart([whose, encode(value, 0, 1, envelope.message_id)])

    thread = threading.Thread(target=answer)
    thread.start()
    with RequestClientContext(endpoint, OURS) as client:
        for key in ("a", "b" * 50, "c" * 1000):
            assert client.request(StoreGet(key, 1.0), PATIENCE) == StoreValue(key.encode() * 3000)
    thread.join(PATIENCE)


def test_libzmq_lets_nobody_else_in(library: Library) -> None:
    """Not one who has no key, another's, or has only come to know the listener's."""
    router, endpoint = library.listen()
    for keys in (None, THEIRS, HALF):
        stranger = library.open(zmq.DEALER)
        if keys is not None:
            key_caller(stranger, keys)
        failed = (
            zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED
        )
        monitor = stranger.get_monitor_socket(failed)
        stranger.connect(endpoint)
        stranger.send(b"a pickle, perhaps")
        assert monitor.poll(PATIENCE * 1000)
        stranger.disable_monitor()
        monitor.close(linger=0)
    with RequestClientContext(endpoint, HALF) as client, pytest.raises((SecretError, ProtocolError)):
        client.request(StoreGet("k", 1.0), PATIENCE)
    ours = library.open(zmq.DEALER)
    key_caller(ours, OURS)
    ours.connect(endpoint)
    ours.send(b"one of us")
    assert router.recv_multipart()[1] == b"one of us"


# ---- strangers at a server --------------------------------------------------------------------------------


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running(keys=OURS)
    yield made
    made.stop()


@pytest.mark.parametrize("keys", [None, THEIRS, HALF])
def test_a_client_learns_at_once_what_is_wrong(running: Running, keys: Keys | None) -> None:
    with (
        RequestClientContext(running.server.endpoint, keys) as client,
        pytest.raises(SecretError, match=r"another secret|wants a secret"),
    ):
        client.request(StoreGet("k", 1.0), PATIENCE)
    assert running.server.requests == 0
    with RequestClientContext(running.server.endpoint, OURS) as client:
        assert client.request(StoreGet("k", 1.0), PATIENCE) == StoreValue(b"k")


def test_strangers_are_hung_up_on_and_heard_by_nobody(running: Running) -> None:
    """Garbage, a question in the clear, and a whole conversation that was recorded."""
    query = bytes(write_head(bytearray(HEAD_ROOM) + encode(StoreGet("k", 1.0), 0, 1, 1)))
    one, _, said = met()
    recorded = b"".join(said) + packed(one, bytes(encode(StoreGet("k", 1.0), 0, 1, 1)))
    strange = [
        b"GET / HTTP/1.1\r\n\r\n",
        opening("DEALER") + query,
        one.opening()[:GREETING_SIZE] + query,
        one.opening()[:GREETING_SIZE] + command(b"INITIATE", bytes(300)),
        one.opening()[:GREETING_SIZE] + b"\x06" + (1 << 20).to_bytes(8, "big"),
        one.opening()[:GREETING_SIZE] + b"\x02" + (1 << 29).to_bytes(8, "big") + bytes(100),
        recorded,
    ]
    with RequestClientContext(running.server.endpoint, OURS) as client:
        for n, data in enumerate(strange, 1):
            with socket.create_connection(("127.0.0.1", running.server.port), PATIENCE) as stranger:
                stranger.sendall(data)
                heard = b""
                try:
                    while more := stranger.recv(1000):
                        heard += more
                except ConnectionResetError:
                    pass  # it hung up before it had read everything
            assert b"MESSAGE" not in heard
            assert running.server.malformed == n
            assert running.server.requests == n - 1
            assert client.request(StoreGet("k", 1.0), PATIENCE) == StoreValue(b"k")


def test_half_open_handshakes_hold_up_nobody(running: Running) -> None:
    """Hundreds that stop at any point of it, while one of ours asks, and connects anew."""
    whole = b"".join(met()[2])
    crowd = []
    for n in range(300):
        stranger = socket.create_connection(("127.0.0.1", running.server.port), PATIENCE)
        stranger.sendall(whole[: (n * 7) % 270])
        crowd.append(stranger)
        if n % 50 == 0:
            with RequestClientContext(running.server.endpoint, OURS) as client:
                assert client.request(StoreGet("k", 1.0), PATIENCE) == StoreValue(b"k")
    for stranger in crowd:
        stranger.close()


def test_a_server_that_stops_in_the_middle_of_a_handshake_costs_the_deadline() -> None:
    """The client waits no longer than it may; it says nothing but HELLO meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        client = RequestClient(address, keys=OURS)
        outcome: list[BaseException] = []

        def ask() -> None:
            try:
                client.request(StoreGet("a very secret key", 1.0), PATIENCE)
            except ClosedError as e:
                outcome.append(e)

        thread = threading.Thread(target=ask)
        thread.start()
        connection, _ = silent.accept()
        with connection:
            connection.settimeout(PATIENCE)
            connection.sendall(ends()[1].opening())
            heard = connection.recv(1 << 16)
            client.close()
            while more := connection.recv(1 << 16):
                heard += more
        thread.join(PATIENCE)
        assert outcome
        assert len(heard) == len(ends()[0].opening())
        assert b"secret" not in heard
