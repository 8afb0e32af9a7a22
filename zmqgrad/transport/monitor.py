"""What becomes of the connections of a ZeroMQ socket, as libzmq reports it (``zmq_socket_monitor(3)``)."""

from __future__ import annotations

import itertools
import os
import struct
from typing import NamedTuple

import zmq

CONNECTED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
CONNECT_FAILED = int(zmq.EVENT_CLOSED)
"""The connection was refused, or not accepted in time."""
ACCEPTED = int(zmq.EVENT_ACCEPTED)
ACCEPT_FAILED = int(zmq.EVENT_ACCEPT_FAILED)
HANDSHAKE_CUT = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
"""The peer closed the connection during the handshake. A CURVE peer does so if it has other keys."""

HANDSHAKE_MALFORMED = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
HANDSHAKE_DENIED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
HANDSHAKE_FAILED = HANDSHAKE_CUT | HANDSHAKE_MALFORMED | HANDSHAKE_DENIED

MECHANISM_MISMATCH = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
"""Value of HANDSHAKE_MALFORMED: one side encrypts, the other does not. libzmq does not try again."""

BURST = 64
"""Events that are read before the first is looked at: it may say what to do about those that follow."""

_numbers = itertools.count()
_read = struct.Struct("=HI").unpack_from


class SocketEvent(NamedTuple):
    """One of the constants of this module, and what ``zmq_socket_monitor(3)`` says its value is."""

    kind: int
    value: int


class SocketMonitor:
    """Monitors the connections of ``socket``. ``number`` is the descriptor to poll; see :meth:`read`.

    Must be created before the socket binds or connects, and used by one thread at a time.

    Args:
        events: which events, as a sum of constants of this module. Take few: what nobody reads is kept.
    """

    def __init__(self, socket: zmq.Socket[bytes], events: int) -> None:
        address = f"inproc://zmqgrad-monitor-{os.getpid()}-{next(_numbers)}"
        socket.monitor(address, events)
        self._socket = socket
        self._pair: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        self._pair.linger = 0
        # libzmq's I/O thread waits for a monitor that is full, and all its other sockets with it.
        self._pair.rcvhwm = 0
        self._pair.connect(address)
        self.number = int(self._pair.getsockopt(zmq.FD))
        self.read()  # a descriptor of libzmq does not tell of anything before all was read

    def read(self) -> list[SocketEvent]:
        """What has happened, in parts. Call it until it is empty before ``number`` is polled again."""
        events: list[SocketEvent] = []
        try:
            while len(events) < BURST:
                event, _ = self._pair.recv_multipart(zmq.NOBLOCK)
                events.append(SocketEvent(*_read(event)))
        except zmq.Again:
            pass
        return events

    def close(self) -> None:
        """Stop. Before the socket is closed. Idempotent."""
        if not self._pair.closed:
            if not self._socket.closed:
                self._socket.disable_monitor()
            self._pair.close(linger=0)
