"""Links: one for each peer, the connection state of one incarnation of it.

What a link delivers is a sequence: messages, then one :class:`~zmqgrad.transport.base.PeerEnd`, then nothing.
The sending half is a local connection (:mod:`~zmqgrad.transport.local`) to a peer of this host, or a session
over tcp (:mod:`~zmqgrad.transport.session`). The receiving half consists of *paths*: everything by which
messages of the peer arrive here, each of which has an end of its own. The end of the link follows the last
of them (:mod:`~zmqgrad.transport.endpoint`).

Threads and locks: any thread sends, under the lock of the link (a ZeroMQ socket may move between threads
across a lock); a local connection has a lock of its own. The receiving half belongs to the reading thread.
The lock of :class:`Links` guards its tables; it is never held together with that of a link.

Note [Calls of handlers]: a signal handler, or a finalizer, that makes a call may have interrupted this thread
at any line, with our locks held, and what it waits for may need them. So the locks by which a call passes can
be acquired again, and what they guard is consistent wherever a function is called: a whole call in between
does no harm. Two things are not like that: to open a link, and to send by a session, whose messages have
numbers and parts. There the handler gets an error (:meth:`Links._begin`).
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import zmq

from zmqgrad.errors import ClosedError, TransportError, UnknownPeerError
from zmqgrad.runtime.clock import MONOTONIC
from zmqgrad.runtime.late_threads import start_thread
from zmqgrad.runtime.polling import READ, WRITE
from zmqgrad.runtime.service_thread import ServiceThread
from zmqgrad.transport import local
from zmqgrad.transport.base import Buffer, PeerAddress, Resolver
from zmqgrad.transport.heartbeat import SCHEME
from zmqgrad.transport.local.channels import channel_endpoint
from zmqgrad.transport.local.connection import (
    CONNECT_SECONDS,
    MAX_AHEAD,
    LocalConnection,
    Offer,
    Queued,
    close_descriptors,
)
from zmqgrad.transport.local.handshake import Hello
from zmqgrad.transport.security import Keys, secure_client
from zmqgrad.transport.session import Incoming
from zmqgrad.transport.session_socket import SessionSocket
from zmqgrad.transport.sessions import Sessions
from zmqgrad.transport.sockets import set_up, use_io_thread

logger = logging.getLogger(__name__)

Connected = Callable[[int, str, Sequence[str]], None]
"""Called with a new link: the peer, the endpoint in use, and all endpoints of the peer."""

BROKEN_ERRNOS = frozenset((errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF, errno.ECONNREFUSED))
"""What a send reports whose receiver has closed the connection, or has ended."""


RECEIVER = 0
"""In place of the number of a reply channel: the connection is to the receiver of the peer."""


@dataclass(eq=False, slots=True)
class Link:
    """One incarnation of one peer. ``lock`` guards the sending half, except for ``local``."""

    peer: int
    lock: threading.RLock = field(default_factory=threading.RLock)
    busy: bool = False
    """Whether the thread that holds the lock is opening the link or sending by its session."""
    endpoint: str = ""
    """In use; empty before the first message."""
    incarnation: int = 0
    local: LocalConnection | None = None
    session: SessionSocket | None = None
    incoming: dict[int, Incoming] = field(default_factory=dict)
    """The receiving half of its session, by incarnation: there may be late messages of one before."""
    channels: dict[int, LocalConnection] = field(default_factory=dict)
    """Connections to the reply channels of the peer, by number; RECEIVER: see :meth:`Links.send_once`."""
    messages: int = 0
    header_bytes: int = 0
    frame_bytes: int = 0
    paths: dict[object, None] = field(default_factory=dict)
    """What may still bring messages. Reading thread only."""
    end_reason: str = ""
    """Why the link is ending; empty while it is not. Reading thread only."""
    tells_peer: bool = True
    """Whether the peer is told why the link ends. Reading thread only."""
    ended: str = ""
    """The reason of its end, once that was delivered."""

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self.local is not None or self.session is not None

    def connections(self) -> list[LocalConnection]:
        """Returns the local connections to the peer."""
        local = self.local  # read once: another thread may shut the link just now
        return [*([] if local is None else [local]), *self.channels.values()]

    def count(self, first: bytearray, frames: int) -> None:
        """Counts a message that is sent by the session. Called with the lock held."""
        self.messages += 1
        self.header_bytes += len(first)
        self.frame_bytes += frames


class Links:
    """The links of one mailbox, opened as they are needed; none before ``service`` is set.

    Args:
        name: of the worker, used in errors.
        hello: makes what this mailbox tells a peer of its host, from the target and the number.
        local_key: of the local connections of the job.
        keys: the job's, required of peers by tcp; None: they are not authenticated.
        fast: whether to use local connections where the system supports them.
        sessions: of the mailbox.
        connected: called for each new link, with its lock held.
        on_broken: called with a peer whose process has closed a local connection.
    """

    def __init__(
        self,
        name: str,
        context: zmq.Context[zmq.Socket[bytes]],
        hello: Callable[[int, int], Hello],
        local_key: bytes,
        keys: Keys | None,
        fast: bool,
        sessions: Sessions,
        connected: Connected,
        on_broken: Callable[[int], None],
    ) -> None:
        self.resolve: Resolver = _raise_unknown_peer
        self.service: ServiceThread
        """Completes and flushes local connections."""
        self._name = name
        self._context = context
        self._hello = hello
        self._local_key = local_key
        self._keys = keys
        self._fast = fast
        self._sessions = sessions
        self._connected = connected
        self._on_broken = on_broken
        self._pid = os.getpid()
        self._lock = threading.RLock()  # guards all below
        self.closed = False
        """Whether :meth:`close` was called."""
        self._links: dict[int, Link] = {}
        sessions.links = self.all
        self.known: Callable[[int], Link | None] = self._links.get
        """Returns the link to a peer; None if there is none."""
        self.same_host: set[int] = set()
        """The peers with local connections."""

    def __len__(self) -> int:
        return len(self._links)

    def to(self, peer: int) -> Link:
        """Returns the link to ``peer``, which may not be open yet."""
        return self.known(peer) or self._new(peer)

    def _new(self, peer: int) -> Link:
        with self._lock:
            return self._links.setdefault(peer, Link(peer))

    def all(self) -> list[Link]:
        """Returns all links."""
        with self._lock:
            return list(self._links.values())

    # ---- opening ----------------------------------------------------------------------------------------

    def open(self, link: Link) -> None:
        """Connects unless that was done before; afterwards ``link.endpoint`` is known.

        Raises:
            ClosedError, UnknownPeerError, TransportError: if it cannot connect.
        """
        if link.is_open:
            return
        self._check_usable(link)
        known = self.resolve(link.peer)  # without the lock: it may query a store
        with link.lock:
            if not link.is_open:
                self._check_usable(link)
                self._begin(link)
                try:
                    self._connect(link, known)
                finally:
                    link.busy = False

    def _check_usable(self, link: Link) -> None:
        if self.closed:
            raise ClosedError(f"the mailbox of {self._name} is closed")
        if link.ended:
            raise ClosedError(f"{self._name} sends nothing more to worker {link.peer}: {link.ended}")
        if os.getpid() != self._pid:
            raise ClosedError(
                f"the mailbox of {self._name} belongs to process {self._pid}; it cannot be used in a "
                f"fork of it: start processes by spawn or forkserver, or call init_rpc in the child"
            )

    def _begin(self, link: Link) -> None:
        """Called with the link's lock held, for what must not be interrupted: see Note [Calls of handlers].

        Raises:
            TransportError: in a signal handler, or a finalizer, that has interrupted such an operation.
        """
        if link.busy:
            raise TransportError(
                f"{self._name} was interrupted while it was sending to worker {link.peer}, so that the "
                f"signal handler cannot send to the same worker: let it make the call in another thread"
            )
        link.busy = True

    def _connect(self, link: Link, known: PeerAddress) -> None:
        """Called with the link's lock held."""
        tcp = ""
        for endpoint in known.endpoints:
            if endpoint.startswith(SCHEME):
                continue
            if not endpoint.startswith("ipc:"):
                tcp = tcp or endpoint
            elif self._fast and (opened := self._connect_local(link, endpoint, known.incarnation)):
                link.local, link.endpoint, link.incarnation = opened, endpoint, known.incarnation
                self.same_host.add(link.peer)
                break
        else:
            self._connect_tcp(link, tcp, known)
        self._connected(link.peer, link.endpoint, known.endpoints)
        logger.debug("%s sends to worker %d at %s", self._name, link.peer, link.endpoint)

    def _connect_tcp(self, link: Link, endpoint: str, known: PeerAddress) -> None:
        if not endpoint:
            raise _unreachable(known)
        try:
            make_socket = partial(self._dealer, "[" in endpoint)
            link.session = session = SessionSocket(
                endpoint, known.incarnation, link.lock, make_socket, self._sessions
            )
        except zmq.ZMQError as e:
            raise TransportError(f"cannot connect to worker {link.peer} at {endpoint}: {e}") from e
        link.endpoint, link.incarnation = endpoint, known.incarnation
        heard = list(link.incoming)  # read after the session was set: one that is heard next finds that
        found = link.incoming.get(known.incarnation or (heard[-1] if heard else 0))
        if found is not None:
            session.incoming = found

    def _dealer(self, ipv6: bool) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        set_up_unbounded(socket)
        socket.ipv6 = ipv6
        if self._keys is not None:
            secure_client(socket, self._keys)
        return socket

    def _connect_local(
        self,
        link: Link,
        endpoint: str,
        target: int,
        number: int = 0,
        continued: int = 0,
        waits: float = CONNECT_SECONDS,
    ) -> LocalConnection | None:
        """Connects to a listener of the peer. Returns None if no process of our user listens there.

        Args:
            number: of a reply channel; 0: the receiver.
            continued: the how manieth connection it continues.
            waits: as :func:`~zmqgrad.transport.local.connection.connect`.

        Raises:
            TransportError: if this process has no descriptor left, or the peer does not accept in time.
        """
        try:
            # Sent at once, a message is in the kernel, and outlives this process. At a reply channel, which
            # may be closed before it accepts, it would be lost with the connection: see channel().
            opened = local.connect(
                channel_endpoint(endpoint, number),
                self._hello(target, continued),
                self._local_key,
                self._on_backlog,
                eager=not number,
                waits=0 if number or continued else waits,  # there is another way; nobody must wait meanwhile
            )
        except OSError as e:
            local.check_is_of_system(e)
            if e.errno in (errno.EMFILE, errno.ENFILE, errno.EAGAIN):
                raise TransportError(f"cannot connect to worker {link.peer} at {endpoint}: {e}") from e
            logger.debug("%s: nothing listens at %s: %s", self._name, endpoint, e)
            return None
        self.service.watch(opened.fd, READ, partial(self._on_event, link, opened))
        return opened

    def _on_event(self, link: Link, connection: LocalConnection, events: int) -> None:
        """Handles the reply of the listener, room for more packets, or the end. In the service thread.

        The descriptor may have been closed since the event, and its number may belong to another connection.
        """
        try:
            if connection.fd < 0 or not connection.is_ready():
                return
            if events & ~(READ | WRITE) and connection.has_ended():
                raise ConnectionResetError(errno.ECONNRESET, "the peer has closed the connection")
            connection.flush(self._on_flushed)
        except OSError as e:
            logger.debug("%s: the connection to %s has ended: %s", self._name, link.endpoint, e)
            connection.while_open(self.service.unwatch)
            self._on_local_broken(link, connection)

    def _on_flushed(self, fd: int, everything: bool) -> None:
        """Called with the connection's lock held, after queued packets were sent."""
        self.service.rewatch(fd, 0 if everything else WRITE)

    def _on_backlog(self, connection: LocalConnection) -> None:
        """Called with the connection's lock held, when the kernel accepts no more."""
        self.service.rewatch(connection.fd, READ | WRITE)

    # ---- sending ----------------------------------------------------------------------------------------

    def send_local(
        self, link: Link, connection: LocalConnection, packets: Sequence[bytearray], offers: Sequence[Offer]
    ) -> None:
        """Sends the packets of a message. If the peer has ended, they are lost with it, and the link ends.

        Raises:
            TransportError: if there is no descriptor for an offer.
        """
        try:
            if connection.send_all(packets, offers):
                self._continue(link, connection)
        except OSError as e:
            other = self._on_local_error(link, connection, e)
            if other is not None:
                self.send_local(link, other, packets, offers)

    def count_chunks(self, link: Link, size: int) -> None:
        """Counts ``size`` bytes of the packets of a message as parts of frames."""
        with link.lock:
            link.header_bytes -= size
            link.frame_bytes += size

    def send_packet(self, link: Link, connection: LocalConnection, packet: bytearray, awaited: bool) -> None:
        """As :meth:`send_local`, for one packet; ``awaited``: a thread waits for it or for its reply."""
        try:
            if connection.send(packet, keep_gil=not awaited):
                self._continue(link, connection)
        except OSError as e:
            other = self._on_local_error(link, connection, e)
            if other is not None:
                self.send_packet(link, other, packet, awaited)

    def _continue(self, link: Link, full: LocalConnection) -> None:
        """Opens another connection to ``link`` if the kernel accepts no more packets of ``full``.

        The main thread lets another one do that: Ctrl-C can interrupt it anywhere, and what waits in ``full``
        (messages of all threads) would be lost between the two.
        """
        if full is not link.local or full.ahead >= MAX_AHEAD:
            return  # as below; a thread for each message would cost more than the message
        if threading.current_thread() is threading.main_thread() and not self._is_nested(link, full):
            with suppress(RuntimeError):  # the interpreter ends
                start_thread(partial(self._continue, link, full), f"{self._name}-continue").join()
                return
        with link.lock:
            if link.busy or full is not link.local or full.ahead >= MAX_AHEAD or not full.backlog():
                return
            link.busy = True
            try:
                following = self._connect_local(
                    link, link.endpoint, link.incarnation, continued=full.number + 1
                )
                if following is None:
                    return  # it has ended, as its connection reports
                full.continue_by(following, partial(self._switch, link, full, following))
            except TransportError as e:  # no descriptor is left now
                logger.debug("%s: packets to worker %d wait here: %s", self._name, link.peer, e)
                return
            finally:
                link.busy = False
        if following.backlog():
            self._continue(link, following)

    def _is_nested(self, link: Link, connection: LocalConnection) -> bool:
        """Whether the calling thread is a handler's that has interrupted this thread with a lock held."""
        return link.lock._is_owned() or connection.is_locked_here()  # type: ignore[attr-defined]

    def _switch(self, link: Link, full: LocalConnection, following: LocalConnection, fd: int) -> None:
        """Called with the locks of the link and of ``full`` held."""
        self.service.unwatch(fd)
        link.local = following
        link.messages += full.sent
        link.header_bytes += full.sent_bytes

    def _on_local_error(
        self, link: Link, connection: LocalConnection, error: OSError
    ) -> LocalConnection | None:
        """Handles a failed send. Returns the connection to send by instead, if there is one."""
        local.check_is_of_system(error)
        if error.errno not in BROKEN_ERRNOS:
            raise TransportError(f"cannot send to worker {link.peer}: {error}") from error
        if self.closed:
            raise ClosedError(f"the mailbox of {self._name} is closed")
        main = link.local
        self._on_local_broken(link, connection)
        return None if connection is main else main

    def _on_local_broken(self, link: Link, connection: LocalConnection) -> None:
        """The peer has closed a connection: one of its reply channels, or it has ended."""
        main = link.local
        if main is None:
            with link.lock:  # the link may be just opening
                main = link.local
        if connection is main:
            self._on_broken(link.peer)
            return
        with link.lock:
            for number, channel in link.channels.items():
                if channel is connection:  # another may have the number when it is named next
                    del link.channels[number]
                    break
            waiting = self._give_up(link, connection)
        if waiting and main is not None:
            main.adopt(waiting)

    def send_session(
        self,
        link: Link,
        first: bytearray,
        frames: Sequence[Buffer],
        parts: Sequence[tuple[bytearray, Buffer]],
    ) -> None:
        """Sends a message by the session of ``link``, after its chunks ``parts``, each with its header."""
        with link.lock:
            session = link.session
            if session is None:
                self._check_usable(link)
                raise ClosedError(f"the connection from {self._name} to worker {link.peer} was dropped")
            link.count(first, sum(map(len, frames)) + sum([len(data) for _, data in parts]))
            now = MONOTONIC.now()
            self._begin(link)
            try:
                for head, data in parts:
                    session.send(head, (data,), now)
                session.send(first, frames, now)
            finally:
                link.busy = False
            self._sessions.alarm.set(session.outgoing.due)

    def send_once(self, link: Link, packet: bytearray, linger: int, waits: float) -> None:
        """Sends the last packet to a peer to which there is no link, by a connection that lasts no longer.

        On this host that is until the peer has read it, which it cannot before it has accepted a process of
        another namespace (:func:`~zmqgrad.transport.local.connection.connect`).

        Args:
            linger: how many ms libzmq may take.
            waits: how many seconds to wait for a peer that accepts no connection.

        Raises:
            UnknownPeerError, TransportError, OSError, zmq.ZMQError: if the peer cannot be reached.
        """
        if not link.endpoint:
            known = self.resolve(link.peer)
            link.incarnation, link.endpoint = known.incarnation, self.best_endpoint(link.peer, known)
        if link.endpoint.startswith("ipc:"):
            with link.lock:
                opened = self._connect_local(link, link.endpoint, link.incarnation, waits=waits)
                if opened is not None:
                    link.channels[RECEIVER] = opened
                    opened.send(packet)
            return
        with self._dealer("[" in link.endpoint) as socket:
            socket.linger = linger
            socket.connect(link.endpoint)
            socket.send(packet, zmq.NOBLOCK)

    def best_endpoint(self, peer: int, known: PeerAddress) -> str:
        """Returns the endpoint of ``peer`` at which it listens.

        Raises:
            UnknownPeerError: if none of them can be reached from this host.
        """
        for endpoint in known.endpoints:
            if endpoint.startswith("tcp:"):
                return endpoint
            is_local = endpoint.startswith("ipc:") and self._fast
            if is_local and (peer in self.same_host or local.is_listening(channel_endpoint(endpoint))):
                return endpoint
        raise _unreachable(known)

    def channel(self, link: Link, number: int) -> LocalConnection | None:
        """Returns the connection to reply channel ``number`` of the peer; None before it is accepted."""
        connection = link.channels.get(number) or self._open_channel(link, number)
        return connection if connection is not None and connection.accepted else None

    def _open_channel(self, link: Link, number: int) -> LocalConnection | None:
        # Opening the link starts the heartbeats, so it must be open before any other connection.
        if link.local is None:
            return None
        with link.lock:
            if number not in link.channels and not self.closed and not link.ended:
                try:
                    opened = self._connect_local(link, link.endpoint, link.incarnation, number)
                except TransportError as e:  # no descriptor is left now
                    logger.debug("%s: a reply goes to the receiver: %s", self._name, e)
                    return None
                if opened is not None:  # otherwise the thread has left, and its late reply is read there
                    link.channels[number] = opened
            return link.channels.get(number)

    # ---- the end ----------------------------------------------------------------------------------------

    def shut(self, link: Link, linger: int = 0) -> None:
        """Closes the sending half; what libzmq has queued may take ``linger`` ms to leave."""
        with link.lock:
            for connection in link.connections():
                close_descriptors(self._give_up(link, connection))
            link.local, link.channels = None, {}
            session, link.session = link.session, None
            if session is not None:
                link.incoming = {}
                session.close(linger)

    def _give_up(self, link: Link, connection: LocalConnection) -> list[Queued]:
        """Closes a connection, and returns what it has not sent. Called with the link's lock held."""
        if connection.fd < 0:
            return []
        self.service.unwatch(connection.fd)
        link.messages += connection.sent
        link.header_bytes += connection.sent_bytes
        return connection.give_up()

    def have_left(self) -> bool:
        """Returns whether everything that was sent on this host has left."""
        return not any(
            connection.backlog() for link in self.all() if not link.ended for connection in link.connections()
        )

    def flushed(self) -> bool:
        """Returns whether everything that was sent has left, and what was sent by tcp was acknowledged."""
        sessions = [link.session for link in self.all() if not link.ended]
        return self.have_left() and all(session is None or session.is_flushed() for session in sessions)

    def counts(self) -> tuple[int, int, int]:
        """Returns the messages, bytes of headers, and bytes of frames sent so far."""
        messages = header_bytes = frame_bytes = 0
        for link in self.all():
            connections = link.connections()
            messages += link.messages + sum(each.sent for each in connections)
            header_bytes += link.header_bytes + sum(each.sent_bytes for each in connections)
            frame_bytes += link.frame_bytes
        return messages, header_bytes, frame_bytes

    def peers_connected(self) -> int:
        """Returns to how many peers a link is open."""
        return sum(link.is_open for link in self.all())

    def close(self) -> bool:
        """Refuses new connections from now on. Returns False if it did already."""
        with self._lock:
            before, self.closed = self.closed, True
            return not before


def _unreachable(known: PeerAddress) -> UnknownPeerError:
    return UnknownPeerError(f"none of the addresses {list(known.endpoints)} can be reached from this host")


def _raise_unknown_peer(peer: int) -> PeerAddress:
    raise UnknownPeerError(f"no address is known for worker {peer}: the mailbox was not started")


def set_up_unbounded(socket: zmq.Socket[bytes]) -> None:
    """Sets the options of a mailbox's sockets. Credit bounds what is queued, not libzmq."""
    set_up(socket)
    socket.sndhwm = 0
    socket.rcvhwm = 0
    use_io_thread(socket, bulk=False)
