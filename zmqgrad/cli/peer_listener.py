"""``zmqgrad doctor --listen``: the side of a test between two hosts that waits.

A connection begins with a line of JSON by the listener, a challenge, and one by the client, which answers it
with the job's key. Then each line of the client names bytes to read and to write, or a port of its own host
to connect to. Nothing else can be requested, so listening is harmless without a secret. With one, clients
need the same, and may name the address to connect to: the one at which their workers will listen.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import socket
import socketserver
import threading
from typing import Any, BinaryIO

from zmqgrad.errors import AddressInUseError, TransportError
from zmqgrad.transport.security import Keys

logger = logging.getLogger(__name__)

GREETING = b"zmqgrad-doctor "
HELLO_FIELDS = frozenset(("challenge", "secured", "host", "at", "client"))
"""What the line of the listener tells: its challenge, whether it has a secret, its name, both addresses."""

TIMEOUT_SECONDS = 10.0
CONNECT_BACK_SECONDS = 3.5
MAX_BYTES = 256 << 20
"""Most bytes that one line may request in each direction."""

MALFORMED = (ValueError, KeyError, TypeError, OverflowError, RecursionError)
"""What handling a line raises that is none of ours."""

_MAX_LINE_BYTES = 4096
_POLL_SECONDS = 0.05
"""How soon :meth:`PeerListener.close` is noticed. Clients are served immediately."""

_BUFFER_BYTES = 256 << 10


def answer(keys: Keys | None, challenge: str) -> str:
    """The proof that its sender has the job's secret; empty without one."""
    if keys is None:
        return ""
    return hmac.digest(keys.local, f"doctor {challenge}".encode(), "sha256").hex()


def read_bytes(stream: socket.socket, size: int) -> None:
    """Read ``size`` bytes and drop them.

    Raises:
        OSError: if they do not arrive in time.
    """
    buffer = memoryview(bytearray(min(size, _BUFFER_BYTES)))
    while size:
        got = stream.recv_into(buffer[:size])
        if not got:
            raise ConnectionResetError("the connection was closed")
        size -= got


def write_bytes(stream: socket.socket, size: int) -> None:
    """Write ``size`` bytes.

    Raises:
        OSError: if the peer does not read them in time.
    """
    block = memoryview(bytes(min(size, _BUFFER_BYTES)))
    while size:
        size -= stream.send(block[:size])


def connect_back(host: str, port: int) -> str:
    """Connect to ``port`` at ``host``. Returns the name of the error; empty on success."""
    try:
        socket.create_connection((host, port), CONNECT_BACK_SECONDS).close()
    except OSError as e:
        return "timeout" if isinstance(e, TimeoutError) else e.strerror or str(e)
    return ""


def plain(address: str) -> str:
    """An IPv4 address as such, which a socket of both versions shows as IPv6."""
    return address.removeprefix("::ffff:")


class _Handler(socketserver.BaseRequestHandler):
    """One connection."""

    server: PeerListener

    def handle(self) -> None:
        stream: socket.socket = self.request
        stream.settimeout(TIMEOUT_SECONDS)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            with stream.makefile("rb", buffering=0) as lines:
                self._serve(stream, lines)  # type: ignore[arg-type]
        except (OSError, *MALFORMED) as e:
            logger.info("%s: %s", plain(self.client_address[0]), e)

    def _serve(self, stream: socket.socket, lines: BinaryIO) -> None:
        challenge = secrets.token_hex(16)
        client = plain(self.client_address[0])
        hello = {
            "challenge": challenge,
            "secured": self.server.keys is not None,
            "host": socket.gethostname(),
            "at": plain(stream.getsockname()[0]),
            "client": client,
        }
        stream.sendall(GREETING + json.dumps(hello).encode() + b"\n")
        proof = _line(lines)["answer"]
        accepted = hmac.compare_digest(proof, answer(self.server.keys, challenge)) or not self.server.keys
        refusal = "refused, as it has another secret" if proof else "refused, as it has no secret"
        self.server.report(f"{client}: {'connected' if accepted else refusal}")
        _write_line(stream, {"accepted": accepted})
        while accepted and (request := _line(lines)):
            if "connect" in request:
                target = str(request.get("host", client)) if self.server.keys else client
                problem = connect_back(target, int(request["connect"]))
                self.server.report(f"{client}: connecting to {target}: {problem or 'succeeded'}")
                _write_line(stream, {"problem": problem})
                continue
            read, write = int(request["read"]), int(request["write"])
            if not (0 <= read <= MAX_BYTES and 0 <= write <= MAX_BYTES):
                raise ValueError(f"{read} and {write} bytes were requested (at most {MAX_BYTES})")
            read_bytes(stream, read)
            write_bytes(stream, write)


def _line(lines: BinaryIO) -> dict[str, Any]:
    """The next line; empty at the end of the connection."""
    line = lines.readline(_MAX_LINE_BYTES)
    value = json.loads(line) if line else {}
    if not isinstance(value, dict):
        raise ValueError("the line is no object")
    return value


def _write_line(stream: socket.socket, value: dict[str, Any]) -> None:
    stream.sendall(json.dumps(value).encode() + b"\n")


class PeerListener(socketserver.ThreadingTCPServer):
    """Serves clients of ``zmqgrad doctor --peer`` in threads until it is closed.

    Args:
        host: address to listen at; empty: all, of both versions of IP.
        port: 0: any.
        keys: of the job; None: clients need none.

    Raises:
        AddressInUseError, TransportError: if it cannot listen.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False  # a connection may last for its timeout

    def __init__(self, host: str, port: int, keys: Keys | None) -> None:
        self.keys = keys
        both = not host and socket.has_dualstack_ipv6()
        self.address_family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
        self._both = both
        try:
            super().__init__((host, port), _Handler)
        except OSError as e:
            kind = AddressInUseError if "in use" in (e.strerror or "") else TransportError
            raise kind(f"cannot listen at {host or 'any address'}, port {port}: {e.strerror or e}") from e
        self._thread = threading.Thread(
            target=self.serve_forever, args=(_POLL_SECONDS,), name="doctor-listener", daemon=True
        )
        self._thread.start()

    def server_bind(self) -> None:
        if self._both:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    @property
    def port(self) -> int:
        """The port."""
        return int(self.server_address[1])

    def report(self, line: str) -> None:
        """Print a line about a client."""
        print(line, flush=True)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self.shutdown()
        self.server_close()
        self._thread.join()
