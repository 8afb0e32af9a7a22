"""A door: where messages of this host come in without a thread between the kernel and whoever reads them.

libzmq reads its sockets in a thread of its own, which then wakes the one that asked; on an idle machine each
wake-up costs as much as the way between the processes. So small messages of peers of this host come to a
plain listener on which ZMTP is spoken (:mod:`zmqgrad.transport.zmtp`), and which the reader itself polls.
Who waits for one answer has a door of its own, a lane (:mod:`zmqgrad.transport.lanes`); all else comes to
the one that :mod:`~zmqgrad.transport.receiver` reads beside the ROUTER.
"""

from __future__ import annotations

import logging
import os
import select
import socket as sockets
import struct
import sys
from collections.abc import Sequence
from typing import Protocol

from zmqgrad.errors import ProtocolError
from zmqgrad.transport.zmtp import Unpacker, opening

logger = logging.getLogger(__name__)

READ_SIZE = 64 << 10

_OPENING = opening("DEALER")


def door_address(endpoint: str, number: int = 0) -> str:
    """Where door ``number`` of the worker at ``endpoint`` (ipc) is; 0 is the receiver's, others are lanes."""
    return f"{endpoint}-{number}"


def unix_address(endpoint: str) -> str:
    """The name by which the system knows an ipc endpoint."""
    path = endpoint.removeprefix("ipc://")
    return "\0" + path[1:] if path.startswith("@") else path


class Registry(Protocol):
    """What polls file descriptors."""

    def register(self, number: int, mask: int, /) -> None:
        """Poll ``number`` for ``mask`` (``select.POLLIN``)."""
        ...

    def unregister(self, number: int, /) -> None:
        """Poll it no more."""
        ...


class Door:
    """A listener at ``address`` (ipc) and all who have come in by it. One thread at a time uses it.

    Args:
        address: as of :func:`door_address`.
        poll: where the listener and the connections are registered for reading.

    Raises:
        OSError: if it cannot listen.
    """

    def __init__(self, address: str, poll: Registry) -> None:
        self._address = address
        self._poll = poll
        self._peers: dict[int, tuple[sockets.socket, Unpacker]] = {}
        self._listener = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        try:
            self._listener.setblocking(False)
            self._listener.bind(unix_address(address))
            self._listener.listen(128)
        except OSError:
            self._listener.close()
            raise
        poll.register(self._listener.fileno(), select.POLLIN)

    def read(self, number: int) -> Sequence[bytes]:
        """What has come by file descriptor ``number``, which is ready: frames, each of them a message."""
        peer = self._peers.get(number)
        if peer is None:
            self._accept()
            return ()
        socket, unpacker = peer
        try:
            data = socket.recv(READ_SIZE)
            frames = unpacker.feed(data) if data else ()
        except BlockingIOError:
            return ()
        except (OSError, ProtocolError) as e:
            logger.debug("%s: dropped a peer: %s", self._address, e)
            data, frames = b"", ()
        if not data:
            self._poll.unregister(number)
            del self._peers[number]
            socket.close()
        if None in frames:  # a message of several frames, which nobody of ours sends by a door
            frames = [frame or b"" for frame in frames]
        return frames  # type: ignore[return-value]  # views are for large ones, which do not come here

    def _accept(self) -> None:
        try:
            socket, _ = self._listener.accept()
        except OSError as e:  # it has left again
            logger.debug("%s: nobody to let in: %s", self._address, e)
            return
        if not is_of_this_user(socket):
            logger.warning("%s: refused a process of another user", self._address)
            socket.close()
            return
        socket.setblocking(False)
        try:
            socket.send(_OPENING)
        except OSError as e:
            logger.debug("%s: a peer left at the door: %s", self._address, e)
            socket.close()
            return
        self._peers[socket.fileno()] = socket, Unpacker("DEALER")
        self._poll.register(socket.fileno(), select.POLLIN)

    def close(self) -> None:
        """Nobody comes in any more, and all who did are sent away. Idempotent."""
        for socket in (self._listener, *(socket for socket, _ in self._peers.values())):
            socket.close()


def is_of_this_user(socket: sockets.socket) -> bool:
    """Is the process at the other end one of our own user's? (Whoever listened there, or connected.)"""
    if sys.platform != "linux":
        return True  # the address lies in a private directory
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, size))
    return bool(user == os.getuid())
