"""Accepts the connections of peers on this host, and reads their packets."""

from __future__ import annotations

import errno
import itertools
import logging
import select
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from zmqgrad.runtime.forks import in_forks
from zmqgrad.runtime.repeat_log import RepeatLog
from zmqgrad.transport.local.connection import (
    LocalConnection,
    check_is_of_system,
    is_same_user,
    process_of,
    unix_name,
)
from zmqgrad.transport.local.handshake import ANY, PROTOCOL, Hello, read_hello, welcome
from zmqgrad.transport.strangers import Strangers

logger = logging.getLogger(__name__)

ACCEPT_BACKLOG = 1024
"""Connections that may wait to be accepted; the system may allow fewer."""

MAX_CONNECTIONS = 16_384
"""Peers beyond this limit are refused."""

MAX_HANDSHAKES = 64
"""Connections that may be without a hello: see :class:`~zmqgrad.transport.strangers.Strangers`."""

MAX_HELLO_BYTES = 4096

BURST_PACKETS = 16
"""Packets read from one connection in a row before others have their turn."""

PROBE_INTERVAL = 4
"""While packets arrive one by one, every 4th read tries a second one, which would announce a burst."""


class Registry(Protocol):
    """Polls file descriptors."""

    def register(self, fd: int, mask: int, /) -> None:
        """Polls ``fd`` for ``mask`` (``select.POLLIN``)."""

    def unregister(self, fd: int, /) -> None:
        """Stops polling ``fd``."""


Arrival = tuple[bytes, LocalConnection]
"""A packet and its connection; an empty packet is the end of the connection."""

PAUSE_SECONDS = 1.0
"""How long nothing is accepted after this process ran out of file descriptors."""


