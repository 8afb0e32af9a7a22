"""The DEALER of a session: messages over tcp arrive once and in order, even if connections break.

Nothing is sent before the handshake has succeeded, so no message waits for a connection in libzmq's queue:
only :class:`~zmqgrad.transport.session.Outgoing` keeps what is unacknowledged. When the connection breaks,
the DEALER is closed, and another one resends all of that.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import zmq

from zmqgrad.runtime.clock import MONOTONIC
from zmqgrad.transport.base import Buffer
from zmqgrad.transport.session import Incoming, Outgoing
from zmqgrad.transport.sockets import CONNECT_FAILED, CONNECTED, DISCONNECTED, SocketMonitor, send_all
from zmqgrad.wire.frames import write_session

if TYPE_CHECKING:
    from zmqgrad.transport.sessions import Sessions

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_MS = 3000
"""Timeout of one connection attempt."""

SILENT_MS = 5000
"""How long the kernel of the other host may acknowledge nothing, until a connection counts as broken without
a reset: a firewall or NAT has forgotten it. The session alone would learn this late while it carries a large
message, and never while it carries nothing but acknowledgements."""

NEVER = -1
"""Reconnect interval. By itself libzmq would send what was queued since before what was lost."""

STABLE_SECONDS = 1.0
"""A connection that lasted this long is reopened at once."""

UNSTABLE_SECONDS, MAX_BACKOFF_SECONDS = 0.05, 1.0
"""Others are reopened after the first, which doubles up to the second while attempts fail."""


class SessionSocket:
    """Sends to one incarnation of one peer. ``lock`` guards all attributes; callers must hold it.

    Args:
        endpoint: of the peer.
        target: incarnation of the peer; 0: any.
        make_socket: returns a DEALER that is ready to connect.
        sessions: of the mailbox, which has events and timeouts handled.
    """

    def __init__(
        self,
        endpoint: str,
        target: int,
        lock: threading.RLock,
        make_socket: Callable[[], zmq.Socket[bytes]],
        sessions: Sessions,
    ) -> None:
        self.outgoing: Outgoing[tuple[bytearray, Sequence[Buffer]]] = Outgoing()
        self.target = target
        self.lock = lock
        self.incoming: Incoming | None = None
        """The receiving half, which each message acknowledges."""
        self.peer_acknowledged = 0
        """The highest number that the peer has acknowledged, for :meth:`apply_ack`. Needs no lock."""
        self.reconnects = self.resends = 0
        self._endpoint = endpoint
        self._make_socket = make_socket
        self._sessions = sessions
        self._ack_wanted = False
        self._sent = 0  # the highest number that was sent, by an open connection
        self._socket: zmq.Socket[bytes] | None = None
        self._connected = False  # the handshake has succeeded
        self._ready = False  # and the connection has not broken since
        self._backoff = UNSTABLE_SECONDS
        self._reopen_at = math.inf
        self._open(MONOTONIC.now())
        sessions.sockets[self] = None

    def _open(self, now: float) -> None:
        self._opened_at = now
        self._reopen_at = math.inf
        socket, watched, reader = self._make_socket(), False, self._sessions.reader
        try:
            socket.reconnect_ivl = NEVER
            socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
            socket.setsockopt(zmq.TCP_MAXRT, SILENT_MS)
            self._monitor = SocketMonitor(socket, CONNECTED | DISCONNECTED | CONNECT_FAILED)
            reader.watch(self._monitor.fd, self._read_events)
            watched = True
            socket.connect(self._endpoint)
        except BaseException:
            if watched:
                reader.unwatch(self._monitor.fd)
                self._monitor.close()
            socket.close(linger=0)
            raise
        self._socket = socket

    def send(self, first: bytearray, frames: Sequence[Buffer], now: float) -> None:
        """Sends a message, or keeps it until it can. ``first`` and ``frames`` must not be modified after."""
        size = len(first)
        for frame in frames:
            size += len(frame)
        outgoing = self.outgoing
        if self.peer_acknowledged > outgoing.acknowledged:
            self.apply_ack(now)
        sequence = outgoing.add((first, frames), size, now)
        if outgoing.behind or not self._ready:
            return
        try:
            self._transmit(sequence, first, frames)
        except zmq.Again:
            self._ready = False
        except BaseException:  # the pipe may hold half a message, which nothing must follow
            self._on_broken(now)
            raise

    def _send_pending(self) -> None:
        """Sends what waits for a connection, or for the acknowledgement of the last burst."""
        try:
            for sequence, message in self.outgoing.to_send():
                self._transmit(sequence, *message)
        except zmq.Again:  # the connection broke; the monitor will report it
            self._ready = False

    def apply_ack(self, now: float) -> None:
        """Drops what the peer has acknowledged, and sends what waited for that."""
        if self.outgoing.acknowledge(self.peer_acknowledged, now) and self._ready and self.outgoing.behind:
            self._send_pending()

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
        """Sends an acknowledgement, now or once connected."""
        self._ack_wanted = not self._ready
        if self._ready:
            try:
                self._transmit(0, bytearray(self._sessions.ack), ())
            except zmq.Again:
                self._ready, self._ack_wanted = False, True

    def send_last(self, first: bytearray) -> bool:
        """Sends a message outside of the session, if there is a connection. Nothing is sent after it.

        Returns:
            Whether it was sent.
        """
        if not self._ready or self._socket is None:
            return False
        send_all(self._socket, first, ())
        return True

    def _read_events(self) -> None:
        """Handles the events of the monitor. In the reading thread."""
        with self.lock:
            self.on_events(MONOTONIC.now())
            due = self.next_due()
        self._sessions.alarm.set(due)

    def on_events(self, now: float) -> None:
        """Handles the events of the monitor. Harmless if there are none."""
        for event in self._monitor.read():
            if event.kind == CONNECTED:
                self._ready = self._connected = True
                self._backoff = UNSTABLE_SECONDS
                self.outgoing.reconnect(now)
                self._send_pending()
                if self._ack_wanted:
                    self.send_ack()
            else:
                self._on_broken(now)

    def _on_broken(self, now: float) -> None:
        if self._connected:
            self.reconnects += 1
            logger.info(
                "%s: the connection to %s broke; %d messages are not acknowledged and will be sent again",
                self._sessions.name,
                self._endpoint,
                len(self.outgoing),
            )
        was_stable = self._connected and now - self._opened_at >= STABLE_SECONDS
        self._close_socket()
        if was_stable:
            self._try_to_open(now)
        else:
            self._reopen_at = now + self._backoff
            self._backoff = min(2 * self._backoff, MAX_BACKOFF_SECONDS)

    def _try_to_open(self, now: float) -> None:
        try:
            self._open(now)
        except zmq.ZMQError as e:  # such as too many open files
            logger.warning("%s cannot connect to %s now: %s", self._sessions.name, self._endpoint, e)
            self._reopen_at = now + MAX_BACKOFF_SECONDS

    def on_time(self, now: float) -> None:
        """Reconnects if it is time to, or if acknowledgements are overdue."""
        if self._reopen_at <= now:
            self._try_to_open(now)
            return
        if self.peer_acknowledged > self.outgoing.acknowledged:
            self.apply_ack(now)
        if self._socket is not None and self.outgoing.is_overdue(now):
            logger.info(
                "%s: nothing was acknowledged by %s for long, %d messages will be sent again",
                self._sessions.name,
                self._endpoint,
                len(self.outgoing),
            )
            self._close_socket()
            self._try_to_open(now)

    def next_due(self) -> float:
        """Returns when :meth:`on_time` must be called; infinite for never."""
        if self._socket is None:
            return self._reopen_at  # what was sent before may be overdue, and is sent again then
        return min(self._reopen_at, self.outgoing.due)

    def _close_socket(self, linger: int = 0) -> None:
        self._ready = self._connected = False
        socket, self._socket = self._socket, None
        if socket is not None:
            self._sessions.reader.unwatch(self._monitor.fd)
            self._monitor.close()
            socket.close(linger=linger)

    def is_under_way(self) -> bool:
        """Returns whether a message may be on its way, which another connection could overtake."""
        return max(self.peer_acknowledged, self.outgoing.acknowledged) < self._sent

    def is_flushed(self) -> bool:
        """Returns whether all messages were acknowledged."""
        return max(self.peer_acknowledged, self.outgoing.acknowledged) + 1 >= self.outgoing.next_sequence

    def close(self, linger: int) -> None:
        """Stops sending; what libzmq has queued may take ``linger`` ms to leave. Idempotent."""
        self._sessions.sockets.pop(self, None)
        self._reopen_at = math.inf
        self._close_socket(linger)
