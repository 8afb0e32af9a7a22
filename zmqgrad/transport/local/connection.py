"""One ``SOCK_SEQPACKET`` connection: every packet is a message.

Both ends begin with a handshake (:mod:`~zmqgrad.transport.local.handshake`). The connecting end may send
before its peer has accepted (*eager*) if the kernel confirms that the process which the endpoint names
listens there.

What is sent must outlive its sender, also if the peer does not read just now: a thread of it may hold the
interpreter lock. When the kernel accepts no more packets, a worker continues by another connection
(:meth:`LocalConnection.continue_by`), whose :class:`Hello` has the next number. The peer reads it behind the
end of the one before, and replies only then. If many are still to be read, or the peer is a store or
a reply channel, packets wait in the sender's memory.

A descriptor of shared memory is sent with a packet of its own (SCM_RIGHTS). Reading with ancillary data costs
twice as much, so a packet :data:`ANNOUNCEMENT` precedes it. A message of the store that exceeds a packet is
sent as such a descriptor (:meth:`LocalConnection.send_large`).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hmac
import itertools
import logging
import mmap
import os
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.forks import in_forks
from zmqgrad.transport.local import handshake
from zmqgrad.transport.local.descriptors import named_process
from zmqgrad.transport.local.handshake import PROTOCOL, Hello

logger = logging.getLogger(__name__)

MAX_PACKET_BYTES = 16 << 10
"""Size limit of messages. The kernel keeps a packet in contiguous memory."""

SEND_BUFFER_BYTES = 4 << 20
"""Requested size of the kernel's send buffer. It allows less: some 560 small packets."""

CONNECT_SECONDS = 5
"""How long a connection waits to be queued by its listener."""

MAX_AHEAD = 128
"""How many connections of one sender the peer has not begun to read. More packets wait in memory."""

ANNOUNCEMENT = b"d"
"""The next packet has a descriptor."""

LARGE = b"m"
"""The packet whose descriptor is a message: see :meth:`LocalConnection.take_large`."""

MAX_ANNOUNCEMENTS = 16
"""Announcements read in a row, without what they announce, before other connections have their turn."""

MAX_DESCRIPTORS = 256
"""Received descriptors that may wait to be taken. A peer sends one for each of its segments."""

_INT = struct.Struct("@i")
_CREDENTIALS = struct.Struct("@3i")
_RECEIVE_BYTES = MAX_PACKET_BYTES + 1  # one more reveals a truncated packet
_NOW = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)


def supported() -> bool:
    """Returns whether this system supports the fast path, as Linux does."""
    return sys.platform == "linux" and hasattr(socket, "SOCK_SEQPACKET") and hasattr(os, "memfd_create")


def unix_name(endpoint: str) -> str:
    """Returns the socket name of an ipc endpoint. Abstract (``@``) names begin with a zero byte.

    The kernel removes an abstract name with its process; it is private to the network namespace.
    """
    path = endpoint.removeprefix("ipc://")
    return "\0" + path[1:] if path.startswith("@") else path


def is_same_user(connected: socket.socket) -> bool:
    """Returns whether the peer process runs as our user. True if the system does not report it (macOS)."""
    return sys.platform != "linux" or credentials(connected)[1] == os.getuid()  # else in a private directory


def process_of(connected: socket.socket) -> int:
    """Returns the id of the peer process; 0 if it is of another namespace, or the system reports none."""
    return credentials(connected)[0] if sys.platform == "linux" else 0


def credentials(connected: socket.socket) -> tuple[int, ...]:
    """Returns process id, user and group of the peer process when it began to listen, or connected."""
    return _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))


def is_listening(endpoint: str) -> bool:
    """Returns whether a process listens at ``endpoint`` (ipc). Also True if this process cannot find out."""
    try:
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as e:
        logger.debug("cannot determine whether a process listens at %s: %s", endpoint, e)
        return True
    with probe:
        probe.setblocking(False)
        error = probe.connect_ex(unix_name(endpoint))
        return error not in (errno.ECONNREFUSED, errno.ENOENT)


