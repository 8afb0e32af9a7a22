"""Outgoing connections: a DEALER to each peer, and on one host the fast path beside it.

Within a host the DEALER connects by ipc, which does not break while both processes run. Over tcp it belongs
to a session (:mod:`~zmqgrad.transport.session`). Small messages to peers of this host use
:mod:`zmqgrad.transport.local` instead: they go to the peer's receiver, or to the reply channel at which one
of its threads waits.

Threads and locks: any thread sends, under the lock of the connection (a ZeroMQ socket may move between
threads across a lock). High-water marks are zero, so a send never blocks inside libzmq.
The pool's lock guards its tables; the two are never held together.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial

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
from zmqgrad.transport.sockets import send_all, set_up, use_io_thread

logger = logging.getLogger(__name__)

Connected = Callable[[int, str, Sequence[str]], None]
"""Called with a new connection: the peer, the endpoint in use, and all endpoints of the peer."""


class Connection:
    """The connection to one peer. ``lock`` guards all but ``local``, which has a lock of its own."""

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
        """The DEALER by ipc."""
        self.session: SessionSocket | None = None
        """The session by tcp."""
        self.epoch = 0
        """How many sessions with the peer were abandoned."""
        self.local: local.LocalConnection | None = None
        self.local_retry = False
        """Whether the listener was only busy, so that the fast path should be tried again."""
        self.endpoint = ""
        self.incarnation = 0
        self.messages = 0
        self.header_bytes = 0
        self.frame_bytes = 0

    @property
    def is_open(self) -> bool:
        """Whether there is a DEALER or a session."""
        return self.socket is not None or self.session is not None

    def count(
        self, first: bytearray, frames: Sequence[Buffer], parts: Sequence[tuple[bytearray, memoryview]]
    ) -> None:
        """Counts a message that is sent. Called with the lock held."""
        self.messages += 1
        self.header_bytes += len(first)
        if frames or parts:
            self.frame_bytes += frames_size(frames) + sum(len(data) for _, data in parts)

    def close_local(self) -> None:
        """Closes the fast path; from now on the DEALER carries everything."""
        connection, self.local = self.local, None
        if connection is not None:
            self.messages += connection.sent
            self.header_bytes += connection.sent_bytes
            connection.close()


class ConnectionPool:
    """The connections of one mailbox to its peers, opened as they are needed.

    Args:
        name: of the worker, used in errors and names of threads.
        keys: the job's, required of peers by tcp; None: they are not authenticated.
        job: identifies the job to the fast path.
        fast: whether to use the fast path where the system supports it.
        sessions: of the mailbox.
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
        self.resolve: Resolver = _raise_unknown_peer
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
        """Returns the connection to a peer; None if nothing was ever sent to it."""
        self.same_host: set[int] = set()
        """The peers on this host that the fast path may reach."""
        self._channels: dict[tuple[int, int], Connection] = {}  # by peer and number of the reply channel

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def to(self, peer: int) -> Connection:
        """Returns the connection to ``peer``, which may not be open yet."""
        return self.known(peer) or self._new(peer)

    def _new(self, peer: int) -> Connection:
        with self._lock:
            return self._peers.setdefault(peer, Connection())

    def open(self, peer: int, connection: Connection) -> None:
        """Connects unless that was done before; afterwards ``connection.endpoint`` is known.

        Raises:
            ClosedError, UnknownPeerError, TransportError: if it cannot connect.
        """
        with connection.lock:
            if not connection.is_open:
                self._connect(peer, connection)

    def acknowledge(self, peer: int) -> None:
        """Sends an acknowledgement to ``peer``, unless it was forgotten.

        Raises:
            ClosedError, UnknownPeerError, TransportError: if it cannot connect.
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
        """Queues a message.

        Args:
            small: whether the fast path may carry it.
            parts: chunks to send before it, each with its own header.
            awaited: whether a thread waits for it or for its reply. Otherwise it may be one of many.
        """
        if small and connection.endpoint and self._send_fast(connection, first, awaited):
            return
        with connection.lock:
            if connection.session is None and connection.socket is None:
                self._connect(peer, connection)
            connection.count(first, frames, parts)
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
        """Sends by the fast path. Returns False if that is not possible, now or ever."""
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
        """Sends to reply channel ``number`` of ``peer``. Returns False if that is not possible."""
        connection = self._channels.get((peer, number)) or self._open_channel(peer, number)
        return connection is not None and self._send_fast(connection, packet, True)

    def _open_channel(self, peer: int, number: int) -> Connection | None:
        main = self._peers.get(peer)
        # Opening the connection to the ROUTER starts the heartbeats, so it must exist before any other.
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
                    peer,
                    endpoint,
                    known.incarnation,
                    connection.epoch,
                    connection.lock,
                    partial(self._secure_dealer, "[" in endpoint),
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

    def _secure_dealer(self, ipv6: bool) -> zmq.Socket[bytes]:
        socket = self._dealer()
        socket.ipv6 = ipv6
        if self._keys is not None:
            secure_client(socket, self._keys)
        return socket

    def _connect_local(self, connection: Connection, endpoint: str = "") -> local.LocalConnection | None:
        """Opens the fast path, which the listener must still accept. Returns None if that fails."""
        connection.local_retry = False
        try:
            opened = local.connect(
                endpoint or connection.endpoint, self._job, connection.incarnation, self._writer.add
            )
        except BlockingIOError:
            connection.local_retry = True  # too many connections wait to be accepted
            return None
        except OSError as e:
            logger.debug("%s: no fast path to %s: %s", self._name, connection.endpoint, e)
            return None
        connection.local = opened
        return opened

    def forget(self, peer: int) -> None:
        """Drops the connection to ``peer``; what was queued for it is lost."""
        # The Connection stays in the table: a thread that is about to send may open a socket in it, which
        # close() must find.
        for connection in self.all(peer):
            _shut(connection, linger=0)
        self._sessions.drop(peer)
        with self._lock:  # its channels may have another address then
            for key in [key for key in self._channels if key[0] == peer]:
                del self._channels[key]

    def all(self, peer: int | None = None) -> list[Connection]:
        """Returns all connections, including those to reply channels; with ``peer``, only its own."""
        with self._lock:
            own = [c for number, c in self._peers.items() if peer is None or number == peer]
            channels = [c for (number, _), c in self._channels.items() if peer is None or number == peer]
        return own + channels

    def counts(self) -> tuple[int, int, int]:
        """Returns the messages, bytes of headers, and bytes of frames sent so far."""
        messages = header_bytes = frame_bytes = 0
        for connection in self.all():
            fast = connection.local
            messages += connection.messages + (0 if fast is None else fast.sent)
            header_bytes += connection.header_bytes + (0 if fast is None else fast.sent_bytes)
            frame_bytes += connection.frame_bytes
        return messages, header_bytes, frame_bytes

    def peers_connected(self) -> int:
        """Returns to how many peers a connection is open."""
        return sum(connection.is_open for connection in list(self._peers.values()))

    def close(self) -> bool:
        """Refuses new connections from now on. Returns False if it did already."""
        with self._lock:
            before, self._closed = self._closed, True
            return not before

    def shut(self, linger: int) -> None:
        """Closes all sockets; unsent messages may take ``linger`` ms to leave."""
        self._writer.close()
        for connection in self.all():
            _shut(connection, linger)

    def join(self, deadline: Deadline) -> list[str]:
        """Waits for threads. Returns the names of those that have not ended by ``deadline``."""
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


def _raise_unknown_peer(peer: int) -> PeerAddress:
    raise UnknownPeerError(f"no address is known for worker {peer}: the mailbox was not started")


def set_up_unbounded(socket: zmq.Socket[bytes]) -> None:
    """Sets the options of a mailbox's sockets. Credit bounds what is queued, not libzmq."""
    set_up(socket)
    socket.sndhwm = 0
    socket.rcvhwm = 0
    use_io_thread(socket, bulk=False)


def best_endpoint(endpoints: Sequence[str]) -> str:
    """Returns the first endpoint that can be reached from here.

    An ipc address is probed by connecting: equal boot ids do not prove a common network namespace.

    Raises:
        UnknownPeerError: if no endpoint can be reached.
        TransportError: if this process cannot open a socket.
    """
    for endpoint in endpoints:
        if endpoint.startswith(SCHEME):
            continue
        try:
            if not endpoint.startswith("ipc://") or local.can_connect(endpoint):
                return endpoint
        except OSError as e:
            raise TransportError(f"cannot open a socket to {endpoint}: {e.strerror}") from e
    raise UnknownPeerError(f"none of the addresses {list(endpoints)} can be reached from this host")
