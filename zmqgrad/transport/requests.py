"""Questions and answers: a ROUTER that answers on the socket it was asked on, and its clients.

Unlike mailboxes (one-way), this serves many light clients of one server: the store. A client keeps a few
DEALERs and lends one to each request for as long as that takes, so the asking thread itself sends and
receives: a round trip costs no hop to another thread, and a long wait in one thread is in nobody's way. A
DEALER whose request was given up is closed, so a late answer never meets a later question.

The server's thread blocks in one ``recv``; stopping it is a message to itself over ``inproc``.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import secrets
import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol

import zmq

from zmqgrad.errors import AddressInUseError, ClosedError, ProtocolError, TransportError
from zmqgrad.runtime.blocking import about_to_block
from zmqgrad.runtime.clock import MONOTONIC, Clock, Deadline
from zmqgrad.transport.exposure import check_exposure
from zmqgrad.wire.codec import decode, encode
from zmqgrad.wire.frames import MAX_HEADER, read_envelope

if TYPE_CHECKING:
    from zmqgrad.transport.notices import NoticePublisher
    from zmqgrad.wire.messages import Message

logger = logging.getLogger(__name__)

LARGE = 64 << 10
"""Frames of at least so many bytes are handed to libzmq without a copy."""

MAX_STRANGERS = 1000
"""How many senders of garbage are remembered, so that each is logged once."""

MAX_IDLE = 8
"""How many DEALERs a client keeps between requests."""

SLICE_MS = 1000
"""A DEALER's receive timeout. Only a wait shorter than this must set another."""


LAST_WORDS_MS = 250
"""How long the replies of a stopping server may take to leave."""