def check_is_of_system(error: OSError) -> None:
    """Raises ``error`` again unless a system call failed with it.

    What a signal handler of the program raises, such as :class:`TimeoutError`, can arrive anywhere in a main
    thread that sends or reads. It has no number, and says nothing of a connection.
    """
    if error.errno is None:
        raise error


def connect(
    endpoint: str,
    hello: Hello,
    key: bytes,
    on_backlog: Callable[[LocalConnection], None],
    *,
    eager: bool = False,
    waits: float = CONNECT_SECONDS,
) -> LocalConnection:
    """Connects to the listener at ``endpoint``.

    Args:
        endpoint: an ipc endpoint.
        hello: what the listener is told.
        key: of the job.
        on_backlog: see :class:`LocalConnection`.
        eager: send packets before the listener has accepted the connection, if it is certainly the process
            that ``endpoint`` names; otherwise they wait here.
        waits: for so many seconds at most, if too many connections wait to be accepted there.

    Raises:
        BlockingIOError: if they still do.
        OSError: if no process of our user listens there.
    """
    first = handshake.proven(key, endpoint, hello)
    deadline = Deadline.after(waits)
    while (opened := _open(endpoint, first, left := deadline.left())) is None:
        if not left:  # before this attempt, as this process may have been stopped in it
            raise BlockingIOError(errno.EAGAIN, f"too many processes connect to {endpoint}")
    # The kernel reports 0 for a process of another namespace.
    eager = eager and process_of(opened) == named_process(endpoint) != 0
    expected = handshake.welcome(key, first)
    return LocalConnection(opened, on_backlog, expected=expected, eager=eager, number=hello.number)


def _open(endpoint: str, first: bytes, waits: float) -> socket.socket | None:
    """Returns a connection that has begun with the packet ``first``; None if that is to be tried again.

    The listener had too many without a hello, and closed it; or a signal, or SIGCONT, came while it waited to
    be queued, which Python takes for success.
    """
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        # Waits while too many others wait to be accepted: a non-blocking socket would have to try again.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(waits))
        opened.setblocking(waits > 0)
        opened.connect(unix_name(endpoint))
        opened.setblocking(False)
        opened.getpeername()
        if not is_same_user(opened):
            raise PermissionError(errno.EPERM, f"a process of another user listens at {endpoint}")
        opened.send(first, _NOW)
    except BaseException as e:
        opened.close()
        if isinstance(e, OSError) and e.errno in (errno.ENOTCONN, errno.EPIPE, errno.ECONNRESET):
            return None
        raise
    return opened


def _timeval(seconds: float) -> bytes:
    """Returns ``seconds`` as the kernel reads a timeout; 0 would be none."""
    return struct.pack("@ll", *divmod(max(1, round(seconds * 1e6)), 1_000_000))


Queued = tuple[bytes, int]
"""A packet that waits, and the descriptor to be sent with it, or -1."""


class Offer(NamedTuple):
    """A segment of shared memory for the peer, sent once by each connection.

    Args:
        segment: its id.
        make: returns the packet that describes it, and a descriptor, which the connection closes.
    """

    segment: int
    make: Callable[[], tuple[bytes, int]]


