"""Answers requests on the connection on which they came: the store's server.

Unlike mailboxes (one-way), this serves many light clients. One thread owns the listening socket and all
connections; it waits for all of them at once, reads what has come, and writes answers at once. An answer
that the other end does not take is kept, and nothing more is read from there until it has. Those who have
not said who they are stand with :mod:`~zmqgrad.transport.newcomers`.

Speaks ZMTP as a ROUTER does (see :mod:`~zmqgrad.transport.zmtp` for why not through libzmq). What does not
speak it costs a counter and a line in the log (P5).
"""

from __future__ import annotations

import logging
import math
import secrets
import selectors
import socket
import threading
from collections.abc import Iterable
from typing import Protocol

from zmqgrad.errors import ProtocolError
from zmqgrad.runtime.clock import MONOTONIC, Clock
from zmqgrad.transport.newcomers import Newcomers
from zmqgrad.transport.request_connection import Client
from zmqgrad.transport.security import Keys
from zmqgrad.transport.tcp import adopt, listen
from zmqgrad.transport.zmtp import HEAD_ROOM, LARGE, Frame, write_head
from zmqgrad.wire.codec import decode, encode, encode_around
from zmqgrad.wire.frames import Envelope, read_envelope
from zmqgrad.wire.messages import Message, StoreValue

logger = logging.getLogger(__name__)

MAX_STRANGERS = 1000
"""How many addresses that sent garbage are remembered, so that each is logged once."""

MAX_CLIENTS = 16_384
"""How many connections are answered at a time; a client has one for each thread that asks."""

SPARE = 64
"""How many connections beyond those are taken, to be told so."""

STRANGERS_AT_ONCE = 64
"""How many of those who have not said who they are are heard between two rounds in which all others are
answered. It is more than are taken (``ACCEPTS_AT_ONCE``), as a handshake takes several: or those who come
would pile up, and each would be dropped before it was heard."""

MAX_UNREAD = 1000
"""How many notices wait for one who does not read them."""

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Service(Protocol):
    """What a server serves; called in the server's thread alone."""

    def handle(self, client: Client, envelope: Envelope, message: Message) -> None:
        """Answer by :meth:`RequestServer.reply`, now or in a later call."""
        ...

    def misunderstood(self, client: Client, message_id: int, why: str) -> None:
        """A request of ours was malformed; it has been logged."""
        ...

    def unwelcome(self, client: Client, message_id: int, limit: int) -> None:
        """A request came from a client beyond the ``limit``: say so."""
        ...

    def gone(self, client: Client) -> None:
        """The connection has ended; answers to it are dropped."""
        ...

    def settle(self) -> None:
        """What had come has been handled; more is waited for after this."""
        ...

    def next_due(self) -> float:
        """The moment when :meth:`do_due` wants to be called; infinite for never."""
        ...

    def do_due(self, now: float) -> None:
        """Do what was due by ``now``."""
        ...

    def stopping(self) -> None:
        """The last chance to reply."""
        ...


