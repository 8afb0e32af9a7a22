"""The tcp address of a socket of libzmq: limits strangers, and pauses without descriptors.

libzmq accepts as many connections as there are descriptors. So of those that have not sent a message yet,
which takes a completed handshake, the oldest is cut when there are many: peers speak at once.

Without a descriptor libzmq tries to accept again without a pause, and aborts the process when it needs one
itself. So all strangers are cut then; if there are none, the address is given up for a while. That closes the
other connections, too, which libzmq does not report; their peers connect again. The port stays ours, and the
kernel queues connections there meanwhile.
"""

from __future__ import annotations

import logging
import os
import socket as sockets
from collections.abc import Callable

import zmq

from zmqgrad.errors import TransportError
from zmqgrad.transport.sockets import (
    ACCEPT_FAILED,
    ACCEPTED,
    DISCONNECTED,
    LISTENING,
    SocketEvent,
    SocketMonitor,
)

logger = logging.getLogger(__name__)

MAX_SILENT = 512
"""Connections that may not have sent a message yet. Each takes some 10 KB, and a descriptor."""

PAUSE_SECONDS = 1.0
"""How long nothing is accepted after the process ran out of file descriptors."""

Bind = Callable[[int | None], str]
"""Binds the socket, at a descriptor that listens already or (None) at a new one; returns the endpoint."""


class TcpListener:
    """Binds ``socket`` by ``bind``, and watches its connections. Used by the thread that reads the socket.

    Args:
        call_later: runs a job later, in that thread.
        listen_fd: a descriptor to bind it at first, if there is one.
        events: further events that :meth:`read` returns, as a sum of constants of
            :mod:`~zmqgrad.transport.sockets`.

    Raises:
        OSError, TransportError: what ``bind`` raises, or if no descriptor is left.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        bind: Bind,
        call_later: Callable[[float, Callable[[], None]], object],
        *,
        listen_fd: int | None = None,
        events: int = 0,
    ) -> None:
        self._socket = socket
        self._bind = bind
        self._call_later = call_later
        self._is_bound = True
        self._copy = -1  # of the descriptor that libzmq listens at
        self._spare = -1  # a descriptor for a copy of any other
        self._warned: set[str] = set()
        self._open: dict[int, int] = {}  # connections: inodes by descriptor
        self._silent: dict[int, None] = {}  # those that have not sent a message, oldest first
        self._cut: set[int] = set()  # those that libzmq is about to close
        self._monitor = SocketMonitor(socket, LISTENING | ACCEPTED | ACCEPT_FAILED | DISCONNECTED | events)
        self.fd = self._monitor.fd
        """Readable when there may be events: then call :meth:`read`."""
        try:
            self.endpoint = bind(listen_fd)
            self.port = int(self.endpoint.rpartition(":")[2])
            self.read()  # the first event names the descriptor, which libzmq has not closed yet
        except BaseException:
            self.close()
            raise

    @property
    def silent(self) -> int:
        """How many connections have not sent a message yet."""
        return len(self._silent)

    def read(self) -> list[SocketEvent]:
        """Returns all events. Counts connections, and cuts some if there are too many."""
        found: list[SocketEvent] = []
        tried = False
        while events := self._monitor.read():
            for event in events:
                if event.kind == ACCEPT_FAILED:
                    if not self._cut and self._is_bound:
                        # At most once: libzmq reports failures as fast as they are read.
                        found += self._pause() if tried else self._cut_all()
                        tried = True
                    continue
                found.append(event)
                self._count(event)
            if len(self._silent) > MAX_SILENT:  # now, as more may arrive for as long as events are read
                self._warn("too many connections have sent nothing; closed the oldest")
                self._cut_oldest(len(self._silent) - MAX_SILENT)
        return found

    def _count(self, event: SocketEvent) -> None:
        kind, fd = event
        if kind == ACCEPTED:
            self._on_accepted(fd)
        elif kind == DISCONNECTED:
            self._forget(fd)
        elif kind == LISTENING and self._copy < 0:
            self._copy = os.dup(fd)
            self._spare = os.dup(fd)

    def _on_accepted(self, fd: int) -> None:
        self._forget(fd)
        try:
            self._open[fd] = os.fstat(fd).st_ino
        except OSError:
            return  # it has ended already, as the next event reports
        self._silent[fd] = None

    def _forget(self, fd: int) -> None:
        self._open.pop(fd, None)
        self._silent.pop(fd, None)
        self._cut.discard(fd)

    def hear(self, fd: int) -> bool:
        """Notes that a message has arrived by the connection with descriptor ``fd``.

        Returns:
            False if it is not known that it was accepted: then :meth:`read` first.
        """
        self._silent.pop(fd, None)
        return fd in self._open

    def _cut_all(self) -> list[SocketEvent]:
        """Makes room for descriptors. Returns the ends that libzmq does not report."""
        if not self._silent:
            return self._pause()
        self._warn("no more file descriptors; closed the connections that have sent nothing")
        self._cut_oldest(len(self._silent))
        return []

    def _cut_oldest(self, count: int) -> None:
        """Ends connections; libzmq then closes them. Needs no new descriptor."""
        for fd in list(self._silent)[:count]:
            del self._silent[fd]
            if self._shut_down(fd):
                self._cut.add(fd)
        os.dup2(self._copy, self._spare, inheritable=False)

    def _shut_down(self, fd: int) -> bool:
        """Returns False if libzmq has closed the connection already. Its number may be another's then."""
        try:
            os.dup2(fd, self._spare, inheritable=False)  # what the copy refers to stays the same
            if os.fstat(self._spare).st_ino != self._open[fd]:
                return False
            connection = sockets.socket(fileno=self._spare)
        except OSError:
            return False
        try:
            own: bool = connection.getsockname()[1] == self.port
            if own:
                connection.shutdown(sockets.SHUT_RDWR)
            return own
        except OSError:
            return False  # it has ended, as libzmq is about to find
        finally:
            connection.detach()

    def _warn(self, why: str) -> None:
        level = logging.DEBUG if why in self._warned else logging.WARNING
        logger.log(level, "%s: %s", self.endpoint, why)
        self._warned.add(why)

    def _pause(self) -> list[SocketEvent]:
        """Accepts nothing for a while. Returns the ends of all connections, which libzmq does not report."""
        ended = [SocketEvent(DISCONNECTED, fd) for fd in self._open]
        self._socket.unbind(self.endpoint)
        self._is_bound = False
        self._call_later(PAUSE_SECONDS, self._resume)
        self._warn("no more file descriptors; peers have to wait until others have left")
        return ended

    def _resume(self) -> None:
        """Accepts connections again if the process has file descriptors."""
        copy = -1
        try:
            copy = os.dup(self._copy)
            self.read()
            for fd in list(self._open):
                self._forget(fd)  # accepted before libzmq gave up the address, and closed then
            self._bind(copy)
            self._is_bound = True
        except (OSError, TransportError) as e:
            logger.debug("%s: cannot accept connections yet: %s", self.endpoint, e)
            self._call_later(PAUSE_SECONDS, self._resume)
            if copy >= 0:
                os.close(copy)

    def close(self) -> None:
        """Stops watching, and gives up the port. Must be called before the socket is closed. Idempotent."""
        self._monitor.close()
        for fd in (self._copy, self._spare):
            if fd >= 0:
                os.close(fd)
        self._copy = self._spare = -1
