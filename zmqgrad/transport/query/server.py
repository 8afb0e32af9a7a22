"""Receives queries and sends the replies: the store's server, one reader of a ROUTER and a local listener.

Unlike a mailbox, it serves many light clients that it does not know in advance. Clients of its own host and
user may use the fast path (:mod:`~zmqgrad.transport.local`), whose address the reply to a ping announces. A
query is identified by client and number, and may arrive more than once and by either path: see
:mod:`~zmqgrad.transport.query.channel`.

Malformed messages cost a counter and a log line (docs/guarantees.md, P5).
"""

from __future__ import annotations

import errno
import logging
import math
import secrets
import threading
from contextlib import ExitStack
from functools import partial
from typing import Protocol

import zmq

from zmqgrad.errors import ProtocolError
from zmqgrad.runtime.clock import MONOTONIC, Clock, monotonic_ns
from zmqgrad.transport import local
from zmqgrad.transport import tap as tapping
from zmqgrad.transport.local.connection import LARGE, MAX_PACKET_BYTES, LocalConnection
from zmqgrad.transport.local.listener import LocalListener
from zmqgrad.transport.query import spin_budget
from zmqgrad.transport.query.admission import Admission
from zmqgrad.transport.query.dealer import LocalAddress
from zmqgrad.transport.query.sockets import set_up_query_socket
from zmqgrad.transport.reader import Reader
from zmqgrad.transport.security import Keys, ZapAuthenticator, local_key, secure_server, store_endpoint
from zmqgrad.transport.sockets import (
    ACCEPTED,
    DISCONNECTED,
    HANDSHAKE_FAILED,
    NOBLOCK_MORE,
    connection_fd,
    joined,
    send_split,
)
from zmqgrad.transport.tap import Identity, Tracer
from zmqgrad.transport.tcp_listener import TcpListener
from zmqgrad.wire.codec import COPY_LIMIT_BYTES, decode_query, encode
from zmqgrad.wire.frames import MAX_HEADER_BYTES, Envelope, read_envelope
from zmqgrad.wire.messages import Message, Refusal, StorePing, StorePong, StoreRefused

logger = logging.getLogger(__name__)

MAX_CLIENTS = 16_384
"""Default limit of the number of clients; a store counts once for each thread that uses it."""

MAX_UNREAD_REPLIES = 16
"""Replies that may wait for one client. It has a single query at a time, and a ping."""

LINGER_MS = 500
"""How long the last replies may take to leave when the server stops."""

SERVER_DESCRIPTORS = 18
"""That must be free where a server is opened."""

Route = bytes | LocalConnection
"""Where a reply goes: the ROUTER's routing id of a client, or its connection on the fast path."""


class Service(Protocol):
    """Executes the queries of a server. Called in the server's thread only."""

    def handle(self, route: Route, client_id: int, request_id: int, query: Message) -> None:
        """Replies to a query by :meth:`QueryServer.reply`, now or in a later call."""

    def settle(self) -> None:
        """Called after a batch of queries, before the server waits for more."""

    def do_due(self, now: float) -> float:
        """Does what was due by ``now``. Returns when something is due next; infinite for never."""

    def stopping(self) -> None:
        """Called when the server stops, while it can still reply."""

    def stopped(self) -> None:
        """Called at the end, even after an error: closes sockets made with the server's context."""


