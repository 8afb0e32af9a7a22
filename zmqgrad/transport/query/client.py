"""Sends queries to one server, from any thread: the thread that asks sends and receives itself.

A client keeps a few *channels* and lends one to each query for as long as that takes, so a round trip costs
no hop to another thread, and a long wait in one thread is in nobody's way. A channel is a DEALER; and, where
the server is on this host, a connection on the fast path (:mod:`~zmqgrad.transport.local`), which the reply
to its first ping tells of. Only what is too large for that goes by the DEALER then.

Connections break, and servers are started again. So a channel has an id and numbers its queries, one at a
time, and repeats a query until the reply comes: at once when it has connected again, and every few seconds.
The server replies to a repeated query as it did before, and keeps one that waits only while it is repeated.
"""

from __future__ import annotations

import math
import os
import secrets
import select
import socket as sockets
import threading
import weakref
from collections import deque
from typing import NamedTuple

import zmq

from zmqgrad.errors import ClosedError, ProtocolError, SecretError, TransportError
from zmqgrad.runtime import blocking
from zmqgrad.runtime.clock import MONOTONIC, Clock
from zmqgrad.runtime.spinning import Spinner
from zmqgrad.transport import local
from zmqgrad.transport.context import acquire_context, release_context
from zmqgrad.transport.local.connection import MAX_PACKET_BYTES, LocalConnection
from zmqgrad.transport.monitor import (
    CONNECTED,
    DISCONNECTED,
    HANDSHAKE_CUT,
    HANDSHAKE_DENIED,
    HANDSHAKE_FAILED,
    HANDSHAKE_MALFORMED,
    MECHANISM_MISMATCH,
    SocketMonitor,
)
from zmqgrad.transport.query import LOCAL_JOB, RECENTLY_SECONDS, ZERO_COPY_BYTES, set_up, spin_budget
from zmqgrad.transport.security import Keys
from zmqgrad.transport.wakeup import Wakeup
from zmqgrad.transport.zap import key_caller
from zmqgrad.wire.codec import COPY_LIMIT_BYTES, decode, encode
from zmqgrad.wire.messages import Message, Refusal, StorePing, StorePong, StoreRefused

MAX_IDLE = 8
"""How many channels a client keeps between queries."""

REPEAT_SECONDS = (1.0, 2.0, 5.0)
"""When a query is repeated for the first, second and third time; then as after the last one."""

RECONNECT_MS, MAX_RECONNECT_MS = 10, 250
"""Pause between attempts to connect, which doubles from the first to the second."""

CONNECT_MS = 5000
"""How long one attempt may take."""

SUSPICIOUS_HANDSHAKES = 3
"""After so many handshakes that the server cut off, see whether it has another secret."""

PROBE_SECONDS = 2.0

QUICK_SECONDS = 0.1
"""Within this time nearly all queries are replied to."""

_MAX_POLL_MS = 1 << 30
_NOBLOCK = int(zmq.NOBLOCK)
_PING = 0
"""The number of a channel's own pings. Queries begin with 1."""

_clients: weakref.WeakSet[QueryClient] = weakref.WeakSet()


class _Server(NamedTuple):
    """What a ping has told: the server's incarnation, and the endpoint of its fast path."""

    incarnation: int
    endpoint: str


