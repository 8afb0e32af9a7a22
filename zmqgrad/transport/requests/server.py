"""Answers requests on the connection on which they came: the store's server.

Unlike mailboxes (one-way), this serves many light clients. One thread owns the listening socket and all
connections; it waits for all of them at once, reads what has come, and writes answers at once. Those who
have not said who they are stand with :mod:`~zmqgrad.transport.requests.newcomers`; what is said to clients,
and kept if they do not take it, with :mod:`~zmqgrad.transport.requests.outgoing`.

Speaks ZMTP as a ROUTER does (see :mod:`~zmqgrad.transport.zmtp` for why not through libzmq). What does not
speak it costs a counter and a line in the log (P5).
"""

from __future__ import annotations

import logging
import math
import secrets
import socket
import threading
from collections.abc import Callable
from functools import partial

from zmqgrad.errors import ProtocolError
from zmqgrad.runtime.clock import MONOTONIC, Clock
from zmqgrad.transport.looking import Look
from zmqgrad.transport.requests.connection import CHUNK, Client
from zmqgrad.transport.requests.newcomers import STRANGERS_AT_ONCE, Newcomers
from zmqgrad.transport.requests.offences import Offences
from zmqgrad.transport.requests.outgoing import Outgoing
from zmqgrad.transport.requests.ready import LONGEST_SECONDS, READ, Poller
from zmqgrad.transport.requests.service import Service
from zmqgrad.transport.requests.short import RECENTLY, Handler, Hearing, eyes
from zmqgrad.transport.requests.whole import READERS, STARTS, frame_in, read
from zmqgrad.transport.security import Keys
from zmqgrad.transport.tcp import adopt, listen
from zmqgrad.transport.zmtp import Frame
from zmqgrad.wire.codec import decode
from zmqgrad.wire.frames import read_envelope
from zmqgrad.wire.messages import BY_TYPE, REQUEST, Message

logger = logging.getLogger(__name__)

MAX_CLIENTS = 16_384
"""How many connections are answered at a time; a client has one for each thread that asks."""

MOST_AT_ONCE = 256
"""So many connections are answered between two looks at which are ready."""

