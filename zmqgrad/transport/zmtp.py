"""ZMTP 3.0, the protocol on ZeroMQ's wire, as far as questions and answers of one frame need it. No socket.

    greeting   FF 00*8 7F | version 3 0 | mechanism "NULL", padded to 20 | as-server 0 | 00*31
    command    04 size(1), or 06 size(8); then length(1) name data
    message    00 size(1), or 02 size(8); then the frame. 01 and 03: more frames of the message follow

Both ends send their opening, which is the greeting and the command READY, at once; what follows READY are
messages. PING is answered, other commands are not for us. libzmq at the other end is understood, and
understands (RFC 23, https://rfc.zeromq.org/spec/23/). With a secret the mechanism is CURVE instead:
:mod:`~zmqgrad.transport.curve`.

Why not libzmq at both ends: its sockets live in a thread of their own, and each hop from there to the
thread that asks or answers costs a wake-up. A round trip between two processes took 105 us through
ROUTER and DEALER, 25 us by a blocking socket, 45 us through torch's TCPStore, whose match the store is to be.
"""

from __future__ import annotations

from zmqgrad.errors import ProtocolError, SecretError
from zmqgrad.wire.frames import MAX_HEADER

GREETING_SIZE = 64
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_MORE, _LONG, _COMMAND = 1, 2, 4
_NEARBY = b"X-Nearby"

MAX_COMMAND = 4096
"""Bytes of a command; ours need 40."""

HEAD_ROOM = 9
"""Bytes that the head of a message may need."""

LARGE = 64 << 10
"""Frames of at least so many bytes are received where they stay."""

MAX_SPARE = 4 << 20
"""Memory for large frames of up to so many bytes is used again: fresh pages cost more than filling them."""

Frame = bytes | memoryview


def opening(socket_type: str, nearby: bytes = b"") -> bytes:
    """What an end of this type (``"ROUTER"``, ``"DEALER"``) says first, where nothing is encrypted.

    ``nearby``: see :attr:`Unpacker.nearby`.
    """
    return greeting(b"NULL") + command(b"READY", properties(socket_type, nearby))


def greeting(mechanism: bytes, *, as_server: bool = False) -> bytes:
    """What comes before everything else."""
    return _SIGNATURE + b"\x03\x00" + mechanism.ljust(20, b"\0") + bytes([as_server]) + bytes(31)


def command(name: bytes, data: bytes) -> bytes:
    """A command on the wire, which has fewer than 256 bytes or is a long one."""
    body = bytes([len(name)]) + name + data
    if len(body) < 256:
        return bytes([_COMMAND, len(body)]) + body
    return bytes([_COMMAND | _LONG]) + len(body).to_bytes(8, "big") + body


def properties(socket_type: str, nearby: bytes = b"") -> bytes:
    """What READY says of an end of this type."""
    said = _property(b"Socket-Type", socket_type.encode())
    return said + _property(_NEARBY, nearby) if nearby else said


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def write_head(message: bytearray, more: int = 0) -> bytearray:
    """``message``, whose first ``HEAD_ROOM`` bytes are free, with the head that its size calls for.

    ``more`` bytes of it will be sent after these.
    """
    size = len(message) - HEAD_ROOM + more
    if size < 256:
        message[7] = 0
        message[8] = size
        del message[:7]  # moves a pointer, not the bytes
    else:
        message[0] = _LONG
        message[1:HEAD_ROOM] = size.to_bytes(8, "big")
    return message


