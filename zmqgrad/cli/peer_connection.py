"""Connections of ``zmqgrad doctor --peer``: one attempt to connect, and the requests to a listener."""

from __future__ import annotations

import enum
import errno
import fcntl
import json
import select
import socket
import struct
import sys
from typing import Any, NamedTuple

from zmqgrad.cli.peer_listener import GREETING, HELLO_FIELDS, TIMEOUT_SECONDS, answer, read_bytes, write_bytes
from zmqgrad.runtime.clock import MONOTONIC, Deadline
from zmqgrad.transport.query.sockets import BEGIN_OF_GREETING, GREETING_BYTES
from zmqgrad.transport.security import Keys

CONNECT_SECONDS = 3.5
"""The kernel repeats a lost packet after 1 s, and finds after 3 s that no host has the address."""
SILENCE_SECONDS = 3.0
"""How long a server may be silent: ZeroMQ greets in one round trip, a lost packet is resent after 1 s."""

LARGE_BYTES = 64 << 10
_SIOCOUTQ = 0x5411
_TCPI_PMTU, _TCPI_RTT = 60, 68
"""Offsets in Linux's ``struct tcp_info``."""

_POLL_SECONDS = 0.02


class Outcome(enum.Enum):
    """What an attempt to connect came to."""

    CONNECTED = "connected"
    REFUSED = "refused"
    TIMED_OUT = "timed out"
    RESET = "reset"
    UNREACHABLE = "unreachable"
    NO_ROUTE = "no route"
    FAILED = "failed"


_OUTCOMES = {
    errno.ECONNREFUSED: Outcome.REFUSED,
    errno.ETIMEDOUT: Outcome.TIMED_OUT,
    errno.ECONNRESET: Outcome.RESET,
    errno.EPIPE: Outcome.RESET,
    errno.EHOSTUNREACH: Outcome.UNREACHABLE,
    errno.ENETUNREACH: Outcome.NO_ROUTE,
    errno.EADDRNOTAVAIL: Outcome.NO_ROUTE,
}


def outcome_of(error: OSError) -> Outcome:
    """What ``error`` of a connection means."""
    if isinstance(error, TimeoutError):
        return Outcome.TIMED_OUT
    return _OUTCOMES.get(error.errno or 0, Outcome.FAILED)


class Attempt(NamedTuple):
    """One attempt to connect. ``stream`` is None unless it succeeded."""

    outcome: Outcome
    seconds: float
    error: str
    stream: socket.socket | None


def connect(address: str, port: int, max_segment: int = 0) -> Attempt:
    """Try to connect to the numeric ``address``.

    Args:
        max_segment: of TCP, in bytes; 0: as the interfaces allow.
    """
    stream = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    began = MONOTONIC.now()
    try:
        stream.settimeout(CONNECT_SECONDS)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if max_segment:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, max_segment)
        stream.connect((address, port))
        if stream.getsockname() == stream.getpeername():  # TCP can connect a free port of this host to itself
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    except OSError as e:
        stream.close()
        return Attempt(outcome_of(e), MONOTONIC.now() - began, e.strerror or str(e), None)
    stream.settimeout(TIMEOUT_SECONDS)
    return Attempt(Outcome.CONNECTED, MONOTONIC.now() - began, "", stream)


class Greeting(NamedTuple):
    """How a server identified itself: ``listener``, ``zeromq``, ``other`` or ``silent``, and how exactly."""

    kind: str
    mechanism: str = ""
    """Of a ZeroMQ server: NULL, PLAIN or CURVE."""
    hello: dict[str, Any] = {}
    """Of a listener."""


def read_greeting(stream: socket.socket) -> Greeting:
    """Read what the server sends first. A silent one gets the beginning of a greeting of ZeroMQ.

    Raises:
        OSError: if the connection is reset.
    """
    deadline = Deadline.after(SILENCE_SECONDS)
    data = _read_some(stream, b"", 1, deadline)
    if data.startswith(GREETING[:1]):
        while b"\n" not in data and len(data) < 4096 and (more := _read_some(stream, b"", 1, deadline)):
            data += more
        hello = json.loads(data.removeprefix(GREETING)) if data.startswith(GREETING) else None
        if isinstance(hello, dict) and hello.keys() >= HELLO_FIELDS:
            return Greeting("listener", hello=hello)
        return Greeting("other")
    if data[:1] != BEGIN_OF_GREETING[:1]:
        return Greeting("other" if data else "silent")
    stream.sendall(BEGIN_OF_GREETING)
    data = _read_some(stream, data, GREETING_BYTES, deadline)
    return Greeting("zeromq", data[12:32].rstrip(b"\0").decode(errors="replace"))


