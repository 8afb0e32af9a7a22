"""Processes, their file descriptors, and what those refer to, as in the kernel of Linux."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from zmqgrad.testing.simulation.network.scheduler import State

if TYPE_CHECKING:
    from zmqgrad.testing.simulation.network.network import Network

FIRST_FD = 1 << 20
"""Lower descriptors are those of the real process, such as of shared memory."""

IN, OUT, ERR, HUP = select.POLLIN, select.POLLOUT, select.POLLERR, select.POLLHUP
RDHUP = 0x2000

PIPE_BYTES = 65536
EVENTFD_MAX = (1 << 64) - 2

_inodes = count(1000)


def failure(number: int, text: str = "") -> OSError:
    """Returns the exception of a system call that fails with errno ``number``."""
    return OSError(number, text or os.strerror(number))


class Description(State):
    """An open file description: what descriptors refer to. It ends with the last of them."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        self.references = 0
        self.blocking = True
        self.inode = next(_inodes)
        self.on_change: Callable[[], None] | None = None
        """Called when :meth:`events` may have changed, by whoever has changed it: must only register that."""

    def events(self) -> int:
        """Returns the events that ``poll`` reports."""
        raise NotImplementedError

    def released(self) -> None:
        """Called when the last descriptor has been closed."""

    def changed(self) -> None:
        """Tells those who wait."""
        self.network.scheduler.notify(self)
        if self.on_change is not None:
            self.on_change()

    def block(self, ready: Callable[[], bool], blocking: bool, deadline: float | None = None) -> bool:
        """Waits until ``ready()``, which depends on this, if it may block. Returns ``ready()``."""
        while not ready():  # another thread may have taken what was there
            if not blocking or not self.network.scheduler.wait_until(ready, deadline, self):
                return ready()
        return True


class EventFd(Description):
    """A counter (``eventfd(2)``)."""

    def __init__(self, network: Network, value: int) -> None:
        super().__init__(network)
        self.value = value

    def events(self) -> int:
        """As :class:`Description`."""
        return (IN if self.value else 0) | (OUT if self.value < EVENTFD_MAX else 0)

    def read(self, size: int) -> bytes:
        """Returns the value, and resets it."""
        if size < 8:
            raise failure(errno.EINVAL)
        if not self.block(lambda: self.value > 0, self.blocking):
            raise failure(errno.EAGAIN)
        value, self.value = self.value, 0
        self.changed()
        return value.to_bytes(8, "little")

    def write(self, data: bytes) -> int:
        """Adds to the value."""
        if len(data) != 8:
            raise failure(errno.EINVAL)
        value = int.from_bytes(data, "little")
        if not self.block(lambda: self.value + value <= EVENTFD_MAX, self.blocking):
            raise failure(errno.EAGAIN)
        self.value += value
        self.changed()
        return 8


class PipeEnd(Description):
    """One end of a pipe."""

    def __init__(self, network: Network, data: bytearray, writes: bool) -> None:
        super().__init__(network)
        self.data = data
        self.writes = writes
        self.other: PipeEnd | None = None

    def events(self) -> int:
        """As :class:`Description`."""
        if self.writes:
            return (OUT if len(self.data) < PIPE_BYTES else 0) | (ERR if self.other is None else 0)
        return (IN if self.data else 0) | (HUP if self.other is None else 0)

    def read(self, size: int) -> bytes:
        """Returns up to ``size`` bytes; none at the end."""
        if self.writes:
            raise failure(errno.EBADF)
        if not self.block(lambda: bool(self.data) or self.other is None, self.blocking):
            raise failure(errno.EAGAIN)
        found = bytes(self.data[:size])
        del self.data[:size]
        if self.other is not None:
            self.other.changed()
        return found

    def write(self, data: bytes) -> int:
        """Writes what there is room for."""
        if not self.writes:
            raise failure(errno.EBADF)
        if self.other is not None and not self.block(
            lambda: len(self.data) < PIPE_BYTES or self.other is None, self.blocking
        ):
            raise failure(errno.EAGAIN)
        if self.other is None:
            raise failure(errno.EPIPE)
        written = data[: PIPE_BYTES - len(self.data)]
        self.data += written
        self.other.changed()
        return len(written)

    def released(self) -> None:
        """As :class:`Description`."""
        other, self.other = self.other, None
        if other is not None:
            other.other = None
            other.changed()


class RealFd(NamedTuple):
    """A descriptor of the real process on its way from one simulated process to another."""

    fd: int


class Stat(NamedTuple):
    """The part of ``os.stat_result`` that concerns sockets."""

    st_ino: int
    st_mode: int = 0o140777


