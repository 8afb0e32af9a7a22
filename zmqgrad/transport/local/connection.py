"""One ``SOCK_SEQPACKET`` connection: every packet is a message.

The connecting side begins with a :class:`Hello`, which names its job and the incarnation that it wants to
reach; the accepting side replies :data:`WELCOME`, or closes. That only guards against mistakes, such as an
address read from another job's store: processes of the same user are trusted.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable

import msgspec

from zmqgrad.transport.local.descriptors import check_can_accept

MAX_PACKET_BYTES = 16 << 10
"""Size limit of messages. The kernel keeps a packet in contiguous memory."""

SEND_BUFFER_BYTES = 4 << 20
"""Requested size of the kernel's send buffer. It allows less: some 560 small packets."""

PROTOCOL = "zmqgrad-local-1"
WELCOME = b"welcome"

_RECEIVE_BYTES = MAX_PACKET_BYTES + 1  # one more reveals a truncated packet
_NOW = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The first packet: which job the sender belongs to, and which process of that job it wants to reach."""

    protocol: str
    job: bytes
    incarnation: int


def supported() -> bool:
    """Returns whether this system supports the fast path, as Linux does."""
    return sys.platform == "linux" and hasattr(socket, "SOCK_SEQPACKET")


def unix_name(endpoint: str) -> str:
    """Returns the socket name of an ipc endpoint. Abstract (``@``) names begin with a zero byte.

    The kernel removes an abstract name with its process; it is private to the network namespace.
    """
    path = endpoint.removeprefix("ipc://")
    return "\0" + path[1:] if path.startswith("@") else path


def is_same_user(connected: socket.socket) -> bool:
    """Returns whether the peer process runs as our user. True if the system does not report it (macOS)."""
    if sys.platform != "linux":
        return True  # addresses are in a private directory there
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.getuid())


def can_connect(endpoint: str) -> bool:
    """Returns whether a process of our own user listens at ``endpoint`` (ipc).

    Raises:
        OSError: if this process, or the one that listens there, has no file descriptor for a connection.
    """
    check_can_accept(endpoint)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(unix_name(endpoint)) == 0 and is_same_user(probe)


def connect(
    endpoint: str, job: bytes, incarnation: int, on_backlog: Callable[[LocalConnection], None]
) -> LocalConnection:
    """Connects to the listener at ``endpoint``. The connection is not ready before the listener accepts it.

    Args:
        job: of this process.
        incarnation: of the process that should listen there.
        on_backlog: see :class:`LocalConnection`.

    Raises:
        BlockingIOError: if too many connections wait to be accepted there; a later attempt may succeed.
        OSError: if no process of our user listens there.
    """
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        opened.setblocking(False)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        opened.connect(unix_name(endpoint))
        if not is_same_user(opened):
            raise PermissionError(f"a process of another user listens at {endpoint}")
        opened.send(msgspec.msgpack.encode(Hello(PROTOCOL, job, incarnation)))
    except BaseException:
        opened.close()
        raise
    return LocalConnection(opened, on_backlog, ready=False)


class LocalConnection:
    """One end of a connection. :meth:`send` may be called from any thread, the rest by one thread at a time.

    Args:
        on_backlog: called when the kernel accepts no more: :meth:`flush` must then be called once the socket
            is writable. Called with the lock held, so it must only register the connection.
        ready: whether the peer has already accepted this connection.
    """

    __slots__ = (
        "_backlog",
        "_lock",
        "_on_backlog",
        "_ready",
        "_send",
        "_socket",
        "fd",
        "receive",
        "sent",
        "sent_bytes",
    )

    def __init__(
        self, connected: socket.socket, on_backlog: Callable[[LocalConnection], None], *, ready: bool
    ) -> None:
        self._socket = connected
        self._send = connected.send
        self._on_backlog = on_backlog
        self._ready = ready
        self._lock = threading.Lock()  # guards what follows, and the order of packets
        self.sent = 0
        self.sent_bytes = 0
        self._backlog: deque[bytes] = deque()
        self.fd = connected.fileno()
        """The file descriptor; -1 once closed."""

        def receive(flags: int = socket.MSG_DONTWAIT) -> bytes:
            packet = connected.recv(_RECEIVE_BYTES, flags)
            if len(packet) > MAX_PACKET_BYTES:
                raise OSError(f"a packet of more than {MAX_PACKET_BYTES} bytes")
            return packet

        self.receive: Callable[..., bytes] = receive
        """Returns the next packet; empty at the end. Raises BlockingIOError if there is none, or OSError.

        With flags 0 it waits for one, as long as :meth:`limit_waits` allows.
        """

    def is_ready(self) -> bool:
        """Returns whether the peer has accepted this connection. Nothing may be sent before.

        Raises:
            OSError: if the peer refused it, or has ended.
        """
        if not self._ready:
            try:
                packet = self.receive()
            except BlockingIOError:
                return False
            if packet != WELCOME:
                raise ConnectionRefusedError("the listener belongs to another job, or has closed")
            self._ready = True
        return True

    def send(self, packet: bytes | bytearray, *, keep_gil: bool = False) -> None:
        """Sends ``packet``, or queues it behind earlier ones.

        Args:
            keep_gil: whether to hold the GIL during the system call, for one packet of many.

        Raises:
            OSError: if the connection is broken. The packet was not sent.
        """
        with self._lock:
            self.sent += 1
            self.sent_bytes += len(packet)
            if not self._backlog:
                try:
                    if keep_gil:
                        send_with_gil(self.fd, packet)
                    else:
                        self._send(packet, _NOW)
                    return
                except BlockingIOError:
                    self._on_backlog(self)
            self._backlog.append(bytes(packet))

    def flush(self) -> bool:
        """Sends queued packets as far as the kernel accepts them. Returns whether the queue is empty.

        Raises:
            OSError: if the connection is broken.
        """
        with self._lock:
            backlog = self._backlog
            try:
                while backlog:
                    self._send(backlog[0], _NOW)
                    backlog.popleft()
            except BlockingIOError:
                return False
            return True

    def limit_waits(self, seconds: float) -> None:
        """Limits how long ``receive(0)`` waits, by the kernel's timeout: Python's costs a ``poll``."""
        self._socket.setblocking(True)
        micros = max(1, round(seconds * 1e6))
        limit = struct.pack("@ll", micros // 1_000_000, micros % 1_000_000)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def hang_up(self) -> None:
        """Interrupts the thread that waits in ``receive(0)`` by ending the connection. From any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already

    def backlog(self) -> int:
        """Returns how many packets are queued."""
        return len(self._backlog)

    def close(self) -> None:
        """Closes the connection and drops queued packets. Idempotent."""
        self.fd = -1
        self._backlog.clear()
        self._socket.close()


_send = ctypes.PyDLL(None, use_errno=True).send
_send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_send.restype = ctypes.c_ssize_t


def send_with_gil(fd: int, packet: bytes | bytearray) -> None:
    """As ``socket.send`` on descriptor ``fd``, without blocking, and without releasing the GIL.

    Python releases the GIL for each system call. With many calls in flight, the thread that reads their
    replies then acquires it for one reply, and the sender waits until that thread blocks again: two thread
    switches per message.

    Raises:
        BlockingIOError: if the kernel accepts nothing now. OSError: if the connection is broken.
    """
    if _send(fd, bytes(packet), len(packet), _NOW) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))  # Python chooses the subclass
