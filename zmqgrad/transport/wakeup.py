"""Wakes a thread that polls file descriptors, from any other thread."""

from __future__ import annotations

import os
import threading


class Wakeup:
    """A descriptor, ``number``, that is readable from :meth:`set` until :meth:`clear`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _closed, so that no descriptor of somebody else is written to
        self._closed = False
        if hasattr(os, "eventfd"):
            self.number = self._write = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self.number, self._write = os.pipe()
            os.set_blocking(self.number, False)
            os.set_blocking(self._write, False)

    def set(self) -> None:
        """Make it readable. From any thread; without effect after :meth:`close`."""
        with self._lock:
            if not self._closed:
                try:
                    os.write(self._write, (1).to_bytes(8, "little"))
                except BlockingIOError:
                    return  # a pipe that is full: it is readable as it is

    def clear(self) -> None:
        """Make it unreadable."""
        try:
            while len(os.read(self.number, 4096)) == 4096:
                pass
        except BlockingIOError:
            return  # another thread has cleared it

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.number)
                if self._write != self.number:
                    os.close(self._write)
