"""Copies large memory with two threads.

One core cannot use the whole memory bandwidth: on a machine with two, copying 64 MB takes 6.2 ms with both
and 8.5 ms with one. The other core is usually idle, as the peer waits for the message.
"""

from __future__ import annotations

import ctypes
import os
import threading
from queue import SimpleQueue
from typing import Any

from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.shared_memory.free_list import ALIGNMENT

MIN_SPLIT_BYTES = 8 << 20
"""Smaller copies use one thread: waking the second costs more than it saves."""

MAX_SPLIT_BYTES = 160 << 20
"""From this size on, the C library copies with non-temporal stores, which bypass the caches, if it gets the
copy in one piece. One thread is then faster than two (256 MB: 25 ms instead of 34)."""

Source = Any
"""A source for ``ctypes.memmove``: bytes, or a ctypes array on a buffer."""


class Copier:
    """Copies for the threads of one worker, with a helper thread named ``<name>-copier``.

    The helper participates in one copy at a time. A copy that starts meanwhile uses one thread.
    """

    def __init__(self, name: str) -> None:
        self._name = f"{name}-copier"
        self._lock = threading.Lock()  # held during a copy with the helper, and to start and stop the helper
        self._jobs: SimpleQueue[tuple[int, int, int, threading.Lock, list[bool]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = (os.cpu_count() or 1) < 2
        self.split_copies = 0

    def copy(self, destination: int, source: Source, size: int) -> None:
        """Copy ``size`` bytes of ``source`` to the address ``destination``, without the GIL."""
        # ctypes returns the address of bytes only by a cast, whose reference cycle would keep them for long.
        single = not MIN_SPLIT_BYTES <= size < MAX_SPLIT_BYTES or isinstance(source, bytes) or self._closed
        if single or not self._lock.acquire(blocking=False):
            ctypes.memmove(destination, source, size)
            return
        try:
            if self._start_helper():
                self._split_copy(destination, ctypes.addressof(source), size)
            else:
                ctypes.memmove(destination, source, size)
        finally:
            self._lock.release()

    def _split_copy(self, destination: int, source: int, size: int) -> None:
        half = size // 2 // ALIGNMENT * ALIGNMENT
        done = threading.Lock()  # one per copy: an interrupted copy must not complete the next
        done.acquire()
        ended: list[bool] = []
        self._jobs.put((destination + half, source + half, size - half, done, ended))
        try:
            ctypes.memmove(destination, source, half)
        finally:
            _wait(done, ended)  # even after an exception: the helper uses the memory until it is done
        self.split_copies += 1

    def _start_helper(self) -> bool:
        """Return whether the helper runs, and start it at the first call. The caller holds the lock."""
        if self._thread is None and not self._closed:
            thread = threading.Thread(target=self._help, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system's limit of threads is reached
                self._closed = True
                return False
            self._thread = thread
        return not self._closed

    def _help(self) -> None:
        while (job := self._jobs.get()) is not None:
            destination, source, size, done, ended = job
            ctypes.memmove(destination, source, size)
            ended.append(True)
            done.release()

    def close(self) -> None:
        """Stop the helper. Later copies use one thread. Idempotent."""
        with self._lock:
            self._closed = True
        self._jobs.put(None)

    def join(self, deadline: Deadline) -> list[str]:
        """Wait for the helper to end. Returns its name if it has not by ``deadline``."""
        thread = self._thread
        if thread is None:
            return []
        thread.join(deadline.timeout())
        return [self._name] if thread.is_alive() else []


def _wait(done: threading.Lock, ended: list[bool]) -> None:
    """Acquire ``done``, unless it has ``ended``. An exception of a signal handler is raised only then.

    One that comes as ``done`` has just been acquired must not make this wait for it again, for ever.
    """
    interrupted: BaseException | None = None
    while True:
        try:
            if not ended:
                done.acquire()
            break
        except BaseException as e:
            interrupted = e
    if interrupted is not None:
        raise interrupted