class Service(Protocol):
    """What a server serves; called in the server's thread alone."""

    def handle(self, client: bytes, message_id: int, message: Message) -> None:
        """Answer by :meth:`RequestServer.reply`, now or in a later call."""
        ...

    def misunderstood(self, client: bytes, message_id: int, why: str) -> None:
        """A request of ours was malformed; it has been logged."""
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

    Raises:
        AddressInUseError: if another socket listens there.
        ConfigurationError: if others than this host could connect, and nothing protects the traffic.
        TransportError: if the address cannot be listened on.
    """

    def __init__(self, name: str, address: str, *, clock: Clock = MONOTONIC) -> None:
        self.name = name
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.incarnation = secrets.randbits(63)
        self._clock = clock
        self._stop_token = secrets.token_bytes(16)
        self._inproc = f"inproc://{name}-{self._stop_token.hex()}"
        self._state_lock = threading.Lock()  # guards _stopped and _serving
        self._stopped = False
        self._serving = False
        self._strangers: set[bytes] = set()
        self.requests = 0
        self.malformed = 0
        self.undeliverable = 0
        self._router = self.context.socket(zmq.ROUTER)
        try:
            set_up(self._router)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self.endpoint = bind(self._router, address)
            self._router.bind(self._inproc)
        except BaseException:
            self._router.close(linger=0)
            self.context.term()
            raise

    @property
    def port(self) -> int:
        """The tcp port."""
        return int(self.endpoint.rpartition(":")[2])

    def serve(self, service: Service, publisher: NoticePublisher | None = None) -> None:
        """Hand requests to ``service`` until :meth:`stop`; then close the socket. Blocks.

        Subscriptions at ``publisher`` are looked at while it waits for one.
        """
        with self._state_lock:
            if self._serving or self._stopped:
                return
            self._serving = True
        router, now, linger, armed = self._router, self._clock.now, 0, -1
        try:
            while True:
                due = service.next_due()
                if due != math.inf:
                    moment = now()
                    if moment >= due:
                        service.do_due(moment)
                        continue
                    timeout = _milliseconds(due - moment)
                else:
                    timeout = -1
                if publisher is not None and publisher.expecting:
                    if not publisher.wait_beside(router, timeout):
                        continue
                elif timeout != armed:
                    router.setsockopt(zmq.RCVTIMEO, timeout)
                    armed = timeout
                try:
                    client = router.recv()
                except zmq.Again:
                    continue
                frame = router.recv()
                if router.getsockopt(zmq.RCVMORE):
                    self._refuse(client, self._drop_rest())
                elif frame == self._stop_token:
                    service.stopping()
                    linger = LAST_WORDS_MS
                    return
                else:
                    self._hand_on(service, client, frame)
        finally:
            with self._state_lock:  # a stop() under way finds the socket still open
                self._stopped = True
                router.close(linger=linger)

    def _hand_on(self, service: Service, client: bytes, frame: bytes) -> None:
        try:
            envelope, message = decode(frame)
        except ProtocolError as e:
            self._refuse(client, str(e))
            self._tell(service, client, frame, str(e))
            return
        self.requests += 1
        try:
            service.handle(client, envelope.message_id, message)
        except Exception:
            logger.exception("%s: handling %s failed", self.name, type(message).__name__)

    def _tell(self, service: Service, client: bytes, frame: bytes, why: str) -> None:
        """Let a client of ours (of another release, perhaps) know; a stranger would not understand."""
        try:
            message_id = read_envelope(frame).message_id
        except ProtocolError:
            return
        service.misunderstood(client, message_id, why)

    def _drop_rest(self) -> str:
        frames = 1
        while self._router.getsockopt(zmq.RCVMORE):
            self._router.recv(copy=False)
            frames += 1
        return f"a request of {frames} frames (expected one)"

    def _refuse(self, client: bytes, why: str) -> None:
        self.malformed += 1
        if client not in self._strangers and len(self._strangers) < MAX_STRANGERS:
            self._strangers.add(client)
            logger.warning("%s at %s: dropped a malformed request (%s)", self.name, self.endpoint, why)

    def reply(self, client: bytes, message_id: int, message: Message) -> None:
        """Send an answer; only in the server's thread. It is dropped, and counted, if the client has gone."""
        frame = encode(message, 0, self.incarnation, message_id)
        try:
            self._router.send(client, zmq.SNDMORE | zmq.NOBLOCK)
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:
                raise
            self.undeliverable += 1
            return
        send(self._router, frame)

    def stop(self) -> None:
        """Let :meth:`serve` return. Safe from any thread; idempotent."""
        with self._state_lock:
            if self._stopped:
                return
            self._stopped = True
            if not self._serving:
                self._router.close(linger=0)
                return
            with self.context.socket(zmq.DEALER) as waker:
                waker.linger = -1  # inproc: delivered in memory, at once
                waker.connect(self._inproc)
                waker.send(self._stop_token)

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else f"{self.requests} requests"
        return f"<RequestServer {self.name} at {self.endpoint}: {state}>"


