"""Copies of large memory by two threads at a time.

One core cannot use all of the memory's bandwidth: on a machine with two, 64 MB took 6.2 ms by both instead
of 8.5. While the sender copies, its peer waits for the message, so the other core is free, as a rule.
"""

from __future__ import annotations

import ctypes
import os
import threading
from queue import SimpleQueue
from typing import Any

from zmqgrad.runtime.clock import Deadline

LARGE = 8 << 20
"""Bytes from which on two threads copy: with less, waking the second costs more than it brings."""

HUGE = 160 << 20
"""From so many bytes on the C library writes past the caches, if it is given them in one piece; one thread
that does takes less time than two that do not (256 MB: 25 to 34 ms)."""

ALIGNMENT = 64
"""The second half begins at a cache line."""

Source = Any
"""What ``ctypes.memmove`` copies from: bytes, or an array of ctypes on a buffer."""


class Copier:
    """Copies for the threads of one worker; the second thread is named ``<name>-copier``.

    It helps one copy at a time; who comes meanwhile copies alone.
    """

    def __init__(self, name: str) -> None:
        self._name = f"{name}-copier"
        self._lock = threading.Lock()  # held by whose copy is helped with, and to start and to end the thread
        self._jobs: SimpleQueue[tuple[int, int, int, threading.Lock] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = (os.cpu_count() or 1) < 2
        self.helped = 0

    def copy(self, to: int, source: Source, size: int) -> None:
        """Copy ``size`` bytes of ``source`` to address ``to``. The GIL is free meanwhile."""
        # Of bytes ctypes gives the address only by a cast, which makes a cycle that keeps them for long.
        alone = not LARGE <= size < HUGE or isinstance(source, bytes) or self._closed
        if alone or not self._lock.acquire(blocking=False):
            ctypes.memmove(to, source, size)
            return
        try:
            self._copy_together(to, source, size)
        finally:
            self._lock.release()

    def _copy_together(self, to: int, source: Source, size: int) -> None:
        if not self._has_helper():
            ctypes.memmove(to, source, size)
            return
        half = size // 2 // ALIGNMENT * ALIGNMENT
        address = ctypes.addressof(source)
        done = threading.Lock()  # one for each copy: an interrupted one must not answer for the next
        done.acquire()
        self._jobs.put((to + half, address + half, size - half, done))
        try:
            ctypes.memmove(to, address, half)
        finally:
            _wait(done)  # whatever happened: the memory must stay what it is until both have finished
        self.helped += 1

    def _has_helper(self) -> bool:
        """Called with the lock held."""
        if self._thread is None and not self._closed:
            thread = threading.Thread(target=self._help, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no more threads for us
                self._closed = True
                return False
            self._thread = thread
        return not self._closed

    def _help(self) -> None:
        while (job := self._jobs.get()) is not None:
            to, source, size, done = job
            ctypes.memmove(to, source, size)
            done.release()

    def close(self) -> None:
        """End the thread; who copies now copies alone. Idempotent."""
        with self._lock:
            self._closed = True
        self._jobs.put(None)

    def join(self, deadline: Deadline) -> list[str]:
        """Wait for the thread; gives its name if it has not ended by ``deadline``."""
        thread = self._thread
        if thread is None:
            return []
        thread.join(deadline.timeout())
        return [self._name] if thread.is_alive() else []


def _wait(done: threading.Lock) -> None:
    """Wait until ``done`` is released, whatever signals come; they take effect afterwards."""
    interrupted: BaseException | None = None
    while True:
        try:
            done.acquire()
            break
        except BaseException as e:  # Ctrl-C
            interrupted = e
    if interrupted is not None:
        raise interrupted
