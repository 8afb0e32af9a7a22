"""One connection of a request server: bytes to frames, and answers that wait until they are taken."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable

from zmqgrad.errors import ProtocolError
from zmqgrad.transport.requests.pipes import Ends
from zmqgrad.transport.zmtp import Frame, Unpacker

CHUNK = 64 << 10
"""How much is read at a time, but for large requests."""

Pipe = Callable[[bytes | bytearray], int | None]
"""Writes to a pipe; gives how much it took, None for nothing. Raises ``OSError`` if nobody reads there."""


class Client:
    """Whoever asks, at the server's end of a connection that does not block. To a service it is a name.

    Args:
        unpacker: knows how the other end speaks.
    """

    __slots__ = (
        "address",
        "at_rest",
        "closed",
        "ends",
        "out",
        "pipe",
        "socket",
        "stranger",
        "surplus",
        "unpacker",
    )

    def __init__(self, connection: socket.socket, address: str, unpacker: Unpacker) -> None:
        self.socket = connection
        self.address = address
        self.unpacker = unpacker
        self.stranger = True
        """It has not said who it is."""
        self.surplus = False
        """It is one too many, and to be told so."""
        self.at_rest = False
        """Is the next request all that comes, and in the clear? :meth:`receive` finds out."""
        self.closed = False
        self.ends: Ends | None = None
        """Pipes, if it has been given some."""
        self.pipe: Pipe | None = None
        """Writes to one, if it asked by the other last."""
        self.out: deque[memoryview] = deque()
        """What the other end did not take yet."""

    def receive(self, data: bytes = b"") -> list[Frame | None] | None:
        """Messages that are complete now, as :class:`Unpacker` gives them; None: the other end hung up.

        ``data`` has been received already.

        Raises:
            OSError: if the connection has ended otherwise.
            ProtocolError: if the other end does not speak as it should.
        """
        unpacker = self.unpacker
        try:
            if unpacker.large is None:
                data = data or self.socket.recv(CHUNK)
                frames = unpacker.feed(data) if data else None
            else:
                size = self.socket.recv_into(unpacker.room)
                frames = unpacker.filled(size) if size else None
        except BlockingIOError:
            return []
        except MemoryError:
            raise ProtocolError("a message for which there is no memory") from None
        finally:
            if unpacker.answers:
                self.send(bytes(unpacker.answers))
                unpacker.answers.clear()
        self.at_rest = unpacker.at_rest and unpacker.MECHANISM == b"NULL"
        return frames

    def send(self, data: bytes) -> None:
        """Send ``data``, now or in :meth:`flush`.

        Raises:
            OSError: if the connection has ended.
        """
        sent = 0
        if not self.out:
            try:
                sent = self.socket.send(data)
            except BlockingIOError:
                pass
        self.keep(sent, data)

    def keep(self, sent: int, *data: bytes | bytearray) -> None:
        """The other end took ``sent`` bytes of ``data``: keep the rest until it takes more."""
        for each in data:
            if sent < len(each):
                self.out.append(memoryview(each)[sent:])
            sent = max(0, sent - len(each))

    def flush(self) -> None:
        """Send what the other end did not take, as far as it does now.

        Raises:
            OSError: if the connection has ended.
        """
        out = self.out
        try:
            while out:
                sent = self.socket.send(out[0])
                if sent < len(out[0]):
                    out[0] = out[0][sent:]
                    return
                out.popleft()
        except BlockingIOError:
            return

    def __repr__(self) -> str:
        return f"<Client at {self.address}{', closed' if self.closed else ''}>"
