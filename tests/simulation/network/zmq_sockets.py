"""What the tests of ZeroMQ have in common: sockets of one context, read as zmqgrad reads them."""

from __future__ import annotations

import itertools
import select
import struct
from typing import Any

import zmq

from tests.simulation.network.conftest import World

SECONDS = 5.0
"""Limit of each wait for what must happen. Far more than it takes."""

SHORT_MS = 50
"""How long a test waits for what must not happen."""

_numbers = itertools.count()


class Sockets:
    """A context, its sockets and their monitors. Closed, they leave nothing."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.context: Any = world.zmq.Context(1)
        self._opened: list[Any] = []
        self._monitors: list[Monitor] = []

    def open(self, kind: int, **options: Any) -> Any:
        """Returns a new socket with ``options``, by their names."""
        socket = self.context.socket(kind)
        socket.linger = 0
        for name, value in options.items():
            setattr(socket, name, value)
        self._opened.append(socket)
        return socket

    def bound(self, kind: int, **options: Any) -> tuple[Any, str]:
        """Returns a new socket that is bound to a port of its own, and its address."""
        socket = self.open(kind, **options)
        socket.bind("tcp://127.0.0.1:*")
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def connected(self, kind: int, address: str, **options: Any) -> Any:
        """Returns a new socket that connects to ``address``."""
        socket = self.open(kind, **options)
        socket.connect(address)
        return socket

    def pair(self, **options: Any) -> tuple[Any, bytes, Any]:
        """Returns a ROUTER with ``options``, the identity of its only peer, and that: a DEALER."""
        router, address = self.bound(zmq.ROUTER, **options)
        dealer = self.connected(zmq.DEALER, address)
        dealer.send(b"hello")
        identity, text = self.receive(router)
        assert text == b"hello"
        return router, identity, dealer

    def watch(self, socket: Any, events: int) -> Monitor:
        """Returns a monitor of ``socket``."""
        monitor = Monitor(self, socket, events)
        self._monitors.append(monitor)
        return monitor

    def wait(self, fd: int, milliseconds: float = SECONDS * 1000) -> bool:
        """Waits until ``fd`` is readable."""
        return bool(self.world.ready(fd, select.POLLIN, milliseconds))

    def receive(self, socket: Any) -> list[bytes]:
        """Returns the next message, for which it waits by the descriptor of ``socket``."""
        frames = self.receive_frames(socket)
        return [frame.bytes for frame in frames]

    def receive_frames(self, socket: Any) -> list[Any]:
        """As :meth:`receive`, with what is known of each frame."""
        while True:
            try:
                found: list[Any] = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                return found
            except zmq.Again:
                assert self.wait(socket.getsockopt(zmq.FD)), "nothing arrived"

    def is_empty(self, socket: Any) -> bool:
        """Returns whether nothing arrives for a while. Takes the event of the descriptor, no message."""
        while not socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            if not self.wait(socket.getsockopt(zmq.FD), SHORT_MS):
                return True
        return False

    def discard(self, socket: Any) -> None:
        """Reads ``socket`` for a while: only so it notices that connections have ended."""
        while not self.is_empty(socket):
            socket.recv_multipart(zmq.NOBLOCK)

    def pause(self, milliseconds: float = SHORT_MS) -> None:
        """Lets time pass in which libzmq acts."""
        self.world.select.poll().poll(milliseconds)

    def unused_port(self) -> int:
        """Returns a port at which nobody listens."""
        with self.world.socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            return int(bound.getsockname()[1])

    def close(self) -> None:
        """Closes everything, and waits until the context has ended."""
        for monitor in self._monitors:
            monitor.close()
        for socket in self._opened:
            socket.close(linger=0)
        self.context.term()


class Monitor:
    """The connection events of a socket, as :class:`zmqgrad.transport.sockets.SocketMonitor` reads them."""

    def __init__(self, sockets: Sockets, socket: Any, events: int) -> None:
        address = f"inproc://test-monitor-{next(_numbers)}"
        socket.monitor(address, events)
        self._sockets = sockets
        self._socket = socket
        self.pair: Any = sockets.context.socket(zmq.PAIR)
        self.pair.linger = 0
        self.pair.rcvhwm = 0
        self.pair.connect(address)
        self.fd = self.pair.getsockopt(zmq.FD)

    def next(self) -> tuple[int, int]:
        """Returns the next event and its value, for which it waits."""
        event, _ = self._sockets.receive(self.pair)
        kind, value = struct.unpack("=HI", event)
        return kind, value

    def kinds(self, count: int) -> list[int]:
        """Returns the next ``count`` events without values."""
        return [self.next()[0] for _ in range(count)]

    def is_silent(self) -> bool:
        """Returns whether nothing is reported for a while."""
        return self._sockets.is_empty(self.pair)

    def close(self) -> None:
        """Ends it. Idempotent."""
        if not self.pair.closed:
            if not self._socket.closed:
                self._socket.disable_monitor()
            self.pair.close(linger=0)