class QueryServer:
    """Receives queries at ``address`` (``tcp://127.0.0.1:*`` lets the system choose the port).

    Args:
        keys: of the store; only clients that have them are served. None: all are.
        listen_fd: file descriptor of a socket that is already bound to the port of ``address``.
        max_clients: how many clients are served.
        fast_path: whether clients of this host may use it, if the system supports it.
        undo: stops the server; told by itself, as Ctrl-C may come before its maker knows it.

    Raises:
        AddressInUseError: if another socket listens there.
        ConfigurationError: if other hosts could connect, and nothing protects the traffic.
        TransportError: if it cannot be bound.
    """

    def __init__(
        self,
        name: str,
        address: str,
        *,
        keys: Keys | None = None,
        listen_fd: int | None = None,
        max_clients: int = MAX_CLIENTS,
        fast_path: bool = True,
        clock: Clock = MONOTONIC,
        undo: ExitStack | None = None,
    ) -> None:
        self.name = name
        self.incarnation = secrets.randbits(63)
        self.requests = 0
        """How many queries were received."""
        self.undeliverable = 0
        """How many replies were dropped, as the client had ended or did not read them."""
        self.refuses_newcomers = False
        """Set to leave the pings of new clients unanswered, so none begins. From any thread."""
        self._clock = clock
        self._lock = threading.Lock()  # guards _stopped and _serving
        self._stopped = False
        self._serving = False
        self._ending = False
        self._drained_by = -math.inf  # when the server ends, though clients are connected
        self._due = math.inf
        self._service: Service | None = None
        self.tracer: Tracer | None = None
        self._admission = Admission(max_clients)
        local.check_can_open(SERVER_DESCRIPTORS, f"{name} cannot open its sockets")
        self.reader = Reader(name, self._close, spin_budget(), clock)
        """Reads in the server's thread."""
        self.endpoint = address  # and with its port, once it is bound
        secured = keys is not None and keys.from_secret
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(1)
        try:
            if undo is not None:
                undo.callback(self.stop)
            self._router = self.context.socket(zmq.ROUTER)
            set_up_query_socket(self._router)
            self._router.router_mandatory = True
            self._router.sndhwm = self._router.rcvhwm = MAX_UNREAD_REPLIES
            if keys is not None:
                ZapAuthenticator(self.context, keys, self.reader)
                secure_server(self._router, keys)
            self._listener = TcpListener(
                self._router,
                address,
                self.reader,
                secured=secured,
                listen_fd=listen_fd,
                on_event=self._on_connection_event,
                events=HANDSHAKE_FAILED,
            )
            self.endpoint, self.port = self._listener.endpoint, self._listener.port
            self._local: LocalListener | None = None
            if fast_path and local.supported():
                self._local = self._open_local(max_clients, keys, self.endpoint)
        except BaseException:
            self.reader.close()
            raise
        self.local = None if self._local is None else LocalAddress(self.incarnation, self._local.endpoint)
        """Where clients on this host connect."""
        self._backlogged = set() if self._local is None else self._local.backlogged
        self._receive_by_router = self._router.recv_multipart
        self.reader.read_router(self._router, self._from_router)
        tapping.register(self)

    def identity(self) -> Identity:
        """As :class:`~zmqgrad.transport.tap.Traced`."""
        return Identity(tapping.STORE_SERVER, self.name, 0, self.incarnation, address=self.endpoint)

    def _open_local(self, max_clients: int, keys: Keys | None, address: str) -> LocalListener | None:
        known = store_endpoint(keys, address)
        for endpoint in [known] * bool(known) + [local.abstract_endpoint("store")]:
            try:
                return self._listen(endpoint, max_clients, keys)
            except OSError as e:
                level = logging.DEBUG if endpoint == known else logging.WARNING
                logger.log(level, "%s has no fast path at %s: %s", self.name, endpoint, e)
        return None

    def _listen(self, endpoint: str, max_clients: int, keys: Keys | None) -> LocalListener:
        return self.reader.listen(
            lambda poll: LocalListener(
                endpoint,
                poll,
                local_key(keys, b""),
                self.incarnation,
                self.reader.call_later,
                max_connections=max_clients,
                bursts=False,
                accepts_newcomers=lambda: not (self.refuses_newcomers or self._ending),
            ),
            self._receive,
        )

    @property
    def malformed(self) -> int:
        """How many messages were malformed, and how many handshakes failed."""
        return self.reader.malformed

    @property
    def clients(self) -> int:
        """How many clients are connected. A client that changes to the fast path counts once."""
        return self._admission.clients

    @property
    def pending(self) -> int:
        """How many tcp connections have not sent a query yet."""
        return self._listener.silent

    # ---- the thread -------------------------------------------------------------------------------------

    def serve(self, service: Service) -> None:
        """Passes queries to ``service`` until :meth:`stop`; then closes all sockets. Blocks."""
        with self._lock:
            if self._serving or self._stopped:
                return
            self._serving = True
        self._service = service
        self._handle_query = service.handle
        self.reader.on_idle = service.settle
        try:
            self.reader.run()
        finally:
            self.reader.shut()  # after an error of the service

    def wake_by(self, moment: float) -> None:
        """Makes the server call the service's ``do_due`` no later than ``moment``. Server's thread only."""
        if moment < self._due:
            self._due = moment
            self.reader.call_at(moment, partial(self._do_due, moment))

    def _do_due(self, moment: float) -> None:
        if moment == self._due:  # else it was called earlier
            assert self._service is not None
            self._due = math.inf
            self.wake_by(self._service.do_due(self._clock.now()))

    def stop(self, drain_seconds: float = 0.0) -> None:
        """Makes :meth:`serve` return. Safe from any thread; idempotent.

        Args:
            drain_seconds: how long it still serves the clients that are connected, until they disconnect.
        """
        with self._lock:
            if not self._stopped:
                self._drained_by = self._clock.now() + drain_seconds
            self._stopped = True  # and all else again: Ctrl-C may have come before it
            if self._serving:
                self.reader.post(self._end)
            else:
                self.reader.close()

    def _end(self) -> None:
        self._ending = True
        self.reader.on_idle = self._end_if_drained
        self.reader.call_at(self._drained_by, _nothing)  # then it is idle again, and looks

    def _end_if_drained(self) -> None:
        assert self._service is not None
        self._service.settle()
        if not self.clients or self._clock.now() >= self._drained_by:
            self._service.stopping()
            self.reader.close()

    def _close(self) -> None:
        """Closes all sockets but those of the listener, and what an interrupt has left of that."""
        tapping.unregister(self)
        if self._service is not None:
            self._service.stopped()
        self.context.destroy(LINGER_MS)  # with the ROUTER; waits until the last replies have left, or so long

    # ---- receiving --------------------------------------------------------------------------------------

    def _from_router(self) -> None:
        route, *frames = self._receive_by_router(copy=False)
        if not frames:
            self._on_malformed(route.bytes, b"", route, ProtocolError("a query of no frame"))
            return
        frame = frames[-1]
        if len(frames) == 1:
            data = frame.bytes if len(frame) <= COPY_LIMIT_BYTES else frame.buffer
        else:
            data = joined(frames)
        self._receive(data, route.bytes, frame)

    def _receive(self, data: bytes | memoryview, route: Route, frame: zmq.Frame | None = None) -> None:
        """Handles a message that arrived by either path; ``frame`` is None by the fast path."""
        try:
            client_id, request_id, query = decode_query(data)
        except ProtocolError as e:
            if data == LARGE and isinstance(route, LocalConnection):
                self._receive_large(route)
            elif data or frame is not None:
                self._on_malformed(route, data, frame, e)
            else:  # the end of a connection of the fast path
                self._admission.remove_local(route)
            return
        if self.tracer is not None:
            envelope = Envelope(query.TYPE, 0, client_id, request_id, _route_key(route))
            self.tracer.tap(False, client_id, envelope, query, len(data), monotonic_ns())
        if type(query) is StorePing:
            self._on_ping(route, frame, client_id, request_id, query)
        elif frame is not None and self._is_refused(frame):
            self._refuse_surplus(route, request_id)
        else:
            self.requests += 1
            try:
                self._handle_query(route, client_id, request_id, query)
            except Exception:
                logger.exception("%s: handling %s failed", self.name, type(query).__name__)

    def _receive_large(self, route: LocalConnection) -> None:
        try:
            data = route.take_large(MAX_HEADER_BYTES)
        except OSError as e:
            self._count_malformed("a process of this host", e)
            route.hang_up()
            return
        if data != LARGE:
            self._receive(data, route)

    def _on_malformed(
        self, route: Route, data: bytes | memoryview, frame: zmq.Frame | None, error: ProtocolError
    ) -> None:
        """Counts and logs a malformed message. Replies if at least its envelope can be read."""
        self._count_malformed("a process of this host" if frame is None else _peer_address(frame), error)
        try:
            request_id = read_envelope(data).message_id
        except ProtocolError:
            return  # not a client of ours
        self.reply(route, request_id, StoreRefused(Refusal.INVALID, str(error)))

    def _count_malformed(self, address: str, error: object) -> None:
        self.reader.count_malformed(address, f"query from {address} at {self.endpoint} ({error})")

    def _on_connection_event(self, kind: int, value: int) -> None:
        if kind == ACCEPTED:
            self._admission.on_accepted(value)
        elif kind == DISCONNECTED:
            self._admission.on_disconnected(value)
        elif kind & HANDSHAKE_FAILED:
            self._count_malformed(
                "tcp", "a handshake failed: the client ended, is no ZeroMQ, or has another secret"
            )

    def _on_ping(
        self, route: Route, frame: zmq.Frame | None, client_id: int, request_id: int, query: StorePing
    ) -> None:
        """Replies to a client that begins, or that tests whether its connection still works."""
        fd = -1 if frame is None else connection_fd(frame)
        if frame is not None:
            self._listener.hear(fd)
        if (self.refuses_newcomers or self._ending) and not self._admission.knows(client_id):
            return  # it is no client, for whom an ending server waits: it waits for the next server here
        if frame is None:
            self._admission.add_local(route, client_id)
        elif not self._admission.admit_tcp(client_id, fd):
            self._refuse_surplus(route, request_id)
            return
        endpoint = "" if self.local is None else self.local.endpoint
        self.reply(route, request_id, StorePong(query.nonce, endpoint))

    def _is_refused(self, frame: zmq.Frame) -> bool:
        return bool(self._admission.refused) and connection_fd(frame) in self._admission.refused

    def _refuse_surplus(self, route: Route, request_id: int) -> None:
        text = f"it serves {self._admission.limit} connections already, which is its limit"
        self.reply(route, request_id, StoreRefused(Refusal.LIMIT, text))

    # ---- replying ---------------------------------------------------------------------------------------

    def reply(self, route: Route, request_id: int, message: Message) -> bool:
        """Replies to query ``request_id``. Server's thread only.

        Returns:
            False if the reply is known not to arrive.
        """
        try:
            data = encode(message, 0, self.incarnation, request_id)
        except ProtocolError as e:  # such as all keys of a huge store; nobody may wait for it, or end with it
            message = StoreRefused(Refusal.LIMIT, str(e))
            data = encode(message, 0, self.incarnation, request_id)
        if self.tracer is not None:
            envelope = (message.TYPE, 0, self.incarnation, request_id, _route_key(route), 0, 0, 0)
            self.tracer.tap(True, 0, envelope, message, len(data), monotonic_ns())
        try:
            if isinstance(route, bytes):
                self.reader.at_router = True
                self._router.send(route, NOBLOCK_MORE)
                send_split(self._router, data)
            else:
                if len(data) <= MAX_PACKET_BYTES:
                    route.send(data)
                else:
                    route.send_large(data)
                if self._backlogged and route.backlog() > MAX_UNREAD_REPLIES:
                    raise OSError(errno.ENOBUFS, "a client that does not read its replies")
            return True
        except (zmq.ZMQError, OSError) as e:
            logger.debug("%s: a reply is dropped: %s", self.name, e)
            self.undeliverable += 1
            if isinstance(route, LocalConnection):
                route.hang_up()
            return False


def _nothing() -> None:
    """Only wakes the reader."""


def _route_key(route: Route) -> int:
    """Identifies a connection in a trace; a reply goes to that of its query."""
    return hash(route) & 0x7FFF_FFFF_FFFF_FFFF


def _peer_address(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:  # libzmq knows none of a peer that speaks ZMTP 1
        return "tcp"