class QueryClient:
    """Sends queries to the server at ``address``. Connects at the first one, and again by itself.

    Safe to use from any thread. You must close it.

    Args:
        keys: those of the job; None: nothing is encrypted.
        fast_path: use it, where the server is on this host and the system has what it needs.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str = "client",
        keys: Keys | None = None,
        fast_path: bool = True,
        clock: Clock = MONOTONIC,
    ) -> None:
        self.address = address
        self.name = name
        self.keys = keys
        self.clock = clock
        self.fast_path = fast_path and local.supported()
        self.server: _Server | None = None
        """What is known of the server, if it has a fast path."""
        self.was_connected = False
        """Has a handshake ever succeeded?"""
        self.closed = False
        self.closing = Wakeup()
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards _channels and the setting of closed
        self._idle: deque[_Channel] = deque()
        self._channels: set[_Channel] = set()
        _clients.add(self)

    def request(self, message: Message, seconds: float) -> Message:
        """Send ``message`` and return the reply. A Ctrl-C in the meantime gives the query up.

        Raises:
            TimeoutError: if there is no reply within ``seconds``; says what was seen last.
            ClosedError: after, or by, :meth:`close`; and in a fork of the process that made this client.
            ProtocolError: if ``message`` cannot be encoded, or the reply is no message of ours.
            SecretError: if the server has another secret, or one of the two ends has none.
            TransportError: if the system has no socket left.
        """
        try:
            channel = self._idle.pop()  # there is none once this is closed, nor in a fork
        except IndexError:
            channel = self._new_channel()
        try:
            if not blocking.used_by_a_pool or blocking.thread_state.pool is None:
                reply = channel.request(message, seconds)
            else:
                with blocking.thread_state.pool.blocked():
                    reply = channel.request(message, seconds)
        except BaseException:
            self._drop(channel)
            raise
        if len(self._idle) < MAX_IDLE:
            self._idle.append(channel)
            if not self.closed:  # otherwise close() may have looked before we appended
                return reply
            try:
                self._idle.remove(channel)
            except ValueError:
                return reply  # close() has found it
        self._drop(channel)
        return reply

    def _new_channel(self) -> _Channel:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"{self.name}, connected to {self.address}, belongs to process {self._pid} and cannot be "
                f"used in a fork of it: start processes by spawn or forkserver, or connect in the child"
            )
        with self._lock:
            if self.closed:
                raise self.closed_error()
            channel = _Channel(self)
            self._channels.add(channel)
        return channel

    def _drop(self, channel: _Channel) -> None:
        """Close ``channel``, which the calling thread has used."""
        channel.close()
        with self._lock:
            self._channels.discard(channel)
            if self.closed and not self._channels:
                self.closing.close()

    def closed_error(self) -> ClosedError:
        """What requests raise after, and at, :meth:`close`."""
        return ClosedError(f"{self.name}, connected to {self.address}, is closed")

    def close(self) -> None:
        """Disconnect; queries under way end with ``ClosedError``. Idempotent."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self.closed = True
            if not self._channels:
                self.closing.close()
            channels = list(self._channels)
        self.closing.set()
        for channel in channels:
            channel.hang_up()
        while self._idle:
            try:
                channel = self._idle.pop()
            except IndexError:
                break  # somebody took it, and finds that this is closed
            self._drop(channel)

    def forget(self) -> None:
        """In a fork: the channels are the other process's."""
        self._idle.clear()
        for channel in self._channels:
            channel.abandon()

    def __repr__(self) -> str:
        return f"<QueryClient {self.name} of {self.address}{': closed' if self.closed else ''}>"


