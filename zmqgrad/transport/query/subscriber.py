"""Receives notifications: the client's half of the watch channel, a SUB.

Notifications are lost while the connection is broken. libzmq reconnects and subscribes to the same topics,
and the owner is notified so that it can read what it missed. The thread that receives a notification also
runs its tasks, while another thread receives the next: no thread is woken for them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial

import zmq

from zmqgrad.errors import ProtocolError
from zmqgrad.runtime.clock import Deadline, monotonic_ns
from zmqgrad.runtime.thread_pool import Source, Task
from zmqgrad.transport import tap as tapping
from zmqgrad.transport.query.sockets import close_client_socket, open_client_socket
from zmqgrad.transport.reader import Reader
from zmqgrad.transport.security import Keys
from zmqgrad.transport.sockets import CONNECTED, DISCONNECTED, NOBLOCK, SocketMonitor, get_int
from zmqgrad.transport.tap import Identity, Tracer
from zmqgrad.wire.codec import decode
from zmqgrad.wire.frames import Envelope
from zmqgrad.wire.messages import Message

logger = logging.getLogger(__name__)

BURST = 256
"""Notifications received in a row before their tasks run."""


class Subscriber:
    """A SUB that can change its publisher, and its reader.

    Args:
        name: for log lines.
        on_message: called with each notification, in order; must be quick. Returns tasks, which may take
            longer. Neither may raise.
        on_broken: called when notifications may have been lost.
        serve_from: makes the threads of a pool read and run the tasks (``ThreadPool.serve_from``).
    """

    def __init__(
        self,
        name: str,
        on_message: Callable[[Message], Iterable[Task]],
        on_broken: Callable[[], None],
        serve_from: Callable[[Source], None],
    ) -> None:
        self.name = name
        self.endpoint = ""
        """The endpoint it is connected to; empty for none."""
        self._on_message = on_message
        self._on_broken = on_broken
        self._lock = threading.Lock()  # guards the socket, and all of the next three
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: SocketMonitor | None = None
        self._fds: tuple[int, ...] = ()
        self._closed = False
        self.tracer: Tracer | None = None
        tapping.register(self)
        self._reader = Reader(f"{name}-subscriber", self._on_closed)
        try:
            self._reader.start(serve_from)
        except BaseException:
            self._reader.close()
            raise

    @property
    def malformed(self) -> int:
        """How many notifications were malformed."""
        return self._reader.malformed

    def identity(self) -> Identity:
        """As :class:`~zmqgrad.transport.tap.Traced`."""
        return Identity(tapping.STORE_CLIENT, self.name)

    def connect(self, endpoint: str, keys: Keys | None) -> None:
        """Receives from ``endpoint`` only, from now on. All subscriptions are dropped.

        Raises:
            TransportError: if the system has no socket left.
        """
        with self._lock:
            if self._closed:
                return
            self._disconnect()
            socket = open_client_socket(zmq.SUB, endpoint, keys)
            self._socket, self.endpoint = socket, endpoint
            self._monitor = SocketMonitor(socket, CONNECTED | DISCONNECTED)
            self._fds = (get_int(socket, zmq.FD), self._monitor.fd)
            for fd in self._fds:
                self._reader.watch(fd, self._read_socket)
            socket.connect(endpoint)
        self._reader.post(self._read_socket)

    def subscribe(self, *topics: bytes) -> None:
        """Subscribes to ``topics``, in that order. No effect after :meth:`close`."""
        with self._lock:
            if self._socket is not None:
                for topic in topics:
                    self._socket.subscribe(topic)
        self._reader.post(self._read_socket)  # libzmq may have read what the descriptor reported

    def unsubscribe(self, topic: bytes) -> None:
        """Undoes :meth:`subscribe`, if the publisher is still the same."""
        with self._lock:
            if self._socket is not None:
                try:
                    self._socket.unsubscribe(topic)
                except zmq.ZMQError as e:
                    logger.debug("%s: was not subscribed to %r: %s", self.name, topic, e)
        self._reader.post(self._read_socket)

    def disconnect(self) -> None:
        """Stops receiving until :meth:`connect`."""
        with self._lock:
            self._disconnect()

    def _disconnect(self) -> None:
        """Called with the lock held."""
        socket, self._socket, self.endpoint = self._socket, None, ""
        for fd in self._fds:
            self._reader.unwatch(fd)
        self._fds = ()
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        if socket is not None:
            close_client_socket(socket)

    # ---- reading ----------------------------------------------------------------------------------------

    def _read_socket(self) -> None:
        received: list[list[zmq.Frame]] = []
        more = False
        with self._lock:
            if self._socket is None or self._monitor is None:
                return
            broken = any([event.kind == DISCONNECTED for event in self._monitor.read()])
            try:
                for _ in range(BURST):
                    received.append(self._socket.recv_multipart(NOBLOCK, copy=False))
                more = True
            except zmq.Again:
                pass
        for frames in received:
            self._receive(frames)
        if broken:
            self._on_broken()
        if more:  # perhaps; when these tasks have begun
            self._reader.tasks.append(partial(self._reader.post, self._read_socket))

    def _receive(self, frames: list[zmq.Frame]) -> None:
        try:
            if len(frames) != 2:
                raise ProtocolError(f"a notification of {len(frames)} frames (expected two)")
            envelope, message = decode(frames[1].buffer)
        except ProtocolError as e:
            self._reader.count_malformed(self.endpoint, f"notification from {self.endpoint} ({e})")
            return
        if self.tracer is not None:
            revision: int = getattr(message, "revision", 0)
            shown = Envelope(envelope.type, 0, envelope.incarnation, revision)
            self.tracer.tap(False, 0, shown, message, len(frames[1]), monotonic_ns())
        self._reader.tasks.extend(self._on_message(message))

    def _on_closed(self) -> None:
        """Closes everything when reading ends."""
        tapping.unregister(self)
        with self._lock:
            self._closed = True
            self._disconnect()

    def close(self) -> None:
        """Stops receiving. Idempotent; safe from any thread."""
        self._closed = True
        self._reader.close()

    def join(self, deadline: Deadline) -> list[str]:
        """Waits until no thread reads. Returns a name if that has not happened by ``deadline``."""
        return self._reader.join(deadline)