def _read_some(stream: socket.socket, data: bytes, size: int, deadline: Deadline) -> bytes:
    """``data`` and what follows until it has ``size`` bytes; less at the end, or at the deadline."""
    while len(data) < size and select.select([stream], [], [], deadline.left())[0]:
        more = stream.recv(4096)
        if not more:
            break
        data += more
    return data


def passes(stream: socket.socket, mechanism: str) -> bool | None:
    """Whether full packets reach the ZeroMQ server that was greeted; None if this system cannot tell.

    Sends a command that is longer than the protocol allows. The server closes the connection.
    """
    if sys.platform != "linux":
        return None
    greeting = mechanism.encode().ljust(20, b"\0") + b"\0" * 32
    command = b"\x06" + struct.pack(">Q", LARGE_BYTES) + b"\x05HELLO"
    deadline = Deadline.after(SILENCE_SECONDS)
    try:
        stream.setblocking(False)
        stream.send(greeting + command + bytes(LARGE_BYTES - 6))
        while _unacknowledged(stream):
            if deadline.passed():
                return False
            if select.select([stream], [], [], _POLL_SECONDS)[0] and not stream.recv(4096):
                break  # closed: the server has read what it refuses
    except BlockingIOError:
        return None
    except OSError:
        return True  # reset, for the same reason
    return True


def _unacknowledged(stream: socket.socket) -> int:
    """Bytes that the peer's kernel has not acknowledged. No event reports when there are none."""
    (count,) = struct.unpack("i", fcntl.ioctl(stream, _SIOCOUTQ, bytes(4)))
    return int(count)


def path_mtu(stream: socket.socket) -> int | None:
    """The largest packet that the kernel sends on this path; None if unknown."""
    return _tcp_info(stream, _TCPI_PMTU)


def kernel_round_trip(stream: socket.socket) -> float | None:
    """Seconds of a round trip, as measured by the kernel; None if unknown."""
    microseconds = _tcp_info(stream, _TCPI_RTT)
    return None if microseconds is None else microseconds / 1e6


def _tcp_info(stream: socket.socket, offset: int) -> int | None:
    if sys.platform != "linux":
        return None
    info = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int(struct.unpack_from("I", info, offset)[0]) if len(info) >= offset + 4 else None


class Peer:
    """A connection to a listener of ``zmqgrad doctor``. Use it in a ``with`` statement.

    Raises:
        OSError: as all methods, if the listener does not reply in time.
    """

    def __init__(self, stream: socket.socket, hello: dict[str, Any], keys: Keys | None) -> None:
        self._stream = stream
        self.hello = hello
        self.accepted = bool(self._request({"answer": answer(keys, str(hello["challenge"]))})["accepted"])

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def _request(self, request: dict[str, Any]) -> dict[str, Any]:
        self._stream.sendall(json.dumps(request).encode() + b"\n")
        line = _read_some(self._stream, b"", 1, Deadline.after(TIMEOUT_SECONDS))
        if not line:
            raise ConnectionResetError(errno.ECONNRESET, "the listener closed the connection")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def exchange(self, send: int, receive: int, timeout: float = TIMEOUT_SECONDS) -> float:
        """Send and then receive so many bytes. Returns how many seconds that took."""
        self._stream.settimeout(timeout)
        began = MONOTONIC.now()
        self._stream.sendall(json.dumps({"read": send, "write": receive}).encode() + b"\n")
        write_bytes(self._stream, send)
        read_bytes(self._stream, receive)
        return MONOTONIC.now() - began

    def connect_back(self, host: str, port: int) -> str:
        """Let the listener connect to ``port`` at ``host``. Returns its error; empty on success."""
        return str(self._request({"connect": port, "host": host})["problem"])


def open_peer(address: str, port: int, keys: Keys | None, max_segment: int = 0) -> Peer:
    """Connect to a listener once more.

    Raises:
        OSError: if that fails.
    """
    attempt = connect(address, port, max_segment)
    if attempt.stream is None:
        raise ConnectionError(f"{attempt.outcome.value}: {attempt.error}")
    try:
        return Peer(attempt.stream, read_greeting(attempt.stream).hello, keys)
    except BaseException:
        attempt.stream.close()
        raise