class _Channel:
    """One query at a time, by one thread at a time."""

    def __init__(self, client: QueryClient) -> None:
        self.id = secrets.randbits(63)
        self._number = 0  # of the query under way, or the last one
        self._packet = bytearray()
        self._began = -math.inf
        self._client = client
        self._now = client.clock.now
        self._dealer: zmq.Socket[bytes] | None = None
        self._dealer_number = -1
        self._monitor: SocketMonitor | None = None
        self._large = False  # the query under way, or its reply, is too large for the fast path
        self._keep_dealer = False  # it has carried what is too large for the fast path
        self._connected = False
        self._lost = False  # the DEALER's connection broke: what was sent by it may be lost
        self._cut = 0  # handshakes in a row that the server cut off
        self._trouble = ""  # what was seen last
        self._heard = False  # anything, since the last repetition
        self._local: LocalConnection | None = None
        self._local_number = -1
        self._accepted = False  # the server has accepted it
        self._quick: LocalConnection | None = None  # the same, if it is accepted
        self._spin = Spinner(spin_budget()).spin
        self._poll = select.poll()
        self._poll_for = self._poll.poll
        self._poll.register(client.closing.number, select.POLLIN)

    def request(self, message: Message, seconds: float) -> Message:
        """Send ``message``, again and again, until the reply comes."""
        self._number = number = self._number + 1
        packet = encode(message, 0, self.id, number)
        before, self._began = self._began, self._now()
        fast, sent, data = self._quick, False, None
        if fast is not None and seconds >= QUICK_SECONDS and len(packet) <= MAX_PACKET_BYTES:
            # Nearly always the reply comes at once. That takes few steps here: processes that take turns
            # find little of their code in the processor's caches, and pay for each line of it.
            try:
                fast.send(packet)
                sent = True
                if self._began - before < RECENTLY_SECONDS:
                    self._spin(self._poll_for)
                data = fast.receive(0)
                envelope, reply = decode(data)
                if envelope.message_id == number and type(reply) is not StoreRefused:
                    return reply
            except BlockingIOError:
                pass  # it takes longer
            except OSError as e:
                self._close_local(str(e))
                sent = False
            except ProtocolError:
                pass  # _insist() says what is wrong
        return self._insist(packet, self._began + seconds, sent, data)

    def _insist(self, packet: bytearray, end: float, sent: bool, data: bytes | None) -> Message:
        """Go on with the query under way until ``end``; ``data`` has come by the fast path already."""
        self._packet = packet
        self._large = len(packet) > MAX_PACKET_BYTES
        self._heard = True
        repeats = iter(REPEAT_SECONDS)
        now = self._now()
        repeat_at = now + next(repeats)
        if not sent:
            self._send()
        reply = None if data is None else self._take_local(data)
        while reply is None and (reply := self._receive(min(end, repeat_at) - now)) is None:
            now = self._now()
            if now >= end:
                raise TimeoutError(self._explain())
            if now >= repeat_at:
                repeat_at = now + next(repeats, REPEAT_SECONDS[-1])
                self._repeat()
        if self._local is not None and self._dealer is not None and not self._keep_dealer:
            self._close_dealer()
        self._quick = self._local if self._accepted else None
        return reply

    def _receive(self, seconds: float) -> Message | None:
        """The reply, or None if it has not come within ``seconds``, or something else has."""
        if self._dealer is not None:
            reply = self._read_dealer()
            if reply is not None:
                return reply
        for descriptor, _ in self._spin(self._poll_for) or self._poll_for(_milliseconds(seconds)):
            if descriptor == self._local_number:
                reply = self._read_local()
                if reply is not None:
                    return reply
            elif descriptor != self._dealer_number:  # that is read next time
                if self._client.closed:
                    raise self._client.closed_error()
                self._read_monitor()
        return None

    def _explain(self) -> str:
        trouble = f" ({self._trouble})" if self._trouble else ""
        return f"no reply from {self._client.address}{trouble}"

    # ---- sending ----------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Send the query by the best way there is; open one, if there is none."""
        fast = self._local
        if fast is None and self._client.server is not None and self._dealer is None:
            fast = self._open_local()
        if fast is not None and not self._large:
            try:
                if not fast.backlog():
                    fast.send(self._packet)
                return
            except OSError as e:
                self._close_local(f"{e}")
        self._send_by_dealer()

    def _send_by_dealer(self) -> None:
        if self._local is not None:
            self._keep_dealer = True
        if self._dealer is None:
            self._open_dealer()
            assert self._dealer is not None
        packet = self._packet
        self._dealer.send(packet, _NOBLOCK, copy=len(packet) < ZERO_COPY_BYTES)

    def _repeat(self) -> None:
        """No reply has come for a while: the server renews a query that waits, or it did not arrive."""
        if self._dealer is not None and (self._local is None or self._large):
            if not self._connected:
                return  # it lies in the socket, and leaves with the next connection
            if not self._heard:
                self._close_dealer()  # nobody is at the other end, though nothing says so
            else:
                self._heard = False
                self._ping()
        self._send()

    def _ping(self) -> None:
        """Ask for a sign of life, and for the address of the fast path."""
        assert self._dealer is not None
        ping = encode(StorePing(secrets.token_hex(8)), 0, self.id, _PING)
        self._dealer.send(ping, _NOBLOCK)

    def _open_dealer(self) -> None:
        client = self._client
        context = acquire_context()
        try:
            dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        except zmq.ZMQError as e:
            release_context()
            raise TransportError(f"no socket can be had to connect to {client.address}: {e}") from e
        self._dealer = dealer
        self._connected = self._lost = False
        set_up_caller(dealer, client.address, client.keys)
        try:
            self._monitor = SocketMonitor(dealer, CONNECTED | DISCONNECTED | HANDSHAKE_FAILED)
            self._dealer_number = int(dealer.getsockopt(zmq.FD))
            self._poll.register(self._dealer_number, select.POLLIN)
            self._poll.register(self._monitor.number, select.POLLIN)
            dealer.connect(client.address)
        except zmq.ZMQError as e:
            raise TransportError(f"cannot connect to {client.address}: {e}") from e
        self._ping()

    def _close_dealer(self) -> None:
        dealer, self._dealer, monitor, self._monitor = self._dealer, None, self._monitor, None
        self._keep_dealer = False
        if monitor is not None:
            self._poll.unregister(monitor.number)
            self._poll.unregister(self._dealer_number)
            monitor.close()
        if dealer is not None:
            dealer.close(linger=0)
            release_context()
        self._dealer_number = -1

    # ---- receiving --------------------------------------------------------------------------------------

    def _read_dealer(self) -> Message | None:
        """The reply, if it has come by the DEALER. Its descriptor does not tell again of what it has told."""
        assert self._dealer is not None
        while True:
            try:
                frames = self._dealer.recv_multipart(_NOBLOCK, copy=False)
            except zmq.Again:
                return None
            if len(frames) != 1:
                raise ProtocolError(
                    f"{self._client.address} replied with {len(frames)} frames (expected one): is it a store?"
                )
            frame = frames[0]
            reply = self._take(frame.bytes if len(frame) <= COPY_LIMIT_BYTES else frame.buffer)
            if reply is not None:
                return reply

    def _read_local(self) -> Message | None:
        """The reply, if it has come by the fast path."""
        fast = self._local
        assert fast is not None
        try:
            if fast.backlog() and fast.flush():
                self._poll.modify(self._local_number, select.POLLIN)
            if not fast.is_ready():
                return None
            self._accepted = True
            return self._take_local(fast.receive())
        except BlockingIOError:
            return None
        except OSError as e:
            self._close_local(str(e))
            self._send()
            return None

    def _take_local(self, data: bytes) -> Message | None:
        if data:
            return self._take(data)
        if self._client.closed:
            raise self._client.closed_error()
        self._close_local("the server closed the connection")
        self._send()
        return None

    def _take(self, data: bytes | memoryview) -> Message | None:
        """A message that has come, if it is the reply.

        Raises:
            ProtocolError: if it is none of ours.
        """
        envelope, reply = decode(data)
        self._heard = True
        if envelope.message_id == self._number:
            if type(reply) is StoreRefused and reply.reason is Refusal.TOO_LARGE:
                if not self._large:
                    self._large = True
                    self._send()
                return None
            return reply
        if envelope.message_id == _PING:
            if type(reply) is StorePong:
                self._note_pong(envelope.incarnation, reply.endpoint)
            elif type(reply) is StoreRefused:
                return reply  # one client too many
        elif envelope.message_id > self._number:
            raise ProtocolError(
                f"{self._client.address} replied to query {envelope.message_id}, not to {self._number}"
            )
        return None  # to a query that was repeated

    def _note_pong(self, incarnation: int, endpoint: str) -> None:
        if not self._client.fast_path or not endpoint:
            return
        self._client.server = _Server(incarnation, endpoint)
        if self._local is None:
            self._open_local()

    def _read_monitor(self) -> None:
        while self._monitor is not None and (events := self._monitor.read()):
            for kind, value in events:
                if kind == CONNECTED:
                    self._connected = self._client.was_connected = True
                    self._cut = 0
                    if self._lost:
                        self._lost = False
                        self._ping()
                        self._send_by_dealer()
                elif kind == DISCONNECTED:
                    self._trouble = "it closes connections" if self._connected else self._trouble
                    self._connected, self._lost = False, self._lost or self._connected
                else:
                    self._note_failure(kind, value)

    def _note_failure(self, kind: int, value: int) -> None:
        """A handshake has failed.

        Raises:
            SecretError: if it will go on failing.
        """
        client = self._client
        if kind == HANDSHAKE_DENIED or (kind == HANDSHAKE_MALFORMED and value == MECHANISM_MISMATCH):
            if client.keys is None:
                raise SecretError("the other end wants a secret, and there is none here")
            raise SecretError("the other end has no secret, or another one")
        self._trouble = "connections are cut off during the handshake: is it a store?"
        if kind != HANDSHAKE_CUT or client.keys is None or client.was_connected:
            return
        self._cut += 1
        if self._cut >= SUSPICIOUS_HANDSHAKES:
            self._cut = 0
            if speaks_curve(client.address):
                raise SecretError("the other end has another secret")

    # ---- the fast path ----------------------------------------------------------------------------------

    def _open_local(self) -> LocalConnection | None:
        """Connect by the fast path, if the server is on this host. What is sent waits until it accepts."""
        server = self._client.server
        if server is None:
            return None
        try:
            fast = local.connect(server.endpoint, LOCAL_JOB, server.incarnation, self._note_backlog)
        except BlockingIOError:
            return None  # too many wait to be accepted
        except OSError:
            self._client.server = None  # another host, or another container
            return None
        fast.limit_waits(QUICK_SECONDS)
        self._local, self._local_number = fast, fast.number
        self._poll.register(fast.number, select.POLLIN)
        fast.send(encode(StorePing(""), 0, self.id, _PING))  # this client is one that came by tcp
        return fast

    def _note_backlog(self, connection: LocalConnection) -> None:
        self._poll.modify(connection.number, select.POLLIN | select.POLLOUT)

    def _close_local(self, reason: str) -> None:
        fast, self._local, self._quick = self._local, None, None
        self._accepted = False
        self._trouble = reason
        if fast is not None:
            self._client.server = None  # as it may have been started again
            self._poll.unregister(self._local_number)
            self._local_number = -1
            fast.close()

    def hang_up(self) -> None:
        """From any thread, for the one that waits: the client is closed."""
        fast = self._quick
        if fast is not None:
            fast.hang_up()

    def close(self) -> None:
        """By the thread that has used it. Idempotent."""
        self._close_dealer()
        if self._local is not None:
            self._close_local("closed")

    def abandon(self) -> None:
        """In a fork: the connections are the other process's."""
        if self._local is not None:
            self._local.close()


