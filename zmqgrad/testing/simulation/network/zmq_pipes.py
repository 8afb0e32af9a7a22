"""The queues between the sockets of libzmq and its I/O threads, and the rules by which they wake each other.

As in libzmq, a reader that has found its queue empty *sleeps*: only then does a writer send it a command. The
descriptor of a socket is readable while commands wait, not while messages do, and reading messages does not
always take commands: what a program may overlook there, it may overlook here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import zmq

Buffer = Any


class Frame:
    """As ``zmq.Frame``: a received part of a message."""

    def __init__(
        self, data: Buffer, more: bool, fd: int = -1, known: Mapping[str, str] | None = None
    ) -> None:
        self._data = data
        self.more = more
        self._fd, self._known = fd, known or {}

    @property
    def bytes(self) -> bytes:
        """As ``Frame.bytes``."""
        return bytes(self._data)

    @property
    def buffer(self) -> memoryview:
        """As ``Frame.buffer``."""
        return memoryview(self._data)

    def __len__(self) -> int:
        return memoryview(self._data).nbytes

    def get(self, option: int | str) -> int | str:
        """As ``Frame.get``."""
        if option == zmq.SRCFD and self._fd >= 0:
            return self._fd
        if option == zmq.MORE:
            return int(self.more)
        if isinstance(option, str) and option in self._known:
            return self._known[option]
        raise zmq.ZMQError(zmq.EINVAL)


Message = list[Frame]


class Owner(Protocol):
    """What has one end of a pipe."""

    def command(self, act: Callable[[], None]) -> None:
        """Makes the owner call ``act`` in its thread, once it takes commands."""

    def on_readable(self, end: End) -> None:
        """Messages may be read again."""

    def on_writable(self, end: End) -> None:
        """Messages may be written again."""

    def on_gone(self, end: End) -> None:
        """The other end has left, and everything was read."""


class _Half:
    """One direction."""

    def __init__(self, hwm: int) -> None:
        self.messages: deque[Message] = deque()
        self.hwm = hwm
        self.written = self.read = 0
        self.known_read = 0  # by the writer
        self.asleep = True  # the reader


class End:
    """One end of a pipe. All messages are whole."""

    def __init__(self, owner: Owner, inbound: _Half, outbound: _Half) -> None:
        self.owner = owner
        self.other: End
        self.identity = b""
        self.alive = True
        """Whether the other end has not left, as far as this one knows."""
        self._left = False  # this end
        self._in, self._out = inbound, outbound

    def has_room(self) -> bool:
        """Returns whether a message may be written."""
        out = self._out
        return self.alive and not (out.hwm and out.written - out.known_read >= out.hwm)

    def is_full(self) -> bool:
        """Returns whether the limit of messages is reached."""
        return bool(self._out.hwm) and self._out.written - self._out.known_read >= self._out.hwm

    def write(self, message: Message) -> None:
        """Writes a message, and wakes the reader if it sleeps."""
        out = self._out
        out.messages.append(message)
        out.written += 1
        if out.asleep:
            out.asleep = False
            other = self.other
            other.owner.command(other._on_written)

    def _on_written(self) -> None:
        if not self._left:
            self.owner.on_readable(self)

    def has_message(self) -> bool:
        """Returns whether a message can be read; else the reader sleeps from now on."""
        half = self._in
        if half.messages:
            return True
        half.asleep = True
        self._finish()
        return False

    def read(self) -> Message | None:
        """Returns the next message; None if there is none, and the reader sleeps from now on."""
        if not self.has_message():
            return None
        half = self._in
        message = half.messages.popleft()
        half.read += 1
        if half.hwm and half.read % ((half.hwm + 1) // 2) == 0:
            other, count = self.other, half.read
            other.owner.command(lambda: other._on_read(count))
        return message

    def _on_read(self, count: int) -> None:
        self._out.known_read = count
        if self.alive and not self._left:
            self.owner.on_writable(self)

    def clear_outbound(self) -> None:
        """Forgets what was written, and not been read."""
        self._out.messages.clear()
        self._out.known_read = self._out.written

    def leave(self, *, drop: bool = False) -> None:
        """Ends the pipe at this end. The other end may still read what was written, unless ``drop``."""
        if self._left:
            return
        self._left = True
        if drop:
            self._out.messages.clear()
        other = self.other
        other.owner.command(other._on_left)

    def _on_left(self) -> None:
        self.alive = False
        if not self._in.messages:
            self._finish()

    def _finish(self) -> None:
        if not self.alive and not self._left:
            self._left = True
            self.owner.on_gone(self)


def connect(one: Owner, two: Owner, to_two: int, to_one: int) -> tuple[End, End]:
    """Returns the ends of a new pipe.

    Args:
        to_two, to_one: how many messages it holds in each direction; 0: any number.
    """
    there, back = _Half(to_two), _Half(to_one)
    first, second = End(one, back, there), End(two, there, back)
    first.other, second.other = second, first
    return first, second
