"""Connections, of unix sockets and of TCP: the part of them that is in the kernel.

What one end sends reaches the other by a :class:`Wire`, which keeps the order. Within a host that takes no
time. Chunks are bytes, or what libzmq sends (:class:`Parcel`), which is never looked into.
"""

from __future__ import annotations

import errno
import math
import os
import socket as real
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from zmqgrad.testing.simulation.network.kernel import (
    ERR,
    HUP,
    IN,
    OUT,
    RDHUP,
    Description,
    Process,
    RealFd,
    failure,
)

if TYPE_CHECKING:
    from zmqgrad.testing.simulation.network.network import Network

READ, WRITE = 1, 2
"""Halves of a connection that are shut down."""

UNIX_BUFFER_BYTES = 212_992
"""Default and limit of the send buffer, which the kernel doubles on request."""

TCP_BUFFER_BYTES = 6_000_000

GIVE_UP_SECONDS = 924.6
"""How long the kernel tries to send the same again by TCP."""

_SKB_BYTES, _SKB_OVERHEAD = 256, 320

Address = Any
Passed = Description | RealFd
"""A descriptor on its way."""


PARCEL_BYTES = b"\xff" + b"\0" * 9
"""What a program that does not use libzmq finds in place of a parcel."""


class Parcel:
    """A chunk that is not bytes: what libzmq of one process sends to that of another."""

    size = 64

    def __len__(self) -> int:
        return self.size


class Chunk(NamedTuple):
    """What one call has sent."""

    data: Any
    cost: int
    passed: tuple[Passed, ...] = ()


def truesize(size: int) -> int:
    """Returns how much of the send buffer of a unix socket a packet of ``size`` bytes takes."""
    return _SKB_BYTES + max(512, 1 << (size + _SKB_OVERHEAD - 1).bit_length())


class Wire:
    """One direction of a connection between two hosts: delivers in order, perhaps late, or never."""

    def __init__(self, network: Network, owner: Socket, source: str, target: str) -> None:
        self._network = network
        self._owner = owner
        self._source, self._target = source, target
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self.stalled_since = math.inf
        """Since when nothing has been delivered, though something waits."""
        self.cut = False
        """Whether what is on its way, and what follows, is lost."""

    def send(self, deliver: Callable[[], None]) -> None:
        """Calls ``deliver`` at the other end, behind all that was sent before."""
        now = self._network.scheduler.now()
        if self.cut:
            return
        delay = self._network.faults.delay(self._source, self._target)
        if not self._waiting and not delay and not self._is_stopped():
            deliver()
            return
        moment = max(now + delay, self._waiting[-1][0] if self._waiting else 0.0)
        self._waiting.append((moment, deliver))
        self._network.scheduler.call_at(moment, self.carry)

    def _is_stopped(self) -> bool:
        return self._network.faults.is_cut(self._source, self._target)

    def _give_up(self) -> None:
        now = self._network.scheduler.now()
        if now - self.stalled_since >= self._owner.user_timeout():
            self._owner.reset(errno.ETIMEDOUT)
            self.cut = True

    def carry(self) -> None:
        """Delivers what is due."""
        now = self._network.scheduler.now()
        if self._waiting and self._is_stopped():
            if self.stalled_since == math.inf:
                self.stalled_since = now
                self._network.stalled.append(self)
                self._network.scheduler.call_at(now + self._owner.user_timeout(), self._give_up)
            return
        self.stalled_since = math.inf
        while self._waiting and self._waiting[0][0] <= now and not self.cut:
            self._waiting.popleft()[1]()
        if self.cut:
            self._waiting.clear()