def set_up_caller(socket: zmq.Socket[bytes], address: str, keys: Keys | None) -> None:
    """What a socket that connects to a server is given at birth."""
    set_up(socket)
    socket.ipv6 = _needs_ipv6(address)
    socket.reconnect_ivl = RECONNECT_MS
    socket.reconnect_ivl_max = MAX_RECONNECT_MS
    socket.connect_timeout = CONNECT_MS
    if keys is not None:
        key_caller(socket, keys)


def _needs_ipv6(address: str) -> bool:
    """Whether ``address`` is of IPv6, or a name that has no other: libzmq tries one address of a name."""
    if not address.startswith("tcp://"):
        return False  # an ipc endpoint has no host to resolve: that could take seconds
    host = address.removeprefix("tcp://").rpartition(":")[0]
    if "[" in host:
        return True
    try:
        sockets.getaddrinfo(host, None, sockets.AF_INET)
        return False
    except OSError:
        pass
    try:
        sockets.getaddrinfo(host, None, sockets.AF_INET6)
        return True
    except OSError:
        return False  # it may be known later


def speaks_curve(address: str) -> bool:
    """Whether a server that asks for a secret is at ``address``; it says so to one who offers none."""
    context = acquire_context()
    try:
        with context.socket(zmq.DEALER) as probe:
            set_up_caller(probe, address, None)
            monitor = SocketMonitor(probe, CONNECTED | HANDSHAKE_FAILED)
            try:
                probe.connect(address)
                poll = select.poll()
                poll.register(monitor.number, select.POLLIN)
                poll.poll(PROBE_SECONDS * 1000)
                return any(event.value == MECHANISM_MISMATCH for event in monitor.read())
            finally:
                monitor.close()
    finally:
        release_context()


def _milliseconds(seconds: float) -> int:
    """For ``poll``, which waits for whole ones: at least one, as what is left of the last must pass."""
    return min(_MAX_POLL_MS, max(1, math.ceil(seconds * 1000)) if seconds < 1e6 else _MAX_POLL_MS)


def _forget_channels() -> None:
    for client in _clients:
        client.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_channels)