class LocalConnection:
    """One end of a connection. :meth:`send` may be called from any thread, the rest by one thread at a time.

    Args:
        on_backlog: called when the kernel accepts no more, before the packet is queued: :meth:`flush` must
            then be called once the socket is writable. Called with the lock held: it must only register that.
        hello: what the peer sent; None: this end connected, and the peer has not accepted it yet.
        expected: the packet by which the peer accepts it.
        eager: whether to send before.
        number: of the hello that was sent.
    """

    def __init__(
        self,
        connected: socket.socket,
        on_backlog: Callable[[LocalConnection], None],
        hello: Hello | None = None,
        *,
        expected: bytes = b"",
        eager: bool = False,
        number: int = 0,
    ) -> None:
        self._socket = connected
        self._expected = expected
        self._send = connected.send
        self._on_backlog = on_backlog
        self.accepted = hello is not None
        """Whether the listener has accepted this connection."""
        self.number = number
        """That of the hello that this end has sent."""
        self.ahead = 0
        """How many connections the peer has yet to read before it begins with this one."""
        self._may_send = self.accepted or eager
        self.hello = hello or Hello(PROTOCOL, 0)
        # Guards what follows, and the order of packets; see Note [Calls of handlers].
        self._lock = threading.RLock()
        self.sent = 0
        self.sent_bytes = 0
        self._backlog: deque[Queued] = deque()
        self._offered: set[int] = set()  # segments
        in_forks(self, LocalConnection.abandon)
        self.fd = connected.fileno()
        """The file descriptor; -1 once closed."""
        self._announced = False  # the next packet to be received has a descriptor
        self.descriptors: deque[int] = deque()
        """Received and not taken yet, in order."""
        now = connected.recv

        def receive(flags: int = socket.MSG_DONTWAIT) -> bytes:
            try:
                if self._announced:
                    return self._receive_descriptor(flags)
                packet = now(_RECEIVE_BYTES, flags)
                if 1 < len(packet) <= MAX_PACKET_BYTES:
                    return packet
                if packet == ANNOUNCEMENT:
                    self._announced = True
                    return self._receive_descriptor(flags)
            except ConnectionResetError:  # the peer left packets unread; reported once, before what it sent
                return receive(flags)
            if len(packet) > MAX_PACKET_BYTES:
                raise OSError(errno.EMSGSIZE, f"a packet of more than {MAX_PACKET_BYTES} bytes")
            return packet

        self.receive: Callable[..., bytes] = receive
        """Returns the next packet; empty at the end. Raises BlockingIOError if there is none, or OSError.

        With flags 0 it waits for one, as long as :meth:`limit_waits` allows.
        """

    def _receive_descriptor(self, flags: int) -> bytes:
        if len(self.descriptors) > MAX_DESCRIPTORS:
            raise OSError(errno.EBADMSG, "descriptors that no packet refers to")
        # A look first: of a process without a free descriptor, the kernel would drop the one in the packet.
        for seen in itertools.count(1):
            _, fds, dropped = self._receive_with_descriptors(flags | socket.MSG_PEEK)
            for fd in fds:
                os.close(fd)
            if dropped and fds:
                raise OSError(errno.EBADMSG, "a packet with more than one descriptor")
            if dropped:
                raise OSError(errno.EMFILE, "no file descriptor is left for shared memory")
            packet, fds, _ = self._receive_with_descriptors(flags)
            self.descriptors.extend(fds)
            if packet != ANNOUNCEMENT:
                self._announced = False  # even if the sender was interrupted before it sent a descriptor
                return packet
            if seen == MAX_ANNOUNCEMENTS and flags:
                break
        raise BlockingIOError(errno.EAGAIN, "one announcement after the other")

    def _receive_with_descriptors(self, flags: int) -> tuple[bytes, list[int], bool]:
        packet, ancillary, found, _ = self._socket.recvmsg(
            MAX_PACKET_BYTES, socket.CMSG_LEN(_INT.size), flags
        )
        fds = [_INT.unpack(data)[0] for _, _, data in ancillary if len(data) == _INT.size]
        return packet, fds, bool(found & socket.MSG_CTRUNC)

    def is_ready(self) -> bool:
        """Returns whether the peer has accepted this connection, after reading its reply.

        Raises:
            OSError: if the peer refused it, or has ended.
        """
        if not self.accepted:
            try:
                packet = self.receive()
            except BlockingIOError:
                return False
            if not hmac.compare_digest(packet, self._expected):
                refused = "the listener belongs to another job or process, or has closed"
                raise ConnectionRefusedError(errno.ECONNREFUSED, refused)
            with self._lock:
                self.accepted = self._may_send = True
        return True

    def welcome(self) -> None:
        """Tells the peer that this connection is accepted. As :meth:`send`, but counts nothing."""
        with self._lock:
            self._put(self._expected, -1)

    def send(self, packet: bytes | bytearray, *, keep_gil: bool = False) -> bool:
        """Sends ``packet``, or queues it behind earlier ones.

        Args:
            keep_gil: whether to hold the GIL during the system call, for one packet of many.

        Returns:
            Whether it was queued.

        Raises:
            OSError: if the connection is broken. The packet was not sent.
        """
        with self._lock:
            self.sent += 1
            self.sent_bytes += len(packet)
            if self._may_send and not self._backlog:
                try:
                    if keep_gil:
                        send_with_gil(self.fd, packet)
                    else:
                        self._send(packet, _NOW)
                    return False
                except BlockingIOError:
                    self._on_backlog(self)  # first: an interrupt would leave a packet that nobody flushes
                    self._queue(bytes(packet), -1)
                    return True
            self._queue(bytes(packet), -1)
            return True

    def send_all(self, packets: Sequence[bytes | bytearray], offers: Sequence[Offer]) -> bool:
        """Sends the packets of one message, behind the segments of ``offers`` that the peer does not have.

        Returns:
            Whether a packet was queued.

        Raises:
            OSError: if the connection is broken, or there is no descriptor for an offer.
        """
        with self._lock:
            for offer in offers:
                if offer.segment not in self._offered:
                    self._put_with_descriptor(*offer.make())
                    self._offered.add(offer.segment)  # last: an interrupt at worst sends it twice
            for packet in packets:
                self._put(packet, -1)
            self.sent += 1
            self.sent_bytes += sum(map(len, packets))
            return bool(self._backlog)

    def send_large(self, message: bytes | bytearray) -> None:
        """As :meth:`send`, with a message of any size, in shared memory of its own.

        Raises:
            OSError: also if there is no descriptor or memory for it.
        """
        fd = os.memfd_create("zmqgrad", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            view = memoryview(message)
            while view:
                view = view[os.write(fd, view) :]
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
        except BaseException:
            os.close(fd)
            raise
        with self._lock:
            self.sent += 1
            self.sent_bytes += len(message)
            self._put_with_descriptor(LARGE, fd)

    def take_large(self, limit: int) -> memoryview:
        """Returns the message behind :data:`LARGE`, which was received last.

        Raises:
            OSError: if it is none: no shared memory that cannot change, or of more than ``limit`` bytes.
        """
        if not self.descriptors:
            raise OSError(errno.EBADMSG, "a large message without its memory")
        fd = self.descriptors.popleft()
        try:
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seals != seals:
                raise OSError(errno.EBADMSG, "a message that may change while it is read")
            size = os.fstat(fd).st_size
            if not 0 < size <= limit:
                raise OSError(errno.EMSGSIZE, f"a message of {size} bytes (at most {limit})")
            return memoryview(mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ))
        finally:
            os.close(fd)

    def _put_with_descriptor(self, packet: bytes, fd: int) -> None:
        try:
            self._put(ANNOUNCEMENT, -1)
            self._put(packet, fd)
        except OSError:
            os.close(fd)  # else the peer would seem to have the segment, as long as this process lives
            raise

    def _put(self, packet: bytes | bytearray, fd: int) -> None:
        """Sends or queues a packet. If that fails, the caller still owns ``fd``. With the lock held."""
        if self._may_send and not self._backlog:
            try:
                if fd < 0:  # as a rule
                    self._send(packet, _NOW)
                else:
                    self._transmit(packet, fd)
                return
            except BlockingIOError:
                self._on_backlog(self)  # first, as in send
                self._queue(bytes(packet), fd)
                return
        self._queue(bytes(packet), fd)

    def _queue(self, packet: bytes, fd: int) -> None:
        if self.fd < 0:
            raise OSError(errno.EBADF, "the connection is closed")
        self._backlog.append((packet, fd))

    def _transmit(self, packet: bytes | bytearray, fd: int) -> None:
        if fd < 0:
            self._send(packet, _NOW)
            return
        self._socket.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _INT.pack(fd))], _NOW)
        os.close(fd)

    def flush(self, on_flushed: Callable[[int, bool], object] | None = None) -> bool:
        """Sends queued packets as far as the kernel accepts them. Returns whether the queue is empty.

        Args:
            on_flushed: called with the descriptor and what is returned, before another thread sends. Called
                with the lock held: it must only register that.

        Raises:
            OSError: if the connection is broken.
        """
        with self._lock:
            backlog = self._backlog
            try:
                while backlog:
                    self._transmit(*backlog[0])
                    backlog.popleft()
            except BlockingIOError:
                pass
            if on_flushed is not None and self.fd >= 0:
                on_flushed(self.fd, not backlog)
            return not backlog

    def has_ended(self) -> bool:
        """Returns whether the peer has closed the connection, or this end has. Takes nothing."""
        try:
            return not self._socket.recv(1, _NOW | socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def while_open(self, act: Callable[[int], object]) -> None:
        """Calls ``act`` with the descriptor, which is not closed meanwhile, unless it was before."""
        with self._lock:
            if self.fd >= 0:
                act(self.fd)

    def is_locked_here(self) -> bool:
        """Returns whether the calling thread has the lock: it is a handler that has interrupted a method."""
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def limit_waits(self, seconds: float) -> None:
        """Limits how long ``receive(0)`` waits, by the kernel's timeout: Python's costs a ``poll``."""
        self._socket.setblocking(True)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))

    def hang_up(self) -> None:
        """Interrupts the thread that waits in ``receive(0)`` by ending the connection. From any thread."""
        self._shut_down(socket.SHUT_RDWR)

    def stop_receiving(self) -> None:
        """Lets :meth:`receive` return what has arrived, and then the end; the peer can send nothing more."""
        self._shut_down(socket.SHUT_RD)

    def _shut_down(self, how: int) -> None:
        try:
            self._socket.shutdown(how)
        except OSError:
            pass  # it has ended already

    def abandon(self) -> None:
        """In a forked child: closes the child's copy of the connection that the parent uses."""
        self._socket.close()

    def backlog(self) -> int:
        """Returns how many packets are queued."""
        return len(self._backlog)

    def give_up(self) -> list[Queued]:
        """Closes the connection. Returns the queued packets, which another one must :meth:`adopt`."""
        with self._lock:
            self.fd = -1
            queued = list(self._backlog)
            self._backlog.clear()
            self._socket.close()
            return queued

    def continue_by(self, following: LocalConnection, switch: Callable[[int], object]) -> None:
        """Lets ``following``, which is new, send what is queued here, and closes this connection.

        Args:
            switch: makes others use ``following``; called with the descriptor of this connection, before it
                is closed. Called with the lock held.
        """
        with self._lock:
            following.ahead = 0 if self.accepted else self.ahead + 1
            queued = list(self._backlog)
            self._backlog.clear()
            following.adopt(queued)
            switch(self.fd)
            self.fd = -1
            self._socket.close()

    def adopt(self, queued: Sequence[Queued]) -> None:
        """Sends what another connection to the same process could not send."""
        with self._lock:
            for i, (packet, fd) in enumerate(queued):
                try:
                    self._put(packet, fd)
                except OSError as e:
                    logger.debug("%d packets are lost with their receiver: %s", len(queued) - i, e)
                    close_descriptors(queued[i:])
                    return

    def close(self) -> None:
        """Closes the connection and drops queued packets. Idempotent.

        Received descriptors stay: their packets may be read already, and not be decoded yet.
        """
        close_descriptors(self.give_up())

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        for fd in getattr(self, "descriptors", ()):
            close(fd)


def close_descriptors(queued: Sequence[Queued]) -> None:
    """Closes what is to be sent with packets that will not leave."""
    for _, fd in queued:
        if fd >= 0:
            os.close(fd)


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
