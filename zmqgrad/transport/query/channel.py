"""A channel: sends one query at a time and receives the reply, in the calling thread.

A channel has an id and numbers its queries. It sends by a DEALER; once the server has announced that it is on
this host, by the fast path (:mod:`~zmqgrad.transport.local`). Connections break and servers restart, so a
query is repeated until its reply arrives: as soon as the channel has reconnected, and every few seconds. The
server replies to a repetition as it did before, and drops a waiting query that is no longer repeated.

A query that may wait names a timeout, which the server counts from when it reads the query: late, if either
was stopped or the way was slow. So at its own deadline the channel repeats it with a timeout of 0, and the
server replies what is true then.
"""

from __future__ import annotations

import math
import secrets
import select
from collections.abc import Callable

from msgspec.structs import replace

from zmqgrad.errors import ProtocolError, TransportError
from zmqgrad.runtime.clock import Clock
from zmqgrad.runtime.polling import SPENT, Wakeup, to_milliseconds
from zmqgrad.runtime.spinning import Spinner
from zmqgrad.transport import local
from zmqgrad.transport.heartbeat.failure_detector import is_reachable
from zmqgrad.transport.local.connection import LARGE, MAX_PACKET_BYTES, LocalConnection
from zmqgrad.transport.local.handshake import PROTOCOL, Hello
from zmqgrad.transport.query import spin_budget
from zmqgrad.transport.query.dealer import DealerConnection, LocalAddress, ServerInfo
from zmqgrad.transport.query.pending import PING_ID, PendingQuery
from zmqgrad.transport.security import local_key
from zmqgrad.wire.codec import decode_query, encode
from zmqgrad.wire.frames import MAX_HEADER_BYTES
from zmqgrad.wire.messages import Message, Refusal, StorePing, StorePong, StoreRefused

QUICK_SECONDS = 0.1
"""Nearly all replies arrive within this time."""


