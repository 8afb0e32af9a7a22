"""What an attacker tries, in his own process. Each attempt returns what he got, in words; empty: nothing."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 (another user may not be able to read it later)
import os
import pickle
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import zmq

from zmqgrad.transport.heartbeat.protocol import NONCE_SIZE, OF_PEER, PROOF_SIZE, prove
from zmqgrad.transport.local.handshake import PROTOCOL, Hello, proven
from zmqgrad.transport.security import Keys, keys_for_store, local_key, secure_client
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

REPLY_SECONDS = 0.5
CROWD = 400
"""Silent connections at each address."""


class Target(NamedTuple):
    """What anybody on the host can see of a job."""

    ports: tuple[int, ...]
    names: tuple[str, ...]
    """The abstract unix names, with their ``@``."""
    token: str
    """The file of the user's token."""
    marker: str
    """A file that the attacker's code would make."""


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
    with contextlib.suppress(Exception):
        yield keys_for_store()


def _packets(target: Target) -> Iterator[bytes]:
    call: Message = _call(target)
    for source in (0, 1):
        yield bytes(encode(call, source, 0, 1))


def _dealer(context: zmq.Context[zmq.Socket[bytes]], kind: int, keys: Keys | None) -> zmq.Socket[bytes]:
    made: zmq.Socket[bytes] = context.socket(kind)
    made.linger = 0
    if keys is not None:
        secure_client(made, keys)
    return made


def run_code_by_tcp(target: Target) -> str:
    """Send a call whose arguments run a command to every port. Whether it ran is seen afterwards."""
    with zmq.Context() as context:
        for port in target.ports:
            for keys in _keys():
                with _dealer(context, zmq.DEALER, keys) as dealer:
                    dealer.connect(f"tcp://127.0.0.1:{port}")
                    for packet in _packets(target):
                        dealer.send(packet)
                    dealer.poll(int(REPLY_SECONDS * 1000))
    return ""


def run_code_by_unix_socket(target: Target) -> str:
    """The same by every unix socket, behind each first packet that he can make."""
    answered = []
    for name in target.names:
        for keys in _keys():
            for key in (b"", local_key(keys, b""), local_key(None, b"")):
                hello = proven(key, f"ipc://{name}", Hello(PROTOCOL, 0, 0, 1))
                for first in (hello, *_packets(target)):
                    reply = _say(name, [first, *_packets(target)])
                    if reply:
                        answered.append(f"{name} replied {reply[:20]!r}")
    return "; ".join(answered)


def _say(name: str, packets: list[bytes]) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(REPLY_SECONDS)
        try:
            stranger.connect(f"\0{name[1:]}")
            for packet in packets:
                stranger.send(packet)
            return stranger.recv(1000)
        except OSError:
            return b""


def read_the_store(target: Target) -> str:
    """Get a value of the store, or any reply."""
    found = []
    with zmq.Context() as context:
        for port in target.ports:
            for keys in _keys():
                with _dealer(context, zmq.DEALER, keys) as dealer:
                    dealer.connect(f"tcp://127.0.0.1:{port}")
                    for query in (StorePing("x"), StoreGet("password", 1.0)):
                        dealer.send(encode(query, 0, 7, 1))
                    while dealer.poll(int(REPLY_SECONDS * 1000)):
                        found.append(f"port {port}: {decode(dealer.recv())[1]}")
    return "; ".join(found)


def subscribe(target: Target) -> str:
    """Receive notifications of changes; the XPUB would tell by its handshake that he is admitted."""
    admitted = []
    places = [f"ipc://{name}" for name in target.names if "watch" in name]
    places += [f"tcp://127.0.0.1:{port}" for port in target.ports]
    with zmq.Context() as context:
        for place in places:
            for keys in _keys():
                with _dealer(context, zmq.SUB, keys) as subscriber:
                    monitor = subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
                    subscriber.subscribe(b"")
                    subscriber.connect(place)
                    if monitor.poll(int(REPLY_SECONDS * 1000)):
                        admitted.append(place)
                    subscriber.disable_monitor()
                    monitor.close(linger=0)
    return "; ".join(admitted)


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
            stranger.settimeout(REPLY_SECONDS)
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
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    huge = b"\x06" + (1 << 30).to_bytes(8, "big")
    said = [os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", greeting + huge, greeting + b"\x04\x19\x05READY"]
    said += [greeting.replace(b"NULL", b"CURV") + huge, b"\x01\x00" * 2000, b"zg\x04" + os.urandom(200)]
    for _ in range(20):
        for place, data in ((place, data) for place in _places(target) for data in said):
            with contextlib.suppress(OSError), _connected(place) as stranger:
                stranger.sendall(data)
    return ""


def stay_silent(target: Target) -> str:
    """Hundreds of connections to every address that send nothing, for a while."""
    crowd = []
    with contextlib.suppress(OSError):
        for place in _places(target):
            for _ in range(CROWD):
                crowd.append(_connected(place))
    time.sleep(3)
    select.select([], [], [], 0)
    for stranger in crowd:
        stranger.close()
    return ""


def _places(target: Target) -> list[int | str]:
    return [*target.ports, *target.names]


def _connected(place: int | str) -> socket.socket:
    if isinstance(place, int):
        return socket.create_connection(("127.0.0.1", place), REPLY_SECONDS)
    for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
        stranger = socket.socket(socket.AF_UNIX, kind)
        stranger.settimeout(REPLY_SECONDS)
        try:
            stranger.connect(f"\0{place[1:]}")
            return stranger
        except OSError:
            stranger.close()
    raise ConnectionRefusedError(place)