class RequestServer:
    """Receives requests at ``address`` (``tcp://127.0.0.1:*`` for a port that the system picks).

    Args:
        keys: only those who have them are answered; None: whoever comes.
        listen_fd: a socket that was bound to the port of ``address`` by somebody else.
        max_clients: how many connections are served.

    Raises:
        AddressInUseError: if another socket listens there.
        ConfigurationError: if others than this host could connect, and nothing protects the traffic.
        TransportError: if the address cannot be listened on.
    """

    def __init__(
        self,
        name: str,
        address: str,
        *,
        keys: Keys | None = None,
        listen_fd: int | None = None,
        max_clients: int = MAX_CLIENTS,
        clock: Clock = MONOTONIC,
    ) -> None:
        self.name = name
        self._keys = keys
        self.incarnation = secrets.randbits(63)
        self._clock = clock
        self._max_clients = max_clients
        self._lock = threading.Lock()  # guards _stopped and _serving
        self._stopped = False
        self._serving = False
        self._strangers: set[str] = set()
        self._clients: set[Client] = set()  # those who have said who they are
        self.requests = 0
        self.malformed = 0
        self.undeliverable = 0
        if listen_fd is None:
            listener, self.endpoint = listen(address, keyed=keys is not None)
        else:
            port = address.rpartition(":")[2]
            listener, self.endpoint = adopt(
                listen_fd, 0 if port == "*" else int(port), keyed=keys is not None
            )
        self._selector = selectors.DefaultSelector()
        self._newcomers = Newcomers(
            listener,
            self.endpoint,
            name=name,
            keys=keys,
            selector=self._selector,
            clock=clock,
            say=self._send,
            refuse=self._refuse,
            end=self._close,
        )
        self._ear, self._bell = socket.socketpair()
        self._selector.register(self._ear, _READ, None)

    @property
    def port(self) -> int:
        """The tcp port."""
        return int(self.endpoint.rpartition(":")[2])

    @property
    def clients(self) -> int:
        """How many connections there are to those who have said who they are."""
        return len(self._clients)

    @property
    def pending(self) -> int:
        """How many there are to those who have not."""
        return len(self._newcomers.pending)

    def serve(self, service: Service) -> None:
        """Hand requests to ``service`` until :meth:`stop`; then close all connections. Blocks."""
        with self._lock:
            if self._serving or self._stopped:
                return
            self._serving = True
        self._service = service
        try:
            self._loop(service)
        finally:
            with self._lock:
                self._stopped = True
                self._close_all()

    def _loop(self, service: Service) -> None:
        select, now, newcomers = self._selector.select, self._clock.now, self._newcomers
        pending = newcomers.pending
        while True:
            due = service.next_due()
            if pending or newcomers.listen_again != math.inf:
                due = min(due, newcomers.next_due())
            if due == math.inf:
                events = select()
            else:
                moment = now()
                if moment >= due:
                    newcomers.do_due(moment)
                    service.do_due(moment)
                    service.settle()
                    continue
                events = select(due - moment)
            strangers = 0
            for key, mask in events:
                whose = key.data
                if type(whose) is Client:
                    if whose.stranger:
                        strangers += 1
                        if strangers > STRANGERS_AT_ONCE:
                            continue  # it comes up again
                    if mask & _READ:
                        self._read(whose)
                    if mask & _WRITE and not whose.closed:
                        self._flush(whose)
                elif whose is None:
                    service.stopping()
                    service.settle()
                    return
                else:
                    whose()
            service.settle()

    # ---- connections ------------------------------------------------------------------------------------

    def _welcome(self, client: Client) -> None:
        """``client`` has said who it is."""
        self._newcomers.welcome(client)
        client.surplus = len(self._clients) >= self._max_clients
        self._clients.add(client)
        if len(self._clients) > self._max_clients + SPARE:
            self._close(client)

    def _close(self, client: Client) -> None:
        if client.closed:
            return
        client.closed = True
        self._newcomers.forget(client)
        self._clients.discard(client)
        self._selector.unregister(client.socket)
        client.socket.close()
        self._service.gone(client)

    def _close_all(self) -> None:
        for client in self._clients:
            client.closed = True
            client.socket.close()
        self._clients.clear()
        self._selector.close()
        for closing in (self._newcomers, self._ear, self._bell):
            closing.close()

    # ---- in ---------------------------------------------------------------------------------------------

    def _read(self, client: Client) -> None:
        try:
            frames = client.receive()
        except ProtocolError as e:
            self._refuse(client, str(e))
            frames = None
        except OSError:
            frames = None
        if frames is None:
            self._close(client)
            return
        if client.stranger and client.unpacker.ready:
            self._welcome(client)
        for frame in frames:
            if client.closed:
                return
            if frame is None:
                self._refuse(client, "a request of several frames (expected one)")
            else:
                self._hand_on(client, frame)
        if client.out and not client.closed:  # it did not take what its end of the protocol asked for
            self._wait_to(client)

    def _hand_on(self, client: Client, frame: Frame) -> None:
        try:
            envelope, message = decode(frame)
        except ProtocolError as e:
            self._refuse(client, str(e))
            self._tell(client, frame, str(e))
            return
        self.requests += 1
        if client.surplus:
            self._service.unwelcome(client, envelope.message_id, self._max_clients)
            self._close(client)
            return
        try:
            self._service.handle(client, envelope, message)
        except Exception:
            logger.exception("%s: handling %s failed", self.name, type(message).__name__)

    def _tell(self, client: Client, frame: Frame, why: str) -> None:
        """Let a client of ours (of another release, perhaps) know; a stranger would not understand."""
        try:
            message_id = read_envelope(frame).message_id
        except ProtocolError:
            return
        self._service.misunderstood(client, message_id, why)

    def _refuse(self, client: Client, why: str) -> None:
        self.malformed += 1
        host = client.address.rpartition(":")[0]
        if host not in self._strangers and len(self._strangers) < MAX_STRANGERS:
            self._strangers.add(host)
            logger.warning(
                "%s at %s: dropped a malformed request from %s (%s); more from there will only be counted",
                self.name,
                self.endpoint,
                client.address,
                why,
            )

    # ---- out --------------------------------------------------------------------------------------------

    def reply(self, client: Client, message_id: int, message: Message) -> None:
        """Send an answer; only in the server's thread. It is dropped, and counted, if the client has gone."""
        if client.closed:
            self.undeliverable += 1
            return
        if type(message) is StoreValue and len(message.value) >= LARGE and self._keys is None:
            # The store's own copy of the value is sent: another would cost more than all the rest.
            before, after = encode_around(message, 0, self.incarnation, message_id, room=HEAD_ROOM)
            write_head(before, len(message.value) + len(after))
            self._send(client, before, message.value, after)
            return
        frame = encode(message, 0, self.incarnation, message_id, room=HEAD_ROOM)
        self._send(client, client.unpacker.pack(frame))

    def notify(self, clients: Iterable[Client], message: Message) -> None:
        """Send ``message``, which nobody asked for, to ``clients``; only in the server's thread.

        Who has left ``MAX_UNREAD`` of them is hung up on: he will look himself, once he can.
        """
        frame = encode(message, 0, self.incarnation, 0, room=HEAD_ROOM)
        plain = write_head(frame) if self._keys is None else None
        for client in clients:
            if len(client.out) >= MAX_UNREAD:
                logger.warning("%s: hung up on %s, which reads no notices", self.name, client.address)
                self._close(client)
            elif not client.closed:
                self._send(client, client.unpacker.pack(frame) if plain is None else plain)

    def _send(self, client: Client, *data: bytes | bytearray) -> None:
        waited = bool(client.out)
        try:
            client.send(*data)
        except OSError:
            self.undeliverable += 1
            return  # it is about to be read from, and found to have gone
        if client.out and not waited:
            self._wait_to(client)

    def _wait_to(self, client: Client) -> None:
        """Nothing more is read from who does not take what he asked for."""
        self._selector.modify(client.socket, _WRITE if client.out else _READ, client)

    def _flush(self, client: Client) -> None:
        try:
            client.flush()
        except OSError:
            self._close(client)
            return
        if not client.out:
            self._wait_to(client)

    def stop(self) -> None:
        """Let :meth:`serve` return. Safe from any thread; idempotent."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            if not self._serving:
                self._close_all()
                return
            self._bell.send(b"\0")

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else f"{len(self._clients)} clients, {self.requests} requests"
        return f"<RequestServer {self.name} at {self.endpoint}: {state}>"