SPARE = 64
"""How many connections beyond those are taken, to be told so."""


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
        self.incarnation = secrets.randbits(63)
        self._clock = clock
        self._max_clients = max_clients
        self._lock = threading.Lock()  # guards _stopped and _serving
        self._stopped = False
        self._serving = False
        self._due = math.inf  # when something is to be done though nothing comes; perhaps later
        self._strangers_heard = 0  # since poll came back
        self._clients: set[Client] = set()  # those who have said who they are
        self._hearings: dict[Client, Hearing] = {}  # of those who have pipes
        self._handlers: dict[bytes, tuple[Callable[[bytes], Message], Handler]] = {}
        self._heard = 0  # but by the pipes that are there
        self._ending = False
        self._look = Look(eyes()).at
        if listen_fd is None:
            listener, self.endpoint = listen(address, keyed=keys is not None)
        else:
            port = address.rpartition(":")[2]
            listener, self.endpoint = adopt(
                listen_fd, 0 if port == "*" else int(port), keyed=keys is not None
            )
        self._offences = Offences(name, self.endpoint)
        self._refuse = self._offences.note
        self._ear, self._bell = socket.socketpair()
        self._poller = Poller()
        self._poller.register(self._ear.fileno(), READ)
        self._ready: dict[int, Callable[[], None]] = {}  # what to do when a descriptor is
        self._outgoing = Outgoing(name, self.incarnation, keys=keys, poller=self._poller, end=self._close)
        self.reply, self.notify = self._outgoing.reply, self._outgoing.notify
        """As :class:`Outgoing` has them: methods of this would cost each answer another call."""
        self._newcomers = Newcomers(
            listener,
            self.endpoint,
            name=name,
            keys=keys,
            poller=self._poller,
            clock=clock,
            take=self._take,
            refuse=self._refuse,
            end=self._close,
            wake_by=self.wake_by,
        )
        self._ready.update(
            (number, partial(self._newcomers.accept, number)) for number in self._newcomers.numbers
        )

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
        return len(self._newcomers)

    @property
    def requests(self) -> int:
        """How many requests have come."""
        return self._heard + sum(hearing.heard for hearing in list(self._hearings.values()))

    @property
    def malformed(self) -> int:
        """How many times somebody sent what was no request."""
        return self._offences.count

    @property
    def undeliverable(self) -> int:
        """How many answers were dropped, as the client had gone."""
        return self._outgoing.undeliverable

    def serve(self, service: Service) -> None:
        """Hand requests to ``service`` until :meth:`stop`; then close all connections. Blocks."""
        with self._lock:
            if self._serving or self._stopped:
                return
            self._serving = True
        self._service = service
        for kind, cls in BY_TYPE.items():
            if kind & REQUEST:
                self._handlers[STARTS[cls]] = READERS[STARTS[cls]], service.handler(cls)
        try:
            self._loop(service)
        finally:
            with self._lock:
                self._stopped = True
                self._close_all()

    def _loop(self, service: Service) -> None:
        poll, ready, now, settle = self._poller.poll, self._ready, self._clock.now, service.settle
        look = self._look
        came, looks = -math.inf, False
        ready[self._ear.fileno()] = self._end
        while not self._ending:
            seconds = None
            if self._due != math.inf:
                seconds = self._due - now()
                if seconds <= 0:
                    self._do_due()
                    continue
                if seconds > LONGEST_SECONDS:
                    seconds = LONGEST_SECONDS
            for number, _ in (looks and look(self._poll)) or poll(seconds, MOST_AT_ONCE):
                do = ready.get(number)
                if do is not None:  # or it has just been closed
                    do()
            settle()
            before, came = came, now()
            looks = came - before < RECENTLY
            self._strangers_heard = 0

    def _poll(self, seconds: float) -> list[tuple[int, int]]:
        return self._poller.poll(seconds, MOST_AT_ONCE)

    def _do_due(self) -> None:
        """Something is to be done though nothing came."""
        moment, self._due = self._clock.now(), math.inf
        self.wake_by(self._newcomers.do_due(moment))
        self.wake_by(self._service.do_due(moment))
        self._service.settle()

    def _end(self) -> None:
        """The bell rang."""
        self._service.stopping()
        self._ending = True

    def wake_by(self, moment: float) -> None:
        """Call the service's ``do_due`` at ``moment``, or sooner. Only in the server's thread."""
        if moment < self._due:
            self._due = moment

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

    # ---- connections ------------------------------------------------------------------------------------

    def _take(self, client: Client, said: bytes) -> None:
        """Hear ``client``, who has just come, and say ``said`` to it."""
        number = client.socket.fileno()
        self._ready[number] = partial(self._hear_stranger, client)
        self._poller.register(number, READ)
        if said:
            self._outgoing.send(client, said)

    def _welcome(self, client: Client) -> None:
        """``client`` has said who it is."""
        self._newcomers.welcome(client)
        client.surplus = len(self._clients) >= self._max_clients
        self._clients.add(client)
        if len(self._clients) > self._max_clients + SPARE:
            self._close(client)
            return
        self._ready[client.socket.fileno()] = partial(self._hear, client)
        if client.ends is not None:
            handlers = {} if client.surplus else self._handlers
            hearing = Hearing(client.ends, client, handlers, self._hear_otherwise, self._failed)
            self._hearings[client] = hearing
            number = client.ends[0].fileno()
            self._ready[number] = hearing.hear
            self._poller.register(number, READ)

    def _close(self, client: Client) -> None:
        if client.closed:
            return
        client.closed = True
        self._close_pipes(client)
        self._newcomers.forget(client)
        self._clients.discard(client)
        number = client.socket.fileno()
        del self._ready[number]
        self._poller.unregister(number)
        client.socket.close()
        self._service.gone(client)

    def _close_pipes(self, client: Client) -> None:
        hearing = self._hearings.pop(client, None)
        if hearing is not None:
            assert client.ends is not None
            self._heard += hearing.heard
            number = client.ends[0].fileno()
            del self._ready[number]
            self._poller.unregister(number)
        self._newcomers.forget_pipes(client)

    def _close_all(self) -> None:
        for client in self._clients:
            client.closed = True
            client.socket.close()
        self._clients.clear()
        self._ready.clear()
        self._poller.close()
        for closing in (self._newcomers, self._ear, self._bell):
            closing.close()

    # ---- in ---------------------------------------------------------------------------------------------

    def _hear_stranger(self, client: Client) -> None:
        """There is something to be done about ``client``, who has not said who it is."""
        if self._strangers_heard < STRANGERS_AT_ONCE:  # otherwise it comes up again
            self._strangers_heard += 1
            self._hear(client)

    def _hear(self, client: Client) -> None:
        """``client`` says something, or takes more."""
        if client.out:
            self._outgoing.flush(client)
            return
        data = b""
        client.pipe = None
        if client.at_rest and not client.surplus:
            try:
                data = client.socket.recv(CHUNK)
            except BlockingIOError:
                return
            except OSError:
                self._close(client)
                return
            request = read(data)
            if request is not None:
                self._handle(client, *request)
                return
            if not data:
                self._close(client)
                return
        self._read_on(client, data)

    def _hear_otherwise(self, client: Client, said: bytes | None) -> None:
        """``said``, which is not just a short request, came by a pipe."""
        if said is None:
            return
        if not said:
            self._close_pipes(client)
            return
        frame = frame_in(said)
        if frame is not None:
            self._hand_on(client, frame)
        else:
            self._refuse(client, f"{said[:16]!r} by a pipe is not one whole request")
            self._close(client)  # who knows where the next one begins

    def _read_on(self, client: Client, data: bytes) -> None:
        """``data``, if it is any, has come already; it is not just one short request."""
        try:
            frames = client.receive(data)
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
            self._outgoing.wait_to(client)

    def _hand_on(self, client: Client, frame: Frame) -> None:
        try:
            envelope, message = decode(frame)
        except ProtocolError as e:
            self._refuse(client, str(e))
            self._tell(client, frame, str(e))
            return
        if client.surplus:
            self._heard += 1
            self._service.unwelcome(client, envelope.message_id, self._max_clients)
            self._close(client)
            return
        self._handle(client, envelope.incarnation, envelope.message_id, message)

    def _handle(self, client: Client, line: int, number: int, message: Message) -> None:
        self._heard += 1
        try:
            handler = self._handlers.get(STARTS[type(message)])
            handle = self._service.handler(type(message)) if handler is None else handler[1]
            handle(client, line, number, message)
        except Exception:
            self._failed(message)

    def _failed(self, message: Message) -> None:
        logger.exception("%s: handling %s failed", self.name, type(message).__name__)

    def _tell(self, client: Client, frame: Frame, why: str) -> None:
        """Let a client of ours (of another release, perhaps) know; a stranger would not understand."""
        try:
            message_id = read_envelope(frame).message_id
        except ProtocolError:
            return
        self._service.misunderstood(client, message_id, why)

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else f"{len(self._clients)} clients, {self.requests} requests"
        return f"<RequestServer {self.name} at {self.endpoint}: {state}>"
