"""The stand-in for module ``select``: poll, and epoll, which may be nested."""

from __future__ import annotations

import errno
import select as real
from typing import TYPE_CHECKING, Any

from zmqgrad.testing.simulation.network.kernel import ERR, HUP, IN, Description, Process, failure

if TYPE_CHECKING:
    from zmqgrad.testing.simulation.network.network import Network

_ALWAYS = ERR | HUP
_NVAL = real.POLLNVAL


def _deadline(process: Process, seconds: float | None) -> float | None:
    return None if seconds is None or seconds < 0 else process.network.scheduler.now() + seconds


class Poll:
    """As ``select.poll()``."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._masks: dict[int, int] = {}

    def register(self, fd: Any, eventmask: int = IN | real.POLLPRI | real.POLLOUT) -> None:
        """As ``poll.register``."""
        self._masks[_number(fd)] = int(eventmask)

    def modify(self, fd: Any, eventmask: int) -> None:
        """As ``poll.modify``."""
        if _number(fd) not in self._masks:
            raise failure(errno.ENOENT)
        self._masks[_number(fd)] = int(eventmask)

    def unregister(self, fd: Any) -> None:
        """As ``poll.unregister``."""
        del self._masks[_number(fd)]

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        """As ``poll.poll``."""
        scheduler = self._process.network.scheduler
        scheduler.point("poll")
        masks = dict(self._masks)  # a poll under way does not see later changes
        files = {fd: self._process.table.get(fd) for fd in masks}
        watched = [file for file in files.values() if file is not None]

        def ready() -> list[tuple[int, int]]:
            return [(fd, seen) for fd, mask in masks.items() if (seen := _seen(files[fd], mask))]

        deadline = _deadline(self._process, None if timeout is None else timeout / 1000)
        while not (found := ready()) and timeout != 0:  # another thread may have taken what was there
            if not scheduler.wait_until(lambda: bool(ready()), deadline, *watched):
                break
        return found


def _seen(description: Description | None, mask: int) -> int:
    return _NVAL if description is None else description.events() & (mask | _ALWAYS)


def _number(fd: Any) -> int:
    return fd if isinstance(fd, int) else int(fd.fileno())


class _Entry:
    """What an epoll watches of a descriptor."""

    def __init__(self, epoll: EpollFile, number: int, description: Description, mask: int) -> None:
        self.number = number
        self.description = description
        self.mask = mask
        self.armed = True
        self._epoll = epoll
        description.watchers[self] = self.changed

    def changed(self) -> None:
        """Its events may have changed."""
        self._epoll.ready[self] = None
        self._epoll.changed()

    def forget(self) -> None:
        """The epoll does not watch it any more."""
        del self.description.watchers[self]
        self._epoll.ready.pop(self, None)

    def seen(self) -> int:
        """Returns its events, unless it has been disarmed, or its descriptors are closed."""
        if not self.armed or not self.description.references:
            return 0
        return self.description.events() & (self.mask | _ALWAYS)


class EpollFile(Description):
    """What the descriptor of an epoll refers to."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.entries: dict[int, _Entry] = {}
        self.ready: dict[_Entry, None] = {}
        """Those that may have events, in the order of the kernel's own list. All others have none."""

    def events(self) -> int:
        """As :class:`Description`."""
        while self.ready:
            entry = next(iter(self.ready))
            if entry.seen():
                return IN
            del self.ready[entry]
        return 0

    def released(self) -> None:
        """As :class:`Description`."""
        for entry in self.entries.values():
            entry.forget()
        self.entries.clear()


class Epoll:
    """As ``select.epoll()``, level-triggered, with EPOLLONESHOT."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._file = EpollFile(process.network)
        self._fd = process.install(self._file)

    @property
    def closed(self) -> bool:
        """As ``epoll.closed``."""
        return self._fd < 0

    def fileno(self) -> int:
        """As ``epoll.fileno``."""
        self._check()
        return self._fd

    def close(self) -> None:
        """As ``epoll.close``."""
        if self._fd >= 0:
            self._process.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Epoll:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check(self) -> None:
        if self._fd < 0:
            raise ValueError("I/O operation on closed epoll object")

    def _find(self, fd: Any) -> tuple[int, _Entry | None]:
        self._check()
        number = _number(fd)
        entry, known = self._file.entries.get(number), self._process.get(number)
        if entry is not None and entry.description is not known:  # that of a descriptor closed since
            self._file.entries.pop(number).forget()
            entry = None
        return number, entry

    def register(self, fd: Any, eventmask: int = IN | real.POLLPRI | real.POLLOUT) -> None:
        """As ``epoll.register``."""
        number, entry = self._find(fd)
        if entry is not None:
            raise failure(errno.EEXIST)
        entry = _Entry(self._file, number, self._process.get(number), int(eventmask))
        self._file.entries[number] = entry
        entry.changed()

    def modify(self, fd: Any, eventmask: int) -> None:
        """As ``epoll.modify``."""
        _, entry = self._find(fd)
        if entry is None:
            raise failure(errno.ENOENT)
        entry.mask, entry.armed = int(eventmask), True
        entry.changed()

    def unregister(self, fd: Any) -> None:
        """As ``epoll.unregister``."""
        number, entry = self._find(fd)
        if entry is None:
            raise failure(errno.ENOENT)
        self._file.entries.pop(number).forget()

    def poll(self, timeout: float | None = None, maxevents: int = -1) -> list[tuple[int, int]]:
        """As ``epoll.poll``."""
        self._check()
        scheduler = self._process.network.scheduler
        scheduler.point("epoll")
        self._check()  # another thread may have closed it
        file, deadline = self._file, _deadline(self._process, timeout)
        while not file.events() and timeout != 0:  # another thread may have taken what was there
            if not scheduler.wait_until(lambda: bool(file.events()), deadline, file):
                break
        found: list[tuple[int, int]] = []
        for entry in list(file.ready):
            if len(found) == maxevents:
                break
            del file.ready[entry]
            if not (seen := entry.seen()):
                continue
            found.append((entry.number, seen))
            if entry.mask & real.EPOLLONESHOT:
                entry.armed = False
            else:
                file.ready[entry] = None  # behind the others for the next call
        return found


class SelectModule:
    """The stand-in for module ``select`` in one process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def poll(self) -> Poll:
        """As ``select.poll``."""
        return Poll(self._process)

    def epoll(self, sizehint: int = -1, flags: int = 0) -> Epoll:
        """As ``select.epoll``."""
        return Epoll(self._process)

    def select(
        self, readers: list[Any], writers: list[Any], failing: list[Any], timeout: float | None = None
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """As ``select.select``; nothing is ever exceptional."""
        poller = Poll(self._process)
        masks: dict[int, int] = {}
        for wanted, mask in ((readers, IN), (writers, real.POLLOUT)):
            for one in wanted:
                masks[_number(one)] = masks.get(_number(one), 0) | mask
        for fd, mask in masks.items():
            poller.register(fd, mask)
        seen = dict(poller.poll(None if timeout is None else timeout * 1000))
        return (
            [one for one in readers if seen.get(_number(one), 0) & (IN | _ALWAYS)],
            [one for one in writers if seen.get(_number(one), 0) & (real.POLLOUT | ERR)],
            [],
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("POLL", "EPOLL")) or name == "error":
            return getattr(real, name)
        raise AttributeError(f"module 'select' of the simulation has no {name!r}")
