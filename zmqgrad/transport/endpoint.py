"""The endpoint of a mailbox: delivers the messages of each link in order, then its end.

The reading thread (:mod:`~zmqgrad.transport.reader`) decodes messages and passes them to the handler. It runs
no user code, and malformed messages do not end it.

Messages arrive by *paths*: local connections (this host), reply channels (the same, read by the thread that
waits there), routes of the ROUTER (tcp), and bulk channels, which pass on what they receive to this reader.
Whoever learns that a peer has ended calls :meth:`Endpoint.end`. The reader then closes the paths of the link:
it takes everything that has arrived, and delivers the end when the last path has reached its own. So a loss
never overtakes what the peer has sent:

    local connection   shut down for reading; the kernel returns what has arrived, then the end of the file,
                       or the connection that continues it
    reply channel      the same, read by its owner; by the reader, if the owner is not waiting there just now
    route of ROUTER    after the ROUTER was read empty; of a process of this host that has ended, after the
                       monitor has reported the end of the connection
    bulk channel       when its ROUTER was read empty, which its reader passes on as it does messages

A local connection that ends without a GOODBYE shows that the process has ended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import zmq

from zmqgrad.errors import ProtocolError
from zmqgrad.runtime.spinning import SpinBudget
from zmqgrad.runtime.thread_pool import Task, ThreadPool
from zmqgrad.transport.base import Buffer, Handler, Inbound, OnIdle, PeerEnd, Unreceived
from zmqgrad.transport.data_plane import DataPlane
from zmqgrad.transport.flow_control import MIN_COUNTED_BYTES
from zmqgrad.transport.links import Link, Links
from zmqgrad.transport.local import LocalConnection, LocalListener
from zmqgrad.transport.reader import Reader
from zmqgrad.transport.sockets import DISCONNECTED, connection_fd
from zmqgrad.transport.tcp_listener import TcpListener
from zmqgrad.wire.codec import decode_all
from zmqgrad.wire.frames import Envelope, new_tuple, read_envelope
from zmqgrad.wire.messages import ArenaOffer, Chunk, LargeMessage, Manifest, Message, MessageType

if TYPE_CHECKING:
    from zmqgrad.transport.local.channels import ReplyChannel, ReplyChannels
    from zmqgrad.transport.local.listener import Registry

logger = logging.getLogger(__name__)

PROCESS_ENDED = "its process has ended"

PARTIAL_TYPES = frozenset({MessageType.ARENA_OFFER, MessageType.CHUNK, MessageType.LARGE_MESSAGE})
"""Parts of messages, or what comes with a descriptor."""

_RCVMORE = int(zmq.RCVMORE)


Accept = Callable[[Link, Envelope, int], bool]
"""(link, envelope, bytes of the whole message) -> whether to deliver it."""


@dataclass(eq=False, slots=True)
class _Route:
    """A connection of the ROUTER. ``fd`` identifies it in the events of the monitor."""

    identity: bytes
    fd: int
    link: Link | None = None


class Endpoint:
    """Reads everything that arrives for one mailbox; without a pool, in a thread ``<name>-receiver``.

    Args:
        router: receives by tcp; None: nothing does.
        listen: creates the listener for local connections, for a poller; None: there are none.
        accept: called for messages that belong to a session.
        on_ending: tells a peer why its link ends, before it can notice. In the reading thread.
        on_end: called with the end of each link, in the reading thread; must not block.
        refuse: called with a link that has ended, and whose peer sends or connects.
        budget: how long a thread spins before it blocks.
    """

    def __init__(
        self,
        name: str,
        router: zmq.Socket[bytes] | None,
        listen: Callable[[Registry], LocalListener] | None,
        links: Links,
        plane: DataPlane,
        accept: Accept,
        on_ending: Callable[[Link], None],
        on_end: Callable[[PeerEnd], None],
        refuse: Callable[[Link], None],
        budget: SpinBudget,
    ) -> None:
        self._name = name
        self._socket = router
        self._links = links
        self._plane = plane
        self._accept = accept
        self._on_ending = on_ending
        self._on_end = on_end
        self._refuse_ended = refuse
        self.reader = Reader(f"{name}-receiver", self._close_sockets, budget)
        self.reader.on_failed = self._fail
        self.end_bulk: Callable[[int, Callable[[], None]], bool] = lambda peer, ended: False
        """Makes the reader of bulk channels call ``ended`` behind all that has arrived from a peer. Returns
        whether there are any."""
        self._handler: Handler
        self._counting = threading.RLock()  # guards the next three: owners of reply channels count, too
        self.messages = 0
        self.header_bytes = 0
        self.frame_bytes = 0
        self._listener: TcpListener | None = None
        self._routes: dict[bytes, _Route] = {}
        self._bulk = _Route(b"bulk", -1)  # of all channels
        self._disconnected: set[int] = set()  # to be closed when the ROUTER was read empty, by descriptor
        self.ending: list[Link] = []
        """The links that are about to end. Changed by the reading thread only."""
        self.channels: ReplyChannels | None = None
        """The reply channels of the mailbox."""
        self._local = None if listen is None else self.reader.listen(listen, self._handle)
        if router is not None:
            self.reader.read_router(router, self._from_router, self._take)

    def listen(self, address: str) -> int:
        """Binds the ROUTER to the tcp ``address``, which was checked. Returns its port.

        Raises: as :class:`~zmqgrad.transport.tcp_listener.TcpListener`.
        """
        assert self._socket is not None
        self._listener = TcpListener(
            self._socket, address, self.reader, secured=True, on_event=self._on_connection_event
        )
        return self._listener.port

    def start(self, handler: Handler, pool: ThreadPool | None = None, on_idle: OnIdle | None = None) -> None:
        """Starts to read. Arguments as :meth:`~zmqgrad.transport.base.Mailbox.start`."""
        self._handler = handler
        self.reader.on_idle = on_idle or self.reader.on_idle
        self.reader.start(None if pool is None else pool.serve_from)

    def _close_sockets(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)

    # ---- reading ----------------------------------------------------------------------------------------

    def _from_router(self) -> Task | None:
        return self._take()()

    def _take(self) -> Callable[[], Task | None]:
        """Takes the next message of the ROUTER. Returns what handles it."""
        socket = self._socket
        assert socket is not None
        identity = socket.recv()
        known = self._routes.get(identity)
        if known is None:
            frame = socket.recv(copy=False)
            first = frame.bytes
            route = self._routes[identity] = _Route(identity, connection_fd(frame))
        else:
            first, route = socket.recv(), known
        frames: Sequence[Buffer] = self._rest() if socket.getsockopt(_RCVMORE) else ()
        if known is None:
            assert self._listener is not None
            self._listener.hear(route.fd)
        return partial(self._handle, first, route, frames)

    def take_bulk(self, first: bytes, frames: Sequence[Buffer]) -> None:
        """Delivers a message that has arrived by a bulk channel. From any thread."""
        self.reader.post(partial(self._handle_later, first, self._bulk, frames))

    def _handle_later(
        self, first: bytes, path: LocalConnection | _Route, frames: Sequence[Buffer] = ()
    ) -> None:
        """Handles a message. Its task runs when the reader has handled the event under way."""
        task = self._handle(first, path, frames)
        if task is not None:
            self.reader.tasks.append(task)

    def _rest(self) -> list[Buffer]:
        """Receives the frames after the first without a copy; they are writable."""
        assert self._socket is not None
        frames: list[Buffer] = []
        while True:
            frame = self._socket.recv(copy=False)
            frames.append(frame.buffer)
            if not frame.more:
                return frames

    def _handle(
        self, first: bytes, path: LocalConnection | _Route, frames: Sequence[Buffer] = ()
    ) -> Task | None:
        """Decodes and delivers a message; an empty packet is the end of its connection.

        Whatever fails, such as memory, the reading thread must go on.
        """
        if not first and isinstance(path, LocalConnection):
            link = self._close_connection(path)
            if not link.end_reason:
                self._end(link.peer, PROCESS_ENDED, True, False)
            return None
        try:
            inbound = self.decode(first, frames, path)
        except Exception:
            logger.exception("%s: a message of %d bytes could not be read", self._name, len(first))
            return None
        if inbound is None:
            return None
        try:
            return self._handler(inbound)
        except ProtocolError as e:
            self._refuse(inbound.envelope.source, e)
        except Exception:
            source = inbound.envelope.source
            logger.exception("%s: handling %s from worker %d failed", self._name, inbound.message, source)
        return None

    def decode(
        self, first: bytes, frames: Sequence[Buffer], path: LocalConnection | _Route, accepted: bool = False
    ) -> Inbound | None:
        """Decodes a message that arrived by ``path``. From any thread.

        Args:
            accepted: whether it is the content of another message, which was counted.

        Returns:
            None if it is malformed, which is counted, or must not be delivered.
        """
        size = len(first)
        try:
            envelope, manifest, message = decode_all(first)
            if isinstance(path, LocalConnection):
                if envelope.source != path.hello.source:
                    raise ProtocolError(
                        f"worker {path.hello.source} sent a message as worker {envelope.source}"
                    )
                if manifest is None and not accepted and envelope.type not in PARTIAL_TYPES:
                    with self._counting:
                        self.messages += 1
                        self.header_bytes += size
                    counted = size if size >= MIN_COUNTED_BYTES else 0
                    return new_tuple(Inbound, (envelope, message, (), size, counted))
        except ProtocolError as e:
            self._on_malformed(first, size, path, e)
            return None
        if frames:
            size += sum(map(len, frames))
        if not accepted:
            header = len(first)
            with self._counting:  # without a call, in which a handler might wait for another reader
                self.messages += 1
                self.header_bytes += header
                if frames:
                    self.frame_bytes += size - header
        inbound = self._complete(first, frames, path, accepted, envelope, manifest, message, size)
        if inbound is None and not accepted:
            self._uncount(0)
        return inbound

    def _uncount(self, frame_bytes: int) -> None:
        """What was counted was no whole message; some of its header was ``frame_bytes`` of a frame."""
        with self._counting:
            self.messages -= 1
            self.header_bytes -= frame_bytes
            self.frame_bytes += frame_bytes

    def _complete(
        self,
        first: bytes,
        frames: Sequence[Buffer],
        path: LocalConnection | _Route,
        accepted: bool,
        envelope: Envelope,
        manifest: Manifest | None,
        message: Message,
        size: int,
    ) -> Inbound | None:
        """Adds what arrived apart from a decoded message of ``size`` bytes. As :meth:`decode`."""
        found, total, source = frames, size, envelope.source
        try:
            if isinstance(path, _Route) and not accepted and not self._accept_from(path, envelope, size):
                return None
            if manifest is not None:
                chunked = False
                for buffer in manifest.buffers:
                    if buffer.block and not buffer.segment:  # it was received before, in chunks
                        chunked = True
                        size += buffer.size
                try:
                    if chunked:
                        manifest, found = self._plane.complete(source, manifest, frames)
                    found = self._plane.open(source, manifest, found)
                    if found:
                        total = len(first) + sum(map(len, found))
                except MemoryError as e:  # who waits for this message is to be told
                    found = Unreceived(e)
            if envelope.type not in PARTIAL_TYPES:
                return Inbound(envelope, message, found, total, size if size >= MIN_COUNTED_BYTES else 0)
            if accepted:  # many within one another would exceed the stack
                raise ProtocolError(f"{type(message).__name__} is the content of another message")
            if isinstance(message, ArenaOffer):
                self._on_offer(source, message, path)
                return None
            if isinstance(message, LargeMessage):
                size += message.size - len(first)  # what its sender has counted
                whole = bytes(self._plane.reassembler.take(source, message.stream, message.size))
                if (inner := read_envelope(whole).source) != source:
                    raise ProtocolError(f"worker {source} sent a message as worker {inner}")
                return self.decode(whole, frames, path, accepted=True)
        except ProtocolError as e:
            self._on_malformed(first, size, path, e)
            return None
        except MemoryError as e:  # what it says, and who waits for it, is in what was not received
            self.end(source, str(e))
            return None
        assert isinstance(message, Chunk)  # a part of a frame
        self._uncount(len(message.data))
        return Inbound(envelope, message, found, total)

    def _accept_from(self, route: _Route, envelope: Envelope, size: int) -> bool:
        """Returns whether to deliver a message that arrived by tcp."""
        link = route.link
        if route is self._bulk:
            link = self._links.to(envelope.source)
        elif link is None:
            link = route.link = self._links.to(envelope.source)
            link.paths[route] = None
            if link.end_reason:
                self._close_when_empty(link, route)
        elif link.peer != envelope.source:
            raise ProtocolError(f"worker {link.peer} sent a message as worker {envelope.source}")
        if link.ended:
            if envelope.type != MessageType.GOODBYE:
                self._refuse_ended(link)
            return False
        if envelope.sequence or envelope.acknowledged:
            return self._accept(link, envelope, size)
        return True

    def _on_offer(self, peer: int, offer: ArenaOffer, path: LocalConnection | _Route) -> None:
        if not isinstance(path, LocalConnection) or not path.descriptors:
            raise ProtocolError("shared memory was offered without a descriptor")
        try:
            self._plane.on_offer(peer, offer, path.descriptors.popleft())
        except ProtocolError as e:  # what follows cannot be read
            self.end(peer, str(e))
            raise

    def _on_malformed(
        self, first: bytes, size: int, path: LocalConnection | _Route, error: ProtocolError
    ) -> None:
        """Counts a malformed message, also as received: else it were resent, or kept its credit, forever."""
        if isinstance(path, LocalConnection):
            sender: object = path.hello.source
            peer: int | None = path.hello.source
        else:
            sender, peer = path.identity, None if path.link is None else path.link.peer
        self._refuse(sender, error)
        try:
            envelope = read_envelope(first)
        except ProtocolError:
            return  # not from a worker
        if peer not in (None, envelope.source):
            return  # the worker that it names has not sent it
        if isinstance(path, _Route) and envelope.sequence:
            self._accept(self._links.to(envelope.source), envelope, len(first))
        if size >= MIN_COUNTED_BYTES:
            self._plane.count_consumed(envelope, size)

    def _refuse(self, sender: object, error: ProtocolError) -> None:
        self.reader.count_malformed(sender, f"message ({error})")

    # ---- the ends of links ------------------------------------------------------------------------------

    def on_path_opened(self, connection: LocalConnection) -> bool:
        """Adds a local connection that was accepted, by the reader or at a reply channel.

        Returns:
            False if its link is ending or has ended: nothing may arrive by it.
        """
        link = self._links.to(connection.hello.source)
        link.paths[connection] = None
        if not link.end_reason:  # read after the path was added: otherwise _end might miss it
            return True
        if connection.hello.number and not link.ended:  # what it continues was open when the end began
            connection.stop_receiving()
            return True
        self.reader.post(partial(self._refuse_path, connection, link))
        return False

    def on_path_continued(self, connection: LocalConnection) -> None:
        """Handles the end of a local connection that another path continues. In the reading thread."""
        self._links.to(connection.hello.source).paths.pop(connection, None)

    def _refuse_path(self, connection: LocalConnection, link: Link) -> None:
        self._close_path(link, connection)
        if link.ended:
            self._refuse_ended(link)

    def end(self, peer: int, reason: str, *, disconnects: bool = False, tell: bool = True) -> None:
        """Ends the link to ``peer``, after what has arrived. From any thread; no effect if it has ended.

        Args:
            disconnects: whether its process, on this host, has certainly ended: its connections will close.
            tell: whether the peer is told the reason.
        """
        self.reader.post(partial(self._end, peer, reason, disconnects, tell))

    def on_goodbye(self, peer: int, reason: str) -> None:
        """Handles the last message of ``peer``, which says why it ends the link. From any thread."""
        if self.reader.reads_here():
            self._take_goodbye(peer, reason)  # at once: the end of its connection may follow
        else:
            self.reader.post(partial(self._take_goodbye, peer, reason))

    def _take_goodbye(self, peer: int, reason: str) -> None:
        link = self._links.to(peer)
        if link.end_reason and not link.tells_peer and not link.ended:
            link.end_reason = reason  # it knows better than whoever saw that a connection was closed
        else:
            self._end(peer, reason, False, False)

    def _end(self, peer: int, reason: str, disconnects: bool, tell: bool) -> None:
        link = self._links.to(peer)
        if link.ended or link.end_reason:
            return
        if self._local is not None:
            self._local.accept_pending()  # it may have connected, sent and ended since the last poll
        link.end_reason, link.tells_peer = reason, tell
        self.ending.append(link)
        if tell:
            self._on_ending(link)
        for path in list(link.paths):
            if isinstance(path, LocalConnection):
                path.stop_receiving()
            elif isinstance(path, _Route) and not (disconnects and path.fd >= 0):
                self._close_when_empty(link, path)
        if self._socket is not None and not any(
            isinstance(path, LocalConnection) for path in list(link.paths)
        ):
            unread = object()  # its first message may be there, of which there is no route yet
            link.paths[unread] = None
            self._close_when_empty(link, unread)
        if self.end_bulk(peer, partial(self.reader.post, partial(self._close_path, link, self._bulk))):
            link.paths[self._bulk] = None
        if self.channels is not None:
            for channel in self.channels.all():
                self._drain(channel)
        self._end_if_done(link)

    def _fail(self, error: Exception) -> None:
        """Ends all links, whatever has not been read: the reader has failed."""
        for link in self._links.all():
            if not link.end_reason:
                link.end_reason, link.tells_peer = f"{self._name} can receive nothing more: {error!r}", True
                self.ending.append(link)
                self._on_ending(link)
            link.paths.clear()
            self._end_if_done(link)

    def _close_connection(self, connection: LocalConnection) -> Link:
        """Handles the end of a local connection, behind its last packet. Reading thread only."""
        link = self._links.to(connection.hello.source)
        self._close_path(link, connection)
        return link

    def on_channel_path_closed(self, connection: LocalConnection) -> None:
        """Handles the end of a connection to a reply channel, behind its last packet. From any thread."""
        self.reader.post(partial(self._close_connection, connection))

    def on_channel_settled(self, channel: ReplyChannel) -> None:
        """Its owner does not read now, and what arrives may belong to a link that ends. From any thread."""
        self.reader.post(partial(self._drain, channel))

    def _drain(self, channel: ReplyChannel) -> None:
        """Handles what has arrived at a reply channel, unless its owner is waiting there, and will."""
        for packet, connection in channel.take_arrived():
            if packet:
                self._handle_later(packet, connection)
            else:
                self._close_connection(connection)

    def _close_when_empty(self, link: Link, path: object) -> None:
        self.reader.call_when_empty(partial(self._close_path, link, path))

    def _close_disconnected(self) -> None:
        gone, self._disconnected = self._disconnected, set()
        for route in [route for route in self._routes.values() if route.fd in gone]:
            del self._routes[route.identity]
            if route.link is not None:
                self._close_path(route.link, route)

    def _on_connection_event(self, kind: int, fd: int) -> None:
        if kind == DISCONNECTED:
            # The first message of a connection, which makes its route, may still be unread.
            self._disconnected.add(fd)
            self.reader.call_when_empty(self._close_disconnected)

    def _close_path(self, link: Link, path: object) -> None:
        """Nothing more arrives by ``path``."""
        link.paths.pop(path, None)
        self._end_if_done(link)

    def _end_if_done(self, link: Link) -> None:
        if link.end_reason and not link.ended and not link.paths:
            link.ended = link.end_reason
            self.ending.remove(link)
            try:
                self._on_end(PeerEnd(link.peer, link.incarnation, link.ended))
            except Exception:  # it must not end the thread that reads
                logger.exception("%s: handling the end of worker %d failed", self._name, link.peer)
