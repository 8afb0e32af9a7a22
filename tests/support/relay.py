"""A relay between two ends of tcp connections, which breaks them when a test says so."""

from __future__ import annotations

import random
import select
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

Direction = Literal["to server", "to client"]
Fate = Literal["pass", "drop", "cut", "truncate"]
"""What becomes of a chunk: forwarded; or its connection is reset instead, afterwards, or in its middle."""

CHUNK_BYTES = 64 << 10


def passes(direction: Direction, chunk: bytes) -> Fate:
    """Forward everything."""
    return "pass"


def at_random(
    chance: float, seed: int, fates: tuple[Fate, ...] = ("drop", "cut", "truncate")
) -> Callable[[Direction, bytes], Fate]:
    """Break with ``chance`` at each chunk."""
    drawn = random.Random(seed)
    return lambda direction, chunk: drawn.choice(fates) if drawn.random() < chance else "pass"


class Relay:
    """Forwards connections to ``port`` of ``host``. A context manager.

    ``fate`` is asked about each chunk that comes, in the relay's thread.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.fate: Callable[[Direction, bytes], Fate] = passes
        self.refusing = False
        """Accept connections and reset them at once."""
        self.cuts = 0
        self.target = (host, port)
        self._selector = selectors.DefaultSelector()
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=1000)
        self._listening.setblocking(False)
        self.port: int = self._listening.getsockname()[1]
        self._wakes, self._waker = socket.socketpair()
        self._peers: dict[socket.socket, tuple[socket.socket, Direction]] = {}
        self._queues: dict[socket.socket, bytearray] = {}
        self._swallowed: set[socket.socket] = set()
        self._stalled = False
        self._cut_all = False
        self._closing = False
        self._failure: Exception | None = None
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Reset all connections."""
        self._cut_all = True
        self._waker.send(b"\0")

    @property
    def connections(self) -> int:
        """How many are forwarded now. :meth:`cut` takes effect in the relay's thread."""
        return len(self._peers) // 2

    def stall(self) -> None:
        """Forward nothing and accept no connection until :meth:`resume`."""
        self._stalled = True
        self._waker.send(b"\0")

    def resume(self) -> None:
        """Forward again."""
        self._stalled = False
        self._waker.send(b"\0")

    def swallow(self) -> None:
        """Forward nothing more on the connections that there are, and say nothing; new ones work."""
        self._swallowed.update(self._peers)

    def close(self) -> None:
        """Reset all connections, and listen no more. Idempotent."""
        if not self._closing:
            self._closing = True
            with suppress(OSError):  # it may have seen that already, and be gone
                self._waker.send(b"\0")
            self._thread.join(10.0)
            assert not self._thread.is_alive()
            if self._failure is not None:
                raise self._failure

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as e:
            self._failure = e
        for end in list(self._peers):
            self._reset(end)
        self._selector.close()
        for each in (self._listening, self._wakes, self._waker):
            each.close()

    def _loop(self) -> None:
        while not self._closing:
            if self._stalled:
                select.select([self._wakes], [], [])  # nothing else is read, so all else stays ready
            for key, mask in self._selector.select():
                if key.fileobj is self._wakes:
                    self._wakes.recv(1000)
                    if self._cut_all:
                        self._cut_all = False
                        for end in list(self._peers):
                            self._reset(end)
                elif self._stalled:
                    continue
                elif key.fileobj is self._listening:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._serve(key.fileobj, mask)

    def _accept(self) -> None:
        near, _ = self._listening.accept()
        if self.refusing:
            _reset(near)
            return
        far = socket.socket()
        far.settimeout(5.0)
        try:
            far.connect(self.target)
        except OSError:
            far.close()
            _reset(near)
            return
        for end, peer, direction in ((near, far, "to server"), (far, near, "to client")):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._peers[end] = (peer, direction)  # type: ignore[assignment]
            self._queues[end] = bytearray()
            self._selector.register(end, selectors.EVENT_READ)

    def _serve(self, end: socket.socket, mask: int) -> None:
        if end not in self._peers:
            return
        if mask & selectors.EVENT_WRITE:
            self._flush(end)
        if not mask & selectors.EVENT_READ or end not in self._peers:
            return
        peer, direction = self._peers[end]
        try:
            chunk = end.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._reset(end)
            return
        if end in self._swallowed:
            return
        fate = self.fate(direction, chunk)
        if fate != "drop":
            self._queues[peer] += chunk if fate != "truncate" else chunk[: len(chunk) // 2]
            self._flush(peer)
        if fate != "pass":
            self.cuts += 1
            self._reset(end)

    def _flush(self, end: socket.socket) -> None:
        queue = self._queues[end]
        try:
            while queue:
                del queue[: end.send(queue)]
        except BlockingIOError:
            pass
        except OSError:
            self._reset(end)
            return
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if queue else 0)
        self._selector.modify(end, mask)

    def _reset(self, end: socket.socket) -> None:
        if end not in self._peers:
            return
        peer, _ = self._peers[end]
        for each in (end, peer):
            self._selector.unregister(each)
            del self._peers[each], self._queues[each]
            _reset(each)


def _reset(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()