class QueryChannel:
    """Sends one query at a time. Used by one thread at a time.

    Args:
        server: shared by the channels of a client.
        fast_path: whether the fast path may be used.
        closing: set when the client is closed. Its descriptor is closed with the last channel.
        check_open: raises ClosedError if the client is closed.
    """

    def __init__(
        self,
        server: ServerInfo,
        fast_path: bool,
        closing: Wakeup,
        check_open: Callable[[], None],
        clock: Clock,
    ) -> None:
        self.id = secrets.randbits(63)
        self._server = server
        self._fast_path = fast_path
        self._check_open = check_open
        self._now = clock.now
        self.last_request_id = PING_ID
        self._query = PendingQuery(self.last_request_id, bytearray(), 0.0, 0.0)
        self._queued: PendingQuery | None = None  # was sent by the fast path last, and may wait there
        self._trouble = ""  # the last problem, for error messages
        self._dealer: DealerConnection | None = None
        self._local: LocalConnection | None = None
        self._accepted: LocalConnection | None = (
            None  # the same, once the server has read our ping there: it counts us
        )
        self._spin = Spinner(spin_budget()).spin
        self._poll = select.poll()
        self._poll_for = self._poll.poll
        self._closing = closing
        self._poll.register(closing.fd, select.POLLIN)

    def request(self, message: Message, seconds: float) -> Message:
        """Sends ``message`` until its reply arrives. Arguments and errors as ``QueryClient.request``."""
        self.last_request_id = request_id = self.last_request_id + 1
        packet = encode(message, 0, self.id, request_id)
        started = self._now()
        fast, sent, data = self._accepted, False, None
        if fast is not None and seconds >= QUICK_SECONDS and len(packet) <= MAX_PACKET_BYTES:
            # Nearly all replies arrive at once. Few steps here: processes that take turns find little of
            # their code in the caches, and pay for each line.
            try:
                fast.send(packet)
                sent = True
                self._spin(self._poll_for)
                data = fast.receive(0)
                _, replied, reply = decode_query(data)
                if replied == request_id and type(reply) is not StoreRefused:
                    return reply
            except BlockingIOError:
                pass  # the reply takes longer
            except OSError as e:
                local.check_is_of_system(e)
                self._close_local(str(e))
                sent = False
            except ProtocolError:
                pass  # _complete() decodes it again, and reports the error
        waits = getattr(message, "timeout", 0.0)
        last_call_at = started + waits if waits else math.inf
        self._query = PendingQuery(request_id, packet, self._now(), started + seconds, last_call_at)
        return self._complete(message, sent, data)

    def _complete(self, message: Message, sent: bool, data: bytes | None) -> Message:
        """Repeats the query until its reply arrives; ``data`` was already received by the fast path."""
        query = self._query
        if self._server.ended:
            raise TransportError(self._server.ended)
        if sent:
            self._queued = query
        else:
            self._send()
        fast = self._local
        reply = None if data is None or fast is None else self._on_local_packet(fast, data)
        while reply is None and (reply := self._receive(query.seconds_to_wait(self._now()))) is None:
            now = self._now()
            is_over = query.is_over(now)
            if query.must_end(now):
                query.packet = encode(replace(message, timeout=0.0), 0, self.id, query.request_id)
                self._queued = None
                self._send()
            elif is_over:
                if self._dealer is not None:
                    self._dealer.check_secret()  # there was no time for as many handshakes as prove it
                raise TimeoutError(self._explain())
            elif query.must_repeat(now):
                self._repeat()
        if self._accepted is not None and self._dealer is not None:
            self._close_dealer()
        if type(reply) is StoreRefused and reply.reason is Refusal.LIMIT:
            self._close_dealer()  # the server has refused this connection for good
        return reply

    def _explain(self) -> str:
        trouble = (self._dealer is not None and self._dealer.trouble) or self._trouble
        return f"no reply from {self._server.address}{f' ({trouble})' if trouble else ''}"

    # ---- sending ----------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Sends the query by the fast path if that is open, else by the DEALER."""
        fast, is_new = self._local, False
        if fast is None and self._dealer is None:
            fast, is_new = self._open_local(), True
        if fast is not None:
            try:
                if is_new or self._queued is not self._query or not fast.backlog():
                    send = fast.send if len(self._query.packet) <= MAX_PACKET_BYTES else fast.send_large
                    send(self._query.packet)
                    self._queued = self._query
                return
            except ConnectionError:
                return  # a reply may be queued before the end of the connection, which sends this again
            except OSError as e:
                local.check_is_of_system(e)
                self._close_local(str(e))
        self._send_by_dealer()

    def _send_by_dealer(self) -> None:
        if self._dealer is None:
            self._check_open()  # the fast path may have ended because the client is closed
            self._dealer = DealerConnection(self._server, self._poll, self.id)
        self._dealer.send(self._query.packet)

    def _repeat(self) -> None:
        """Sends the query again: either it was lost, or it waits at the server and must be renewed."""
        if self._dealer is not None and self._local is None:
            if self._dealer.refused:
                self._close_dealer()
            elif not self._dealer.connected:
                self._check_not_ended()
                return  # it is queued in the socket, and leaves with the next connection
            elif self._query.peer_responded:
                self._query.peer_responded = False
                self._dealer.ping()
            else:
                self._close_dealer()  # the server has ended, though no event reported it
        self._send()

    def _check_not_ended(self) -> None:
        """Raises TransportError if the server has ended, and none follows it."""
        server = self._server
        if server.restarts or not server.was_connected:
            return
        if is_reachable(server.address):
            server.accepted()
        elif server.refused(self._now()) >= server.refused_seconds:
            server.ended = f"the process that served it has ended: {server.address} is not open any more"
            raise TransportError(server.ended)

    # ---- receiving --------------------------------------------------------------------------------------

    def _receive(self, seconds: float) -> Message | None:
        """Returns the reply. None if it has not arrived within ``seconds``, or another event was handled."""
        dealer = self._dealer
        while dealer is not None and (data := dealer.receive()) is not None:
            if (reply := self._on_message(data)) is not None:
                return reply
        for fd, _ in self._spin(self._poll_for) or self._poll_for(to_milliseconds(seconds)):
            if self._local is not None and fd == self._local.fd:
                if (reply := self._read_local()) is not None:
                    return reply
            elif self._dealer is None or fd != self._dealer.fd:  # the DEALER is read next time
                self._check_open()
                if self._dealer is not None and self._dealer.read_events():
                    self._dealer.ping()
                    self._send_by_dealer()
        return None

    def _on_message(self, data: bytes | memoryview) -> Message | None:
        """Handles a received message. Returns it if it is the reply.

        Raises:
            ProtocolError: if it is malformed.
        """
        incarnation, replied, message = decode_query(data)
        if self._query.receive(replied, message):
            return message
        if isinstance(message, StorePong) and self._fast_path and message.endpoint:
            self._server.local = LocalAddress(incarnation, message.endpoint)
            if self._local is None:
                self._open_local()
        return None

    # ---- the fast path ----------------------------------------------------------------------------------

    def _open_local(self) -> LocalConnection | None:
        """Connects to the server if it is on this host. Packets wait until it has accepted the connection."""
        server = self._server.local if self._fast_path else None
        if server is None:
            return None
        try:
            fast = local.connect(
                server.endpoint,
                Hello(PROTOCOL, server.incarnation),
                local_key(self._server.keys, b""),
                self._on_backlog,
                eager=True,
            )
        except BlockingIOError:
            return None  # too many connections wait to be accepted
        except OSError:
            self._server.local = None  # another host, or another container
            return None
        try:
            fast.send(encode(StorePing(""), 0, self.id, PING_ID))  # identifies the channel, known by tcp
        except ConnectionError:  # the server has stopped, and had not accepted it
            self._server.local = None
            fast.close()
            return None
        fast.limit_waits(QUICK_SECONDS)
        self._local = fast
        self._poll.register(fast.fd, select.POLLIN)
        return fast

    def _on_backlog(self, connection: LocalConnection) -> None:
        self._poll.modify(connection.fd, select.POLLIN | select.POLLOUT)

    def _read_local(self) -> Message | None:
        fast = self._local
        assert fast is not None
        try:
            if fast.backlog() and fast.flush():
                self._poll.modify(fast.fd, select.POLLIN)
            if not fast.is_ready():
                return None
            data = fast.receive()
            self._accepted = fast
            self._server.was_connected, self._server.refused_seconds = True, 0.0
        except BlockingIOError:
            return None
        except OSError as e:
            local.check_is_of_system(e)
            self._close_local(str(e))
            self._send()
            return None
        return self._on_local_packet(fast, data)

    def _on_local_packet(self, fast: LocalConnection, data: bytes) -> Message | None:
        """As :meth:`_on_message`; empty ``data`` is the end of the connection."""
        message: bytes | memoryview = data
        reason = "the server closed the connection"
        if data == LARGE:
            try:
                message = fast.take_large(MAX_HEADER_BYTES)
            except OSError as e:
                local.check_is_of_system(e)
                message, reason = b"", str(e)
        if message:
            return self._on_message(message)
        self._check_open()
        self._close_local(reason)
        self._send()
        return None

    # ---- closing ----------------------------------------------------------------------------------------

    def _close_local(self, reason: str = "") -> None:
        """Closes the connection of the fast path; ``reason``: why it is broken."""
        fast, self._local, self._accepted = self._local, None, None
        if fast is not None:
            if reason:
                self._trouble = reason
                self._server.local = None  # the server may have restarted at another endpoint
            self._poll.unregister(fast.fd)
            fast.close()

    def _close_dealer(self) -> None:
        if self._dealer is not None:
            self._trouble = self._dealer.trouble or self._trouble
            self._dealer.close()
            self._dealer = None  # last: the next call does it again if Ctrl-C comes before

    def hang_up(self) -> None:
        """Interrupts a thread that waits in the kernel for a packet. From any thread."""
        fast = self._accepted
        if fast is not None:
            fast.hang_up()

    def close(self) -> None:
        """Closes both connections. Called by the thread that uses the channel. Idempotent."""
        self._close_dealer()
        self._close_local()
        self._closing = SPENT

    def abandon(self) -> None:
        """In a forked child: closes the child's copy of the connection that the parent uses."""
        if self._local is not None:
            self._local.abandon()
