"""Outgoing connections: to each peer a DEALER, and beside it, on one host, the fast path past libzmq.

Within a host the DEALER connects by ipc, which does not break while both ends live. Over tcp it belongs to a
session (:mod:`~zmqgrad.transport.session`).

A connection is written by whichever thread has something to send, under its lock (a ZeroMQ socket may move
between threads across a lock). High-water marks are zero: a send never blocks inside libzmq (DESIGN section
4). Small messages to peers of this host go by :mod:`zmqgrad.transport.local`: to their receiver, or to the
reply channel at which a thread of theirs waits.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence

import zmq

from zmqgrad.errors import ClosedError, TransportError, UnknownPeerError
from zmqgrad.runtime.clock import MONOTONIC, Deadline
from zmqgrad.transport import local
from zmqgrad.transport.base import Buffer, PeerAddress, Resolver
from zmqgrad.transport.data_plane import frames_size
from zmqgrad.transport.heartbeat import SCHEME
from zmqgrad.transport.local.channels import MAX_CHANNELS, channel_endpoint
from zmqgrad.transport.local.writer import BacklogWriter
from zmqgrad.transport.security import Keys, secure_client
from zmqgrad.transport.session_socket import SessionSocket
from zmqgrad.transport.sessions import Sessions
from zmqgrad.transport.sockets import send_all, set_up

logger = logging.getLogger(__name__)

Connected = Callable[[int, str, Sequence[str]], None]
"""Told of a peer that is sent to from now on: the endpoint, and all its endpoints."""


class Connection:
    """The way out to one peer. ``lock`` guards everything but ``local``, which has a lock of its own."""

    __slots__ = (
        "endpoint",
        "epoch",
        "frame_bytes",
        "header_bytes",
        "incarnation",
        "local",
        "local_retry",
        "lock",
        "messages",
        "session",
        "socket",
    )

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.socket: zmq.Socket[bytes] | None = None
        """By ipc."""
        self.session: SessionSocket | None = None
        """By tcp."""
        self.epoch = 0
        """How many sessions with the peer were given up."""
        self.local: local.LocalConnection | None = None
        self.local_retry = False
        """Is it worth trying again to connect by the fast path?"""
        self.endpoint = ""
        self.incarnation = 0
        self.messages = 0
        self.header_bytes = 0
        self.frame_bytes = 0

    @property
    def is_open(self) -> bool:
        """Is it known where the peer is?"""
        return self.socket is not None or self.session is not None

    def close_local(self) -> None:
        """From now on everything goes by the DEALER."""
        connection, self.local = self.local, None
        if connection is not None:
            self.messages += connection.sent
            self.header_bytes += connection.sent_bytes
            connection.close()


class ConnectionPool:
    """The connections of one mailbox to its peers, opened as they are needed.

    Args:
        name: of the worker, for errors and threads.
        keys: by tcp, talk only to those who have them.
        job: what the fast path asks of a peer to be its own.
        fast: use the fast path where it can be.
        sessions: those of the mailbox.
        connected: called for each new connection, with its lock held.
    """

    def __init__(
        self,
        name: str,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: Keys | None,
        job: bytes,
        fast: bool,
        sessions: Sessions,
        connected: Connected,
    ) -> None:
        self.resolve: Resolver = _knows_nobody
        self._name = name
        self._context = context
        self._keys = keys
        self._job = job
        self._fast = fast
        self._sessions = sessions
        self._connected = connected
        self._pid = os.getpid()
        self._writer = BacklogWriter(name)
        self._closed = False
        self._lock = threading.Lock()  # guards all below, and _closed
        self._peers: dict[int, Connection] = {}
        self.known: Callable[[int], Connection | None] = self._peers.get
        """The connection to a peer, if it was ever sent to."""
        self.same_host: set[int] = set()
        """The peers that are reached within this host, by the fast path too."""
        self._channels: dict[tuple[int, int], Connection] = {}  # by peer and number of the reply channel

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def closed(self) -> bool:
        """Are there to be no new ones?"""
        return self._closed

    def to(self, peer: int) -> Connection:
        """The connection to ``peer``, which may have yet to be opened."""
        return self.known(peer) or self._new(peer)

    def _new(self, peer: int) -> Connection:
        with self._lock:
            return self._peers.setdefault(peer, Connection())

    def open(self, peer: int, connection: Connection) -> None:
        """Connect, if that has not been done: then it is known whether the peer is on this host.

        Raises:
            ClosedError, UnknownPeerError, TransportError: if that cannot be.
        """
        with connection.lock:
            if not connection.is_open:
                self._connect(peer, connection)

    def acknowledge(self, peer: int) -> None:
        """Send an acknowledgement to ``peer``, unless it was forgotten.

        Raises:
            ClosedError, UnknownPeerError, TransportError: if that cannot be.
        """
        connection = self.to(peer)
        with connection.lock:
            if not connection.is_open and not connection.epoch:
                self._connect(peer, connection)
            if connection.session is not None:
                connection.session.send_ack()

    def send(
        self,
        peer: int,
        connection: Connection,
        first: bytearray,
        frames: Sequence[Buffer],
        small: bool,
        parts: Sequence[tuple[bytearray, memoryview]],
        awaited: bool,
    ) -> None:
        """Queue a message; ``parts`` are chunks, each with its own header, that go before it.

        Args:
            small: it may go by the fast path.
            awaited: its sender goes on to wait, or somebody waits for it. Otherwise it may be one of many.
        """
        if small and connection.endpoint and self._send_fast(connection, first, awaited):
            return
        with connection.lock:
            if connection.session is None and connection.socket is None:
                self._connect(peer, connection)
            connection.messages += 1
            connection.header_bytes += len(first)
            if frames or parts:
                connection.frame_bytes += frames_size(frames) + sum(len(data) for _, data in parts)
            session = connection.session
            if session is not None:
                now = MONOTONIC.now()
                for head, data in parts:
                    session.send(head, (data,), now)
                session.send(first, frames, now)
                if session.outgoing.due < self._sessions.armed_at:
                    self._sessions.arm(session.outgoing.due)
                return
            socket = connection.socket
            assert socket is not None
            try:
                for head, data in parts:
                    send_all(socket, head, (data,))
                send_all(socket, first, frames)
            except BaseException:
                # Half a message may be in the pipe: nothing must follow it.
                connection.socket = None
                socket.close(linger=0)
                raise

    def _send_fast(self, connection: Connection, packet: bytearray, awaited: bool) -> bool:
        """Send by the fast path. False if that cannot be now, or ever."""
        fast = connection.local
        if fast is None and connection.local_retry:
            fast = self._connect_local(connection)
        if fast is None:
            return False
        try:
            if not fast.is_ready():
                return False
            fast.send(packet, keep_gil=not awaited)
        except OSError as e:
            logger.debug("%s: the fast path to %s is closed: %s", self._name, connection.endpoint, e)
            with connection.lock:
                if connection.local is fast:
                    connection.close_local()
            return False
        return True

    def send_to_channel(self, peer: int, number: int, packet: bytearray) -> bool:
        """Send to reply channel ``number`` of ``peer``. False if that cannot be now, or ever."""
        connection = self._channels.get((peer, number)) or self._open_channel(peer, number)
        return connection is not None and self._send_fast(connection, packet, True)

    def _open_channel(self, peer: int, number: int) -> Connection | None:
        main = self._peers.get(peer)
        # The connection to the ROUTER is the one that heartbeats watch, so it must exist before any other.
        if number > MAX_CHANNELS or main is None or not main.is_open or peer not in self.same_host:
            return None
        with self._lock:
            if self._closed:
                return None
            connection = self._channels.get((peer, number))
            if connection is None:
                connection = self._channels[peer, number] = Connection()
                connection.endpoint = channel_endpoint(main.endpoint, number)
                connection.incarnation = main.incarnation
                self._connect_local(connection)
            return connection

    def _connect(self, peer: int, connection: Connection) -> None:
        if self._closed:
            raise ClosedError(f"the mailbox of {self._name} is closed")
        if os.getpid() != self._pid:
            raise ClosedError(
                f"the mailbox of {self._name} belongs to process {self._pid}; it cannot be used in a "
                f"fork of it: start processes by spawn or forkserver, or call init_rpc in the child"
            )
        known = self.resolve(peer)
        endpoint = best_endpoint(known.endpoints)
        try:
            if endpoint.startswith("tcp:"):
                connection.session = self._sessions.open(
                    peer, endpoint, known.incarnation, connection.epoch, connection.lock, self._secure_dealer
                )
            else:
                connection.socket = self._dealer()
                connection.socket.connect(endpoint)
        except zmq.ZMQError as e:
            if connection.socket is not None:
                connection.socket.close(linger=0)
                connection.socket = None
            raise TransportError(f"cannot connect to worker {peer} at {endpoint}: {e}") from e
        connection.endpoint, connection.incarnation = endpoint, known.incarnation
        fast = self._fast and endpoint.startswith("ipc:")
        (self.same_host.add if fast else self.same_host.discard)(peer)
        self._connected(peer, endpoint, known.endpoints)
        if fast:
            self._connect_local(connection, channel_endpoint(endpoint))
        logger.debug("%s sends to worker %d at %s", self._name, peer, endpoint)

    def _dealer(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        set_up_unbounded(socket)
        return socket

    def _secure_dealer(self) -> zmq.Socket[bytes]:
        socket = self._dealer()
        if self._keys is not None:
            secure_client(socket, self._keys)
        return socket

    def _connect_local(self, connection: Connection, endpoint: str = "") -> local.LocalConnection | None:
        """Connect by the fast path; the listener has still to accept that. None if that cannot be now."""
        connection.local_retry = False
        try:
            opened = local.connect(
                endpoint or connection.endpoint, self._job, connection.incarnation, self._writer.add
            )
        except BlockingIOError:
            connection.local_retry = True  # too many wait to be accepted there
            return None
        except OSError as e:
            logger.debug("%s: no fast path to %s: %s", self._name, connection.endpoint, e)
            return None
        connection.local = opened
        return opened

    def forget(self, peer: int) -> None:
        """Drop the connection to ``peer``; what was queued for it is lost."""
        # Its place stays: a thread that is about to send by it must find this one, or nobody would ever
        # close the socket that it opens.
        for connection in self.all(peer):
            _shut(connection, linger=0)
        self._sessions.drop(peer)
        with self._lock:  # its channels are found anew, where it then is
            for key in [key for key in self._channels if key[0] == peer]:
                del self._channels[key]

    def all(self, peer: int | None = None) -> list[Connection]:
        """All connections, those to reply channels as well; or those to ``peer``."""
        with self._lock:
            own = [c for number, c in self._peers.items() if peer is None or number == peer]
            channels = [c for (number, _), c in self._channels.items() if peer is None or number == peer]
        return own + channels

    def counts(self) -> tuple[int, int, int]:
        """Messages, bytes of headers, and bytes of frames sent so far."""
        messages = header_bytes = frame_bytes = 0
        for connection in self.all():
            fast = connection.local
            messages += connection.messages + (0 if fast is None else fast.sent)
            header_bytes += connection.header_bytes + (0 if fast is None else fast.sent_bytes)
            frame_bytes += connection.frame_bytes
        return messages, header_bytes, frame_bytes

    def peers_connected(self) -> int:
        """To how many peers a connection is open."""
        return sum(connection.is_open for connection in list(self._peers.values()))

    def close(self) -> bool:
        """No new ones from now on. False if that was so already."""
        with self._lock:
            before, self._closed = self._closed, True
            return not before

    def shut(self, linger: int) -> None:
        """Close all sockets; ``linger`` is how many ms unsent messages may take to leave."""
        self._writer.close()
        for connection in self.all():
            _shut(connection, linger)

    def join(self, deadline: Deadline) -> list[str]:
        """Wait for threads; names those that have not ended by ``deadline``."""
        return self._writer.join(deadline)


def _shut(connection: Connection, linger: int) -> None:
    with connection.lock:
        connection.local_retry = False
        connection.close_local()
        if connection.socket is not None:
            connection.socket.close(linger=linger)
            connection.socket = None
        if connection.session is not None:
            connection.session.close(linger)
            connection.session = None
        connection.epoch += 1


def _knows_nobody(peer: int) -> PeerAddress:
    raise UnknownPeerError(f"no address is known for worker {peer}: the mailbox was not started")


def set_up_unbounded(socket: zmq.Socket[bytes]) -> None:
    """Sets the options of a mailbox's sockets. Credit bounds what is queued, not libzmq."""
    set_up(socket)
    socket.sndhwm = 0
    socket.rcvhwm = 0


def best_endpoint(endpoints: Sequence[str]) -> str:
    """The first endpoint that can be reached from here.

    An ipc address is tried for real: boot ids are equal across containers that share nothing.

    Raises:
        UnknownPeerError: if there is none.
    """
    for endpoint in endpoints:
        if endpoint.startswith(SCHEME):
            continue
        if not endpoint.startswith("ipc://") or local.accepts_us(endpoint):
            return endpoint
    raise UnknownPeerError(f"none of the addresses {list(endpoints)} can be reached from this host")