class LocalListener:
    """Listens at ``endpoint`` (ipc), and reads from all connections. Used by one thread at a time.

    Args:
        endpoint: see :func:`~zmqgrad.transport.local.connection.unix_name`.
        poll: polls the listening socket and the connections.
        key: of the job; connections of processes that do not know it are refused.
        incarnation: connections for another process are refused.
        call_later: runs a job later, in any thread.
        on_opened: called with a connection that was accepted, before its peer is told. Returns whether to
            keep it; one that continues another is kept.
        on_continued: called with a connection that has ended, and that another one continues.
        max_connections: further connections are refused.
        bursts: whether a peer may send many packets in a row, without waiting for replies.
        accepts_newcomers: whether to accept a peer that does not know the incarnation, and names 0.

    Raises:
        OSError: if it cannot listen there.
    """

    def __init__(
        self,
        endpoint: str,
        poll: Registry,
        key: bytes,
        incarnation: int,
        call_later: Callable[[float, Callable[[], None]], object],
        *,
        on_opened: Callable[[LocalConnection], bool] = lambda connection: True,
        on_continued: Callable[[LocalConnection], object] = lambda connection: None,
        max_connections: int = MAX_CONNECTIONS,
        bursts: bool = True,
        accepts_newcomers: Callable[[], bool] = lambda: False,
    ) -> None:
        self.endpoint = endpoint
        self.connections: dict[int, LocalConnection] = {}
        """The accepted connections, by file descriptor."""
        self.backlogged: set[int] = set()
        """The descriptors of connections whose packets wait until the kernel accepts more."""
        self.bursting = False
        """Whether the last burst had several packets."""
        self.on_resumed: Callable[[], None] = lambda: None
        """Called when a descriptor is polled again that was not for lack of descriptors. From any thread."""
        self._paused: set[int] = set()  # descriptors that are not polled
        self._poll = poll
        self._key = key
        self._refusals = RepeatLog(logger, endpoint)
        self._incarnation = incarnation
        self._call_later = call_later
        self._on_opened = on_opened
        self._on_continued = on_continued
        self._max_connections = max_connections
        self._accepts_newcomers = accepts_newcomers
        # Whether to take the packet just read for the only one.
        guesses = [not bursts, *[True] * (PROBE_INTERVAL - 1)]
        self._is_alone: Callable[[], bool] = itertools.cycle(guesses).__next__
        self._handshaking: dict[int, socket.socket] = {}  # connected sockets that have not sent a hello
        self._strangers = Strangers(MAX_HANDSHAKES, call_later)  # the same, but for those whose time is over
        self._following: dict[Hello, LocalConnection] = {}  # to be read when the one before has ended
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listening.setblocking(False)
            self._listening.bind(unix_name(endpoint))
            self._listening.listen(ACCEPT_BACKLOG)
        except OSError:
            self._listening.close()
            raise
        poll.register(self._listening.fileno(), select.POLLIN)
        in_forks(self, LocalListener.abandon)

    @property
    def is_open(self) -> bool:
        """Whether :meth:`close` was not called."""
        return self._listening.fileno() >= 0

    def read(self, fd: int) -> Sequence[Arrival]:
        """Returns what arrived at file descriptor ``fd``, which is ready."""
        try:
            connection = self.connections[fd]
        except KeyError:
            self._handshake(fd)
            return ()
        arrived: list[Arrival] = []
        try:
            packet = connection.receive()
            if packet and not self.bursting and self._is_alone():
                return ((packet, connection),)
            while packet:
                arrived.append((packet, connection))
                if len(arrived) == BURST_PACKETS:
                    break
                packet = connection.receive()
            else:
                arrived += self._finish(fd, connection)
        except BlockingIOError:
            if not arrived and fd in self.backlogged:
                self._flush(fd, connection)
        except OSError as e:
            check_is_of_system(e)
            if not self._pause_without_descriptor(e, fd):
                logger.debug("%s: a connection is broken: %s", self.endpoint, e)
                arrived += self._finish(fd, connection)
        self.bursting = len(arrived) > 1
        return arrived

    def _on_backlog(self, connection: LocalConnection) -> None:
        """Called by the thread that reads, when it sends."""
        self.backlogged.add(connection.fd)
        self._poll_again(connection.fd, select.POLLIN | select.POLLOUT)

    def _flush(self, fd: int, connection: LocalConnection) -> None:
        try:
            flushed = connection.flush()
        except OSError as e:
            check_is_of_system(e)
            logger.debug("%s: a connection is broken: %s", self.endpoint, e)
            flushed = True  # the next read finds that, too
        if flushed:
            self.backlogged.discard(fd)
            self._poll_again(fd, select.POLLIN)

    def _poll_again(self, fd: int, mask: int) -> None:
        self._poll.unregister(fd)
        self._poll.register(fd, mask)

    def _finish(self, fd: int, connection: LocalConnection) -> Sequence[Arrival]:
        """Closes a connection that was read to its end, which is returned unless another one continues it."""
        hello = connection.hello
        following = msgspec.structs.replace(hello, number=hello.number + 1)
        if hello.source >= 0 and following not in self._following:
            self.accept_pending()  # it was opened before this one was closed
            if self._listening.fileno() in self._paused and self._pause(fd):
                return ()  # it may wait there for a descriptor of this process
        self._end(fd, connection)
        next_one = self._following.pop(following, None)
        if next_one is None:
            return ((b"", connection),)
        self._on_continued(connection)
        self._welcome(next_one)
        return ()

    def _pause_without_descriptor(self, error: OSError, fd: int) -> bool:
        """Stops polling ``fd`` for a while if this process has no descriptor left. Returns whether so."""
        return error.errno in (errno.EMFILE, errno.ENFILE) and self._pause(fd)

    def _pause(self, fd: int) -> bool:
        if not self.is_open:
            return False
        if fd not in self._paused:
            logger.warning("%s: this process has no more file descriptors: peers must wait", self.endpoint)
            self._paused.add(fd)
            self._poll.unregister(fd)
            self._call_later(PAUSE_SECONDS, lambda: self._resume(fd))
        return True

    def _resume(self, fd: int) -> None:
        if fd in self._paused and self.is_open:
            self._poll.register(fd, select.POLLIN)
            self._paused.discard(fd)
            self.on_resumed()

    def _handshake(self, fd: int) -> None:
        """Handles the listening socket, or the hello of a new connection."""
        new = self._handshaking.get(fd)
        if new is None:
            if fd == self._listening.fileno():
                self._accept()
            return
        packet, hello = b"", None
        try:
            packet = new.recv(MAX_HELLO_BYTES)
            hello = read_hello(self._key, self.endpoint, packet)
        except BlockingIOError:
            return
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as e:
            if isinstance(e, OSError):
                check_is_of_system(e)
            logger.debug("%s: a connection has failed at its first packet: %s", self.endpoint, e)
        if hello is not None and hello.number:
            # Behind those accepted before, however their events are ordered: one of them may come before it.
            for earlier in list(itertools.takewhile(lambda other: other != fd, self._handshaking)):
                self._handshake(earlier)
        del self._handshaking[fd]
        self._poll.unregister(fd)
        if not self._strangers.remove(new):
            hello, packet = None, b""
            self._refusals.warning(f"{self.endpoint}: closed a connection that has sent nothing")
        full = len(self.connections) + len(self._following) >= self._max_connections
        if hello is None and packet:
            self._refusals.warning(
                f"{self.endpoint}: refused a process that does not know the key of this job"
            )
        if hello is None or full or not self._is_for_us(hello) or hello in self._following:
            new.close()
            return
        connection = LocalConnection(new, self._on_backlog, hello, expected=welcome(self._key, packet))
        if self._continues_another(hello):
            self._following[hello] = connection
            self._on_opened(connection)
            return
        # Known before the peer may reply by it: otherwise its end, read elsewhere, could overtake the reply.
        if self._on_opened(connection):
            self._welcome(connection)
        else:
            connection.close()

    def _continues_another(self, hello: Hello) -> bool:
        """Returns whether the connection before the one that begins with ``hello`` is still to be read."""
        if not hello.number:
            return False
        before = msgspec.structs.replace(hello, number=hello.number - 1)
        return before in self._following or any(c.hello == before for c in self.connections.values())

    def _welcome(self, connection: LocalConnection) -> None:
        """Begins to read ``connection``."""
        self._poll.register(connection.fd, select.POLLIN)
        self.connections[connection.fd] = connection
        try:
            connection.welcome()
        except OSError as e:
            check_is_of_system(e)
            # What it has sent is to be read nevertheless.
            logger.debug("%s: a peer left before it was accepted: %s", self.endpoint, e)

    def _is_for_us(self, hello: Hello) -> bool:
        if hello.protocol == PROTOCOL and hello.target == ANY and hello.source < 0:
            return self._accepts_newcomers()
        matches = (hello.protocol, hello.target) == (PROTOCOL, self._incarnation)
        if not matches:
            self._refusals.warning(
                f"{self.endpoint}: refused a connection that was meant for another process"
            )
        return matches

    def accept_pending(self) -> None:
        """Accepts the connections that wait for it now, whose packets are then read in their turn.

        Not those that come meanwhile: strangers could connect faster than they are refused.
        """
        for _ in range(ACCEPT_BACKLOG + 1):  # the kernel queues one more than it is told
            if not (self.is_open and self._accept()):
                break
        for fd in list(self._handshaking):
            self._handshake(fd)

    def _accept(self) -> bool:
        """Accepts one connection. Returns False if none waits, or there is no descriptor for it."""
        try:
            accepted, _ = self._listening.accept()
        except OSError as e:
            check_is_of_system(e)
            self._pause_without_descriptor(e, self._listening.fileno())
            logger.debug("%s: nothing accepted: %s", self.endpoint, e)
            return False
        if not is_same_user(accepted):
            self._refusals.warning(f"{self.endpoint}: refused a process of another user")
            accepted.close()
            return True
        accepted.setblocking(False)
        self._poll.register(accepted.fileno(), select.POLLIN)
        self._handshaking[accepted.fileno()] = accepted  # last: what is known can be unregistered
        surplus = self._strangers.add(accepted, process_of(accepted))
        if surplus is not None:
            self._close_silent(surplus)
        return True

    def _close_silent(self, stranger: socket.socket) -> None:
        """Closes a connection unless it has sent a hello, as a peer does at once."""
        fd = stranger.fileno()
        self._handshake(fd)
        if self._handshaking.pop(fd, None) is not None:
            self._refusals.warning(f"{self.endpoint}: closed a connection that has sent nothing")
            self._poll.unregister(fd)
            self._strangers.remove(stranger)
            stranger.close()

    def _end(self, fd: int, connection: LocalConnection) -> None:
        if fd in self._paused:
            self._paused.discard(fd)
        else:
            self._poll.unregister(fd)
        del self.connections[fd]
        self.backlogged.discard(fd)
        connection.close()

    def drop(self, connection: LocalConnection) -> None:
        """Closes ``connection`` unless it has ended."""
        fd = connection.fd
        if self.connections.get(fd) is connection:
            self._end(fd, connection)

    def stop(self) -> list[LocalConnection]:
        """Lets nothing more arrive. Returns the connections, which are to be read to their ends."""
        self.accept_pending()  # now: one that is accepted while the others are read, nobody would read
        self._stop_listening()
        return self._stop_receiving()

    def _stop_listening(self) -> None:
        self._listening.close()
        for new in self._handshaking.values():
            self._strangers.remove(new)
            new.close()
        self._handshaking.clear()

    def _stop_receiving(self) -> list[LocalConnection]:
        connections = [*self.connections.values(), *self._following.values()]
        for connection in connections:
            connection.stop_receiving()
        return connections

    def close(self) -> None:
        """Stops listening and reading. Idempotent."""
        self._stop_listening()
        for connection in self._stop_receiving():
            with suppress(OSError):
                while connection.receive():
                    pass  # the kernel would report what is left unread to the peer, before our last packets
            connection.close()
        self.connections.clear()
        self._following.clear()

    def abandon(self) -> None:
        """In a forked child: closes the child's copies of the sockets of the listener."""
        self._listening.close()
        for new in self._handshaking.values():
            new.close()
