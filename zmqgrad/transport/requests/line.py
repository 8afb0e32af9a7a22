"""One request after the other to one server, over one connection after the other.

When its connection breaks (the server was started again, the network failed), a line connects anew and says
what it said before, until the request's deadline. It numbers its requests and has one at a time, so that
the server can tell a repetition by the line and the number (see :mod:`zmqgrad.store.answers`).
"""

from __future__ import annotations

import math
import secrets
import socket
import threading
from collections.abc import Callable

from zmqgrad.errors import ClosedError, ProtocolError
from zmqgrad.runtime.clock import MONOTONIC, Clock, Deadline
from zmqgrad.transport.requests.nearby import dial_nearby, wait_for
from zmqgrad.transport.requests.pipes import receive_with_pipes
from zmqgrad.transport.requests.short import NOTHING, SOON_SECONDS, Asking
from zmqgrad.transport.requests.whole import read, write
from zmqgrad.transport.security import Keys
from zmqgrad.transport.tcp import dial, hang_up, limit_waits
from zmqgrad.transport.zmtp import GREETING_SIZE, HEAD_ROOM, Frame, Unpacker, opening
from zmqgrad.wire.codec import decode, encode
from zmqgrad.wire.messages import Message

SLICE_SECONDS = 1.0
"""How long a line waits in the kernel at a time. Only a wait shorter than this must set another."""

CONNECT_SECONDS = 5.0
"""How long one attempt to connect may take."""

FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.25
"""Seconds between attempts to connect."""

CHUNK = 16 << 10
"""How much is read at a time, but for large answers."""

_OPENING = opening("DEALER")
_GREETING, _READY = _OPENING[:GREETING_SIZE], _OPENING[GREETING_SIZE:]
Unsaid = tuple[bytes, bytes | bytearray]
"""What is to be said yet, in two pieces."""

_SLICE_MS = int(SLICE_SECONDS * 1000)
_NEVER = Deadline()