class Unpacker:
    """Bytes as they arrive to frames; one for each connection.

    Args:
        expected: the socket type that the other end must be of.
    """

    MECHANISM = b"NULL"

    __slots__ = (
        "_buffer",
        "_expected",
        "_filled",
        "_greeted",
        "_large_size",
        "_more",
        "_need",
        "_spare",
        "answers",
        "large",
        "nearby",
        "ready",
    )

    def __init__(self, expected: str) -> None:
        self._expected = expected
        self._buffer = bytearray()
        self._need = GREETING_SIZE  # bytes in the buffer without which there is nothing to be done
        self.large: bytearray | None = None
        """A large frame that has begun: what comes next belongs into :attr:`room`, until it is there."""
        self._large_size = 0
        self._filled = 0
        self._spare = bytearray()  # where the last one was
        self._greeted = False
        self._more = False  # in the middle of a message of several frames
        self.ready = False
        """Has the other end said READY?"""
        self.nearby = b""
        """How it says that it can be reached otherwise on its own host, if it does."""
        self.answers = bytearray()
        """What is to be sent because the protocol wants it; the caller takes it away."""

    @property
    def at_rest(self) -> bool:
        """Does nothing but a new message come next?"""
        return self.ready and not self._buffer and self.large is None and not self._more

    @property
    def room(self) -> memoryview:
        """Where the rest of a large frame is to be put; then call :meth:`filled`."""
        assert self.large is not None
        return memoryview(self.large)[self._filled : self._large_size]

    def filled(self, size: int) -> list[Frame | None]:
        """So many bytes were put into :attr:`room`. Gives messages as :meth:`feed` does.

        You must be done with a frame that this gives before you call anything here again.
        """
        assert self.large is not None
        self._filled += size
        if self._filled < self._large_size:
            return []
        frame, self.large = self.large, None
        if len(frame) <= MAX_SPARE:
            self._spare = frame
        return [memoryview(frame)[: self._large_size]]

    def feed(self, data: bytes) -> list[Frame | None]:
        """The messages that are complete with ``data``: each its one frame, or None if it had several.

        Raises:
            ProtocolError: if the other end does not speak ZMTP 3, or not to us. Then it is to be left.
        """
        if self.ready and data and not self._buffer and not self._more:  # one message, as nearly always
            size = len(data)
            if data[0] == 0 and size >= 2 and data[1] + 2 == size:
                return [data[2:]]
            if (
                data[0] == _LONG
                and size < LARGE
                and int.from_bytes(data[1:HEAD_ROOM], "big") + HEAD_ROOM == size
            ):
                return [data[HEAD_ROOM:]]
        self._buffer += data
        if len(self._buffer) < self._need:
            if not self._greeted:
                _check_signature(self._buffer)
            return []
        return self._unpack()

    def _unpack(self) -> list[Frame | None]:
        buffer, found, start = self._buffer, [], 0  # type: bytearray, list[Frame | None], int
        if not self._greeted:
            self._check_greeting(bytes(buffer[:GREETING_SIZE]))
            self._greeted, start = True, GREETING_SIZE
        while True:
            flags, size, begin = self._read_head(start)
            end = begin + size
            if begin == start or end > len(buffer):
                self._need = max(end - start, 2)
                if size >= LARGE and not flags & _COMMAND and not flags & _MORE and not self._more:
                    self._begin_large(buffer[begin:], size)
                    return found
                break
            if flags & _COMMAND:
                self._obey(bytes(buffer[begin:end]))
            elif not self.ready:
                raise ProtocolError("a message before READY")
            elif flags & _MORE:
                self._more = True
            elif self._more:
                self._more = False
                found.append(None)
            else:
                found.append(bytes(buffer[begin:end]))
            start = end
        del buffer[:start]
        return found

    def _begin_large(self, there: bytearray, size: int) -> None:
        if not self.ready:
            raise ProtocolError("a message before READY")
        self._buffer, self._need = bytearray(), 2
        if len(self._spare) >= size:
            self.large = self._spare
        else:
            self.large = bytearray(size)  # the kernel gives pages as they are used
        self._large_size, self._filled = size, len(there)
        self.large[: len(there)] = there

    def _read_head(self, start: int) -> tuple[int, int, int]:
        """Flags, size and where the body begins; that is ``start`` if the head is not all there."""
        buffer = self._buffer
        have = len(buffer) - start
        if have < 2:
            return 0, 0, start
        flags = buffer[start]
        if flags > (_COMMAND | _LONG) or (flags & _COMMAND and flags & _MORE):
            raise ProtocolError(f"a frame cannot begin with {flags:#04x}")
        if not flags & _LONG:
            return flags, buffer[start + 1], start + 2
        if have < HEAD_ROOM:
            return flags, HEAD_ROOM, start
        size = int.from_bytes(buffer[start + 1 : start + HEAD_ROOM], "big")
        if size > (MAX_COMMAND if flags & _COMMAND else MAX_HEADER):
            raise ProtocolError(f"a frame of {size} bytes (at most {MAX_HEADER})")
        return flags, size, start + HEAD_ROOM

    def _obey(self, said: bytes) -> None:
        name, data = split_command(said)
        if name == b"READY":
            self._take_properties(data)
        elif name == b"ERROR":
            raise ProtocolError(f"the other end refused: {data[1:].decode(errors='replace')}")
        elif name == b"PING":
            self.answers += command(b"PONG", data[2:18])

    def _take_properties(self, data: bytes) -> None:
        """What the other end says of itself is in order: it is ready."""
        at = 0
        while at < len(data):
            name_end = at + 1 + data[at]
            value_end = name_end + 4 + int.from_bytes(data[name_end : name_end + 4], "big")
            name, value = data[at + 1 : name_end].lower(), data[name_end + 4 : value_end]
            if name == b"socket-type" and value != self._expected.encode():
                said = value.decode(errors="replace")
                raise ProtocolError(f"the other end is a {said} socket (expected {self._expected})")
            if name == _NEARBY.lower():
                self.nearby = value
            at = value_end
        self.ready = True

    def _check_greeting(self, greeting: bytes) -> None:
        _check_signature(greeting)
        if greeting[10] < 3:
            raise ProtocolError(f"the other end speaks version {greeting[10]} of ZMTP (expected 3)")
        mechanism = greeting[12:32].rstrip(b"\0")
        if mechanism == self.MECHANISM:
            return
        if mechanism == b"CURVE":
            raise SecretError("the other end wants a secret, and there is none here")
        if mechanism == b"NULL":
            raise SecretError(
                "the other end has no secret, and there is one here: nothing is said in the clear"
            )
        raise ProtocolError(f"the other end wants the mechanism {mechanism!r} (expected {self.MECHANISM!r})")

    def pack(self, message: bytearray) -> bytearray:
        """A message to be sent, whose first ``HEAD_ROOM`` bytes are free, as the other end wants it."""
        return write_head(message)


def split_command(said: bytes) -> tuple[bytes, bytes]:
    """Name and data of a command.

    Raises:
        ProtocolError: if it has no name.
    """
    if not said or len(said) < 1 + said[0]:
        raise ProtocolError(f"a command that has no name: {said[:16]!r}")
    return said[1 : 1 + said[0]], said[1 + said[0] :]


def _check_signature(start: bytes | bytearray) -> None:
    """Complain as soon as it is certain: an HTTP client would wait for an answer before it says more."""
    if start[:1] != _SIGNATURE[:1] or (len(start) >= 10 and start[9] != _SIGNATURE[9]):
        raise ProtocolError(f"first bytes are {bytes(start[:16])!r}: the other end does not speak ZMTP")
