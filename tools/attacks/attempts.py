"""What an attacker tries, in his own process. Each attempt returns what he got, in words; empty: nothing."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 (another user may not be able to read it later)
import itertools
import os
import pickle
import resource
import select
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import zmq

from zmqgrad.errors import ZmqgradError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.heartbeat.protocol import NONCE_SIZE, OF_PEER, PROOF_SIZE, prove
from zmqgrad.transport.local.handshake import PROTOCOL, Hello, proven
from zmqgrad.transport.security import Keys, keys_for_store, keys_for_worker, local_key, secure_client
from zmqgrad.transport.sockets import (
    CONNECT_FAILED,
    CONNECTED,
    DISCONNECTED,
    HANDSHAKE_FAILED,
    SocketMonitor,
)
from zmqgrad.wire.codec import decode, encode
from zmqgrad.wire.messages import (
    Blob,
    BlobLocation,
    Call,
    Message,
    Payload,
    PayloadFormat,
    StoreGet,
    StorePing,
)
from zmqgrad.wire.messages.payloads import NO_TENSORS

PATIENCE_SECONDS = 10.0
"""How long an attacker waits for what the job does with him. All that is refused is closed."""

SILENCE_SECONDS = 3.0
"""The same for ports that do not speak the protocol of libzmq, and say something that is none."""

HANDSHAKE_MS = 500
"""After that, libzmq closes a connection to a port that says nothing."""

ANOTHER_JOB = b"the name of another job"

CROWD = 400
"""Silent connections at each address."""

ROUNDS = 160
"""Frames of garbage at each address."""

FILLERS = 2
"""Processes that fill queues."""

CALLS = 30
"""That the job makes while they are silent."""


class Target(NamedTuple):
    """What anybody on the host can see of a job."""

    ports: tuple[int, ...]
    names: tuple[str, ...]
    """The abstract unix names, with their ``@``."""
    token: str
    """The file of the user's token."""
    marker: str
    """A file that the attacker's code would make."""
    progress: str
    """A file with the number of calls that the job has made."""


class Exploit:
    """Its pickle runs a command."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.marker}",)


def _call(target: Target) -> Call:
    pickled = pickle.dumps(((Exploit(target.marker),), {}))
    blob = Blob(BlobLocation.INLINE, len(pickled), pickled)
    return Call("builtins:print", Payload(PayloadFormat.PICKLE, NO_TENSORS, blob), 5.0)


def _keys() -> Iterator[Keys | None]:
    """No keys, and those that the attacker can make."""
    yield None
    with contextlib.suppress(ZmqgradError):
        yield keys_for_store()
    with contextlib.suppress(ZmqgradError):
        yield keys_for_worker(ANOTHER_JOB)


def _packets(target: Target) -> Iterator[bytes]:
    call: Message = _call(target)
    for source in (0, 1):
        yield bytes(encode(call, source, 0, 1))


class _Knock:
    """A socket of libzmq that connects to a port once."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], kind: int, port: int, keys: Keys | None
    ) -> None:
        self.port = port
        self.admitted = self.ended = False
        self.socket: zmq.Socket[bytes] = context.socket(kind)
        self.socket.linger = 0
        self.socket.reconnect_ivl = -1
        self.socket.handshake_ivl = HANDSHAKE_MS
        if keys is not None:
            secure_client(self.socket, keys)
        self.monitor = SocketMonitor(
            self.socket, CONNECTED | DISCONNECTED | CONNECT_FAILED | HANDSHAKE_FAILED
        )

    def connect(self) -> None:
        self.socket.connect(f"tcp://127.0.0.1:{self.port}")

    def look(self) -> None:
        for event in self.monitor.read():
            self.admitted |= event.kind == CONNECTED
            self.ended |= event.kind != CONNECTED

    def receive(self) -> list[bytes]:
        """What has arrived."""
        found = []
        with contextlib.suppress(zmq.Again):
            while True:
                found.append(self.socket.recv(zmq.NOBLOCK))
        return found


