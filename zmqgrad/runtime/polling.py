"""Polling of file descriptors: :data:`Poller` is epoll where there is one, and :class:`Wakeup` interrupts it.

Not :mod:`selectors`: its bookkeeping costs as much as a server's whole work for a small query.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import sys
from collections.abc import Callable
from functools import partial
from typing import NoReturn

READ, WRITE = 1, 4
"""Event masks, the same for epoll and poll."""

MAX_SECONDS = 3600.0
"""Longest timeout of one poll: both epoll and poll count milliseconds in 31 bits."""

_MAX_MILLISECONDS = 1 << 30
_ONE = (1).to_bytes(8, "little")

if hasattr(os, "eventfd"):
    _write_with_gil = ctypes.PyDLL(None).eventfd_write
    _write_with_gil.argtypes = (ctypes.c_int, ctypes.c_uint64)


def to_milliseconds(seconds: float | None) -> int:
    """Returns the timeout for ``select.poll``: rounded up, at least 1 ms; negative for no limit."""
    if seconds is None:
        return -1
    return min(_MAX_MILLISECONDS, max(1, math.ceil(seconds * 1000))) if seconds < 1e6 else _MAX_MILLISECONDS


class _Poll:
    """Wraps ``select.poll`` in the interface of ``select.epoll``."""

    def __init__(self) -> None:
        poller = select.poll()
        self.register, self.modify, self.unregister = poller.register, poller.modify, poller.unregister
        self._poll = poller.poll

    def poll(self, seconds: float | None, most: int) -> list[tuple[int, int]]:
        """Returns ready descriptors with their events. Waits up to ``seconds`` (None: no limit)."""
        return self._poll(None if seconds is None else seconds * 1000)

    def close(self) -> None:
        """Does nothing: poll has no descriptor of its own."""


if sys.platform == "linux":
    Poller = select.epoll
else:
    Poller = _Poll


class Wakeup:
    """Wakes a thread that polls ``fd``, which is readable from :meth:`set` to :meth:`clear`.

    No lock, so that finalizers may call :meth:`set`. The descriptor is closed with the last reference, as
    another thread may be about to write to it, and its number could be reused.
    """

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self.fd = self._write = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self.fd, self._write = os.pipe()
            os.set_blocking(self.fd, False)
            os.set_blocking(self._write, False)

    def set(self) -> None:
        """Makes the descriptor readable. From any thread, and from finalizers."""
        try:
            os.write(self._write, _ONE)
        except BlockingIOError:
            return  # the pipe is full, hence readable

    def setter(self) -> Callable[[], object]:
        """Returns a function that does as :meth:`set`, and keeps the descriptor open; on Linux, one of C.

        For finalizers, which run in the middle of long calls of C: the Ctrl-C that has come meanwhile is
        raised by the next line of Python, and would be lost if that were one of a finalizer. No other thread
        runs before the finalizer ends.
        """
        if not hasattr(os, "eventfd"):
            return self.set
        write = partial(_write_with_gil, self._write, 1)
        vars(write)["wakeup"] = self
        return write

    def clear(self) -> None:
        """Makes the descriptor unreadable."""
        try:
            while len(os.read(self.fd, 4096)) == 4096:
                pass
        except BlockingIOError:
            return  # another thread has cleared it

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Wakeup cannot be copied: its copy would close the descriptor, too")

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # `close` is bound as a default: while the interpreter ends, globals of modules become None.
        for fd in {getattr(self, "fd", -1), getattr(self, "_write", -1)} - {-1}:
            try:
                close(fd)
            except OSError:
                return  # the program has closed all file descriptors


class _Spent(Wakeup):
    """Takes the place of a wake-up whose poller has ended: its descriptor is closed with the last user."""

    def __init__(self) -> None:
        self.fd = -1

    def set(self) -> None:
        """Does nothing."""

    def clear(self) -> None:
        """Does nothing."""


SPENT: Wakeup = _Spent()
"""Wakes nothing. Assigning it in place of a wake-up closes that one, once no thread uses it any more."""
