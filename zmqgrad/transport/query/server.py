"""Receives queries and sends the replies: the store's server, one thread over one ROUTER.

Unlike a mailbox, it serves many light clients, whom it does not know before they ask. Clients of its own host
and user may use the fast path (:mod:`~zmqgrad.transport.local`), whose address the reply to a ping tells. A
query is known by client and number, and may come more than once, by either way: see
:mod:`~zmqgrad.transport.query.client`.

What a stranger sends costs a counter and a line in the log (P5).
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import zmq

from zmqgrad.errors import ProtocolError, TransportError
from zmqgrad.runtime.clock import MONOTONIC, Clock
from zmqgrad.runtime.spinning import Spinner
from zmqgrad.transport import local
from zmqgrad.transport.bind_policy import bind_tcp
from zmqgrad.transport.local.connection import MAX_PACKET_BYTES, LocalConnection
from zmqgrad.transport.local.listener import LocalListener
from zmqgrad.transport.polling import MAX_SECONDS, READ, WRITE, Poller, Wakeup
from zmqgrad.transport.query import LOCAL_JOB, SPIN_RECENCY_SECONDS, spin_budget
from zmqgrad.transport.query.sockets import set_up_query_socket
from zmqgrad.transport.security import Keys, ZapAuthenticator, secure_server
from zmqgrad.transport.sockets import (
    ACCEPT_FAILED,
    ACCEPTED,
    CONNECTED,
    DISCONNECTED,
    HANDSHAKE_FAILED,
    NOBLOCK,
    NOBLOCK_MORE,
    ZERO_COPY_BYTES,
    SocketMonitor,
    get_int,
)
from zmqgrad.wire.codec import COPY_LIMIT_BYTES, decode, encode
from zmqgrad.wire.frames import read_envelope
from zmqgrad.wire.messages import Message, Refusal, StorePing, StorePong, StoreRefused

logger = logging.getLogger(__name__)

MAX_CLIENTS = 16_384
"""How many clients are served; a store that several threads use is one for each of them."""

MAX_UNREAD = 16
"""Replies that may wait for a client to read them. One has a single query at a time, and a ping."""

MAX_OFFENDERS = 1000
"""How many senders of garbage are remembered, so that each is logged once."""

BURST = 64
"""Messages read from the ROUTER before the fast path has its turn."""

POLL_BURST = 256

LINGER_MS = 500
"""How long the last replies may take to leave when the server stops."""

REBIND_SECONDS = 1.0
"""How long the server does not listen after the process ran out of file descriptors."""

Route = bytes | LocalConnection
"""Where a reply goes: the ROUTER's routing id of a client, or its connection on the fast path."""


class Service(Protocol):
    """What a server does with queries. Called in the server's thread alone."""

    def handle(self, route: Route, client: int, number: int, query: Message) -> None:
        """Reply to query ``number`` of ``client`` by :meth:`QueryServer.reply`, now or in a later call."""
        ...

    def settle(self) -> None:
        """What had come has been handled; the server is about to wait for more."""
        ...

    def do_due(self, now: float) -> float:
        """Do what was due by ``now``. Returns when something is due next; infinite for never."""
        ...

    def stopping(self) -> None:
        """The last chance to reply."""
        ...

    def stopped(self) -> None:
        """Serving has ended, however that came: close what was made with the server's context."""
        ...