class RequestClient:
    """Asks the server at ``address``, from any thread. Connects at the first request, and by itself anew."""

    def __init__(self, address: str, *, name: str = "client") -> None:
        self.address = address
        self.name = name
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._incarnation = secrets.randbits(63)
        self._ids = itertools.count(1)
        self._pid = os.getpid()
        self._idle: deque[zmq.Socket[bytes]] = deque()
        self._closed = False
        self._close_lock = threading.Lock()

    def request(self, message: Message, deadline: Deadline) -> Message:
        """Send ``message`` and give the answer. A Ctrl-C in the meantime gives the request up.

        Raises:
            TimeoutError: if there is no answer by ``deadline``.
            ClosedError: after, or by, :meth:`close`; and in a fork of the process that made this client.
            ProtocolError: if what comes back is no message of ours.
        """
        message_id = next(self._ids)
        frame = encode(message, 0, self._incarnation, message_id)
        socket = self._take()
        try:
            send(socket, frame)
            answer = self._receive(socket, message_id, deadline)
        except zmq.ContextTerminated as e:
            socket.close(linger=0)
            raise ClosedError(f"{self.name}, connected to {self.address}, was closed") from e
        except BaseException:
            socket.close(linger=0)
            raise
        self._give_back(socket)
        return answer

    def _receive(self, socket: zmq.Socket[bytes], message_id: int, deadline: Deadline) -> Message:
        sliced = deadline.left() * 1000 >= SLICE_MS
        with about_to_block():
            while True:
                if not sliced:
                    socket.setsockopt(zmq.RCVTIMEO, _milliseconds(deadline.left()))
                try:
                    frame = socket.recv()
                    break
                except zmq.Again:
                    if deadline.passed():
                        raise TimeoutError(f"no answer from {self.address}") from None
                    sliced = deadline.left() * 1000 >= SLICE_MS
        if not sliced:
            socket.setsockopt(zmq.RCVTIMEO, SLICE_MS)
        envelope, answer = decode(frame)
        if envelope.message_id != message_id:
            raise ProtocolError(f"{self.address} answered request {envelope.message_id}, not {message_id}")
        return answer

    def _take(self) -> zmq.Socket[bytes]:
        if self._closed:
            raise ClosedError(f"{self.name}, connected to {self.address}, is closed")
        if os.getpid() != self._pid:
            raise ClosedError(
                f"{self.name}, connected to {self.address}, belongs to process {self._pid} and cannot be "
                f"used in a fork of it: start processes by spawn or forkserver, or connect in the child"
            )
        try:
            return self._idle.pop()
        except IndexError:
            return self._connect()

    def _connect(self) -> zmq.Socket[bytes]:
        try:
            socket = self.context.socket(zmq.DEALER)
        except zmq.ZMQError as e:
            if self._closed:
                raise ClosedError(f"{self.name}, connected to {self.address}, is closed") from e
            raise TransportError(f"cannot open a socket to {self.address}: {e}") from e
        try:
            set_up(socket)
            socket.setsockopt(zmq.RCVTIMEO, SLICE_MS)
            connect(socket, self.address)
        except BaseException:
            socket.close(linger=0)
            raise
        return socket

    def _give_back(self, socket: zmq.Socket[bytes]) -> None:
        if len(self._idle) >= MAX_IDLE:
            socket.close(linger=0)
            return
        self._idle.append(socket)
        if self._closed:  # close() may have looked before we appended
            self._close_idle()

    def _close_idle(self) -> None:
        while True:
            try:
                self._idle.pop().close(linger=0)
            except IndexError:
                return

    def close(self) -> None:
        """Disconnect; requests under way end with ``ClosedError``. Idempotent."""
        with self._close_lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
            self._close_idle()
            self.context.term()  # wakes those who wait; returns once they have closed their sockets

    def __repr__(self) -> str:
        return f"<RequestClient {self.name} of {self.address}{': closed' if self._closed else ''}>"


# ---- for this floor's sockets ----------------------------------------------------------------------------


def set_up(socket: zmq.Socket[bytes]) -> None:
    """What every socket gets at birth: no linger, no high-water mark, a bound on a frame's size."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_HEADER)
    socket.setsockopt(zmq.RECONNECT_IVL, 10)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)


def bind(socket: zmq.Socket[bytes], address: str) -> str:
    """Listen on ``address``; gives it with the port that was picked."""
    check_exposure(address)
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.bind(address)
    except zmq.ZMQError as e:
        if e.errno == zmq.EADDRINUSE:
            raise AddressInUseError(
                f"cannot listen on {address}: another socket does. Choose another port, or end the process "
                f"that has this one"
            ) from e
        raise TransportError(f"cannot listen on {address}: {e}") from e
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def connect(socket: zmq.Socket[bytes], address: str) -> None:
    """Connect to ``address``, now or whenever somebody listens there."""
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.connect(address)
    except zmq.ZMQError as e:
        raise TransportError(f"cannot connect to {address}: {e}") from e


def send(socket: zmq.Socket[bytes], frame: bytearray) -> None:
    """Queue a last frame; high-water marks are zero, so this never blocks."""
    socket.send(frame, zmq.NOBLOCK, copy=len(frame) < LARGE)


def _milliseconds(seconds: float) -> int:
    """Rounded up, so that a wait of so long does not end before its time. At most a day."""
    return math.ceil(min(seconds, 86400.0) * 1000)
