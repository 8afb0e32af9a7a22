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
from contextlib import suppress
from itertools import islice

import zmq

from zmqgrad.errors import TransportError
from zmqgrad.transport.bind_policy import bind_tcp
from zmqgrad.transport.reader import BURST, Reader
from zmqgrad.transport.sockets import ACCEPT_FAILED, ACCEPTED, DISCONNECTED, LISTENING, SocketMonitor

logger = logging.getLogger(__name__)

MAX_SILENT = 512
"""Connections that may not have sent a message yet. Each takes some 10 KB, and a descriptor."""

PAUSE_SECONDS = 1.0
"""How long nothing is accepted after the process ran out of file descriptors."""

OnEvent = Callable[[int, int], object]
"""Called with the kind of a connection's event, and its value: see :mod:`~zmqgrad.transport.sockets`."""


class TcpListener:
    """Binds ``socket`` to ``address``, and watches its connections, in the thread of ``reader``.

    Args:
        reader: reads the socket; closes this when it has ended.
        secured, listen_fd: as :func:`~zmqgrad.transport.bind_policy.bind_tcp`.
        on_event: called with each event.
        events: the kinds of further events, as a sum.

    Raises:
        AddressInUseError, ConfigurationError: as :func:`bind_tcp`.
        TransportError: as :func:`bind_tcp`, or if no descriptor is left.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        address: str,
        reader: Reader,
        *,
        secured: bool,
        listen_fd: int | None = None,
        on_event: OnEvent = lambda kind, value: None,
        events: int = 0,
    ) -> None:
        self._socket = socket
        self._address = address
        self._reader = reader
        self._secured = secured
        self._on_event = on_event
        self._is_bound = True
        self._copy = -1  # of the descriptor that libzmq listens at
        self._spare = -1  # a descriptor for a copy of any other
        self._warned: set[str] = set()
        self._open: dict[int, int] = {}  # connections: inodes by descriptor
        self._silent: dict[int, None] = {}  # those that have not sent a message, oldest first
        self._cut: set[int] = set()  # those that libzmq is about to close
        self._early: set[int] = set()  # inodes of those whose first message overtook the event of their begin
        self._monitor = SocketMonitor(socket, LISTENING | ACCEPTED | ACCEPT_FAILED | DISCONNECTED | events)
        try:
            self.endpoint = bind_tcp(socket, address, secured=secured, listen_fd=listen_fd)
            self.port = int(self.endpoint.rpartition(":")[2])
            self.read()  # the first event names the descriptor, which libzmq has not closed yet
        except BaseException as e:
            self.close()
            if isinstance(e, OSError):
                raise TransportError(f"cannot listen on {address}: {e.strerror}") from e
            raise
        reader.at_end.append(self.close)
        reader.watch(self._monitor.fd, self.read)

    @property
    def silent(self) -> int:
        """How many connections have not sent a message yet."""
        return len(self._silent)

    def read(self, at_once: int | None = BURST) -> bool:
        """Handles events. Counts connections, and cuts some if there are too many.

        Args:
            at_once: how many events; others are handled later. None: all.

        Returns:
            Whether these were all.
        """
        tried, handled = False, 0
        for kind, value in islice(self._monitor.read(), at_once):
            handled += 1
            if kind != ACCEPT_FAILED:
                self._count(kind, value)
                self._on_event(kind, value)
            elif not self._cut and self._is_bound:
                # At most once: libzmq reports failures as fast as they are read.
                if tried or not self._silent:
                    self._pause()
                else:
                    self._warn("no more file descriptors; closed the connections that have sent nothing")
                    self._cut_oldest(len(self._silent))
                tried = True
            if len(self._silent) > MAX_SILENT:  # now, as more may arrive for as long as events are read
                self._warn("too many connections have sent nothing; closed the oldest")
                self._cut_oldest(len(self._silent) - MAX_SILENT)
        if handled == at_once:
            self._reader.call_again(self.read)
            return False
        self._early.clear()
        return True

    def _count(self, kind: int, fd: int) -> None:
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
            self._open[fd] = inode = os.fstat(fd).st_ino
        except OSError:
            return  # it has ended already, as the next event reports
        if inode not in self._early:
            self._silent[fd] = None

    def _forget(self, fd: int) -> None:
        self._open.pop(fd, None)
        self._silent.pop(fd, None)
        self._cut.discard(fd)

    def hear(self, fd: int) -> None:
        """Notes that a message has arrived by the connection with descriptor ``fd``."""
        # That it was accepted, and perhaps that another one, with that descriptor, has ended.
        if not self.read():
            with suppress(OSError):  # it has ended meanwhile
                self._early.add(os.fstat(fd).st_ino)
        self._silent.pop(fd, None)

    def _cut_oldest(self, count: int) -> None:
        """Ends connections; libzmq then closes them. Needs no new descriptor."""
        for fd in list(islice(self._silent, count)):
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

    def _pause(self) -> None:
        """Accepts nothing for a while. Ends all connections, which libzmq does not report."""
        self._socket.unbind(self.endpoint)
        self._is_bound = False
        self._reader.call_later(PAUSE_SECONDS, self._resume)
        self._warn("no more file descriptors; peers have to wait until others have left")
        for fd in self._open:
            self._on_event(DISCONNECTED, fd)

    def _resume(self) -> None:
        """Accepts connections again if the process has file descriptors."""
        copy = -1
        try:
            copy = os.dup(self._copy)
            self.read(None)
            for fd in list(self._open):
                self._forget(fd)  # accepted before libzmq gave up the address, and closed then
            bind_tcp(self._socket, self._address, secured=self._secured, listen_fd=copy)
            self._is_bound = True
        except (OSError, TransportError) as e:
            logger.debug("%s: cannot accept connections yet: %s", self.endpoint, e)
            self._reader.call_later(PAUSE_SECONDS, self._resume)
            if copy >= 0:
                os.close(copy)

    def close(self) -> None:
        """Stops watching, and gives up the port. Must be called before the socket is closed. Idempotent."""
        self._monitor.close()
        for fd in (self._copy, self._spare):
            if fd >= 0:
                os.close(fd)
        self._copy = self._spare = -1
