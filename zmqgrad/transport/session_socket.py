"""The DEALER of a session: what it sends over tcp arrives once and in order, though connections break.

Nothing is sent before the handshake has succeeded, so nothing waits in libzmq's queue for a connection: what
is unacknowledged is kept by :class:`~zmqgrad.transport.session.Outgoing` alone. When the connection breaks,
the DEALER is closed and another one sends all of that again.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq

from zmqgrad.transport.base import Buffer
from zmqgrad.transport.session import Incoming, Outgoing
from zmqgrad.transport.sockets import CONNECT_FAILED, CONNECTED, DISCONNECTED, SocketMonitor, send_all
from zmqgrad.wire.frames import write_session

logger = logging.getLogger(__name__)

CONNECT_MS = 3000
"""A connection that is not accepted within this time is tried again."""

NEVER = -1
"""libzmq must not reconnect by itself: it would send what was queued since, before what was lost."""

STABLE_SECONDS = 1.0
"""A connection that lasted for this long is opened again at once."""

UNSTABLE_SECONDS, MAX_BACKOFF_SECONDS = 0.05, 1.0
"""Others are after the first, which doubles each time that no connection comes about, up to the second."""


class Hooks(NamedTuple):
    """What a session needs of its owner."""

    watch: Callable[[int, SessionSocket], None]
    """Call :meth:`SessionSocket.on_events` from now on when this descriptor is readable."""
    unwatch: Callable[[int], None]
    """Not any more."""


class SessionSocket:
    """Sends to one incarnation of one peer. ``lock`` guards all of it; the caller holds it.

    Args:
        name: of the worker, for the log.
        endpoint: where the peer is.
        target: its incarnation; 0: whichever is there.
        epoch: see :mod:`~zmqgrad.transport.session`.
        make_socket: makes a DEALER that is ready to connect.
        hooks: see there.
        ack: the message that carries nothing but an acknowledgement.
    """

    def __init__(
        self,
        name: str,
        endpoint: str,
        target: int,
        epoch: int,
        lock: threading.Lock,
        make_socket: Callable[[], zmq.Socket[bytes]],
        hooks: Hooks,
        ack: bytes,
        now: float,
    ) -> None:
        self.outgoing: Outgoing[tuple[bytearray, Sequence[Buffer]]] = Outgoing(epoch)
        self.target = target
        self.lock = lock
        self.incoming: Incoming | None = None
        """What came of the peer, which each message acknowledges."""
        self.heard = 0
        """The highest number that the peer has acknowledged; taken in by :meth:`take_in`. Needs no lock."""
        self.reconnects = self.resends = 0
        self._name = name
        self._endpoint = endpoint
        self._make_socket = make_socket
        self._hooks = hooks
        self._ack = ack
        self._ack_wanted = False
        self._sent = 0  # the highest number that was sent
        self._socket: zmq.Socket[bytes] | None = None
        self._connected = False  # the handshake has succeeded
        self._ready = False  # and the connection has not broken since
        self._backoff = UNSTABLE_SECONDS
        self._reopen_at = math.inf
        self._open(now)

    def _open(self, now: float) -> None:
        self._opened_at = now
        self._reopen_at = math.inf
        socket = self._make_socket()
        try:
            socket.reconnect_ivl = NEVER
            socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
            self._monitor = SocketMonitor(socket, CONNECTED | DISCONNECTED | CONNECT_FAILED)
            self._hooks.watch(self._monitor.number, self)
            socket.connect(self._endpoint)
        except BaseException:
            socket.close(linger=0)
            raise
        self._socket = socket

    def send(self, first: bytearray, frames: Sequence[Buffer], now: float) -> None:
        """Send a message, or keep it until that can be. Neither ``first`` nor ``frames`` may change after."""
        size = len(first)
        for frame in frames:
            size += len(frame)
        outgoing = self.outgoing
        if self.heard > outgoing.acknowledged:
            self.take_in(now)
        sequence = outgoing.add((first, frames), size, now)
        if outgoing.behind or not self._ready:
            return
        try:
            self._transmit(sequence, first, frames)
        except zmq.Again:
            self._ready = False
        except BaseException:  # half of it may be in the pipe, which nothing must follow
            self._broke(now)
            raise

    def _send_on(self) -> None:
        """What was left over for want of a connection, or of room in the burst."""
        try:
            for sequence, message in self.outgoing.to_send():
                self._transmit(sequence, *message)
        except zmq.Again:  # the connection has broken, of which the monitor is about to tell
            self._ready = False

    def take_in(self, now: float) -> None:
        """Drop what the peer has acknowledged, and send what waited for that."""
        if self.outgoing.acknowledge(self.heard, now) and self._ready and self.outgoing.behind:
            self._send_on()

    def _transmit(self, sequence: int, first: bytearray, frames: Sequence[Buffer]) -> None:
        assert self._socket is not None
        if sequence > self._sent:
            self._sent = sequence
        elif sequence:
            self.resends += 1
        incoming = self.incoming
        acknowledged = 0 if incoming is None else incoming.acknowledgement()
        write_session(first, sequence, acknowledged, self.target)
        send_all(self._socket, first, frames)

    def send_ack(self) -> None:
        """Send an acknowledgement, as soon as that can be."""
        self._ack_wanted = not self._ready
        if self._ready:
            try:
                self._transmit(0, bytearray(self._ack), ())
            except zmq.Again:
                self._ready, self._ack_wanted = False, True

    def on_events(self, now: float) -> None:
        """The monitor has something to tell. Harmless if it has not."""
        while self._socket is not None and (events := self._monitor.read()):
            for event in events:
                if event.kind == CONNECTED:
                    self._ready = self._connected = True
                    self._backoff = UNSTABLE_SECONDS
                    self.outgoing.reconnect(now)
                    self._send_on()
                    if self._ack_wanted:
                        self.send_ack()
                else:
                    self._broke(now)
                    break  # what follows is of the socket that was closed

    def _broke(self, now: float) -> None:
        if self._connected:
            self.reconnects += 1
            logger.info(
                "%s: the connection to %s broke; %d messages are not acknowledged and will be sent again",
                self._name,
                self._endpoint,
                len(self.outgoing),
            )
        if self._connected and now - self._opened_at >= STABLE_SECONDS:
            self._close_socket()
            self._try_to_open(now)
        else:
            self._close_socket()
            self._reopen_at = now + self._backoff
            self._backoff = min(2 * self._backoff, MAX_BACKOFF_SECONDS)

    def _try_to_open(self, now: float) -> None:
        try:
            self._open(now)
        except zmq.ZMQError as e:  # too many open files, say
            logger.warning("%s cannot connect to %s now: %s", self._name, self._endpoint, e)
            self._reopen_at = now + MAX_BACKOFF_SECONDS

    def on_time(self, now: float) -> None:
        """See whether acknowledgements have failed to come for too long, or it is time to connect again."""
        if self._reopen_at <= now:
            self._try_to_open(now)
            return
        if self.heard > self.outgoing.acknowledged:
            self.take_in(now)
        if self._socket is not None and self.outgoing.is_overdue(now):
            logger.info(
                "%s: nothing was acknowledged by %s for long, %d messages will be sent again",
                self._name,
                self._endpoint,
                len(self.outgoing),
            )
            self._close_socket()
            self._try_to_open(now)

    def next_due(self) -> float:
        """When :meth:`on_time` should be called; infinite for never."""
        return min(self._reopen_at, self.outgoing.due)

    def _close_socket(self, linger: int = 0) -> None:
        self._ready = self._connected = False
        socket, self._socket = self._socket, None
        if socket is not None:
            self._hooks.unwatch(self._monitor.number)
            self._monitor.close()
            socket.close(linger=linger)

    def close(self, linger: int) -> None:
        """Send nothing any more; what libzmq has may take ``linger`` ms to leave. Idempotent."""
        self._reopen_at = math.inf
        self._close_socket(linger)