class QueryServer:
    """Receives queries at ``address`` (``tcp://127.0.0.1:*`` for a port that the system picks).

    Args:
        keys: only clients that have them are served; None: all are.
        listen_fd: a socket that was bound to the port of ``address`` by somebody else.
        max_clients: how many clients are served.
        fast_path: let clients of this host use it, where the system has what it needs.

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
        """How many queries have come."""
        self.malformed = 0
        """How often somebody sent what was no query, or did not get through the handshake."""
        self.undeliverable = 0
        """How many replies were dropped, as the client was gone or did not read them."""
        self.refuses_newcomers = False
        """Are pings left unanswered, with which a client begins? May be set in any thread."""
        self._keys = keys
        self._clock = clock
        self._max_clients = max_clients
        self._lock = threading.Lock()  # guards _stopped and _serving
        self._stopped = False
        self._serving = False
        self._ending = False
        self._due = math.inf
        self._unbound_until = math.inf
        self._was_unbound = False
        self._offenders: set[str] = set()
        self._accepted = self._connected = self._failed = self._disconnected = 0  # tcp connections
        self._by_tcp: OrderedDict[int, None] = OrderedDict()  # clients that have pinged by tcp alone
        self._by_local: dict[LocalConnection, int] = {}  # clients that have pinged by the fast path
        self._local_clients: set[int] = set()  # the same
        self._surplus: set[bytes] = set()  # routing ids of clients too many
        self._blocked: dict[int, LocalConnection] = {}  # by descriptor: those with a backlog
        self._actions: dict[int, Callable[[], None]] = {}  # by descriptor: what to do when it is ready
        self._more = False  # the ROUTER's descriptor does not tell again of what it has told
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(1)
        self._router = self.context.socket(zmq.ROUTER)
        try:
            set_up_query_socket(self._router)
            self._router.router_mandatory = True
            self._router.sndhwm = self._router.rcvhwm = MAX_UNREAD
            if keys is not None:
                ZapAuthenticator(name, self.context, keys)
                secure_server(self._router, keys)
            self._monitor = SocketMonitor(
                self._router, ACCEPTED | ACCEPT_FAILED | CONNECTED | HANDSHAKE_FAILED | DISCONNECTED
            )
            try:
                self.endpoint = bind_tcp(self._router, address, secured=keys is not None, listen_fd=listen_fd)
            except BaseException:
                self._monitor.close()
                raise
        except BaseException:
            self._router.close(linger=0)
            self.context.term()
            raise
        self._wakeup = Wakeup()
        self._poller = Poller()
        self._router_number = get_int(self._router, zmq.FD)
        self.register(self._router_number, self._read_router)
        self.register(self._monitor.number, self._read_monitor)
        self.register(self._wakeup.number, self._end)
        self._local = self._open_local() if fast_path and local.supported() else None

    def _open_local(self) -> LocalListener | None:
        endpoint = f"ipc://@zmqgrad-store-{secrets.token_hex(16)}"
        try:
            return LocalListener(
                endpoint,
                self._poller,
                LOCAL_JOB,
                self.incarnation,
                self._note_backlog,
                self._forget_connection,
                self._max_clients,
            )
        except OSError as e:
            logger.warning("%s has no fast path, all queries come by ZeroMQ: %s", self.name, e)
            return None

    @property
    def port(self) -> int:
        """The tcp port."""
        return int(self.endpoint.rpartition(":")[2])

    @property
    def clients(self) -> int:
        """How many clients are connected. One that changes to the fast path counts once."""
        fast = 0 if self._local is None else len(self._local.connections)
        connected = self._connected - (self._disconnected - self._failed)
        return fast + min(connected, len(self._by_tcp))

    @property
    def pending(self) -> int:
        """How many tcp connections are in the handshake."""
        return max(0, self._accepted - self._connected - self._failed)

    # ---- the thread -------------------------------------------------------------------------------------

    def register(self, number: int, action: Callable[[], None]) -> None:
        """Have the server's thread call ``action`` when file descriptor ``number`` can be read."""
        self._actions[number] = action
        self._poller.register(number, READ)

    def serve(self, service: Service) -> None:
        """Hand queries to ``service`` until :meth:`stop`; then close all sockets. Blocks."""
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
                self._close()

    def _loop(self, service: Service) -> None:
        poll, actions, now = self._poller.poll, self._actions, self._clock.now
        spin = Spinner(spin_budget()).spin
        connections = {} if self._local is None else self._local.connections
        read, read_otherwise = self._read_connection, self._read_local
        last, spins = -math.inf, False
        while not self._ending:
            seconds: float | None = 0.0 if self._more else None
            if self._due != math.inf and not self._more:
                seconds = self._due - now()
                if seconds <= 0:
                    self._do_due()
                    continue
                seconds = min(seconds, MAX_SECONDS)
            for number, mask in (spins and spin(self._poll)) or poll(seconds, POLL_BURST):
                connection = connections.get(number)
                if connection is not None and mask == READ:
                    read(connection)
                elif (action := actions.get(number)) is not None:
                    action()
                else:
                    read_otherwise(number, mask)
            if self._more:
                self._read_router()
            service.settle()
            before, last = last, now()
            spins = last - before < SPIN_RECENCY_SECONDS

    def _poll(self, seconds: float) -> list[tuple[int, int]]:
        return self._poller.poll(seconds, POLL_BURST)

    def _do_due(self) -> None:
        now, self._due = self._clock.now(), math.inf
        if now >= self._unbound_until:
            self._rebind()
        self.wake_by(self._unbound_until)
        self.wake_by(self._service.do_due(now))
        self._service.settle()

    def wake_by(self, moment: float) -> None:
        """Call the service's ``do_due`` at ``moment``, or capped. Only in the server's thread."""
        if moment < self._due:
            self._due = moment

    def _end(self) -> None:
        self._service.stopping()
        self._ending = True

    def stop(self) -> None:
        """Let :meth:`serve` return. Safe from any thread; idempotent."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            if self._serving:
                self._wakeup.set()
            else:
                self._close()

    def _close(self) -> None:
        if self._local is not None:
            self._local.close()
        self._monitor.close()
        self._router.close(linger=LINGER_MS)
        self._poller.close()
        self._wakeup.close()
        self.context.term()  # waits until the last replies have left, or for LINGER_MS

    # ---- in ---------------------------------------------------------------------------------------------

    def _read_router(self) -> None:
        receive = self._router.recv_multipart
        try:
            for _ in range(BURST):
                self._more = True
                self._receive(receive(NOBLOCK, copy=False))
        except zmq.Again:
            self._more = False

    def _receive(self, frames: list[zmq.Frame]) -> None:
        try:
            route, frame = frames
            data = frame.bytes if len(frame) <= COPY_LIMIT_BYTES else frame.buffer
            envelope, query = decode(data)
        except (ProtocolError, ValueError) as e:
            self._complain(frames, e)
            return
        client, number = envelope.incarnation, envelope.message_id
        if type(query) is StorePing:
            self._pong(route.bytes, client, number, query)
        elif self._surplus and route.bytes in self._surplus:
            self._refuse_surplus(route.bytes, number)
        else:
            self.requests += 1
            try:
                self._handle_query(route.bytes, client, number, query)
            except Exception:
                self._log_failure(query)

    def _log_failure(self, query: Message) -> None:
        logger.exception("%s: handling %s failed", self.name, type(query).__name__)

    def _complain(self, frames: list[zmq.Frame], error: Exception) -> None:
        """Count and log a message that is no query, and tell the client, if it speaks another version."""
        try:
            address = str(frames[-1].get("Peer-Address"))
        except zmq.ZMQError:  # libzmq knows none of a peer that speaks ZMTP 1
            address = "tcp"
        if not isinstance(error, ProtocolError):
            error = ProtocolError(f"a query of {len(frames) - 1} frames (expected one)")
        self._note_offence(address, error)
        self._reply_malformed(frames[0].bytes, frames[-1].bytes, error)

    def _reply_malformed(self, route: Route, data: bytes, error: Exception) -> None:
        try:
            number = read_envelope(data).message_id
        except ProtocolError:
            return  # a stranger would not understand
        self.reply(route, number, StoreRefused(Refusal.INVALID, str(error)))

    def _note_offence(self, address: str, error: Exception) -> None:
        self.malformed += 1
        if address not in self._offenders and len(self._offenders) < MAX_OFFENDERS:
            self._offenders.add(address)
            logger.warning("%s: dropped a malformed query from %s (%s)", self.endpoint, address, error)

    def _read_connection(self, connection: LocalConnection) -> None:
        """A packet has come by the fast path."""
        try:
            packet = connection.receive()
            if not packet:
                self._drop(connection)
                return
            envelope, query = decode(packet)
        except BlockingIOError:
            return
        except OSError as e:
            logger.debug("%s: a client of this host is gone: %s", self.name, e)
            self._drop(connection)
        except ProtocolError as e:
            self._note_offence("a process of this host", e)
            self._reply_malformed(connection, packet, e)
        else:
            if type(query) is StorePing:
                self._pong(connection, envelope.incarnation, envelope.message_id, query)
                return
            self.requests += 1
            try:
                self._handle_query(connection, envelope.incarnation, envelope.message_id, query)
            except Exception:
                self._log_failure(query)

    def _read_local(self, number: int, mask: int) -> None:
        """Something else is to be done about the fast path: accept a connection, or end or flush one."""
        if self._local is None:
            return
        connection = self._local.connections.get(number)
        if connection is None:
            self._local.read(number)
            return
        if number in self._blocked and mask & WRITE:
            self._flush(number)
        if mask & ~WRITE:
            self._read_connection(connection)

    def _drop(self, connection: LocalConnection) -> None:
        assert self._local is not None
        self._local.drop(connection)

    def _pong(self, route: Route, client: int, number: int, query: StorePing) -> None:
        """A client begins, or wants to know whether its connection still works."""
        if self.refuses_newcomers:
            return  # it will find the next store here when this one has closed the connection
        if isinstance(route, LocalConnection):
            self._by_tcp.pop(client, None)
            self._by_local[route] = client
            self._local_clients.add(client)
        elif client not in self._by_tcp and client not in self._local_clients:
            self._read_monitor()
            if self.clients >= self._max_clients:
                self._surplus.add(route)
                self._refuse_surplus(route, number)
                return
            self._by_tcp[client] = None
            if len(self._by_tcp) > 2 * self._max_clients:
                self._by_tcp.popitem(last=False)
        endpoint = "" if self._local is None else self._local.endpoint
        self.reply(route, number, StorePong(query.nonce, endpoint))

    def _refuse_surplus(self, route: Route, number: int) -> None:
        said = f"it serves {self._max_clients} connections already, which is its limit"
        self.reply(route, number, StoreRefused(Refusal.LIMIT, said))

    def _read_monitor(self) -> None:
        while events := self._monitor.read():
            for kind, _ in events:
                if kind == ACCEPTED:
                    self._accepted += 1
                elif kind == CONNECTED:
                    self._connected += 1
                elif kind == DISCONNECTED:
                    self._disconnected += 1
                elif kind == ACCEPT_FAILED:
                    self._unbind()
                else:
                    self._failed += 1
                    self._note_offence(
                        "tcp", ProtocolError("a handshake failed: no ZeroMQ, or another secret")
                    )
        if self.clients < self._max_clients:
            self._surplus.clear()

    def _unbind(self) -> None:
        """The process has no descriptors left. libzmq would try to accept again without a pause."""
        if self._unbound_until == math.inf:
            logger.log(
                logging.DEBUG if self._was_unbound else logging.WARNING,
                "%s: no more file descriptors; new clients have to wait until others have left",
                self.endpoint,
            )
            self._was_unbound = True
            self._router.unbind(self.endpoint)
            self._unbound_until = self._clock.now() + REBIND_SECONDS
            self.wake_by(self._unbound_until)

    def _rebind(self) -> None:
        try:
            bind_tcp(self._router, self.endpoint, secured=self._keys is not None)
            self._unbound_until = math.inf
        except TransportError as e:
            logger.debug("%s: cannot listen again yet: %s", self.name, e)
            self._unbound_until = self._clock.now() + REBIND_SECONDS

    # ---- out --------------------------------------------------------------------------------------------

    def reply(self, route: Route, number: int, message: Message) -> bool:
        """Reply to query ``number``. False if that is known not to arrive. Only in the server's thread."""
        data = encode(message, 0, self.incarnation, number)
        try:
            if isinstance(route, bytes):
                self._more = True
                self._router.send(route, NOBLOCK_MORE)
                self._router.send(data, NOBLOCK, copy=len(data) < ZERO_COPY_BYTES)
            else:
                if len(data) > MAX_PACKET_BYTES:
                    refusal = StoreRefused(Refusal.TOO_LARGE, f"{len(data)} bytes")
                    data = encode(refusal, 0, self.incarnation, number)
                route.send(data)
                if self._blocked and route.backlog() > MAX_UNREAD:
                    raise OSError("a client that does not read its replies")
            return True
        except (zmq.ZMQError, OSError) as e:
            logger.debug("%s: a reply is dropped: %s", self.name, e)
            self.undeliverable += 1
            if isinstance(route, LocalConnection):
                self._drop(route)
            return False

    def _note_backlog(self, connection: LocalConnection) -> None:
        """``connection`` takes no more just now. Called by :meth:`reply`."""
        self._blocked[connection.number] = connection
        self._poller.modify(connection.number, READ | WRITE)

    def _flush(self, number: int) -> None:
        connection = self._blocked[number]
        try:
            flushed = connection.flush()
        except OSError as e:
            logger.debug("%s: a client of this host is gone: %s", self.name, e)
            flushed = True  # reading from it finds that, too
        if flushed:
            del self._blocked[number]
            self._poller.modify(number, READ)

    def _forget_connection(self, connection: LocalConnection) -> None:
        """``connection`` has ended."""
        self._blocked.pop(connection.number, None)
        client = self._by_local.pop(connection, None)
        if client is not None:
            self._local_clients.discard(client)