class Socket(Description):
    """A socket of the kernel. ``family``, ``kind`` as in module ``socket``."""

    def __init__(self, network: Network, process: Process, family: int, kind: int) -> None:
        super().__init__(network)
        self.process = process
        self.family, self.kind = family, kind
        self.is_tcp = family != real.AF_UNIX
        """Whether it is of TCP, else a unix socket."""
        self.name: Address = None
        self.peer_name: Address = None
        self.options: dict[tuple[int, int], int | bytes] = {}
        self.credentials: tuple[int, int, int] = (0, -1, -1)
        self.peer_credentials: tuple[int, int, int] = (0, -1, -1)
        self.peer: Socket | None = None
        self.wire: Wire | None = None  # to the peer
        self.backlog = -1  # of a listening socket
        self.pending: deque[Socket] = deque()  # to be accepted
        self.received: deque[Chunk] = deque()
        self.unread = 0  # bytes of those
        self.sending = 0  # what of the send buffer is in use
        self.shut = 0
        self.error = 0
        self.connecting = False
        self.connected = False  # is, or was
        self.send_buffer = TCP_BUFFER_BYTES if self.is_tcp else UNIX_BUFFER_BYTES

    @property
    def listening(self) -> bool:
        """Whether it listens."""
        return self.backlog >= 0

    def events(self) -> int:
        """As :class:`Description`."""
        if self.listening:
            return IN if self.pending else 0
        found = ERR if self.error else 0
        if self.connecting:
            return found
        if self.shut == READ | WRITE or not self.connected:
            found |= HUP
        if self.shut & READ:
            found |= IN | RDHUP
        if self.received:
            found |= IN
        if self.is_writable() or (self.is_tcp and self.shut & WRITE):
            found |= OUT
        return found

    def is_writable(self) -> bool:
        """Returns whether ``poll`` reports that it can be written to."""
        if self.is_tcp:
            return self.sending * 3 <= self.send_buffer * 2
        return self.sending * 4 <= self.send_buffer

    # ---- connecting -------------------------------------------------------------------------------------

    def bind(self, address: Address) -> None:
        """Binds it to ``address``, as the process that has opened it sees it."""
        if self.name is not None:
            raise failure(errno.EINVAL)
        self.name = self.network.bind(self, address)

    def listen(self, backlog: int) -> None:
        """Starts to listen, or changes the backlog."""
        if self.is_tcp and self.name is None:
            self.bind(("0.0.0.0", 0))
        if self.name is None:
            raise failure(errno.EINVAL)
        self.backlog = max(0, backlog)
        self.credentials = self.peer_credentials = self.process.network.credentials(self.process)
        self.changed()

    def has_room(self) -> bool:
        """Returns whether one more may wait to be accepted."""
        return len(self.pending) <= self.backlog

    def enqueue(self, accepted: Socket) -> None:
        """Lets ``accepted`` wait to be accepted."""
        self.pending.append(accepted)
        self.changed()

    def accept(self) -> Socket:
        """Returns the next connection."""
        if not self.listening:
            raise failure(errno.EINVAL)
        if not self.block(
            lambda: bool(self.pending) or not self.listening, self.blocking, self.deadline(True)
        ):
            raise failure(errno.EAGAIN)
        accepted = self.pending.popleft()
        self.changed()
        return accepted

    def join(self, other: Socket) -> None:
        """Connects this end to ``other``: both ends know it at once."""
        self.peer, other.peer = other, self
        for one, two in ((self, other), (other, self)):
            one.connected = True
            one.wire = Wire(self.network, one, one.process.host, two.process.host)

    def deadline(self, reading: bool) -> float | None:
        """Returns when the kernel ends a wait (SO_RCVTIMEO, SO_SNDTIMEO)."""
        value = self.options.get((real.SOL_SOCKET, real.SO_RCVTIMEO if reading else real.SO_SNDTIMEO))
        if not isinstance(value, bytes):
            return None
        seconds = int.from_bytes(value[:8], "little") + int.from_bytes(value[8:16], "little") / 1e6
        return self.network.scheduler.now() + seconds if seconds else None

    def user_timeout(self) -> float:
        """Returns how long the kernel tries to send the same again, in seconds."""
        value = self.options.get((real.IPPROTO_TCP, real.TCP_USER_TIMEOUT), 0)
        return value / 1000 if isinstance(value, int) and value else GIVE_UP_SECONDS

    # ---- sending ----------------------------------------------------------------------------------------

    def send(self, data: Any, blocking: bool, passed: Sequence[Passed] = ()) -> int:
        """Sends ``data``, or of a stream as much as there is room for. Returns how much."""
        size = len(data)
        if not self.connected and not self.error:
            number = errno.EAGAIN if self.connecting else (errno.EPIPE if self.is_tcp else errno.ENOTCONN)
            raise failure(number)
        if self.is_tcp or self.kind == real.SOCK_SEQPACKET:
            self.raise_error()
        if self.shut & WRITE:
            raise failure(errno.EPIPE)
        self.raise_error()

        def has_room() -> bool:
            return self.sending < self.send_buffer or bool(self.shut & WRITE) or bool(self.error)

        if self.kind == real.SOCK_SEQPACKET and size > self.send_buffer - 32:
            raise failure(errno.EMSGSIZE)
        if not self.block(has_room, blocking, self.deadline(False)):
            raise failure(errno.EAGAIN)
        self.raise_error()
        if self.shut & WRITE:
            raise failure(errno.EPIPE)
        if self.kind == real.SOCK_STREAM and isinstance(data, bytes):
            data = data[: max(1, self.send_buffer - self.sending)]
        cost = len(data) if self.is_tcp else truesize(len(data))
        chunk = Chunk(data, cost, tuple(passed))
        self.sending += cost
        for one in passed:
            if isinstance(one, Description):
                one.references += 1
        assert self.wire is not None
        self.wire.send(lambda: self.arrive(chunk))
        return len(data)

    def arrive(self, chunk: Chunk) -> None:
        """A chunk of this end has reached the peer."""
        peer = self.peer
        if peer is None or (not peer.references and peer not in peer.network.embryos):
            self._drop(chunk)
            if self.is_tcp:  # the other end has closed it: its kernel resets the connection
                self.reset(errno.ECONNRESET)
            return
        if peer.shut & READ and not self.is_tcp:
            self._drop(chunk)
            return
        peer.received.append(chunk)
        peer.unread += len(chunk.data)
        peer.changed()

    def _drop(self, chunk: Chunk) -> None:
        self.sending -= chunk.cost
        self.network.scheduler.notify(self)
        for one in chunk.passed:
            if isinstance(one, Description):
                self.process.drop(one)
            else:
                os.close(one.fd)

    def raise_error(self) -> None:
        """Reports the pending error, once."""
        if self.error:
            error, self.error = self.error, 0
            raise failure(error)

    # ---- receiving --------------------------------------------------------------------------------------

    def receive(self, size: int, blocking: bool, peek: bool = False) -> tuple[Any, tuple[Passed, ...], int]:
        """Returns data, the descriptors that came with it, and the size of the packet."""
        if not self.connected and not self.connecting and not self.error:
            if self.is_tcp and self.shut:
                return b"", (), 0
            raise failure(errno.ENOTCONN if self.is_tcp or self.kind != real.SOCK_STREAM else errno.EINVAL)
        if self.kind == real.SOCK_SEQPACKET:
            self.raise_error()

        def is_ready() -> bool:
            return bool(self.received or self.error or self.shut & READ)

        if not self.block(is_ready, blocking, self.deadline(True)):
            raise failure(errno.EAGAIN)
        if self.kind == real.SOCK_SEQPACKET:
            self.raise_error()
        if not self.received:
            self.raise_error()
            return b"", (), 0
        chunk = self.received[0]
        if self.kind == real.SOCK_SEQPACKET:
            if not peek:
                self._take(self.received.popleft())
            return chunk.data[:size], chunk.passed, len(chunk.data)
        data, passed = self._read_stream(size, peek)
        return data, passed, len(data)

    def _read_stream(self, size: int, peek: bool) -> tuple[bytes, tuple[Passed, ...]]:
        found: bytes = b""
        passed: tuple[Passed, ...] = ()
        for chunk in list(self.received):
            if passed or (found and chunk.passed) or len(found) == size:
                break
            data = PARCEL_BYTES if isinstance(chunk.data, Parcel) else chunk.data
            part = data[: size - len(found)]
            found, passed = found + part, chunk.passed
            if peek:
                continue
            self.received.popleft()
            if len(part) < len(data):
                self.received.appendleft(Chunk(data[len(part) :], chunk.cost - len(part)))
                self._take(Chunk(part, len(part) if self.is_tcp else 0))
            else:
                self._take(chunk)
        return found, passed

    def _take(self, chunk: Chunk) -> None:
        """Gives back the room in the sender's buffer."""
        self.unread -= len(chunk.data)
        peer = self.peer
        if peer is not None:
            peer.sending -= chunk.cost
            peer.changed()
        self.changed()

    def take_parcel(self) -> Any:
        """Returns the next chunk; None if there is none."""
        if not self.received:
            return None
        chunk = self.received.popleft()
        self._take(chunk)
        return chunk.data

    # ---- the end ----------------------------------------------------------------------------------------

    def shutdown(self, how: int) -> None:
        """As ``shutdown(2)``; ``how``: READ | WRITE."""
        if self.listening and self.is_tcp:
            self.stop_listening()
            return
        if not self.is_tcp and not self.connected:
            self.shut |= how  # without an error
            return
        if not self.connected or (self.is_tcp and self.shut == READ | WRITE):
            raise failure(errno.ENOTCONN)
        self.shut |= how
        peer = self.peer
        if peer is not None and self.wire is not None:
            theirs = WRITE if how & READ and not self.is_tcp else 0
            theirs |= READ if how & WRITE else 0
            if theirs:
                self.wire.send(lambda: peer.end(theirs))
        self.changed()

    def end(self, shut: int) -> None:
        """The other end has shut down a half of the connection."""
        self.shut |= shut
        if self.is_tcp and self.shut & WRITE and not self.references and self.peer is not None:
            self.shut = READ | WRITE
        self.changed()

    def reset(self, error: int) -> None:
        """The connection breaks at this end."""
        if self.connected or self.connecting:
            self.error = (
                errno.EPIPE if self.is_tcp and self.shut == READ and error == errno.ECONNRESET else error
            )
            self.shut = READ | WRITE
            self.connecting = False
            self.changed()

    def stop_listening(self) -> None:
        """Refuses those that wait to be accepted."""
        self.network.forget(self)
        self.backlog = -1
        while self.pending:
            waiting = self.pending.popleft()
            self.network.embryos.discard(waiting)
            if waiting.peer is not None:
                waiting.abort()

    def abort(self) -> None:
        """Ends a connection that nobody has accepted, or whose data nobody reads."""
        peer, wire = self.peer, self.wire
        if peer is not None and wire is not None:
            wire.send(lambda: peer.reset(errno.ECONNRESET))
        self._discard()

    def _discard(self) -> None:
        self.shut = READ | WRITE
        while self.received:
            chunk = self.received.popleft()
            if self.peer is not None:
                self.peer._drop(chunk)

    def released(self) -> None:
        """As :class:`Description`."""
        if self.listening or self.pending:
            self.stop_listening()
        self.network.forget(self)
        peer, wire = self.peer, self.wire
        if peer is None or wire is None:
            self.connecting = False
            return
        if self.received:
            self.abort()
            return
        if self.is_tcp:
            if not self.shut & WRITE:
                self.shut |= WRITE
                wire.send(lambda: peer.end(READ))
        else:
            self.shut = READ | WRITE
            wire.send(lambda: peer.end(READ | WRITE))