class Line:
    """One request at a time, over one connection after the other. Used by one thread at a time."""

    def __init__(
        self,
        address: str,
        name: str,
        keys: Keys | None,
        closing: threading.Event,
        clock: Clock = MONOTONIC,
    ) -> None:
        self.id = secrets.randbits(63)
        self.number = 0
        self._address = address
        self._name = name
        self._keys = keys
        self._closing = closing
        self._clock = clock
        self._now = clock.now
        self._socket: socket.socket | None = None
        self._unpacker = Unpacker("ROUTER")
        self._limit = -1.0  # what the socket's waits are limited to
        self._shunned = False  # did the shorter way, where there is one, lead nowhere the last time?
        self._wait: Callable[[float | None], object] = _leave_it_to_recv  # until there is something to read
        self._quick: socket.socket | None = None  # _socket, while nothing but one answer comes, in the clear
        self._short: Asking | None = None  # the pipes beside it, if it has some

    def request(self, message: Message, seconds: float) -> Message:
        """Send ``message``, again on each new connection, until an answer to it comes."""
        self.number = number = self.number + 1
        began = self._now()
        unsaid: Unsaid | None = None
        heard = b""
        try:
            if self._short is not None and seconds >= SOON_SECONDS:
                answer = self._short.ask(message, self.id, number, seconds)
                if answer is not None:
                    return answer
                unsaid, self._short.unsaid = self._short.unsaid, NOTHING
            elif self._quick is not None and seconds >= SLICE_SECONDS:
                said = write(message, self.id, number)
                unsaid = b"", said
                sent = self._quick.send(said)
                unsaid = b"", said[sent:]
                if sent == len(said) and self._wait(_SLICE_MS):
                    heard = self._quick.recv(CHUNK)
                    found = read(heard)
                    if found is not None and found[1] == number:
                        return found[2]
        except BlockingIOError:  # it takes longer
            pass
        except OSError as e:
            self.disconnect()
            if self._now() >= began + seconds:
                raise TimeoutError(f"no answer from {self._address} ({e})") from e
        return self._insist(message, Deadline(began + seconds, self._clock), unsaid, heard)

    def _insist(self, message: Message, deadline: Deadline, unsaid: Unsaid | None, heard: bytes) -> Message:
        """Go on with ``message``.

        ``unsaid`` is what is to be said yet of it on the connection that stands, and ``heard`` what has come
        since there; None: nothing has been said.
        """
        pause = FIRST_PAUSE
        while True:
            try:
                if self._socket is None:
                    self._connect(deadline)
                    unsaid, heard = None, b""
                else:
                    self._limit_waits(deadline)
                before, data = unsaid or (b"", self._pack(message))
                self._send(data, deadline, before)
                answer = self._answer(deadline, heard)
                self._quick = self._socket if self._keys is None and self._unpacker.at_rest else None
                return answer
            except TimeoutError as e:  # of connecting or of asking, by the deadline
                if deadline.passed():
                    raise TimeoutError(f"no answer from {self._address}") from e
                self.disconnect()
            except OSError as e:
                self.disconnect()
                # Nothing tells when somebody listens there again; only that nobody wants to know any more.
                if self._closing.wait(min(pause, deadline.left())):
                    raise ClosedError(f"{self._name}, connected to {self._address}, was closed") from e
                if deadline.passed():
                    raise TimeoutError(f"no answer from {self._address} ({e})") from e
                pause = min(2 * pause, LONGEST_PAUSE)

    def _pack(self, message: Message) -> bytes | bytearray:
        """``message`` as it goes out on the connection that stands."""
        if self._keys is None:
            return write(message, self.id, self.number)
        return self._unpacker.pack(encode(message, 0, self.id, self.number, room=HEAD_ROOM))

    def _connect(self, deadline: Deadline) -> None:
        seconds = max(0.001, min(CONNECT_SECONDS, deadline.left()))
        if self._keys is not None:
            from zmqgrad.transport.curve import CurveCaller  # which takes a library that others need not load

            curve = CurveCaller(self._keys, "DEALER", "ROUTER")
            self._meet(dial(self._address, seconds), curve, curve.opening(), deadline)
            return
        # Who stays has to say who he is; who is only told of a shorter way does not, and counts as nobody.
        self._meet(dial(self._address, seconds), Unpacker("ROUTER"), _GREETING, deadline)
        assert self._socket is not None
        nearby = None if self._shunned else dial_nearby(self._unpacker.nearby, self._socket)
        self._shunned = nearby is not None  # until we are heard there
        if nearby is None:
            self._send(_READY, deadline)
        else:
            self.disconnect()
            self._meet(nearby, Unpacker("ROUTER"), _OPENING, deadline, self._take_pipes)
            self._wait = wait_for(nearby)
            self._shunned = False

    def _take_pipes(self, deadline: Deadline) -> None:
        """Hear what is said first, with which pipes may come."""
        assert self._socket is not None
        try:
            said, ends = receive_with_pipes(self._socket)
        except BlockingIOError:
            return
        if ends is not None:
            self._short = Asking(ends, self._socket, self._clock)
        self._take(said, deadline)

    def _meet(
        self,
        connection: socket.socket,
        unpacker: Unpacker,
        said: bytes,
        deadline: Deadline,
        receive: Callable[[Deadline], object] | None = None,
    ) -> None:
        """Say ``said`` on ``connection``, the line's from now on, and hear who is there, by ``receive``."""
        self._socket, self._unpacker, self._limit = connection, unpacker, -1.0
        self._wait = _leave_it_to_recv
        connection.settimeout(None)
        if self._closing.is_set():
            raise ConnectionAbortedError("closed while it connected")
        self._limit_waits(deadline)
        self._send(said, deadline)
        while not unpacker.ready:
            (receive or self._receive)(deadline)
            self._limit_waits(deadline)

    def _send(self, data: bytes | bytearray, deadline: Deadline, before: bytes = b"") -> None:
        """Send ``before`` and ``data``."""
        assert self._socket is not None
        sent = -len(before)
        while sent < len(data):
            try:
                if sent < 0:
                    sent += self._socket.sendmsg((before[sent:], data))
                else:
                    sent += self._socket.send(memoryview(data)[sent:] if sent else data)
            except BlockingIOError:
                pass
            if sent < len(data):
                self._limit_waits(deadline)

    def _answer(self, deadline: Deadline, heard: bytes) -> Message:
        """What comes; it may have begun with ``heard``."""
        while True:
            for frame in self._take(heard, deadline) if heard else self._receive(deadline):
                if frame is None:
                    raise ProtocolError(f"{self._address} answered with several frames (expected one)")
                envelope, answer = decode(frame)
                if envelope.message_id == self.number:
                    return answer
                if envelope.message_id > self.number:
                    raise ProtocolError(
                        f"{self._address} answered request {envelope.message_id}, not {self.number}"
                    )
                # An answer to what was asked twice, as its first answer seemed lost.
            heard = b""
            self._limit_waits(deadline)

    def hear(self) -> list[Frame | None]:
        """What comes next without being asked for, however long it takes.

        Raises:
            OSError: if the connection has ended.
            ProtocolError: if the other end does not speak as it should.
        """
        assert self._socket is not None
        self._quick = None
        self._close_pipes()
        if self._limit != math.inf:
            limit_waits(self._socket, math.inf)
            self._limit = math.inf
        return self._receive(_NEVER)

    def _receive(self, deadline: Deadline) -> list[Frame | None]:
        """What has come, after waiting for some bytes; may be nothing."""
        assert self._socket is not None
        unpacker = self._unpacker
        try:
            if unpacker.large is None:
                if not self._wait(None if self._limit == math.inf else self._limit * 1000):
                    return []
                return self._take(self._socket.recv(CHUNK), deadline)
            size = self._socket.recv_into(unpacker.room, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            return []
        if not size:
            raise ConnectionResetError(f"{self._address} hung up")
        return unpacker.filled(size)

    def _take(self, data: bytes, deadline: Deadline) -> list[Frame | None]:
        """The messages that are complete with ``data``."""
        if not data:
            raise ConnectionResetError(f"{self._address} hung up")
        frames = self._unpacker.feed(data)
        if self._unpacker.answers:
            self._send(bytes(self._unpacker.answers), deadline)
            self._unpacker.answers.clear()
        return frames

    def _limit_waits(self, deadline: Deadline) -> None:
        """Let no wait outlast ``deadline``. Raises ``TimeoutError`` if it has passed."""
        limit = min(SLICE_SECONDS, deadline.left())
        if limit != self._limit:
            assert self._socket is not None
            if not limit:
                raise TimeoutError
            limit_waits(self._socket, limit)
            self._limit = limit

    def fileno(self) -> int:
        """Of the connection that stands."""
        assert self._socket is not None
        return self._socket.fileno()

    def hang_up(self) -> None:
        """From another thread: end what this line waits for. The line's own thread closes the socket."""
        connection = self._socket
        if connection is not None:
            hang_up(connection)

    def disconnect(self) -> None:
        """Close the connection, if there is one."""
        connection, self._socket, self._quick = self._socket, None, None
        self._close_pipes()
        if connection is not None:
            hang_up(connection)
            connection.close()

    def _close_pipes(self) -> None:
        short, self._short = self._short, None
        if short is not None:
            short.close()

    def abandon(self) -> None:
        """In a fork: the connection is the other process's, and goes on there."""
        self._close_pipes()
        if self._socket is not None:
            self._socket.close()


def _leave_it_to_recv(milliseconds: float | None) -> bool:
    return True
