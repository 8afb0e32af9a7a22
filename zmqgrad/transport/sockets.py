"""ZeroMQ sockets: the options that all of ours have, sending several frames, and connection events."""

from __future__ import annotations

import itertools
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import zmq

from zmqgrad.wire.lazy_frame import Buffer

HANDSHAKE_TIMEOUT_MS = 10_000
"""How long a peer may take for the ZMTP handshake, authentication included."""

FRAME_BYTES = 1 << 20
"""What is larger is sent in several frames."""

MAX_FRAME_BYTES = FRAME_BYTES + (64 << 10)
"""Limit of what arrives as one frame, also in a handshake: libzmq allocates what a stranger announces."""

ZERO_COPY_BYTES = 256 << 10
"""Frames of at least this size are handed to libzmq without a copy; the sender must not write to them."""

NOBLOCK, NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
"""Plain integers: combining pyzmq's enumerations takes as long as sending a small message."""

CONNECTED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
CONNECT_FAILED = int(zmq.EVENT_CLOSED)
"""The connection was refused, or not accepted in time."""
LISTENING = int(zmq.EVENT_LISTENING)
ACCEPTED = int(zmq.EVENT_ACCEPTED)
ACCEPT_FAILED = int(zmq.EVENT_ACCEPT_FAILED)
HANDSHAKE_CUT = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
"""The peer closed the connection during the handshake. A CURVE peer does so if it has other keys."""
HANDSHAKE_MALFORMED = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
HANDSHAKE_DENIED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
HANDSHAKE_FAILED = HANDSHAKE_CUT | HANDSHAKE_MALFORMED | HANDSHAKE_DENIED

MECHANISM_MISMATCH = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
"""Value of HANDSHAKE_MALFORMED: one side encrypts, the other does not. libzmq does not try again."""

_monitor_numbers = itertools.count()
_unpack_event = struct.Struct("=HI").unpack_from


def set_up(socket: zmq.Socket[bytes]) -> None:
    """Sets the options that every socket has: nothing lingers, a handshake and a frame are limited."""
    socket.linger = 0
    socket.handshake_ivl = HANDSHAKE_TIMEOUT_MS
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)


def use_io_thread(socket: zmq.Socket[bytes], *, bulk: bool) -> None:
    """Gives the first I/O thread of the context to small messages, and the others to ``bulk`` sockets.

    So reading and writing large messages does not delay small ones. One thread alone serves both.
    """
    threads = socket.context.get(zmq.IO_THREADS)
    assert isinstance(threads, int)
    if threads > 1:
        socket.affinity = (1 << threads) - 2 if bulk else 1


def get_int(socket: zmq.Socket[bytes], option: int) -> int:
    """Returns an integer option of ``socket``."""
    value = socket.getsockopt(option)
    assert isinstance(value, int)
    return value


def connection_fd(frame: zmq.Frame) -> int:
    """Returns the descriptor of the connection by which ``frame`` arrived; -1 over inproc."""
    try:
        fd = frame.get(zmq.SRCFD)
    except zmq.ZMQError:
        return -1
    return fd if isinstance(fd, int) else -1


def send_all(socket: zmq.Socket[bytes], first: Buffer, frames: Sequence[Buffer]) -> None:
    """Queues a message of the frames ``first`` and ``frames``."""
    if not frames:
        socket.send(first, NOBLOCK)
        return
    socket.send(first, NOBLOCK_MORE)
    last = len(frames) - 1
    for i, frame in enumerate(frames):
        flags = NOBLOCK if i == last else NOBLOCK_MORE
        socket.send(frame if len(frame) < ZERO_COPY_BYTES else _shared(frame), flags)


def send_split(socket: zmq.Socket[bytes], data: Buffer, flags: int = NOBLOCK) -> None:
    """Queues ``data`` in frames of FRAME_BYTES, which :func:`joined` puts together again."""
    if len(data) <= FRAME_BYTES:
        socket.send(data if len(data) < ZERO_COPY_BYTES else _shared(data), flags)
        return
    view = memoryview(data)
    last = (len(data) - 1) // FRAME_BYTES * FRAME_BYTES
    for start in range(0, last, FRAME_BYTES):
        socket.send(_shared(view[start : start + FRAME_BYTES]), flags | int(zmq.SNDMORE))
    socket.send(_shared(view[last:]), flags)


_sharing = threading.RLock()


def _shared(data: Buffer) -> zmq.Frame:
    """A frame that shares the memory of ``data``.

    pyzmq has one thread and one socket by which libzmq tells it that such memory is free. It makes them with
    the first frame of a process, without a lock: of two threads, one had a socket that was closed at once.
    """
    with _sharing:
        return zmq.Frame(data, copy=False)


def _in_child() -> None:
    global _sharing
    _sharing = threading.RLock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_in_child)


def joined(frames: Sequence[zmq.Frame]) -> bytes:
    """Returns the content of several frames."""
    return b"".join([frame.buffer for frame in frames])


class SocketEvent(NamedTuple):
    """A connection event: a constant of this module, and its value (``zmq_socket_monitor(3)``)."""

    kind: int
    value: int


class SocketMonitor:
    """Reports connection events of ``socket`` (``zmq_socket_monitor(3)``). ``fd`` is polled, then read.

    Must be created before the socket binds or connects, and used by one thread at a time.

    An I/O thread of libzmq waits for ever to report an event that nobody receives, and with it all sockets of
    the context. So the receiver is there before the first event, and until the socket reports no more, also
    if Ctrl-C interrupts whoever creates or uses the monitor.

    Args:
        events: the kinds to report, as a sum of constants of this module. Unread events are kept, so request
            few.
    """

    def __init__(self, socket: zmq.Socket[bytes], events: int) -> None:
        address = f"inproc://zmqgrad-monitor-{os.getpid()}-{next(_monitor_numbers)}"
        self._socket = socket
        self._pair: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        self._pair.linger = 0
        self._pair.rcvhwm = 0  # a full monitor would block the I/O thread, too
        self._pair.connect(address)
        socket.monitor(address, events)
        self.fd = get_int(self._pair, zmq.FD)
        list(self.read())  # a descriptor of libzmq reports nothing new before everything was read

    def read(self) -> Iterator[SocketEvent]:
        """Yields all events; none after :meth:`close`. Exhaust it before ``fd`` is polled again."""
        while not self._pair.closed:
            try:
                event, _ = self._pair.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield SocketEvent(*_unpack_event(event))

    def close(self) -> None:
        """Stops reporting. Must be called before the socket is closed. Idempotent."""
        if hasattr(self, "_pair") and not self._pair.closed:
            try:
                if not self._socket.closed:
                    self._socket.disable_monitor()
            except zmq.ContextTerminated:
                pass  # it reports nothing more
            self._pair.close(linger=0)

    def __del__(self) -> None:
        self.close()
