"""The short way out: a small message is written to the peer's door by the thread that sends it.

libzmq hands every message to a thread of its own, which writes it; waking that thread costs more than the
writing. So beside the DEALER to a peer of this host there is a plain connection to its door
(:mod:`zmqgrad.transport.door`), on which the sender speaks ZMTP itself (:mod:`zmqgrad.transport.zmtp`).

A message goes this way whole or not at all. What has several frames or is large, what the kernel will not
take at once, and what comes before the peer has said READY (whoever listens may refuse one that speaks
earlier) is left to the DEALER. So messages may overtake one another.
"""

from __future__ import annotations

import logging
import socket as sockets

from zmqgrad.errors import ProtocolError
from zmqgrad.transport.door import unix_address
from zmqgrad.transport.holding import send_holding
from zmqgrad.transport.zmtp import Unpacker, opening

logger = logging.getLogger(__name__)

LARGEST = 16 << 10
"""Bytes of a message that goes this way: the kernel takes so many in one piece."""

BUFFER = 1 << 20
"""Bytes that the kernel keeps of what the peer has not read yet, if it may: some thousand calls. By default
it takes a few hundred, and what comes after goes by the DEALER, at twice the cost."""

_HEADS = tuple(bytes([0, size]) for size in range(256))
_OPENING = opening("DEALER")


class Direct:
    """A connection to one door. Its owner's lock guards it."""

    __slots__ = ("_greeting", "_number", "_send", "_socket")

    def __init__(self, socket: sockets.socket) -> None:
        self._socket = socket
        self._number = socket.fileno()
        self._send = socket.send
        self._greeting: Unpacker | None = Unpacker("DEALER")  # until the peer is ready

    @classmethod
    def open(cls, endpoint: str) -> Direct | None:
        """Connect to the door at ``endpoint``; None if that cannot be done at once."""
        socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        try:
            socket.setblocking(False)
            socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDBUF, BUFFER)
            socket.connect(unix_address(endpoint))
            socket.sendall(_OPENING)
        except OSError as e:
            logger.debug("no short way to %s: %s", endpoint, e)
            socket.close()
            return None
        return cls(socket)

    def send(self, frame: bytes | bytearray, awaited: bool = True) -> bool | None:
        """Write a message of this one frame, which has at most ``LARGEST`` bytes.

        ``awaited``: its sender goes on to wait, or somebody waits for it. Otherwise it may be one of many.
        False: it cannot be done now; nothing was written. None: the connection is of no use any more.
        """
        if self._greeting is not None:
            ready = self._is_ready(self._greeting)
            if not ready:
                return ready
            self._greeting = None
        size = len(frame)
        head = _HEADS[size] if size < 256 else b"\2" + size.to_bytes(8, "big")
        message = head + frame  # copying so little takes less time than a list of pieces
        try:
            written = self._send(message) if awaited else send_holding(self._number, message)
        except BlockingIOError:
            return False
        except OSError as e:
            logger.debug("the short way is closed: %s", e)
            return None
        # Half a message: the peer drops it when the connection ends.
        return written == len(message) or None

    def _is_ready(self, greeting: Unpacker) -> bool | None:
        try:
            said = self._socket.recv(4096)
            if not said:
                return None
            greeting.feed(said)
        except BlockingIOError:
            return False
        except (OSError, ProtocolError) as e:
            logger.debug("no short way: %s", e)
            return None
        return greeting.ready

    def close(self) -> None:
        """Idempotent."""
        self._number = -1
        self._socket.close()