@contextlib.contextmanager
def _knocking(
    target: Target, kind: int, prepare: Callable[[zmq.Socket[bytes]], None]
) -> Iterator[list[_Knock]]:
    """Sockets that have connected to all ports, with all keys, until each was refused, or has a reply."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    knocks: list[_Knock] = []
    try:
        knocks += [_Knock(context, kind, port, keys) for port in target.ports for keys in _keys()]
        for knock in knocks:
            knock.connect()
            prepare(knock.socket)
        deadline = Deadline.after(SILENCE_SECONDS)
        while not deadline.passed():
            waiting = [knock for knock in knocks if not (knock.ended or knock.socket.poll(0))]
            if not waiting:
                break
            poll = select.poll()
            for knock in waiting:
                poll.register(knock.monitor.fd, select.POLLIN)
            poll.poll(100)
            for knock in waiting:
                knock.look()
        yield knocks
    finally:
        for knock in knocks:
            knock.monitor.close()
        context.destroy(linger=0)


def _send(socket: zmq.Socket[bytes], packets: Iterable[bytes | bytearray]) -> None:
    """Sends packets, unless the connection was refused already."""
    with contextlib.suppress(zmq.Again):
        for packet in packets:
            socket.send(packet, zmq.NOBLOCK)


def run_code_by_tcp(target: Target) -> str:
    """Send a call whose arguments run a command to every port. Whether it ran is seen afterwards."""

    def send(socket: zmq.Socket[bytes]) -> None:
        _send(socket, _packets(target))

    with _knocking(target, zmq.DEALER, send):
        return ""


def run_code_by_unix_socket(target: Target) -> str:
    """The same by every unix socket, behind each first packet that he can make."""
    said = []
    for name in target.names:
        for keys in _keys():
            for key in (b"", local_key(keys, b""), local_key(None, b"")):
                hello = proven(key, f"ipc://{name}", Hello(PROTOCOL, 0, 0, 1))
                said += [(name, [first, *_packets(target)]) for first in (hello, *_packets(target))]
    return "; ".join(f"{name} replied {reply[:20]!r}" for name, reply in _say(said) if reply)


def run_code_as_another_job(target: Target) -> str:
    """Both, with the secret of the job, which admits to its store, by the sockets of its workers."""
    keys = keys_for_worker(ANOTHER_JOB)
    assert keys is not None
    run_code_by_tcp(target)
    said = []
    for name in target.names:
        if "store" not in name:
            for key in (local_key(keys, b""), local_key(keys, ANOTHER_JOB)):
                hello = proven(key, f"ipc://{name}", Hello(PROTOCOL, 0, 0, 1))
                said.append((name, [hello, *_packets(target)]))
    return "; ".join(f"{name} replied {reply[:20]!r}" for name, reply in _say(said) if reply)


def _say(said: Sequence[tuple[str, Sequence[bytes]]]) -> Iterator[tuple[str, bytes]]:
    """Sends packets by a connection to each name. Returns the replies; empty where it was closed."""
    opened: list[tuple[str, socket.socket]] = []
    for name, packets in said:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.settimeout(PATIENCE_SECONDS)
        with contextlib.suppress(OSError):
            stranger.connect(f"\0{name[1:]}")
            opened.append((name, stranger))
            for packet in packets:
                stranger.send(packet)
    for name, stranger in opened:
        with stranger, contextlib.suppress(OSError):
            yield name, stranger.recv(1000)


def read_the_store(target: Target) -> str:
    """Get a value of the store, or any reply."""

    def send(socket: zmq.Socket[bytes]) -> None:
        _send(socket, [encode(query, 0, 7, 1) for query in (StorePing("x"), StoreGet("password", 1.0))])

    found = []
    with _knocking(target, zmq.DEALER, send) as knocks:
        for knock in knocks:
            if knock.socket.poll(0):
                replies = knock.receive()
                if len(replies) == 1 and knock.socket.poll(1000):
                    replies += knock.receive()
                found += [f"port {knock.port}: {decode(data)[1]}" for data in replies]
    return "; ".join(found)


def subscribe(target: Target) -> str:
    """Receive notifications of changes; the XPUB would tell by its handshake that he is admitted."""

    def subscribe_to_all(socket: zmq.Socket[bytes]) -> None:
        socket.subscribe(b"")

    with _knocking(target, zmq.SUB, subscribe_to_all) as knocks:
        return "; ".join(f"tcp://127.0.0.1:{knock.port}" for knock in knocks if knock.admitted)


def take_the_token(target: Target) -> str:
    """Read the token of the user."""
    try:
        with open(target.token, "rb") as file:
            return f"{len(file.read())} bytes of {target.token}"
    except OSError:
        return ""


def pass_for_a_peer(target: Target) -> str:
    """Get a heartbeat, by which he would seem to be a worker."""
    answered = []
    for name in target.names:
        if not name.endswith("-heartbeat"):
            continue
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(PATIENCE_SECONDS)
            try:
                stranger.connect(f"\0{name[1:]}")
                greeting = stranger.recv(1000)
                nonce = bytes(NONCE_SIZE)
                stranger.send(nonce + prove(b"", OF_PEER, greeting, nonce))
                reply = stranger.recv(PROOF_SIZE)
            except OSError:
                continue
            if reply:
                answered.append(name)
    return "; ".join(answered)


def send_garbage(target: Target) -> str:
    """Random and half-true bytes to every address; what they do is seen afterwards."""
    for place in places(target):
        throw(place, ROUNDS)
    return ""


def throw(place: int | str, count: int, target: Target | None = None) -> None:
    """Sends ``count`` frames of garbage to an address, each by a connection of its own."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    huge = b"\x06" + (1 << 30).to_bytes(8, "big")
    curve = greeting.replace(b"NULL\0", b"CURVE")
    said = [os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", greeting + huge, greeting + b"\x04\x19\x05READY"]
    said += [curve + huge, curve + b"\x04\x05\x04JUNK", b"\x01\x00" * 2000, b"zg\x04" + os.urandom(200)]
    for data in itertools.islice(itertools.cycle(said), count):
        with contextlib.suppress(OSError), _connected(place) as stranger:
            if isinstance(place, int):  # reset, so that the port of this end is free at once
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stranger.sendall(data)


def stay_silent(target: Target) -> str:
    """Hundreds of connections to every address that send nothing, while the job makes some calls."""
    with contextlib.ExitStack() as crowd:
        for place in places(target):
            for _ in range(CROWD):
                crowd.enter_context(_connected(place))
        wait_for_calls(target, CALLS)
    return ""


def fill_queues(target: Target) -> str:
    """Connect to all unix sockets as fast as the kernel lets him, while the job opens connections there."""
    children = []
    for _ in range(FILLERS):
        child = os.fork()
        if not child:
            _fill(target.names)
        children.append(child)
    try:
        wait_for_calls(target, CALLS)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return ""


def _fill(names: Sequence[str]) -> NoReturn:
    kept: deque[socket.socket] = deque(maxlen=CROWD)
    for name in itertools.cycle(names):
        kind = socket.SOCK_STREAM if name.endswith("-heartbeat") else socket.SOCK_SEQPACKET
        with contextlib.suppress(OSError):
            while True:  # until the queue is full
                stranger = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
                kept.append(stranger)
                stranger.connect(f"\0{name[1:]}")
    os._exit(1)  # there are no names


def crowd_at(place: int | str, count: int, target: Target) -> None:
    """Opens ``count`` silent connections to one address, and keeps them while the job makes some calls."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as crowd:
        for _ in range(count):
            crowd.enter_context(_connected(place))
        wait_for_calls(target, CALLS)


def calls_made(target: Target) -> tuple[int, int]:
    """The calls that the job has made, and those that it has lost."""
    data = Path(target.progress).read_bytes()
    calls, lost = struct.unpack("=QQ", data) if data else (0, 0)
    return calls, lost


def wait_for_calls(target: Target, count: int) -> None:
    """Waits until the job has made ``count`` more calls.

    Raises:
        TimeoutError: if it does not: it stands still.
    """
    until, deadline = calls_made(target)[0] + count, Deadline.after(PATIENCE_SECONDS * 3)
    while calls_made(target)[0] < until:
        if deadline.passed():
            raise TimeoutError(f"the job has not made {count} calls")
        time.sleep(0.01)  # another process, which can send us nothing


def places(target: Target) -> list[int | str]:
    """The addresses of a job."""
    return [*target.ports, *target.names]


def _connected(place: int | str) -> socket.socket:
    if isinstance(place, int):
        return socket.create_connection(("127.0.0.1", place), PATIENCE_SECONDS)
    for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
        stranger = socket.socket(socket.AF_UNIX, kind)
        # With settimeout(), a full queue of the listener would be an error at once.
        stranger.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(PATIENCE_SECONDS), 0)
        )
        try:
            stranger.connect(f"\0{place[1:]}")
            stranger.settimeout(PATIENCE_SECONDS)
            return stranger
        except OSError:
            stranger.close()
    raise ConnectionRefusedError(place)
