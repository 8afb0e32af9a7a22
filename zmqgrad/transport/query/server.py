"""Receives queries and sends the replies: the store's server, one thread over a ROUTER and a local listener.

Unlike a mailbox, it serves many light clients that it does not know in advance. Clients of its own host and
user may use the fast path (:mod:`~zmqgrad.transport.local`), whose address the reply to a ping announces. A
query is identified by client and number, and may arrive more than once and by either path: see
:mod:`~zmqgrad.transport.query.channel`.

Malformed messages cost a counter and a log line (docs/guarantees.md, P5).
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
from collections.abc import Callable
from typing import Protocol

import zmq

from zmqgrad.errors import ProtocolError
from zmqgrad.runtime.clock import MONOTONIC, Clock, monotonic_ns
from zmqgrad.runtime.polling import MAX_SECONDS, READ, SPENT, WRITE, Poller, Wakeup
from zmqgrad.runtime.spinning import Spinner
from zmqgrad.transport import local
from zmqgrad.transport import tap as tapping
from zmqgrad.transport.local.connection import MAX_PACKET_BYTES, LocalConnection
from zmqgrad.transport.local.listener import LocalListener
from zmqgrad.transport.query import LOCAL_JOB, SPIN_RECENCY_SECONDS, spin_budget
from zmqgrad.transport.query.admission import Admission
from zmqgrad.transport.query.router import MAX_UNREAD_REPLIES, RouterSocket
from zmqgrad.transport.security import Keys
from zmqgrad.transport.sockets import NOBLOCK, connection_fd
from zmqgrad.transport.tap import Identity, Tracer
from zmqgrad.wire.codec import COPY_LIMIT_BYTES, decode, encode
from zmqgrad.wire.frames import Envelope, read_envelope
from zmqgrad.wire.messages import Message, Refusal, StorePing, StorePong, StoreRefused

logger = logging.getLogger(__name__)

MAX_CLIENTS = 16_384
"""Default limit of the number of clients; a store counts once for each thread that uses it."""

MAX_OFFENDERS = 1000
"""How many senders of malformed messages are remembered, so that each is logged once."""

ROUTER_BURST = 64
"""Messages read from the ROUTER before the fast path has its turn."""

MAX_POLL_EVENTS = 256

LINGER_MS = 500
"""How long the last replies may take to leave when the server stops."""

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
        keys: the job's; only clients that have them are served. None: all are.
        listen_fd: file descriptor of a socket that is already bound to the port of ``address``.
        max_clients: how many clients are served.
        fast_path: whether clients of this host may use it, if the system supports it.

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
    ) -> None:
        self.name = name
        self.incarnation = secrets.randbits(63)
        self.requests = 0
        """How many queries were received."""
        self.malformed = 0
        """How many messages were malformed, and how many handshakes failed."""
        self.undeliverable = 0
        """How many replies were dropped, as the client had ended or did not read them."""
        self.refuses_newcomers = False
        """Set to leave pings unanswered, so no new client begins. From any thread."""
        self._clock = clock
        self._lock = threading.Lock()  # guards _stopped and _serving
        self._stopped = False
        self._serving = False
        self._ending = False
        self._drained_by = -math.inf  # when the server ends, though clients are connected
        self._due = math.inf
        self._offenders: set[str] = set()
        self._backlogged: dict[int, LocalConnection] = {}  # by descriptor
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._actions: dict[int, Callable[[], None]] = {}  # by descriptor: what to do when it is ready
        self._poller = Poller()
        self._wakeup = Wakeup()
        self._local = self._open_local(max_clients) if fast_path and local.supported() else None
        self._connections = {} if self._local is None else self._local.connections
        self._admission = Admission(max_clients)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(1)
        try:
            self._router = RouterSocket(name, self.context, address, keys, listen_fd, self._admission, clock)
        except BaseException:
            self._close(None)
            raise
        self.endpoint = self._router.endpoint
        self._router_unread = False  # its descriptor does not report again what it has reported
        self.register(self._router.fd, self._read_router)
        self.register(self._router.monitor_fd, self._read_monitor)
        self.wake_by(self._router.rebind_at)
        self.register(self._wakeup.fd, self._end)
        if self._router.zap is not None:
            self.register(self._router.zap.fd, self._router.zap.read)
        self.tracer: Tracer | None = None
        tapping.register(self)

    def identity(self) -> Identity:
        """As :class:`~zmqgrad.transport.tap.Traced`."""
        return Identity(tapping.STORE_SERVER, self.name, 0, self.incarnation, address=self.endpoint)

    def _open_local(self, max_clients: int) -> LocalListener | None:
        endpoint = f"ipc://@zmqgrad-store-{secrets.token_hex(16)}"
        try:
            return LocalListener(
                endpoint,
                self._poller,
                LOCAL_JOB,
                self.incarnation,
                self._call_later,
                on_backlog=self._on_backlog,
                on_closed=self._on_connection_closed,
                max_connections=max_clients,
            )
        except OSError as e:
            logger.warning("%s has no fast path, all queries arrive by ZeroMQ: %s", self.name, e)
            return None

    @property
    def port(self) -> int:
        """The tcp port."""
        return int(self.endpoint.rpartition(":")[2])

    @property
    def clients(self) -> int:
        """How many clients are connected. A client that changes to the fast path counts once."""
        return self._admission.clients

    @property
    def pending(self) -> int:
        """How many tcp connections are in the handshake."""
        return self._admission.pending

    # ---- the thread -------------------------------------------------------------------------------------

    def register(self, fd: int, action: Callable[[], None]) -> None:
        """Makes the server's thread call ``action`` whenever file descriptor ``fd`` is readable."""
        self._actions[fd] = action
        self._poller.register(fd, READ)

    def serve(self, service: Service) -> None:
        """Passes queries to ``service`` until :meth:`stop`; then closes all sockets. Blocks."""
        with self._lock:
            if self._serving or self._stopped:
                return
            self._serving = True
        self._service = service
        self._handle_query = service.handle
        try:
            self._loop(service)
        finally:
            service.stopped()
            with self._lock:
                self._stopped = True
                self._close(self._router)

    def _loop(self, service: Service) -> None:
        poll, actions, connections, now = self._poller.poll, self._actions, self._connections, self._clock.now
        spin = Spinner(spin_budget()).spin
        read, on_local_event = self._read_connection, self._on_local_event
        last, spins = -math.inf, False
        if self._router.zap is not None:
            self._router.zap.read()  # its descriptor does not report what came before
        while not self._ending or (self.clients and now() < self._drained_by):
            seconds: float | None = 0.0 if self._router_unread else None
            if self._due != math.inf and not self._router_unread:
                seconds = self._due - now()
                if seconds <= 0:
                    self._do_due()
                    continue
                seconds = min(seconds, MAX_SECONDS)
            for fd, mask in (spins and spin(self._poll)) or poll(seconds, MAX_POLL_EVENTS):
                connection = connections.get(fd)
                if connection is not None and mask == READ:
                    read(connection)
                elif (action := actions.get(fd)) is not None:
                    action()
                else:
                    on_local_event(fd, mask)
            if self._router_unread:
                self._read_router()
            service.settle()
            before, last = last, now()
            spins = last - before < SPIN_RECENCY_SECONDS
        service.stopping()

    def _poll(self, seconds: float) -> list[tuple[int, int]]:
        return self._poller.poll(seconds, MAX_POLL_EVENTS)

    def _do_due(self) -> None:
        now, self._due = self._clock.now(), math.inf
        later, self._later = self._later, []
        for at, job in later:
            if at <= now:
                job()
            else:
                self._later.append((at, job))
                self.wake_by(at)
        self._router.rebind(now)
        self.wake_by(self._router.rebind_at)
        self.wake_by(self._service.do_due(now))
        self._service.settle()

    def wake_by(self, moment: float) -> None:
        """Makes the server call the service's ``do_due`` no later than ``moment``. Server's thread only."""
        if moment < self._due:
            self._due = moment

    def _call_later(self, seconds: float, job: Callable[[], None]) -> None:
        at = self._clock.now() + seconds
        self._later.append((at, job))
        self.wake_by(at)

    def _end(self) -> None:
        self._wakeup.clear()
        self._ending = True
        self.wake_by(self._drained_by)

    def stop(self, drain_seconds: float = 0.0) -> None:
        """Makes :meth:`serve` return. Safe from any thread; idempotent.

        Args:
            drain_seconds: how long it still serves the clients that are connected, until they disconnect.
        """
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            self._drained_by = self._clock.now() + drain_seconds
            if self._serving:
                self._wakeup.set()
            else:
                self._close(self._router)

    def _close(self, router: RouterSocket | None) -> None:
        if router is not None:  # otherwise it was not registered
            tapping.unregister(self)
        if self._local is not None:
            self._local.close()
        if router is not None:
            router.close(LINGER_MS)
        self._poller.close()
        self._wakeup = SPENT
        self.context.term()  # waits until the last replies have left, or for LINGER_MS

    # ---- receiving --------------------------------------------------------------------------------------

    def _read_router(self) -> None:
        receive = self._router.receive
        try:
            for _ in range(ROUTER_BURST):
                self._router_unread = True
                frames = receive(NOBLOCK, copy=False)
                frame = frames[-1]
                data = frame.bytes if len(frame) <= COPY_LIMIT_BYTES else frame.buffer
                if len(frames) == 2:
                    self._receive(frames[0].bytes, data, frame)
                else:
                    error = ProtocolError(f"a query of {len(frames) - 1} frames (expected one)")
                    self._on_malformed(frames[0].bytes, data, frame, error)
        except zmq.Again:
            self._router_unread = False

    def _read_connection(self, connection: LocalConnection) -> None:
        """Reads one packet of the fast path."""
        try:
            packet = connection.receive()
        except BlockingIOError:
            return
        except OSError as e:
            logger.debug("%s: a client of this host has ended: %s", self.name, e)
            packet = b""
        if packet:
            self._receive(connection, packet, None)
        else:
            self._drop(connection)

    def _receive(self, route: Route, data: bytes | memoryview, frame: zmq.Frame | None) -> None:
        """Handles a message that arrived by either path; ``frame`` is None by the fast path."""
        try:
            envelope, query = decode(data)
        except ProtocolError as e:
            self._on_malformed(route, data, frame, e)
            return
        client_id, request_id = envelope.incarnation, envelope.message_id
        if self.tracer is not None:
            self._tap_query(self.tracer, route, envelope, query, len(data))
        if type(query) is StorePing:
            self._on_ping(route, frame, client_id, request_id, query)
        elif (
            self._admission.refused and frame is not None and connection_fd(frame) in self._admission.refused
        ):
            self._refuse_surplus(route, request_id)
        else:
            self.requests += 1
            try:
                self._handle_query(route, client_id, request_id, query)
            except Exception:
                logger.exception("%s: handling %s failed", self.name, type(query).__name__)

    def _tap_query(self, tracer: Tracer, route: Route, envelope: Envelope, query: Message, size: int) -> None:
        shown = Envelope(envelope.type, 0, envelope.incarnation, envelope.message_id, _route_key(route))
        tracer.tap(False, envelope.incarnation, shown, query, size, monotonic_ns())

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
        self.malformed += 1
        if address not in self._offenders and len(self._offenders) < MAX_OFFENDERS:
            self._offenders.add(address)
            logger.warning("%s: dropped a malformed query from %s (%s)", self.endpoint, address, error)

    def _read_monitor(self) -> None:
        for _ in range(self._router.read_events()):
            self._count_malformed("tcp", "a handshake failed: no ZeroMQ, or another secret")
        self.wake_by(self._router.rebind_at)

    def _on_ping(
        self, route: Route, frame: zmq.Frame | None, client_id: int, request_id: int, query: StorePing
    ) -> None:
        """Replies to a client that begins, or that tests whether its connection still works."""
        if frame is None:
            self._admission.add_local(route, client_id)
        if self.refuses_newcomers or self._ending:
            return  # it will find the next server here when this one has closed the connection
        if frame is not None:
            self._read_monitor()
            if not self._admission.admit_tcp(client_id, connection_fd(frame)):
                self._refuse_surplus(route, request_id)
                return
        endpoint = "" if self._local is None else self._local.endpoint
        self.reply(route, request_id, StorePong(query.nonce, endpoint))

    def _refuse_surplus(self, route: Route, request_id: int) -> None:
        text = f"it serves {self._admission.limit} connections already, which is its limit"
        self.reply(route, request_id, StoreRefused(Refusal.LIMIT, text))

    # ---- replying ---------------------------------------------------------------------------------------

    def reply(self, route: Route, request_id: int, message: Message) -> bool:
        """Replies to query ``request_id``. Server's thread only.

        Returns:
            False if the reply is known not to arrive.
        """
        data = encode(message, 0, self.incarnation, request_id)
        if self.tracer is not None:
            envelope = (message.TYPE, 0, self.incarnation, request_id, _route_key(route), 0, 0, 0)
            self.tracer.tap(True, 0, envelope, message, len(data), monotonic_ns())
        try:
            if isinstance(route, bytes):
                self._router_unread = True
                self._router.send(route, data)
            else:
                if len(data) > MAX_PACKET_BYTES:
                    refusal = StoreRefused(Refusal.TOO_LARGE, f"{len(data)} bytes")
                    data = encode(refusal, 0, self.incarnation, request_id)
                route.send(data)
                if self._backlogged and route.backlog() > MAX_UNREAD_REPLIES:
                    raise OSError("a client that does not read its replies")
            return True
        except (zmq.ZMQError, OSError) as e:
            logger.debug("%s: a reply is dropped: %s", self.name, e)
            self.undeliverable += 1
            if isinstance(route, LocalConnection):
                self._drop(route)
            return False

    # ---- connections of the fast path -------------------------------------------------------------------

    def _on_local_event(self, fd: int, mask: int) -> None:
        """Handles all but packets: new connections, and those that have ended or accept data again."""
        if self._local is None:
            return
        connection = self._connections.get(fd)
        if connection is None:
            self._local.read(fd)
            return
        if fd in self._backlogged and mask & WRITE:
            self._flush(connection)
        if mask & ~WRITE:
            self._read_connection(connection)

    def _on_backlog(self, connection: LocalConnection) -> None:
        """Polls ``connection`` until the kernel accepts more. Called by :meth:`reply`."""
        self._backlogged[connection.fd] = connection
        self._poller.modify(connection.fd, READ | WRITE)

    def _flush(self, connection: LocalConnection) -> None:
        try:
            flushed = connection.flush()
        except OSError as e:
            logger.debug("%s: a client of this host has ended: %s", self.name, e)
            flushed = True  # the next read finds that, too
        if flushed:
            del self._backlogged[connection.fd]
            self._poller.modify(connection.fd, READ)

    def _drop(self, connection: LocalConnection) -> None:
        assert self._local is not None
        self._local.drop(connection)

    def _on_connection_closed(self, connection: LocalConnection) -> None:
        self._backlogged.pop(connection.fd, None)
        self._admission.remove_local(connection)


def _route_key(route: Route) -> int:
    """Identifies a connection in a trace; a reply goes to that of its query."""
    return hash(route) & 0x7FFF_FFFF_FFFF_FFFF


def _peer_address(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:  # libzmq knows none of a peer that speaks ZMTP 1
        return "tcp"