class Process:
    """A process of the simulation: its descriptors, and the modules by which it reaches the network.

    Attributes:
        alive: whether :meth:`kill` was not called.
        frozen: whether :meth:`freeze` was called.
    """

    def __init__(self, network: Network, host: str, pid: int) -> None:
        self.network = network
        self.host = host
        self.pid = pid
        self.alive = True
        self.frozen = False
        self.table: dict[int, Description] = {}
        self.on_end: list[Callable[[], None]] = []
        """What else ends with the process."""
        self._deferred: list[Callable[[], None]] = []
        self.os_functions = OsFunctions(self).all()
        """To take the place of those of ``os``, by name."""
        self.modules: dict[str, Any] = network.make_modules(self)
        """The stand-ins for modules, by name."""

    # ---- descriptors ------------------------------------------------------------------------------------

    def install(self, description: Description, fd: int | None = None) -> int:
        """Returns a new descriptor of ``description``: the lowest free one, as programs reuse them."""
        if fd is None:
            fd = next(n for n in count(FIRST_FD) if n not in self.table)
        self.table[fd] = description
        description.references += 1
        return fd

    def get(self, fd: int) -> Description:
        """Returns what ``fd`` refers to."""
        try:
            return self.table[fd]
        except KeyError:
            raise failure(errno.EBADF) from None

    def close(self, fd: int) -> None:
        """Closes ``fd``."""
        description = self.get(fd)
        del self.table[fd]
        self.drop(description)

    def drop(self, description: Description) -> None:
        """Gives up one reference."""
        description.references -= 1
        if not description.references:
            description.released()
        self.network.scheduler.notify(description)

    # ---- what happens to it -----------------------------------------------------------------------------

    def kill(self) -> None:
        """Ends the process, whose threads must not run again: its descriptors are closed. Idempotent."""
        if not self.alive:
            return
        self.alive = False
        self._deferred.clear()
        for end in self.on_end:
            end()
        for fd in list(self.table):
            self.close(fd)

    def freeze(self) -> None:
        """Stops the I/O of libzmq in this process; that of the kernel goes on."""
        self.frozen = True

    def thaw(self) -> None:
        """Undoes :meth:`freeze`."""
        self.frozen = False
        deferred, self._deferred = self._deferred, []
        for action in deferred:
            self.soon(action)

    def soon(self, action: Callable[[], None], seconds: float = 0.0) -> None:
        """Calls ``action`` in a thread of its own of this process, which libzmq has, unless it ends."""
        scheduler = self.network.scheduler

        def act() -> None:
            if self.frozen:
                self._deferred.append(action)
            elif self.alive:
                action()

        scheduler.call_at(scheduler.now() + seconds, act)


class OsFunctions:
    """The functions of :mod:`os` that know the descriptors of a process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def all(self) -> dict[str, Callable[..., Any]]:
        """Returns them by name."""
        names = "eventfd eventfd_read eventfd_write pipe read write close dup dup2 fstat set_blocking"
        return {name: getattr(self, name) for name in names.split()}

    def _point(self, what: str) -> None:
        self._process.network.scheduler.point(what)

    def eventfd(self, initval: int, flags: int = os.EFD_CLOEXEC) -> int:
        """As ``os.eventfd``."""
        opened = EventFd(self._process.network, initval)
        opened.blocking = not flags & os.EFD_NONBLOCK
        return self._process.install(opened)

    def eventfd_read(self, fd: int) -> int:
        """As ``os.eventfd_read``."""
        return int.from_bytes(self.read(fd, 8), "little")

    def eventfd_write(self, fd: int, value: int) -> None:
        """As ``os.eventfd_write``."""
        self.write(fd, value.to_bytes(8, "little"))

    def pipe(self) -> tuple[int, int]:
        """As ``os.pipe``."""
        data = bytearray()
        reads, writes = (PipeEnd(self._process.network, data, w) for w in (False, True))
        reads.other, writes.other = writes, reads
        return self._process.install(reads), self._process.install(writes)

    def read(self, fd: int, size: int) -> bytes:
        """As ``os.read``."""
        if fd < FIRST_FD:
            return os.read(fd, size)
        self._point("read")
        read: Callable[[int], bytes] | None = getattr(self._process.get(fd), "read", None)
        if read is None:
            raise failure(errno.EINVAL)
        return read(size)

    def write(self, fd: int, data: bytes) -> int:
        """As ``os.write``."""
        if fd < FIRST_FD:
            return os.write(fd, data)
        self._point("write")
        write: Callable[[bytes], int] | None = getattr(self._process.get(fd), "write", None)
        if write is None:
            raise failure(errno.EINVAL)
        return write(bytes(data))

    def close(self, fd: int) -> None:
        """As ``os.close``."""
        if fd < FIRST_FD:
            os.close(fd)
            return
        self._process.close(fd)

    def dup(self, fd: int) -> int:
        """As ``os.dup``."""
        return os.dup(fd) if fd < FIRST_FD else self._process.install(self._process.get(fd))

    def dup2(self, fd: int, fd2: int, inheritable: bool = True) -> int:
        """As ``os.dup2``."""
        if fd < FIRST_FD:
            return os.dup2(fd, fd2, inheritable)
        description = self._process.get(fd)
        if fd != fd2:
            before = self._process.table.get(fd2)
            self._process.install(description, fd2)
            if before is not None:
                self._process.drop(before)
        return fd2

    def fstat(self, fd: int) -> os.stat_result | Stat:
        """As ``os.fstat``."""
        return os.fstat(fd) if fd < FIRST_FD else Stat(self._process.get(fd).inode)

    def set_blocking(self, fd: int, blocking: bool) -> None:
        """As ``os.set_blocking``."""
        if fd < FIRST_FD:
            os.set_blocking(fd, blocking)
        else:
            self._process.get(fd).blocking = blocking
